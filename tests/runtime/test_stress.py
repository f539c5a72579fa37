"""Much of everything: thousands of compiles, dozens of threads, forks, kills and damaged files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import linecache
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compare import compile_strict
from ferrite import native
from ferrite.debug import record
from ferrite.ir import intern
from ferrite.lower.graph import lower_module
from ferrite.runtime import kernels

Tensor = torch.Tensor
MEBIBYTE = 1 << 20

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def function(number: int) -> Callable[[Tensor], Tensor]:
    """One of many functions: each has a kernel of its own."""
    return lambda x: (x * (number + 0.5)).relu() + number


def by_pieces(number: int) -> Callable[[list[Tensor]], list[Tensor]]:
    """One of them compiled without torch.compile, which takes most of the time: lowered, scheduled, generated."""
    mode, given = FakeTensorMode(shape_env=ShapeEnv()), torch.empty(5, 33)
    with mode:
        traced = make_fx(lambda x: [function(number)(x)])(mode.from_tensor(given, static_shapes=True))
    lowered = lower_module(traced)
    plan = native.schedule(lowered.program, verify=True)
    assert len(plan.launches) == 1
    return native.load(native.generate(plan), lowered.objects)


# --- many compiles in one process -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What a process has when all that was compiled is dropped again."""

    resident: int  # bytes
    threads: int
    functions: int  # of native code
    mappings: int  # memory with code that comes from no file
    texts: int  # that tracebacks would show
    nodes: int  # of the IR
    objects: int  # that Python's collector knows


def held_now() -> Held:
    forget()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Held(
        int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
        len(os.listdir("/proc/self/task")),
        len(kernels._loaded),
        sum(line.split()[1].startswith("r-x") and len(line.split()) == 5 for line in maps),
        sum(name.startswith("<ferrite") for name in linecache.cache),
        len(intern._table),
        len(gc.get_objects()),
    )


def forget() -> None:
    """Drop what torch keeps as a user would; what it keeps for ever under any backend; and the last records."""
    torch.compiler.reset()
    FakeTensorMode.cache_clear()
    graph_module._loader.eval_cache.clear()
    for name in [name for name in linecache.cache if name.startswith("<eval_with_key>")]:
        del linecache.cache[name]
    record._records.clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def run_by_pieces(numbers: Iterable[int], x: Tensor) -> None:
    for number in numbers:
        (out,) = by_pieces(number)([x])
        assert torch.equal(out, function(number)(x))


def run_whole(numbers: Iterable[int], x: Tensor) -> None:
    for number in numbers:
        assert torch.equal(compile_strict(function(number), dynamic=False)(x), function(number)(x))
        torch.compiler.reset()


def assert_nothing_is_left(before: Held, after: Held) -> None:
    assert after.threads <= before.threads
    assert after.functions <= before.functions
    assert after.mappings <= before.mappings
    assert after.texts <= before.texts
    assert after.nodes <= before.nodes
    assert sum(map(len, kernels._code.values())) <= kernels.REMEMBERED


@contextlib.contextmanager
def without_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """pytest keeps every message of a test, and torch has many."""
    with monkeypatch.context() as patch:
        for name in (None, *logging.root.manager.loggerDict):
            patch.setattr(logging.getLogger(name), "handlers", [])
        yield


@linux
@pytest.mark.parametrize("count", [100, pytest.param(900, marks=pytest.mark.slow)])
def test_compiled_kernels_leave_nothing_behind(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM itself keeps some KiB of each compilation, the process some object code to share."""
    x = torch.randn(5, 33)
    with without_logs(monkeypatch):
        run_by_pieces(range(200 if count > 200 else 20), x)
        before = held_now()
        run_by_pieces(range(1000, 1000 + count), x)
        after = held_now()
    assert_nothing_is_left(before, after)
    assert after.objects <= before.objects + 50
    assert after.resident <= before.resident + 3 * MEBIBYTE + 8192 * count


@linux
@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_compiled_functions_leave_nothing_behind(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole of torch, which under any backend keeps some objects of each function, and more of the first
    hundred."""
    x = torch.randn(5, 33)
    with without_logs(monkeypatch):
        run_whole(range(100 if count >= 100 else 3), x)
        before = held_now()
        run_whole(range(1000, 1000 + count), x)
        after = held_now()
    assert_nothing_is_left(before, after)
    assert after.objects <= before.objects + 20 * count
    if count >= 100:
        assert after.resident <= before.resident + 2 * MEBIBYTE
