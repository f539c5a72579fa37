"""Training steps with convolutions whose images lie with the channels side by side: nobody sees that."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.passes.joint.image_layouts import IMAGE_LAYOUTS


@pytest.fixture
def everywhere(monkeypatch, fresh_compiler):
    """A processor stands in for a GPU."""
    monkeypatch.setattr("ferrite.passes.shared.facts.on_cpu", lambda image: False)


class Block(torch.nn.Module):
    def __init__(self, tail):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm, self.last = torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 8, 1)
        self.tail = tail

    def forward(self, x):
        y = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.tail(y + self.last(y))


TAILS = {
    "pooled": lambda y: y.mean((2, 3)),
    "an image": lambda y: y,  # with the strides that it has in eager
    "a view": lambda y: y.view(y.shape[0], -1) * 2,
    "of one": lambda y: F.adaptive_avg_pool2d(y, 1).sigmoid() * y,
    "turned": lambda y: y.permute(0, 2, 3, 1).softmax(-1),
    "dropout": lambda y: F.dropout(y, 0.5),
}


@pytest.mark.parametrize("tail", TAILS)
def test_a_training_step(tail, everywhere):
    torch.manual_seed(0)
    model, x = Block(TAILS[tail]).bfloat16(), torch.randn(2, 3, 8, 8).bfloat16().requires_grad_()
    run = torch.compile(model, backend="ferrite", fullgraph=True, options={"strict": True})
    found = []
    for each in (run, model):
        torch.manual_seed(1)
        x.grad = None
        model.zero_grad()
        result = each(x)
        result.float().square().sum().backward()
        found.append([result, x.grad, *(parameter.grad for parameter in model.parameters())])
    assert ferrite.last_compile().rewrites[IMAGE_LAYOUTS.name] == 1
    for mine, theirs in zip(*found, strict=True):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs, rtol=0.1, atol=0.1 * float(theirs.float().abs().max()))
    forward = next(graph for graph in ferrite.last_compile().graphs if graph.kind == "forward")
    assert "1, 24, 3)" in forward.source, "the image is copied once, with its channels side by side"
    assert forward.source.count("(27, 1, 9, 3)") == 1, "and so are weights of windows, for backward, too"


def test_other_images_stay_as_they_are(everywhere):
    model, x = Block(TAILS["pooled"]), torch.randn(2, 3, 8, 8)
    run = torch.compile(model, backend="ferrite", fullgraph=True, options={"strict": True})
    run(x).sum().backward()  # in single precision
    assert IMAGE_LAYOUTS.name not in ferrite.last_compile().rewrites
