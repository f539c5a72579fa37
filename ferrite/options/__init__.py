"""Every setting of the compiler, in one frozen, typed, documented object.

A setting can be given in five places; the more local one wins:

    1. an explicit option      torch.compile(..., options={"strict": True}), ferrite.compile(..., strict=True)
    2. a mode                  torch.compile(..., mode="max-autotune"): a named preset, see MODES
    3. a context manager       with ferrite.using(strict=True): ...   (what is compiled while it is active)
    4. the environment         FERRITE_STRICT=1
    5. the default             in `ferrite.options.groups`

Code receives an `Options`; it never reads the environment. `changes_code` says whether a setting can change the code
that is generated, and so belongs to the cache key.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ferrite.errors import UserError, nearest
from ferrite.options.groups import STAGES, Files, Freezing, Joint, Passes, PostGrad, PreGrad, Stage, Whole
from ferrite.options.nested import NoSettings, at_least, check_choices, choice_of, described, settings_of, way
from ferrite.options.values import Choice, Rounds, checked, in_range, parse, plain, type_name

__all__ = [
    "FIELDS",
    "MODES",
    "STAGES",
    "TYPES",
    "Choice",
    "NoSettings",
    "Options",
    "Rounds",
    "Stage",
    "at_least",
    "check_all",
    "check_choices",
    "choice_of",
    "described",
    "force",
    "parse",
    "plain",
    "resolve",
    "settings_of",
    "type_name",
    "using",
    "way",
]

RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclasses.dataclass(frozen=True)
class Options(Files, PostGrad, Freezing, Joint, PreGrad, Passes, Whole):  # settings in the order from the last
    """Settings of one compilation. Unknown names and ill-typed values are a UserError.

    >>> Options(strict=True).strict
    True
    """

    def __post_init__(self) -> None:
        for name, field in FIELDS.items():
            if (value := getattr(self, name)) is not field.default:  # those are right as they are
                object.__setattr__(self, name, checked_setting(name, value))
        ranges(self.graphs or "none")

    def cache_folder(self) -> Path:
        if self.cache_dir is not None:
            return self.cache_dir
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # its standard says that a relative path is to be ignored
            base = os.path.join(os.path.expanduser("~"), ".cache")
        return Path(base) / "ferrite"

    def repro_folder(self) -> Path:
        return self.repro_dir if self.repro_dir is not None else self.cache_folder() / "repro"

    def code_key(self) -> tuple[tuple[str, Any], ...]:
        """The settings that can change generated code, for the cache key."""
        return tuple((name, getattr(self, name)) for name, field in FIELDS.items() if field.metadata["changes_code"])

    def compiles(self, number: int) -> bool:
        """Whether the option `graphs` names a graph, by its number; without it every one is compiled.

        >>> [number for number in range(9) if Options(graphs="1,3-5").compiles(number)]
        [1, 3, 4, 5]
        """
        return self.graphs is None or any(number in each for each in ranges(self.graphs))

    def changed(self) -> dict[str, Any]:
        """The settings that differ from their defaults, as plain JSON values."""
        values = {name: getattr(self, name) for name in FIELDS}
        return {name: plain(value) for name, value in values.items() if value != FIELDS[name].default}


def ranges(text: str) -> list[range]:
    """The numbers that a text such as `0,2-5` names."""
    if text == "none":
        return []
    found = [RANGE.fullmatch(part.strip()) for part in text.split(",")]
    if None in found:
        raise UserError(f"option 'graphs' is {text!r}", {"expected": "numbers such as 0,2-5, or none"})
    return [range(int(each[1]), int(each[2] or each[1]) + 1) for each in found if each is not None]


FIELDS: Mapping[str, dataclasses.Field[Any]] = types.MappingProxyType(
    {field.name: field for field in dataclasses.fields(Options)}
)
TYPES: Mapping[str, Any] = types.MappingProxyType(typing.get_type_hints(Options))

# torch.compile(mode=...): named presets, with the names and meanings users know.
MODES: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {
        "default": {},
        "reduce-overhead": {"cuda_graphs": True},
        "max-autotune": {"max_autotune": True, "cuda_graphs": True},
        "max-autotune-no-cudagraphs": {"max_autotune": True},
    }
)

_active: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar(
    "ferrite options", default=types.MappingProxyType({})
)


@contextlib.contextmanager
def using(**settings: Any) -> Iterator[None]:
    """Settings for whatever is compiled in this thread while the context is active.

    A function compiled outside and first called inside is compiled inside: that is when its graphs are known.
    """
    token = _active.set({**_active.get(), **check_all(settings)})
    try:
        yield
    finally:
        _active.reset(token)


_forced: dict[str, Any] = {}


def force(settings: Mapping[str, Any]) -> None:
    """Settings that win over all others from now on, in every thread of this process. For processes that were started
    to try something out: see `ferrite.diagnosis.bisect`."""
    _forced.clear()
    _forced.update(check_all(settings))


def resolve(
    explicit: Mapping[str, Any] | None = None,
    mode: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Options:
    """The options in force, by the precedence at the head of this module. `explicit` may hold a `mode` too."""
    explicit = dict(explicit or {})
    mode = explicit.pop("mode", mode)
    settings = {
        **from_environment(os.environ if environ is None else environ),
        **_active.get(),
        **preset(mode),
        **check_all(explicit),
        **_forced,
    }
    return Options(**settings)


def preset(mode: str | None) -> Mapping[str, Any]:
    if mode is None:
        return {}
    if not isinstance(mode, str) or mode not in MODES:
        raise UserError(
            f"unknown mode {mode!r}",
            {"did you mean": nearest(str(mode), MODES), "all modes": ", ".join(MODES)},
        )
    return MODES[mode]


def check_all(settings: Mapping[str, Any]) -> dict[str, Any]:
    for name in settings:
        if name not in FIELDS:
            raise UserError(
                f"unknown option {name!r}",
                {"did you mean": nearest(str(name), FIELDS), "all options": "python -m ferrite options"},
            )
    return {name: checked_setting(name, value) for name, value in settings.items()}


def checked_setting(name: str, value: Any) -> Any:
    """The value in the type of its option; a UserError where it is of another, or a number out of range."""
    facts = FIELDS[name].metadata
    return in_range(name, checked(name, TYPES[name], value), facts["least"], facts["most"])


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        name: parse(name, TYPES[name], environ[field.metadata["env"]], f"environment variable {field.metadata['env']}")
        for name, field in FIELDS.items()
        if environ.get(field.metadata["env"], "") != ""
    }
