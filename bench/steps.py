"""One call of a model: inference, or a training step without an optimizer; and all that it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.zoo import floats_of, loss_of


def call_of(
    model: torch.nn.Module, compiled: Callable[..., Any], inputs: dict[str, Any], training: bool
) -> Callable[[], Any]:
    """Inference gives the outputs. A training step computes the loss and leaves gradients in the parameters."""
    if not training:
        return lambda: compiled(**inputs)

    def step() -> Any:
        model.zero_grad(set_to_none=True)
        outputs = compiled(**inputs)
        loss_of(outputs).backward()
        return outputs

    return step


def observed(model: torch.nn.Module, compiled: Callable[..., Any], inputs: dict[str, Any], training: bool) -> Any:
    """Outputs and gradients of one call from the same state and random numbers."""
    torch.manual_seed(2)
    outputs = call_of(model, compiled, inputs, training)()
    gradients = [parameter.grad for parameter in model.parameters() if training and parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return {"outputs": [value.detach() for value in floats_of(outputs)], "gradients": gradients}
