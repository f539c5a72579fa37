"""Calls: operators that run in eager, what they are given, write and return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ferrite.capture import torch_api, torch_operators
from ferrite.errors import Refusal
from ferrite.ir import SHORT, ZERO, Index, Symbol
from ferrite.ir.program import Buffer, Call, Constant, Template
from ferrite.lower.arguments import argument, literal_text, named_object, strided_fake
from ferrite.lower.assertions import bind_offset, bind_sizes
from ferrite.lower.builder import Builder
from ferrite.lower.effects import effect_of, writes_in_graphs
from ferrite.lower.memory import buffer_of, strides_in_storage
from ferrite.lower.table import template_kind
from ferrite.lower.value import Box, Value, whole


class HalfLowered(Exception):
    """A lowering gave up after it had written to memory: a bug of that lowering."""


def eager_call(
    ctx: Builder,
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    out: Any,
    reason: str,
    effect: str | None = None,
    wrap: Callable[[Call], Any] | None = None,
    written: Sequence[Value] | None = None,
) -> Any:
    """One call in eager. What it writes is read by pending values first; what it returns is in memory."""
    name = torch_api.operator_name(target)
    where: str | Constant = name if name is not None else named_object(ctx, target, "operator")
    written = written_values(target, args, kwargs) if written is None else written
    arguments = tuple(map(partial(argument, ctx), args))
    keywords = tuple((key, argument(ctx, value)) for key, value in kwargs.items())
    for value in written:
        storage = ctx.buffers[ctx.realise(value.box)].storage
        if ctx.buffers[buffer_of(ctx, value, strided_fake(value))].storage != storage:
            raise HalfLowered(f"{target} would write to a copy: its operand does not lie as eager has it")
        ctx.before_write(storage)
    writes = tuple(dict.fromkeys(ctx.buffers[ctx.realise(value.box)].name for value in written))
    effect = effect or effect_of(target, args, kwargs)
    results: list[str | Symbol | None] = []
    aliases: list[tuple[str, str]] = []
    values = new_results(ctx, target, args, kwargs, out, results, aliases)
    packed = isinstance(out, (tuple, list))
    ctx.before_call()
    call = Call(where, arguments, keywords, tuple(results), packed, writes, tuple(aliases), effect, reason, ctx.origin)
    kind = template_kind(target) if reason_for_no_loop(args, kwargs, out) is None else None
    ctx.add(wrap(call) if wrap is not None else Template(kind, call) if kind else call)  # type: ignore[arg-type]
    for number, (result, fake) in enumerate(zip(results, flat(out), strict=True)):
        if packed and len(results) == len(out) and not ctx.is_used(number):
            continue  # on a GPU some of torch's operators give None for what nobody asked for
        if isinstance(result, str) and isinstance(fake, torch.Tensor):
            trusted = torch_operators.sizes_follow(target) and not ctx.assumes_sizes
            bind_sizes(ctx, result, fake, name or str(target), trusted)
            bind_offset(ctx, result, fake)
    return values


def new_results(
    ctx: Builder,
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    out: Any,
    names: list[str | Symbol | None],
    aliases: list[tuple[str, str]],
) -> Any:
    """Values for what a call returns; fills in their names and what memory they share."""
    shared = shared_values(target, args, kwargs)

    def made(fake: Any, place: int, owner: Any = None) -> Any:
        if isinstance(fake, (tuple, list)):
            if place < len(shared) and isinstance(shared[place], list):  # a list of operands comes back
                return [made(item, place, owner) for item, owner in zip(fake, shared[place], strict=True)]
            return [made(item, place if len(shared) == 1 else number) for number, item in enumerate(fake)]
        owner = owner or (shared[place] if place < len(shared) else None)
        owner = owner if isinstance(owner, Value) else None
        if isinstance(fake, torch.Tensor):
            value = new_result(ctx, fake, owner)
            assert value.box.buffer is not None
            names.append(value.box.buffer)
            if owner is not None:
                aliases.append((value.box.buffer, ctx.buffers[ctx.realise(owner.box)].storage))
            return value
        if isinstance(fake, torch.SymInt) and isinstance(index := ctx.sizes.index(fake), Symbol):
            ctx.bound.add(index)
            names.append(index)
            return index
        if is_object(fake):  # torch's fake value of one is not what the call will give
            value = new_object(ctx)
            names.append(value.box.buffer)
            return value
        names.append(None)
        return fake

    return made(out, 0)


def is_object(value: Any) -> bool:
    """Whether this is neither a tensor nor a number nor anything else that can be written down."""
    numbers = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return not isinstance(value, numbers) and literal_text(value) is None


def new_object(ctx: Builder) -> Value:
    """What a call gives that is no tensor, nor known before: only calls understand it."""
    name = f"buf{len(ctx.buffers)}"
    device = torch.device("cpu")
    ctx.buffers[name] = Buffer(name, torch.uint8, (), (), ZERO, device, "foreign")
    return Value(Box((), torch.uint8, device, buffer=name), (), ())


def new_result(ctx: Builder, fake: torch.Tensor, owner: Value | None) -> Value:
    """A value for what a call returns: memory of its own, or a view of that of its owner."""
    if fake.layout is not torch.strided:
        return new_foreign(ctx, fake)
    sizes, strides = ctx.shape(fake), ctx.sizes.indices(fake.stride())
    kind: str = "owned"
    base: str | None = None
    offset: Index = ZERO
    if owner is not None:
        kind, base, offset = "view", ctx.buffers[ctx.realise(owner.box)].storage, offset_in(ctx, owner, fake)
    name = f"buf{len(ctx.buffers)}"  # last: a stride may be a number that is computed first, in memory
    box = Box(sizes, fake.dtype, fake.device, buffer=name)
    ctx.buffers[name] = Buffer(name, fake.dtype, box.sizes, strides, offset, fake.device, kind, base)  # type: ignore[arg-type]
    return Value(box, box.sizes, whole(box).coordinates, fake)


def new_foreign(ctx: Builder, fake: torch.Tensor, name: str = "") -> Value:
    """A tensor that only calls understand: it has elements, but none that lie somewhere."""
    sizes = ctx.shape(fake)
    name = name or f"buf{len(ctx.buffers)}"
    box = Box(sizes, fake.dtype, fake.device, buffer=name)
    ctx.buffers[name] = Buffer(name, fake.dtype, (), (), ZERO, fake.device, "foreign")
    return Value(box, box.sizes, whole(box).coordinates, fake)


def offset_in(ctx: Builder, owner: Value, fake: torch.Tensor) -> Index:
    """Where a view that a call returns begins in its owner's storage: as far from it as in torch's fake value."""
    found = strides_in_storage(ctx, owner)
    if found is None or owner.fake is None:
        return ZERO
    apart = found[1] - ctx.sizes.index(owner.fake.storage_offset())
    return ctx.sizes.index(fake.storage_offset()) + apart * owner.dtype.itemsize // fake.dtype.itemsize


def written_values(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Value]:
    if writes_in_graphs(args, kwargs):  # which of its operands, only the graphs could tell
        return [leaf for leaf in flat((list(args), dict(kwargs))) if isinstance(leaf, Value)]
    names = torch_operators.written_arguments(target)
    if not names:
        return []
    bound = torch_operators.bound_arguments(target, tuple(args), kwargs)
    return [value for name in names for value in flat(bound[name]) if isinstance(value, Value)]


def shared_values(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """For each result the value whose memory it shares, a list of them where the result is one, or None."""
    names = torch_operators.shared_arguments(target)
    if not any(names):
        return []
    bound = torch_operators.bound_arguments(target, tuple(args), kwargs)
    found = [bound[name] if name is not None else None for name in names]
    return [list(value) if isinstance(value, (list, tuple)) else value for value in found]


def reason_for_no_loop(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Refusal | None:
    """Why no loop can be made of this call, whatever the operator."""
    fakes = [value.fake for value in flat((args, list(kwargs.values()))) if isinstance(value, Value)]
    for fake in (*fakes, *flat(out)):
        if not isinstance(fake, torch.Tensor):
            continue
        if fake.layout is not torch.strided:
            return Refusal(f"a tensor of layout {str(fake.layout).removeprefix('torch.')}")
        if fake.dtype not in SHORT:
            return Refusal(f"elements of type {fake.dtype}")
        if fake.is_quantized or fake.is_mkldnn:
            return Refusal("an opaque tensor")
    return None


def flat(tree: Any) -> list[Any]:
    if isinstance(tree, (tuple, list)):
        return [leaf for item in tree for leaf in flat(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in flat(item)]
    return [tree]
