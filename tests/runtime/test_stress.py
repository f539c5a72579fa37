"""Much of everything: thousands of compiles, dozens of threads, forks, kills and damaged files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import linecache
import logging
import multiprocessing
import os
import random
import signal
import struct
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import ferrite
from ferrite.__main__ import main
from ferrite.cache import Artifact, EntryStore, open_store
from ferrite.cache.entry import HEAD, decode, encode, read_head
from ferrite.cache.folder import ASIDE
from ferrite.debug import record
from ferrite.ir import intern
from ferrite.lower.graph import lower_module
from ferrite.options import resolve
from ferrite.runtime import host_code
from tests.children import PATIENCE, in_child
from tests.compare import assert_no_farther, compile_strict, compiled_graphs, reset, since
from tests.executables import function_of, plan_of
from tests.threads import in_threads

Tensor = torch.Tensor
MEBIBYTE = 1 << 20

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def function(number: int) -> Callable[[Tensor], Tensor]:
    """One of many functions: each has a kernel of its own."""

    def run(x: Tensor) -> Tensor:
        return (x * (number + 0.5)).relu() + number

    # Dynamo counts functions with the same code as one
    return types.FunctionType(run.__code__.replace(co_name=f"run_{number}"), globals(), closure=run.__closure__)


def by_pieces(run: Callable[[Tensor], Tensor], given: Tensor) -> Callable[[Tensor], Tensor]:
    """A function compiled without torch.compile, which takes most of the time."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        lowered = lower_module(make_fx(lambda x: [run(x)])(mode.from_tensor(given, static_shapes=True)))
    plan = plan_of(lowered.program)
    assert len(plan.launches) == 1
    loaded = function_of(plan, lowered.objects)
    return lambda x: loaded([x])[0]


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
        len(host_code._loaded),
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
        assert torch.equal(by_pieces(function(number), x)(x), function(number)(x))


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
    assert sum(map(len, host_code.KNOWN.code.values())) <= host_code.KNOWN.max_bytes


@contextlib.contextmanager
def without_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """pytest keeps every message of a test, and torch has many."""
    with monkeypatch.context() as patch:
        for name in (None, *logging.root.manager.loggerDict):
            patch.setattr(logging.getLogger(name), "handlers", [])
        yield


def grown(before: Held, after: Held) -> int:
    return after.resident - before.resident


@linux
@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_compiled_kernels_leave_nothing_behind(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM itself keeps some KiB of each compilation, the process some object code to share. Memory that is in pieces
    already may grow once by some MiB; what leaks grows in every round."""
    x = torch.randn(5, 33)
    with without_logs(monkeypatch):
        run_by_pieces(range(200 if count > 200 else 20), x)
        rounds = [held_now()]
        for first in range(1000, 1000 + 3 * count, count):
            run_by_pieces(range(first, first + count), x)
            rounds.append(held_now())
    assert len(rounds) == 4
    assert_nothing_is_left(rounds[0], rounds[-1])
    assert rounds[-1].objects <= rounds[0].objects + 50
    assert min(itertools.starmap(grown, itertools.pairwise(rounds))) <= MEBIBYTE + 8192 * count


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
    assert after.objects <= before.objects + 60 * count
    if count >= 100:
        assert grown(before, after) <= 5 * MEBIBYTE


# --- many threads -----------------------------------------------------------------------------------------------------

THREADS = 32
ROWS = torch.linspace(-4, 4, 300 * 2048).reshape(300, 2048)  # enough for kernels that share their work


def shared_work(x: Tensor) -> Tensor:
    """Kernels that all threads of OpenMP work on."""
    return (x * 2).tanh() + x.sum(1, keepdim=True)


@pytest.fixture
def threads_of_torch() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def by_name() -> None:
    """torch finds a backend by its name once, and not from several threads at the same time."""
    reset()
    compile_strict(function(0))


@since(2, 12)  # Dynamo takes another thread's tracing for its own
def test_many_threads_compile_functions_of_their_own() -> None:
    by_name()
    x = torch.randn(5, 33)

    def work(number: int) -> list[Tensor]:
        compiled = compile_strict(function(number), dynamic=False)
        return [compiled(x) for _ in range(5)]

    outputs = in_threads([lambda number=number: work(number) for number in range(THREADS)])
    for number, outs in enumerate(outputs):
        assert all(torch.equal(out, function(number)(x)) for out in outs)
    assert compiled_graphs() == THREADS


@since(2, 12)  # Dynamo takes another thread's tracing for its own
@torch._dynamo.config.patch(recompile_limit=THREADS)
def test_many_threads_compile_one_function() -> None:
    """All of them at once: Dynamo lets each compile, one after the other."""
    by_name()
    compiled = compile_strict(function(1), dynamic=False)
    inputs = [torch.randn(5, 33) for _ in range(THREADS)]
    outputs = in_threads([lambda x=x: [compiled(x) for _ in range(5)] for x in inputs])
    for x, outs in zip(inputs, outputs, strict=True):
        assert all(torch.equal(out, function(1)(x)) for out in outs)
    assert 1 <= compiled_graphs() <= THREADS


@linux
def test_many_threads_share_work_among_others_while_the_number_changes(threads_of_torch: None) -> None:
    """Each of 32 threads has a team of its own, of a size that somebody else may have just changed; when they are gone,
    so are their teams."""
    compiled = by_pieces(shared_work, ROWS)  # Dynamo compiles anew when the number changes
    torch.set_num_threads(1)
    expected = compiled(ROWS)
    assert_no_farther(expected, shared_work(ROWS), shared_work(ROWS.double()), "output", terms=8192.0)
    torch.set_num_threads(2)
    compiled(ROWS)
    before = len(os.listdir("/proc/self/task"))

    def work(number: int) -> int:
        most = 0
        for turn in range(4):
            torch.set_num_threads(1 + (number + turn) % 3)
            assert torch.equal(compiled(ROWS), expected)
            most = max(most, len(os.listdir("/proc/self/task")))
        return most

    most = in_threads([lambda number=number: work(number) for number in range(THREADS)])
    assert max(most) > before + THREADS, "nobody had a team"
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > before + 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) <= before + 2  # the team of this thread may have grown


@since(2, 12)  # Dynamo takes another thread's tracing for its own
def test_some_threads_compile_while_others_run() -> None:
    by_name()
    compiled, x = by_pieces(shared_work, ROWS), torch.randn(5, 33)
    expected = compiled(ROWS)

    def compile_one(number: int) -> bool:
        own = compile_strict(function(number), dynamic=False)
        return torch.equal(own(x), function(number)(x))

    def run() -> bool:
        return all(torch.equal(compiled(ROWS), expected) for _ in range(8))

    works: list[Callable[[], bool]] = [lambda number=number: compile_one(number) for number in range(8)]
    assert all(in_threads([*works, *[run] * 8]))
    assert compiled_graphs() == 8


# --- forks ------------------------------------------------------------------------------------------------------------


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def two_threads(threads_of_torch: None) -> None:
    torch.set_num_threads(2)


def run_and_compile(compiled: Callable[[Tensor], Tensor], expected: Tensor) -> str:
    """What children do: run a kernel whose work is shared, run torch's own, compile and run another function."""
    alone, x = tasks(), torch.randn(5, 33)
    assert torch.equal(compiled(ROWS), expected)
    assert tasks() > alone, "the work was not shared"
    assert torch.equal(torch.neg(ROWS), -ROWS)
    for each in (shared_work, function(7)):
        given = ROWS if each is shared_work else x
        assert torch.equal(compile_strict(each, dynamic=False)(given), expected if each is shared_work else each(x))
    assert compiled_graphs() > 0
    return "right"


@linux
def test_a_child_of_a_fork_runs_and_compiles(two_threads: None) -> None:
    """Threads that helped the parent are not there in the child."""
    compiled = compile_strict(shared_work, dynamic=False)
    expected = compiled(ROWS)
    assert tasks() > 1
    for _ in range(2):
        assert in_child(lambda: run_and_compile(compiled, expected)) == "right"
        assert torch.equal(compiled(ROWS), expected)  # and the parent goes on


@linux
def test_a_child_of_a_thread_that_never_ran_a_kernel(two_threads: None) -> None:
    compiled = by_pieces(shared_work, ROWS)
    expected = compiled(ROWS)

    def fork() -> str:
        return in_child(lambda: run_and_compile(compiled, expected))

    assert in_threads([fork]) == ["right"]


@linux
def test_children_of_children(two_threads: None) -> None:
    compiled = by_pieces(shared_work, ROWS)
    expected = compiled(ROWS)

    def middle() -> str:
        assert torch.equal(compiled(ROWS), expected)
        return in_child(lambda: str(torch.equal(compiled(ROWS), expected)))

    assert in_child(middle) == "True"


@linux
def test_processes_of_multiprocessing_run_kernels(two_threads: None) -> None:
    compiled = by_pieces(shared_work, ROWS)
    expected = compiled(ROWS)

    def work() -> None:
        sys.exit(0 if torch.equal(compiled(ROWS), expected) else 3)

    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        processes = [context.Process(target=work, daemon=True) for _ in range(3)]
        for process in processes:
            process.start()
    for process in processes:
        process.join(PATIENCE)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0, 0]


@linux
def test_a_child_runs_kernels_that_it_got_while_others_compiled(two_threads: None) -> None:
    compiled = by_pieces(shared_work, ROWS)
    expected, done = compiled(ROWS), threading.Event()

    def compile_on() -> None:
        for number in itertools.count():
            by_pieces(function(number), torch.empty(5, 33))
            if done.is_set():
                return

    def fork() -> list[str]:
        try:
            return [in_child(lambda: str(torch.equal(compiled(ROWS), expected))) for _ in range(5)]
        finally:
            done.set()

    assert in_threads([fork, compile_on])[0] == ["True"] * 5


# --- kills ------------------------------------------------------------------------------------------------------------

FIRST = 5000  # of functions that nobody has compiled in this process


def cache() -> EntryStore:
    store = open_store(resolve())
    assert store is not None
    return store


def left_behind(store: EntryStore) -> list[Path]:
    """Files that were begun and never finished."""
    return [path for path in store.folder.glob("*/*") if path.name.startswith(ASIDE)]


def compile_for_ever(first: int, begun: int) -> None:
    """Onto a disk so slow that much of the time goes into writing; say so when that begins."""
    write = os.write

    def slowly(descriptor: int, data: bytes) -> int:
        write(begun, b".")
        time.sleep(0.002)
        return write(descriptor, data[:64])

    os.write = slowly  # in this process, which is about to die
    x = torch.randn(5, 33)
    for number in itertools.count(first):
        assert torch.equal(compile_strict(function(number), dynamic=False)(x), function(number)(x))
        torch.compiler.reset()


@linux
@pytest.mark.usefixtures("artifact_cache")
@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_a_compiling_process_can_be_killed_at_any_moment(kills: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever comes next finds whole entries or none, compiles what is missing, and sweeps up."""
    draw, store = random.Random(1), cache()
    for kill in range(kills):
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                compile_for_ever(FIRST + 5 * kill, writing)
            os._exit(0)
        os.close(writing)
        if kill % 4:
            os.read(reading, 1)
        if kill % 4 != 1:  # else in the middle of the first entry
            time.sleep(0.3 * draw.random())
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        os.close(reading)
        assert all(store.problem_of(entry) is None for entry in store.entries())
    abandoned = left_behind(store)
    assert abandoned, "nobody was killed while writing"
    x = torch.randn(5, 33)
    for number in range(FIRST, FIRST + 5 * kills, 5):  # each of them compiled, or begun, by somebody who was killed
        assert torch.equal(compile_strict(function(number), dynamic=False)(x), function(number)(x))
        torch.compiler.reset()
    for path in abandoned:
        os.utime(path, (1000, 1000))  # long ago
    capsys.readouterr()
    assert len(list(store.entries("graph"))) >= kills
    assert len(list(store.entries("kernel"))) >= kills
    assert main(["cache", "verify"]) == 0
    assert main(["cache", "verify", "--remove"]) == 0
    assert f"{len(abandoned)} files removed that were left behind half written" in capsys.readouterr().out
    assert left_behind(store) == []


# --- damaged entries --------------------------------------------------------------------------------------------------

Damage = Callable[[Path], object]


def boundaries(data: bytes) -> list[int]:
    """Where the parts of an entry begin: fields of the head, the description, the sections, the last byte."""
    fields = itertools.accumulate(struct.calcsize(f"<{field}") for field in ("8s", "I", "I", "Q", "32s"))
    described, _checksum = read_head(data, len(data))
    return [0, *fields, HEAD.size + described, len(data) - 1]


def cut(place: int) -> Damage:
    return lambda path: path.write_bytes(path.read_bytes()[: boundaries(path.read_bytes())[place]])


def flipped(place: int) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[boundaries(bytes(data))[place]] ^= 0x40
        path.write_bytes(data)

    return damage


def other_version(path: Path) -> None:
    magic, version, *rest = HEAD.unpack_from(data := path.read_bytes())
    path.write_bytes(HEAD.pack(magic, version + 1, *rest) + data[HEAD.size :])


def emptied(path: Path) -> None:
    """A whole entry of the right key, but with nothing in it."""
    about, _artifact = decode(path.read_bytes())
    path.write_bytes(encode(about.kind, about.components, Artifact({}, {}), 0.0))


def nonsense(path: Path) -> None:
    """A whole entry of the right key, but with bytes in place of code."""
    about, artifact = decode(path.read_bytes())
    sections = {name: code[:30] + b"?" for name, code in artifact.sections.items()}
    path.write_bytes(encode(about.kind, about.components, Artifact(sections, artifact.metadata), 0.0))


def of_another_user(path: Path) -> None:
    os.chown(path, 12345, -1)


def unreadable(path: Path) -> None:
    path.chmod(0)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to("elsewhere")


def loop(path: Path) -> None:
    """Which nobody can read, not even root."""
    path.unlink()
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


BOUNDARIES = range(8)
DAMAGES: dict[str, Damage] = {
    **{f"cut {place}": cut(place) for place in BOUNDARIES},
    **{f"flipped {place}": flipped(place) for place in (0, 1, 2, 3, 4, 5, 7)},
    "other version": other_version,
    "emptied": emptied,
    "nonsense": nonsense,
    # only root can give files away; it reads everything
    **({"of another user": of_another_user} if os.geteuid() == 0 else {"unreadable": unreadable}),
    "writable by others": lambda path: path.chmod(0o666),
    "folder": folder,
    "link": link,
    "loop": loop,
    "pipe": pipe,
}
QUICK = ("flipped 7", "nonsense", "of another user", "unreadable", "folder", "loop")


@linux
@pytest.mark.usefixtures("artifact_cache")
@pytest.mark.parametrize("kind", ["graph", "kernel"])
@pytest.mark.parametrize(
    "damage", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DAMAGES]
)
def test_whatever_is_in_the_place_of_an_entry_is_made_anew(
    kind: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, x = cache(), torch.randn(5, 33)

    def run() -> str:
        """As in a process that has just begun: how the cache was asked."""
        monkeypatch.setattr(host_code.KNOWN, "code", {})
        monkeypatch.setattr(host_code, "_loaded", weakref.WeakValueDictionary())
        torch.compiler.reset()
        assert torch.equal(compile_strict(function(3), dynamic=False)(x), function(3)(x))
        (outcome,) = ferrite.last_compile().cache
        return outcome.result

    assert run() == "miss"
    entries = list(store.entries())
    for entry in entries:
        if entry.kind == "graph" and kind == "kernel":
            entry.path.unlink()  # so that kernels are asked for
        elif entry.kind == kind:
            DAMAGES[damage](entry.path)
            assert store.problem_of(entry) is not None or damage in ("emptied", "nonsense")
    assert run() == "miss"
    assert {entry.digest for entry in store.entries()} == {entry.digest for entry in entries}
    assert [store.problem_of(entry) for entry in store.entries()] == [None] * len(entries)
    assert all(entry.path.is_file() and not entry.path.is_symlink() for entry in entries)
    assert run() == "hit"
