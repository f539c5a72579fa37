"""Under `strict`: does a call that a pass spelled otherwise compute what it did?

Both spellings run on small random tensors that look like what the call is given, and all that can be seen of the
results is compared: values to the bit, looks, which operand's memory they share. The same change of calls that look the
same is compared once per process. Left out: calls with an effect or random numbers, foreign operators, large operands,
and what fails on random numbers as it was written.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from ferrite.capture import torch_api, torch_state
from ferrite.errors import NotApplied
from ferrite.graph import fake_value, has_effect, is_random, leaves, mutates
from ferrite.passes.pre_grad.numeric_runs import known_size
from ferrite.passes.pre_grad.spelling import SpelledCall
from ferrite.pipeline import PassContext
from ferrite.rewrite import difference

PassFunction = Callable[[torch.fx.GraphModule, PassContext], int]
MAX_CHECKED_ELEMENTS = 1 << 14  # elements of all operands together
CALLS = ("call_function", "call_method")
_compared: set[int] = set()  # what was found the same, in this process


class SpeltWrong(Exception):
    """Another spelling of a call computes something else."""

    def __init__(self, node: torch.fx.Node, was: SpelledCall, problem: str) -> None:
        now = SpelledCall(node.op, node.target, node.args, node.kwargs)
        super().__init__(f"{node.name} was {said(was)} and became {said(now)}: {problem}")
        self.node = node


def compared(function: PassFunction) -> PassFunction:
    """A pass that spells calls otherwise; under `strict` every call that it changes is run both ways."""

    @functools.wraps(function)
    def run(gm: torch.fx.GraphModule, context: PassContext) -> int:
        if not context.options.strict:
            return function(gm, context)
        before = [(node, call_of(node)) for node in gm.graph.nodes if node.op in CALLS]
        count = function(gm, context)
        for node, was in before if count else ():
            if not all(a is b for a, b in zip(was, call_of(node), strict=True)):
                compare(node, was)
        return count

    return run


def call_of(node: torch.fx.Node) -> SpelledCall:
    return SpelledCall(node.op, node.target, node.args, node.kwargs)


def compare(node: torch.fx.Node, was: SpelledCall) -> None:
    """Raise SpeltWrong if a node does not compute what it did when it was written another way."""
    if hasattr(was.target, "overloads") or not is_torchs(node) or mutates(node) or is_random(node) or has_effect(node):
        return
    now = call_of(node)
    operands = operands_of(was, now)
    key = hash(
        (was.op, was.target, now.op, now.target, looks(operands), *(text(each, operands) for each in (was, now)))
    )
    if key in _compared:
        return
    with torch_state.on_real_tensors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = problem_of(was, now, operands)
    if problem is not None:
        raise SpeltWrong(node, was, problem)
    _compared.add(key)


def is_torchs(node: torch.fx.Node) -> bool:
    """Whether it calls what torch brings and what computes: operators of others may do anything."""
    if node.op == "call_method" or not hasattr(node.target, "_schema"):
        return True
    name = str(node.target._schema.name)
    return name.startswith("aten::") and "empty" not in name  # what is in new memory is nobody's concern


def operands_of(*calls: SpelledCall) -> dict[torch.fx.Node, int]:
    """The nodes that calls are given, numbered in order."""
    found: dict[torch.fx.Node, int] = {}
    for call in calls:
        torch.fx.node.map_arg((call.args, call.kwargs), lambda node: found.setdefault(node, len(found)))
    return found


def looks(operands: Mapping[torch.fx.Node, int]) -> Hashable:
    return tuple(look(leaf) for node in operands for leaf in leaves(fake_value(node)))


def look(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return (type(value), str(value))
    strides = str(value.stride()) if value.layout is torch.strided else ""
    return (value.dtype, str(value.shape), strides, str(value.device))


def text(call: SpelledCall, operands: Mapping[torch.fx.Node, int]) -> str:
    return repr(torch.fx.node.map_arg((call.args, call.kwargs), lambda node: f"%{operands[node]}"))


def said(call: SpelledCall) -> str:
    given = [*map(repr, call.args), *(f"{name}={value!r}" for name, value in call.kwargs.items())]
    return f"{getattr(call.target, '__name__', call.target)}({', '.join(given)})"


def problem_of(was: SpelledCall, now: SpelledCall, operands: Mapping[torch.fx.Node, int]) -> str | None:
    """How the results of two calls differ; None if they do not, or if nobody can tell."""
    try:
        given = made({node: fake_value(node) for node in operands})
        old = result_of(was, given)
    except Exception:
        return None  # there is nothing to compare with
    try:
        new = result_of(now, given)
    except Exception as problem:
        return f"it fails: {type(problem).__name__}: {problem}"
    return unlike(old, new, [leaf for leaf in leaves(given) if isinstance(leaf, torch.Tensor)])


def made(values: dict[torch.fx.Node, Any]) -> dict[torch.fx.Node, Any]:
    """Random tensors for fake ones, and the numbers that were seen for symbols."""
    sizes = [leaf.shape for leaf in leaves(values) if isinstance(leaf, torch.Tensor)]
    if sum(int(torch.Size(map(known_size, shape)).numel()) for shape in sizes) > MAX_CHECKED_ELEMENTS:
        raise NotApplied("the operands are large")
    return {node: torch.fx.node.map_aggregate(value, real) for node, value in values.items()}


def real(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return known_size(value)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        raise NotApplied("nobody knows a value")
    if not isinstance(value, torch.Tensor):
        return value
    if not torch_api.is_fake(value) or value.device.type != "cpu" or value.layout is not torch.strided:
        raise NotApplied("it is no plain tensor")
    sizes, strides = ([known_size(number) for number in numbers] for numbers in (value.shape, value.stride()))
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if 0 not in sizes else 0
    if last > MAX_CHECKED_ELEMENTS or value.is_conj() or value.is_neg():
        raise NotApplied("it does not lie like a plain tensor")
    return numbers(last + 1, value.dtype).as_strided(sizes, strides)


def numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers of a type, from a generator of their own; as indices they fit almost everything."""
    generator = torch.Generator("cpu").manual_seed(count)
    if dtype.is_floating_point or dtype.is_complex:
        kind = dtype if dtype.itemsize > 1 else torch.float32
        return torch.randn(count, dtype=kind, device="cpu", generator=generator).to(dtype)
    return torch.randint(0, 2, (count,), device="cpu", generator=generator).to(dtype)


def result_of(call: SpelledCall, given: Mapping[torch.fx.Node, Any]) -> Any:
    args, kwargs = torch.fx.node.map_arg((call.args, call.kwargs), lambda node: given[node])
    if call.op == "call_method":
        return getattr(args[0], call.target)(*args[1:], **kwargs)
    return call.target(*args, **kwargs)


def unlike(old: Any, new: Any, given: list[torch.Tensor]) -> str | None:
    problem = difference(old, new)
    if problem is not None:
        return problem
    for mine, theirs in zip(leaves(new), leaves(old), strict=True):
        if not isinstance(theirs, torch.Tensor) or theirs.is_meta:  # no elements, and no memory
            continue
        if lies_in(mine, given) != lies_in(theirs, given):
            return "the result lies in other memory"
        if not torch.equal(bits(mine), bits(theirs)):
            return "the values differ"
    return None


def lies_in(tensor: torch.Tensor, given: list[torch.Tensor]) -> tuple[int, ...]:
    """The operands whose memory a result has, and where in it."""
    place = tensor.untyped_storage().data_ptr()
    found = [number for number, each in enumerate(given) if each.untyped_storage().data_ptr() == place]
    return (*found, int(tensor.storage_offset())) if found and place else ()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().reshape(-1)
    return plain.clone(memory_format=torch.contiguous_format).view(torch.uint8)
