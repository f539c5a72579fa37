"""Nodes that exist once: equal means identical, so comparing, hashing and looking up cost nothing.

A class says what its fields are; `intern` answers with the node that has them. The table holds nodes weakly: what no
program uses any more is collected.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, TypeVar

Made = TypeVar("Made", bound="Interned")

_table: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Interned:
    """Base of interned nodes. `fields` names the constructor's arguments, in order; they decide identity."""

    __slots__ = ("__weakref__",)
    fields: tuple[str, ...] = ()

    @classmethod
    def intern(cls: type[Made], *values: Any) -> Made:
        key = (cls, *values)
        found = _table.get(key)
        if found is not None:
            return found  # type: ignore[no-any-return]
        made = object.__new__(cls)
        for field, value in zip(cls.fields, values, strict=True):
            object.__setattr__(made, field, value)
        made.prepare()
        with _lock:  # another thread may have made it in the meantime: the first one stays
            return _table.setdefault(key, made)  # type: ignore[no-any-return]

    def prepare(self) -> None:
        """Work out what is derived from the fields, once."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed")

    def __repr__(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self).intern, tuple(getattr(self, field) for field in self.fields))
