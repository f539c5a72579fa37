"""Objects of a user's own that operators make, read and change: what a program hands on is the object of this call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

from tests.compare import compile_strict

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12):
    pytest.skip("no operator returns an object there, under any backend", allow_module_level=True)


class Counter(OpaqueBase):
    def __init__(self, value: int) -> None:
        self.value = value


class Setting(OpaqueBase):
    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setting) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"Setting({self.name!r})", {"Setting": Setting}


register_opaque_type(Counter, typ="reference")
register_opaque_type(Setting, typ="value")


@torch.library.custom_op("objects::counter", mutates_args=())
def counter(start: int) -> Counter:
    return Counter(start)


@counter.register_fake
def _(start: int) -> Counter:
    return Counter(start)


@torch.library.custom_op("objects::pair", mutates_args=())
def pair(start: int) -> tuple[Counter, Counter]:
    return Counter(start), Counter(-start)


@pair.register_fake
def _(start: int) -> tuple[Counter, Counter]:
    return Counter(start), Counter(-start)


@torch.library.custom_op("objects::counted", mutates_args=())
def counted(count: Counter, x: torch.Tensor) -> torch.Tensor:
    count.value += 1
    return x * count.value


@counted.register_fake
def _(count: Counter, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def made(x: torch.Tensor) -> Any:
    return counted(counter(3), x + 1) * 2


def made_twice(x: torch.Tensor) -> Any:
    first, second = counter(3), counter(3)
    return counted(first, x), counted(second, x), counted(first, x)


def returned(x: torch.Tensor) -> Any:
    count = counter(3)
    return count, counted(count, x) + 1, count


def one_of_two(x: torch.Tensor) -> Any:
    up, down = pair(5)
    return down, counted(up, x), counted(down, x)


def given(x: torch.Tensor, count: Counter) -> Any:
    return counted(count, x), count


def with_setting(x: torch.Tensor) -> Any:
    return x * 2, Setting("square"), "square"


def plain(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return [plain(item) for item in result]
    if isinstance(result, Counter):
        return result.value
    return result.tolist() if isinstance(result, torch.Tensor) else result


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [made, made_twice, returned, one_of_two, given, with_setting])
def test_each_call_has_its_own(fn: Any, dynamic: bool) -> None:
    compiled, counts = compile_strict(fn, fullgraph=True, dynamic=dynamic), (Counter(1), Counter(1))
    for number in range(3):
        x = torch.arange(4.0) + number
        mine, theirs = ([x, count] if fn is given else [x] for count in counts)
        assert plain(compiled(*mine)) == plain(fn(*theirs))
    if fn is returned:
        first, _, again = compiled(x)
        assert again is first
        assert compiled(x)[0] is not first
