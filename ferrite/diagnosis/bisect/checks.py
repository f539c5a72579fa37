"""A function, compiled, against itself in eager: what a check is where the user gives a model and its arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ferrite import api
from ferrite.capture import torch_api
from ferrite.diagnosis.bisect.probe import ResultsDiffer
from ferrite.passes import Tolerance, unlike_values
from ferrite.runtime import least_seconds

MEASURED_SECONDS = 0.3
NARROW = (torch.float16, torch.bfloat16, torch.float32)


def compare(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    grad: bool = True,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    timed: bool = False,
) -> float | None:
    """Run a function and the same compiled on copies of the inputs; raises ResultsDiffer where results, gradients or
    inputs differ afterwards by more than rounding, judged by a float64 run. `timed`: gives seconds of a call."""
    compiled = api.compile(copied(function), dynamic=dynamic, **(options or {}))
    if timed:
        return seconds_of(compiled, inputs, grad)
    eager, drawn = observed(copied(function), inputs, grad)
    ours, _ = observed(compiled, inputs, grad)
    truth = None if drawn else in_double(function, inputs, grad)
    for name, old in eager.items():
        true = truth.get(name) if truth is not None else None
        problem = unlike_values(old, ours.get(name), true, Tolerance(0.0, 0.0, values=True))
        if problem is not None:
            raise ResultsDiffer(f"{name}: {problem}")
    return None


def copied(function: Any) -> Any:
    return copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function


def observed(function: Any, inputs: Sequence[Any], grad: bool) -> tuple[dict[str, Any], bool]:
    """Everything that a run lets a caller see, by name; and whether it drew random numbers."""
    given = copy.deepcopy(list(inputs))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.set_grad_enabled(grad):
        outputs = torch_api.tree_leaves(function(*given))
        if grad:
            differentiate(outputs)
    drawn = not torch.equal(before, torch.get_rng_state())
    found = {f"output {place}": each for place, each in enumerate(outputs)}
    leaves = [leaf for leaf in torch_api.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    found |= {f"input {place} after the call": leaf.detach() for place, leaf in enumerate(leaves)}
    found |= {f"gradient of input {place}": leaf.grad for place, leaf in enumerate(leaves) if leaf.is_leaf}
    if isinstance(function, torch.nn.Module):  # what is compiled keeps the names, behind a word of its own
        named = [(name.removeprefix("_orig_mod."), each) for name, each in function.named_parameters()]
        found |= {f"gradient of {name}": each.grad for name, each in named}
    return found, drawn


def differentiate(outputs: Sequence[Any]) -> None:
    """From a number that weighs every element differently."""
    losses = []
    for each in outputs:
        if isinstance(each, torch.Tensor) and each.requires_grad:
            real = torch.view_as_real(each.resolve_conj()) if each.is_complex() else each
            weights = torch.linspace(0.5, 1.5, real.numel(), dtype=torch.float64, device=real.device)
            losses.append((real * weights.reshape(real.shape).to(real.dtype)).sum().double())
    if losses:
        torch.stack(losses).sum().backward()


def in_double(function: Any, inputs: Sequence[Any], grad: bool) -> dict[str, Any] | None:
    """What is true, as far as that can be known: some operators know no float64."""

    def wide(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dtype not in NARROW:
            return leaf
        return leaf.detach().double().requires_grad_(leaf.requires_grad)

    try:
        own = copied(function)
        own = own.double() if isinstance(own, torch.nn.Module) else own
        return observed(own, [wide(each) for each in inputs], grad)[0]
    except Exception:
        return None


def seconds_of(function: Callable[..., Any], inputs: Sequence[Any], grad: bool) -> float:
    """The least that a call takes, once it is compiled."""

    def call() -> None:
        with torch.set_grad_enabled(grad):
            outputs = torch_api.tree_leaves(function(*inputs))
            if grad:
                differentiate(outputs)

    return least_seconds(call, rounds=1, seconds=MEASURED_SECONDS)
