"""Calls that give back what they are given: use the operand itself.

    h = dropout(x, 0.5, train=False); y = relu(h)      =>      y = relu(x)

Some return their operand (`to`, `contiguous`, dropout in eval mode), some a view of it, some a copy. The engine sees to
it that nobody can tell: copies stay where either side is written later or returned, views where they are returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ferrite.errors import Refusal
from ferrite.graph import same_number, storages_of
from ferrite.passes.pre_grad.modules import called_module
from ferrite.passes.pre_grad.predicates import is_plain, requires_grad
from ferrite.passes.pre_grad.reshapes import RESTORED
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.passes.shared.cases import floats
from ferrite.passes.shared.noops import always, is_written_contiguous, on_integers
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

aten = torch.ops.aten
Number = int | float


def operand_if(holds: Callable[[Site], bool], otherwise: str) -> Callable[[Site], Any]:
    """A rewrite to the first operand, where a condition holds."""

    def rewrite(site: Site) -> Any:
        source = next(iter(site.arguments.values()))
        if not isinstance(source, torch.fx.Node) or not is_plain(site.value(source)):
            return Refusal("it is not given an ordinary tensor")
        return source if holds(site) else Refusal(otherwise)

    return rewrite


def returns_operand(site: Site) -> bool:
    """The metadata says whether something was copied; the engine compares the looks."""
    (source, *_) = site.node.all_input_nodes
    return storages_of(site.node) == storages_of(source)


def is_number(value: Any, wanted: Number) -> bool:
    return type(value) in (int, float) and value == wanted and math.copysign(1, value) == math.copysign(1, wanted)


def adds_nothing(site: Site) -> bool:
    """Among floats, -0.0 + 0 is 0.0, which is another number; x - 0 is x."""
    value, alpha = site.value(site.arguments["self"]), site.arguments["alpha"]
    real = not value.is_complex() and (site.node.target is aten.sub.Tensor or not value.is_floating_point())
    return real and is_number(site.arguments["other"], 0) and is_number(alpha, 1) and has_sure_strides(site)


def scales_by_one(site: Site) -> bool:
    value = site.value(site.arguments["self"])
    return not value.is_complex() and is_number(site.arguments["other"], 1) and has_sure_strides(site)


def has_sure_strides(site: Site) -> bool:
    """Whether metadata can be trusted to tell an operand's strides from those of a result of arithmetic on it. Without
    elements, and along a dimension of one of what is not contiguous, they are not eager's yet: that is seen to later.
    So they are where the operand was made of such a tensor."""
    source = site.arguments["self"]
    found = [site.value(each) for each in (source, *source.all_input_nodes)]
    tensors = [each for each in found if isinstance(each, torch.Tensor) and is_plain(each)]
    return not any(same_number(size, 0) for size in tensors[0].shape) and all(map(is_written_out, tensors))


def is_written_out(value: torch.Tensor) -> bool:
    """Whether a tensor has no dimension of one, or the strides of a contiguous one along these, too."""
    return not any(same_number(size, 1) for size in value.shape) or is_written_contiguous(value)


def all_ones(name: str) -> Callable[[Site], bool]:
    return lambda site: all(type(item) is int and item == 1 for item in site.arguments[name])


def keeps_dimensions(site: Site) -> bool:
    arguments = site.arguments
    if site.node.target is aten.transpose.int:
        return bool(arguments["dim0"] == arguments["dim1"])
    return list(arguments["dims"]) == sorted(arguments["dims"])


def whole_stretch(site: Site) -> bool:
    """From the first to the last; the engine compares the shapes, which tells the end."""
    start = site.arguments["start"]
    return (start is None or (type(start) is int and start == 0)) and site.arguments.get("step", 1) == 1


def one_operand(site: Site) -> Any:
    tensors = site.arguments["tensors"]
    if not isinstance(tensors, (list, tuple)) or len(tensors) != 1:
        return Refusal("it concatenates several tensors")
    return tensors[0] if is_plain(site.value(tensors[0])) else Refusal("it is not given an ordinary tensor")


def no_gradient(site: Site) -> bool:
    return requires_grad(site.arguments["self"]) is False


def twice(site: Site) -> Any:
    inner = site.arguments["self"]
    if not isinstance(inner, torch.fx.Node) or inner.target is not site.node.target:
        return Refusal("it is not done twice")
    if site.node.target is aten.relu.default:
        return inner
    if site.node.target is aten.logical_not.default and site.value(inner.args[0]).dtype is not torch.bool:
        return Refusal("the operand is no truth value")
    site.through(inner)
    return inner.args[0]


def ints(*shape: int) -> Callable[[], list[Any]]:
    return lambda: [torch.arange(math.prod(shape)).reshape(shape) - 2]


def written_clone(x: Any) -> Any:
    y = x.clone()
    y.add_(1)
    return x * y


def clone_of_written(x: Any) -> Any:
    y = x.sin()
    z = y.clone()
    y.add_(1)
    return y * z


def case(label: str, function: Callable[..., Any], make: Callable[[], list[Any]] = floats(2, 3)) -> Case:  # noqa: B008
    return Case(label, function, make)


F = torch.nn.functional
DONE_TWICE = NodeRule(
    name="done_twice",
    purpose="relu twice is relu once; neg twice, not twice are the operand",
    targets=(aten.relu.default, aten.neg.default, aten.logical_not.default, aten.bitwise_not.default),
    rewrite=twice,
    examples=(
        case("relu", lambda x: x.relu().relu() + 1),
        case("relu, the first read elsewhere", lambda x: (lambda y: y.relu() + y)(x.relu())),
        case("neg", lambda x: torch.neg(-x) + 1),
        case("not", lambda x: torch.logical_not(torch.logical_not(x > 0)) | (x > 1)),
        case("invert", lambda x: ~(~x) + 1, ints(3)),
    ),
    near_misses=(
        case("neg of relu", lambda x: -x.relu() + 1),
        case("not of numbers", lambda x: x.logical_not().logical_not() | (x > 1)),
        case("neg twice, returned", lambda x: torch.neg(-x)),
    ),
    layout="free",
)

NOOPS = (
    NodeRule(
        name="dropout_of_nothing",
        purpose="dropout that drops nothing is its operand",
        targets=(
            *(aten.dropout.default, aten.alpha_dropout.default),
            *(aten.feature_dropout.default, aten.feature_alpha_dropout.default),
        ),
        rewrite=operand_if(returns_operand, "it drops"),
        examples=(
            case("eval mode", lambda x: F.dropout(x, 0.5, training=False) + 1),
            case("nothing dropped", lambda x: F.dropout(x, 0.0, True) + 1),
            case("alpha_dropout", lambda x: F.alpha_dropout(x, 0.5) + 1),
            case("dropout2d", lambda x: F.dropout2d(x, 0.5, training=False) + 1, floats(2, 2, 2, 2)),
        ),
        near_misses=(
            case("training", lambda x: F.dropout(x, 0.5, True) + 1),
            case("the input returned", lambda x: F.dropout(x, 0.5, False)),
            case("one image with a gradient", lambda x: F.dropout2d(x, 0.5, training=False) + 1, floats(1, 2, 2, 2)),
        ),
    ),
    NodeRule(
        name="conversion_to_itself",
        purpose="converting to what it is already is the operand",
        targets=(
            *(aten.to.dtype, aten.to.device, aten.to.other, aten.to.dtype_layout),
            *(aten.type_as.default, aten.contiguous.default),
        ),
        rewrite=operand_if(returns_operand, "it converts, or copies"),
        examples=(
            case("to", lambda x: x.to(torch.float32) + 1),
            case("float", lambda x: x.float() + 1),
            case("to a device", lambda x: x.to("cpu") + 1),
            case("type_as", lambda x: x.sin().type_as(x) + 1),
            case("contiguous", lambda x: x.contiguous() + 1),
            case("contiguous, then written", lambda x: x.sin().contiguous().add_(1)),
        ),
        near_misses=(
            case("told to copy", lambda x: x.to(torch.float32, copy=True) + 1),
            case("another dtype", lambda x: x.double() + 1),
            case("contiguous of a transposed one", lambda x: x.t().contiguous() + 1),
        ),
    ),
    NodeRule(
        name="expand_to_itself",
        purpose="expanding to the shape it has is the operand",
        targets=(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default),
        rewrite=operand_if(always, ""),
        examples=(
            case("expand", lambda x: x.expand(2, -1) + 1),
            case("expand_as", lambda x: x.expand_as(x) + 1),
            case("broadcast_to", lambda x: torch.broadcast_to(x, (2, 3)) + 1),
        ),
        near_misses=(
            case("a new dimension", lambda x: x.expand(1, 2, 3) + 1),
            case("returned", lambda x: x.expand(2, 3)),
        ),
    ),
    NodeRule(
        name="permute_to_itself",
        purpose="dimensions in the order they have are the operand",
        targets=(aten.permute.default, aten.transpose.int),
        rewrite=operand_if(keeps_dimensions, "the dimensions move"),
        examples=(
            case("permute", lambda x: x.permute(0, 1) + 1),
            case("transpose", lambda x: x.transpose(1, -1) + 1),
        ),
        near_misses=(
            case("they move", lambda x: x.permute(1, 0) + 1, floats(2, 2)),
            case("returned", lambda x: x.transpose(0, 0)),
        ),
    ),
    NodeRule(
        name="repeat_once",
        purpose="repeating once is the operand",
        targets=(aten.repeat.default, aten.tile.default),
        rewrite=lambda site: operand_if(all_ones(list(site.arguments)[1]), "it repeats")(site),
        examples=(case("repeat", lambda x: x.repeat(1, 1) + 1), case("tile", lambda x: x.tile((1,)) + 1)),
        near_misses=(
            case("twice", lambda x: x.repeat(1, 2) + 1),
            case("a new dimension", lambda x: x.repeat(1, 1, 1) + 1),
            case("returned", lambda x: x.repeat(1, 1)),
        ),
    ),
    NodeRule(
        name="whole_slice",
        purpose="all of a tensor is that tensor",
        targets=(aten.slice.Tensor, aten.narrow.default),
        rewrite=operand_if(whole_stretch, "it starts later"),
        examples=(
            case("x[:]", lambda x: x[:] + 1),
            case("bounds given", lambda x: x[:, 0:3] + 1),
            case("narrow", lambda x: x.narrow(1, 0, 3) + 1),
        ),
        near_misses=(
            case("it ends earlier", lambda x: x[:1] + 1),
            case("it starts later", lambda x: x.narrow(1, 1, 2) + 1),
            case("returned", lambda x: x[:]),
        ),
    ),
    NodeRule(
        name="cat_of_one",
        purpose="the concat of one tensor is that tensor",
        targets=(aten.cat.default,),
        rewrite=one_operand,
        examples=(case("one", lambda x: torch.cat([x], 1) + 1),),
        near_misses=(
            case("two", lambda x: torch.cat([x, x], 1) + 1),
            case("returned", lambda x: torch.cat([x], 1)),
        ),
        layout="free",
    ),
    NodeRule(
        name="plus_nothing",
        purpose="x - 0, and x + 0 among integers, are x",
        targets=(aten.add.Tensor, aten.sub.Tensor),
        rewrite=operand_if(adds_nothing, "it adds something"),
        examples=(
            case("x - 0", lambda x: (x - 0).sin()),
            case("integers", lambda x: (x + 0) * 2, ints(3)),
            case("0 + x", lambda x: (0 + x) * 2, ints(3)),
        ),
        near_misses=(
            case("-0.0 + 0 is 0.0", lambda x: (x + 0).sin()),
            case("-0.0 - -0.0 is 0.0", lambda x: (x - (-0.0)).sin()),
            case("it promotes", lambda x: (x - 0.0) * 2, ints(3)),
            case("something", lambda x: (x - 1).sin()),
            case("without elements", lambda x: (x.abs() - 0).sin(), floats(0, 1, 3)),
        ),
        layout="free",
    ),
    NodeRule(
        name="times_one",
        purpose="x * 1 and x / 1 are x",
        targets=(aten.mul.Tensor, aten.div.Tensor),
        rewrite=operand_if(scales_by_one, "it scales"),
        examples=(
            case("x * 1", lambda x: (x * 1).sin()),
            case("x / 1.0", lambda x: (x / 1.0).sin()),
            case("1 * x", lambda x: (1 * x) + 2, ints(3)),
        ),
        near_misses=(
            case("x * 0", lambda x: (x * 0).sin()),
            case("integers divided", lambda x: (x / 1) + 1, ints(3)),
            case("times True", lambda x: (x * True).sin()),
            case("a dimension of one", lambda x: (x[:1].abs() * 1).sin(), lambda: [torch.randn(3, 2).t()]),
            case("truth values become numbers", lambda x: ((x > 0) * 1) + 1),
            case("returned", lambda x: x * 1),
        ),
        layout="free",
    ),
    NodeRule(
        name="whole_numbers",
        purpose="integers are whole and finite already",
        targets=(
            *(aten.nan_to_num.default, aten.floor.default, aten.ceil.default, aten.trunc.default),
            aten.round.default,
        ),
        rewrite=operand_if(on_integers, "it is given no integers"),
        examples=(
            case("nan_to_num", lambda x: torch.nan_to_num(x, 3.0) + 1, ints(3)),
            case("round", lambda x: x.round() + 1, ints(3)),
        ),
        near_misses=(case("floats", lambda x: torch.nan_to_num(x) + 1), case("returned", torch.floor, ints(3))),
        layout="free",
    ),
    DONE_TWICE,
    NodeRule(
        name="needless_clone",
        purpose="a copy of what nobody changes is the operand",
        targets=(aten.clone.default,),
        rewrite=operand_if(always, ""),
        examples=(case("clone", lambda x: x.clone() + 1), case("of a transposed one", lambda x: x.t().clone() + 1)),
        near_misses=(
            case("the copy is written", written_clone),
            case("the original is written", clone_of_written),
            case("returned", torch.clone),
            case(
                "another format",
                lambda x: x.clone(memory_format=torch.channels_last).relu(),
                floats(1, 2, 2, 2),
            ),
        ),
    ),
    NodeRule(
        name="needless_detach",
        purpose="what has no gradient needs no detaching",
        targets=(aten.detach.default,),
        rewrite=operand_if(no_gradient, "it may cut a gradient off"),
        examples=(
            case("an input without", lambda x: x.detach() * 2, lambda: [torch.rand(3)]),
            case("a truth value", lambda x: (x > 0).detach() * x),
        ),
        near_misses=(
            case("it cuts", lambda x: x.detach() * x),
            case("further down", lambda x: x.sin().exp().detach() * x),
            case("returned", torch.detach, lambda: [torch.rand(3)]),
        ),
    ),
    RESTORED,
)


@pre_grad_pass(rules=NOOPS)
def remove_noop_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Calls that give back what they are given are replaced by it."""
    return apply_rules(gm, NOOPS, context)


@pre_grad_pass
def remove_identity(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Calls of nn.Identity are replaced by their operand: eager returns that very tensor."""
    removed: set[str] = set()
    count = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_module" or type(called_module(gm, node)) is not nn.Identity:
            continue
        (operand,) = node.all_input_nodes
        node.replace_all_uses_with(operand)
        removed.add(str(node.target))
        gm.graph.erase_node(node)
        count += 1
    for target in removed:
        drop_module(gm, target)
    return count


def drop_module(gm: torch.fx.GraphModule, target: str) -> None:
    """Forget a module that no node calls; never inside a module that is the user's."""
    used = {str(node.target) for node in gm.graph.nodes if node.op in ("call_module", "get_attr")}
    if any(name == target or name.startswith(f"{target}.") for name in used):
        return
    path, _, name = target.rpartition(".")
    parent = gm.get_submodule(path)
    if parent is gm or type(parent) is nn.Module:  # the containers that FX makes have no type of their own
        delattr(parent, name)
