"""Names that this torch does not have, for files that were written for another one.

With `placeholders()` active, `from torch.x import name` gives a `Missing` where torch.x has no such name: the file is
imported, and only the tests that use it fail, with every backend alike.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NoReturn


class Missing:
    """Stands for a name that torch lacks; to use it is an error that says so."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self) -> NoReturn:
        raise NameError(f"this torch has no {self.name}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._refuse()


@contextlib.contextmanager
def placeholders() -> Iterator[None]:
    original = builtins.__import__

    def lenient(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        found = original(name, globals, locals, fromlist, level)
        if level == 0 and name.split(".")[0] == "torch" and not from_torch(globals):
            module = sys.modules[name]
            for each in fromlist or ():
                if each != "*" and not hasattr(module, each):
                    setattr(module, each, Missing(f"{name}.{each}"))
        return found

    builtins.__import__ = lenient
    try:
        yield
    finally:
        builtins.__import__ = original


def from_torch(globals: Any) -> bool:
    """Whether torch itself imports: it may look for a name to see whether it is there."""
    return (globals or {}).get("__name__", "").split(".")[0] == "torch"
