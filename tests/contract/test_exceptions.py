"""Errors are eager's: while running, the same type and message; while tracing, what Dynamo alone would raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.compare import assert_same_as_eager, compile_strict, compiled_graphs, reset


def error_of(call: Callable[..., Any], inputs: Sequence[Any]) -> Exception:
    try:
        call(*inputs)
    except Exception as error:
        return error
    raise AssertionError("no error was raised")


@pytest.mark.quick
def test_error_raised_by_the_user_keeps_type_and_message(dynamic: bool) -> None:
    def fn(x: torch.Tensor, flag: bool) -> torch.Tensor:
        y = x * 2
        if flag:
            raise ValueError(f"cannot take {x.dim()} dimensions")
        return y

    compiled = compile_strict(fn, dynamic=dynamic)
    with pytest.raises(ValueError, match="cannot take 1 dimensions"):
        compiled(torch.ones(3), True)
    assert torch.equal(compiled(torch.ones(3), False), torch.full((3,), 2.0))


def test_error_class_of_the_user(dynamic: bool) -> None:
    class OwnError(Exception):
        pass

    def fn(x: torch.Tensor) -> torch.Tensor:
        if (x * 2).sum() > 0:
            raise OwnError("positive")
        return x + 1

    compiled = compile_strict(fn, dynamic=dynamic)
    with pytest.raises(OwnError, match="positive"):
        compiled(torch.ones(3))
    assert torch.equal(compiled(-torch.ones(3)), torch.zeros(3))


def test_error_caught_inside_the_function() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        try:
            raise KeyError("inside")
        except KeyError:
            x = x * 3
        finally:
            x = x + 1
        return x

    assert_same_as_eager(fn, lambda: [torch.ones(3)], dynamic=False)


def test_writes_before_an_error_have_happened() -> None:
    def fn(x: torch.Tensor) -> None:
        x.add_(1)
        torch._dynamo.graph_break()
        raise ValueError("after the write")

    x = torch.zeros(3)
    with pytest.raises(ValueError, match="after the write"):
        compile_strict(fn)(x)
    assert torch.equal(x, torch.ones(3))
    assert compiled_graphs() == 1


# Found while tracing, from shapes and dtypes alone.
TRACED = {
    "shape_mismatch": (lambda x, y: (x * 2) + y, lambda: [torch.ones(3), torch.ones(4)]),
    "matrix_shapes": (lambda x, y: (x + 1) @ y, lambda: [torch.ones(3, 4), torch.ones(5, 2)]),
    "wrong_dtype": (lambda x, y: (x + 1) @ y, lambda: [torch.ones(3, 4), torch.ones(4, 2, dtype=torch.int64)]),
    "view_of_wrong_size": (lambda x: (x + 1).view(7), lambda: [torch.ones(6)]),
    "dimension_out_of_range": (lambda x: x.sum(3), lambda: [torch.ones(2, 2)]),
    "bitwise_on_floats": (lambda x: x & x, lambda: [torch.ones(3)]),
    "float_index": (lambda x, i: x[i], lambda: [torch.ones(3), torch.tensor([0.5])]),
    "constant_index_out_of_range": (lambda x: x[5] + 1, lambda: [torch.ones(3)]),
    "missing_argument": (lambda x: torch.add(x) + 1, lambda: [torch.ones(3)]),
}


@pytest.mark.parametrize("name", TRACED)
def test_error_found_while_tracing(name: str, rarely_dynamic: bool) -> None:
    """The floor is Dynamo itself: with ferrite behind it, an error of the same type (or a subclass of it)."""
    fn, inputs = TRACED[name]
    assert error_of(fn, inputs())
    floor = error_of(torch.compile(fn, backend="eager", dynamic=rarely_dynamic), inputs())
    reset()
    ours = error_of(compile_strict(fn, dynamic=rarely_dynamic), inputs())
    assert isinstance(ours, type(floor))
    assert str(ours).splitlines()[0] == str(floor).splitlines()[0]


# Found only while running, from values.
RUN = {
    "embedding": (lambda i: torch.nn.functional.embedding(i, torch.ones(4, 3)) * 2, [0, 1], [0, 4]),
    "embedding_negative": (lambda i: torch.nn.functional.embedding(i, torch.ones(4, 3)) * 2, [0], [-1]),
    "index": (lambda i: torch.arange(5.0)[i] + 1, [0, 4, -5], [0, 5]),
    "index_below": (lambda i: torch.arange(5.0)[i] + 1, [0, 4, -5], [-6]),
    "index_of_two": (lambda i: torch.ones(3, 4)[i, i] + 1, [0, 2], [3]),
    "index_put": (lambda i: torch.zeros(4).index_put((i,), torch.ones(())) * 2, [1], [7]),
    "index_select": (lambda i: torch.arange(5.0).index_select(0, i) + 1, [0, 4], [5]),
    "gather": (lambda i: torch.arange(5.0).gather(0, i) + 1, [0, 4], [5]),
    "scatter": (lambda i: torch.zeros(5).scatter(0, i, 1.0) + 1, [0, 4], [6]),
    "index_add": (lambda i: torch.zeros(5).index_add(0, i, torch.ones(1)) + 1, [0], [5]),
    "floor_division_by_zero": (lambda i: torch.arange(3) // i, [1, 2, 3], [1, 0, 3]),
    "remainder_by_zero": (lambda i: torch.arange(3) % i, [1, 2, 3], [1, 0, 3]),
    "fmod_by_zero": (lambda i: torch.fmod(torch.arange(3), i), [1, 2, 3], [0, 1, 3]),
    "class_out_of_range": (lambda i: torch.nn.functional.nll_loss(torch.ones(2, 3), i), [0, 2], [0, 3]),
    "negative_probability": (lambda i: torch.multinomial(i.float(), 1) * 2, [1, 2], [-1, 2]),
    "singular_matrix": (lambda i: torch.linalg.inv(torch.diag(i.float())) * 2, [1, 2], [0, 0]),
    "not_positive_definite": (lambda i: torch.linalg.cholesky(torch.diag(i.float())) * 2, [1, 2], [-1, 0]),
}


@pytest.mark.parametrize("name", RUN)
def test_error_found_while_running(name: str, rarely_dynamic: bool) -> None:
    fn, good, bad = RUN[name]
    compiled = assert_same_as_eager(
        fn, lambda: [torch.tensor(good)], exact=name != "negative_probability", dynamic=rarely_dynamic
    )
    eager, ours = error_of(fn, [torch.tensor(bad)]), error_of(compiled, [torch.tensor(bad)])
    assert type(ours) is type(eager)
    assert str(ours) == str(eager)
    assert torch.equal(compiled(torch.tensor(good)), fn(torch.tensor(good))), "unusable after the error"


def test_first_call_fails_and_the_next_works(dynamic: bool) -> None:
    compiled = compile_strict(lambda i: torch.arange(5.0)[i] * 2, dynamic=dynamic)
    with pytest.raises(IndexError, match="out of bounds"):
        compiled(torch.tensor([0, 5]))
    assert torch.equal(compiled(torch.tensor([1, 4])), torch.tensor([2.0, 8.0]))


def test_failed_call_leaves_inputs_of_other_calls_alone() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x[i]

    compiled = compile_strict(fn)
    x = torch.zeros(3)
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([3]))
    y = torch.zeros(3)
    assert torch.equal(compiled(y, torch.tensor([2])), torch.ones(1))
    assert torch.equal(y, torch.ones(3))


def test_tangent_of_the_wrong_shape_raises_as_in_eager() -> None:
    x = torch.ones(3, requires_grad=True)
    out = compile_strict(lambda x: x * 2)(x)
    with pytest.raises(RuntimeError, match="Mismatch in shape: grad_output"):
        out.backward(torch.ones(4))
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_backward_of_a_result_without_grad_raises_as_in_eager() -> None:
    compiled = compile_strict(lambda x: x * 2)
    with pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn"):
        compiled(torch.ones(3)).sum().backward()


def test_wrong_arguments_raise_type_error() -> None:
    compiled = compile_strict(lambda x, y: x + y)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        compiled(torch.ones(3))
    assert torch.equal(compiled(torch.ones(3), 1), torch.full((3,), 2.0))
