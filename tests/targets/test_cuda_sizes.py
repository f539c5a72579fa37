"""Programs for unknown sizes on a GPU that is not there: compiled for the sizes that come first, called with others."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import ferrite
from tests.gpu_plans import FEW_PROGRAMS, TINY

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def target_with(machine, monkeypatch):
    from tests.targets.simulated_cuda import SimulatedTarget

    target = SimulatedTarget()
    monkeypatch.setattr(target, "scheduling", replace(target.scheduling, machine=machine))
    monkeypatch.setattr("ferrite.backend.targets_for", lambda options, devices: {"cpu": target})
    return target


@pytest.fixture
def few_programs(monkeypatch, fresh_compiler):
    return target_with(FEW_PROGRAMS, monkeypatch)


@pytest.fixture
def tiny(monkeypatch, fresh_compiler):
    return target_with(TINY, monkeypatch)


def assert_same_for(function, make_inputs, sizes, **tolerance):
    """A function compiled once, for all of these sizes."""
    compiled = torch.compile(function, backend="ferrite", options={"strict": True}, dynamic=True, fullgraph=True)
    records = []
    for some in sizes:
        inputs = make_inputs(*some)
        found, wanted = compiled(*inputs), function(*inputs)
        torch.testing.assert_close(found, wanted, **(tolerance or {"rtol": 1e-4, "atol": 1e-4}))
        records.append(ferrite.last_compile())
    assert all(record is records[0] for record in records), "nothing is compiled again"
    return records[0]


def sources(target):
    return [kernel.request["source"] for kernel in target.driver.functions.values()]


def norm_gradients(x, w, g):
    return torch.ops.aten.native_layer_norm_backward(
        g, x, x.shape[-1:], x.mean(-1, keepdim=True), x.std(-1, keepdim=True), w, w, [True, True, True]
    )


def softmax_gradients(x, w, g):
    dx = torch.ops.aten._softmax_backward_data(g, x.softmax(-1), -1, x.dtype)
    return dx, dx.amax(0), (dx * w).sum(0)


def three(rows, columns):
    return torch.randn(rows, columns), torch.randn(columns), torch.randn(rows, columns)


@pytest.mark.parametrize("function", [norm_gradients, softmax_gradients])
def test_rows_and_columns_of_unknown_numbers_are_one_kernel(function, few_programs):
    """Registers hold as many columns as were seen; more are added up in memory."""
    sizes = [(40, 24), (97, 32), (17, 33), (3, 7), (7, 300), (30, 40)]
    record = assert_same_for(function, three, sizes)
    assert len(record.kernels) == 2, "the last adds pieces up"
    assert "num_stages" in sources(few_programs)[0]


def test_columns_that_registers_do_not_hold_are_another_kernel(few_programs):
    assert_same_for(softmax_gradients, three, [(80, 300), (29, 20)])
    assert not any("num_stages" in source for source in sources(few_programs)), "no rows are gone through"
