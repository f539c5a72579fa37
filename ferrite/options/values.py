"""The values that settings can have: how they are checked, read from text, and written down.

A setting has one of these types: a bool, a whole number, a path, one of several words, a list of names, a list of
callables, choices (names with settings of their own), or rounds (names with numbers); each may be optional. In place of
a word, choices may be possible too. Which names and settings there are is for those to say who have them: see
`ferrite.options.nested`.
"""

from __future__ import annotations

import dataclasses
import importlib
import operator
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ferrite.errors import UserError, nearest

LONGEST_COUNT = 9  # digits
TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclasses.dataclass(frozen=True)
class Choice:
    """A name in an option, with settings of its own, in the order of their names.

    >>> choices_of({"batch_aten_tanh": {"min_members": 3, "depth": 9}, "decompose_mm_pass": {}})
    (Choice(name='batch_aten_tanh', settings=(('depth', 9), ('min_members', 3))), Choice(name='decompose_mm_pass'))
    """

    name: str
    settings: tuple[tuple[str, Any], ...] = ()  # bools, numbers and words

    def __repr__(self) -> str:
        return f"Choice(name={self.name!r}{f', settings={self.settings!r}' if self.settings else ''})"


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The name of a pass, and how often it runs at most."""

    name: str
    times: int


Choices = tuple[Choice, ...]  # in an order that means something


def choices_of(given: Mapping[str, Mapping[str, Any]]) -> Choices:
    return tuple(Choice(name, tuple(sorted(settings.items()))) for name, settings in given.items())


def rounds_of(given: Mapping[str, int]) -> tuple[Rounds, ...]:
    return tuple(Rounds(name, times) for name, times in sorted(given.items()))


# --- checking ---------------------------------------------------------------------------------------------------------


def checked(name: str, expected: Any, value: Any) -> Any:
    """The value in the type that the option expects; a UserError where it is of another."""
    kind = without_none(expected)
    if value is None and allows_none(expected):
        return None
    if (words := word_or_names(kind)) is not None:
        value = as_switch(words, value)
        return (
            checked(name, words, value) if isinstance(value, str) else checked_choices(name, value, type_name(expected))
        )
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        value = as_switch(kind, value)
        if not isinstance(value, str) or value not in choices:
            raise UserError(
                f"option {name!r} is {value!r}",
                {"did you mean": nearest(str(value), choices), "expected": one_of(choices)},
            )
        return value
    if kind is Any:
        items = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        return tuple(imported(item, f"option {name!r}") if isinstance(item, str) else item for item in items)
    if kind == Choices:
        return checked_choices(name, value)
    if kind == tuple[Rounds, ...]:
        return checked_rounds(name, value)
    if typing.get_origin(kind) is tuple:
        return several(name, kind, value)
    if kind is Path and isinstance(value, (str, os.PathLike)):
        return path(name, value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(
            f"option {name!r} is {value!r}, a {type(value).__name__}",
            {"expected": type_name(expected)},
        )
    return value


def in_range(name: str, value: Any, least: int | None, most: int | None) -> Any:
    """The value; a UserError for a number below or above what it can be. What is no number has no range."""
    if isinstance(value, int) and ((least is not None and value < least) or (most is not None and value > most)):
        wanted = f"a whole number from {least}" + (f" to {most}" if most is not None else "")
        shown = str(value) if abs(value) < 10**100 else "a number of more than 100 digits"
        raise UserError(f"option {name!r} is {shown}", {"expected": wanted})
    return value


def path(name: str, value: str | os.PathLike[str]) -> Path:
    """A path that can be used; the home folder for `~`."""
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text:
        raise UserError(f"option {name!r} is {value!r}", {"expected": "the path of a folder"})
    try:
        return Path(text).expanduser()
    except RuntimeError as problem:
        raise UserError(f"option {name!r} is {value!r}", {"because": str(problem)}) from None


def several(name: str, kind: Any, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise UserError(f"option {name!r} is {value!r}, a {type(value).__name__}", {"expected": "a list"})
    (member, _) = typing.get_args(kind)
    wrong = next((item for item in value if member is str and not isinstance(item, str)), None)
    if wrong is not None:
        raise UserError(f"option {name!r} holds {wrong!r}", {"expected": "a list of names"})
    if member is Any:
        return tuple(imported(item, f"option {name!r}") if isinstance(item, str) else item for item in value)
    choices = typing.get_args(member)
    unknown = next((item for item in value if choices and item not in choices), None)
    if unknown is not None:
        raise UserError(
            f"option {name!r} holds {unknown!r}",
            {"did you mean": nearest(str(unknown), choices), "possible": ", ".join(choices)},
        )
    return tuple(value)


def checked_rounds(name: str, value: Any) -> tuple[Rounds, ...]:
    if isinstance(value, tuple) and all(isinstance(item, Rounds) for item in value):
        value = {item.name: item.times for item in value}
    if not isinstance(value, Mapping) and value != []:
        wanted = type_name(tuple[Rounds, ...])
        raise UserError(f"option {name!r} is {value!r}, a {type(value).__name__}", {"expected": wanted})
    for each, number in dict(value).items():
        if not isinstance(each, str) or not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise UserError(f"option {name!r} has {number!r} for {each!r}", {"expected": "a whole number from 1"})
    return rounds_of(dict(value))


def checked_choices(name: str, value: Any, expected: str | None = None) -> Choices:
    """Names alone, or settings by name."""
    if isinstance(value, (list, tuple)):
        if all(isinstance(item, Choice) for item in value):
            value = {item.name: dict(item.settings) for item in value}
        elif all(isinstance(item, str) for item in value):
            value = {item: {} for item in value}
    if not isinstance(value, Mapping):
        wanted = expected or type_name(Choices)
        raise UserError(f"option {name!r} is {value!r}, a {type(value).__name__}", {"expected": wanted})
    for each, settings in value.items():
        if not isinstance(each, str) or not isinstance(settings, Mapping):
            raise UserError(f"option {name!r} has {settings!r} for {each!r}", {"expected": "a mapping of settings"})
        for setting, given in settings.items():
            if not isinstance(setting, str) or not isinstance(given, (bool, int, float, str)):
                raise UserError(
                    f"option {name!r} has {setting}={given!r} for {each!r}", {"expected": "a number, a bool or a word"}
                )
    return choices_of(value)


def allows_none(expected: Any) -> bool:
    return is_union(expected) and type(None) in typing.get_args(expected)


def without_none(expected: Any) -> Any:
    """`X` for the type `X | None`."""
    members = [member for member in typing.get_args(expected) if member is not type(None)]
    return members[0] if allows_none(expected) else expected


def word_or_names(kind: Any) -> Any | None:
    """The words of a setting that takes one of them or else choices; None for any other."""
    return typing.get_args(kind)[0] if is_union(kind) and Choices in typing.get_args(kind) else None


def as_switch(words: Any, value: Any) -> Any:
    """True and False as the words of a setting that is on, or always, or off; anything else as it is."""
    known = typing.get_args(words)
    if not isinstance(value, bool) or "off" not in known:
        return value
    return next((word for word in ("on", "always") if word in known), value) if value else "off"


def is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def type_name(expected: Any) -> str:
    """A type as a person would write it."""
    kind = without_none(expected)
    origin = typing.get_origin(kind)
    if kind is Any:
        return "a callable, a list of them, or None"
    if kind == Choices:
        return "list of names, or settings by name"
    if kind == tuple[Rounds, ...]:
        return "numbers by name"
    if (words := word_or_names(kind)) is not None:
        return f"{type_name(words)}, a {type_name(Choices)}"
    if origin is tuple:
        return list_name(typing.get_args(kind)[0])
    text = one_of(typing.get_args(kind)) if origin is Literal else kind.__name__.lower()
    return f"{text}, or None" if kind is not expected else text


def list_name(member: Any) -> str:
    if typing.get_origin(member) is Literal:
        return f"list of {one_of(typing.get_args(member))}"
    return "list of names" if member is str else "list of passes"


def one_of(choices: tuple[str, ...]) -> str:
    return " | ".join(choices)


# --- as text ----------------------------------------------------------------------------------------------------------


def parse(name: str, expected: Any, text: str, where: str) -> Any:
    """A setting given as text: an environment variable or a command-line argument."""
    kind = without_none(expected)
    if kind is bool:
        if text.lower() not in TRUTH:
            raise UserError(f"{where} is {text!r}", {"expected": "1 or 0, true or false, yes or no, on or off"})
        return TRUTH[text.lower()]
    if kind is int:
        try:
            return int(text)
        except ValueError:  # also of one with too many digits
            raise UserError(f"{where} is {text[:40]!r}", {"expected": "a whole number"}) from None
    if kind is Any or expected == tuple[Any, ...]:
        return tuple(imported(word.strip(), where) for word in text.split(","))
    if (words := word_or_names(kind)) is not None:
        known = typing.get_args(words)
        word = text if text in known else as_switch(words, TRUTH.get(text.lower()))
        return word if word in known else parse(name, Choices, text, where)
    if kind == Choices:
        return choices_of(dict(parse_settings(word.strip(), where) for word in text.split(",") if word.strip()))
    if kind == tuple[Rounds, ...]:
        return rounds_of(dict(parse_count(word.strip(), where) for word in text.split(",") if word.strip()))
    if typing.get_origin(kind) is tuple:
        return tuple(word.strip() for word in text.split(",") if word.strip())
    if typing.get_origin(kind) is Literal and text not in typing.get_args(kind):
        return checked(name, expected, TRUTH.get(text.lower(), text))
    return checked(name, expected, text)


def parse_settings(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """A name and its settings.

    >>> parse_settings("batch_aten_tanh:min_members=3:same_users=true", "")
    ('batch_aten_tanh', {'min_members': 3, 'same_users': True})
    """
    name, *pairs = text.split(":")
    settings = {}
    for pair in pairs:
        setting, equals, value = pair.partition("=")
        if not equals or not setting.strip() or not value.strip():
            raise UserError(f"{where} has {text!r}", {"expected": "name, or name:setting=value:setting=value"})
        settings[setting.strip()] = parse_plain(value.strip())
    return name.strip(), settings


def parse_count(text: str, where: str) -> tuple[str, int]:
    """A name and how often.

    >>> parse_count("split_cat_pass:3", "")
    ('split_cat_pass', 3)
    """
    name, _, number = text.rpartition(":")
    if not name.strip() or not number.strip().isdecimal() or len(number) > LONGEST_COUNT or int(number) < 1:
        raise UserError(f"{where} has {text!r}", {"expected": "name:number"})
    return name.strip(), int(number)


def parse_plain(text: str) -> bool | int | float | str:
    """A number or a bool if it reads like one: what type is wanted, those know who have the setting."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def imported(path: str, where: str) -> Any:
    """The object at `module:name`."""
    module, separator, name = path.partition(":")
    try:
        if not separator:
            raise ImportError("no colon")
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as problem:
        raise UserError(f"{where} names {path!r}", {"expected": "module:name", "because": str(problem)}) from None


def plain(value: Any) -> Any:
    """A setting as JSON; a pass by the name under which it can be imported again."""
    if isinstance(value, tuple) and value and all(isinstance(item, Choice) for item in value):
        return {item.name: dict(item.settings) for item in value}
    if isinstance(value, tuple) and value and all(isinstance(item, Rounds) for item in value):
        return {item.name: item.times for item in value}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    function = getattr(value, "original", None) or getattr(value, "function", value)
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"
