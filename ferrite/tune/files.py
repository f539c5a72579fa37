"""Records in files: read, added to by several processes at once, and merged."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from ferrite.errors import Refusal
from ferrite.tune.record import InvalidRecord, Record, parsed

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None  # type: ignore[assignment]


def read_record(path: Path) -> Record | Refusal:
    try:
        return parsed(path.read_text())
    except (OSError, UnicodeDecodeError, InvalidRecord) as problem:
        return Refusal(str(problem))


def add_to(path: Path, new: Record) -> Record | Refusal:
    """All that is in a file, and what is new. Nothing is lost if others add to it at the same time, and a file that is
    no record, or one of another GPU, stays as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent):
            if path.exists():
                before = read_record(path)
                if isinstance(before, Refusal):
                    return before
                if (refusal := before.reason_against(new.where)) is not None:
                    return refusal
                new = before.merged(new)
            write(path, str(new))
    except OSError as problem:
        return Refusal(str(problem))
    return new


def merged_files(paths: Sequence[Path]) -> Record | Refusal:
    """One record of several; of a problem that two have, the later one says how long it takes."""
    merged: Record | None = None
    for path in paths:
        found = read_record(path)
        if isinstance(found, Refusal):
            return Refusal(f"{path}: {found.reason}")
        if merged is not None and (refusal := found.reason_against(merged.where)) is not None:
            return Refusal(f"{path}: {refusal.reason}, as {paths[0]} says")
        merged = found if merged is None else merged.merged(found)
    return Refusal("there is nothing to merge") if merged is None else merged


def write(path: Path, text: str) -> None:
    """All at once: whoever reads it meanwhile has the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        new.write_text(text)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Other processes that ask for the same folder wait. The folder itself is locked, and no file beside a record that
    somebody would commit; on file systems without locks nobody waits."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
