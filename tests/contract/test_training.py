"""Backward: hooks, accumulation, partial use, custom functions, double backward and optimizer steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import ferrite
from tests.compare import assert_same_as_eager, assert_same_tree, compile_strict


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 3))


def test_gradients_accumulate_over_calls(dynamic: bool) -> None:
    assert_same_as_eager(
        network(), lambda: [torch.randn(4, 6, requires_grad=True)], backward=True, calls=3, dynamic=dynamic
    )


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_batch_norm_statistics_over_calls(mode: bool, dynamic: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()).train(mode)
    assert_same_as_eager(model, lambda: [torch.randn(2, 3, 6, 6)], backward=True, calls=3, dynamic=dynamic)


def test_batch_norm_statistics_without_gradients() -> None:
    model = torch.nn.BatchNorm1d(5, momentum=0.3, affine=False)
    assert_same_as_eager(model, lambda: [torch.randn(8, 5)], calls=3, dynamic=False)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
}


def trajectory(make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype, compiled: bool) -> Any:
    torch.manual_seed(0)
    model = network()
    batches = [(torch.randn(4, 6).to(dtype), torch.randn(4, 3).to(dtype)) for _ in range(3)]
    model = model.to(dtype)
    optimizer = make(model.parameters())
    call = compile_strict(model) if compiled else model
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = functional.mse_loss(call(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, dict(model.state_dict())


@pytest.mark.quick
@pytest.mark.parametrize(
    "name", ["sgd", *(pytest.param(name, marks=pytest.mark.lengthy) for name in ("adam", "adamw"))]
)
def test_three_optimizer_steps_follow_eager(name: str) -> None:
    make = OPTIMIZERS[name]
    ours = trajectory(make, torch.float32, True)
    eager = trajectory(make, torch.float32, False)
    assert_same_tree(ours, eager, trajectory(make, torch.float64, False), "after three steps")


def test_whole_training_step_compiled() -> None:
    """Forward, backward and the update inside one compiled function."""

    def train(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        loss = (x @ w).sin().sum()
        (gradient,) = torch.autograd.grad(loss, w)
        with torch.no_grad():
            w.sub_(gradient, alpha=0.1)
        return loss.detach()

    assert_same_as_eager(
        train, lambda: [torch.randn(6, 2, requires_grad=True), torch.randn(4, 6)], calls=3, dynamic=False
    )


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_compiled_optimizer_step(make: str, llvm_kernels: None) -> None:
    def steps(compiled: bool, dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [torch.randn(3, 4).to(dtype).requires_grad_() for _ in range(2)]
        optimizer = OPTIMIZERS[make](weights)
        step = compile_strict(optimizer.step) if compiled else optimizer.step
        for i in range(3):
            for w in weights:
                w.grad = torch.full_like(w, 0.5 + i)
            step()
        return weights

    assert_same_tree(steps(True, torch.float32), steps(False, torch.float32), steps(False, torch.float64), "weight")
    assert [call.operator for graph in ferrite.last_compile().graphs for call in graph.eager_calls] == []


def several(x, w):
    return x @ w, (x * 2).sin(), w.exp().sum()


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_only_some_outputs_used_in_the_loss(used: tuple[int, ...], rarely_dynamic: bool) -> None:
    def gradients(call: Any, dtype: torch.dtype) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        x, w = (torch.randn(4, 4).to(dtype).requires_grad_() for _ in range(2))
        outputs = call(x, w)
        sum(outputs[i].sum() for i in used).backward()
        return [None if t.grad is None else t.grad for t in (x, w)]

    ours = gradients(compile_strict(several, dynamic=rarely_dynamic), torch.float32)
    eager = gradients(several, torch.float32)
    exact = gradients(several, torch.float64)
    # One backward graph serves all outputs: an unused one gives zeros where eager gives None.
    for mine, theirs, true in zip(ours, eager, exact, strict=True):
        if theirs is None:
            assert mine is None or not mine.any()
        else:
            assert_same_tree(mine, theirs, true, "gradient")


@pytest.mark.parametrize("required", [(True, False), (False, True), (False, False)], ids=str)
def test_only_some_inputs_require_grad(required: tuple[bool, bool], rarely_dynamic: bool) -> None:
    assert_same_as_eager(
        lambda x, w: (x @ w).tanh(),
        lambda: [torch.randn(4, 4, requires_grad=r) for r in required],
        backward=any(required),
        dynamic=rarely_dynamic,
    )


def test_retain_graph_gives_the_gradient_twice() -> None:
    """With static sizes; with symbolic ones AOTAutograd compiles backward too early to know, and refuses."""

    def twice(call: Any, dtype: torch.dtype) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(4, 4).to(dtype).requires_grad_()
        loss = call(x)
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() @ x.exp()).sum()

    compiled = compile_strict(loss, dynamic=False)
    assert_same_tree(twice(compiled, torch.float32), twice(loss, torch.float32), twice(loss, torch.float64), "")


def test_second_backward_without_retain_graph_raises_as_in_eager() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.exp()).sum()

    for call in (loss, compile_strict(loss)):
        value = call(torch.randn(4, requires_grad=True))
        value.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            value.backward()


def test_double_backward_outside_is_refused_not_wrong() -> None:
    """AOTAutograd does not differentiate its backward; it has to say so."""
    x = torch.randn(4, requires_grad=True)
    (gradient,) = torch.autograd.grad(compile_strict(lambda x: x.sin().sum())(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


def test_autograd_grad_outside(dynamic: bool) -> None:
    def outer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * w).sin().sum()

    def gradients(call: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        x, w = (torch.randn(5).to(dtype).requires_grad_() for _ in range(2))
        return torch.autograd.grad(call(x, w), (x, w))

    ours = gradients(compile_strict(outer, dynamic=dynamic), torch.float32)
    assert_same_tree(ours, gradients(outer, torch.float32), gradients(outer, torch.float64), "gradient")


def test_autograd_grad_inside(dynamic: bool) -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(y.sin().sum(), y)
        return gradient * 2

    assert_same_as_eager(inner, lambda: [torch.randn(5)], dynamic=dynamic)


class ScaledSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * x * ctx.scale * 3, None  # not the true derivative, so that ours can be told from it


def test_autograd_function(dynamic: bool) -> None:
    assert_same_as_eager(
        lambda x: ScaledSquare.apply(x.sin(), 0.5) + 1,
        lambda: [torch.randn(5, requires_grad=True)],
        backward=True,
        dynamic=dynamic,
    )


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = x.argsort()
        ctx.save_for_backward(index)
        ctx.mark_non_differentiable(index)
        return x * 2, index

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        (index,) = ctx.saved_tensors
        return gradient[index]


def test_autograd_function_with_a_non_differentiable_output() -> None:
    assert_same_as_eager(
        lambda x: TwoOutputs.apply(x + 1),
        lambda: [torch.randn(5, requires_grad=True)],
        backward=True,
        dynamic=False,
    )


def test_gradient_of_a_non_contiguous_and_an_expanded_tangent(dynamic: bool) -> None:
    """Tangents arrive in layouts the trace did not see."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    def gradients(call: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        found = []
        for tangent in (torch.randn(6, 4).t(), torch.randn(1).expand(4, 6), torch.randn(8, 12)[::2, ::2]):
            x = torch.linspace(-1, 1, 24).reshape(4, 6).to(dtype).requires_grad_()
            call(x).backward(tangent.to(dtype))
            found.append(x.grad)
        return found

    compiled = compile_strict(forward, dynamic=dynamic)
    results = []
    for call, dtype in ((compiled, torch.float32), (forward, torch.float32), (forward, torch.float64)):
        torch.manual_seed(0)
        results.append(gradients(call, dtype))
    for mine, theirs, true in zip(*results, strict=True):
        # the strides of a gradient are not promised; its values are
        assert_same_tree(mine.contiguous(), theirs.contiguous(), true.contiguous(), "gradient")


def test_gradient_set_to_none_between_steps() -> None:
    model = network()
    ours = copy.deepcopy(model)
    compiled = compile_strict(ours)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(4, 6)
        for call, own in ((model, model), (compiled, ours)):
            own.zero_grad(set_to_none=True)
            call(x).square().sum().backward()
        exact = copy.deepcopy(model).double()
        exact.zero_grad()
        exact(x.double()).square().sum().backward()
        grads = ([p.grad for p in m.parameters()] for m in (ours, model, exact))
        assert_same_tree(*grads, what="gradient")


@pytest.mark.parametrize(("rows", "check_bounds"), [(9 << 20, False), (6, True), (6, False)])
def test_gradients_are_added_in_place_as_in_eager(rows: int, check_bounds: bool) -> None:
    """Whoever asks a gradient for its storage keeps autograd from adding the next one to it; strides show that, and so
    does the memory of large ones."""

    def fn(x, y):
        return torch.where(x > 0, x, 2), y.sin()

    torch.compiler.reset()
    compiled = compile_strict(fn, options={"check_bounds": check_bounds})
    found = []
    for function in (fn, compiled):
        leaf = torch.ones(rows, 1, requires_grad=True)
        row = leaf.permute(1, 0)
        sum(each.sum() for each in function(row, row.t())).backward()
        found.append(leaf.grad)
    assert found[0].stride() == found[1].stride() == (1, 1)
    torch.testing.assert_close(found[1], found[0])
