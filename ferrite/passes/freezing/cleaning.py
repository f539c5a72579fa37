"""What is done before folding: equal calls become one, and casts to the type a value has are left out."""

from __future__ import annotations

import operator
from collections.abc import Hashable

import torch

from ferrite.graph.aliases import storages_of
from ferrite.graph.facts import attribute_of, stream_of
from ferrite.graph.regions import Regions, has_effect, is_random
from ferrite.graph.values import fingerprint
from ferrite.passes.freezing.constants import KNOWN_NAMESPACES, namespace_of
from ferrite.passes.post_grad.noops import NOOP_RULES, dtype_already, source_of
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Case, NodeRule, Site, apply_rules
from ferrite.rewrite.visible import Sharing

aten = torch.ops.aten
ELSEWHERE = ("layout", "device", "pin_memory", "memory_format")  # other reasons for a copy than its type


def only_the_type(site: Site) -> bool:
    return dtype_already(site) and all(site.arguments[name] is None for name in ELSEWHERE)


TO_COPY = NodeRule(
    name="to_copy_noop",
    purpose="a copy in the type that a value has is the value",
    targets=(aten._to_copy.default,),
    rewrite=source_of("self", only_the_type, "it changes more than nothing"),
    examples=(Case("same", lambda x: aten._to_copy.default(x, dtype=torch.float32) + 1, lambda: [torch.rand(4)]),),
    near_misses=(
        Case("wider", lambda x: aten._to_copy.default(x, dtype=torch.float64) + 1, lambda: [torch.rand(4)]),
        Case("returned", lambda x: aten._to_copy.default(x, dtype=torch.float32), lambda: [torch.rand(4)]),
    ),
)
CAST_RULES = (TO_COPY, *(rule for rule in NOOP_RULES if rule.name == "convert_element_type_noop"))


@graph_pass(stage="freeze", rules=CAST_RULES)
def remove_same_casts(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Casts to the type that a value has are left out."""
    return apply_rules(gm, CAST_RULES, context)


@graph_pass(stage="freeze")
def merge_equal_calls(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Calls that are given the same compute the same: one of them is enough."""
    regions, visible = Regions(gm.graph), Sharing(gm.graph)
    known: dict[Hashable, torch.fx.Node] = {}
    count = 0
    for node in list(gm.graph.nodes):
        if not can_be_merged(node) or not context.fuel.left:
            continue
        first = known.setdefault((fingerprint(node), regions.of(node), str(stream_of(node))), node)
        seen = any(place in visible.readers or place in visible.written for place in storages_of(node))
        if first is node or seen:
            continue
        node.replace_all_uses_with(first)
        gm.graph.erase_node(node)
        context.fuel.spend()
        context.count("merge_equal_calls")
        count += 1
    return count


def can_be_merged(node: torch.fx.Node) -> bool:
    if node.op == "get_attr":
        return isinstance(attribute_of(node), torch.Tensor)
    if node.op != "call_function" or node.meta.get("unbacked_bindings"):
        return False
    known = node.target is operator.getitem or namespace_of(node) in KNOWN_NAMESPACES
    return known and not has_effect(node) and not is_random(node)
