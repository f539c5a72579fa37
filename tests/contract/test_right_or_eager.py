"""Programs that once had wrong numbers, read outside of tensors or ended their process: right, or eager's error.

Each is compiled as users compile it, with every law and every address checked. Their neighbours are in the files about
what they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import assert_same_as_eager, compile_strict

aten = torch.ops.aten
OPTIONS = {"check_bounds": True}
Inputs = Callable[[], list[Any]]


@pytest.fixture(autouse=True)
def data_may_decide() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def randn(*shapes: tuple[int, ...]) -> Inputs:
    return lambda: [torch.randn(shape) for shape in shapes]


def parts_of_a_concat(a: Any, b: Any) -> Any:
    c = torch.cat([a, b], 0)
    return c.sin(), c[:2].cos()


def parts_beside_each_other(a: Any, b: Any) -> Any:
    c = torch.cat([a.t(), b.t()], 1)
    return c.sin(), torch.cat([c[:, 1:3].cos(), c[:, -2:]], 1)


def size_of_nonzero(x: Any, y: Any) -> Any:
    nz = torch.nonzero(x)
    return nz.expand([-1, 128]), y.expand([-1, nz.size(0)])


def product_of_unknown_length(x: Any, w: Any, r: Any) -> Any:
    u = r.item()
    return x.expand(u, 32) @ w.expand(32, u)


def number_index_put(a: Any, b: Any, c: Any) -> Any:
    return aten.index_put_(a, (None, b, None), c)


def view_of_a_view(x: Any) -> Any:
    v = x.select(2, 6)
    v.clamp_(min=-1)
    w = v.reshape(-1, 2)
    return w @ w.t(), w


def two_names_of_one(x: Any) -> Any:
    v = x.exp()
    return v, v.reshape(-1, 3)


def two_names_that_guards_relate(x: Any) -> Any:
    """With unknown sizes its strides are products of quotients, of which a guard says what they are."""
    v1 = torch.sub(x, x, alpha=2).softmax(2)
    v2 = v1.reshape((8, -1))
    v2.mul_(0.5)
    v1.add_(3)
    return v2, v1


def part_written_through_the_whole(x0: Any, x1: Any) -> Any:
    v0 = torch.sub(x1, x1, alpha=2)
    v1 = torch.add(v0, x0, alpha=2)
    v2 = v1[:8]
    v1.clamp_(min=-1)
    return v0, v2, v1


def hooked_copy(x: Any) -> Any:
    y = x.clone()
    y.register_hook(lambda gradient: gradient * 2)
    return y * x


PROGRAMS: dict[str, tuple[Any, Inputs]] = {
    "parts of a concat": (parts_of_a_concat, randn((4, 8), (5, 8))),
    "parts beside each other": (parts_beside_each_other, randn((4, 8), (5, 8))),
    "rows that a guard knows": (lambda x, y: x.view(-1, 4) * y.view(-1, 4), randn((4,), (8,))),
    "size of nonzero": (size_of_nonzero, lambda: [torch.tensor([1.0, 0.0, 2.0]), torch.randn(3, 1)]),
    "a product of unknown length": (
        product_of_unknown_length,
        lambda: [torch.randn(1, 32), torch.randn(32, 1), torch.tensor(5)],
    ),
    "unpooling into nothing": (
        nn.MaxUnpool1d(2, stride=2, padding=1),
        lambda: [torch.randn(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.int64)],
    ),
    "arguments of elu": (lambda x: aten.elu(x, 1.67, 1.05) + 2, randn((5,))),
    "index_put without names": (
        number_index_put,
        lambda: [torch.zeros(2, 5, 3), torch.tensor([1, 4, 1]), torch.randn(2, 3, 3)],
    ),
    "a tensor of two numbers": (lambda x: x * aten.add(4, 3.3), randn((3,))),
    "atan2 beside a NaN": (lambda x: torch.atan2(torch.zeros(3), x), lambda: [torch.tensor([float("nan"), 1.0, -1.0])]),
    "a fold": (nn.Fold((6, 6), 3, padding=1), randn((2, 18, 36))),
    "a view of a view": (view_of_a_view, randn((8, 1, 8, 1))),
    "two names of one": (two_names_of_one, randn((4, 3))),
    "two names that guards relate": (two_names_that_guards_relate, lambda: [torch.randn(4, 4, 8)[:, :, ::2]]),
    "a part that is written through the whole": (
        part_written_through_the_whole,
        lambda: [torch.randn(4, 16)[:1].expand(16, 16), torch.randn(16, 16, 1).permute(0, 2, 1)],
    ),
    "a copy with a hook": (hooked_copy, lambda: [torch.randn(4, requires_grad=True)]),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_eagers(name: str, dynamic: bool) -> None:
    fn, make_inputs = PROGRAMS[name]
    trains = any(isinstance(each, torch.Tensor) and each.requires_grad for each in make_inputs())
    exact = name not in ("a tensor of two numbers", "atan2 beside a NaN", "index_put without names")
    assert_same_as_eager(fn, make_inputs, options=OPTIONS, dynamic=dynamic, backward=trains, exact=exact, graphs=None)


def asserted_four(x: Any) -> Any:
    z = x.nonzero()
    torch._check(z.size(0) == 4)
    return z + 3


def steps(step: Any) -> Any:
    return torch.arange(512, -512, step)


ERRORS: dict[str, tuple[Any, Inputs, list[Any]]] = {
    "an assertion": (asserted_four, lambda: [torch.ones(4)], [torch.ones(3)]),
    "the greatest of nothing": (lambda x: x.max(), randn((3,)), [torch.empty(0)]),
    "the least of no rows": (lambda x: x.min(0), randn((3, 2)), [torch.empty(0, 2)]),
    "a pool of integers": (
        lambda x: F.adaptive_avg_pool2d(x, 2),
        randn((1, 4, 4)),
        [torch.ones(1, 4, 4, dtype=torch.int64)],
    ),
    "an index into nothing": (
        lambda x, i: x.index_select(0, i),
        lambda: [torch.randn(3), torch.tensor([1])],
        [torch.empty(0), torch.tensor([1])],
    ),
    "places outside of what is unpooled": (
        lambda x, i: F.max_unpool2d(x, i, 2),
        lambda: [torch.randn(1, 2, 2), torch.tensor([[[0, 3], [9, 15]]])],
        [torch.randn(1, 2, 2), torch.full((1, 2, 2), 99)],
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_eagers(name: str) -> None:
    fn, good, bad = ERRORS[name]
    compiled = compile_strict(fn, options=OPTIONS)
    torch.testing.assert_close(compiled(*(inputs := good())), fn(*inputs))
    with pytest.raises((RuntimeError, IndexError)) as eager:
        fn(*bad)
    with pytest.raises(type(eager.value)):
        compiled(*bad)


def test_a_symbolic_step_of_either_type() -> None:
    compiled = compile_strict(steps, options=OPTIONS, dynamic=True)
    for step in (-1, -1.0, -3, -2):
        assert torch.equal(compiled(step), steps(step))
