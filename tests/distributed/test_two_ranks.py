"""The same programs on two ranks that exchange data: values, gradients and losses are eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import ferrite
from tests.compare import compile_strict, reset
from tests.distributed.programs import c10d
from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
RANKS = 2


def gathered(x: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, dist.get_world_size(), "0"))


def scattered(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, op, dist.get_world_size(), "0"))


def reduced(x: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))


def every_kind(x, p, q, r, s):
    """Gathers of several types, sums of two kinds, with products between them."""
    a, b, c, u = gathered(p), gathered(q.to(torch.bfloat16)), gathered(r), gathered(s)
    y = torch.relu(x @ a) @ c
    sums = scattered(y.t() @ x), scattered(y * 2, "avg"), scattered(y * 3)
    return y, b, u, *sums, reduced(y.sum(0)), reduced(y.sum(1)), scattered(y * 4) + scattered(y * 5)


def inputs(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    small = torch.randint(0, 99, (7,), dtype=torch.uint8)
    rows = 16 // dist.get_world_size()
    return [torch.randn(8, 16), torch.randn(rows, 16), torch.randn(3, 5), torch.randn(rows, 16), small]


def assert_same(distributed: Any, rank: int) -> Any:
    """The results of a compiled program, in every look, are eager's; the record of it."""
    args = inputs(rank)
    wanted = every_kind(*args)
    reset()
    with torch.no_grad():
        found = compile_strict(every_kind, options={"distributed": distributed})(*args)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()
    return ferrite.last_compile()


STYLES = {
    "traced": {name: {} for name in ("bucket_ag", "bucket_rs", "bucket_ar", "overlap", "dedup_reduce_scatter")},
    "opaque": {name: {"style": "opaque"} for name in ("bucket_ag", "bucket_rs", "bucket_ar")},
    "coalesced": {name: {"style": "coalesced"} for name in ("bucket_ag", "bucket_rs", "bucket_ar")},
    "bytes": {"bucket_ag": {"style": "opaque_multidtype"}, "bucket_ar": {"style": "opaque_multidtype"}},
}


def test_results_are_those_of_eager():
    def work(rank: int) -> tuple[int, dict[str, int]]:
        record = assert_same("auto", rank)
        return record.communication.collectives, record.rewrites

    (first, rewrites), (second, _) = on_ranks(work)
    assert first == second < 11
    assert {"bucket_all_gather", "bucket_reduce_scatter", "dedup_reduce_scatter"} <= set(rewrites)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_every_style_gives_the_results_of_eager(style):
    def work(rank: int) -> int:
        return int(assert_same(STYLES[style], rank).communication.collectives)

    assert on_ranks(work) == [{"traced": 6, "opaque": 6, "coalesced": 6, "bytes": 7}[style]] * RANKS


@pytest.mark.slow
def test_rows_that_stay_where_they_are_give_the_same():
    def optimized(shard):
        x = gathered(shard)
        x = x / torch.linalg.vector_norm(x)
        for _ in range(3):
            x = 1.5 * x - 0.5 * (x @ (x.t() @ x))
        return x.split(shard.shape[0])[dist.get_rank()]

    def work(rank: int) -> dict[str, int]:
        torch.manual_seed(rank)
        shard = torch.randn(6, 5)
        wanted = optimized(shard)
        with torch.no_grad():
            found = compile_strict(optimized, options={"distributed": ["decompose_comms"]})(shard)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        return {each.kind: 1 for _, graph in ferrite.last_compile().communication.graphs for each in graph.collectives}

    assert on_ranks(work) == [{"all_reduce": 1}] * RANKS
