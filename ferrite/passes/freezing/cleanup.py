"""What is done before folding: equal calls become one, and casts to the type a value has are left out."""

from __future__ import annotations

import torch

from ferrite.passes.shared.equal_calls import EQUAL_CALLS, one_of_equal_calls
from ferrite.passes.shared.noops import NOOP_RULES, dtype_already, source_of
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

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


merge_equal_calls = graph_pass(one_of_equal_calls, stage="freeze", name=EQUAL_CALLS)
