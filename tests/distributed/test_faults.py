"""What goes wrong among ranks: a clear error, or what eager does, within the time that the process group has; never
other numbers."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ferrite
from ferrite.runtime.collective_errors import collective_at
from tests.compare import compile_strict, reset
from tests.distributed.programs import c10d, reduced
from tests.ranks import Failed, assert_none_failed, join, on_ranks, outcomes, told

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
PATIENCE = 6  # seconds that the process group waits
RANKS = 2


def summed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two sums over ranks, with a product between them."""
    first = c10d.wait_tensor(c10d.all_reduce(torch.sin(x), "sum", "0"))
    return c10d.wait_tensor(c10d.all_reduce(first @ y, "sum", "0")) + 1


def inputs(rank: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(rank)
    return torch.randn(rows, 4, generator=draws), torch.randn(4, 4, generator=draws)


def calls(fn: Callable[..., Any], *batches: tuple[torch.Tensor, ...], **options: Any) -> None:
    """The same as eager's, batch by batch."""
    run = compile_strict(fn, options=options, dynamic=False)
    for batch in batches:
        torch.testing.assert_close(run(*batch), fn(*batch))


# --- ranks that cannot go on ------------------------------------------------------------------------------------------


def failing(work: Callable[[int], Any]) -> list[Any]:
    return on_ranks(work, timeout=PATIENCE, allow_failure=True, patience=100)


@pytest.mark.slow
def test_a_rank_that_dies_is_an_error_on_the_other():
    def work(rank: int) -> None:
        args = inputs(rank)
        run = compile_strict(summed)
        run(*args)
        if rank == 1:
            os._exit(1)
        run(*args)

    survivor, dead = failing(work)
    assert dead is None
    assert isinstance(survivor, Failed), "it did not notice"
    assert survivor.kind in ("RuntimeError", "DistBackendError")
    said = survivor.text.rpartition("RuntimeError")[2]
    assert "all_reduce" in said
    assert "test_faults.py" in said


@pytest.mark.slow
def test_a_rank_that_is_never_there_is_waited_for_no_longer_than_the_group_waits():
    def work(rank: int) -> float:
        args = inputs(rank)
        run = compile_strict(summed)
        run(*args)
        if rank == 1:
            time.sleep(PATIENCE + 4)
            return 0.0
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?s)all_reduce.*test_faults\.py"):
            run(*args)
        return time.monotonic() - start

    waited, _ = failing(work)
    assert waited < PATIENCE + 3


def test_a_rank_that_compiles_another_graph_is_told_so():
    def work(rank: int) -> None:
        other = lambda x, y: c10d.wait_tensor(c10d.all_reduce((x @ y).sum(), "sum", "0"))  # noqa: E731
        compile_strict(other if rank else summed)(*inputs(rank))

    first, second = failing(work)
    assert isinstance(first, Failed), "it did not notice"
    assert isinstance(second, Failed), "it did not notice"
    assert "test_faults.py" in told([first, second]).rpartition("would not send")[2]


# --- ranks that differ, and get on all the same -----------------------------------------------------------------------


def options_that_send_otherwise(rank: int) -> str:
    """Other options on one rank, by which it would merge what the other sends one by one."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        both = [c10d.wait_tensor(c10d.all_reduce(each, "sum", "0")) for each in (x, y)]
        return both[0] @ both[1]

    try:
        compile_strict(fn, options={"distributed": {"bucket_ar": {}} if rank else "off"})(*inputs(rank))
    except Exception as problem:
        return str(problem)
    return ""


def options_that_send_the_same(rank: int) -> None:
    calls(summed, inputs(rank), **({"numerics": "strict"} if rank else {}))


def recompiled_on_one(rank: int) -> None:
    """Another batch on one rank alone: parameters, and what is sent, are the same."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = c10d.wait_tensor(c10d.all_reduce(y, "sum", "0"))
        return (x @ weights).sum() + c10d.wait_tensor(c10d.all_reduce((x @ weights).sum(0), "sum", "0"))

    rows = (4, 6, 4, 8) if rank else (4, 4, 4, 4)
    calls(fn, *(inputs(rank, each) for each in rows))


def one_is_slow(rank: int) -> None:
    """In compiling, and in running."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            torch._dynamo.graph_break()
            time.sleep(1)
        return summed(x, y)

    args = inputs(rank)
    run = torch.compile(fn, backend="ferrite", options={"strict": True})
    for _ in range(2):
        torch.testing.assert_close(run(*args), fn(*args))


def one_has_a_cache(rank: int) -> tuple[str, str]:
    """What one rank compiled before is there for it alone."""
    folder = Path(os.environ["RANKS_FOLDER"]) / f"cache of {rank}"
    args, found = inputs(rank), []
    calls(summed, args, cache_dir=folder)
    if rank == 1:
        for entry in sorted(folder.rglob("*"), reverse=True):
            entry.rmdir() if entry.is_dir() else entry.unlink()
    for _ in range(2):
        reset()
        calls(summed, args, cache_dir=folder)
        found.append(str(ferrite.last_compile().cache))
    return found[0], found[1]


TOGETHER = {
    "options that send otherwise": options_that_send_otherwise,
    "options that send the same": options_that_send_the_same,
    "recompiled on one": recompiled_on_one,
    "one is slow": one_is_slow,
    "one has a cache": one_has_a_cache,
}


@pytest.fixture(scope="module")
def together() -> dict[str, list[Any]]:
    return outcomes(TOGETHER, timeout=PATIENCE)


@pytest.mark.parametrize("name", [name for name in TOGETHER if name != "options that send otherwise"])
def test_ranks_that_differ_get_on(name, together):
    assert_none_failed(together[name])


def test_options_that_send_otherwise_are_an_error(together):
    found = together["options that send otherwise"]
    assert_none_failed(found)
    assert all(found), found
    assert told(found)


@pytest.mark.slow
def test_two_jobs_share_one_cache_folder():
    """Started at the same time, with the same program."""
    with tempfile.TemporaryDirectory() as folder:

        def work(rank: int) -> int:
            dist.destroy_process_group()
            job, own = divmod(rank, RANKS)
            join(own, RANKS, f"store of job {job}", PATIENCE)
            args = inputs(own + 10 * job)
            for _ in range(2):
                reset()
                calls(summed, args, cache_dir=Path(folder))
            return ferrite.last_compile().communication.collectives

        assert on_ranks(work, world=2 * RANKS) == [2] * 4


def test_what_is_waited_for_is_found_in_the_program():
    rows = [
        "buf1 = op__c10d_functional_all_gather_into_tensor(buf0, 8, '0')",
        "buf11 = op__c10d_functional_all_reduce(buf0, 'sum', '0')",
        "op__c10d_functional_wait_tensor(buf1)",
        "op__c10d_functional_wait_tensor(buf2)",
    ]
    assert [collective_at(rows, place) for place in range(4)] == [
        "all_gather_into_tensor",
        "all_reduce",
        "all_gather_into_tensor",
        "not known",
    ]


def test_a_process_may_be_in_one_job_after_another():
    """What was compiled in a job that is over does not count in the next one, where it may not have been everywhere."""

    def work(rank: int) -> str:
        if rank == 0:
            calls(lambda x, y: reduced(x) @ y, inputs(rank))
        else:
            reduced(inputs(rank)[0])
            reduced(inputs(rank)[0])
        dist.destroy_process_group()
        join(rank, RANKS, "store of the second job", PATIENCE)
        try:
            op = "max" if rank else "sum"
            reset()
            calls(lambda x, y: reduced(x, op) @ y, inputs(rank))
        except Exception as problem:
            return str(problem)
        return ""

    assert told(on_ranks(work, timeout=PATIENCE))
