"""Settings that a user gives beside the name of a rewrite: `post_grad_fusions={"batch_aten_tanh": {"depth": 9}}`.

What settings there are is said by a frozen dataclass of numbers and bools, its defaults included. A field of it may
have the least possible number in its metadata; without, that is 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from ferrite.errors import UserError, nearest
from ferrite.options import Named

S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class NoSettings:
    """For what can only be asked for."""


def at_least(least: float, default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"least": least})


def one_of(default: str, *others: str) -> Any:
    return dataclasses.field(default=default, metadata={"choices": (default, *others)})


def settings_of(chosen: Named, name: str, kind: type[S]) -> S:
    """The settings of a rewrite: those that the user gave, else the defaults."""
    return kind(**chosen.get(name, {}))


def way(chosen: str | Named, name: str) -> str:
    """How an option that is `off`, `auto`, `always` or names of rewrites treats one: whoever names it wants it always.

    >>> way("auto", "batch_tanh"), way(Named({"batch_tanh": {}}), "batch_tanh"), way(Named(), "batch_tanh")
    ('auto', 'always', 'off')
    """
    return chosen if isinstance(chosen, str) else "always" if name in chosen else "off"


def check(option: str, chosen: Named, known: Mapping[str, type[Any] | None], what: str = "fusion") -> None:
    """A UserError for a name that is not known, or a setting that it does not have. None takes any settings.

    `what` the names stand for is said in the message.
    """
    for name, given in chosen.items():
        if name not in known:
            raise UserError(
                f"option {option!r} has an unknown {what} {name!r}",
                {"did you mean": nearest(name, known), f"all {what}s": ", ".join(known)},
            )
        kind = known[name]
        if kind is not None:
            for setting, value in given.items():
                check_setting(name, kind, setting, value, what)


def check_setting(name: str, kind: type[Any], setting: str, value: Any, what: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if setting not in fields:
        raise UserError(
            f"the {what} {name!r} has no setting {setting!r}",
            {"did you mean": nearest(setting, fields), "all settings": ", ".join(fields) or "none"},
        )
    default, least = fields[setting].default, fields[setting].metadata.get("least", 1)
    if isinstance(default, str):
        choices = fields[setting].metadata["choices"]
        wanted, right = " or ".join(choices), value in choices
    elif isinstance(default, bool):
        wanted, right = "True or False", isinstance(value, bool)
    elif isinstance(default, int):
        wanted = f"a whole number from {least}"
        right = isinstance(value, int) and not isinstance(value, bool) and value >= least
    else:
        wanted = f"a number from {least}"
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least
    if not right:
        raise UserError(f"the setting {setting!r} of the {what} {name!r} is {value!r}", {"possible": wanted})


def described(kind: type[Any] | None) -> str:
    """The settings with their defaults, for the reference page.

    >>> described(NoSettings), described(None)
    ('none', 'any; they have no effect here')
    """
    if kind is None:
        return "any; they have no effect here"
    return ", ".join(f"`{field.name}={field.default}`" for field in dataclasses.fields(kind)) or "none"
