"""Files of records: several processes add to one, and nothing is lost or half written."""

from __future__ import annotations

import multiprocessing

import pytest

from ferrite.errors import Refusal
from ferrite.tune import ProductProblem, Record, add_to, read_record
from tests.tune.test_record import FOUND, HERE, TEXT, THIN

pytestmark = pytest.mark.quick
PROCESSES, PROBLEMS = 3, 20


def add_some(path, start, number):
    start.wait()
    for size in range(PROBLEMS):
        problem = ProductProblem("bf16", 1 + number, 1 + size, 64, 64)
        assert not isinstance(add_to(path, Record(HERE, {problem: FOUND})), Refusal)


def test_processes_that_add_to_one_file_lose_nothing(tmp_path):
    path, processes = tmp_path / "new" / "record.txt", multiprocessing.get_context("fork")
    start = processes.Barrier(PROCESSES)
    started = [processes.Process(target=add_some, args=(path, start, number)) for number in range(PROCESSES)]
    for each in started:
        each.start()
    for each in started:
        each.join(60)
    assert [each.exitcode for each in started] == [0] * PROCESSES
    found = read_record(path)
    assert not isinstance(found, Refusal)
    assert len(found.products) == PROCESSES * PROBLEMS
    assert [each.name for each in path.parent.iterdir()] == ["record.txt"], "and nothing else is left"


def test_what_is_no_record_is_not_written_over(tmp_path):
    path = tmp_path / "record.txt"
    path.write_text("my notes")
    assert isinstance(add_to(path, Record(HERE, {THIN: FOUND})), Refusal)
    assert path.read_text() == "my notes"


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path):
    (tmp_path / "file").write_text(TEXT)
    assert isinstance(add_to(tmp_path / "file" / "record.txt", Record(HERE)), Refusal)
