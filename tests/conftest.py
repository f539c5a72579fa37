"""Fixtures for all tests."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo.config
import torch._dynamo.guards
import torch._dynamo.utils
from torch._decomp.decompositions_for_rng import PhiloxState

from ferrite.debug import record

# After each compilation Dynamo empties the processor's cache to time its guards, for a log that nobody reads here. That
# was 35 of the 130 ms of a small function under a profiler; without it the suite spends half the time in the system.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
# For another such log it copies the settings of four of torch's packages and writes them as JSON: 3 to 4 ms each time.
torch._dynamo.utils.record_compilation_metrics = lambda *_: None
# AOTAutograd makes twelve empty tensors of its fake kind for a random state that nothing here tracks, each time it is
# entered and left: a tenth of a small function. One empty tensor serves as well: all that is asked of it is its size.
EMPTY = torch.tensor(())
# Nor need it look for garbage after each function.
torch._dynamo.config.run_gc_after_compile = False
# Files of tests that say nothing with `--device cuda`.
NOT_ON_OTHER_DEVICES = {
    "test_exceptions": "an error ends what a process can do on a GPU: tests/runtime/test_cuda_gpu_values.py has them",
    "test_threads": "tests/runtime/test_cuda_gpu.py has them",
}


def no_random_state(self: PhiloxState) -> None:
    self.seed, self.base_offset = EMPTY, EMPTY
    self.relative_offset, self.offset_advanced_at_least_once = 0, False


PhiloxState.reset = no_random_state
# `torch.manual_seed` formats a traceback for each kind of device that is not there, and keeps it: 3 to 5 ms.
for kind in (torch.cuda, torch.xpu, torch.mtia):
    if not kind.is_available():
        kind.manual_seed_all = lambda _seed: None  # type: ignore[attr-defined]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")
    parser.addoption(
        "--executor", default="native", help="what runs the graphs where a test does not say: see the option"
    )
    parser.addoption(
        "--check-bounds", action="store_true", help="kernels compare every address with the bounds of its memory"
    )
    parser.addoption("--device", default="cpu", help="where tensors are made of which a test does not say it")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported: what they make at once is there as well."""
    device = config.getoption("--device")
    if device != "cpu":
        torch.set_default_device(device)


def no_test_cases_are_looked_for() -> None:
    """For every sample of torch's tables torch reads the source of all frames above, for a `unittest.TestCase`, which
    no test here is: more than half of the time of tests with samples."""
    for name in ("torch.testing._internal.common_utils", "torch.testing._internal.opinfo.core"):
        if name in sys.modules:
            sys.modules[name].extract_test_fn = lambda: None  # type: ignore[attr-defined]


LONG_FILES_ARE_IN = ("models", "rules", "contract", "schedule", "cache", "targets", "project")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Folders with files of a minute come first: whichever process is left with the last file, it is a short one. On
    another device some say nothing."""

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return LONG_FILES_ARE_IN.index(folder) if folder in LONG_FILES_ARE_IN else len(LONG_FILES_ARE_IN)

    items.sort(key=place)
    if config.getoption("--device") == "cpu":
        return
    for item in items:
        item.add_marker(pytest.mark.usefixtures("few_processes"))
        if (reason := NOT_ON_OTHER_DEVICES.get(item.path.stem)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look through it again and again."""
    no_test_cases_are_looked_for()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 50)  # what Dynamo leaves behind is looked through more seldom: a twentieth of the time


@pytest.fixture(scope="module", autouse=True)
def survivors_are_frozen() -> Iterator[None]:
    """What outlives a file of tests (interned nodes, tables of torch) stays, too. Else one collection late in a process
    takes ten seconds: a test with four of them took a minute, which alone takes half a second."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def new_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders that are not there yet. `tmp_path` would make one for each test, and look through all before it."""
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def fresh_compiler(
    new_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """No compiled code, options, files or random state are shared between tests."""
    torch.manual_seed(0)
    monkeypatch.setenv("FERRITE_CACHE_DIR", str(next(new_folders)))
    monkeypatch.setenv("FERRITE_CACHE", "0")  # a fixture below switches it on
    monkeypatch.setenv("FERRITE_EXECUTOR", str(request.config.getoption("--executor")))
    checked = request.config.getoption("--check-bounds") or request.path.parent.name == "fuzz"
    monkeypatch.setenv("FERRITE_CHECK_BOUNDS", str(int(checked)))
    torch.compiler.reset()
    record._records.clear()  # a report would tell of all of them
    yield
    torch.compiler.reset()


@pytest.fixture
def artifact_cache(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code is kept, in a folder of the test's own."""
    monkeypatch.setenv("FERRITE_CACHE", "1")


@pytest.fixture
def program_of_calls(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at what runs a graph's calls one by one: they have it, whatever `--executor` says."""
    monkeypatch.setenv("FERRITE_EXECUTOR", "calls")


@pytest.fixture
def llvm_kernels(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what only kernels have, whatever `--executor` says."""
    monkeypatch.setenv("FERRITE_EXECUTOR", "native")


@pytest.fixture
def few_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For many tests on a GPU, which run side by side: kernels are compiled where they are needed, by one more process
    at most. And a process whose GPU takes no more work, after an assertion of a kernel, ends: others go on."""
    monkeypatch.setattr("ferrite.runtime.cuda.workers.MAX_WORKERS", 1)
    yield
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        os._exit(1)


class Golden:
    """Compares text with a file beside the test: golden/<test name>.txt. `--update-golden` writes it."""

    def __init__(self, path: Path, update: bool) -> None:
        self.path, self.update = path, update

    def __eq__(self, text: object) -> bool:
        assert isinstance(text, str)
        if self.update:
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(text)
        return self.path.is_file() and self.path.read_text() == text

    def __repr__(self) -> str:
        return self.path.read_text() if self.path.is_file() else f"no file {self.path.name}: run with --update-golden"

    __hash__ = None


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    path = request.path.parent / "golden" / f"{request.node.name}.txt"
    return Golden(path, bool(request.config.getoption("--update-golden")))
