"""Settings inside of settings: what a user gives beside a name, as in `{"batch_aten_tanh": {"depth": 9}}`.

What settings there are is said by a frozen dataclass of bools, numbers and words, its defaults included. A number is 1
at least, unless `at_least` says otherwise. An option holds what was given (`Choice`); whoever has the name gets its
dataclass from `settings_of`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from ferrite.errors import UserError, nearest
from ferrite.options.values import Choice, Choices

S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class NoSettings:
    """For what can only be asked for."""


def at_least(least: float, default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"least": least})


def choice_of(chosen: Choices, name: str) -> Choice | None:
    return next((choice for choice in chosen if choice.name == name), None)


def settings_of(chosen: Choices, name: str, kind: type[S]) -> S:
    """The settings of a name: those that the user gave, else the defaults."""
    choice = choice_of(chosen, name)
    return kind() if choice is None else kind(**dict(choice.settings))


def way(chosen: str | Choices, name: str) -> str:
    """How an option that is `off`, `auto`, `always` or names of rewrites treats one: whoever names it wants it always.

    >>> way("auto", "batch_tanh"), way((Choice("batch_tanh"),), "batch_tanh"), way((), "batch_tanh")
    ('auto', 'always', 'off')
    """
    return chosen if isinstance(chosen, str) else "off" if choice_of(chosen, name) is None else "always"


def check_choices(option: str, chosen: Choices, known: Mapping[str, type[Any] | None], what: str = "fusion") -> None:
    """A UserError for a name that is not known, or a setting that it does not have. None takes any settings.

    `what` the names stand for is said in the message.
    """
    for choice in chosen:
        if choice.name not in known:
            raise UserError(
                f"option {option!r} has an unknown {what} {choice.name!r}",
                {"did you mean": nearest(choice.name, known), f"all {what}s": ", ".join(known)},
            )
        kind = known[choice.name]
        if kind is not None:
            for setting, value in choice.settings:
                check_setting(f"the {what} {choice.name!r}", kind, setting, value)


def check_setting(whose: str, kind: type[Any], setting: str, value: Any) -> None:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if setting not in fields:
        raise UserError(
            f"{whose} has no setting {setting!r}",
            {"did you mean": nearest(setting, fields), "all settings": ", ".join(fields) or "none"},
        )
    wanted, fits = possible(typing.get_type_hints(kind)[setting], value, fields[setting].metadata.get("least", 1))
    if not fits:
        raise UserError(f"the setting {setting!r} of {whose} is {value!r}", {"possible": wanted})


def possible(kind: Any, value: Any, least: float) -> tuple[str, bool]:
    """What a setting of a type can be, and whether a value is that."""
    if typing.get_origin(kind) is Literal:
        return " or ".join(typing.get_args(kind)), value in typing.get_args(kind)
    if kind is bool:
        return "True or False", isinstance(value, bool)
    numbers, text = ((int,), "a whole number") if kind is int else ((int, float), "a number")
    return f"{text} from {least}", isinstance(value, numbers) and not isinstance(value, bool) and value >= least


def described(kind: type[Any] | None) -> str:
    """The settings with their defaults, for the reference page.

    >>> described(NoSettings), described(None)
    ('none', 'any; they have no effect here')
    """
    if kind is None:
        return "any; they have no effect here"
    return ", ".join(f"`{field.name}={field.default}`" for field in dataclasses.fields(kind)) or "none"
