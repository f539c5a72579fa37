"""Whole models with their parameters as constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models.architectures import ARCHITECTURES
from models.test_models import assert_matches_eager, inputs_for

import ferrite


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("resnet", "batch_norm"),
        ("distilbert", "permute.default"),
        pytest.param("mobilenet-v1", "batch_norm", marks=pytest.mark.slow),
        pytest.param("llama", "", marks=pytest.mark.slow),
        pytest.param("swin", "", marks=pytest.mark.slow),
        pytest.param("t5", "", marks=pytest.mark.slow),
    ],
)
def test_a_frozen_model_matches_eager(name: str, gone: str) -> None:
    architecture = ARCHITECTURES[name]

    @torch.no_grad()
    def forward(model: Any, call: Callable[..., Any]) -> dict[str, Any]:
        return {"outputs": call(**inputs_for(model, architecture))}

    with ferrite.using(freeze=True):
        assert_matches_eager(architecture, forward)
    (graph,) = ferrite.last_compile().graphs
    inlining = next(step for step in graph.passes if step.name == "inline_parameters")
    assert inlining.facts["parameters"] > 10
    assert len(graph.inputs) < 10
    weights = [call for call in graph.eager_calls if gone and gone in call.operator]
    layers = [call for call in graph.eager_calls if call.operator in ("aten.addmm.default", "aten.convolution.default")]
    assert len(weights) < len(layers), "transposes of weights and norms are computed once"
