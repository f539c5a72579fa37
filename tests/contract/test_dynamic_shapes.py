"""Symbolic sizes: one graph for many sizes, eager's answer at each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import ferrite
from tests.compare import assert_same_as_eager, assert_same_tree, compile_strict, compiled_graphs

SIZED = {
    "pointwise": lambda x: x.sin() * x.shape[0] + 1,
    "reduction": lambda x: (x.sum(0), x.mean(1), x.softmax(-1)),
    "matrix_product": lambda x: x.t() @ x,
    "view": lambda x: x.reshape(-1, 2) * 2,
    "flatten": lambda x: x.flatten() + 1,
    "cat": lambda x: torch.cat([x, x[:1], x + 1]),
    "slices": lambda x: (x[: x.shape[0] // 2] + 1, x[1:] - x[:-1], x[-2:]),
    "arange": lambda x: torch.arange(x.shape[0])[:, None] * x,
    "pad": lambda x: functional.pad(x, (1, 2, 0, 1)),
    "expand": lambda x: x[None].expand(3, -1, -1) * 2,
    "mask": lambda x: torch.ones(x.shape[0], x.shape[0]).tril() @ x.float(),
    "split": lambda x: [part * 2 for part in x.split(2, dim=1)],
    "pooled": lambda x: functional.avg_pool1d(x[None], 2),
    "interpolated": lambda x: functional.interpolate(x[None, None], scale_factor=2),
    "sorted": lambda x: x.sort(dim=0),
    "topk": lambda x: x.flatten().topk(x.shape[0]),
    "scan": lambda x: x.cumsum(0),
    "strided": lambda x: x[::2, ::2].contiguous(),
    "full_of_size": lambda x: x.new_full((x.shape[1], x.shape[0]), x.numel()),
}
ROW_COUNTS = (4, 7, 12, 33)


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_one_graph_for_many_sizes(name: str, training: bool) -> None:
    fn = SIZED[name]
    compiled = compile_strict(fn, dynamic=True)
    for rows in ROW_COUNTS:
        torch.manual_seed(rows)
        base = torch.randn(rows, 6)
        results = []
        for call, x in ((compiled, base), (fn, base), (fn, base.double())):
            leaf = x.clone().requires_grad_(training)
            outputs = call(leaf)
            if training and any(t.requires_grad for t in tensors(outputs)):
                sum(t.float().square().sum() for t in tensors(outputs) if t.requires_grad).backward()
            results.append((outputs, leaf.grad))
        assert_same_tree(*results, what=f"{rows} rows")
    assert compiled_graphs() == 1


def tensors(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


@pytest.mark.quick
def test_automatic_dynamic_shapes_compile_twice() -> None:
    """First static, then, at the second size, once for all sizes."""
    compiled = compile_strict(lambda x: x * 2 + x.shape[0])
    for rows in (5, 9, 17, 3, 21):
        x = torch.randn(rows, 4)
        assert torch.equal(compiled(x), x * 2 + rows)
    assert compiled_graphs() == 2


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_small_sizes_after_a_larger_one(rows: int) -> None:
    """Sizes 0 and 1 are special to broadcasting, and get graphs of their own."""

    def fn(x: torch.Tensor) -> Any:
        return x + x.sum(0), x.amax(1), x.t().contiguous()

    compiled = compile_strict(fn, dynamic=True)
    for size in (5, rows, 6):
        x = torch.randn(size, 4)
        assert_same_tree(compiled(x), fn(x), fn(x.double()), f"{size} rows")


def test_module_in_training_at_many_sizes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU())
    exact = copy.deepcopy(model).double()
    ours = copy.deepcopy(model)
    compiled = compile_strict(ours, dynamic=True)
    for rows in ROW_COUNTS:
        x = torch.randn(rows, 6)
        for call, value in ((model, x), (compiled, x), (exact, x.double())):
            call(value).square().mean().backward()
        grads = ([p.grad for p in m.parameters()] for m in (ours, model, exact))
        assert_same_tree(*grads, what=f"gradient at {rows} rows")
    assert compiled_graphs() == 1


def test_integer_argument_becomes_symbolic() -> None:
    compiled = compile_strict(lambda x, n: x[:n] * n, dynamic=True)
    x = torch.arange(20.0)
    for n in (3, 7, 11, 4):
        assert torch.equal(compiled(x, n), x[:n] * n)
    assert compiled_graphs() == 1


def test_float_argument_takes_new_values() -> None:
    compiled = compile_strict(lambda x, f: x * f + 1, dynamic=True)
    x = torch.arange(4.0)
    for f in (0.5, 2.0, -1.25, float("inf")):
        assert torch.equal(compiled(x + 1, f), (x + 1) * f + 1)


def test_marked_dimension_is_dynamic_and_the_other_is_not() -> None:
    compiled = compile_strict(lambda x: x.sum(0) + x.shape[0])
    for rows in (3, 8, 5):
        x = torch.ones(rows, 4)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), torch.full((4,), 2.0 * rows))
    assert compiled_graphs() == 1
    assert torch.equal(compiled(torch.ones(3, 5)), torch.full((5,), 6.0))


def test_two_inputs_of_one_unknown_size_and_a_mismatch() -> None:
    compiled = compile_strict(lambda x, y: x * y, dynamic=True)
    for rows in (3, 8):
        assert torch.equal(compiled(torch.ones(rows), torch.ones(rows) * 2), torch.ones(rows) * 2)
    assert torch.equal(compiled(torch.ones(3), torch.ones(1) * 2), torch.ones(3) * 2)
    with pytest.raises(RuntimeError, match="size of tensor"):
        compiled(torch.ones(3), torch.ones(4))


def test_branch_on_a_size(dynamic: bool) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x + 100

    compiled = compile_strict(fn, dynamic=dynamic)
    for rows in (3, 8, 4, 5):
        assert torch.equal(compiled(torch.ones(rows)), fn(torch.ones(rows)))


def test_symbolic_strides_of_a_sliced_input() -> None:
    def fn(x: torch.Tensor) -> Any:
        return x + 1, x.sum(1), x.t()

    compiled = compile_strict(fn, dynamic=True)
    for width in (9, 12, 20):
        x = torch.randn(5, width)[1:, 2:7]
        assert_same_tree(compiled(x), fn(x), fn(x.double()), f"width {width}")


@pytest.mark.parametrize("backward", [False, True], ids=["inference", "training"])
def test_convolution_of_any_picture_size(backward: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2))
    for size in (8, 11):
        assert_same_as_eager(
            model,
            lambda size=size: [torch.randn(2, 3, size, size, requires_grad=backward)],
            backward=backward,
            dynamic=True,
        )


def test_rows_selected_by_data_then_computed_on() -> None:
    """Sizes that depend on data flow through further operators of the same graph."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_same_as_eager(
            lambda x: (x[x[:, 0] > 0].sin() * 2, x[x[:, 0] > 0].sum(0)),
            lambda: [torch.randn(9, 4)],
            graphs=1,
        )


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x.permute(2, 1, 0).reshape(-1, x.shape[2]) * 1, x.permute(2, 1, 0).narrow(2, 0, 1) + 1),
        lambda x: (x.reshape(x.shape[-1], -1) + 1, torch.stack([x.reshape(x.shape[-1], -1)] * 2, 2).transpose(0, -1)),
    ],
)
def test_a_size_that_a_guard_makes_the_product_of_others(fn: Any) -> None:
    """torch writes the product where the size stood, and the size has no value of its own any more."""
    compiled = compile_strict(fn, dynamic=True, fullgraph=True)
    for size in (1, 2, 3):
        x = torch.randn(4, 8, size).permute(2, 0, 1)
        assert_same_tree(compiled(x), fn(x), fn(x.double()), f"size {size}")


@torch.library.custom_op("contract_shapes::head", mutates_args=())
def head(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.flatten()[:count].clone()


@head.register_fake
def _(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.new_empty(int(count))  # from here on it is known to torch which number it is


def quantised(rows: torch.Tensor) -> torch.Tensor:
    return rows.div(rows.abs().amax(1, keepdim=True).clamp(min=1e-7) / 7).add(8.5).to(torch.int8).clamp(max=15)


def halves(x: torch.Tensor, group: int, step: int) -> torch.Tensor:
    small = quantised(x.reshape(-1, group))
    return head(small[:, 1::2] << 4 | small[:, ::2], group)


def parts_by_any_step(x: torch.Tensor, group: int, step: int) -> torch.Tensor:
    small = quantised(x.reshape(-1, group))
    return head(small[:, 1::step] << 4 | small[:, ::step], group)


@pytest.mark.parametrize("fn", [halves, parts_by_any_step])
def test_parts_of_rows_whose_size_a_guard_knows_later(fn: Any) -> None:
    """`s // (s // 32)` is 32, so `s // (2*(s // 32))`, as torch writes its half, is 16, and the rows are known to be
    large enough. For any step they are not, and lie in memory."""
    assert_same_as_eager(fn, lambda: [torch.rand(4096), 32, 2], dynamic=True, exact=False)
    assert ferrite.last_compile().graphs[0].kernels


@pytest.mark.parametrize("more", [(4, 16), pytest.param((12, 2), marks=pytest.mark.slow)])
def test_a_size_left_open_in_a_view_of_what_is_written(more: tuple[int, int]) -> None:
    """Passes take other views to the same elements, and torch writes the open size of those otherwise."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        product = x @ x.transpose(-1, -2)
        view = product.view(2, -1, 4)
        view.copy_(view)
        return product, view, y * 2

    compiled = compile_strict(fn, dynamic=True)
    for rows, columns in ((8, 8), more):
        x = torch.randint(-4, 9, (rows, 1, rows, columns + 1)).to(torch.int32)[..., 1:]
        y = torch.randn(1, 2, rows, requires_grad=True)
        for mine, eager in zip(compiled(x, y), fn(x, y), strict=True):
            assert torch.equal(mine, eager)
            assert mine.stride() == eager.stride()


# --- dimensions that are arguments ------------------------------------------------------------------------------------

BY_DIMENSION: dict[str, Callable[..., Any]] = {
    "transpose": lambda x, a, b: x.transpose(a, b) + 1,
    "swapaxes": lambda x, a, b: x.swapaxes(a, b).sin(),
    "movedim": lambda x, a, b: x.movedim(a, b) * 2,
    "moveaxis": lambda x, a, b: torch.moveaxis(x, (a,), (b,)).exp(),
    "permute": lambda x, a, b: x.permute(a, b, 3 - a - b) + 1,
    "select": lambda x, a, b: x.select(a, b) + x.select(-a - 1, 0).sum(),
    "sum": lambda x, a, b: x.sum((a, b)) + x.mean(a).sum(),
    "flip and roll": lambda x, a, b: x.flip(a, b).roll(1, b),
    "concat": lambda x, a, b: torch.cat([x, x.sin()], a).narrow(b, 1, 1),
    "stack": lambda x, a, b: torch.stack([x, x.cos()], a).flatten(*sorted((a, b))),
    "split": lambda x, a, b: [part * 2 for part in (*x.split(1, a), *x.chunk(2, b), *x.unbind(a))],
    "softmax": lambda x, a, b: x.softmax(a).cumsum(b).unsqueeze(a),
    "diagonal": lambda x, a, b: x.diagonal(0, a, b) * 2,
}


@pytest.mark.parametrize("pair", [(0, 1), (2, 1), (1, 0)])
def test_dimensions_may_be_arguments(pair: tuple[int, int]) -> None:
    """torch guards them, although they are numbers like all others; a product beside them lets passes look at views."""

    def fn(x: torch.Tensor, w: torch.Tensor, a: int, b: int) -> Any:
        found = [by_dimension(x, a, b) for by_dimension in BY_DIMENSION.values()]
        return *found, functional.linear(x.permute(0, 1, 2), w).transpose(a, b)

    assert_same_as_eager(fn, lambda: [torch.randn(2, 3, 4), torch.randn(5, 4), *pair], dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_DIMENSION)
def test_one_call_whose_dimensions_are_arguments(name: str) -> None:
    def fn(x: torch.Tensor, a: int, b: int) -> Any:
        return BY_DIMENSION[name](x, a, b)

    for pair in ((0, 1), (2, 1), (1, 0)):
        assert_same_as_eager(fn, lambda pair=pair: [torch.randn(2, 3, 4), *pair], dynamic=True)


def test_an_index_that_is_an_argument_stays_unknown() -> None:
    """Unlike a dimension, it may be another one in each call of one graph."""
    compiled = compile_strict(lambda x, i: x.select(0, i) * 2, dynamic=True)
    x = torch.randn(9, 3)
    for index in (3, 5, 8):
        assert torch.equal(compiled(x, index), x[index] * 2)
    assert compiled_graphs() == 1
