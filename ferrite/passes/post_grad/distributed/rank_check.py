"""Ranks that would not send each other the same are told so, before they wait for each other.

Each rank leaves a note of what it will send in the store of the job; whoever finds another note raises an error that
names both ranks, the graph and the node. No rank waits for another to leave one: a program from the cache is compared
in the same way, and where one rank alone compiles, there is nothing to compare. How often a rank has compiled something
is in that store as well: a process may be part of several jobs, one after the other.
"""

from __future__ import annotations

import json

import torch

from ferrite.capture import torch_runtime
from ferrite.errors import ModelLine, UserError, layout, warn_user
from ferrite.options import Options
from ferrite.passes.post_grad.distributed.report import CollectiveRecord, CommunicationRecord, InProductRecord
from ferrite.passes.post_grad.distributed.settings import SpmdCheck, chosen


def check_ranks(record: CommunicationRecord, direction: str, line: ModelLine | None, options: Options) -> None:
    """Compare the collectives of a graph with those of the first rank that compiled it, group by group."""
    settings = chosen(options, "spmd_check", SpmdCheck) or SpmdCheck()
    store = torch_runtime.store_of_job()
    if store is None:
        return
    groups: dict[str, list[CollectiveRecord | InProductRecord]] = {}
    for each in record.collectives:
        if each.kind != "send":  # what is sent from one to another is no collective
            groups.setdefault(each.group, []).append(each)
    for product in record.in_products:
        groups.setdefault(product.group, []).append(product)
    rank = torch.distributed.get_rank()
    for group, members in groups.items():
        subject = f"{group}/{direction}/{line.place if line is not None else ''}"
        places = f"{group}/{direction}"
        number = store.add(f"ferrite/check/{subject}/compiled on {rank}", 1)
        place_number = store.add(f"ferrite/check/{places}/graphs of {rank}", int(number == 1))
        here = [[each.signature, each.node, str(each.line or "")] for each in members]
        note = json.dumps([rank, here])
        first = json.loads(store.compare_set(f"ferrite/check/{subject}/{number}", "", note).decode())
        if signatures(first[1]) != signatures(here):
            differ(rank, here, first, group, f"{direction} graph, {line}", settings, is_first=number == 1)
        elif number == 1 and direction != "backward":  # those are compiled in any order
            # another line, and so perhaps another program: none before the first of a group is only compiled elsewhere
            other = json.loads(store.compare_set(f"ferrite/check/{places}/graph {place_number}", "", note).decode())
            if signatures(other[1]) != signatures(here):
                differ(rank, here, other, group, f"{direction} graph, {line}", settings, is_first=place_number == 1)


def signatures(members: list[list[str]]) -> list[str]:
    return [each[0] for each in members]


def differ(
    rank: int,
    here: list[list[str]],
    first: list[object],
    group: str,
    graph: str,
    settings: SpmdCheck,
    is_first: bool,
) -> None:
    other, there = first
    assert isinstance(there, list)
    place = next(
        (at for at, (mine, theirs) in enumerate(zip(here, there, strict=False)) if mine[0] != theirs[0]),
        min(len(here), len(there)),
    )

    def described(members: list[list[str]]) -> str:
        return "nothing more" if place >= len(members) else "  ".join(filter(None, members[place]))

    headline = f"rank {rank} would not send the same as rank {other}"
    facts = {
        "graph": graph,
        "process group": group,
        "collective": f"number {place + 1} of {len(here)} here, of {len(there)} there",
        f"rank {rank}": described(here),
        f"rank {other}": described(there),
        "what to do": "compile the same model with the same options on every rank",
    }
    if settings.on_mismatch == "raise" and is_first:
        raise UserError(headline, facts)
    warn_user(layout(f"ferrite: {headline}", facts))
