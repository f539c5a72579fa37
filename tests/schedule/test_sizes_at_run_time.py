"""Kernels for sizes that are known when they run: the same forms as for numbers, and eager's answers at every size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ferrite.ir import ZERO, axis, compare, const, index_value
from ferrite.ir.expr import Masked, indices_of
from ferrite.ir.index.algebra import Symbol, number, symbol
from ferrite.ir.kernel.nodes import Kernel, Scratch, nodes_in, walk
from ferrite.schedule.fusion.accesses import UNKNOWN_EXTENT, likely, step_of
from ferrite.schedule.loops.conditions import known_value
from ferrite.schedule.steps import Plan
from tests.compare import assert_no_farther, compile_strict, compiled_graphs, reset
from tests.lower.lowered import program_of
from tests.schedule.plans import loops, make, memory, plan_of

quick = pytest.mark.quick


def symbolic(fn: Callable[..., Any], *inputs: torch.Tensor) -> Plan:
    program = program_of(fn, *inputs, dynamic=True)
    return make(program)


def kernels(plan: Plan) -> list[Kernel]:
    return [launch.kernel for launch in plan.launches]


def conditions(kernel: Kernel) -> list[Any]:
    return [node for item in walk(kernel.body) for node in nodes_in(item) if isinstance(node, Masked)]


# --- what a size is likely to be --------------------------------------------------------------------------------------


@quick
def test_a_size_is_likely_what_was_seen():
    n, m, unknown = symbol("n", 2, None, 512), symbol("m", 2, None, 8), symbol("u", 0, 100)
    assert [likely(each) for each in (number(7), n, n * m + 1, n // m)] == [7, 512, 4097, 64]
    assert likely(unknown) == likely(unknown * n) == UNKNOWN_EXTENT
    assert likely(symbol("few", 0, 5)) == 5


@quick
@pytest.mark.parametrize(("rows", "likely"), [(1000, 776), (808, 776), (600, 520), (513, 513), (512, 512), (1008, 768)])
def test_likely_sizes_have_two_digits_and_say_what_they_are_multiples_of(rows, likely):
    """So that what is decided, and kept in the cache, is the same for sizes that are near."""
    (kernel,) = symbolic(lambda x: x.sin(), torch.randn(rows, 12)).launches
    sizes = {index for index in kernel.sizes if isinstance(index, Symbol)}
    assert sorted(size.likely or 0 for size in sizes) == [8, likely]


# --- conditions -------------------------------------------------------------------------------------------------------


@quick
def test_what_is_always_inside_of_a_window_is_not_asked():
    """Places of windows of three, every second one, of a line of unknown length with one element beyond either end."""
    n = symbol("n", 2, None)
    i = axis("i", (n + 1) // 2)

    def is_inside(place):
        low, high = (
            compare("ge", index_value(place), index_value(ZERO)),
            compare("lt", index_value(place), index_value(n)),
        )
        return [known_value(low), known_value(high)]

    always = const(True, torch.bool)
    first, middle, last = map(is_inside, (2 * i - 1, 2 * i, 2 * i + 1))
    assert middle == [always, always]
    assert first[1] == last[0] == always
    assert first[0] != always
    assert last[1] != always, "it is not, where there are as many elements as an even number"
    assert known_value(compare("eq", index_value(n), index_value(ZERO))) == const(False, torch.bool)


# --- forms ------------------------------------------------------------------------------------------------------------


@quick
def test_a_padding_is_a_copy_between_its_edges():
    (kernel,) = kernels(symbolic(lambda x: F.pad(x, (3, 5)), torch.randn(16, 64)))
    first, middle, last = (loop.axis.extent for loop in loops(kernel, "vector"))
    assert (first, last) == (number(3), number(5))
    assert isinstance(middle, Symbol)
    assert not conditions(kernel)


@quick
def test_mirrored_edges_choose_nothing_at_an_element():
    (kernel,) = kernels(symbolic(lambda x: F.pad(x, (2, 3), mode="reflect"), torch.randn(16, 64)))
    edges_and_middle = loops(kernel, "vector")
    assert len(edges_and_middle) == 3
    for loop in edges_and_middle:
        nodes = [node for item in loop.body for node in nodes_in(item)]
        indices = [index for node in nodes for index in indices_of(node) if loop.axis in index.atoms]
        assert indices
        assert all(step_of(index, loop.axis) is not None for index in indices)


@quick
def test_what_is_written_into_a_slice_is_a_loop_of_its_own():
    def fn(x, y):
        result = x.clone()
        result[:, : y.shape[1]] = y * 2
        return result

    (kernel,) = kernels(symbolic(fn, torch.randn(32, 64), torch.randn(32, 40)))
    assert len(loops(kernel, "vector")) == 2
    assert not conditions(kernel)


@quick
def test_windows_that_are_inside_ask_nothing():
    (kernel,) = kernels(symbolic(lambda x: F.avg_pool2d(x, 2), torch.randn(8, 16, 32, 32)))
    assert not conditions(kernel)


@quick
@pytest.mark.parametrize("dim", [0, 1])
def test_nothing_joined_is_in_memory(dim):
    plan = symbolic(lambda x, y: torch.cat([x, y * 2], dim).relu(), torch.randn(40, 60), torch.randn(40, 60))
    assert len(memory(plan)) == 1
    assert all(loop.lanes > 1 for kernel in kernels(plan) for loop in loops(kernel, "vector"))
    assert not any(loops(kernel, "serial") for kernel in kernels(plan))


@quick
@pytest.mark.parametrize("fn", [torch.sum, torch.amax, lambda x: x.var()], ids=["sum", "amax", "var"])
def test_threads_share_one_result(fn):
    plan = symbolic(fn, torch.randn(700, 900))
    assert loops(kernels(plan)[0], "parallel")[0].axis.extent == number(32)


@quick
def test_few_elements_are_not_shared():
    assert len(symbolic(torch.sum, torch.randn(20, 30)).launches) == 1


@quick
def test_columns_are_summed_in_tiles():
    plan = symbolic(lambda x: x.sum(0), torch.randn(4200, 300))
    assert any(isinstance(item, Scratch) for item in walk(kernels(plan)[0].body))


@quick
def test_the_place_of_the_greatest_is_found_by_blocks():
    (kernel,) = kernels(symbolic(lambda x: x.argmax(1), torch.randn(64, 4096)))
    assert len(loops(kernel, "reduction")) == 3  # the greatest of a block, the block, the place in it


# --- values -----------------------------------------------------------------------------------------------------------

COMPUTED = {
    "padded": lambda x: F.pad(x, (3, 5, 1, 0)),
    "mirrored": lambda x: F.pad(x[None], (1, 1), mode="reflect"),
    "into a slice": lambda x: x.clone().slice_scatter(x[:, 1:] * 2, 1, 0, x.shape[1] - 1),
    "joined and read": lambda x: torch.cat([x, x[:, :3] * 2, -x], 1).relu(),
    "joined rows": lambda x: torch.cat([x, x[1:], x], 0) + 1,
    "rotated": lambda x: torch.cat([-x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]], 1) * x,
    "pooled": lambda x: F.max_pool2d(x[None], 3, 2, 1),
    "averaged": lambda x: F.avg_pool2d(x[None], 2, ceil_mode=True),
    "enlarged": lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
    "sums": lambda x: (x.sum(), x.sum(0), x.sum(1)),
    "extremes": lambda x: (x.amax(), x.amin(0), x.amax(1)),
    "places": lambda x: (x.argmax(), x.argmax(0), x.argmin(1)),
    "statistics": lambda x: (x.var(), x.var(0), x.mean(1)),
    "logical": lambda x: ((x > 3).any(), (x > -9).all(0)),
    "softmax": lambda x: x.softmax(1),
}
SHAPES = ((300, 700), (2, 3), (33, 4), (1000, 31), (65, 513), (31, 5000))


@pytest.mark.parametrize("name", COMPUTED)
def test_every_size_has_eager_s_values(name):
    """Compiled for the first shape, which is large; then smaller than a piece, a block, a vector, and odd ones."""
    fn = COMPUTED[name]
    reset()
    compiled = compile_strict(fn, dynamic=True)
    for shape in SHAPES:
        torch.manual_seed(0)
        x = torch.randn(shape)
        found, expected, exact = (pytree.tree_leaves(each) for each in (compiled(x), fn(x), fn(x.double())))
        for one, other, true in zip(found, expected, exact, strict=True):
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()
            if one.is_floating_point():
                assert_no_farther(one, other, true, f"{name} of {shape}")
            else:
                assert torch.equal(one, other)
    assert compiled_graphs() < len(SHAPES)  # torch itself makes several of some, where a part has one element or none


@pytest.mark.parametrize("shape", [(1009, 1024), (8209, 4200)])
def test_wide_columns_are_summed_in_blocks_of_tiles(shape):
    """Each thread has some of the columns, and counts those from where its own begin."""
    x = torch.randn(shape)
    assert_no_farther(compile_strict(lambda x: x.sum(0))(x), x.sum(0), x.double().sum(0), "sums", terms=1.0)


@quick
def test_a_prime_number_of_elements_is_shared_too():
    plan = plan_of(torch.sum, torch.randn(65537))
    assert loops(kernels(plan)[0], "parallel")[0].axis.extent == number(32)
    x = torch.randn(65537)
    assert_no_farther(compile_strict(torch.sum)(x), x.sum(), x.double().sum(), "sum", terms=1.0)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["index_add", "embedding", "index_put"])
def test_rows_of_any_length_are_added_where_an_index_says(kind, rows):
    """One index or several: the elements of a row never meet, however long a row is."""

    def fn(x, at):
        if kind == "index_put":
            return x.index_put((at,), x[at] * 2, accumulate=True)
        return x.index_add(0, at, x[at]) if kind == "index_add" else F.embedding(at, x) * 2

    compiled = compile_strict(fn, dynamic=True, fullgraph=True)
    for shape in [(5, 6), (4, 5000)]:
        found, expected = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for _ in range(2))
        at = torch.arange(rows) % 2  # some twice
        for x, run in ((found.requires_grad_(), compiled), (expected.requires_grad_(), fn)):
            run(x, at).sum().backward()
        assert torch.equal(compiled(found, at), fn(expected, at))
        assert torch.equal(found.grad, expected.grad)


def test_a_part_of_the_columns_is_added_to_what_lies_the_other_way():
    """The columns before, in and after the part are loops of their own over one tile."""

    def fn(x):
        part = x[:, 2:7]
        return x.T.unsqueeze(-1), part.scatter_add(0, torch.arange(len(part)).flip(0)[:, None].expand_as(part), part)

    compiled = compile_strict(fn, dynamic=True, fullgraph=True)
    for shape in ((16, 8), (12, 300), (140, 9)):
        x = torch.randn(shape, requires_grad=True)
        weights = [torch.randn_like(each) for each in fn(x)]
        grads = [torch.autograd.grad(run(x), x, weights)[0] for run in (compiled, fn)]
        assert torch.equal(*grads)
