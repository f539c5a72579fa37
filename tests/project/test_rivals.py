"""The benchmark beside other programs: all of it that needs none of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import decoding, rivals
from bench.zoo import Model


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
        return {"first": self.layer(x) * scale, "second": x}


SMALL = Model("small", "toy", Small, lambda batch: {"x": torch.randn(batch, 6), "scale": torch.rand(1)})


@pytest.fixture
def without_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "NEEDS", {"onnxruntime": ("no_such_package",), "openvino": ("nor_this_one",)})


@pytest.mark.quick
def test_a_model_gives_out_its_first_tensor():
    module = rivals.FirstOutput(SMALL.ready(torch.float32, training=False), ["x", "scale"])
    x, scale = torch.randn(2, 6), torch.rand(1)
    assert torch.equal(module(x, scale), module.model(x, scale)["first"])


@pytest.mark.quick
def test_what_is_wrong_is_not_timed():
    right = torch.tensor([1.0, 2.0])
    assert rivals.difference(right + 1e-4, right) is None
    assert "of the largest" in str(rivals.difference(right + 1, right))
    assert "finite" in str(rivals.difference(right / 0, right))
    assert "float64" in str(rivals.difference(right.double(), right))


@pytest.mark.quick
def test_missing_packages_are_named(without_rivals: None):
    assert rivals.missing("onnxruntime") == ["no_such_package"]
    assert "no_such_package" in rivals.advice("onnxruntime")
    assert "pip install ferrite[rivals]" in rivals.advice("onnxruntime")


@pytest.mark.quick
def test_a_line_has_a_figure_or_a_reason_for_each_column():
    columns = ["eager", "ferrite", "frozen", "openvino"]
    seconds = {"eager": [0.004, 0.004], "ferrite": [0.002, 0.002], "frozen": [0.001, 0.001]}
    found = rivals.cells(seconds, {"openvino": "no | such operator"}, columns)
    assert found == ["4.0 ms", "2.00", "4.00", "no / such operator", "2.00"]
    assert rivals.best_rival(seconds) is None
    assert rivals.best_rival({**seconds, "openvino": [0.1], "onnxruntime": [0.05]}) == "onnxruntime"


def test_without_any_of_them_frozen_is_beside_not_frozen(without_rivals, monkeypatch, capsys):
    monkeypatch.setattr(rivals, "MODELS", {"small": SMALL})
    threads = torch.get_num_threads()
    try:
        rivals.main(["--filter", "^small$", "--rounds", "2", "--threads", "1"])
    finally:
        torch.set_num_threads(threads)
    text = capsys.readouterr().out
    assert text.count("is left out") == 2
    assert "| model | eager | ferrite | frozen | frozen to not |" in text
    (row,) = {line for line in text.splitlines() if line.startswith("| small")}
    assert "wrong" not in row
    assert "Frozen, beside not frozen" in text


def test_decoding_is_compared_before_it_is_timed(capsys):
    threads = torch.get_num_threads()
    small = ["--layers", "1", "--hidden", "256", "--tokens", "2", "--length", "8", "--rounds", "1", "--no-inductor"]
    try:
        decoding.main(["--threads", "1", *small])
    finally:
        torch.set_num_threads(threads)
    rows = [
        line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith(("| float32", "| int8"))
    ]
    assert [(row[1].strip(), row[2].strip()) for row in rows] == [
        (kind, name) for kind in ("float32", "int8") for name in ("eager", "ferrite", "frozen")
    ]
    assert all(float(cell) > 0 for row in rows for cell in row[3:6])
