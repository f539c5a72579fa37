"""Every operator torch has samples for, interpreted and compiled: never a wrong value, and most without a call."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's operator samples need it")

from tests.compare import RELEASE, since
from tests.lower.sweep import OPERATORS, recorded, sweep, worst

RECORD = Path(__file__).parents[2] / "docs" / "operators.csv"
TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
TYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def kind_if_right(name: str, dtype: torch.dtype, backward: bool, samples: int) -> str:
    """The worst kind of verdict, where none is wrong; "" where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdicts = sweep(name, dtype, backward, samples)
    if not verdicts:
        return ""
    verdict = worst(verdicts)
    assert verdict.kind not in ("wrong", "crashed"), f"{verdict.why}\n{verdict.program}"
    return verdict.kind


def cases() -> list[Any]:
    """Every operator. What is a call of torch, and what torch does not trace, says little here and waits for the long
    sweeps, where all types of all operators are asked; so does every second of the others."""
    known = recorded(RECORD)
    waits = {name for name in OPERATORS if known.get(name, {}).get("float32") in ("called", "untraced")}
    waits.update(sorted(set(OPERATORS) - waits)[1::2])
    return [pytest.param(name, marks=[pytest.mark.slow] if name in waits else []) for name in sorted(OPERATORS)]


@pytest.mark.parametrize("name", cases())
def test_forward(name):
    found = kind_if_right(name, torch.float32, backward=False, samples=1)
    if RELEASE >= (2, 13):  # the record is of this release
        wanted = recorded(RECORD)[name]["float32"]
        assert found == wanted, f"docs/operators.csv says {wanted}; tests.lower.sweep --record writes it anew"


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_every_type(name, backward):
    for dtype in TYPES:
        kind_if_right(name, dtype, backward, samples=3)


@since(2, 13)  # the record is of this release
@pytest.mark.quick
def test_most_operators_need_no_call_of_torch():
    rows = recorded(RECORD)
    assert set(rows) == set(OPERATORS)
    assert not [row for row in rows.values() if {"wrong", "crashed"} & {row["all types"], row["backward"]}]
    assert share_lowered(rows.values(), "float32") >= 0.85
    assert share_lowered(rows.values(), "all types") >= 0.84


def share_lowered(rows, column) -> float:
    """Of the operators torch can trace, those without a call of torch inside."""
    traced = [row[column] for row in rows if row[column] not in ("", "untraced")]
    return traced.count("lowered") / len(traced)
