"""Writing reports: when somebody asks, and when the process ends."""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from typing import Any

from ferrite.debug import last_compile, recent_compiles
from ferrite.errors import UserError, warn_user
from ferrite.reports.data import as_json
from ferrite.reports.gather import gather
from ferrite.reports.limits import limits_of
from ferrite.reports.page import page

_at_exit: dict[Path, bool] = {}  # paths that compilations name, and whether something is new since they were written


def report(path: str | os.PathLike[str]) -> Path:
    """Write a page about what was compiled in this process: one file that opens in any browser, without a network.

    Compile with the option `report`, or with `FERRITE_REPORT`, to see everything: without it the page has what the
    record has (`ferrite.last_compile`). A path that ends in `.json` gets the record alone.
    """
    last_compile()  # says so if there is none
    where = Path(path).expanduser()
    if where.absolute() in _at_exit:
        _at_exit[where.absolute()] = False
    text = report_text(where.suffix == ".json")
    check_place(where)
    try:
        partial = where.with_name(f".{where.name}.{os.getpid()}")
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, where)
    except OSError as problem:
        raise UserError(f"cannot write the report {where}", {"because": str(problem)}) from None
    return where


def check_place(where: Path) -> None:
    """A UserError where no file can be written, before anybody has waited for what would be in it."""
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        if where.is_dir():
            raise IsADirectoryError("it is a folder")
        if not os.access(where.parent, os.W_OK):
            raise PermissionError(f"nothing can be written into {where.parent}")
    except OSError as problem:
        raise UserError(f"cannot write the report {where}", {"because": str(problem)}) from None


def report_text(as_data: bool) -> str:
    records = recent_compiles()
    measured = any(record.options.measure for record in records)
    found: dict[str, Any] = as_json(gather(records, limits_of(records) if measured else ()))
    return json.dumps(found, separators=(",", ":")) if as_data else page(found)


def written_at_exit(path: Path) -> None:
    """One page for each path that compilations name. A process that is one of many has its rank in the name."""
    if not _at_exit:
        atexit.register(write_all)
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    _at_exit[path.expanduser().absolute()] = True


def write_all() -> None:
    for path in [path for path, is_new in _at_exit.items() if is_new]:
        try:
            report(path)
        except Exception as problem:  # the user's program is over, and was right
            warn_user(f"ferrite: no report was written: {problem}")
