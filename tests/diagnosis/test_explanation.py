"""`ferrite.explain`: graphs, breaks, what takes the time, what to try; `doctor` with a model."""

from __future__ import annotations

import re

import pytest
import torch

import ferrite
from ferrite.__main__ import main

pytestmark = [pytest.mark.quick, pytest.mark.lengthy]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 48)

    def forward(self, x):
        return torch.softmax(self.linear(x), -1)


def test_a_model_in_inference():
    model, x = Net().eval(), torch.randn(16, 32)
    with torch.no_grad():
        found = ferrite.explain(model, x, own_products="off")
    assert (len(found.records), found.breaks, found.train) == (1, (), False)
    kinds = {share.kind: share for share in found.shares}
    assert set(kinds) == {"kernel", "torch"}
    assert "softmax" in kinds["kernel"].what
    assert "test_explanation.py:" in kinds["kernel"].line
    assert 0 < sum(share.seconds for share in found.shares) <= found.whole
    text = str(found)
    assert re.search(r"1 \(1 inference\), \d kernels, 1 calls of torch", text)
    assert "breaks      none" in text
    assert len(text.splitlines()) <= 20
    assert any("ferrite.freeze(model)" in advice for advice in found.advice)
    assert len(found.advice) <= 3


def test_breaks_are_named_by_their_lines_and_the_model_stays_as_it_is():
    model = Net()

    def broken(x):
        x = model(x)
        torch._dynamo.graph_break()
        return x.sin().sum()

    found = ferrite.explain(broken, torch.randn(4, 32))
    assert found.train
    assert len(found.records) == 2
    ((_reason, line),) = found.breaks
    assert line.code == "torch._dynamo.graph_break()"
    assert any("one graph in place of 2" in advice for advice in found.advice)
    own = Net()
    ferrite.explain(own, torch.randn(4, 32))
    assert all(parameter.grad is None for parameter in own.parameters())


def test_doctor_looks_at_a_model(tmp_path, monkeypatch, capsys):
    (tmp_path / "net.py").write_text("import torch\n\ndef double(x):\n    return x.sin() * 2\n")
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "net.py:double", "f32[8]"]) == 0
    text = capsys.readouterr().out
    assert "LLVM" in text
    assert "what takes the time" in text
    assert "net.py:4  return x.sin() * 2" in text
    assert main(["doctor", "net.py:nothing"]) == 2
