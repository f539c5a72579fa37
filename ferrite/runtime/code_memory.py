"""Code of kernels by name: equal kernels are compiled once, in a process and for all processes that share a cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

from ferrite.errors import Refusal

Check = Callable[[str, bytes], Refusal | None]  # why code from elsewhere cannot be loaded under a name


class KernelStore(Protocol):
    """Where code is kept between processes, by the text of its kernel."""

    def fetch(self, name: str, text: str, check: Check) -> bytes | None:
        """Code under a name that the check does not refuse."""

    def publish(self, text: str, code: bytes) -> None: ...


class Compilable(Protocol):
    """Something to compile: what it goes by, and the text that says all that its code depends on."""

    @property
    def name(self) -> str: ...

    @property
    def text(self) -> str: ...


AnyUnit = TypeVar("AnyUnit", bound=Compilable)


Told = Callable[[int, int], None]  # how many kernels are done, of how many
_told: ContextVar[Told | None] = ContextVar("ferrite kernels", default=None)


@contextmanager
def telling_kernels(told: Told) -> Iterator[None]:
    """Somebody wants to know, while kernels are compiled, how many are done."""
    token = _told.set(told)
    try:
        yield
    finally:
        _told.reset(token)


def kernels_done(done: int, of: int) -> None:
    if (told := _told.get()) is not None:
        told(done, of)


class CodeMemory:
    """The code that this process used last, for graphs that share a kernel."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.code: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def code_of(
        self,
        units: Sequence[AnyUnit],
        store: KernelStore | None,
        check: Check,
        compiled: Callable[[Sequence[AnyUnit]], Sequence[bytes]],
    ) -> dict[str, bytes]:
        """By name: from this process, else from the store, else compiled, all new ones together."""
        with self.lock:
            found = {unit.name: self.code[unit.name] for unit in units if unit.name in self.code}
        missing = {unit.name: unit for unit in units if unit.name not in found}
        for name, unit in missing.items() if store is not None else ():
            code = store.fetch(name, unit.text, check) if store is not None else None
            if code is not None:
                found[name] = code
        new = [unit for name, unit in missing.items() if name not in found]
        for unit, code in zip(new, compiled(new), strict=True) if new else ():
            found[unit.name] = code
            if store is not None:
                store.publish(unit.text, code)
        self.remember(found)
        return found

    def remember(self, new: Mapping[str, bytes]) -> None:
        """Keep code, and forget what has not been used for longest."""
        with self.lock:
            for name, code in new.items():
                self.code.pop(name, None)
                self.code[name] = code
            size = sum(map(len, self.code.values()))
            while size > self.max_bytes:
                size -= len(self.code.pop(next(iter(self.code))))
