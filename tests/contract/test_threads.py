"""Compiling and running from several threads at once: right answers, and nobody waits for ever."""

from __future__ import annotations

import pytest
import torch

from tests.compare import assert_no_farther, compile_strict, compiled_graphs, since
from tests.threads import in_threads


def assert_right(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    assert_no_farther(ours, eager, exact, "output of a thread")


def softened(x):
    return (x.sin() * 2 + x.exp()).softmax(-1)


def centred(x):
    return (x - x.mean(0)).tanh() @ x.t()


@pytest.mark.quick
def test_same_function_compiled_by_two_threads() -> None:
    compiled = compile_strict(softened)
    inputs = [torch.randn(8, 16) for _ in range(2)]
    outputs = in_threads([lambda x=x: compiled(x) for x in inputs])
    for x, out in zip(inputs, outputs, strict=True):
        assert_right(out, softened(x), softened(x.double()))
    assert compiled_graphs() >= 1


def test_different_functions_compiled_by_two_threads() -> None:
    x = torch.randn(8, 16)
    fns = [softened, centred]
    outputs = in_threads([lambda fn=fn: compile_strict(fn)(x) for fn in fns])
    for fn, out in zip(fns, outputs, strict=True):
        assert_right(out, fn(x), fn(x.double()))
    assert compiled_graphs() == 2


def test_compiled_function_run_many_times_by_four_threads() -> None:
    """Scratch memory of one call must not be seen by another."""
    compiled = compile_strict(centred)
    compiled(torch.randn(32, 64))
    inputs = [torch.randn(32, 64) for _ in range(4)]

    def work(x: torch.Tensor) -> list[torch.Tensor]:
        return [compiled(x) for _ in range(50)]

    outputs = in_threads([lambda x=x: work(x) for x in inputs])
    for x, outs in zip(inputs, outputs, strict=True):
        eager, exact = centred(x), centred(x.double())
        for out in outs:
            assert_right(out, eager, exact)


@since(2, 12)  # Dynamo takes another thread's tracing for its own
def test_different_sizes_in_different_threads() -> None:
    compiled = compile_strict(softened, dynamic=True)
    inputs = [torch.randn(rows, 16) for rows in (3, 5, 9, 17)]
    outputs = in_threads([lambda x=x: [compiled(x) for _ in range(10)] for x in inputs])
    for x, outs in zip(inputs, outputs, strict=True):
        for out in outs:
            assert_right(out, softened(x), softened(x.double()))


@since(2, 12)  # Dynamo takes another thread's tracing for its own
def test_training_in_two_threads() -> None:
    """Backward is compiled lazily, in whichever thread comes first."""
    compiled = compile_strict(softened)

    def work(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            leaf = x.clone().requires_grad_()
            compiled(leaf).square().sum().backward()
        return leaf.grad

    inputs = [torch.randn(8, 16) for _ in range(2)]
    grads = in_threads([lambda x=x: work(x) for x in inputs])
    for x, grad in zip(inputs, grads, strict=True):
        expected = []
        for value in (x, x.double()):
            leaf = value.clone().requires_grad_()
            softened(leaf).square().sum().backward()
            expected.append(leaf.grad)
        assert_right(grad, *expected)


def test_backward_in_another_thread_than_forward() -> None:
    x = torch.linspace(-1, 1, 12).requires_grad_()
    loss = compile_strict(lambda x: x.sin().sum())(x)
    in_threads([loss.backward])
    assert_right(x.grad, x.detach().cos(), x.detach().double().cos())


def test_error_in_one_thread_does_not_reach_the_other() -> None:
    compiled = compile_strict(lambda i: torch.arange(5.0)[i] * 2)
    compiled(torch.tensor([0]))

    def fail() -> str:
        with pytest.raises(IndexError) as caught:
            compiled(torch.tensor([7]))
        return str(caught.value)

    message, out = in_threads([fail, lambda: compiled(torch.tensor([2]))])
    assert "out of bounds" in message
    assert torch.equal(out, torch.tensor([4.0]))


def test_grad_mode_is_per_thread() -> None:
    compiled = compile_strict(lambda x: x * 2)
    x = torch.ones(3, requires_grad=True)

    def without_grad() -> torch.Tensor:
        with torch.no_grad():
            return compiled(x)

    without, with_grad = in_threads([without_grad, lambda: compiled(x)])
    assert not without.requires_grad
    assert with_grad.requires_grad
