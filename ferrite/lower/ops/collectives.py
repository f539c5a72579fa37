"""Collectives between processes: one operation begins them, another waits. In between, their memory is theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferrite.capture import torch_api, torch_operators
from ferrite.ir.program import Call, Collective, Ref, Wait, reads, writes
from ferrite.lower.arguments import strided_fake
from ferrite.lower.builder import Builder
from ferrite.lower.calls import eager_call, flat
from ferrite.lower.memory import buffer_of
from ferrite.lower.table import LOWERED, lowers, lowers_later
from ferrite.lower.value import Value

NAMES = """all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_ all_gather_into_tensor
all_gather_into_tensor_out all_gather_into_tensor_coalesced reduce_scatter_tensor reduce_scatter_tensor_out
reduce_scatter_tensor_coalesced all_to_all_single broadcast broadcast_ isend irecv batch_p2p_ops"""
WHY = "it exchanges data with other processes"


@dataclass
class PendingCollective:
    """A collective on its way: the storages it was given, and those of its results that nobody has waited for."""

    operands: set[str]
    results: set[str]


def begin(ctx: Builder, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """Start it, and remember what it holds until it is waited for."""
    values = eager_call(ctx, target, args, kwargs, out, WHY, effect="collective", wrap=Collective)
    started = next(item for item in reversed(ctx.operations) if isinstance(item, Collective))
    in_exchange = {ctx.buffers[access.buffer].storage for access in (*reads(started), *writes(started))}
    results = {ctx.buffers[ctx.realise(value.box)].storage for value in flat(values) if isinstance(value, Value)}
    ctx.pending_collectives.append(PendingCollective(in_exchange, results))
    return values


def wait(ctx: Builder, target: Any, tensor: Value) -> Value:
    """The same tensor, which may be used from here on; what no other collective holds is free again."""
    name = buffer_of(ctx, tensor, strided_fake(tensor))
    storage = ctx.buffers[name].storage
    freed: set[str] = set()
    for pending in ctx.pending_collectives:
        if storage in pending.results:
            pending.results.remove(storage)
            freed |= {storage} if pending.results else pending.operands
    ctx.pending_collectives = [each for each in ctx.pending_collectives if each.results]
    for pending in ctx.pending_collectives:
        pending.operands.discard(storage)  # of several results, one that is done
    in_exchange = {each for pending in ctx.pending_collectives for each in pending.operands | pending.results}
    where = torch_api.operator_name(target)
    assert where is not None
    call = Call(where, (Ref(name),), (), (None,), writes=(name,), effect="collective", reason=WHY, origin=ctx.origin)
    ctx.add(Wait(call, tuple(sorted(freed - in_exchange))))
    return tensor


def _begins(overload: Any) -> None:
    @lowers(overload)
    def lower(ctx: Builder, **operands: Any) -> Any:
        names = [each.name for each in torch_operators.schema(overload).arguments]
        keywords = {each.name for each in torch_operators.schema(overload).arguments if each.kwarg_only}
        given = {name: operands["x" if name in ("input", "self") else name] for name in names}
        args = [given[name] for name in names if name not in keywords]
        return begin(ctx, overload, args, {name: given[name] for name in keywords}, ctx.out)


for _name in NAMES.split():
    _found = torch_api.find_operator(f"_c10d_functional.{_name}.default")
    if _found is not None and _found not in LOWERED:
        _begins(_found)

WAIT = torch_api.find_operator("_c10d_functional.wait_tensor.default")
if WAIT is not None:

    @lowers(WAIT)
    def wait_tensor(ctx: Builder, tensor: Value) -> Value:
        return wait(ctx, WAIT, tensor)


# --- in memory that ranks share ---------------------------------------------------------------------------------------


def shared(name: str) -> Any:
    found = torch_api.find_operator(f"symm_mem.{name}.default")
    assert found is not None
    return found


@lowers_later("symm_mem._low_contention_all_gather.default")
def low_contention_all_gather(ctx: Builder, tensor: Value, group_name: str) -> Any:
    return begin(ctx, shared("_low_contention_all_gather"), [tensor, group_name], {}, ctx.out)


@lowers_later("symm_mem._low_contention_reduce_scatter.default")
def low_contention_reduce_scatter(ctx: Builder, tensor: Value, reduce_op: str, group_name: str) -> Any:
    return begin(ctx, shared("_low_contention_reduce_scatter"), [tensor, reduce_op, group_name], {}, ctx.out)


@lowers_later("symm_mem.fused_all_gather_matmul.default")
def fused_all_gather_matmul(ctx: Builder, A: Value, Bs: Any, gather_dim: int, group_name: str, return_A: bool) -> Any:
    """With its products, and over when it returns."""
    given, keywords = [A, Bs, gather_dim, group_name], {"return_A": return_A}
    return eager_call(ctx, shared("fused_all_gather_matmul"), given, keywords, ctx.out, WHY, effect="collective")


@lowers_later("symm_mem.fused_matmul_reduce_scatter.default")
def fused_matmul_reduce_scatter(
    ctx: Builder, A: Value, B: Value, reduce_op: str, scatter_dim: int, group_name: str
) -> Any:
    given = [A, B, reduce_op, scatter_dim, group_name]
    return eager_call(ctx, shared("fused_matmul_reduce_scatter"), given, {}, ctx.out, WHY, effect="collective")
