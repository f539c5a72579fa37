"""torch's own tables through the front door: a few entries each time, all of them in the long sweep.

`python -m bench.operators` runs the same calls in child processes, survives those that kill it, and prints a table.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's operator samples need it")

from tests.tables.entries import WAYS, dtypes_of, entries
from tests.tables.judge import Verdict, compared, verdicts
from tests.tables.layouts import LAYOUTS

# How many entries there were when the sweep was written: fewer would mean that it has stopped to look at a table.
LEAST = {"op": 550, "foreach": 40, "hop": 8, "custom": 8, "autograd_function": 10, "module": 90, "optimizer": 10}
FEW = [
    ("op:atan2", "edges", "static"),
    ("op:scatter_add", "as given", "backward"),
    ("op:max.reduction_no_dim", "empty", "static"),
    ("op:index_select", "as given", "errors"),
    ("op:nn.functional.max_unpool1d", "empty", "dynamic"),
    ("module:nn.modules.linear.Linear.train", "transposed", "backward"),
    ("optimizer:SGD", "as given", "static"),
]


def failed(name: str, dtype: torch.dtype, way: str, layout: str, limit: int) -> list[Verdict]:
    return [verdict for verdict in verdicts(entries()[name], dtype, way, layout, limit) if verdict.failed]


def test_no_table_has_shrunk():
    for table, least in LEAST.items():
        assert sum(name.startswith(f"{table}:") for name in entries()) >= least, table


@pytest.mark.parametrize(("name", "layout", "way"), FEW)
def test_a_few_entries(name, layout, way):
    assert failed(name, torch.float32, way, layout, 1) == []


def test_the_judge_sees_what_differs():
    entry = entries()["op:atan2"]
    error = compared(entry, None, [torch.ones(1)], IndexError("far"))
    other = compared(entry, None, ValueError("near"), IndexError("far"))
    assert (error.kind, other.kind) == ("no error", "other error")
    assert compared(entry, None, IndexError("near"), IndexError("far")) is None


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", list(entries()))
def test_every_entry(name, way):
    entry = entries()[name]
    layouts = ["as given"] if way == "errors" or entry.kind == "optimizer" else list(LAYOUTS)
    found = []
    for dtype in sorted(dtypes_of(entry, way), key=str):
        for layout in layouts:
            if layout != "edges" or entry.is_pointwise:
                limit = 1000 if way == "errors" else 3
                found += [(dtype, layout, verdict) for verdict in failed(name, dtype, way, layout, limit)]
    assert found == []
