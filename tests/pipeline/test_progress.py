"""Who waits for a compile is told where it is: callbacks, a line in a terminal, the log. Otherwise nothing happens."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from ferrite.debug import Compilation, Progress, progress
from ferrite.debug.record import forget_record
from ferrite.options import Options
from tests.compare import compile_strict

pytestmark = pytest.mark.quick


def model(x, w):
    return torch.softmax(x @ w, -1).sum() + w.cumsum(0).cos().sum()


def run(**options):
    w = torch.randn(8, 8, requires_grad=True)
    compile_strict(model, options=options)(torch.randn(4, 8), w).backward()


def test_a_callback_is_told_of_every_stage_and_kernel():
    told: list[Progress] = []
    run(progress_callback=told.append)
    stages = list(dict.fromkeys(each.stage for each in told))
    assert [stage for stage in stages if stage in ("pre_grad", "lower", "codegen", "done")] == [
        "pre_grad",
        "lower",
        "codegen",
        "done",
    ]
    assert [each.stage for each in told].count("done") == 2  # forward, and later backward
    counts = [(each.done, each.kernels) for each in told if each.kernels]
    assert all(0 < done <= of for done, of in counts)
    assert str(told[0].line).endswith("return torch.softmax(x @ w, -1).sum() + w.cumsum(0).cos().sum()")
    assert all(each.seconds >= 0 for each in told)
    assert str(Progress("codegen", 4.21, 31, 64)) == "codegen, 31 of 64 kernels, 4.2 s"


def test_when_a_stage_is_over_it_is_in_the_one_around():
    """Capturing takes longest, and has the first passes inside."""
    compilation = Compilation(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)], Options())
    forget_record(compilation.record)
    with compilation.stage("capture"):
        with compilation.stage("pre_grad"):
            assert compilation.watch.now().stage == "pre_grad"
        assert compilation.watch.now().stage == "capture"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(monkeypatch, patience: float, stream: io.StringIO, **options) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", patience)
    monkeypatch.setattr(progress, "PERIOD_SECONDS", 0.01)
    watch = progress.CompilationProgress(Options(**options), None)
    with watch.watching():
        watch.at("lower")
        time.sleep(0.15)
    return stream.getvalue()


def test_a_long_compile_writes_one_line_in_a_terminal_and_wipes_it_away(monkeypatch):
    before = threading.active_count()
    text = watched(monkeypatch, 0.02, Terminal())
    lines = text.split("\r")
    assert lines[1].startswith("ferrite: lower, 0.")
    assert "\n" not in text
    assert lines[-2].strip() == ""
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("stream", "options", "patience"),
    [(Terminal(), {}, 60.0), (io.StringIO(), {}, 0.0), (Terminal(), {"progress": "off"}, 0.0)],
    ids=["short", "no terminal", "off"],
)
def test_otherwise_nothing_is_written(monkeypatch, stream, options, patience):
    assert watched(monkeypatch, patience, stream, **options) == ""


def test_the_log_has_a_line_for_every_graph_and_with_debug_for_every_stage():
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
    logger = logging.getLogger("ferrite")
    logger.addHandler(handler)
    try:
        run()
        assert not [line for line in lines if line.startswith(("DEBUG", "INFO"))]
        logger.setLevel(logging.INFO)
        torch.compiler.reset()
        run()
        assert [line.split(":")[0].split(", ")[-1] for line in lines] == ["forward", "backward"]
        assert all("kernels" in line and "test_progress.py" in line for line in lines)
        logger.setLevel(logging.DEBUG)
        torch.compiler.reset()
        run()
        assert any("schedule," in line for line in lines if line.startswith("DEBUG"))
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)


@pytest.mark.slow
def test_torch_logs_knows_the_logger():
    code = "import torch, ferrite\ntorch.compile(torch.sin, backend='ferrite')(torch.ones(3))"
    env = {**os.environ, "TORCH_LOGS": "+ferrite"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert "graph 0, inference: 1 kernels, 0 eager calls" in done.stderr
