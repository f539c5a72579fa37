"""What can go wrong, and whose fault it is.

`UserError`: the call, an option or the environment is wrong; the message says what to change.
`CompilerBug`: ferrite itself failed. Unless `strict` is set, or `check_numerics` found a difference, it is never
raised: the graph runs in eager, one `FerriteWarning` says so, and a repro folder is kept.

A message has a headline and labelled lines: what, where in the user's model, why, what to do.

    >>> print(layout("unknown option 'strcit'", {"did you mean": "strict"}))
    unknown option 'strcit'
      did you mean    strict
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Mapping
from types import FrameType

LABEL_WIDTH = 15
MADE = ("<frozen ", "<eval_with_key", "<ferrite ")  # how files begin that are none: code that was made


class FerriteError(Exception):
    """The base of both kinds, for those who catch either."""

    def __init__(self, headline: str, lines: Mapping[str, str | None] | None = None) -> None:
        super().__init__(layout(headline, lines or {}))
        self.headline = headline
        self.lines = {label: text for label, text in (lines or {}).items() if text}


class UserError(FerriteError):
    """Something outside the compiler is wrong and the user can change it.

    For example, a misspelt option:

        >>> import ferrite
        >>> ferrite.compile(lambda x: x, strcit=True)
        Traceback (most recent call last):
        ...
        ferrite.errors.UserError: unknown option 'strcit'
          did you mean    strict
          all options     python -m ferrite options
    """


class CompilerBug(FerriteError):
    """A stage of the compiler failed on a valid program. Please report it with the repro folder it names.

    `stage` is the stage that failed, `cause` the original exception, `repro` the folder kept (None where none was),
    with the traceback in its error.txt.
    """

    def __init__(
        self,
        headline: str,
        lines: Mapping[str, str | None],
        *,
        stage: str,
        cause: BaseException,
        repro: str | None = None,
    ) -> None:
        super().__init__(headline, lines)
        self.stage = stage
        self.cause = cause
        self.repro = repro


class FerriteWarning(UserWarning):
    """Something was done another way than asked: a graph runs in eager, a folder could not be written."""


def layout(headline: str, lines: Mapping[str, str | None]) -> str:
    """One headline, then one indented labelled line per fact; facts that are None or empty are left out."""
    rows = [headline]
    for label, text in lines.items():
        if not text:
            continue
        indent = "\n" + " " * (LABEL_WIDTH + 3)
        rows.append(f"  {label:<{LABEL_WIDTH}} {indent.join(text.splitlines())}")
    return "\n".join(rows)


# --- warnings ---------------------------------------------------------------------------------------------------------


def warn_user(message: str) -> None:
    """A FerriteWarning that points at the user's line: the innermost one that is not ferrite's, torch's or Python's."""
    frame = user_frame(sys._getframe(1))
    if frame is None:  # a thread of torch's own
        warnings.warn_explicit(message, FerriteWarning, "ferrite", 1)
        return
    space = frame.f_globals
    registry = space.setdefault("__warningregistry__", {})
    name = space.get("__name__") or "<unknown>"
    warnings.warn_explicit(message, FerriteWarning, frame.f_code.co_filename, frame.f_lineno, name, registry)


def user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@functools.lru_cache(maxsize=1024)
def is_ours(filename: str) -> bool:
    """Whether a file belongs to ferrite, torch or Python itself. What is installed is the user's, as far as we are
    concerned: it called us."""
    if filename.startswith(MADE):
        return True
    ferrite, torch, *python = compiler_folders()
    installed = f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename
    return filename.startswith((ferrite, torch)) or (not installed and filename.startswith(tuple(python)))


@functools.lru_cache(maxsize=1)
def compiler_folders() -> tuple[str, ...]:
    """Of ferrite, of torch, and of Python's own modules."""
    torch = importlib.util.find_spec("torch")
    places = torch.submodule_search_locations if torch is not None else None
    found = [os.path.dirname(os.path.abspath(__file__)), *list(places or [os.devnull])[:1]]
    return tuple(f"{folder}{os.sep}" for folder in (*found, sysconfig.get_path("stdlib")))


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice a misspelt word most likely meant, if any is close."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return found[0] if found else None
