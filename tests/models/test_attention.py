"""Attention of real architectures, written out: one call per layer is left of it, outputs and gradients are eager's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch

from tests.compare import loss_of
from tests.models.architectures import ARCHITECTURES, Architecture
from tests.models.test_models import assert_matches_eager, compiled_by, inputs_for

pytestmark = pytest.mark.usefixtures("llvm_kernels")  # softmaxes are looked for in them

LAYERS = {
    **dict.fromkeys(("bert", "gpt2", "llama", "vit", "distilbert", "qwen2", "wav2vec2", "modernbert", "yolos"), 2),
    "clip": 4,
    "bart": 6,
    "t5": 6,
    "whisper": 6,
    "swin": 3,
    "detr": 6,
}
# Their position biases are trained, which the kernel does not do: only attention across keeps to the rule.
TRAINED_MASKS = {"t5": 2, "swin": 0}
# One of its gradients nearly vanishes, and torch's own kernel is 2.4 times as far from float64 there as products are.
ROUNDING = {"detr"}


@pytest.fixture(autouse=True)
def torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of it are counted here."""
    monkeypatch.setenv("FERRITE_OWN_ATTENTION", "off")


def cases(names: Iterable[str], quickest: Collection[str]) -> list[Any]:
    slow = {name: [pytest.mark.slow] for name in names if name not in quickest}
    return [pytest.param(ARCHITECTURES[name], id=name, marks=slow.get(name, [])) for name in names]


def written_out(architecture: Architecture) -> Architecture:
    """The architecture with attention as its authors wrote it, not as a call."""

    def build() -> torch.nn.Module:
        model: Any = architecture.build()
        model.set_attn_implementation("eager")
        return model

    return dataclasses.replace(architecture, build=build)


def attention_calls(work: Callable[[], None]) -> tuple[int, int]:
    """How many calls of attention what is compiled meanwhile has, and how many softmaxes; each counted forward."""
    records = compiled_by(work)
    graphs = [graph for record in records for graph in record.graphs if graph.kind != "backward"]
    calls = [call.operator for graph in graphs for call in graph.eager_calls]
    in_kernels = [{name for kernel in graph.kernels for name in kernel.operators} for graph in graphs]
    attention = [name for name in calls if "scaled_dot_product" in name or "masked_attention" in name]
    assert sum(record.rewrites.get("sfdp", 0) for record in records) == len(attention)
    softmaxes = [name for name in calls if name.startswith("aten._softmax.")]
    softmaxes += [name for names in in_kernels for name in names if name.startswith("_softmax")]
    return len(attention), len(softmaxes)


@pytest.mark.parametrize("architecture", cases(LAYERS, ("bert",)))
def test_inference_has_one_call_per_layer(architecture):
    @torch.no_grad()
    def forward(model: Any, call: Callable[..., Any]) -> dict[str, Any]:
        return {"outputs": call(**inputs_for(model, architecture))}

    calls, softmaxes = attention_calls(lambda: assert_matches_eager(written_out(architecture), forward))
    assert (calls, softmaxes) == (LAYERS[architecture.name], 0)


@pytest.mark.parametrize("architecture", cases([name for name in LAYERS if name not in ROUNDING], ()))
def test_training_has_one_call_per_layer(architecture):
    def step(model: Any, call: Callable[..., Any]) -> dict[str, Any]:
        # in eval mode: attention that drops weights stays as it is on a CPU
        outputs = call(**inputs_for(model, architecture))
        loss = outputs.loss if "loss" in outputs else loss_of(outputs)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {"outputs": outputs, "gradients": gradients}

    calls, softmaxes = attention_calls(lambda: assert_matches_eager(written_out(architecture), step))
    layers = LAYERS[architecture.name]
    expected = TRAINED_MASKS.get(architecture.name, layers)
    assert (calls, softmaxes) == (expected, layers - expected)
