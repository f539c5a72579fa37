"""Inductor's insides as tests want them, so that the rest of a test runs: `--pytest "-p bench.yardstick.agreeable"`.

Many tests compare numbers with eager's and then count Inductor's kernels or read its code, or the other way round; a
test that fails in the count says nothing about the numbers. With this plugin its counters and metrics are equal to
whatever they are compared with, and checks of generated text pass. What the test computes is compared as ever.
"""

from __future__ import annotations

import collections
import functools
import types
import unittest
from collections.abc import Callable
from typing import Any

import pytest

CODE = "what Inductor would have generated"


class Number(int):
    """A number that every comparison agrees with."""

    def agrees(self, other: object) -> bool:
        return True

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = agrees
    __hash__ = int.__hash__

    def __str__(self) -> str:
        return CODE


class Text(str):
    """Generated text, of which assertions are true."""

    def count(self, *args: Any) -> Number:
        return Number()

    def __getitem__(self, place: Any) -> Text:
        return self

    def split(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [self]


class Texts(list[Text]):
    def __getitem__(self, place: Any) -> Any:
        return Text(CODE)

    def __len__(self) -> Number:
        return Number(1)


class Counts(collections.Counter[str]):
    def __getitem__(self, name: str) -> Number:
        return Number()


class Counters(collections.defaultdict[str, Any]):
    """torch's table of counters, but for those of Inductor."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table

    def __getitem__(self, name: str) -> Any:
        return Counts() if name == "inductor" else self.table[name]

    def clear(self) -> None:
        self.table.clear()

    def __getattribute__(self, name: str) -> Any:
        own = name in ("table", "clear") or name.startswith("__")
        return super().__getattribute__(name) if own else getattr(self.table, name)


class Metrics(types.ModuleType):
    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return Number() if type(found) is int else found


class FileCheck:
    def __getattr__(self, name: str) -> Callable[..., FileCheck]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


def run_and_get_code(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Texts]:
    return function(*args, **kwargs), Texts([Text(CODE)])


def run_and_get_one(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Text:
    function(*args, **kwargs)
    return Text(CODE)


def run_and_get_cpp_code(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Text]:
    return function(*args, **kwargs), Text(CODE)


def run_fw_bw_and_get_code(function: Callable[..., Any]) -> tuple[Any, Texts]:
    def forward_and_backward() -> Any:
        result = function()
        result.sum().backward()
        return result

    return forward_and_backward(), Texts([Text(CODE), Text(CODE)])


def unless_generated(check: Callable[..., Any]) -> Callable[..., Any]:
    """An assertion that is not made of generated text."""

    @functools.wraps(check)
    def checked(case: unittest.TestCase, *args: Any, **kwargs: Any) -> Any:
        return None if any(map(is_generated, args)) else check(case, *args, **kwargs)

    return checked


def is_generated(value: Any) -> bool:
    return isinstance(value, (Texts, Number)) or (isinstance(value, str) and CODE in value)


def pytest_configure(config: pytest.Config) -> None:
    import torch._dynamo.utils
    import torch._inductor.compile_fx
    import torch._inductor.metrics
    import torch._inductor.test_case
    import torch._inductor.utils
    import torch.testing
    import torch.testing._internal.common_utils as common

    utils: Any = torch._inductor.utils
    utils.run_and_get_code = run_and_get_code
    utils.run_and_get_triton_code = utils.get_code = run_and_get_one
    utils.run_and_get_cpp_code = run_and_get_cpp_code
    utils.run_fw_bw_and_get_code = run_fw_bw_and_get_code
    torch._inductor.metrics.__class__ = Metrics
    torch._dynamo.utils.counters = Counters(torch._dynamo.utils.counters)
    torch.testing.FileCheck = FileCheck  # type: ignore[misc, assignment]
    names = ("In", "NotIn", "Equal", "NotEqual", "Greater", "Less", "ExpectedInline")
    for name in (f"assert{each}" for each in names):
        for case in (unittest.TestCase, common.expecttest.TestCase, common.TestCase):
            if name in vars(case):
                setattr(case, name, unless_generated(getattr(case, name)))
