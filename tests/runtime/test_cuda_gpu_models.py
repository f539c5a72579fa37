"""On a GPU: one small model of each architecture, forward and training, as it is and as CUDA graphs, held against
eager by way of a float64 run."""

from __future__ import annotations

import copy

import pytest
import torch

from ferrite.debug import recent_compiles
from tests.triton_kernels import ON_A_GPU

pytestmark = ON_A_GPU
pytest.importorskip("transformers")
DEVICE = "cuda"
NAMES = ("bert", "gpt2", "llama", "t5", "vit", "resnet", "convnext")


def floats(outputs):
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return [each for each in values if isinstance(each, torch.Tensor) and each.is_floating_point()]


def on_gpu(inputs, dtype):
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    return {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in moved.items()}


def step(model, run, inputs, training):
    model.zero_grad()
    with torch.set_grad_enabled(training):
        results = floats(run(**inputs))
    if training:
        sum(each.double().square().mean() for each in results if each.requires_grad).backward()
    grads = [each.grad for each in model.parameters() if each.grad is not None] if training else []
    return [each.detach().clone() for each in results] + [each.clone() for each in grads]


def distance(found, exact):
    scale = max(float(exact.abs().max()), 1e-5) if exact.numel() else 1.0
    return float((found.double() - exact).abs().max()) / scale if exact.numel() else 0.0


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", NAMES)
def test_models(name, training, graphs):
    from tests.models.architectures import ARCHITECTURES

    torch.compiler.reset()
    before = recent_compiles()
    architecture = ARCHITECTURES[name]
    model = architecture.model().to(DEVICE)  # dropout is off: everything can be held against float64
    exact_model = copy.deepcopy(model).double()
    inputs = architecture.inputs()
    run = torch.compile(model, backend="ferrite", options={"strict": True, "cuda_graphs": graphs})
    for _ in range(4 if graphs else 2):
        found = step(model, run, on_gpu(inputs, torch.float32), training)
    eager = step(model, model, on_gpu(inputs, torch.float32), training)
    exact = step(exact_model, exact_model, on_gpu(inputs, torch.float64), training)
    assert len(found) == len(eager)
    for ours, theirs, right in zip(found, eager, exact, strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert distance(ours, right) <= 4 * distance(theirs, right) + 2e-5
    records = [each for each in recent_compiles() if each not in before]  # losses are graphs of their own
    assert any(record.kernels for record in records)
    if graphs:
        recorders = [recorder for record in records for recorder in record.recordings]
        assert any(recorder.replayed for recorder in recorders), [record.not_recorded for record in records]
