"""Products of tensor parallel layers and the collectives beside them, part by part; and copies in shared memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import ferrite
from tests.compare import compile_strict, reset
from tests.distributed.programs import RANKS, collectives, count, gathered, passed, scattered
from tests.distributed.test_passes_on_ranks import shared_memory
from tests.graphs import target_names
from tests.ranks import assert_none_failed, imagined_ranks, outcomes

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # newer names of functional collectives
]


def world(dim: int) -> tuple[int, Any]:
    return dim, dist.group.WORLD


def layer(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows of all ranks times the columns of this one, then its rows again."""
    rows = functional.all_gather_tensor_autograd(x, *world(dim))
    return functional.reduce_scatter_tensor_autograd(torch.relu(rows @ w) @ v, "sum", *world(dim))


# --- graphs, on imagined ranks ----------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    with imagined_ranks(RANKS):
        yield


def taken_apart(fn: Any, *inputs: torch.Tensor, settings: Any = None, **more: Any) -> torch.fx.GraphModule:
    with torch.no_grad():
        steps = ("view_to_reshape", "micro_pipeline_tp_pass", *more.get("steps", ()))
        return passed(fn, *inputs, steps=steps, distributed={"async_tp": settings or {}, **more.get("beside", {})})


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dim", [0, 1])
def test_a_product_begins_with_the_part_that_is_there(dim):
    def fn(x, w):
        return functional.all_gather_tensor(x, *world(dim)) @ w

    gm = taken_apart(fn, torch.randn(4, 6, 8), torch.randn(8, 5))
    gather, wait, product = "all_gather_into_tensor", "wait_tensor", "mm"
    assert collectives(gm) == [gather, gather, wait, product, wait, product]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_is_sent_when_it_is_multiplied(dim):
    def fn(x, w):
        return functional.reduce_scatter_tensor(x @ w, "sum", *world(dim))

    gm = taken_apart(fn, torch.randn(32, 48, 8), torch.randn(8, 5), settings={"chunks": 3 if dim else 4})
    product, scatter = "mm", "reduce_scatter_tensor"
    parts = 3 if dim else 4
    assert collectives(gm)[: 2 * parts] == [product, scatter] * parts
    assert count(gm, "wait_tensor") == parts


@pytest.mark.usefixtures("group")
def test_several_products_take_the_same_parts():
    def fn(x, w, v):
        rows = gathered(x)
        return rows @ w, rows @ v, rows.sum(0)

    gm = taken_apart(fn, torch.randn(4, 8), torch.randn(8, 5), torch.randn(8, 5))
    assert count(gm, "all_gather") == 2
    assert count(gm, "mm") == 4


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda x, w: gathered(x) @ gathered(x).sum(0)[:8, None], None),
        (lambda x, w: gathered(x).sum(0) @ w, "it is not multiplied"),
        (lambda x, w: gathered(x[:3]) @ w, "the rows of a rank do not make 2 parts"),
        (lambda x, w: w.repeat(1, 8)[:5] @ gathered(x), "it is not multiplied"),
        (lambda x, w: functional.reduce_scatter_tensor(x @ w, "sum", *world(1)), "the columns of the product"),
        (lambda x, w: functional.all_gather_tensor(x, *world(1)) @ w.repeat(8, 1), "the dimension that products sum"),
        (lambda x, w: scattered((x @ w).repeat(8, 1)), "it is no product that is added up"),
    ],
)
def test_what_is_no_product_of_rows_is_left_alone(fn, why):
    gm = taken_apart(fn, torch.randn(8, 8), torch.randn(8, 8))
    starts = [node for node in gm.graph.nodes if "group" not in node.name and "tensor" in node.name]
    reasons = [node.meta.get("why_not_moved", "") for node in starts]
    if why is not None:
        assert any(why in reason for reason in reasons), reasons
        assert count(gm, "all_gather") + count(gm, "reduce_scatter") == 1


@pytest.mark.usefixtures("group")
def test_a_product_that_is_read_elsewhere_is_sent_whole():
    def fn(x, w):
        y = x @ w
        return scattered(y), y

    assert count(taken_apart(fn, torch.randn(32, 8), torch.randn(8, 8)), "reduce_scatter") == 1


@pytest.mark.usefixtures("group")
def test_what_another_product_hides_stays_whole():
    def fn(x, w, a):
        return (a @ a) @ (gathered(x) @ w)

    inputs = torch.randn(32, 64), torch.randn(64, 64), torch.randn(256, 256)
    fast = taken_apart(fn, *inputs, beside={"overlap": {"compute": 1e6}})
    assert count(fast, "all_gather") == 1
    assert count(taken_apart(fn, *inputs), "all_gather") == 2


@pytest.mark.usefixtures("group")
def test_parts_are_not_put_together_again():
    def fn(x, w):
        return gathered(x) @ w

    steps = ("bucket_all_gather",)
    gm = taken_apart(fn, torch.randn(4, 8), torch.randn(8, 5), steps=steps, beside={"bucket_ag": {}})
    assert count(gm, "all_gather") == 2


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_that_share_memory_have_one_operator(dim):
    def gather(x, w, v):
        rows = functional.all_gather_tensor(x, *world(dim))
        return rows @ w, rows @ v

    def scatter(x, w, v):
        return functional.reduce_scatter_tensor(x @ w, "sum", *world(dim))

    inputs = torch.randn(16, 16, 8), torch.randn(8, 5), torch.randn(8, 7)
    with shared_memory():
        first, second = taken_apart(gather, *inputs), taken_apart(scatter, *inputs)
    assert collectives(first) == collectives(second) == []
    assert target_names(first).count("symm_mem.fused_all_gather_matmul.default") == 1
    assert target_names(second).count("symm_mem.fused_matmul_reduce_scatter.default") == 1


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dim", [0, 1])
def test_operators_in_shared_memory_are_called(dim):
    reset()
    inputs = torch.randn(16, 16, 8), torch.randn(8, 10), torch.randn(10, 8)
    options = {"distributed": {"async_tp": {}, "low_contention": {"min_mb": 0, "ignore_overlap": True}}}
    with torch.no_grad(), shared_memory():
        found = compile_strict(layer, options=options, dynamic=False)(*inputs, dim)
    assert found.shape == inputs[0].shape
    source = ferrite.last_compile().graphs[-1].source
    assert source.count("op_symm_mem_fused_all_gather_matmul(") == 1
    assert source.count("op_symm_mem_fused_matmul_reduce_scatter(") == 1
    reset()
    with torch.no_grad(), shared_memory():
        compile_strict(lambda x: gathered(x) * 2, options=options, dynamic=False)(inputs[0])
    assert "op_symm_mem__low_contention_all_gather(" in ferrite.last_compile().graphs[-1].source


@pytest.mark.usefixtures("group")
def test_operators_in_shared_memory_are_only_called_on_devices_that_have_them():
    """A group of GPUs may send tensors of CPUs, too."""
    from torch.distributed import _symmetric_memory as symmetric

    reset()
    options = {"distributed": {"async_tp": {}, "low_contention": {"min_mb": 0, "ignore_overlap": True}}}
    inputs = torch.randn(16, 16, 8), torch.randn(8, 10), torch.randn(10, 8)
    with torch.no_grad(), symmetric._test_mode():
        compile_strict(layer, options=options, dynamic=False)(*inputs, 0)
    assert "op_symm_mem_" not in ferrite.last_compile().graphs[-1].source
    reasons = [each.why for each in ferrite.last_compile().communication.graphs[-1][1].collectives]
    assert len(reasons) == 4
    assert all("no such operator in shared memory for cpu" in reason for reason in reasons)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("settings", "has_memory", "why"),
    [
        ({"min_mb": 0}, True, None),
        ({"min_mb": 0}, False, "share no memory"),
        ({}, True, "less of it than min_mb"),
    ],
)
def test_large_collectives_are_copies_where_ranks_share_memory(settings, has_memory, why):
    def fn(x, y):
        begun = torch.ops._c10d_functional.all_gather_into_tensor(x, RANKS, "0")
        z = y @ y
        return torch.ops._c10d_functional.wait_tensor(begun), z

    def work() -> torch.fx.GraphModule:
        steps = ("low_contention_collectives",)
        return passed(fn, torch.randn(4, 8), torch.randn(8, 8), steps=steps, distributed={"low_contention": settings})

    with shared_memory() if has_memory else contextlib.nullcontext():
        gm = work()
    names = target_names(gm)
    assert ("symm_mem._low_contention_all_gather.default" in names) == (why is None)
    if why is not None:
        assert any(why in node.meta.get("why_not_moved", "") for node in gm.graph.nodes)


# --- values, on two ranks ---------------------------------------------------------------------------------------------


def values(dim: int) -> Any:
    def program(rank: int) -> dict[str, int]:
        sizes = (8, 6, 4)
        torch.manual_seed(rank)
        leaves = [torch.randn(*shape, requires_grad=True) for shape in (sizes, (4, 10), (10, 4))]

        def found(fn: Any) -> list[torch.Tensor]:
            result = fn(*leaves, dim)
            return [result.detach(), *torch.autograd.grad(result.sin().sum(), leaves)]

        wanted = found(layer)
        rewrites = {}
        for options in ({"async_tp": {}}, {"async_tp": {"chunks": 3 if dim else 4}, "overlap": {"compute": 0}}):
            reset()
            with ferrite.using(distributed=options):
                mine = found(compile_strict(layer, dynamic=False))
            for one, other in zip(mine, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            rewrites |= ferrite.last_compile().rewrites
        return rewrites

    return program


def test_values_and_gradients_are_those_of_eager():
    found = outcomes({f"along {dim}": values(dim) for dim in (0, 1)})
    for answers in found.values():
        assert_none_failed(answers)
        assert answers[0] == answers[1]
        assert {"micro_pipeline_all_gather", "micro_pipeline_reduce_scatter"} <= set(answers[0])
