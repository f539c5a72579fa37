"""Profilers see kernels by their names and lines of the model; without one, nothing is there for them."""

from __future__ import annotations

import re

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.compare import assert_same_as_eager, compile_strict

pytestmark = pytest.mark.quick


def model(x, w):
    h = torch.relu(x @ w)
    return torch.softmax(h, -1), h.cumsum(0).sum(-1)


def inputs():
    return torch.randn(8, 16), torch.randn(16, 4, requires_grad=True)


def test_a_profiler_sees_lines_and_kernels():
    compiled = compile_strict(model)
    compiled(*inputs())
    arguments = inputs()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        outputs = compiled(*arguments)
        sum(output.sum() for output in outputs).backward()
    names = {event.name for event in profiler.events()}
    assert any(re.fullmatch(r"test_profiler_ranges\.py:\d+  h = torch\.relu\(x @ w\)", name) for name in names)
    kernels = [name for name in names if re.search(r"relu|cumsum", name) and "  (test_profiler_ranges.py:" in name]
    assert kernels
    for ours, eager in zip(outputs, model(*arguments), strict=True):
        torch.testing.assert_close(ours, eager)
    backward = [name for name in names if re.search(r"softmax_backward\w*  \(test_profiler_ranges", name)]
    assert backward
    mm = next(event for event in profiler.events() if event.name == "aten::mm")
    line = next(event for event in profiler.events() if event.name.endswith("h = torch.relu(x @ w)"))
    assert line.time_range.start <= mm.time_range.start <= mm.time_range.end <= line.time_range.end


@pytest.mark.parametrize("executor", ["native", "calls"])
def test_results_under_a_profiler_are_the_same(executor):
    with profile(activities=[ProfilerActivity.CPU]):
        assert_same_as_eager(model, lambda: inputs(), backward=True, options={"executor": executor}, calls=2)


@pytest.mark.lengthy
def test_control_flow_under_a_profiler():
    def branching(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() * 2, (x,)).exp()

    with profile(activities=[ProfilerActivity.CPU]), torch.no_grad():
        assert_same_as_eager(branching, lambda: [torch.ones(8)])
