"""Matrix products that read and write transposed matrices: every spelling, rank and dtype; who does not fire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ferrite.graph.verify import verify_graph
from ferrite.options import Options
from ferrite.passes.pre_grad import linear_permute_fusion, permute_linear_fusion, permute_matmul_fusion
from ferrite.passes.pre_grad.transposes import swapped
from ferrite.pipeline import GraphPass, PassContext
from tests.torch_level import Captured, assert_same, captured

aten = torch.ops.aten
COPIES = (aten.contiguous.default, aten.clone.default)


def apply(step: GraphPass, before: Captured, folding: str = "always", **options: Any) -> tuple[Captured, int]:
    after = before.copy()
    context = PassContext(Options(strict=True, transpose_folding=folding, **options))
    count = step.function(after.gm, context) or 0
    if count:
        verify_graph(after.gm, deep=True)
    return after, count


def targets(graph: Captured) -> list[Any]:
    return [node.target for node in graph.gm.graph.nodes if node.op.startswith("call")]


SWAPS: dict[str, Callable[[Any], Any]] = {
    "mT": lambda x: x.mT,
    "transpose": lambda x: x.transpose(-1, -2),
    "transpose, by name": lambda x: torch.transpose(x, dim0=-2, dim1=-1),
    "swapaxes": lambda x: x.swapaxes(-2, -1),
    "swapdims": lambda x: torch.swapdims(x, -1, -2),
    "movedim": lambda x: x.movedim(-1, -2),
    "movedim, lists": lambda x: torch.movedim(x, (-1, -2), (-2, -1)),
    "permute": lambda x: x.permute(*range(x.dim() - 2), x.dim() - 1, x.dim() - 2),
    "permute, a tuple": lambda x: x.permute((*range(x.dim() - 2), -1, -2)),
    "permute, by name": lambda x: x.permute(dims=[*range(x.dim() - 2), -1, -2]),
    "torch.permute": lambda x: torch.permute(x, (*range(x.dim() - 2), -1, -2)),
}
OF_MATRICES: dict[str, Callable[[Any], Any]] = {"T": lambda x: x.T, "t": lambda x: x.t(), "torch.t": torch.t}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "first two": lambda x: x.transpose(0, 1),
    "around": lambda x: x.permute(1, 2, 0),
    "nothing": lambda x: x.permute(0, 1, 2),
    "moved": lambda x: x.movedim(0, 2),
}


def last(function: Callable[..., Any], *shape: int) -> torch.fx.Node:
    gm = captured(lambda x: function(x) + 1, [torch.rand(shape)]).gm
    return [node for node in gm.graph.nodes if node.op.startswith("call")][-2]


@pytest.mark.parametrize("name", SWAPS)
def test_every_spelling_of_a_swap(name):
    for shape in ((3, 4), (2, 3, 4), (2, 2, 3, 4)):
        node = last(SWAPS[name], *shape)
        assert swapped(node) is node.args[0]


@pytest.mark.parametrize("name", OF_MATRICES)
def test_spellings_for_matrices(name):
    node = last(OF_MATRICES[name], 3, 4)
    assert swapped(node) is node.args[0]


@pytest.mark.parametrize("name", OTHERS)
def test_other_permutations(name):
    assert swapped(last(OTHERS[name], 2, 3, 4)) is None


def test_complex_numbers_are_left():
    gm = captured(lambda x: x.mT + 1, [torch.rand(2, 3, dtype=torch.complex64)]).gm
    assert all(swapped(node) is None for node in gm.graph.nodes)


def layer(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], list[Any]]:
    shapes = (shape, (5, 4), (5,))
    return lambda: [torch.randn(each).to(dtype).requires_grad_() for each in shapes]


RANKS = ((), (2,), (2, 2))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
BIAS = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


@DTYPES
@BIAS
def test_linear_of_transposed(bias, dtype):
    for batch in RANKS:
        make = layer(*batch, 4, 3, dtype=dtype)
        before = captured(lambda x, w, b: F.linear(x.mT.contiguous(), w, b if bias else None) + b, make())
        after, count = apply(permute_linear_fusion, before)
        assert count == 1
        assert aten.contiguous.default not in targets(after)
        assert_same(before, after, make, exact=False)


@DTYPES
@BIAS
def test_transposed_linear(bias, dtype):
    for batch in RANKS:
        make = layer(*batch, 3, 4, dtype=dtype)
        before = captured(lambda x, w, b: F.linear(x, w, b if bias else None).mT.contiguous() + b.sum(), make())
        after, count = apply(linear_permute_fusion, before)
        rounded_twice = bias and dtype is torch.bfloat16 and len(batch) == 2
        assert count == (0 if rounded_twice else 1)
        assert rounded_twice or aten.linear.default not in targets(after)
        assert_same(before, after, make, exact=False)


@DTYPES
def test_products_of_transposed(dtype):
    for batch in RANKS:
        shapes = ((*batch, 4, 3), (*batch, 5, 4))

        def make(shapes: Any = shapes) -> list[Any]:
            return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]

        before = captured(
            lambda a, b: a.mT.contiguous() @ b.swapaxes(-1, -2).clone(memory_format=torch.contiguous_format), make()
        )
        after, count = apply(permute_matmul_fusion, before)
        assert count == 1
        assert not set(COPIES) & set(targets(after))
        assert_same(before, after, make, exact=False)


def test_what_auto_does_on_a_cpu():
    """A transposed left operand is read as fast as a copy; for the rest no gain is known."""
    products = captured(
        lambda a, b: (torch.bmm(a.mT.contiguous(), b), torch.bmm(b, a.mT.contiguous())),
        [torch.rand(2, 3, 3), torch.rand(2, 3, 3)],
    )
    after, count = apply(permute_matmul_fusion, products, "auto")
    assert count == 1
    assert targets(after).count(aten.contiguous.default) == 1
    layers = captured(
        lambda x, w, b: (F.linear(x.t().contiguous(), w, b), F.linear(x, w, b).t().contiguous()),
        [torch.rand(4, 4), torch.rand(5, 4), torch.rand(5)],
    )
    assert apply(permute_linear_fusion, layers, "auto")[1] == 0
    assert apply(linear_permute_fusion, layers, "auto")[1] == 0


@pytest.mark.parametrize("step", [linear_permute_fusion, permute_linear_fusion, permute_matmul_fusion])
def test_off_and_strict_leave_everything(step):
    def function(x: Any, w: Any) -> Any:
        y = F.linear(x.mT.contiguous(), w).mT.contiguous()
        return torch.bmm(y.mT.contiguous(), x.mT)

    before = captured(function, [torch.rand(2, 4, 4), torch.rand(4, 4)])
    assert apply(step, before, "off")[1] == 0
    assert apply(step, before, numerics="strict")[1] == 0


def two_readers(x: Any, w: Any, b: Any) -> Any:
    y = F.linear(x, w, b)
    return y.mT.contiguous().sum(), y.relu()


def under_autocast(x: Any, w: Any, b: Any) -> Any:
    y = x.mT.contiguous()
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(y, w, b)


@pytest.mark.parametrize(
    ("step", "function", "shape"),
    [
        (linear_permute_fusion, two_readers, (2, 3, 4)),
        (linear_permute_fusion, lambda x, w, b: F.linear(x, w, b).mT, (2, 3, 4)),
        (linear_permute_fusion, lambda x, w, b: F.linear(x, w, b).transpose(0, 1).contiguous(), (2, 3, 4)),
        (permute_linear_fusion, lambda x, w, b: F.linear(x.transpose(0, 1).contiguous(), w, b), (2, 3, 4)),
        (permute_linear_fusion, under_autocast, (2, 4, 3)),
        (permute_linear_fusion, lambda x, w, b: F.linear(x.mT, w, b), (2, 4, 3)),
    ],
    ids=["two readers", "returned", "other dimensions", "other dimensions in", "autocast between", "no copy"],
)
def test_what_does_not_fold(step, function, shape):
    before = captured(function, layer(*shape)())
    assert apply(step, before)[1] == 0
