"""Folders that nobody else can write to, and files in them that nobody else has written.

Object code from the cache is run, so it must be the user's own. From the folder that an option names down to the files,
every folder is the user's alone: one that belongs to somebody else or that others can write to is not used, nor is a
link in its place. Folders above may belong to anybody, but what everybody can write to must keep everybody's files
apart, as /tmp does (the sticky bit): elsewhere somebody could put a folder of his in the place of the user's. Links
above are followed if they are the user's or the system's. Every file is checked once more when it is opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
ROOT = 0  # the user who may do everything anyway
MAX_LINKS = 40  # on one path, as Linux has it
ASIDE = ".new-"  # how the names of files and folders begin that are being written


class Unusable(OSError):
    """Why a folder or file is not to be used."""


def own_user() -> int | None:
    """The user whose files can be trusted; None where the system has no such number."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def full_path(path: Path) -> Path:
    """A path from the root on; Unusable where nobody knows one."""
    if str(path).startswith("~"):  # what Python leaves where there is no home folder
        raise Unusable("there is no home folder")
    try:
        return path.absolute()
    except FileNotFoundError:
        raise Unusable("the folder that this process works in is gone") from None


# --- looking ----------------------------------------------------------------------------------------------------------


def check_private(status: os.stat_result, what: str, advice: str = "") -> None:
    user = own_user()
    if user is not None and status.st_uid != user:
        raise Unusable(f"{what} belongs to another user")
    if user is not None and status.st_mode & OTHERS_WRITE:
        raise Unusable(f"{what} can be written by others{advice}")


def check_folder(path: Path) -> None:
    """Raise Unusable, or FileNotFoundError, for a folder that cannot be trusted."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise Unusable(f"{path} is not a folder")
    check_private(status, str(path), f"; to change that: chmod 700 {path}")


def check_shared(path: Path) -> None:
    """The same for a folder that is not for ferrite alone: the user's or the system's, and one that others can write
    to, such as /tmp, only if they cannot touch what is in it."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise Unusable(f"{path} is not a folder")
    if own_user() not in (None, status.st_uid) and status.st_uid != ROOT:
        raise Unusable(f"{path} belongs to another user")
    if own_user() is not None and status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise Unusable(f"{path} can be written by others; to change that: chmod 700 {path}")


def check_above(path: Path) -> None:
    """Raise Unusable where somebody else could replace a folder on the way to an absolute path, FileNotFoundError
    where one is missing. The last part of the path is not looked at."""
    user, at, links = own_user(), Path(path.anchor), 0
    if user is None:
        return
    pending = list(reversed(path.parent.parts[1:]))
    while pending:
        part = pending.pop()
        if part == "..":
            at = at.parent
            continue
        status = os.lstat(at / part)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if status.st_uid not in (user, ROOT) or links > MAX_LINKS:
                raise Unusable(f"{at / part} is a link of another user" if links <= MAX_LINKS else "links in a circle")
            target = Path(os.readlink(at / part))
            at = Path(target.anchor) if target.is_absolute() else at
            pending += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            continue
        at /= part
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(at))
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise Unusable(f"{at} can be written by everybody; to change that: chmod o-w {at}")


def open_own(path: Path) -> tuple[int, os.stat_result]:
    """Open a file for reading; Unusable if it is no plain file or not ours alone. A pipe in its place is not waited
    for."""
    descriptor = os.open(path, os.O_RDONLY | NO_FOLLOW | getattr(os, "O_NONBLOCK", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Unusable(f"{path} is not a file")
        check_private(status, str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status


def read_all(descriptor: int, size: int) -> bytes:
    """Up to `size` bytes: fewer where the file is shorter by now."""
    parts = []
    while size > 0 and (part := os.read(descriptor, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts) if len(parts) != 1 else parts[0]


# --- writing ----------------------------------------------------------------------------------------------------------


def make_folders(folders: Iterable[Path]) -> None:
    """Make private folders, each inside the one before, and what is missing above the first. Unusable, where others
    could get at them."""
    for number, path in enumerate(folders):
        make_folder(path, with_above=number == 0)
        check_folder(path)


def make_shared(path: Path) -> None:
    """Make a folder that an option names, if it is missing. Unusable, where somebody else could get at what we put
    there."""
    make_folder(path, with_above=True)
    check_shared(path)


def make_folder(path: Path, with_above: bool) -> None:
    """Make a folder of ours, if it is missing; `with_above`: and what is missing above it."""
    if with_above:
        make_above(path.parent)
        check_above(path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def make_above(path: Path) -> None:
    """Make ordinary folders that only their owner writes to."""
    if not path.exists():
        make_above(path.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o755)


def write_new(path: Path, data: bytes) -> None:
    """Write a file that did not exist; on failure it does not exist afterwards either."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    except BaseException:
        os.close(descriptor)
        remove(path)
        raise
    os.close(descriptor)


def write_over(path: Path, data: bytes) -> None:
    """Write a file that may be there from an earlier run; a link in its place is not followed."""
    remove(path)
    write_new(path, data)


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """A private folder with files in it, all of them or none: written aside, then moved into place. One that another
    process has put there meanwhile is as good."""
    aside = Path(tempfile.mkdtemp(prefix=ASIDE, dir=folder.parent))
    try:
        for name, data in files.items():
            write_new(aside / name, data)
        os.rename(aside, folder)
    except BaseException as problem:
        shutil.rmtree(aside, ignore_errors=True)
        if getattr(problem, "errno", None) not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    check_folder(folder)


def remove(path: Path) -> bool:
    """Whether the file is gone by our doing."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True
