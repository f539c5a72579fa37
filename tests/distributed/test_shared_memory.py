"""Copies in memory that ranks share are made by all ranks of a group, or by none: one that cannot open the memory of
another is no reason to wait for ever."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ferrite
from ferrite.capture import torch_runtime
from ferrite.options import resolve
from ferrite.passes.post_grad.distributed import agreement
from ferrite.passes.post_grad.distributed.settings import communication_identity
from tests.compare import compile_strict, reset
from tests.distributed.programs import gathered, passed, scattered
from tests.distributed.test_passes_on_ranks import shared_memory
from tests.graphs import traced_with_fakes
from tests.ranks import assert_none_failed, imagined_ranks, outcomes

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
RANKS = 2
COPIES: dict[str, Any] = {"low_contention": {"min_mb": 0, "ignore_overlap": True}}


def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gathered(x, ranks=RANKS) * 2, scattered(y, ranks=RANKS).sin()


def copied(rank: int, **more: Any) -> int:
    """How many collectives of the program are copies; its results are eager's."""
    torch.manual_seed(rank)
    args = torch.randn(4, 6), torch.randn(4, 6)
    wanted = program(*args)
    reset()
    with torch.no_grad():
        found = compile_strict(program, options={"distributed": COPIES, **more})(*args)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    return ferrite.last_compile().graphs[-1].source.count("= op_symm_mem__low_contention")


def on_both(rank: int) -> int:
    with shared_memory():
        return copied(rank)


def asked_for_on_one(rank: int) -> int:
    if rank == 1:
        return copied(rank)
    with shared_memory():
        return copied(rank)


def cannot_be_opened_on_one(rank: int) -> int:
    with shared_memory(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_runtime, "opens_symmetric_memory", lambda _group: rank == 0)
        return copied(rank)


def one_does_not_ask(rank: int) -> int:
    """It has no copies in its options, and so says nothing of its memory."""
    with shared_memory(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "PATIENCE_SECONDS", 1.0)
        begin = time.monotonic()
        found = copied(rank, **({"distributed": "off"} if rank else {}))
        assert time.monotonic() - begin < 30
        return found


def fails_while_it_runs(rank: int) -> str:
    """What fails in shared memory says where in the model, as what fails in a process group does."""

    def no_memory(x: torch.Tensor, group: str) -> torch.Tensor:
        raise RuntimeError("no memory was mapped")

    reset()
    with shared_memory() as library, torch.no_grad():
        library.impl("_low_contention_all_gather", no_memory, "CPU", allow_override=True)
        try:
            compile_strict(lambda x: gathered(x, ranks=RANKS) * 2, options={"distributed": COPIES})(torch.randn(4, 6))
        except RuntimeError as problem:
            return str(problem)
    return ""


def another_graph_asks_again(rank: int) -> list[int]:
    """What was said is said for the job: a rank that can by now does not begin what others do not expect."""
    first = asked_for_on_one(rank)
    with shared_memory():
        return [first, copied(rank)]


def from_the_cache(rank: int) -> list[int]:
    """What was compiled before is there, for ranks that say the same as then."""
    folder = Path(os.environ["RANKS_FOLDER"]) / f"cache of {rank}"
    with shared_memory():
        found = [copied(rank, cache_dir=folder), copied(rank, cache_dir=folder)]
    assert "hit" in str(ferrite.last_compile().cache)
    return found


PROGRAMS = {
    "on both": on_both,
    "asked for on one": asked_for_on_one,
    "cannot be opened on one": cannot_be_opened_on_one,
    "one does not ask": one_does_not_ask,
    "another graph asks again": another_graph_asks_again,
    "from the cache": from_the_cache,
    "fails while it runs": fails_while_it_runs,
}
COPIED: dict[str, Any] = {
    "on both": 2,
    "asked for on one": 0,
    "cannot be opened on one": 0,
    "one does not ask": 0,
    "another graph asks again": [0, 0],
    "from the cache": [2, 2],
}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Any]]:
    return outcomes(PROGRAMS)


@pytest.mark.parametrize("name", COPIED)
def test_all_ranks_copy_or_none(name, answers):
    assert_none_failed(answers[name])
    assert answers[name] == [COPIED[name]] * RANKS


def test_what_fails_in_shared_memory_says_where(answers):
    assert_none_failed(answers["fails while it runs"])
    for said in answers["fails while it runs"]:
        assert "no memory was mapped" in said
        assert "_low_contention_all_gather" in said
        assert "programs.py" in said


def test_copies_are_not_what_collectives_are():
    """By what is compared among ranks, so that a rank that would begin the one is told that others do the other."""
    from torch.distributed import _symmetric_memory as symmetric

    from ferrite.passes.post_grad.distributed.exchanges import exchanges_in

    def signatures(distributed: Any) -> list[str]:
        gm = passed(
            lambda x: gathered(x, ranks=RANKS),
            torch.randn(4, 6),
            steps=("low_contention_collectives",),
            distributed=distributed,
        )
        return [agreement.signature(each) for each in exchanges_in(gm.graph)]

    with imagined_ranks(RANKS), symmetric._test_mode():
        assert signatures(COPIES) == [f"copies {each}" for each in signatures("off")]


def test_programs_are_kept_apart_by_whether_memory_is_shared():
    from torch.distributed import _symmetric_memory as symmetric

    def identity(distributed: Any) -> str:
        gm = traced_with_fakes(lambda x: gathered(x, ranks=RANKS), torch.randn(4, 6))
        return communication_identity(gm.graph, resolve({"distributed": distributed}, environ={}))

    with imagined_ranks(RANKS):
        without = identity(COPIES), identity("auto")
        with symmetric._test_mode():
            shared = identity(COPIES), identity("auto")
    assert without[0] != shared[0]
    assert without[1] == shared[1]
