"""One call of the graph: by the lowering that its operator has, taken apart by torch, or in eager with a reason.

Torch takes an operator apart by running its decomposition on fakes of the tensors; every operator that this calls is
applied in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ferrite.capture import torch_api, torch_operators
from ferrite.errors import NotLowered
from ferrite.ir import ZERO, Expr, Index, Number
from ferrite.ir.program import Buffer, writes
from ferrite.lower.arguments import named_object
from ferrite.lower.builder import Builder
from ferrite.lower.calls import HalfLowered, eager_call, flat, reason_for_no_loop
from ferrite.lower.forecasts import OperandLayout, misforecast
from ferrite.lower.memory import dense_strides
from ferrite.lower.probes import IN_EAGER
from ferrite.lower.scalars import read
from ferrite.lower.stores import write_into
from ferrite.lower.table import OTHERWISE, how_lowered, lowering_of
from ferrite.lower.value import Box, Value, whole

aten = torch.ops.aten

# Names of schemas that Python keeps for itself.
PYTHON_NAMES = {"self": "x", "from": "low", "input": "x"}


def apply(ctx: Builder, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """Lower one call; where it has no loop form, call it in eager, with the reason."""
    before, ctx.out, ctx.operator = (ctx.out, ctx.operator), out, target
    mark, names = len(ctx.operations), set(ctx.buffers)
    try:
        return settled(ctx, choose(ctx, target, args, kwargs, out), out)
    except NotLowered as refused:
        # what was computed so far is dead, and goes; what was written could not be taken back
        changed = {access.buffer for added in ctx.operations[mark:] for access in writes(added)} & names
        if changed:
            raise HalfLowered(f"{target} had written {changed} when it gave up: {refused}") from refused
        reason = "; ".join(filter(None, [refused.refusal.reason, ctx.because]))
        return settled(ctx, eager_call(ctx, target, args, kwargs, out, reason), out)
    finally:
        ctx.out, ctx.operator = before


def choose(ctx: Builder, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    kind, note = how_lowered(target)
    if kind in ("eager", "template"):
        raise NotLowered(note)
    if (device := without_kernels(ctx, target, args, kwargs, out)) is not None:
        raise NotLowered(f"no kernels are made on {device}")
    if ctx.assumes_sizes:
        raise NotLowered("torch assumes a size of its result that data decides")
    if ctx.node is not None and IN_EAGER in ctx.node.meta and ctx.node.target is target:
        if target in OTHERWISE:
            return taken_apart(ctx, target, args, kwargs, out, ctx.node.meta[IN_EAGER])
        raise NotLowered(ctx.node.meta[IN_EAGER])
    why_not = reason_for_no_loop(args, kwargs, out) or misforecast(target, operand_layouts(ctx, args, kwargs))
    if why_not:
        raise NotLowered(why_not)
    lower = lowering_of(target)
    if lower is not None and target in OTHERWISE:
        try:
            return call_lowering(ctx, lower, target, args, kwargs)
        except NotLowered as refused:
            return taken_apart(ctx, target, args, kwargs, out, refused.refusal.reason)
    if lower is not None:
        return call_lowering(ctx, lower, target, args, kwargs)
    if kind == "in place":
        return in_place(ctx, torch_operators.functional_twin(target), args, kwargs, out)
    return compose(ctx, target, args, kwargs, out)


def without_kernels(ctx: Builder, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> str | None:
    """A device of this call that no kernels are made for. Views need none, nor do questions about sizes, nor copies
    from device to device."""
    results = [fake for fake in flat(out) if isinstance(fake, torch.Tensor)]
    computes = bool(results) or bool(torch_operators.written_arguments(target))
    if not computes or torch_operators.is_view(target) or not torch_operators.is_operator(target):
        return None
    operands = [value for value in flat((list(args), dict(kwargs))) if isinstance(value, Value)]
    if is_plain_copy(operands, results):
        return None
    devices = [result.device.type for result in results] + [value.device.type for value in operands]
    return next((device for device in devices if device not in ctx.kernels_on), None)


def is_plain_copy(operands: Sequence[Value], results: Sequence[torch.Tensor]) -> bool:
    """Whether elements go from one device to another as they are: an operation of its own, which is no loop."""
    if len(operands) != 1 or len(results) != 1:
        return False
    return operands[0].device != results[0].device and operands[0].dtype == results[0].dtype


def operand_layouts(ctx: Builder, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[OperandLayout]:
    for value in flat((list(args), dict(kwargs))):
        if isinstance(value, Value) and value.fake is not None and value.fake.layout is torch.strided:
            fake = value.fake
            sizes, strides = ctx.sizes.indices(fake.shape), ctx.sizes.indices(fake.stride())
            yield OperandLayout(sizes, strides, fake.dtype, fake.device)


def call_lowering(
    ctx: Builder, function: Callable[..., Any], target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    if torch_operators.is_operator(target):
        bound = torch_operators.bound_arguments(target, tuple(args), kwargs)
        return function(ctx, **{PYTHON_NAMES.get(name, name): readable(ctx, value) for name, value in bound.items()})
    return function(ctx, *args, **kwargs)


def readable(ctx: Builder, value: Any) -> Any:
    """An argument with symbolic sizes as index expressions."""
    if isinstance(value, torch.SymInt):
        return ctx.sizes.index(value)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return read(ctx, value)
    if isinstance(value, (list, tuple)):
        return [readable(ctx, item) for item in value]
    return value


def in_place(ctx: Builder, twin: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    target = args[0]
    value = apply(ctx, twin, args, kwargs, out)
    return write_into(ctx, target, value)


def settled(ctx: Builder, result: Any, out: Any) -> Any:
    """Give fresh values eager's strides, and every value torch's fake value of it."""
    if isinstance(out, (tuple, list)) and isinstance(result, (tuple, list)):
        return (
            type(out)(settled(ctx, item, fake) for item, fake in zip(result, out, strict=True))
            if type(out) in (tuple, list)
            else [settled(ctx, item, fake) for item, fake in zip(result, out, strict=True)]
        )
    if not isinstance(result, Value) or not isinstance(out, torch.Tensor):
        return result
    box = result.box
    if box.expr is not None and box.strides is None and result.is_whole and ctx.shape(out) == box.sizes:
        box.strides = dense_strides(ctx, out)
    if box.fake is None and result.is_whole:
        box.fake = out
    return Value(box, result.sizes, result.coordinates, out)


# --- taking an operator apart -----------------------------------------------------------------------------------------


def compose(ctx: Builder, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """Run torch's decomposition on fakes of the tensors, lowering every operator it calls."""
    function = OTHERWISE.get(target) or torch_operators.decomposition(target)
    if function is None:
        raise NotLowered("torch has no decomposition of it")
    seen = Seen(ctx.numbers)
    fake_args, fake_kwargs = seen.fakes(args), seen.fakes(dict(kwargs))
    mode = mode_of([*flat((fake_args, list(fake_kwargs.values()))), *flat(out)])
    try:
        with torch.no_grad(), deciding_nothing(ctx, mode), mode, LoweringMode(ctx, seen):
            result = function(*fake_args, **fake_kwargs)
    except (NotLowered, HalfLowered):
        raise
    except Exception as problem:
        raise NotLowered(f"its decomposition fails: {first_line(problem)}") from problem
    if result is NotImplemented:
        raise NotLowered("its decomposition does not cover this case")
    return seen.values_of(result)


def taken_apart(
    ctx: Builder, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, reason: str
) -> Any:
    """An operator whose lowering refuses, by the function that it has for that; calls in it say why."""
    before, ctx.because = ctx.because, f"{str(target).removeprefix('higher_order.')} is no kernel: {reason}"
    try:
        return compose(ctx, target, args, kwargs, out)
    finally:
        ctx.because = before


def deciding_nothing(ctx: Builder, mode: Any) -> AbstractContextManager[None]:
    """While a decomposition runs, nothing is decided about sizes; one inside another is in force already."""
    return nullcontext() if ctx.composing else composition(ctx, mode)


@contextmanager
def composition(ctx: Builder, mode: Any) -> Iterator[None]:
    ctx.composing = True
    try:
        with torch_api.deciding_nothing(mode):
            yield
    finally:
        ctx.composing = False


def mode_of(fakes: Sequence[Any]) -> Any:
    """The fake mode that fakes belong to."""
    modes = (getattr(fake, "fake_mode", None) for fake in fakes)
    found = next((mode for mode in modes if mode is not None), None)
    if found is None:
        raise NotLowered("no tensor to work on")
    return found


class Seen:
    """Which value each fake stands for."""

    def __init__(self, numbers: Mapping[Expr, Any]) -> None:
        self.numbers = numbers
        self.values: dict[int, tuple[torch.Tensor, Value]] = {}

    def fakes(self, tree: Any) -> Any:
        if isinstance(tree, Value):
            if tree.fake is None:
                raise NotLowered("an operand without a fake value")
            fake = tree.fake.detach() if id(tree.fake) in self.values else tree.fake
            self.values[id(fake)] = (fake, tree)
            return fake
        if isinstance(tree, (list, tuple)):
            return type(tree)(map(self.fakes, tree))
        if isinstance(tree, dict):
            return {key: self.fakes(value) for key, value in tree.items()}
        if isinstance(tree, Index):
            if isinstance(tree, Number):
                return tree.value
            raise NotLowered("a size that came out of an expression")
        if isinstance(tree, Expr):
            if tree not in self.numbers:
                raise NotLowered("a number that is known only when it runs")
            return self.numbers[tree]
        return tree

    def values_of(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            found = self.values.get(id(tree))
            if found is None:
                raise NotLowered("its decomposition makes a tensor of its own")
            return found[1]
        if isinstance(tree, (list, tuple)):
            return [self.values_of(item) for item in tree]
        return tree

    def remember(self, fakes: Any, values: Any) -> None:
        if isinstance(fakes, torch.Tensor) and isinstance(values, Value):
            self.values[id(fakes)] = (fakes, values)
        elif isinstance(fakes, (list, tuple)) and isinstance(values, (list, tuple)):
            for fake, value in zip(fakes, values, strict=True):
                self.remember(fake, value)


class LoweringMode(torch_api.DispatchMode):
    """Sees the operators a decomposition calls on fakes, and lowers each."""

    def __init__(self, builder: Builder, seen: Seen) -> None:
        super().__init__()
        self.builder, self.seen = builder, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in IGNORED:
            return out
        values = apply(self.builder, func, self.read(args), self.read(kwargs), out)
        self.seen.remember(out, values)
        return out

    def read(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: self.read(value) for key, value in tree.items()}
        if isinstance(tree, tuple):
            return tuple(map(self.read, tree))
        if isinstance(tree, list):
            return [self.read(item) for item in tree]
        if not isinstance(tree, torch.Tensor):
            return tree
        if id(tree) not in self.seen.values and not torch_api.is_fake(tree):
            return constant_tensor(self.builder, tree)
        return self.seen.values_of(tree)


def constant_tensor(ctx: Builder, tensor: torch.Tensor) -> Value:
    """A real tensor that a decomposition made: a number, or a constant of the program."""
    sizes = ctx.sizes.indices(tensor.shape)
    if not sizes:
        return ctx.fill((), torch_operators.number_in(tensor), tensor.dtype, tensor.device)
    name = named_object(ctx, tensor, "tensor").name
    box = Box(sizes, tensor.dtype, tensor.device, buffer=name)
    strides = ctx.sizes.indices(tensor.stride())
    ctx.buffers[name] = Buffer(name, tensor.dtype, sizes, strides, ZERO, tensor.device, "constant")
    return whole(box)


# Questions about a tensor, not computations.
IGNORED = frozenset(
    {
        aten.sym_size.int,
        aten.sym_stride.int,
        aten.sym_numel.default,
        aten.sym_storage_offset.default,
        aten.is_same_size.default,
        torch.ops.prim.device.default,
    }
)


def first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"[:160]
