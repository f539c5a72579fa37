"""A report of a model whose matrix products were measured: on a GPU that need not be here, whose record is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ferrite
from ferrite.targets import tuning
from ferrite.tune import Record, parsed
from tests.compare import compile_strict

RECORD = Path(__file__).parents[2] / "bench" / "results" / "gpu-products.txt"
TOKENS, WIDTH, INNER = 8, 4096, 14336  # of a step of decoding in a model of seven billion weights


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, INNER, bias=False)
        self.down = torch.nn.Linear(INNER, WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        h = torch.nn.functional.silu(self.up(x))
        return self.out(self.down(h)).softmax(-1)


def tuned_report(path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """Written to a path; what was measured."""
    from tests.targets.simulated_cuda import SimulatedTarget

    record, target = parsed(RECORD.read_text()), SimulatedTarget()
    monkeypatch.setattr("ferrite.backend.targets_for", lambda options, devices: {"cuda": target})
    monkeypatch.setattr(tuning, "where", lambda: record.where)
    with torch.device("meta"), torch.no_grad():
        compiled = compile_strict(Layer().to(torch.bfloat16), options={"report": path, "tuning": RECORD})
        compiled(torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16))
    ferrite.report(path)
    return record
