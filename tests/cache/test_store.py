"""The store on disk: whole entries or none, from many processes, whatever happens to files and folders."""

from __future__ import annotations

import ast
import contextlib
import errno
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import stat
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from ferrite.cache import Artifact, EntryStore, Key, open_store
from ferrite.cache import folder as folders
from ferrite.cache import store as stores
from ferrite.cache.entry import HEAD, VERSION, encode
from ferrite.errors import FerriteWarning
from ferrite.options import Options

pytestmark = pytest.mark.quick

KEY = Key.of("graph", {"torch": "2.13", "calls": "0 input"})
SECTIONS = {"kernel_0": b"\x7fELF" + bytes(range(60)), "kernel_1": b"", "driver": b"x" * 100}
METADATA = {"plan": [["kernel_0", [0, 1]], None], "name": "größe", "ratio": 0.1}
MEBIBYTE = 1 << 20


@pytest.fixture
def store(tmp_path) -> EntryStore:
    return EntryStore(tmp_path / "artifacts", MEBIBYTE)


def key(number: int) -> Key:
    return Key.of("graph", {"number": str(number)})


def is_there(store: EntryStore, which: Key) -> bool:
    return store.path(which).exists()


def test_what_was_published_is_fetched(store):
    assert store.fetch(KEY) is None
    published = store.publish(KEY, SECTIONS, METADATA)
    assert published == store.fetch(KEY) == Artifact(SECTIONS, METADATA)
    assert EntryStore(store.folder, MEBIBYTE).fetch(KEY) == Artifact(SECTIONS, METADATA)
    assert store.fetch(Key.of("graph", {"torch": "2.12", "calls": "0 input"})) is None
    assert store.fetch(Key.of("kernel", KEY.components)) is None


def test_an_artifact_is_the_same_published_or_fetched(store):
    """Plain data comes back as JSON has it, on a miss as on a hit."""
    published = store.publish(KEY, {}, {"pair": (1, 2)})
    assert published.metadata == {"pair": [1, 2]} == store.fetch(KEY).metadata
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.publish(KEY, {}, {"function": len})
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.publish(KEY, {}, {"number": float("nan")})


def test_files_and_folders_are_private(store):
    mask = os.umask(0)
    try:
        store.publish(KEY, SECTIONS, METADATA)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(store.path(KEY).stat().st_mode) == 0o600


def test_reading_runs_nothing():
    """No module of the cache can turn bytes into objects or code."""
    for path in Path(stores.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            assert not {"pickle", "marshal", "shelve", "dill"} & set(names), path
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            assert called not in ("eval", "exec", "compile", "__import__"), path


# --- damage -----------------------------------------------------------------------------------------------------------


def assert_ignored_and_rebuilt(store: EntryStore) -> None:
    assert store.fetch(KEY) is None
    assert not is_there(store, KEY)
    store.publish(KEY, SECTIONS, METADATA)
    assert store.fetch(KEY) == Artifact(SECTIONS, METADATA)


def test_a_flipped_bit_anywhere_is_noticed(store):
    store.publish(KEY, SECTIONS, METADATA)
    path = store.path(KEY)
    whole = path.read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << (place % 8)
        path.write_bytes(data)
        assert store.fetch(KEY) is None, place
        assert not path.exists()
    assert_ignored_and_rebuilt(store)


def test_an_entry_cut_short_anywhere_is_noticed(store):
    store.publish(KEY, SECTIONS, METADATA)
    path = store.path(KEY)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert store.fetch(KEY) is None, length
    path.write_bytes(whole + b"\0")
    assert_ignored_and_rebuilt(store)


def other_version(data: bytes) -> bytes:
    magic, version, *rest = HEAD.unpack_from(data)
    return HEAD.pack(magic, version + 1, *rest) + data[HEAD.size :]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda data: b"", "empty"),
        (lambda data: data[:20], "cut short"),
        (lambda data: data[:-1], "cut short"),
        (lambda data: data + b"more", "longer than it says"),
        (lambda data: b"#!/bin/sh\n" + data, "not an entry"),
        (other_version, f"of format version {VERSION + 1}, not {VERSION}"),
        (lambda data: encode("graph", {"other": "key"}, Artifact({}, {}), 0.0), "it is the entry of another key"),
        (lambda data: encode("kernel", KEY.components, Artifact({}, {}), 0.0), "it is the entry of another key"),
    ],
)
def test_what_is_wrong_is_said_and_rebuilt(store, damage, problem):
    store.publish(KEY, SECTIONS, METADATA)
    path = store.path(KEY)
    path.write_bytes(damage(path.read_bytes()))
    (entry,) = store.entries()
    assert store.problem_of(entry) == problem
    assert_ignored_and_rebuilt(store)
    assert store.problem_of(entry) is None


def test_json_that_says_something_else_is_noticed(store):
    """The checksum of a description says nothing about its meaning."""
    data = encode("graph", KEY.components, Artifact({}, {}), 0.0)
    text = data[HEAD.size :].replace(b'"sections":{}', b'"sections":[]')
    magic, version, *_ = HEAD.unpack_from(data)
    store.publish(KEY, SECTIONS, METADATA)
    head = HEAD.pack(magic, version, len(text), HEAD.size + len(text), hashlib.sha256(text).digest())
    store.path(KEY).write_bytes(head + text)
    assert_ignored_and_rebuilt(store)


def test_other_things_in_the_place_of_an_entry(store, tmp_path):
    store.publish(KEY, SECTIONS, METADATA)
    path = store.path(KEY)
    path.rename(tmp_path / "entry")
    path.symlink_to(tmp_path / "entry")
    assert store.fetch(KEY) is None  # a link, even to a good entry
    path.unlink()
    os.mkfifo(path)
    assert store.fetch(KEY) is None
    path.unlink()
    path.mkdir()
    assert store.fetch(KEY) is None
    store.publish(KEY, SECTIONS, METADATA)
    assert store.fetch(KEY) == Artifact(SECTIONS, METADATA)


def test_a_file_that_others_can_write_is_not_read(store):
    store.publish(KEY, SECTIONS, METADATA)
    store.path(KEY).chmod(0o666)
    assert store.fetch(KEY) is None
    assert is_there(store, KEY)
    store.publish(KEY, SECTIONS, METADATA)
    assert store.fetch(KEY) is not None


def test_a_file_of_another_user_is_neither_read_nor_removed(store, monkeypatch):
    store.publish(KEY, SECTIONS, METADATA)
    monkeypatch.setattr(folders, "own_user", lambda: os.geteuid() + 1)
    assert store.fetch(KEY) is None
    assert is_there(store, KEY)


# --- folders ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def warned() -> Iterator[list[warnings.WarningMessage]]:
    """Every warning of ferrite inside, however often it comes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FerriteWarning)
        yield caught


def assert_no_cache(store: EntryStore, because: str) -> None:
    """One warning, then compiling as if there were no cache."""
    with warned() as caught:
        assert store.fetch(KEY) is None
        assert store.publish(KEY, SECTIONS, METADATA) == Artifact(SECTIONS, METADATA)
    assert "the cache cannot be used" in str(caught[0].message)
    assert len(caught) == 1
    assert because in str(caught[0].message)
    assert because in store.problem
    assert store.fetch(KEY) is None


def test_a_folder_of_another_user_is_not_used(store, monkeypatch):
    EntryStore(store.folder, MEBIBYTE).publish(KEY, SECTIONS, METADATA)
    monkeypatch.setattr(folders, "own_user", lambda: os.geteuid() + 1)
    assert_no_cache(store, "belongs to another user")


@pytest.mark.parametrize("place", [".", "graph"])
def test_a_folder_that_others_can_write_is_not_used(store, place):
    EntryStore(store.folder, MEBIBYTE).publish(KEY, SECTIONS, METADATA)
    (store.folder / place).chmod(0o777)
    assert_no_cache(store, "can be written by others")


def test_a_link_in_place_of_the_folder_is_not_followed(store, tmp_path):
    EntryStore(tmp_path / "elsewhere", MEBIBYTE).publish(KEY, SECTIONS, METADATA)
    store.folder.symlink_to(tmp_path / "elsewhere")
    assert_no_cache(store, "is not a folder")


def test_a_file_in_place_of_the_folder(store):
    store.folder.write_text("")
    assert_no_cache(store, "is not a folder")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    assert_no_cache(EntryStore(tmp_path / "file" / "artifacts", MEBIBYTE), "Not a directory")


def test_without_a_home_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does where it knows no home
    monkeypatch.chdir(tmp_path)
    with warned() as caught:
        first = open_store(Options(cache_size=7))
        assert open_store(Options(cache_size=7)) is first
    assert len(caught) == 1
    assert "there is no home folder" in str(caught[0].message)
    assert first.publish(KEY, SECTIONS, METADATA) == Artifact(SECTIONS, METADATA)
    assert list(tmp_path.iterdir()) == []


def failing(number: int):
    def fail(*_args, **_kwargs):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_full_disk_costs_one_warning_and_leaves_nothing_behind(store, monkeypatch):
    store.publish(KEY, SECTIONS, METADATA)
    written = []

    def write(descriptor, data):
        if written:
            failing(errno.ENOSPC)()
        written.append(os.fstat(descriptor))
        return real(descriptor, data[:10])

    real = os.write
    monkeypatch.setattr(os, "write", write)
    with warned() as caught:
        for number in range(3):
            assert store.publish(key(number), SECTIONS, METADATA) == Artifact(SECTIONS, METADATA)
    assert len(caught) == 1
    assert "No space left on device" in str(caught[0].message)
    assert written
    assert [path.name for path in store.path(KEY).parent.iterdir()] == [KEY.digest]
    assert store.fetch(KEY) is not None  # what is there can still be read


def test_a_disk_that_takes_little_at_a_time(store, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    store.publish(KEY, SECTIONS, METADATA)
    assert store.fetch(KEY) == Artifact(SECTIONS, METADATA)


def test_a_folder_that_can_only_be_read_is_read(store, monkeypatch):
    store.publish(KEY, SECTIONS, METADATA)
    real = os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda path, flags, *rest: failing(errno.EROFS)() if flags & os.O_CREAT else real(path, flags, *rest),
    )
    monkeypatch.setattr(os, "utime", failing(errno.EROFS))
    reader = EntryStore(store.folder, MEBIBYTE)
    assert reader.fetch(KEY) == Artifact(SECTIONS, METADATA)
    with warned() as caught:
        reader.publish(key(1), SECTIONS, METADATA)
        reader.publish(key(2), SECTIONS, METADATA)
    assert len(caught) == 1
    assert "nothing more is kept in it" in str(caught[0].message)
    assert reader.fetch(KEY) == Artifact(SECTIONS, METADATA)


def test_a_folder_cleared_meanwhile_is_made_again(store):
    store.publish(KEY, SECTIONS, METADATA)
    shutil.rmtree(store.folder)
    assert store.fetch(KEY) is None
    store.publish(KEY, SECTIONS, METADATA)
    assert store.fetch(KEY) is not None


# --- size -------------------------------------------------------------------------------------------------------------


def used_at(store: EntryStore, which: Key, seconds: int) -> None:
    os.utime(store.path(which), (seconds, seconds))


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    store = EntryStore(tmp_path / "artifacts", 100_000)
    for number in range(9):
        store.publish(key(number), {"code": bytes(10_000)}, {})
        used_at(store, key(number), 1000 + number)
    assert store.fetch(key(0)) is not None  # now it is the one used last
    store.publish(key(9), {"code": bytes(10_000)}, {})
    # a little more than was needed, so that the next entry finds room
    assert [number for number in range(10) if is_there(store, key(number))] == [0, 3, 4, 5, 6, 7, 8, 9]
    assert sum(entry.size for entry in store.entries()) <= 90_000


def test_entries_of_other_processes_count(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "ENTRIES_BETWEEN_LOOKS", 4)
    store, other = EntryStore(tmp_path / "artifacts", 100_000), EntryStore(tmp_path / "artifacts", 10 * MEBIBYTE)
    store.publish(key(0), {}, {})
    other.publish(key(1), {"code": bytes(200_000)}, {})
    used_at(other, key(1), 1000)
    for number in range(2, 5):
        store.publish(key(number), {}, {})
        assert is_there(store, key(1))
    store.publish(key(5), {}, {})
    assert not is_there(store, key(1))
    assert all(is_there(store, key(number)) for number in (0, 2, 3, 4, 5))


def test_an_entry_larger_than_the_limit_is_not_kept(tmp_path):
    store = EntryStore(tmp_path / "artifacts", 1000)
    assert store.publish(KEY, {"code": bytes(2000)}, {}).sections == {"code": bytes(2000)}
    assert not is_there(store, KEY)
    assert store.problem is None


def test_an_entry_used_while_room_is_made_stays(tmp_path):
    store = EntryStore(tmp_path / "artifacts", MEBIBYTE)
    for number in range(4):
        store.publish(key(number), {"code": bytes(1000)}, {})
        used_at(store, key(number), 1000 + number)
    listed = list(store.entries())
    store.fetch(key(0))
    store._evict(listed, 1)
    assert [number for number in range(4) if is_there(store, key(number))] == [0, 2, 3]


def test_files_left_behind_are_removed_when_old(store):
    store.publish(KEY, SECTIONS, METADATA)
    fresh, old = (store.path(KEY).with_name(f"{folders.ASIDE}{name}") for name in ("1", "2"))
    for path in (fresh, old):
        path.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    assert store.sweep() == 1
    assert fresh.exists()
    assert not old.exists()
    assert [entry.digest for entry in store.entries()] == [KEY.digest]


# --- many at once -----------------------------------------------------------------------------------------------------


def test_many_threads_make_room_at_once(tmp_path):
    """Several stores over one folder, as in several processes: each removes what the others list."""
    failures = []

    def work(start: int) -> None:
        own = EntryStore(tmp_path / "artifacts", 50_000)
        try:
            for number in range(start, start + 40):
                own.publish(key(number), {"code": bytes([number % 251]) * 3000}, {"number": number})
                found = own.fetch(key(number))
                assert found is None or found.metadata == {"number": number}
            assert own.problem is None
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(100 * each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    store = EntryStore(tmp_path / "artifacts", 50_000)
    assert all(store.problem_of(entry) is None for entry in store.entries())
    store.publish(key(1000), {}, {})
    assert sum(entry.size for entry in store.entries()) <= 50_000


def child(work, *args) -> multiprocessing.Process:
    """A process that writes files and nothing else, so that it may come from a fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        process = multiprocessing.get_context("fork").Process(target=work, args=args)
        process.start()
    return process


def publish_for_ever(folder: Path) -> None:
    store, draw = EntryStore(folder, 64 * MEBIBYTE), random.Random(os.getpid())
    while True:
        number = draw.randrange(20)
        store.publish(key(number), {"code": bytes([number]) * 300_000}, {"number": number})


@pytest.mark.lengthy
def test_a_writer_can_be_killed_at_any_moment(tmp_path):
    draw = random.Random(0)
    store = EntryStore(tmp_path / "artifacts", 64 * MEBIBYTE)
    seen = 0
    for _ in range(10):
        process = child(publish_for_ever, store.folder)
        time.sleep(0.01 + 0.1 * draw.random())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        for entry in store.entries():
            assert store.problem_of(entry) is None
        for number in range(20):
            found = store.fetch(key(number))
            assert found is None or found.sections == {"code": bytes([number]) * 300_000}
            seen += found is not None
    assert seen > 0


def publish_often(folder: Path, times: int) -> None:
    store = EntryStore(folder, MEBIBYTE)
    for _ in range(times):
        store.publish(KEY, SECTIONS, METADATA)
    os._exit(0 if store.problem is None else 1)


@pytest.mark.lengthy
def test_processes_that_write_one_entry_all_succeed(store):
    processes = [child(publish_often, store.folder, 100) for _ in range(3)]
    found = 0
    while any(process.is_alive() for process in processes):
        artifact = store.fetch(KEY)
        assert artifact in (None, Artifact(SECTIONS, METADATA))
        assert found == 0 or artifact is not None  # once there, it is never gone
        found += artifact is not None
    assert [process.exitcode for process in processes if process.join() is None] == [0, 0, 0]
    assert store.fetch(KEY) == Artifact(SECTIONS, METADATA)
    assert [path.name for path in store.path(KEY).parent.iterdir()] == [KEY.digest]
