"""Small patterns of the joint stage around products and indices.

bmm(a, b), a batch of one                    =>      unsqueeze(mm(a[0], b[0]), 0)
index(x, [randperm(n)[:k]])                  =>      _unsafe_index(x, [randperm(n)[:k]])         indices in range
index_add(x, 0, randperm(n)[:k], y)          =>      x with x[i] + y stored at i                 none comes twice
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.passes.shared.cases import on_accelerator, one, uniform
from ferrite.passes.shared.const_scatter import SCATTER_UPON_CONSTANT
from ferrite.passes.shared.constructors import ConstructorMover
from ferrite.passes.shared.converts import CONVERT_RULES
from ferrite.passes.shared.kernel_rules import KernelRules
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import AnyRule, Case, NodeRule, Site, apply_rules, arguments_of

aten, prims = torch.ops.aten, torch.ops.prims
RANDPERM = (aten.randperm.default, aten.randperm.generator)
IOTAS = (aten.arange.default, aten.arange.start, aten.arange.start_step, prims.iota.default)


def one_product(site: Site) -> Any:
    left, right = site.arguments["self"], site.arguments["mat2"]
    value = site.value(left)
    if not torch_api.known_equal(value.shape[0], 1) or not torch_api.known_equal(site.value(right).shape[0], 1):
        return Refusal("the batch is not known to be one")
    if value.device.type == "cpu":
        return Refusal("on a cpu the views cost more than the batch")
    matrices = [site.call(aten.squeeze.dim, item, 0) for item in (left, right)]
    return site.call(aten.unsqueeze.default, site.call(aten.mm.default, *matrices), 0)


def permutation_length(node: Any) -> Any | None:
    """n, if a node is randperm(n) or a part of it; None for any other."""
    while isinstance(node, torch.fx.Node) and node.target is aten.slice.Tensor:
        node = arguments_of(node)["self"]
    if not isinstance(node, torch.fx.Node) or node.target not in RANDPERM:
        return None
    return fake_value(node).shape[0]


def permuted_problem(site: Site, index: Any, dim: int) -> Refusal | None:
    length = permutation_length(index)
    if length is None:
        return Refusal("the index is no random permutation")
    if not torch_api.known_true(length <= site.value(site.arguments["self"]).shape[dim]):
        return Refusal("the permutation may be longer than the dimension")
    return None


def unchecked_index(site: Site) -> Any:
    indices = site.arguments["indices"]
    at = [dim for dim, item in enumerate(indices) if item is not None]
    if len(at) != 1:
        return Refusal("it has more than one index")
    problem = permuted_problem(site, indices[at[0]], at[0])
    if problem:
        return problem
    return site.call(aten._unsafe_index.Tensor, site.arguments["self"], list(indices))


def stored_instead(site: Site) -> Any:
    x, index, added = (site.arguments[name] for name in ("self", "index", "source"))
    value = site.value(x)
    if value.ndim == 0 or site.arguments["alpha"] != 1:
        return Refusal("it has no dimensions, or scales what it adds")
    dim = site.arguments["dim"] % value.ndim
    problem = permuted_problem(site, index, dim)
    if problem:
        return problem
    indices = [None] * dim + [index]
    total = site.call(aten.add.Tensor, site.call(aten._unsafe_index.Tensor, x, indices), added)
    return site.call(aten._unsafe_index_put.default, x, indices, total)


@dataclass
class IotaMover(ConstructorMover):
    """Moves ranges alone, up to what reads them on the accelerator."""

    def is_constructor(self, node: torch.fx.Node) -> bool:
        return node.target in IOTAS and super().is_constructor(node)


def permuted(n: int, dtype: torch.dtype = torch.int64) -> Any:
    return aten.randperm.default(n, dtype=dtype, device=torch.device("cpu"), pin_memory=False)


def added_at(index: Any, dim: int = 0, **scale: Any) -> Any:
    return lambda x, y: aten.index_add.default(x, dim, index(), y, **scale)


BMM_TO_MM = NodeRule(
    name="bmm_to_mm",
    purpose="a batch of one product is a product",
    targets=(aten.bmm.default,),
    rewrite=one_product,
    numerics="rounded",
    examples=(Case("on an accelerator", on_accelerator(aten.bmm.default), uniform((1, 3, 4), (1, 4, 5))),),
    near_misses=(
        Case("a batch of two", on_accelerator(aten.bmm.default), uniform((2, 3, 4), (2, 4, 5))),
        Case("on a cpu", aten.bmm.default, uniform((1, 3, 4), (1, 4, 5))),
    ),
)

RANDPERM_INDEX = NodeRule(
    name="randperm_index",
    purpose="reading by a random permutation needs no check of the range",
    targets=(aten.index.Tensor,),
    rewrite=unchecked_index,
    examples=(
        Case("part of it", lambda x: aten.index.Tensor(x, [permuted(6)[:3]]), one(6, 2)),
        Case("all of it, other columns", lambda x: aten.index.Tensor(x, [None, permuted(2)]), one(6, 2)),
        Case("fewer than there are", lambda x: aten.index.Tensor(x, [permuted(4)]), one(6, 2)),
    ),
    near_misses=(
        Case("more than there are", lambda x: aten.index.Tensor(x, [permuted(7)[:3] % 6]), one(6, 2)),
        Case("longer", lambda x: aten.index.Tensor(x, [permuted(6)[:0]]), one(5, 2)),
        Case("not a permutation", lambda x: aten.index.Tensor(x, [torch.randint(6, (3,))]), one(6, 2)),
        Case("two indices", lambda x: aten.index.Tensor(x, [permuted(2), permuted(2)]), one(6, 2)),
    ),
)

RANDPERM_INDEX_ADD = NodeRule(
    name="randperm_index_add",
    purpose="adding at the places of a random permutation stores each sum once",
    targets=(aten.index_add.default,),
    rewrite=stored_instead,
    examples=(
        Case("rows", added_at(lambda: permuted(6)[:3]), uniform((6, 2), (3, 2))),
        Case("columns", added_at(lambda: permuted(2), -1), uniform((6, 2), (6, 2))),
    ),
    near_misses=(
        Case("scaled", added_at(lambda: permuted(6)[:3], alpha=2), uniform((6, 2), (3, 2))),
        Case("places that come twice", added_at(lambda: torch.tensor([1, 1, 2])), uniform((6, 2), (3, 2))),
        Case("longer", added_at(lambda: permuted(7)[:0]), uniform((6, 2), (0, 2))),
    ),
)

PATTERN_RULES: tuple[AnyRule, ...] = (*CONVERT_RULES, BMM_TO_MM)
# An index that is not checked costs a kernel less on any device. Stores instead of atomic additions, and selections
# instead of stores, pay on a GPU: on two cores of a CPU they took 1.7 and 2.4 times as long as the scatter.
KERNEL_RULES = KernelRules(everywhere=(RANDPERM_INDEX,), accelerators=(SCATTER_UPON_CONSTANT, RANDPERM_INDEX_ADD))


@graph_pass(stage="joint", rules=(*PATTERN_RULES, *KERNEL_RULES.all))
def joint_patterns(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Small patterns: detours of conversions, batches of one, permutations; scatters where GPUs have kernels."""
    return apply_rules(gm, (*PATTERN_RULES, *KERNEL_RULES.wanted(context.options)), context)


@graph_pass(stage="joint")
def fix_iota_device(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Ranges made on the CPU that only index on an accelerator are made there."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return move_iotas(gm.graph, found.type) if found is not None else 0


def move_iotas(graph: torch.fx.Graph, target: str) -> int:
    """Move ranges to the one device of a type that a graph uses; how many moved."""
    return IotaMover(target)(graph)
