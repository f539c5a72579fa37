"""Memory is given back as early as eager gives it back: while the graph runs, and after backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import ferrite
from bench.memory import peak_bytes
from tests.compare import compile_strict, compiled_graphs

WATCHED: dict[str, weakref.ref[torch.Tensor]] = {}
SEEN: list[tuple[str, bool]] = []
SAVED: list[weakref.ref[torch.Tensor]] = []
ALIVE: list[int] = []


@torch.library.custom_op("contract_memory::watch", mutates_args=())
def watch(x: torch.Tensor, label: str) -> torch.Tensor:
    """Keep a weak reference to the tensor; its result is a new one."""
    WATCHED[label] = weakref.ref(x)
    return x + 1


@watch.register_fake
def _(x, label):
    return torch.empty_like(x)


@torch.library.custom_op("contract_memory::look", mutates_args=())
def look(x: torch.Tensor, label: str) -> torch.Tensor:
    """Record whether the tensor watched under that label is alive at this point of the run."""
    SEEN.append((label, WATCHED[label]() is not None))
    return x + 1


@look.register_fake
def _(x, label):
    return torch.empty_like(x)


@torch.library.custom_op("contract_memory::observed", mutates_args=())
def observed(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("contract_memory::observed_backward", mutates_args=())
def observed_backward(gradient: torch.Tensor) -> torch.Tensor:
    """Count the saved tensors alive at this point of backward, but for one whose memory the gradient has taken over."""
    mine = gradient.untyped_storage().data_ptr()
    ALIVE.append(sum((saved := ref()) is not None and saved.untyped_storage().data_ptr() != mine for ref in SAVED))
    return gradient * 2


observed.register_fake(torch.empty_like)
observed_backward.register_fake(torch.empty_like)
observed.register_autograd(
    lambda ctx, gradient: observed_backward(gradient), setup_context=lambda ctx, inputs, output: None
)
look.register_autograd(lambda ctx, gradient: (gradient, None), setup_context=lambda ctx, inputs, output: None)
watch.register_autograd(lambda ctx, gradient: (gradient, None), setup_context=lambda ctx, inputs, output: None)


@pytest.fixture(autouse=True)
def nothing_watched() -> None:
    WATCHED.clear()
    SEEN.clear()
    SAVED.clear()
    ALIVE.clear()


@pytest.mark.quick
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_intermediate_is_freed_while_the_graph_runs(training: bool, dynamic: bool) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = watch(torch.sort(x * 2).values, "intermediate")
        return look(torch.sort(y).values, "intermediate")

    compiled = compile_strict(fn, dynamic=dynamic)
    for _ in range(2):
        compiled(torch.randn(64, requires_grad=training))
    assert compiled_graphs() == 1
    assert SEEN == [("intermediate", False)] * 2


def test_result_of_the_call_is_alive_to_its_last_use(dynamic: bool) -> None:
    """The counterpart: what is used later, or returned, must not be freed."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = torch.sort(x * 2).values
        return look(watch(kept, "kept"), "kept"), kept

    x = torch.randn(64)
    _, kept = compile_strict(fn, dynamic=dynamic)(x)
    assert SEEN == [("kept", True)]
    assert torch.equal(kept, torch.sort(x * 2).values)


def test_saved_activations_are_freed_after_backward(dynamic: bool) -> None:
    compiled = compile_strict(lambda x, w: ((x @ w).exp() @ w).sin().sum(), dynamic=dynamic)
    x, w = torch.randn(16, 16), torch.randn(16, 16, requires_grad=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor is not x and tensor is not w:
            SAVED.append(weakref.ref(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compiled(x, w)
    assert SAVED, "nothing was saved, so nothing is shown"
    loss.backward()
    gc.collect()
    assert [ref() for ref in SAVED if ref() is not None] == []


def test_outputs_are_freed_when_the_caller_drops_them(dynamic: bool) -> None:
    compiled = compile_strict(lambda x: (x * 2, x + 1), dynamic=dynamic)
    outputs = compiled(torch.randn(64))
    refs = [weakref.ref(t) for t in outputs]
    del outputs
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_inputs_are_not_held_after_the_call(dynamic: bool) -> None:
    compiled = compile_strict(lambda x: x.sin() * 2, dynamic=dynamic)
    x = torch.randn(64)
    ref = weakref.ref(x)
    compiled(x)
    del x
    gc.collect()
    assert ref() is None


def test_module_is_freed_with_its_compiled_form() -> None:
    model = torch.nn.Linear(4, 4)
    ref = weakref.ref(model.weight)
    compiled = compile_strict(model)
    compiled(torch.randn(2, 4)).sum().backward()
    del model, compiled
    torch.compiler.reset()
    gc.collect()
    assert ref() is None


def test_saved_activations_are_freed_while_backward_runs(dynamic: bool) -> None:
    """Activations die one by one as backward passes them, not all at its end."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        first = observed(x)
        return torch.sort(first.sin()).values.exp().sum()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor is not x:
            SAVED.append(weakref.ref(tensor))
        return tensor

    x = torch.randn(64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compile_strict(fn, dynamic=dynamic)(x)
    assert SAVED, "nothing was saved, so nothing is shown"
    loss.backward()
    assert ALIVE == [0], "saved tensors were alive when backward needed none of them any more"


# --- the forecast -----------------------------------------------------------------------------------------------------


def chain(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for weight in weights:
        x = x + F.gelu(x @ weight) @ weights[0]
    return x


def attention(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    query, key, value = ((x @ weight).view(4, 64, 4, 32).transpose(1, 2) for weight in weights[:3])
    mixed = torch.softmax(query @ key.transpose(-1, -2) / 8 + 1, -1).square() @ value
    return F.layer_norm(x + mixed.transpose(1, 2).reshape(x.shape) @ weights[3], (128,))


def running_sums(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Kernels that cannot be one, and cannot write where they read."""
    for axis in (1, 2, 1, 2):
        x = x.flip(axis).cumsum(axis)
    return x @ weights[0]


def forecast(kind: str) -> ferrite.debug.record.PeakMemory:
    (found,) = [graph.memory for graph in ferrite.last_compile().graphs if graph.kind == kind]
    return found


@pytest.mark.usefixtures("llvm_kernels")
@pytest.mark.parametrize("model", [chain, attention, running_sums])
def test_the_memory_of_a_call_is_forecast(model: Callable[..., torch.Tensor], dynamic: bool) -> None:
    x, weights = torch.randn(4, 64, 128), [torch.randn(128, 128) / 16 for _ in range(4)]
    compiled = compile_strict(model, dynamic=dynamic)
    with torch.no_grad():
        measured = peak_bytes(lambda: compiled(x, *weights))
    found = forecast("inference")
    assert found.peak == pytest.approx(measured, rel=0.1)
    assert found.peak <= found.eager
    assert f"{found.peak:,}" in str(ferrite.last_compile())


@pytest.mark.usefixtures("llvm_kernels")
def test_the_memory_of_a_backward_pass_is_forecast(dynamic: bool) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.LayerNorm(512), torch.nn.Linear(512, 128), torch.nn.Tanh()
    )
    compiled, x = compile_strict(model, dynamic=dynamic), torch.randn(256, 128)
    results = [compiled(x) for _ in range(2)]
    held = [result.grad_fn.saved_tensors for result in results]  # what was there before is no part of it, so it stays
    gradient, waiting = torch.randn(256, 128), iter(results)
    measured = peak_bytes(lambda: torch.autograd.grad(next(waiting), list(model.parameters()), gradient))
    found = forecast("backward")
    assert all(held)
    assert found.peak == pytest.approx(measured, rel=0.1)
    assert found.peak <= found.eager


def test_a_gradient_takes_over_what_was_saved_for_it() -> None:
    """And no other memory: what two graphs share is left alone."""
    compiled = compile_strict(lambda x, w: ((x @ w).tanh() @ w).sin())
    x, w = (torch.randn(64, 64, dtype=torch.float64, requires_grad=True) for _ in range(2))
    given = x.clone(), w.clone()
    results = [compiled(x, w) for _ in range(2)]
    first, second = (torch.autograd.grad(result.sum(), (x, w)) for result in results)
    expected = torch.autograd.grad(((x @ w).tanh() @ w).sin().sum(), (x, w))
    for one, other, theirs in zip(first, second, expected, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, theirs)
    assert torch.equal(x, given[0])
    assert torch.equal(w, given[1])
    assert torch.equal(results[0], results[1])
