"""A model in float64 throughout: the reference that eager and compiled results are measured against."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Under it float32 means float64, so that a model cast with `.double()` stays there.

    Models name float32 in many places (norms, softmax, rotary tables); one such step would leave the
    reference as inexact as what it judges.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widen():
            yield
    finally:
        torch.set_default_dtype(default)


class Widen(TorchFunctionMode):
    """Replaces float32 by float64 in every call; random numbers are drawn as the float32 run draws them."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if func in (torch.rand, torch.randn):
            return func(*args, **{**kwargs, "dtype": torch.float32}).double()
        return func(*map(widen, args), **{name: widen(value) for name, value in kwargs.items()})


def widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
