"""Two FX graphs that must compute the same: everything a caller can observe of them is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from ferrite.graph.values import compute, mode_of
from ferrite.rewrite import difference
from tests.compare import as_bits, assert_no_farther

MakeInputs = Callable[[], list[Any]]


def targets(gm: torch.fx.GraphModule) -> list[Any]:
    """What a graph calls, in order."""
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def target_names(gm: torch.fx.GraphModule) -> list[str]:
    """`aten.add.Tensor` and the like, in order."""
    return [str(target) for target in targets(gm)]


def operators(gm: torch.fx.GraphModule) -> list[str]:
    """The same without the namespace of most: `add.Tensor`."""
    return [str(target).removeprefix("aten.") for target in targets(gm)]


def named(gm: torch.fx.GraphModule) -> dict[str, torch.fx.Node]:
    return {node.name: node for node in gm.graph.nodes}


def traced_with_fakes(fn: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> torch.fx.GraphModule:
    """An aten graph with fake values; `inputs` are real tensors on the cpu or on meta."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(value, static_shapes=not dynamic) for value in inputs]
    with mode:
        return make_fx(fn)(*fakes)


def run(gm: torch.fx.GraphModule, make_inputs: MakeInputs) -> tuple[list[Any], list[Any], set[tuple[int, int]]]:
    """Outputs, inputs after the call, and which pairs of them share storage."""
    torch.manual_seed(0)
    inputs = make_inputs()
    outputs = pytree.tree_leaves(gm(*inputs))
    tensors = [item for item in (*inputs, *outputs) if isinstance(item, torch.Tensor)]
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    pairs = {(i, j) for i, a in enumerate(storages) for j, b in enumerate(storages) if i < j and a == b}
    return outputs, inputs, pairs


def assert_same_computation(
    before: torch.fx.GraphModule, after: torch.fx.GraphModule, make_inputs: MakeInputs, *, exact: bool = False
) -> None:
    """The same values (`exact`: to the bit), looks, places in storages, sharing, and inputs after the call."""
    old, old_inputs, old_pairs = run(before, make_inputs)
    new, new_inputs, new_pairs = run(after, make_inputs)
    assert new_pairs == old_pairs
    for mine, theirs in zip(new_inputs, old_inputs, strict=True):
        same = torch.equal(as_bits(mine), as_bits(theirs)) if isinstance(theirs, torch.Tensor) else mine == theirs
        assert same, "an input was left otherwise"
    assert len(new) == len(old)
    for mine, theirs in zip(new, old, strict=True):
        assert difference(theirs, mine) is None
        if not isinstance(theirs, torch.Tensor):
            continue
        if theirs.layout is torch.strided:
            assert mine.storage_offset() == theirs.storage_offset()
        if theirs.is_meta:
            continue
        if theirs.is_floating_point() and not exact:
            assert_no_farther(mine, theirs, theirs.double(), "result")
        else:
            assert torch.equal(as_bits(mine), as_bits(theirs))


def assert_metadata_is_true(gm: torch.fx.GraphModule) -> None:
    """Running each node again on its operands' fake values gives the fake value it has. Of one that names sizes which
    data decides, torch may find other names: all but these is compared."""
    gm.graph.lint()
    mode = mode_of(gm.graph)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            again, _ = compute(node, mode)
            for left, right in zip(pytree.tree_leaves(node.meta["val"]), pytree.tree_leaves(again), strict=True):
                if node.meta.get("unbacked_bindings") and isinstance(left, torch.Tensor):
                    assert known_looks(left) == known_looks(right), node.format_node()
                else:
                    assert difference(left, right) is None, node.format_node()


def known_looks(value: torch.Tensor) -> tuple[object, ...]:
    """What does not depend on data: a size that does is None."""
    sizes = tuple(size if isinstance(size, int) else None for size in value.shape)
    return value.dtype, value.device, value.layout, sizes
