"""A target of one file goes through the whole compiler: nothing else knows of it."""

from __future__ import annotations

import pytest
import torch

import ferrite
from tests.targets.toy import ToyTarget


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> ToyTarget:
    target = ToyTarget()
    monkeypatch.setattr("ferrite.backend.targets_for", lambda options, devices: {"cpu": target})
    return target


def softmax_of_product(x, w):
    y = torch.softmax(x @ w, -1)
    return torch.relu(y + 1).sum(0), y * 2


def with_views(x, w):
    a, b = (x + 1).chunk(2)
    return torch.cat([a.sin(), b], 1), w.t() * 3


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [softmax_of_product, with_views])
def test_kernels_of_a_toy_target_compute_what_eager_does(toy, function, dynamic):
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    compiled = torch.compile(function, backend="ferrite", options={"strict": True}, dynamic=dynamic)
    for found, wanted in zip(compiled(x, w), function(x, w), strict=True):
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()
    assert toy.launched
    assert len(ferrite.last_compile().kernels) == len(toy.launched)


def test_gradients_go_through_a_toy_target(toy):
    x = torch.randn(3, 4, requires_grad=True)
    torch.compile(lambda x: (x.tanh() * x).sum(), backend="ferrite", options={"strict": True})(x).backward()
    y = x.detach().clone().requires_grad_()
    (y.tanh() * y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert len(toy.launched) >= 2


def test_what_a_target_refuses_is_one_step_of_a_compiled_graph(toy):
    def function(x):
        return (x + 1).cumsum(0) * 2

    x = torch.randn(6, 3)
    found = torch.compile(function, backend="ferrite", options={"strict": True}, fullgraph=True)(x)
    torch.testing.assert_close(found, function(x))
    record = ferrite.last_compile()
    assert [call.reason for call in record.eager_calls] == ["the toy has no scans"]
    assert record.kernels
    assert toy.launched
