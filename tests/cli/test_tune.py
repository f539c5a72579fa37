"""`python -m ferrite tune`: a model is compiled, products are measured (here by a function that knows), and the record
has them; stopped, out of time, resumed, merged, refused."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from ferrite.__main__ import main
from ferrite.targets import tuning
from ferrite.targets.tuning_watcher import OutOfTime, watcher
from ferrite.tune import Measured, ProductConfig, ProductProblem, Record, Where, parsed

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

HERE, ELSEWHERE = Where("a GPU", "3", "2"), Where("another GPU", "3", "2")
FOUND = Measured(12.0, 13.0, ProductConfig(16, 32, 16, 4, 3))
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(48, 4096)
        self.second = torch.nn.Linear(4096, 64)

    def forward(self, x):
        return self.second(self.first(x).relu())
"""
FIRST = ProductProblem("bf16", 1, 32, 4096, 48, "summed", "summed")
SECOND = ProductProblem("bf16", 1, 32, 64, 4096, "summed", "summed")


class Gpu:
    """One that is not there, and what was measured on it. `stops_after`: so many times, then somebody stops it."""

    def __init__(self) -> None:
        self.asked: list[ProductProblem] = []
        self.stops_after = 100

    def measured(self, problem, target):
        if not watcher().has_time():
            raise OutOfTime
        if len(self.asked) == self.stops_after:
            raise KeyboardInterrupt
        self.asked.append(problem)
        watcher().begins(problem, 1)
        watcher().tried()
        return FOUND


@pytest.fixture
def gpu(monkeypatch, fresh_compiler, tmp_path):
    from tests.targets.simulated_cuda import SimulatedTarget

    target, made = SimulatedTarget(), Gpu()
    monkeypatch.setattr("ferrite.backend.targets_for", lambda options, devices: {"cuda": target})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tuning, "measured", made.measured)
    monkeypatch.setattr(tuning, "_measured", {})
    for place in ("ferrite.targets.tuning.where", "ferrite.cli.tune.where"):
        monkeypatch.setattr(place, lambda: HERE)
    monkeypatch.setattr("ferrite.cli.tune.reason_against_measuring", lambda: None)
    tuning.warn_of_record.cache_clear()
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return made


def tune(*more):
    """The exit status; as in a new process."""
    torch.compiler.reset()
    tuning._measured.clear()
    return main(["tune", "net.py:Net", "bf16[32,48]", "--device", "meta", "--dtype", "bf16", "-o", "record.txt", *more])


def record(tmp_path):
    return parsed((tmp_path / "record.txt").read_text())


def test_products_of_a_model_are_measured_once(gpu, tmp_path, capsys):
    assert tune() == 0
    assert sorted(gpu.asked) == [SECOND, FIRST]
    assert record(tmp_path) == Record(HERE, {FIRST: FOUND, SECOND: FOUND})
    assert "2 products measured, 0 known before" in capsys.readouterr().out
    assert tune() == 0
    assert len(gpu.asked) == 2
    assert "0 products measured, 2 known before" in capsys.readouterr().out


def test_the_backward_graph_has_products_too(gpu, tmp_path):
    assert tune("--train") == 0
    assert len(record(tmp_path).products) == 6


def test_what_was_measured_before_it_was_stopped_is_kept(gpu, tmp_path, capsys):
    gpu.stops_after = 1
    assert tune() == 130
    assert record(tmp_path).products == dict.fromkeys(gpu.asked, FOUND)
    assert "goes on from there" in capsys.readouterr().out
    gpu.stops_after = 100
    assert tune() == 0
    assert len(gpu.asked) == 2
    assert set(record(tmp_path).products) == {FIRST, SECOND}


def test_out_of_time(gpu, tmp_path, capsys):
    assert tune("--seconds", "0") == 1
    assert not record(tmp_path).products
    assert "2 products left" in capsys.readouterr().out
    assert tune("--seconds", "1000") == 0
    assert set(record(tmp_path).products) == {FIRST, SECOND}


@pytest.mark.parametrize(
    ("text", "reason"), [(str(Record(ELSEWHERE)), "gpu another GPU, and here it is a GPU"), ("no record", "line 1")]
)
def test_nothing_is_added_to_a_record_of_something_else(gpu, tmp_path, capsys, text, reason):
    (tmp_path / "record.txt").write_text(text)
    assert tune() == 2
    assert reason in capsys.readouterr().err
    assert (tmp_path / "record.txt").read_text() == text
    assert not gpu.asked


def test_a_record_that_was_replaced_meanwhile_stays(gpu, tmp_path, monkeypatch):
    other = str(Record(ELSEWHERE))

    def measured(problem, target):
        (tmp_path / "record.txt").write_text(other)
        return FOUND

    monkeypatch.setattr(tuning, "measured", measured)
    with pytest.warns(UserWarning, match="nothing is added"):
        assert tune() == 0
    assert (tmp_path / "record.txt").read_text() == other


@pytest.mark.quick
def test_two_records_become_one(gpu, tmp_path, capsys):
    newer = Measured(11.0, 10.0, FOUND.config)
    for name, made in (("a", Record(HERE, {FIRST: FOUND})), ("b", Record(HERE, {FIRST: newer, SECOND: FOUND}))):
        (tmp_path / name).write_text(str(made))
    (tmp_path / "c").write_text(str(Record(ELSEWHERE)))
    assert main(["tune", "--merge", "a", "b", "-o", "record.txt"]) == 0
    assert record(tmp_path) == Record(HERE, {FIRST: newer, SECOND: FOUND})
    for files, reason in ((["a", "c"], "c: the tuning record was made with gpu another GPU"), (["a", "d"], "d: ")):
        assert main(["tune", "--merge", *files, "-o", "record.txt"]) == 2
        assert reason in capsys.readouterr().err
    assert len(record(tmp_path).products) == 2


@pytest.mark.quick
@pytest.mark.parametrize("given", [["net.py:Net"], ["-o", "f"], ["net.py:Net", "--merge", "a", "-o", "f"]])
def test_what_cannot_be_told_is_an_error(gpu, given, capsys):
    assert main(["tune", *given]) == 2
    assert "expected" in capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["tune", "net.py:Net", "-o", "f"]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err
