"""Tensor subclasses: one made of two tensors, and a plain one that only adds behaviour."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.compare import assert_same_as_eager, compile_strict


class TwoTensor(torch.Tensor):
    """A pair of tensors of one shape; every operator runs on each of them."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> TwoTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            a.shape,
            strides=a.stride(),
            storage_offset=a.storage_offset(),
            dtype=a.dtype,
            device=a.device,
            requires_grad=a.requires_grad,
        )

    @torch.compiler.disable  # torch 2.11 would trace it, when a result is wrapped, and fail
    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a = a
        self.b = b

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: Any, size: Any, stride: Any) -> TwoTensor:
        return TwoTensor(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}

        def side(name: str) -> Any:
            part = lambda t: getattr(t, name) if isinstance(t, TwoTensor) else t  # noqa: E731
            return func(*pytree.tree_map(part, args), **pytree.tree_map(part, kwargs))

        left, right = side("a"), side("b")
        joined = pytree.tree_map(lambda a, b: TwoTensor(a, b) if isinstance(a, torch.Tensor) else a, left, right)
        return torch.utils._python_dispatch.return_and_correct_aliasing(func, args, kwargs, joined)


def pair(*shape: int, requires_grad: bool = False) -> TwoTensor:
    return TwoTensor(torch.randn(*shape), torch.randn(*shape)).requires_grad_(requires_grad)


WRAPPED = {
    "pointwise": lambda x: x.sin() * 2 + 1,
    "reduction": lambda x: (x.sum(0), x.mean()),
    "matrix_product": lambda x: x @ x.t(),
    "transpose_and_copy": lambda x: x.t().contiguous() + 1,
    "several": lambda x: {"a": x + 1, "b": [x * 2, None, 3]},
}
TERMS = {"reduction": 3.0}  # sums of numbers drawn from a normal distribution, which may cancel


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapper_subclass(name: str, rarely_dynamic: bool) -> None:
    assert_same_as_eager(WRAPPED[name], lambda: [pair(3, 4)], dynamic=rarely_dynamic, terms=TERMS.get(name, 0.0))


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapper_subclass_in_training(name: str) -> None:
    def make_inputs() -> list[TwoTensor]:
        return [pair(3, 4, requires_grad=True)]

    assert_same_as_eager(WRAPPED[name], make_inputs, backward=True, dynamic=False, terms=TERMS.get(name, 0.0))


def test_wrapper_subclass_with_a_plain_tensor(dynamic: bool) -> None:
    assert_same_as_eager(lambda x, y: (x * y, y + 1), lambda: [pair(3, 4), torch.randn(3, 4)], dynamic=dynamic)


def test_wrapper_subclass_made_inside() -> None:
    assert_same_as_eager(lambda x: TwoTensor(x.sin(), x.cos()) * 2, lambda: [torch.randn(3)], dynamic=False)


def test_wrapper_subclass_written_in_place() -> None:
    def change(x: TwoTensor) -> torch.Tensor:
        x.mul_(2)
        return x + 1

    assert_same_as_eager(change, lambda: [pair(3)], dynamic=False)


def test_wrapper_subclass_as_a_parameter() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.full((3,), 2.0)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    model = Model()
    out = compile_strict(model)(torch.full((3,), 5.0))
    assert type(out) is TwoTensor
    assert torch.equal(out.a, torch.full((3,), 5.0))
    assert torch.equal(out.b, torch.full((3,), 10.0))
    out.sum().backward()
    assert torch.equal(model.weight.grad.a, torch.full((3,), 5.0))  # type: ignore[attr-defined]
    assert torch.equal(model.weight.grad.b, torch.full((3,), 5.0))  # type: ignore[attr-defined]


class Named(torch.Tensor):
    """A plain subclass: the storage is an ordinary one, the type is kept by operators."""

    def doubled(self) -> torch.Tensor:
        return self * 2


def named(*shape: int) -> Named:
    return torch.randn(*shape).as_subclass(Named)


@pytest.mark.parametrize(
    "fn",
    [lambda x: x.sin() + 1, lambda x: x.doubled(), lambda x: (x.sum(0), x * 2), lambda x: x.t() + 1],
    ids=["operator", "method", "several", "view"],
)
def test_plain_subclass_keeps_its_type(fn: Any) -> None:
    assert_same_as_eager(fn, lambda: [named(3, 4)], dynamic=False)


def test_plain_subclass_with_a_plain_tensor() -> None:
    assert_same_as_eager(lambda x, y: (x + y, y * 2), lambda: [named(3), torch.randn(3)], dynamic=False)


class OtherSine(torch.Tensor):
    """Its sine is another one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 3 if func is torch.sin else out


def test_torch_function_of_a_subclass_is_traced() -> None:
    assert_same_as_eager(
        lambda x: (torch.sin(x) + 1).as_subclass(torch.Tensor),
        lambda: [torch.randn(3).as_subclass(OtherSine)],
        dynamic=False,
    )


def ragged(*lengths: int, requires_grad: bool = False) -> torch.Tensor:
    """Rows of several lengths in one tensor."""
    torch.manual_seed(0)
    rows = [torch.randn(length, 3) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=requires_grad)


def test_nested_tensors_of_several_raggednesses() -> None:
    """A ragged size is a name and no number: one graph serves all of them."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).sin()

    compiled = compile_strict(scaled)
    for lengths in ((2, 4), (1, 3, 5), (3, 3)):
        x = ragged(*lengths)
        found, expected = compiled(x), scaled(x)
        assert found.shape[0] == expected.shape[0] == len(lengths)
        torch.testing.assert_close(found.values(), expected.values())
        assert torch.equal(found.offsets(), x.offsets())  # type: ignore[attr-defined]


def test_nested_tensors_made_inside_and_in_training() -> None:
    def made(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(values * 2, offsets).sin().values()

    offsets = torch.tensor([0, 2, 6])
    inputs = [torch.randn(6, 3, requires_grad=True) for _ in range(2)]
    with torch.no_grad():
        inputs[1].copy_(inputs[0])
    found, expected = compile_strict(made)(inputs[0], offsets), made(inputs[1], offsets)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


def test_nested_tensors_of_two_raggednesses_in_one_graph() -> None:
    def made(values: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one = torch.nested.nested_tensor_from_jagged(values * 2, first)
        return one, torch.nested.nested_tensor_from_jagged(values * 3, second)

    values, first, second = torch.randn(6, 2), torch.tensor([0, 2, 6]), torch.tensor([0, 1, 6])
    for found, expected in zip(compile_strict(made)(values, first, second), made(values, first, second), strict=True):
        torch.testing.assert_close(found.values(), expected.values())
        assert torch.equal(found.offsets(), expected.offsets())  # type: ignore[attr-defined]
