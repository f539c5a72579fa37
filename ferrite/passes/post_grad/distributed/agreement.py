"""What ranks decide about collectives, they decide alike: else one would send what another does not expect, for ever.

Every decision follows from what all ranks know: the collectives of the graph, the options, the network. But one rank
may compile for another batch than the others. So the first rank that decides about some collectives leaves a note in
the store of the job, and whoever has the same collectives, at liberty to begin and to be waited for in the same order,
and the same options, does what it says. Nobody waits for anybody: a rank that finds its program in the cache, or
compiles alone, is not missed.

But for one question, which is asked only where a pass was asked for that depends on it: whether ranks share memory. One
that could not open the memory of another would begin a collective while the others wait for copies. So each says
whether it can, once for each group, and waits until the others have.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from ferrite.capture import torch_runtime
from ferrite.options import Options, plain
from ferrite.passes.post_grad.distributed.exchanges import Exchange

# In the `meta` of a module: the decisions that its graph was rewritten by, each under what it is about.
DECISIONS = "decisions about collectives"
Decision = list[Any]  # of numbers, and of lists of numbers
# Seconds to wait for what others say of their memory. A rank that does not ask in this time has not asked for copies.
PATIENCE_SECONDS = 60.0
YES, NO = "yes", "no"


def signature(exchange: Exchange) -> str:
    """What must be equal on every rank. Parts of uneven exchanges differ."""
    types = " ".join(map(str, exchange.dtypes))
    size = "" if exchange.kind in ("all_to_all", "send") else str(exchange.size)
    how = "copies" if exchange.is_copies else ""
    return " ".join([*filter(None, [how]), exchange.kind, exchange.reduce_op, types, size, str(exchange.shape.size)])


def decide(
    gm: torch.fx.GraphModule,
    what: str,
    options: Options,
    exchanges: Sequence[Exchange],
    freedom: str,
    make: Callable[[], Decision],
) -> Decision:
    """A decision about the collectives of a graph: the first rank's that made it, or else one's own. `freedom`: what is
    possible in this graph, and so in every other that has the same: what was decided for one is right for it."""
    groups: dict[str, int] = {}
    numbered = [f"{groups.setdefault(each.group, len(groups))} {signature(each)}" for each in exchanges]
    about = "\n".join([what, repr(plain(options.distributed)), freedom, *numbered])
    subject = hashlib.sha256(about.encode()).hexdigest()[:32]
    names = "/".join(groups)  # of groups, which only their members share
    key = f"{names}/{subject}"
    decided: MutableMapping[str, str] = gm.meta.setdefault(DECISIONS, {})
    known = noted(key)
    text = known if known is not None else agreed(key, json.dumps(make()))
    decided[key] = text
    found: Decision = json.loads(text)
    return found


def noted(key: str) -> str | None:
    store = torch_runtime.store_of_job()
    name = f"ferrite/{key}"
    if store is None or not store.check([name]):
        return None
    return str(store.get(name).decode())


def agreed(key: str, text: str) -> str:
    """The note under a key, which is this one if nobody was there before."""
    store = torch_runtime.store_of_job()
    return text if store is None else str(store.compare_set(f"ferrite/{key}", "", text).decode())


def all_agreed(decisions: Mapping[str, str]) -> bool:
    """Whether the decisions of a program from the cache are those of the other ranks, as far as these have any."""
    return all(agreed(key, text) == text for key, text in decisions.items())


# --- memory that ranks share ------------------------------------------------------------------------------------------


def all_share_memory(group: str) -> bool:
    """Whether every rank of a group reads the memory of the others: it was asked for on each of them, and can be had.
    All ranks of a job get the same answer."""
    asked = torch_runtime.has_symmetric_memory(group)
    store, ranks = torch_runtime.store_of_job(), torch_runtime.ranks_of_group(group)
    if store is None or ranks is None or len(ranks) < 2:
        return asked
    about = f"memory of {'/'.join(map(str, ranks))}"
    if not all_say(store, ranks, f"{about}, asked for", asked):
        return False
    return all_say(store, ranks, about, torch_runtime.opens_symmetric_memory(group))


def all_say(store: Any, ranks: Sequence[int], key: str, here: bool) -> bool:
    """Whether all of some ranks say yes to something; no, if one says nothing for too long. `here`: what this one says.
    Whoever is first to know the answer leaves it, for those who may have waited longer or shorter."""
    known = noted(key)
    if known is not None:
        return known == YES
    votes = {rank: f"ferrite/{key}/{rank}" for rank in ranks}
    store.set(votes[torch.distributed.get_rank()], YES if here else NO)
    return agreed(key, YES if here and others_say(store, list(votes.values())) else NO) == YES


def others_say(store: Any, votes: list[str]) -> bool:
    try:
        store.wait(votes, datetime.timedelta(seconds=PATIENCE_SECONDS))
    except RuntimeError:  # in time
        return False
    return all(store.get(vote).decode() == YES for vote in votes)
