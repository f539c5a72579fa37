"""Calls of two operators on operands of one look, timed on a GPU: what `ferrite.candidate` decides by."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import SHORT_NAMES
from ferrite.targets.trials import Stopwatch, farthest, reason_against
from ferrite.targets.tuning_watcher import watcher
from ferrite.tune import CallProblem, CallTimes

DTYPES = {name: dtype for dtype, name in SHORT_NAMES.items()}
TENSOR = re.compile(r"(\w+)\[([\d, ]*)\](?: strides \(([\d, ]*)\))?")
NAMED = re.compile(r"([A-Za-z_]\w*)=(.*)")


def measured_call(problem: CallProblem) -> CallTimes | None:
    """None where the candidate gives something else than torch's operator, or fails."""
    operator, other = (torch_api.find_operator(name) for name in (problem.operator, problem.candidate))
    if operator is None or other is None:
        return None
    watcher().begins(problem, 2)
    try:
        args, kwargs = operands_of(problem, "cuda")
        if reason_against_results(operator, other, args, kwargs) is not None:
            return None
        watch = Stopwatch()
        times = []
        for each in (operator, other):
            times.append(watch.microseconds(each, *args, **kwargs))
            watcher().tried()
        return CallTimes(*times)
    except (RuntimeError, TypeError, ValueError):  # of memory there is too little, or the operator is not for these
        return None


def operands_of(problem: CallProblem, device: str) -> tuple[list[Any], dict[str, Any]]:
    """Random numbers of the looks that a problem has, from no generator of the user's."""
    generator = torch.Generator(device).manual_seed(0)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in problem.operands:
        named = NAMED.fullmatch(text)
        value = operand_from(text if named is None else named[2], device, generator)
        if named is None:
            args.append(value)
        else:
            kwargs[named[1]] = value
    return args, kwargs


def operand_from(text: str, device: str, generator: torch.Generator) -> Any:
    """Integers are zero: they may be indices."""
    found = TENSOR.fullmatch(text)
    if found is None:
        return ast.literal_eval(text)
    dtype, sizes = DTYPES[found[1]], numbers(found[2])
    strides = contiguous(sizes) if found[3] is None else numbers(found[3])
    made = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        return made.zero_()
    return made.copy_(torch.randn(sizes, device=device, generator=generator).to(dtype))


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each.strip()]


def contiguous(sizes: Sequence[int]) -> list[int]:
    strides, step = list[int](), 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= max(size, 1)
    return strides


def reason_against_results(operator: Any, other: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Refusal | None:
    """Why what another operator gives will not do in the place of torch's; None where it will."""
    wanted, found = (flat(each(*args, **kwargs)) for each in (operator, other))
    if [looks(each) for each in wanted] != [looks(each) for each in found]:
        return Refusal("its results are of another type or size")
    wide = [each.double() if is_narrow(each) else each for each in args]
    wide_named = {name: each.double() if is_narrow(each) else each for name, each in kwargs.items()}
    try:
        exact = flat(operator(*wide, **wide_named))
    except (RuntimeError, TypeError):  # not every operator is there in double precision
        exact = [each.double() if is_narrow(each) else each for each in wanted]
    for result, right, best in zip(found, wanted, exact, strict=True):
        if not is_narrow(result):
            if not torch.equal(result, right):
                return Refusal("its results are other numbers")
        elif (refusal := reason_against([result], [best], [farthest(right, best)])) is not None:
            return refusal
    return None


def flat(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def looks(value: torch.Tensor) -> Any:
    return value.dtype, value.shape, value.stride()


def is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64
