"""Hooks on tensors, modules and gradients see what they see in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compare import assert_same_as_eager, assert_same_tree, compile_strict


def test_tensor_hook_on_an_input(dynamic: bool) -> None:
    def double_the_gradient(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 1
        y.register_hook(lambda gradient: gradient * 2)
        return [y]

    assert_same_as_eager(
        lambda y: y.sin(),
        lambda: [torch.randn(5, requires_grad=True)],
        prepare=double_the_gradient,
        backward=True,
        dynamic=dynamic,
    )


@pytest.mark.quick
def test_tensor_hook_on_an_output(dynamic: bool) -> None:
    def gradient(call: Any, dtype: torch.dtype) -> torch.Tensor:
        x = torch.linspace(0, 1, 5, dtype=dtype, requires_grad=True)
        y = call(x)
        y.register_hook(lambda g: g * 3)
        y.sum().backward()
        return x.grad

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    compiled = compile_strict(forward, dynamic=dynamic)
    results = gradient(compiled, torch.float32), gradient(forward, torch.float32)
    assert_same_tree(*results, gradient(forward, torch.float64), "gradient")


def test_tensor_hook_registered_inside() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.register_hook(lambda gradient: gradient * 2 + 1)
        return y * 3

    assert_same_as_eager(forward, lambda: [torch.randn(5, requires_grad=True)], backward=True, dynamic=False)


IDLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": torch.clone,
    "times one": lambda x: x * 1,
    "all of it": lambda x: x[:],
    "a view": lambda x: x.view(x.shape),
    "itself": lambda x: x.contiguous(),
    "nothing is idle": torch.sin,
}


@pytest.mark.parametrize("name", IDLE)
def test_a_hook_is_on_the_tensor_that_it_was_registered_on(name: str) -> None:
    """What has the same numbers has another gradient."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = IDLE[name](x.exp())
        y.register_hook(lambda gradient: gradient * 2)
        z = IDLE[name](x)
        z.register_hook(lambda gradient: gradient * 3)
        return y * x.exp() + z * x

    assert_same_as_eager(forward, lambda: [torch.randn(5, requires_grad=True)], backward=True, fullgraph=True)


def test_post_accumulate_hook_runs_once_per_backward() -> None:
    model = torch.nn.Linear(3, 2)
    seen: list[torch.Tensor] = []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    compiled = compile_strict(model)
    for _ in range(2):
        compiled(torch.ones(4, 3)).sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], torch.full((2, 3), 4.0))
    assert torch.equal(seen[1], torch.full((2, 3), 8.0))


def test_intermediate_with_retained_gradient() -> None:
    """The output's own gradient can be asked for."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(3, requires_grad=True)
    y = compile_strict(forward)(x)
    y.retain_grad()
    (y * torch.arange(3.0)).sum().backward()
    assert torch.equal(y.grad, torch.arange(3.0))
    assert torch.equal(x.grad, torch.arange(3.0) * 2)


class Hooked(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        if kind == "forward":
            self.inner.register_forward_hook(lambda module, args, output: output * 2)
        elif kind == "forward_pre":
            self.inner.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        else:
            self.inner.register_full_backward_hook(lambda module, before, after: (before[0] * 2,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.sin()).tanh()


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "backward"])
def test_module_hooks_inside(kind: str) -> None:
    assert_same_as_eager(Hooked(kind), lambda: [torch.randn(3, 4, requires_grad=True)], backward=True, dynamic=False)


def test_module_hooks_on_the_compiled_module() -> None:
    model = torch.nn.Linear(3, 2)
    compiled = compile_strict(model)
    order: list[str] = []
    compiled.register_forward_pre_hook(lambda module, args: order.append("before"))
    compiled.register_forward_hook(lambda module, args, output: order.append("after"))
    x = torch.randn(2, 3)
    assert_same_tree(compiled(x), model(x), copy.deepcopy(model).double()(x.double()), "output")
    assert order == ["before", "after"]


def test_saved_tensor_hooks_around_the_call() -> None:
    """Offloading hooks see what the compiled forward saves, and the gradient survives the round trip."""
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.exp()).sum()

    compiled = compile_strict(forward)
    grads = []
    for call, dtype in ((compiled, torch.float32), (forward, torch.float32), (forward, torch.float64)):
        x = torch.linspace(0, 1, 7, dtype=dtype, requires_grad=True)
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = call(x)
        assert packed
        loss.backward()
        grads.append(x.grad)
    assert_same_tree(*grads, what="gradient")


@pytest.mark.parametrize("is_same", [True, False], ids=["tensors", "other objects"])
def test_what_saved_tensor_hooks_keep_is_not_written(is_same: bool) -> None:
    """What the forward saves for nobody else the backward may overwrite, unless hooks have seen it."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = (x @ x).tanh()
        return (h * h.sigmoid()).sin() * h.exp()

    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> Any:
        kept.append(tensor)
        return tensor if is_same else len(kept) - 1

    x = torch.randn(16, 16, requires_grad=True)
    compiled = compile_strict(forward)
    compiled(x).sum().backward()  # the backward is compiled before there are hooks
    for _ in range(2):
        kept.clear()
        x.grad = None
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed if is_same else kept[packed]):
            result = compiled(x)
        before = [tensor.clone() for tensor in kept]
        result.sum().backward()
        assert len(kept) > 1
        assert all(map(torch.equal, kept, before))
        wide = x.detach().double().requires_grad_()
        grads = [torch.autograd.grad(forward(each).sum(), each)[0] for each in (x, wide)]
        assert_same_tree(x.grad, *grads, what="gradient")
