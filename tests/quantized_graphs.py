"""Trace a function on integers, run the pass for them, and compare with eager to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ferrite.graph.values import compute, mode_of
from ferrite.graph.verify import Snapshot, verify_graph
from ferrite.options import Options
from ferrite.passes.post_grad import quantized_fusion
from ferrite.pipeline import PassContext
from tests.compare import as_bits
from tests.graphs import target_names


def trace(function: Any, inputs: list[Any], mode: str = "fake") -> torch.fx.GraphModule:
    """Tensors that the function holds itself become constants of the module."""
    gm = make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"], _ = compute(node, mode_of(gm.graph))
    return gm


def assert_fused(
    function: Any, inputs: list[Any], rules: dict[str, int], mode: str = "fake", exact: bool = True
) -> Any:
    """Trace, run the pass, compare to the bit, run it again."""
    before, after = trace(function, inputs, mode), trace(function, inputs, mode)  # packed weights cannot be copied
    snapshot = Snapshot.of(after)
    own = PassContext(Options(strict=True, kernel_rewrites="always"))
    quantized_fusion.function(after, own)
    assert dict(own.rewrites) == rules, target_names(after)
    verify_graph(after, snapshot, deep=True)
    mine, theirs = (pytree.tree_leaves(each(*inputs)) for each in (after, before))
    for left, right in zip(mine, theirs, strict=True):
        assert (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
        assert not exact or torch.equal(as_bits(left), as_bits(right))
    assert quantized_fusion.function(after, own) == 0
    return after
