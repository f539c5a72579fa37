"""Calls that eager refuses although fakes of their operands pass, and a loop could be made of them.

    torch.zeros(3, dtype=torch.bool).argmin()       RuntimeError: argmin(): does not support bool input

The types that a kernel knows are checked where it runs, and no schema tells them. So eager is asked, once in a process
for calls that are alike: on zeros, of a few elements where the call has no argument that is a size. Few calls are asked
about: those of float32 and float64, of which every operator has a kernel, are not, unless there is nothing in a tensor.

A refusal that comes of types alone is told from one that comes of the small sizes by making the same call with other
types, which must pass. With the very sizes of the graph any error counts: the fakes passed.

A graph with such a call raises whatever is computed for it. It runs in eager, operator by operator, as it was captured,
before any pass can take the call apart or see that nobody needs it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import is_operator, is_random, is_view, schema, torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value, is_elementwise, leaves, model_line
from ferrite.lower.fake_operands import is_plain
from ferrite.lower.probes import as_in_eager
from ferrite.lower.table import how_lowered, template_kind

aten = torch.ops.aten

USUAL = frozenset({torch.float32, torch.float64})
SMALL = (2, 8)  # no size is larger than the first, then, for windows that need more room, the second
MAX_ELEMENTS = 1 << 16  # of all operands and results of a call that is made
# Elementwise calls that may fail on zeros are made on ones too. Other calls may take what they are given for indices,
# of which zero alone is a place that every tensor has.
ALSO_ELEMENTWISE = frozenset({aten.floor_divide.default})
KNOW_NO_FLOATS = frozenset({aten.bitwise_not.default})  # and fakes of their operands pass


@dataclass(frozen=True)
class ProbedOperand:
    """A tensor of a call, with the sizes that are seen while compiling."""

    dtype: torch.dtype
    sizes: tuple[int, ...]

    def at_most(self, limit: int) -> ProbedOperand:
        return ProbedOperand(self.dtype, tuple(min(size, limit) for size in self.sizes))


@dataclass(frozen=True)
class ProbedConstant:
    """Any other argument. Its type is part of it: 1, 1.0 and True are equal."""

    type: type
    value: Any


@dataclass(frozen=True)
class ProbedCall:
    target: Any
    args: Any
    kwargs: Any

    def mapped(self, function: Callable[[Any], Any]) -> ProbedCall:
        arguments: Any = torch.fx.node.map_aggregate((self.args, self.kwargs), function)
        return ProbedCall(self.target, *arguments)

    def at_most(self, limit: int) -> ProbedCall:
        return self.mapped(lambda each: each.at_most(limit) if isinstance(each, ProbedOperand) else each)

    def operands(self) -> list[ProbedOperand]:
        return [each for each in leaves((self.args, self.kwargs)) if isinstance(each, ProbedOperand)]


class NotAsked(Exception):
    """A call that cannot be made here and now."""


def refused_by_eager(gm: torch.fx.GraphModule) -> Refusal | None:
    """Why eager raises an error in this graph, or in one that it runs, if a call shows that it does.

    Operators that autograd calls are not asked about: eager may call them with other types. Torch's fake value of the
    backward of a layer norm under autocast mixes some that its kernel does not take.
    """
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            of_gradients: set[torch.fx.Node] = set()
            for node in module.graph.nodes:
                if is_gradient(node) or not of_gradients.isdisjoint(node.all_input_nodes):
                    of_gradients.add(node)
                    if "backward" in str(node.target):
                        continue
                if node.op == "call_function" and is_unusual(node) and (why := refusal(node)) is not None:
                    return Refusal(f"eager refuses {node.target}: {why}", model_line(node))
    return None


def is_gradient(node: torch.fx.Node) -> bool:
    """Whether a node is what autograd hands to a backward graph, by the name that AOTAutograd gives it."""
    return node.op == "placeholder" and node.name.startswith("tangents")


def is_unusual(node: torch.fx.Node) -> bool:
    """Whether a call has a type, or a tensor without elements or dimensions, that its operator may not know."""
    if not may_be_asked(node.target):
        return False
    if node.kwargs and node.kwargs.get("dtype", torch.float32) not in (None, *USUAL):
        return True
    for each in node.all_input_nodes:
        value = each.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        if value.dtype not in USUAL or node.target in KNOW_NO_FLOATS:
            if template_kind(node.target) is None or not value.dtype.is_floating_point:
                return True
        elif not is_elementwise(node.target) and (
            not value.ndim or any(type(s) is int and s == 0 for s in value.shape)
        ):
            return True
    return False


@functools.lru_cache(4096)
def may_be_asked(target: Any) -> bool:
    """Whether a call of this only computes, and does not stay a call. Random numbers are drawn from a generator of our
    own. What stays a call raises eager's error itself; made on zeros, one of a library may go where no memory is:
    pivots, say, count from 1.
    """
    if not is_operator(target) or target.namespace != "aten" or is_view(target) or not schema(target).returns:
        return False
    if is_random(target):
        return seeded(target) is not None
    if how_lowered(target)[0] == "eager":
        return False
    return any("Tensor" in str(each.type) for each in schema(target).arguments)


@functools.lru_cache(256)
def seeded(target: Any) -> Any | None:
    """The overload of a random operator that takes a generator, and else what this one takes."""
    names = [each.name for each in schema(target).arguments]
    if "generator" in names:
        return target
    packet = target.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        others = [each.name for each in schema(overload).arguments]
        if "generator" in others and [name for name in others if name != "generator"] == names:
            return overload
    return None


def refusal(node: torch.fx.Node) -> str | None:
    """What eager says to a call; None where it does not refuse it, or was not asked."""
    try:
        call = ProbedCall(node.target, node.args, node.kwargs).mapped(described)
        results = [described_tensor(each) for each in leaves(fake_value(node)) if isinstance(each, torch.Tensor)]
        given, made = elements_in(call.operands()), elements_in(results)
        is_small = given + made <= MAX_ELEMENTS
        passes, why = refusal_of_types(call, grows=made > max(given, MAX_ELEMENTS))
        return refusal_of_sizes(call) if is_small and not passes and why is None else why
    except (NotAsked, TypeError):  # the latter: an argument that cannot be hashed
        return None


def described(argument: Any) -> ProbedOperand | ProbedConstant:
    value = fake_value(argument) if isinstance(argument, torch.fx.Node) else argument
    if isinstance(value, torch.Tensor):
        return described_tensor(value)
    if isinstance(value, torch.SymInt):
        return ProbedConstant(int, seen(value))
    if isinstance(argument, torch.fx.Node) or isinstance(value, (torch.SymFloat, torch.SymBool)):
        raise NotAsked
    return ProbedConstant(type(value), value)


def described_tensor(value: torch.Tensor) -> ProbedOperand:
    if not is_plain(value) or value.is_quantized:
        raise NotAsked
    return ProbedOperand(value.dtype, tuple(map(seen, value.shape)))


def seen(number: int | torch.SymInt) -> int:
    if isinstance(number, torch.SymInt) and not torch_api.has_hint(number):
        raise NotAsked
    return torch_api.size_hint(number)


def refusal_of_types(call: ProbedCall, grows: bool) -> tuple[bool, str | None]:
    """Whether a call passes on small tensors; and what eager says to it, if it says so to these types alone. `grows`:
    it makes many elements, and more than it is given. A number may say how many, and do so of small tensors, too."""
    found: tuple[bool, str | None] = (False, None)
    for small in map(call.at_most, () if has_sizes(call.target) else SMALL):
        if found == (False, None) and elements_in(small.operands()) <= MAX_ELEMENTS:
            found = passes_but_for_types(small) if not grows or makes_few_elements(small) else found
    return found


@functools.lru_cache(4096)
def makes_few_elements(call: ProbedCall) -> bool:
    """Whether the results of a call are small, by their fake values. What that is an error for, is one for eager
    before anything is computed; where there is no fake value, nobody knows."""
    try:
        with as_in_eager():
            made = call.mapped(lambda each: each.value if isinstance(each, ProbedConstant) else fake_of(each))
            result = call.target(*made.args, **made.kwargs)
    except NotImplementedError:
        return False
    except Exception:
        return True
    return sum(each.numel() for each in leaves(result) if isinstance(each, torch.Tensor)) <= MAX_ELEMENTS


def elements_in(operands: Sequence[ProbedOperand]) -> int:
    return sum(math.prod(each.sizes) for each in operands)


def fake_of(operand: ProbedOperand) -> torch.Tensor:
    return torch.empty(operand.sizes, dtype=operand.dtype, device="meta")


@functools.lru_cache(4096)
def passes_but_for_types(call: ProbedCall) -> tuple[bool, str | None]:
    error = raised(call)
    if error is None:
        return True, None
    return False, said(error) if any(raised(twin) is None for twin in of_other_types(call)) else None


@functools.lru_cache(4096)
def refusal_of_sizes(call: ProbedCall) -> str | None:
    """What eager says to a call with the sizes that it has, where fakes of its operands pass."""
    error = raised(call)
    return None if error is None else said(error)


@functools.lru_cache(4096)
def has_sizes(target: Any) -> bool:
    """Whether an operator takes sizes, which those of smaller tensors would not go with."""
    return "SymInt" in str(schema(target))


def of_other_types(call: ProbedCall) -> Iterator[ProbedCall]:
    """The same call with types that the operator may know: of all tensors, of the first, of those that are no
    indices."""
    first = next(iter(call.operands()), None)

    def retyped(dtype: torch.dtype, changes: Callable[[ProbedOperand], bool]) -> ProbedCall:
        def other(each: Any) -> Any:
            if isinstance(each, ProbedOperand):
                return ProbedOperand(dtype, each.sizes) if changes(each) else each
            return ProbedConstant(torch.dtype, dtype) if isinstance(each.value, torch.dtype) else each

        return call.mapped(other)

    yield retyped(torch.float32, lambda each: True)
    yield retyped(torch.float32, lambda each: each is first)
    yield retyped(torch.float32, lambda each: each.dtype not in (torch.int64, torch.int32))
    yield retyped(torch.int64, lambda each: True)


def raised(call: ProbedCall) -> Exception | None:
    """The error that eager raises for a call of zeros, and for one of ones where that may be of another kind."""
    error = None
    elementwise = is_elementwise(call.target) or call.target in ALSO_ELEMENTWISE
    for number in (0, 1) if elementwise else (0,):
        try:
            with as_in_eager():
                made = call.mapped(functools.partial(filled, number=number))
                if is_random(call.target):
                    overload: Any = seeded(call.target)
                    overload(*made.args, **{**made.kwargs, "generator": torch.Generator()})
                else:
                    call.target(*made.args, **made.kwargs)
            return None
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # of the elements
            return None
        except Exception as problem:
            error = problem
    return error


def filled(argument: ProbedOperand | ProbedConstant, number: int) -> Any:
    if isinstance(argument, ProbedConstant):
        return argument.value
    return torch.full(argument.sizes, number, dtype=argument.dtype)


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
