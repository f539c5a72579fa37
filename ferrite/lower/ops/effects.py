"""Operators that are there for what they do: tokens, ordered calls, random states, kernels and objects of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ferrite.capture import torch_api, torch_operators
from ferrite.errors import NotLowered
from ferrite.graph import USER_KERNEL
from ferrite.ir.program import Call, UserKernel
from ferrite.lower.apply import apply
from ferrite.lower.arguments import named_object
from ferrite.lower.builder import Builder
from ferrite.lower.calls import eager_call, flat
from ferrite.lower.effects import ORDERED, RANDOM
from ferrite.lower.ops.control import invoke, lowers_higher_order
from ferrite.lower.table import eager, lowers
from ferrite.lower.value import Value

aten, prims = torch.ops.aten, torch.ops.prims


# --- effects in order -------------------------------------------------------------------------------------------------


@lowers(prims._make_token.default, aten._make_dep_token.default)
def make_token(ctx: Builder, **operands: Any) -> Value:
    return ctx.fill(ctx.out_sizes, 0, ctx.out_dtype, ctx.out.device)


@lowers(prims._sink_tokens.default)
def sink_tokens(ctx: Builder, tokens: Sequence[Value]) -> None:
    """Calls with an effect are kept for it; nobody needs their tokens."""


@lowers_higher_order("with_effects")
def with_effects(ctx: Builder, token: Value, target: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """The call itself, which keeps its place among others that have an effect; the token is passed on."""
    _, *results = ctx.out
    several = not torch_operators.is_operator(target) or len(torch_operators.schema(target).returns) > 1
    out = tuple(results) if several else results[0] if results else None
    values = eager_call(ctx, target, args, kwargs, out, "it has an effect that must keep its place", effect=ORDERED)
    return [token, *(values if several else [values] * len(results))]


@lowers_higher_order("print", "call_torchbind", "invoke_leaf_function", "register_hook")
def called_in_order(ctx: Builder, *args: Any, **kwargs: Any) -> Any:
    return eager_call(
        ctx, ctx.operator, args, kwargs, ctx.out, "it has an effect that must keep its place", effect=ORDERED
    )


@lowers_higher_order(
    "run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state", "run_dtensor_rng_op"
)
def with_random_state(ctx: Builder, *args: Any, **kwargs: Any) -> Any:
    return eager_call(
        ctx, ctx.operator, args, kwargs, ctx.out, "it sets the state of a random generator", effect=RANDOM
    )


# --- wrappers around a graph ------------------------------------------------------------------------------------------


@lowers_higher_order("control_deps")
def control_deps(ctx: Builder, dependencies: Sequence[Any], target: Any, *args: Any, **kwargs: Any) -> Any:
    """What the dependencies compute stands before it already: order is the meaning of a program."""
    for value in flat(list(dependencies)):
        if isinstance(value, Value):
            ctx.realise(value.box)
    if isinstance(target, torch.fx.GraphModule):
        return invoke(ctx, target, args)
    return apply(ctx, target, args, kwargs, ctx.out)


@lowers_higher_order("wrap_with_set_grad_enabled", "wrap_with_autocast", "tag_activation_checkpoint", "hints_wrapper")
def wrapped(ctx: Builder, *args: Any, **kwargs: Any) -> Any:
    """A graph with something said about it that tracing has heeded; its operands stand behind it."""
    places = [place for place, each in enumerate(args) if isinstance(each, torch.fx.GraphModule)]
    if len(places) != 1:
        raise NotLowered("a wrapper around no graph, or several")
    operands = args[places[0] + 1 :]
    if len(operands) == 2 and isinstance(operands[0], (tuple, list)) and isinstance(operands[1], Mapping):
        operands = tuple(operands[0])
    return invoke(ctx, args[places[0]], operands)


@lowers_higher_order("foreach_map")
def foreach_map(ctx: Builder, graph: Any, *operands: Any, **kwargs: Any) -> Any:
    return invoke(ctx, graph, [leaf for operand in operands for leaf in flat(operand)])


# --- the user's kernels -----------------------------------------------------------------------------------------------


@lowers_higher_order("triton_kernel_wrapper_mutation")
def triton_kernel(ctx: Builder, **about: Any) -> None:
    """One launch, over grids that are numbers. Where the kernel itself could not tell which of its tensors it writes,
    it may be every one."""
    node, reason = ctx.node, "a kernel the user wrote"
    kernel = node.meta.get(USER_KERNEL) if node is not None and node.target is ctx.operator else None
    given = about["kwargs"]
    names = given if kernel is None or kernel.writes is None else kernel.writes
    written = [leaf for leaf in flat([given[name] for name in names]) if isinstance(leaf, Value)]
    if kernel is None:  # torch finds it by its number
        wrap: Callable[[Call], UserKernel] = UserKernel
        eager_call(ctx, ctx.operator, (), about, None, reason, wrap=wrap, written=written)
        return
    named = named_object(ctx, kernel, kernel.name)
    arguments = [about["grid"], about["tma_descriptor_metadata"], given]
    launch = lambda call: UserKernel(replace(call, operator=named))  # noqa: E731
    eager_call(ctx, ctx.operator, arguments, {}, None, reason, wrap=launch, written=written)


# --- streams, ranges of the profiler, objects -------------------------------------------------------------------------


for _name in ("profiler._record_function_enter_new.default", "profiler._record_function_enter.default"):
    if (_found := torch_api.find_operator(_name)) is not None:
        eager(_found, because="it opens a range of the profiler")
for _name in ("profiler._record_function_exit._RecordFunction", "profiler._record_function_exit.default"):
    if (_found := torch_api.find_operator(_name)) is not None:
        eager(_found, because="it closes a range of the profiler")
STREAMS = """fork join record_event wait_event wait_stream record_stream synchronize_device synchronize_event
synchronize_stream sync_dealloc"""
for _name in STREAMS.split():
    if (_found := torch_api.find_operator(f"streams.{_name}.default")) is not None:
        eager(_found, because="it orders streams of a device")
