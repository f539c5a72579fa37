"""Whole models with their parameters as constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ferrite
from tests.models.architectures import ARCHITECTURES
from tests.models.test_models import assert_matches_eager, compiled_by, inputs_for

CASES = [
    "resnet",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("distilbert", "mobilenet-v1", "llama", "t5", "swin")),
]
PRODUCTS = ("aten.mm.default", "aten.addmm.default")


@pytest.mark.parametrize("name", CASES)
def test_a_frozen_model_matches_eager(name: str) -> None:
    architecture = ARCHITECTURES[name]

    @torch.no_grad()
    def forward(model: Any, call: Callable[..., Any]) -> dict[str, Any]:
        return {"outputs": call(**inputs_for(model, architecture))}

    def compile_frozen() -> None:
        with ferrite.using(freeze=True):
            assert_matches_eager(architecture, forward)

    graphs = [graph for record in compiled_by(compile_frozen) for graph in record.graphs]
    calls = [call.operator for graph in graphs for call in graph.eager_calls]
    modules = list(architecture.build().modules())
    inlining = [step for graph in graphs for step in graph.passes if step.name == "inline_parameters"]
    assert len(inlining) == len(graphs)
    assert sum(step.facts["parameters"] for step in inlining) > 10
    assert max(len(graph.inputs) for graph in graphs) < 10, "only the inputs of the model are left"
    assert not [call for call in calls if "batch_norm" in call]
    if name in ("distilbert", "llama", "t5"):
        linears = sum(isinstance(module, torch.nn.Linear) for module in modules)
        assert sum(call in PRODUCTS for call in calls) < linears, "layers on one input are one product"
