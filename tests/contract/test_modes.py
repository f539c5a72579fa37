"""Autocast, grad modes and detach, around the call and inside the function."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from tests.compare import assert_same_as_eager, assert_same_tree, compile_strict, since

MODES = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_disabled": lambda: torch.set_grad_enabled(False),
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast_half": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast_off": lambda: torch.autocast("cpu", enabled=False),
}


def compute(x, w):
    return (x @ w).softmax(-1), x.sin().sum(), w.t() * 2


def make_inputs() -> list[torch.Tensor]:
    return [torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)]


def run_in(mode: str, call: Any, upcast: bool = False) -> Any:
    torch.manual_seed(0)
    inputs = [t.detach().double().requires_grad_() if upcast else t for t in make_inputs()]
    context: AbstractContextManager[Any] = MODES[mode]()
    with context:
        return call(*inputs)


@pytest.mark.parametrize("mode", MODES)
def test_mode_around_the_call(mode: str) -> None:
    ours = run_in(mode, compile_strict(compute))
    assert_same_tree(ours, run_in(mode, compute), run_in(mode, compute, upcast=True), mode)


def test_changing_the_mode_around_the_call() -> None:
    """One compiled function under every mode in turn: modes are guarded, not baked in."""
    compiled = compile_strict(compute)
    for mode in (*MODES, *MODES):
        ours = run_in(mode, compiled)
        assert_same_tree(ours, run_in(mode, compute), run_in(mode, compute, upcast=True), mode)


@pytest.mark.parametrize("mode", [m for m in MODES if m != "inference_mode"])
def test_mode_inside_the_function(mode: str, rarely_dynamic: bool) -> None:
    def inside(x: torch.Tensor, w: torch.Tensor) -> Any:
        before = x.exp()
        with MODES[mode]():
            within = before @ w
        return before, within, within.float() * 2 + x

    assert_same_as_eager(inside, make_inputs, backward=True, dynamic=rarely_dynamic)


def test_inference_mode_inside_the_function() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return x.sin() + 1

    x = torch.randn(3, requires_grad=True)
    assert_same_tree(compile_strict(inside)(x), inside(x), inside(x.double()), "output")


def test_outputs_under_inference_mode_are_inference_tensors(dynamic: bool) -> None:
    compiled = compile_strict(lambda x: (x + 1, x[0]), dynamic=dynamic)
    with torch.inference_mode():
        fresh, _ = compiled(torch.zeros(3))
    assert fresh.is_inference()
    fresh, _ = compiled(torch.zeros(3))
    assert not fresh.is_inference()


def test_inference_tensors_as_inputs(dynamic: bool) -> None:
    with torch.inference_mode():
        x = torch.linspace(0, 1, 6)
    compiled = compile_strict(lambda x: x.exp() * 2, dynamic=dynamic)
    with torch.inference_mode():
        assert_same_tree(compiled(x), x.exp() * 2, x.double().exp() * 2, "output")


@since(2, 12)
def test_grad_mode_switched_inside_and_left_switched() -> None:
    def switch(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch.set_grad_enabled(False)
        return y + 1

    compiled = compile_strict(switch)
    try:
        out = compiled(torch.ones(3, requires_grad=True))
        assert torch.is_grad_enabled() is False
        assert not out.requires_grad
    finally:
        torch.set_grad_enabled(True)


@torch.no_grad()
def without_grad(x):
    return x.exp()


def switch_back_and_forth(x, w):
    y = x * w
    with torch.no_grad():
        z = y.sin()
        with torch.enable_grad():
            t = y.cos() * w
    return y, z, t


DETACHING = {
    "detach": lambda x, w: (x * w).detach() * w,
    "detach_output": lambda x, w: ((x * w).detach(), x * w),
    "decorated_no_grad": lambda x, w: without_grad(x) * w,
    "back_and_forth": switch_back_and_forth,
    "stop_one_branch": lambda x, w: x.detach().sin() * w + x * w.detach(),
    "detach_and_write": lambda x, w: ((x * w).clone().detach().add_(1), x * w),
    "requires_grad_inside": lambda x, w: (x.detach().requires_grad_() * 2).detach() * w,
    "data_attribute": lambda x, w: (x * w) + w.data * 3,
}


@pytest.mark.parametrize("name", DETACHING)
def test_detach_and_grad_switches(name: str, dynamic: bool) -> None:
    assert_same_as_eager(DETACHING[name], make_inputs, backward=True, dynamic=dynamic)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_inside_a_module_in_training(dtype: torch.dtype, dynamic: bool) -> None:
    class Cast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 5)
            self.norm = torch.nn.LayerNorm(5)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=dtype):
                y = self.linear(x)
                return self.norm(y), y, y.softmax(-1)

    assert_same_as_eager(Cast(), lambda: [torch.randn(4, 6, requires_grad=True)], backward=True, dynamic=dynamic)


def test_autocast_around_forward_with_backward_outside() -> None:
    def gradients(call: Any, model: torch.nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        x = torch.randn(4, 6).to(next(model.parameters()).dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = call(x).float().square().sum()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    eager = gradients(model, model)
    ours = gradients(compile_strict(model), model)
    exact_model = model.double()
    # in float64, autocast changes nothing: the true gradient
    assert_same_tree(ours, eager, gradients(exact_model, exact_model), "gradient")


def test_default_dtype_is_obeyed() -> None:
    def make(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(3) * 0.5 + x.sum()

    compiled = compile_strict(make)
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert compiled(torch.zeros(2)).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_deterministic_algorithms_setting_is_obeyed() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_as_eager(
            lambda x, i: x.index_add(0, i, torch.ones(3, 4, dtype=x.dtype)),
            lambda: [torch.randn(5, 4), torch.tensor([1, 1, 2])],
            dynamic=False,
        )
    finally:
        torch.use_deterministic_algorithms(False)


def test_tensors_without_memory_stay_without() -> None:
    """Fake tensors of the user's own: shapes come out, in training too, and real tensors are computed afterwards."""
    layer = compile_strict(torch.nn.Linear(3, 2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.rand(5, 3, requires_grad=True)
        found = compile_strict(lambda x: (x.sin() + 1).t())(x)
        assert isinstance(found, FakeTensor)
        assert (found.shape, found.stride()) == ((3, 5), (1, 3))
        found.sum().backward()
        assert isinstance(x.grad, FakeTensor)
        lists = torch.fx.symbolic_trace(lambda inputs: (inputs[0] + inputs[1],))
        torch._dynamo.utils.set_locals_to_steal(lists, ["inputs"])  # the whole list is one input of the graph
        assert isinstance(compile_strict(lists)([torch.ones(2), torch.ones(1)])[0], FakeTensor)
    assert layer(torch.ones(4, 3)).shape == (4, 2)
    y = torch.rand(5, 3)
    torch.testing.assert_close(compile_strict(lambda x: (x.sin() + 1).t())(y), (y.sin() + 1).t())


class Doubles(TorchFunctionMode):
    """What every function of torch gives that makes numbers, twice."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        is_number = isinstance(found, torch.Tensor) and found.is_floating_point()
        return found + found if is_number and getattr(function, "__name__", "") in NUMBERS else found


NUMBERS = ("mm", "matmul", "__matmul__", "sin", "copy_", "mm.default", "addmm", "to", "as_strided")


@pytest.mark.parametrize("executor", ["native", "calls"])
@pytest.mark.parametrize(
    "function", [lambda x, w: (x @ w).sin(), lambda x, w: w.copy_(x.mm(w)).t(), lambda x, w: x @ w]
)
def test_what_a_mode_makes_of_functions_happens_once(function: Any, executor: str) -> None:
    """The graph has it, since the mode was traced: calls of the compiled program do not go through it again."""
    compiled = compile_strict(function, options={"executor": executor})
    for _ in range(2):
        x, w = torch.randn(3, 3), torch.randn(3, 3)
        v = w.clone()
        with Doubles():
            torch.testing.assert_close(compiled(x, w), function(x, v))
        torch.testing.assert_close(w, v)
    torch.testing.assert_close(compiled(x, w), function(x, v))
