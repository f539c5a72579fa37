"""A folder that nobody else can write to, and files in it that nobody else has written.

Object code from the cache is run, so it must be the user's own. The folder is made with mode 0700; one that belongs to
somebody else or that others can write to is not used, nor is a link in its place. Every file is checked once more when
it is opened. Whoever owns a folder above can take the whole away, but cannot put files of the user's there.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class Unusable(OSError):
    """Why a folder or file is not to be used."""


def own_user() -> int | None:
    """The user whose files can be trusted; None where the system has no such number."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def check_private(status: os.stat_result, what: str) -> None:
    user = own_user()
    if user is not None and status.st_uid != user:
        raise Unusable(f"{what} belongs to another user")
    if user is not None and status.st_mode & OTHERS_WRITE:
        raise Unusable(f"{what} can be written by others")


def check_folder(path: Path) -> None:
    """Raise Unusable, or FileNotFoundError, for a folder that cannot be trusted."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise Unusable(f"{path} is not a folder")
    check_private(status, str(path))


def make_folder(path: Path) -> None:
    """Make a private folder, and ordinary ones above it where they are missing."""
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    check_folder(path)


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


def remove(path: Path) -> bool:
    """Whether the file is gone by our doing."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True
