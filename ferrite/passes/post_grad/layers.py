"""What a node computes, as far as rules about layers ask: the layer in any of its spellings, the post-op behind it.

A layer is `addmm`, `mm`, `linear` or `convolution`, or torch's packed operator of either with the post-op "none". A
post-op is one operator (`gelu`) or what it was taken apart into. In half precision its parts count only if they were
computed in single precision: layer, to float32, parts, back to the layer's own dtype.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import HALVES, fake_value
from ferrite.passes.post_grad import cpu_ops
from ferrite.passes.shared.facts import CASTS, only_cast, transposed
from ferrite.rewrite import Items, Match, Matcher, Pattern, Site, Variable, arguments_of, count_uses, trace_pattern

aten = torch.ops.aten

DTYPES = (torch.float32, torch.float64, *HALVES)
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


# --- layers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A layer and the first arguments of the operators of ours for it; `weight_in` where the weight is [in, out]."""

    kind: str
    node: torch.fx.Node
    arguments: tuple[Any, ...]
    weight_in: bool = False

    def write(self, site: Site) -> tuple[Any, ...]:
        """The arguments, with the weight [out, in]: the transpose before it is read through, or one is written."""
        site.through(self.node)
        if not self.weight_in:
            return self.arguments
        x, weight, *rest = self.arguments
        source = transposed(weight)
        if source is None:
            return (x, site.call(aten.permute.default, weight, [1, 0]), *rest)
        if uses_of(weight) == 1:
            site.through(weight)
        return (x, source, *rest)

    @property
    def inputs(self) -> list[torch.fx.Node]:
        return self.node.all_input_nodes


def layer_of(node: Any) -> Layer | Refusal:
    """The layer that a node is, if it is one that rules may extend."""
    if not isinstance(node, torch.fx.Node) or node.target not in LAYERS:
        return Refusal("no layer stands before it")
    value = fake_value(node)
    if value.dtype not in DTYPES or value.device.type != "cpu":
        return Refusal(f"{node.name} is not of floating-point numbers on a cpu")
    given = arguments_of(node)
    for operand in node.all_input_nodes:
        own = fake_value(operand)
        if not isinstance(own, torch.Tensor) or own.dtype != value.dtype:
            return Refusal(f"an operand of {node.name} has another dtype")
    return LAYERS[node.target](node, given)


def from_addmm(node: torch.fx.Node, given: Mapping[str, Any]) -> Layer | Refusal:
    if given["alpha"] != 1 or given["beta"] != 1:
        return Refusal(f"{node.name} is scaled")
    bias = fake_value(given["self"])
    if bias.ndim != 1 or not torch_api.known_equal(bias.shape[0], fake_value(node).shape[1]):
        return Refusal(f"what {node.name} adds is no row")
    return Layer("linear", node, (given["mat1"], given["mat2"], given["self"], False), True)


def from_mm(node: torch.fx.Node, given: Mapping[str, Any]) -> Layer | Refusal:
    return Layer("linear", node, (given["self"], given["mat2"], None, False), True)


def from_linear(node: torch.fx.Node, given: Mapping[str, Any]) -> Layer | Refusal:
    if fake_value(given["weight"]).ndim != 2:
        return Refusal(f"the weight of {node.name} is no matrix")
    return Layer("linear", node, (given["input"], given["weight"], given["bias"], False))


def from_convolution(node: torch.fx.Node, given: Mapping[str, Any]) -> Layer | Refusal:
    return Layer("convolution", node, (*given.values(), False))


def from_packed_linear(node: torch.fx.Node, given: Mapping[str, Any]) -> Layer | Refusal:
    if given["attr"] != "none":
        return Refusal(f"{node.name} goes on with {given['attr']} already")
    return Layer("linear", node, (given["X"], given["W"], given["B"], True))


def from_packed_convolution(node: torch.fx.Node, given: Mapping[str, Any]) -> Layer | Refusal:
    if given["attr"] != "none":
        return Refusal(f"{node.name} goes on with {given['attr']} already")
    transposed = "output_padding" in given
    output_padding = given["output_padding"] if transposed else [0] * len(given["padding"])
    names = ("X", "W", "B", "stride", "padding", "dilation")
    arguments = (*(given[name] for name in names), transposed, output_padding, given["groups"], True)
    return Layer("convolution", node, arguments)


LAYERS: dict[Any, Callable[[torch.fx.Node, Mapping[str, Any]], Layer | Refusal]] = {
    aten.addmm.default: from_addmm,
    aten.mm.default: from_mm,
    aten.linear.default: from_linear,
    aten.convolution.default: from_convolution,
    cpu_ops.PACKED_LINEAR: from_packed_linear,
    cpu_ops.PACKED_CONVOLUTION: from_packed_convolution,
    cpu_ops.PACKED_TRANSPOSED: from_packed_convolution,
}
LAYERS.pop(None, None)  # what this build of torch does not have


def uses_of(node: torch.fx.Node) -> int:
    return sum(count_uses(user, node) for user in node.users)


# --- post-ops ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PostOpSpelling:
    """One way to write a post-op of y. Constants of the formula are its parameters with defaults; those without are
    scalars of the post-op."""

    attr: str
    formula: Callable[..., Any]
    algorithm: str = ""
    parts: bool = False

    @functools.cached_property
    def pattern(self) -> Pattern:
        return trace_pattern(self.formula)

    @functools.cached_property
    def constants(self) -> dict[str, float]:
        """What the parameters other than y and the scalars must be."""
        parameters = inspect.signature(self.formula).parameters.values()
        return {each.name: each.default for each in parameters if each.default is not each.empty}

    @functools.cached_property
    def scalars(self) -> tuple[str, ...]:
        return tuple(name for name in self.pattern.variables if name != "y" and name not in self.constants)

    @functools.cached_property
    def uses(self) -> int:
        """How often the formula reads y."""
        arguments = [argument for call in self.pattern.calls for _, argument in call.arguments]
        flat = [item for each in arguments for item in (each.items if isinstance(each, Items) else (each,))]
        return flat.count(Variable("y"))


def hardswish_in_steps(y: Any, three: float = 3, zero: float = 0, six: float = 6) -> Any:
    inner = aten.clamp.default(aten.clamp.default(aten.add.Tensor(y, three), zero), None, six)
    return aten.div.Tensor(aten.mul.Tensor(y, inner), six)


def hardswish_by_hardtanh(y: Any, three: float = 3, zero: float = 0, six: float = 6) -> Any:
    return aten.div.Tensor(aten.mul.Tensor(y, aten.hardtanh.default(aten.add.Tensor(y, three), zero, six)), six)


def hardsigmoid_in_steps(y: Any, three: float = 3, zero: float = 0, six: float = 6) -> Any:
    return aten.div.Tensor(aten.clamp.default(aten.clamp.default(aten.add.Tensor(y, three), zero), None, six), six)


def hardsigmoid_by_hardtanh(y: Any, three: float = 3, zero: float = 0, six: float = 6) -> Any:
    return aten.div.Tensor(aten.hardtanh.default(aten.add.Tensor(y, three), zero, six), six)


def gelu_tanh_by_pow(
    y: Any,
    half: float = 0.5,
    three: float = 3,
    cubic: float = 0.044715,
    root: float = 0.7978845608028654,
    one: float = 1,
) -> Any:
    inner = aten.mul.Tensor(aten.add.Tensor(y, aten.mul.Tensor(aten.pow.Tensor_Scalar(y, three), cubic)), root)
    return aten.mul.Tensor(aten.mul.Tensor(y, half), aten.add.Tensor(aten.tanh.default(inner), one))


# Those of one attr and algorithm that have parts agree to the bit, so that one reference stands for all of them.
SPELLINGS = (
    PostOpSpelling("relu", lambda y: aten.relu.default(y)),
    PostOpSpelling("sigmoid", lambda y: aten.sigmoid.default(y)),
    PostOpSpelling("tanh", lambda y: aten.tanh.default(y)),
    PostOpSpelling("hardswish", lambda y: aten.hardswish.default(y)),
    PostOpSpelling("hardsigmoid", lambda y: aten.hardsigmoid.default(y)),
    PostOpSpelling("swish", lambda y: aten.silu.default(y)),
    PostOpSpelling("gelu", lambda y: aten.gelu.default(y), "none"),
    PostOpSpelling("gelu", lambda y: aten.gelu.default(y, approximate="tanh"), "tanh"),
    PostOpSpelling("leaky_relu", lambda y, slope: aten.leaky_relu.default(y, slope)),
    PostOpSpelling("hardtanh", lambda y, low, high: aten.hardtanh.default(y, low, high)),
    PostOpSpelling("hardtanh", lambda y, low, high: aten.clamp.default(y, low, high), "", True),
    PostOpSpelling("swish", cpu_ops.swish_parts, "", True),
    PostOpSpelling("gelu", cpu_ops.gelu_parts, "none", True),
    PostOpSpelling("gelu", cpu_ops.gelu_tanh_parts, "tanh", True),
    PostOpSpelling("gelu", gelu_tanh_by_pow, "tanh", True),
    PostOpSpelling("hardswish", cpu_ops.hardswish_parts, "", True),
    PostOpSpelling("hardswish", hardswish_in_steps, "", True),
    PostOpSpelling("hardswish", hardswish_by_hardtanh, "", True),
    PostOpSpelling("hardsigmoid", cpu_ops.hardsigmoid_parts, "", True),
    PostOpSpelling("hardsigmoid", hardsigmoid_in_steps, "", True),
    PostOpSpelling("hardsigmoid", hardsigmoid_by_hardtanh, "", True),
    PostOpSpelling("leaky_relu", cpu_ops.leaky_relu_parts, "", True),
)
SINGLE_ONLY = ("tanh",)  # in half precision it is not among the post-ops


@dataclass(frozen=True)
class PostOp:
    """A post-op that stands at a node: of which node, through which ones, and how operators of ours are told."""

    of: torch.fx.Node
    through: tuple[torch.fx.Node, ...]
    arguments: tuple[Any, ...]


def post_op_at(node: torch.fx.Node) -> PostOp | Refusal:
    """The post-op whose result a node is."""
    if node.target in CASTS:
        return rounded_post_op(node)
    found = spelled_at(node)
    if isinstance(found, Refusal):
        return found
    spelling, match = found
    y, dtype = match["y"], fake_value(node).dtype
    if dtype in HALVES and (spelling.parts or spelling.attr in SINGLE_ONLY):
        return Refusal(f"{spelling.attr} is computed in half precision")
    arguments = (spelling.attr, scalars_of(spelling, match), spelling.algorithm, spelling.parts, False)
    return PostOp(y, tuple(match.nodes.values()), arguments)


def rounded_post_op(node: torch.fx.Node) -> PostOp | Refusal:
    """A post-op in single precision between two casts of a value in half precision."""
    inner, dtype = only_cast(node), fake_value(node).dtype
    if inner is None or dtype not in HALVES or fake_value(inner).dtype != torch.float32:
        return Refusal("it is no cast from single to half precision")
    if uses_of(inner) != 1:
        return Refusal(f"{inner.name} has another user")
    found = spelled_at(inner)
    if isinstance(found, Refusal):
        return found
    spelling, match = found
    widened = match["y"]
    y = only_cast(widened)
    if y is None or fake_value(y).dtype != dtype:
        return Refusal(f"{widened.name} does not come from the dtype that the result is cast to")
    if spelling.attr in SINGLE_ONLY:
        return Refusal(f"{spelling.attr} of a value in half precision")
    arguments = (spelling.attr, scalars_of(spelling, match), spelling.algorithm, spelling.parts, True)
    return PostOp(y, (node, *match.nodes.values(), widened), arguments)


def spelled_at(node: torch.fx.Node) -> tuple[PostOpSpelling, Match] | Refusal:
    """The first spelling that the node is the end of, and whose operand nobody else reads."""
    refusal = Refusal("it is no post-op")
    for spelling in by_target().get(node.target, ()):
        match = Matcher(spelling.pattern).match(node)
        problem = match if isinstance(match, Refusal) else spelling_problem(spelling, match)
        if problem is None:
            assert isinstance(match, Match)
            return spelling, match
        refusal = problem
    return refusal


def spelling_problem(spelling: PostOpSpelling, match: Match) -> Refusal | None:
    y = match["y"]
    if not isinstance(y, torch.fx.Node) or not isinstance(fake_value(y), torch.Tensor):
        return Refusal("its operand is no tensor")
    for name, wanted in spelling.constants.items():
        if not is_number(match[name]) or match[name] != wanted:
            return Refusal(f"a constant of {spelling.attr} is {match[name]} instead of {wanted}")
    scalars = [match[name] for name in spelling.scalars]
    if not all(map(is_number, scalars)):
        return Refusal(f"a parameter of {spelling.attr} is no number")
    if spelling.attr == "hardtanh" and not scalars[0] <= scalars[1]:
        return Refusal("the lower bound is above the upper one")
    if uses_of(y) != spelling.uses:
        return Refusal(f"{y.name} has another user")
    return None


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def scalars_of(spelling: PostOpSpelling, match: Match) -> list[float]:
    return [float(match[name]) for name in spelling.scalars]


@functools.cache
def by_target() -> dict[Any, list[PostOpSpelling]]:
    found: dict[Any, list[PostOpSpelling]] = {}
    for spelling in SPELLINGS:
        found.setdefault(spelling.pattern.anchor.target, []).append(spelling)
    return found


# What a post-op may end in: `by_target`, and the casts. Stated, because tracing the formulas takes time at import.
POST_OP_TARGETS = (
    *(aten.relu.default, aten.sigmoid.default, aten.tanh.default, aten.hardswish.default, aten.hardsigmoid.default),
    *(aten.silu.default, aten.gelu.default, aten.leaky_relu.default, aten.hardtanh.default, aten.clamp.default),
    *(aten.mul.Tensor, aten.div.Tensor, aten.where.self),
    *CASTS,
)


# --- where a node stands ----------------------------------------------------------------------------------------------

MAX_NODES_SEARCHED = 2000  # nodes: what lies farther back is not looked for


def all_before(nodes: Iterable[torch.fx.Node], layer: torch.fx.Node) -> bool:
    """Whether all of some nodes are ancestors of a layer; False where that would take a long search."""
    wanted, seen = set(nodes), {layer}
    waiting = [layer]
    while waiting and wanted:
        for operand in waiting.pop().all_input_nodes:
            if operand not in seen:
                wanted.discard(operand)
                seen.add(operand)
                waiting.append(operand)
        if len(seen) > MAX_NODES_SEARCHED:
            return False
    return not wanted
