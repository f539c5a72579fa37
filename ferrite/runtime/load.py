"""Make a host program's text callable; and the eager stand-in for a graph that could not be compiled."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.codegen import HostSource
from ferrite.ir.interpret import interpret
from ferrite.ir.lifetimes import frees
from ferrite.ir.program import Program

Boxed = Callable[[list[Any]], Sequence[Any]]

_numbers = itertools.count()


def load(source: HostSource, constants: Mapping[str, Any]) -> Boxed:
    """The function that the text defines. Tracebacks through it show the generated lines."""
    filename = f"<ferrite {source.function} {next(_numbers)}>"
    namespace: dict[str, Any] = {**constants, "restride": restride}
    exec(compile(source.text, filename, "exec"), namespace)
    for name, _path in source.operators:
        namespace[name] = torch_api.direct_call(namespace[name])
    function: Boxed = namespace[source.function]
    linecache.cache[filename] = (len(source.text), None, source.text.splitlines(keepends=True), filename)
    weakref.finalize(function, linecache.cache.pop, filename, None)
    return boxed(function)


def run_in_eager(gm: torch.fx.GraphModule) -> Boxed:
    """The graph itself, one node after the other, freeing values after their last use."""

    def run(args: list[Any]) -> Sequence[Any]:
        # an interpreter holds the values of one run: one each, since several threads may call
        outputs: Sequence[Any] = torch.fx.Interpreter(gm, garbage_collect_values=True).boxed_run(args)
        return outputs

    return boxed(run)


def boxed(function: Boxed) -> Boxed:
    """Mark a function that takes ownership of one list of arguments, as AOTAutograd asks."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def restride(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The same elements in other strides."""
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def run_program(program: Program, objects: Mapping[str, Any]) -> Boxed:
    """A loop program in the slow interpreter."""

    dying = frees(program)

    def run(args: list[Any]) -> Sequence[Any]:
        return interpret(program, args, objects, dying)

    return boxed(run)
