"""Exchanges between processes, in a group of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from ferrite.ir.program.nodes import Collective, Wait
from tests.lower.lowered import calls, operations, run

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    yield
    if started:
        dist.destroy_process_group()


def in_place(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x + 1


EXCHANGES = {
    "all_reduce": lambda x: functional.all_reduce(x + 1, "sum", dist.group.WORLD) * 2,
    "all_gather": lambda x: functional.all_gather_tensor(x + 1, 0, dist.group.WORLD) * 2,
    "reduce_scatter": lambda x: functional.reduce_scatter_tensor(x + 1, "sum", 0, dist.group.WORLD) * 2,
    "all_to_all": lambda x: functional.all_to_all_single(x + 1, None, None, dist.group.WORLD) * 2,
    "broadcast": lambda x: functional.broadcast(x + 1, 0, dist.group.WORLD) * 2,
    "of_an_input": in_place,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_begins_and_is_waited_for(name: str) -> None:
    """The laws, which every program is held against, say that nobody touches its memory in between."""
    program = run(EXCHANGES[name], lambda: [torch.randn(4)], dynamic=False)
    ((start,), (wait,)) = operations(program, Collective), operations(program, Wait)
    held = {program.buffer(name).storage for name in (*start.call.writes, *start.call.results) if name is not None}
    assert held <= set(wait.holds)
    assert {call.effect for call in calls(program)} == {"collective"}


def test_several_in_one_are_held_until_the_last_is_waited_for() -> None:
    def fn(x: torch.Tensor) -> Any:
        return [each * 2 for each in functional.all_reduce_coalesced([x + 1, x * 2], "sum", dist.group.WORLD)]

    program = run(fn, lambda: [torch.randn(4)], dynamic=False)
    (start,) = operations(program, Collective)
    waits = operations(program, Wait)
    assert len(start.call.results) == len(waits) == 2
    assert all(program.buffer(name).kind == "view" for name in start.call.results)
    assert len({name for wait in waits for name in wait.holds}) == 2


def test_an_exchange_nobody_reads_still_happens() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        functional.all_reduce(x + 1, "sum", dist.group.WORLD).sum()
        return x * 2

    program = run(fn, lambda: [torch.randn(4)], dynamic=False)
    assert len(operations(program, Collective)) == len(operations(program, Wait))
