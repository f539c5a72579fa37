"""Stores where memory says: every point is a lane of a flat kernel, and what meets is combined atomically."""

from __future__ import annotations

from dataclasses import replace

import torch

from ferrite.errors import Refusal
from ferrite.ir import data_of
from ferrite.ir.kernel import Loop, Statement, Store, When
from ferrite.ir.program import Compute, Operation
from ferrite.ir.program import Store as ProgramStore
from ferrite.schedule.fusion.groups import Group
from ferrite.schedule.loops.axes import Body

# What a GPU combines in one step, by how.
ATOMIC_TYPES = {
    "add": (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64),
    "amax": (torch.int32, torch.int64),
    "amin": (torch.int32, torch.int64),
}


def is_scatter(group: Group) -> bool:
    """Whether a group is one operation whose points may meet in memory, in any order."""
    if len(group.members) != 1:
        return False
    (member,) = group.members
    operation = member.operation
    if not isinstance(operation, Compute) or all(item in member.free for item in member.axes):
        return False
    return all(any_order(store) for store in operation.stores)


def any_order(store: ProgramStore) -> bool:
    """Whether points that meet may come in any order: they are combined, or memory says where each goes. Which of
    several stays is not said by torch either."""
    if store.mode != "set":
        return store.value.dtype in ATOMIC_TYPES.get(store.mode, ())
    return any(map(data_of, store.coordinates))


def atomic(body: Body) -> Body:
    """All stores that combine, atomic."""

    def made(statement: Statement) -> Statement:
        match statement:
            case Store() if statement.mode != "set":
                return replace(statement, atomic=True)
            case Loop() | When():
                return replace(statement, body=atomic(statement.body))
        return statement

    return tuple(map(made, body))


def refused(operation: Operation) -> Refusal | None:
    """Why an operation that stores where memory says is no kernel."""
    if not isinstance(operation, Compute):
        return None
    for store in operation.stores:
        if not any(map(data_of, store.coordinates)):
            continue
        if store.mode != "set" and store.value.dtype not in ATOMIC_TYPES.get(store.mode, ()):
            return Refusal(f"{store.mode} of {store.value.dtype} is not atomic")
        if torch.are_deterministic_algorithms_enabled() and (
            store.mode == "set" or store.value.dtype.is_floating_point
        ):
            return Refusal("torch is to be deterministic, and threads would meet in any order")
    return None
