"""`python -m bench.compile_against`: what compiling costs here, beside another checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import compile_against

pytestmark = pytest.mark.quick


def test_compiling_here_is_compared_with_another_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def measured(checkout: Path, request: Any) -> dict[str, float]:
        asked.append((checkout, request))
        return {"inference": 200.0 if checkout == tmp_path else 190.0, "training step": 400.0 + len(asked)}

    monkeypatch.setattr(compile_against, "measured", measured)
    assert compile_against.main([str(tmp_path), "--rounds", "2", "--layers", "1"]) == 0
    assert [checkout for checkout, _ in asked] == [tmp_path, compile_against.ROOT] * 2
    assert {request for _, request in asked} == {(4, 1, False)}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "inference: there 200; 200, here 190; 190: 0.950 times the least there"
    assert lines[1] == "training step: there 401; 403, here 402; 404: 1.002 times the least there"


def test_calls_are_counted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def measured(checkout: Path, request: Any) -> dict[str, float]:
        asked.append(request)
        return {"inference": 1.0, "training step": 2.0}

    monkeypatch.setattr(compile_against, "measured", measured)
    assert compile_against.main([str(tmp_path), "--calls"]) == 0
    assert asked == [(1, 4, True)] * 2
