"""Every pass over collectives fires on two ranks in a program of a user's, and what comes out is eager's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import ferrite
from tests.compare import compile_strict, reset
from tests.distributed.programs import c10d
from tests.distributed.rule_programs import NEAR_MISSES, PROGRAMS, RankProgram
from tests.fired import fired
from tests.ranks import assert_none_failed, outcomes

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@contextlib.contextmanager
def shared_memory() -> Iterator[Any]:
    """As if ranks shared memory: what copies there is done by collectives."""
    from torch.distributed import _symmetric_memory as symmetric

    def gather(x: torch.Tensor, group: str) -> torch.Tensor:
        return c10d.wait_tensor(c10d.all_gather_into_tensor(x, dist.get_world_size(), group))

    def scatter(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, op, dist.get_world_size(), group))

    def in_order(x: torch.Tensor, dim: int) -> torch.Tensor:
        """As torch's operators lay their results out."""
        return x.movedim(dim, 0).contiguous().movedim(0, dim)

    def gather_products(x: torch.Tensor, rights: Any, dim: int, group: str, return_A: bool = True) -> Any:
        whole = in_order(torch.cat(gather(x, group).chunk(dist.get_world_size()), dim), dim)
        return whole if return_A else None, [in_order(whole @ right, dim) for right in rights]

    def scatter_product(x: torch.Tensor, right: torch.Tensor, op: str, dim: int, group: str) -> torch.Tensor:
        return scatter(torch.cat((x @ right).chunk(dist.get_world_size(), dim)), op, group)

    with torch.library._scoped_library("symm_mem", "IMPL") as library, symmetric._test_mode():
        library.impl("_low_contention_all_gather", gather, "CPU")
        library.impl("_low_contention_reduce_scatter", scatter, "CPU")
        library.impl("fused_all_gather_matmul", gather_products, "CPU")
        library.impl("fused_matmul_reduce_scatter", scatter_product, "CPU")
        yield library


def work(program: RankProgram, in_test_mode: bool = True) -> Any:
    """What fired on a rank. `in_test_mode`: memory that ranks share is imagined."""

    def run(rank: int) -> set[str]:
        def inputs() -> list[torch.Tensor]:
            torch.manual_seed(rank)
            return program.make_inputs()

        theirs, mine = inputs(), inputs()
        wanted = pytree.tree_leaves(program.function(*theirs))
        reset()
        with torch.no_grad(), shared_memory() if program.has_memory and in_test_mode else contextlib.nullcontext():
            options = {"distributed": dict(program.distributed)}
            found = pytree.tree_leaves(compile_strict(program.function, options=options, fullgraph=True)(*mine))
        pairs = zip([*found, *mine], [*wanted, *theirs], strict=True)
        for one, other in pairs:
            assert has_memory(one) == has_memory(other)
            if has_memory(one):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, check_stride=True)
        return fired(ferrite.last_compile())

    return run


def has_memory(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Any]]:
    return outcomes({program.name: work(program) for program in (*PROGRAMS, *NEAR_MISSES)})


def found(program: RankProgram, answers: dict[str, list[Any]]) -> set[str]:
    assert_none_failed(answers[program.name])
    first, second = answers[program.name]
    assert first == second
    return set(first)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_it_fires(program, answers):
    assert found(program, answers) >= set(program.fires)


@pytest.mark.parametrize("program", NEAR_MISSES, ids=lambda program: program.name)
def test_it_does_not_fire(program, answers):
    assert found(program, answers).isdisjoint(program.not_here)
