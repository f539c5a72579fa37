"""What tells one version of a user's pass from another: its own word for it, or the files it was written in.

A pass with a method `uuid()` is asked. Of any other, all that can change what it does is taken: the file that defines
it, every file of the user's that one imports from, values that it closed over, its defaults, the fields of an object. A
value among these that has no text makes the pass uncacheable. What a pass reads at run time from elsewhere (a global
that is written to, a file) is not seen: such a pass should have a `uuid()`.
"""

from __future__ import annotations

import enum
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ferrite.cache.key import digest_of
from ferrite.capture import torch_api
from ferrite.errors import NotCached

LIBRARIES = tuple({str(Path(path)) + os.sep for path in sysconfig.get_paths().values()})
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Path)
TO_CHANGE = "give it a method uuid()"


def identity(function: Any) -> str:
    """A text that changes with what a callable does; NotCached where none can be given."""
    return digest_of(" ".join(_Walk().callable(function)))


class _Walk:
    """Collects what a callable is made of."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def callable(self, function: Any) -> Iterator[str]:
        if id(function) in self.seen:
            return
        self.seen.add(id(function))
        uuid = getattr(function, "uuid", None)
        if callable(uuid) and not isinstance(function, type):
            if (answer := uuid()) is None:
                raise NotCached(f"{named(function)} says by its uuid() that it is not to be")
            yield f"uuid {answer!r}"
        elif isinstance(function, functools.partial):
            yield from self.callable(function.func)
            yield from self.value((function.args, function.keywords), function)
        elif isinstance(function, types.MethodType):
            yield from self.callable(function.__func__)
            yield from self.fields(function.__self__)
        elif isinstance(function, types.FunctionType):
            yield f"{function.__qualname__} {home_of(function)} {code_text(function.__code__)}"
            yield from self.value((function.__defaults__, function.__kwdefaults__), function)
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            for name, cell in cells.items():
                yield name
                yield from self.value(cell.cell_contents, function)
        elif isinstance(function, type):
            yield f"{function.__qualname__} {files_of(function.__module__)}"
        elif torch_api.operator_name(function) is not None or isinstance(function, types.BuiltinFunctionType):
            yield f"{function}"
        else:
            yield from self.fields(function)

    def fields(self, subject: Any) -> Iterator[str]:
        """An object that can be called, or whose method is: its class and what it holds."""
        for base in type(subject).__mro__[:-1]:
            yield f"{base.__qualname__} {files_of(base.__module__)}"
        if not hasattr(subject, "__dict__"):
            raise NotCached(f"nothing is known about {named(subject)}: {TO_CHANGE}")
        yield from self.value(vars(subject), subject)

    def value(self, value: Any, owner: Any) -> Iterator[str]:
        if isinstance(value, PLAIN):
            yield repr(value)
        elif isinstance(value, enum.Enum):
            yield str(value)
        elif isinstance(value, (tuple, list)):
            yield f"{type(value).__name__} of {len(value)}"
            for item in value:
                yield from self.value(item, owner)
        elif isinstance(value, dict):
            yield from self.value([list(pair) for pair in value.items()], owner)
        elif isinstance(value, (set, frozenset)):
            yield from sorted(" ".join(self.value(item, owner)) for item in value)
        elif isinstance(value, types.ModuleType):
            yield files_of(value.__name__)
        elif callable(value):
            yield from self.callable(value)
        else:
            raise NotCached(f"{named(owner)} holds a {type(value).__qualname__}, which has no text: {TO_CHANGE}")


def named(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or type(function).__module__}.{name}"


def home_of(function: types.FunctionType) -> str:
    """The files behind a function. Its module by its globals: a decorator may have given it another's name."""
    module = str(function.__globals__.get("__name__"))
    files = files_of(module)
    where, file = function.__code__.co_filename, getattr(sys.modules.get(module), "__file__", None)
    if file is None or os.path.abspath(where) != os.path.abspath(file):
        raise NotCached(f"{named(function)} was not written in a file of its own module: {TO_CHANGE}")
    return files


def code_text(code: types.CodeType) -> str:
    """A digest of a function as it was loaded: its file may be another by now."""
    inner = [code_text(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    constants = [repr(each) for each in code.co_consts if not isinstance(each, (types.CodeType, frozenset))]
    return digest_of(f"{code.co_code!r} {code.co_names} {inner} {constants}")


def files_of(module: str) -> str:
    """A digest of the user's files that a module is made of: its own, and those of modules it has names from."""
    return digest_of(" ".join(sorted(_file_facts(module, set()))))


def _file_facts(name: str, seen: set[str]) -> Iterator[str]:
    if name in seen or name.partition(".")[0] in ("torch", "ferrite", "builtins"):
        return  # their versions are in every key
    seen.add(name)
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if name == "__main__" and file is None:
        raise NotCached(f"it was written at a prompt and not in a file: {TO_CHANGE}")
    if module is None or file is None:
        return  # compiled into Python, or a folder of modules
    try:
        if os.path.abspath(file).startswith(LIBRARIES):
            status = os.stat(file)
            yield f"{name} {status.st_size} {status.st_mtime_ns}"  # installed: what it imports is installed too
            return
        yield f"{name} {digest_of(Path(file).read_bytes())}"
    except OSError as problem:
        raise NotCached(f"its source cannot be read: {problem}") from None
    for value in list(vars(module).values()):
        home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if isinstance(home, str):
            yield from _file_facts(home, seen)
