"""The cache on disk: entries by the digest of their keys, shared by all processes of one user.

    FOLDER/artifacts/graph/<digest>      a compiled graph: all its object code in one file, and how to call it
    FOLDER/artifacts/kernel/<digest>     one kernel, which many graphs may share
    FOLDER/artifacts/captured/<digest>   what the pre-grad passes made of a graph of torch calls
    FOLDER/artifacts/joint/<digest>      what the joint passes made of a graph of forward and backward

Nothing is locked. An entry is written beside its place and renamed into it, so a reader sees a whole entry or none, and
of two writers of one entry the last wins with the same contents. Whatever is wrong with an entry makes it a miss, with
a reason; if it is our own it is removed. What goes wrong with the folder costs one warning and the cache, never a
compilation.

Files are read into memory and never mapped executable: a folder on a file system that allows no execution will do.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ferrite.cache.entry import HEAD, MAX_ENTRY_BYTES, About, Artifact, Damaged, encode, read, read_about, read_head
from ferrite.cache.folder import (
    ASIDE,
    Unusable,
    check_above,
    check_folder,
    make_folders,
    open_own,
    read_all,
    remove,
    write_new,
)
from ferrite.cache.key import Key
from ferrite.errors import Refusal, layout, warn_user

Kind = Literal["graph", "kernel", "captured", "joint", "sources"]
KINDS: tuple[Kind, ...] = ("graph", "kernel", "captured", "joint", "sources")
DIGEST = re.compile(r"[0-9a-f]{64}")
ABANDONED_AFTER_SECONDS = 3600.0  # seconds until such a file is taken for left behind
ENTRIES_BETWEEN_LOOKS = 64  # entries that one process publishes until it looks again at what others have
SHARE_LEFT = 0.9  # of the limit, when entries were removed


@dataclass(frozen=True)
class Entry:
    """A file of the cache, as the folder lists it."""

    kind: str
    digest: str
    path: Path
    size: int
    used: int  # nanoseconds since 1970


@dataclass(frozen=True)
class FoundEntry:
    """What there is for a key. `refusal`: why an entry that there was cannot be used."""

    artifact: Artifact | None = None
    refusal: Refusal | None = None


class EntryStore:
    """The entries below one folder, at most `limit` bytes of them. Safe from many threads and processes. `root` is the
    folder above that the user named, if it is another: from there on everything must be the user's alone.

    `problem` says why the store no longer reads or writes.
    """

    def __init__(self, folder: Path, limit: int, root: Path | None = None) -> None:
        self.folder, self.limit = folder.absolute(), limit
        self.root = self.folder if root is None else root.absolute()
        self.problem: str | None = None
        self.reads = self.writes = True
        self._counting = threading.Lock()
        self._warnings = itertools.count()
        self._ready: set[str] = set()  # kinds whose folders have been looked at
        self._bytes: int | None = None  # in all entries, as far as known
        self._published = 0  # since they were counted

    # --- reading ------------------------------------------------------------------------------------------------------

    def fetch(self, key: Key) -> Artifact | None:
        """The entry of a key; None where there is none that is whole, ours, and of this key."""
        return self.look(key).artifact

    def look(self, key: Key) -> FoundEntry:
        """The same, and what is wrong with an entry that is there. It is removed if it is ours."""
        if not self._usable(key.kind):
            return FoundEntry()
        path = self.path(key)
        try:
            descriptor, status = open_own(path)
        except FileNotFoundError:
            return FoundEntry()
        except OSError as problem:
            return FoundEntry(refusal=Refusal(str(problem)))  # not ours
        try:
            about, artifact = read(lambda size: read_all(descriptor, size), status.st_size)
            if about.kind != key.kind or about.components != key.components:
                raise Damaged("it is the entry of another key")
            with contextlib.suppress(OSError):  # a folder that is only to be read is good enough
                os.utime(descriptor if os.utime in os.supports_fd else path)
        except OSError as problem:
            return FoundEntry(refusal=Refusal(str(problem)))
        except Exception as problem:  # whatever is wrong with an entry costs the entry
            remove(path)
            return FoundEntry(refusal=Refusal(words_of(problem)))
        finally:
            os.close(descriptor)
        return FoundEntry(artifact)

    def path(self, key: Key) -> Path:
        return self.folder / key.kind / key.digest

    def discard(self, key: Key) -> None:
        """Remove an entry that its reader can make nothing of."""
        remove(self.path(key))

    def _folders(self, kind: str) -> list[Path]:
        """Those that must be ours alone, each inside the one before."""
        below = [each for each in self.folder.parents if self.root in each.parents]
        own = [] if self.root == self.folder else [self.root, *reversed(below)]
        return [*own, self.folder, self.folder / kind]

    def _usable(self, kind: str) -> bool:
        """Look at a folder before its first use. One that is missing is made when something is written."""
        if not self.reads or kind in self._ready:
            return self.reads
        try:
            check_above(self.root)
            for folder in self._folders(kind):
                check_folder(folder)
        except FileNotFoundError:
            return False
        except OSError as problem:
            self.give_up(problem, reads=False)
            return False
        self._ready.add(kind)
        return True

    def examine(self) -> str | None:
        """Why the folder is not used, if it is there and is not."""
        try:
            with contextlib.suppress(FileNotFoundError):
                check_above(self.root)
            for folder in dict.fromkeys(folder for kind in KINDS for folder in self._folders(kind)):
                with contextlib.suppress(FileNotFoundError):
                    check_folder(folder)
        except OSError as problem:
            return str(problem)
        return self.problem

    # --- writing ------------------------------------------------------------------------------------------------------

    def publish(self, key: Key, sections: Mapping[str, bytes], metadata: Mapping[str, Any]) -> Artifact:
        """Keep an entry if possible; the artifact as a reader would get it, in any case."""
        artifact = Artifact(dict(sections), json.loads(json.dumps(dict(metadata), allow_nan=False)))
        if not self.writes:
            return artifact
        data = encode(key.kind, key.components, artifact, time.time())
        if len(data) > min(self.limit, MAX_ENTRY_BYTES):
            return artifact
        try:
            try:
                self._write(key, data)
            except FileNotFoundError:  # somebody has just cleared the folder
                self._write(key, data)
            self._make_room(len(data))
        except OSError as problem:
            self.give_up(problem, reads=self.reads and not isinstance(problem, Unusable))
        return artifact

    def _write(self, key: Key, data: bytes) -> None:
        path = self.path(key)
        aside = path.with_name(f"{ASIDE}{os.getpid()}-{secrets.token_hex(8)}")  # on other machines we may be others
        if key.kind not in self._ready or not path.parent.is_dir():
            make_folders(self._folders(key.kind))
            self._ready.add(key.kind)
        write_new(aside, data)
        try:
            try:
                os.replace(aside, path)
            except IsADirectoryError:
                os.rmdir(path)
                os.replace(aside, path)
        except BaseException:
            remove(aside)
            raise

    def give_up(self, problem: OSError, reads: bool) -> None:
        """Write no more, and unless `reads` is set read no more; say so once."""
        self.problem = self.problem or str(problem)
        self.reads, self.writes = reads, False
        if next(self._warnings) == 0:  # also if several threads come here at once
            facts = {
                "because": str(problem),
                "what happens": "nothing more is kept in it" if reads else "compiling goes on without it",
                "to change that": "set FERRITE_CACHE_DIR to a folder of your own, or FERRITE_CACHE=0",
            }
            warn_user(layout("ferrite: the cache cannot be used", facts))

    # --- size ---------------------------------------------------------------------------------------------------------

    def _make_room(self, added: int) -> None:
        """Remove what has not been used for longest, once the limit is passed. The folder is not read every time."""
        if not self._counting.acquire(blocking=False):
            return  # another thread is at it; nobody waits for a lock that a fork may have left taken
        try:
            self._published += 1
            if self._bytes is not None:
                self._bytes += added
                if self._bytes <= self.limit and self._published < ENTRIES_BETWEEN_LOOKS:
                    return
            self._published = 0
            entries = list(self.entries())
            self._bytes = sum(entry.size for entry in entries)
            if self._bytes > self.limit:
                self._bytes -= self._evict(entries, self._bytes - int(self.limit * SHARE_LEFT))
            self.sweep()
        finally:
            self._counting.release()

    def _evict(self, entries: list[Entry], excess: int) -> int:
        """Free so many bytes at least; how many. What another process removed meanwhile counts too."""
        freed = 0
        for entry in sorted(entries, key=lambda entry: (entry.used, entry.digest)):
            if freed >= excess:
                break
            with contextlib.suppress(OSError):
                if os.lstat(entry.path).st_mtime_ns != entry.used:
                    continue  # used or written since it was listed
            remove(entry.path)
            freed += entry.size
        return freed

    def sweep(self) -> int:
        """Remove files that killed writers left behind; how many."""
        removed, old = 0, time.time() - ABANDONED_AFTER_SECONDS
        for _kind, item in self._files():
            with contextlib.suppress(OSError):
                if item.name.startswith(ASIDE) and item.stat(follow_symlinks=False).st_mtime < old:
                    removed += remove(Path(item.path))
        return removed

    # --- the whole ----------------------------------------------------------------------------------------------------

    def entries(self, kind: str | None = None) -> Iterator[Entry]:
        """Every entry, in no order. A file that goes away meanwhile is left out."""
        for of_kind, item in self._files():
            if kind in (None, of_kind) and DIGEST.fullmatch(item.name):
                with contextlib.suppress(OSError):
                    status = item.stat(follow_symlinks=False)
                    yield Entry(of_kind, item.name, Path(item.path), status.st_size, status.st_mtime_ns)

    def _files(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        for kind in KINDS:
            with contextlib.suppress(OSError), os.scandir(self.folder / kind) as items:
                for item in items:
                    yield kind, item

    def remove(self, entry: Entry) -> bool:
        """Whether the entry is gone by our doing."""
        return remove(entry.path)

    def about(self, entry: Entry) -> About | None:
        """What an entry says of itself, read without its sections; None if it cannot be read."""
        try:
            descriptor, status = open_own(entry.path)
        except OSError:
            return None
        try:
            head = read_all(descriptor, HEAD.size)
            length, _checksum = read_head(head, status.st_size)
            return read_about(head + read_all(descriptor, length), status.st_size)
        except (OSError, Damaged):
            return None
        finally:
            os.close(descriptor)

    def problem_of(self, entry: Entry) -> str | None:
        """Read an entry and check every byte: what is wrong with it, None if nothing."""
        try:
            descriptor, status = open_own(entry.path)
            try:
                about, _artifact = read(lambda size: read_all(descriptor, size), status.st_size)
            finally:
                os.close(descriptor)
            if (about.kind, Key.of(entry.kind, about.components).digest) != (entry.kind, entry.digest):
                return "it is the entry of another key"
        except Exception as problem:
            return words_of(problem)
        return None


def words_of(problem: Exception) -> str:
    """What is wrong with an entry, for one who reads a record."""
    expected = isinstance(problem, (OSError, Damaged)) and str(problem)
    return expected or f"{type(problem).__name__}: {problem}"
