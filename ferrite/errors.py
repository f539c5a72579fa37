"""What can go wrong, and whose fault it is.

`UserError`: the call, an option or the environment is wrong; the message says what to change.
`CompilerBug`: ferrite itself failed. Unless `strict` is set, or `check_numerics` found a difference, it is never
raised: the graph runs in eager, one `FerriteWarning` says so, and a repro folder is kept.
`Refusal`: nothing is wrong, but a stage will not do something: why, and where in the user's model. It is the only way
to say no: as a value where saying no is a usual answer, inside a `Refused` where it ends what was going on. What is
refused is done another way: an operator in eager, two kernels instead of one, no entry in the cache.

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
from dataclasses import dataclass, replace
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


# --- saying no --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelLine:
    """A line of the user's program.

    >>> str(ModelLine("/home/me/net.py", 88, "forward", "ids = torch.unique(tokens)"))
    'net.py:88  ids = torch.unique(tokens)'
    """

    file: str
    line: int
    function: str
    code: str

    @property
    def place(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place}  {self.code}" if self.code else self.place


@dataclass(frozen=True)
class Refusal:
    """Why something is not done, and the line of the user's model that it is about, where that is known.

    >>> print(Refusal("elements of type complex32", ModelLine("net.py", 41, "forward", "y = x.sin()")))
    elements of type complex32  (net.py:41  y = x.sin())
    """

    reason: str
    line: ModelLine | None = None

    def at(self, line: ModelLine | None) -> Refusal:
        """The same, with a line if it has none yet."""
        return self if line is None or self.line is not None else replace(self, line=line)

    def __str__(self) -> str:
        return self.reason if self.line is None else f"{self.reason}  ({self.line})"


class Refused(Exception):
    """A refusal that ends what was going on. Each stage has one of its own, which its callers wait for."""

    def __init__(self, refusal: Refusal | str) -> None:
        self.refusal = refusal if isinstance(refusal, Refusal) else Refusal(refusal)
        super().__init__(self.refusal.reason)


class NotApplied(Refused):
    """Passes: a rewrite, or a check of one, does not apply to this part of a graph."""


class NotLowered(Refused):
    """Lowering: there is no loop form of this call, which then runs in eager."""


class NotScheduled(Refused):
    """Scheduling: what a decision would rest on is known only when the program runs."""


class NotGenerated(Refused):
    """Code generation: there is no code for this kernel on this device."""


class RefusedKernels(Exception):
    """Code generation: of the kernels it was given, these have no code: why, by their places."""

    def __init__(self, reasons: Mapping[int, Refusal]) -> None:
        super().__init__("; ".join(refusal.reason for refusal in reasons.values()))
        self.reasons = reasons


class NotLoaded(Refused):
    """Loading: this object code cannot be loaded in the short way."""


class NotCached(Refused):
    """The cache: there is no key for this, or no data that would bring it back."""


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
