"""The sweep of torch's tables: a fair order, and children that crash, hang or raise."""

from __future__ import annotations

import json
import os
import time
from collections import Counter

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's operator samples need it")

from bench.operators import children
from bench.operators.__main__ import main
from bench.operators.children import Sweep
from bench.operators.order import Part, Task, parts_of, tasks_of
from tests.tables.entries import WAYS, Sample, entries
from tests.tables.judge import Call, Verdict
from tests.tables.layouts import LAYOUTS


def test_a_sweep_that_is_stopped_is_a_fair_sample():
    some = list(entries().values())[::4]
    parts = [part for entry in some for part in parts_of(entry, WAYS, ["all"], list(LAYOUTS))]
    tasks = tasks_of(parts)
    assert Counter(part for task in tasks for part in task.parts) == Counter(parts)
    assert all(part.way == task.way for task in tasks for part in task.parts)
    early = [part for task in tasks[: len(tasks) // 20] for part in task.parts]
    for group in (lambda part: (part.table, part.way, part.layout), lambda part: (part.way, part.dtype)):
        every, found = Counter(map(group, parts)), Counter(map(group, early))
        assert [key for key, count in every.items() if count >= 100 and not found[key]] == []
    given = [part for part in early if (part.table, part.way, part.layout) == ("op", "static", "as given")]
    assert len({part.name for part in given}) == min(len(given), 160)
    assert tasks_of(parts, seed=1)[:9] != tasks[:9]


ODD = {"op:sin": lambda: os._exit(3), "op:cos": lambda: time.sleep(60), "op:tan": lambda: os._exit(3)}


@pytest.fixture
def odd_calls(monkeypatch):
    """`op:sin` ends its process where it is compiled, `op:cos` hangs there, `op:tan` ends eager's process already."""

    def judge(entry, sample, layout, way, when_eager_ends):
        if entry.name == "op:tan":
            os._exit(3)
        when_eager_ends()
        ODD.get(entry.name, int)()
        return Verdict("wrong", "far off") if entry.name == "op:tanh" else Verdict("passed")

    def judge_together(calls, way):
        for entry, _, _ in calls:
            ODD.get(entry.name, int)()
        return [None if entry.name == "op:tanh" else Verdict("passed") for entry, _, _ in calls]

    monkeypatch.setattr(children, "judge", judge)
    monkeypatch.setattr(children, "judge_together", judge_together)
    monkeypatch.setattr(children, "warm_up", int)


@pytest.mark.slow  # it waits for what hangs
def test_what_crashes_or_hangs_is_one_call_and_the_rest_goes_on(odd_calls, tmp_path, capfd):
    page, log = tmp_path / "page.md", tmp_path / "page.jsonl"
    asked = ["op:sin", "op:cos", "op:tan", "op:exp2", "--dtypes", "float32"]
    main([*asked, "--samples", "1", "--workers", "2", "--patience", "15", "--out", str(page)])
    about, *rows = map(json.loads, log.read_text().splitlines())
    assert about["command"].startswith("python -m bench.operators op:sin")
    assert about["torch"] == torch.__version__
    kinds = {row["key"].split("|")[0]: row["kind"] for row in rows}
    expected = {"op:sin": "crashed", "op:cos": "hung", "op:tan": "foreign", "op:exp2": "passed", "op:tanh": "wrong"}
    assert {name: kinds[name] for name in expected} == expected
    assert len(rows) == len({row["key"] for row in rows}) == len(kinds)
    assert "| op:tanh | 1 | 0 | 1 | wrong (1): " in page.read_text()

    before = dict(ODD)
    ODD.clear()
    try:
        main([*asked, "--again", "--out", str(page)])  # what failed is asked anew, and only that
    finally:
        ODD.update(before)
    again = [json.loads(line) for line in log.read_text().splitlines()][len(rows) + 2 :]
    assert Counter(row["kind"] for row in again) == {"passed": 2, "wrong": 1}
    assert {row["key"].split("|")[0] for row in again} == {"op:sin", "op:cos", "op:tanh"}


def test_no_task_begins_after_the_end(odd_calls):
    tasks = [Task("static", (Part("op:exp2", "float32", "static", "as given"),))] * 50
    settings = {"workers": 1, "limit": 1, "patience": 5.0}
    assert list(Sweep(tasks, set(), seconds=0.0, **settings).verdicts()) == []
    assert len(list(Sweep(tasks[:1], set(), seconds=60.0, **settings).verdicts())) == 1


def test_numbers_at_the_edges_meet_in_every_pair():
    for dtype in (torch.float32, torch.complex64, torch.int16):
        call = Call(
            Sample(lambda wrap: wrap(torch.add), (torch.ones(3, dtype=dtype), (torch.ones(3, dtype=dtype),), {})),
            "edges",
            False,
        )
        first, second = call.tensors
        pairs = {(str(a), str(b)) for a, b in zip(first.tolist(), second.tolist(), strict=True)}
        assert len(pairs) == len(set(map(str, first.tolist()))) ** 2
