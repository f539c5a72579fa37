"""Write into memory that nobody needs any more, instead of into a copy of it.

    b = zeros(9)                             b = zeros(9)
    c = index_put(b, [i], v)         =>      c = index_put_(b, [i], v)
    return c                                 return c

    y = index_put(x, [i], v)         =>      y = index_put_(x, [i], v)
    copy_(x, y)

    z = auto_functionalized_v2(op, base)     the same node, with a note that `base` needs no copy

`ferrite.passes.post_grad.overwriting` decides what may be overwritten. An operator with a twin that writes becomes the
twin, one on lists only if every member may be overwritten; a write over a view becomes the view and a copy_ into it
(`ferrite.passes.post_grad.view_scatters`); of an operator that torch made functional by copying operands, the node
keeps a note for `decompose_auto_functionalized`, which writes it out. An effect token around any of these stays.

How often an operand could not be overwritten, and how many bytes are copied for that, is among the pass's facts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import (
    VIEW_SCATTERS,
    MetadataUpdater,
    compute,
    fake_value,
    innermost_first,
    leaves,
    schema_of,
    storage_bytes,
)
from ferrite.passes.post_grad.functional_calls import NEEDS_NO_COPY, Called, called
from ferrite.passes.post_grad.higher_order import behind_token, drop_self_copies, inherit, replace_items
from ferrite.passes.post_grad.overwriting import ALREADY_THERE, MemoryUses, storage_of
from ferrite.passes.post_grad.view_scatters import PASS, Materialised, Write, expand, find_writes
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Writer

# The first argument of each is what its twin, which takes the same arguments, writes into.
IN_PLACE = {
    "aten.index_put.default": "aten.index_put_.default",
    "aten._unsafe_index_put.default": "aten.index_put_.default",
    "aten.index_add.default": "aten.index_add_.default",
    "aten.index_copy.default": "aten.index_copy_.default",
    "aten.index_fill.int_Scalar": "aten.index_fill_.int_Scalar",
    "aten.index_fill.int_Tensor": "aten.index_fill_.int_Tensor",
    "aten.index_reduce.default": "aten.index_reduce_.default",
    "aten.masked_scatter.default": "aten.masked_scatter_.default",
    "aten.scatter.src": "aten.scatter_.src",
    "aten.scatter.value": "aten.scatter_.value",
    "aten.scatter.reduce": "aten.scatter_.reduce",
    "aten.scatter.value_reduce": "aten.scatter_.value_reduce",
    "aten.scatter_add.default": "aten.scatter_add_.default",
    "aten.scatter_reduce.two": "aten.scatter_reduce_.two",
    "_c10d_functional.all_reduce.default": "_c10d_functional.all_reduce_.default",
    "_c10d_functional.all_reduce_coalesced.default": "_c10d_functional.all_reduce_coalesced_.default",
    "ferrite.convolution_pointwise_binary.default": "ferrite.convolution_pointwise_binary_.default",
    "ferrite.linear_pointwise_binary.default": "ferrite.linear_pointwise_binary_.default",
}


def twin_of(target: Any) -> Any | None:
    """The operator that takes the same arguments and writes its result into the first of them; None without one."""
    name = torch_api.operator_name(target)
    return named_twin(name) if name is not None else None


@functools.cache
def named_twin(name: str) -> Any | None:
    packet, _, overload = name.rpartition(".")
    other = f"{packet}_.{overload}" if packet.startswith("aten._foreach_") else IN_PLACE.get(name)
    twin = torch_api.find_operator(other) if other is not None else None
    if twin is None:
        return None
    arguments, own = (schema_of(each).arguments for each in (twin, torch_api.find_operator(name)))  # type: ignore[union-attr]
    written = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    alike = [each.name for each in arguments] == [each.name for each in own]
    return twin if alike and written == [arguments[0].name] else None


@graph_pass(stage="post_grad")
def reinplace_inplaceable_ops(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Write into an operand that nobody reads any more, not into a copy of it."""
    return sum(Reinplacing(module, context).run() for module in innermost_first(gm))


class Reinplacing:
    """One graph: decisions first, edits afterwards. So what is known of the memory stays true while it is asked."""

    def __init__(self, gm: torch.fx.GraphModule, context: PassContext) -> None:
        self.gm, self.graph, self.context = gm, gm.graph, context
        self.writes: dict[torch.fx.Node, Write] = {}
        self.count = 0

    def run(self) -> int:
        candidates = [node for node in self.graph.nodes if is_candidate(node)]
        if not candidates or not self.context.fuel.left:
            return 0
        updater = MetadataUpdater(self.graph)
        self.writes, merged = find_writes(self.graph, updater.mode)
        self.done(merged)
        self.memory = MemoryUses(self.graph)
        self.materialised = Materialised(self.graph, self.memory)
        inner = {node for write in self.writes.values() for node in write.absorbed}
        edits: dict[torch.fx.Node, None] = {}
        for node in candidates:
            if self.context.fuel.left and node not in inner and self.decide(node):
                edits[node] = None
        for node in edits:
            self.edit(node, updater.mode)
        for write in self.writes.values():  # what can only be written, and was not: into a copy
            if write.node not in edits and write.always and self.context.fuel.left:
                self.done(expand(write, updater.mode, in_place=False))
        if self.count:
            updater.update()
            drop_self_copies(self.graph)
            self.gm.recompile()
        return self.count

    def done(self, times: int) -> None:
        for _ in range(times):
            self.context.fuel.spend()
            self.context.count(PASS)
        self.count += times

    # --- decisions ----------------------------------------------------------------------------------------------------

    def decide(self, node: torch.fx.Node) -> bool:
        """Whether a node is to be edited."""
        call = called(node)
        if call.wraps:
            kept = frozenset(self.operands_to_keep(node, call))
            if kept != node.meta.get(NEEDS_NO_COPY, frozenset()):
                self.done(len(kept))
            node.meta[NEEDS_NO_COPY] = kept
            return False
        allowed = self.may_write(node) if node in self.writes else self.may_call_twin(node, call)
        self.done(allowed)
        return allowed

    def may_write(self, node: torch.fx.Node) -> bool:
        write = self.writes[node]
        if not self.materialised.pays(write):
            return False
        allowed = self.may_overwrite(node, [(write.base, fake_value(node))], write.reads)
        if allowed:
            self.materialised.written.add(node)
        return allowed

    def may_call_twin(self, node: torch.fx.Node, call: Called) -> bool:
        twin = twin_of(call.operator)
        if twin is None or not call.args or not isinstance(call.args[0], (torch.fx.Node, list, tuple)):
            return False
        one_by_one = all(user.target is operator.getitem for user in node.users)
        if not one_by_one and not (call.token is None and schema_of(twin).returns):  # type: ignore[union-attr]
            return False  # what the twin does not return can only be replaced where it is taken apart
        others = list(leaves((call.args[1:], dict(call.kwargs))))
        pairs = list(zip(leaves(call.args[0]), leaves(call.value), strict=True))
        return bool(pairs) and self.may_overwrite(node, pairs, others)

    def operands_to_keep(self, node: torch.fx.Node, call: Called) -> list[Any]:
        """The operands that a node need not copy. Of several that share memory one at most: the others are copied
        before it is written."""
        copied = call.copied
        # An argument that is written may be given a second time, to be read.
        names = {"_all_bases", *(key for key, _, _ in copied)}
        passed: Any = call.kwargs.get("kwargs", call.kwargs)
        others = [leaf for name, item in passed.items() if name not in names for leaf in leaves(item)]
        found = []
        for key, given, result in copied:
            pairs = list(zip(leaves(given), leaves(result), strict=True))
            pairs = [(operand, new) for operand, new in pairs if isinstance(operand, torch.fx.Node)]
            if pairs and self.may_overwrite(node, pairs, others, whole=True):
                found.append(key)
                others += [operand for operand, _ in pairs]
        return found

    def may_overwrite(
        self, node: torch.fx.Node, pairs: Sequence[tuple[Any, Any]], others: Sequence[Any], *, whole: bool = False
    ) -> bool:
        """Whether a node may write each result into its operand; if so, that is where they live from now on. Operands
        of one list must lie in memory of their own each."""
        taken = self.memory.by_place(others)
        storages = set()
        for operand, result in pairs:
            refusal = self.memory.refusal(node, operand, result, taken, whole=whole)
            if refusal is None and (home := self.memory.root(storage_of(fake_value(operand)))) in storages:
                refusal = Refusal("another operand shares the memory")
            if refusal is not None:
                self.missed([operand for operand, _ in pairs] if refusal is not ALREADY_THERE else [])
                return False
            for place, found in self.memory.by_place([operand]).items():
                taken.setdefault(place, []).extend(found)
            storages.add(home)
        for operand, result in pairs:
            self.memory.settle(result, operand)
        return True

    def missed(self, operands: list[Any]) -> None:
        """Count operands that are copied because they may not be overwritten; the bytes where they are known."""
        for operand in operands:
            size = storage_bytes(fake_value(operand)) if isinstance(operand, torch.fx.Node) else 0
            self.context.facts["operands copied"] += 1
            self.context.facts["bytes copied"] += size if isinstance(size, int) else 0

    # --- edits --------------------------------------------------------------------------------------------------------

    def edit(self, node: torch.fx.Node, mode: Any) -> None:
        if node in self.writes:
            expand(self.writes[node], mode, in_place=True)
            return
        call = called(node)
        twin: Any = twin_of(call.operator)
        if call.token is not None:
            replace_behind_token(node, call, twin, mode)
            return
        node.target = twin
        node.meta["val"], _ = compute(node, mode)
        if not schema_of(twin).returns:  # type: ignore[union-attr]
            replace_items(node, dict(enumerate(leaves(node.args[0]))))


def is_candidate(node: torch.fx.Node) -> bool:
    if node.op != "call_function":
        return False
    call = called(node)
    if call.value is None:
        return False
    return call.wraps or node.target in VIEW_SCATTERS or twin_of(call.operator) is not None


def replace_behind_token(node: torch.fx.Node, call: Called, twin: Any, mode: Any) -> None:
    """Call the twin outside of the token, which is for operators that write nothing; who reads the result reads the
    operand."""
    writer = Writer(node.graph, mode)
    with node.graph.inserting_before(node):
        writer.call(twin, *call.args, **call.kwargs)
        results = behind_token(call, {0: call.args[0]}, writer)
    inherit(writer.made, node, PASS)
    replace_items(node, results)
    node.graph.erase_node(node)
