"""The child's side: a plugin of pytest that exchanges the backend, runs some tests, and says how they went.

It reads what to do from the file that YARDSTICK names, and appends one line of JSON per event to another, flushed at
once: when the process dies, the last line says which test it was in.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from bench.yardstick.missing import placeholders
from bench.yardstick.reasons import KINDS, Reason, reason_of
from bench.yardstick.swap import Swap


class Plugin:
    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task
        self.events = open(task["events"], "a", encoding="utf-8")  # noqa: SIM115  # open as long as the process
        self.stacks = open(task["stacks"], "w", encoding="utf-8")  # noqa: SIM115
        self.file = Path(task["file"])
        self.swap: Swap | None = None
        self.outcome = "passed"
        self.reason: Reason | None = None
        self.began = 0.0

    def say(self, **event: Any) -> None:
        self.events.write(json.dumps(event) + "\n")
        self.events.flush()

    def pytest_configure(self, config: pytest.Config) -> None:
        self.swap = Swap(self.task["backend"])
        self.swap.install(self.task["replaced"])

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Any:
        with placeholders() if self.task["placeholders"] else contextlib.nullcontext():
            return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = self.task["tests"]
        if wanted is None:
            for item in items:
                self.say(event="collected", test=item.nodeid)
            items.clear()
            return
        places = {test: i for i, test in enumerate(wanted)}
        items[:] = sorted((each for each in items if each.nodeid in places), key=lambda each: places[each.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        import torch

        torch._dynamo.reset()  # one test shall not decide how the next is compiled
        assert self.swap is not None
        self.swap.begin()
        self.outcome, self.reason, self.began = "passed", None, time.monotonic()
        self.say(event="start", test=nodeid)
        faulthandler.dump_traceback_later(self.task["limit"], file=self.stacks)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if report.failed:
            self.outcome = "failed"
            if call.excinfo is not None and self.reason is None:
                self.reason = reason_of(call.excinfo.value, self.file)
        elif report.skipped and self.outcome == "passed":
            self.outcome = "skipped"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:  # a part of a test reports without an error of the test's own
            self.outcome = "failed"
            if self.reason is None:
                last = str(report.longrepr).strip().splitlines()[-1:] or [""]
                self.reason = Reason("assertion", last[0][:200])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        assert self.swap is not None
        reason = self.reason or Reason("", "")
        assert reason.kind in ("", *KINDS)
        self.say(
            event="end",
            test=nodeid,
            outcome=self.outcome,
            kind=reason.kind,
            reason=reason.line,
            graphs=self.swap.graphs,
            by_inductor=self.swap.by_inductor,
            seconds=round(time.monotonic() - self.began, 2),
        )

    def pytest_sessionfinish(self) -> None:
        self.say(event="finished")


def pytest_configure(config: pytest.Config) -> None:
    plugin = Plugin(json.loads(Path(os.environ["YARDSTICK"]).read_text()))
    config.pluginmanager.register(plugin, "yardstick of a backend")
