"""Linear layers that read one and the same tensor become one call, on the CPU. Off unless asked for.

    y0 = packed_linear(x, w0, b0)               g = grouped_linear(x, [w0, w1], [b0, b1])
    y1 = packed_linear(x, w1, b1)       =>      y0 = g[0];  y1 = g[1]

    y0 = addmm(b0, x, w0)                       g = grouped_linear(x, [w0.t(), w1.t()], [b0, None])
    y1 = mm(x, w1)                      =>      y0 = g[0];  y1 = g[1]

    y0 = int4_linear(x, w0, group, s0)          y = int4_linear(x, w01, group, s01)
    y1 = int4_linear(x, w1, group, s1)  =>      y0, y1 = map(clone, split(y, [n0, n1], 1))

In the third, w01 and s01 are new constants: the rows of both weights, packed again, and the scales of both. Only
layers that are all that reads x are taken: otherwise x is read again anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import Regions, attribute_of, fake_value, mode_of, model_line
from ferrite.passes.post_grad import operators
from ferrite.passes.post_grad.batch_fusion import PRODUCTS
from ferrite.passes.shared.constants import constant_of
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import INHERITED, Writer, arguments_of, difference

aten = torch.ops.aten

INT4_LINEAR = aten._weight_int4pack_mm_for_cpu.default
PACK_INT4 = aten._convert_weight_to_int4pack_for_cpu.default
INNER_TILES = 2  # asked for by the packing operator, which packs the same for every value on the CPU
ZERO_OF_INT4 = 8  # the packed number that stands for zero


OperandNames = Mapping[Any, tuple[str, str]]  # for each operator, the names of what it reads and of its weight
Write = Callable[[Writer, torch.fx.Node, Sequence[torch.fx.Node]], list[torch.fx.Node]]
Problem = Callable[[torch.fx.Node, Sequence[torch.fx.Node]], Refusal | None]


@graph_pass(stage="post_grad")
def grouped_gemm_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Linear layers on one input, packed or not, become one grouped call."""
    options = context.options
    if not (options.cpu_grouped_gemm and options.max_autotune):
        return 0
    total = SharedOperandMerge(gm, context, "grouped_gemm_pass", PRODUCTS).run(plain_problem, write_grouped_products)
    if operators.PACKED_LINEAR is not None:
        packed = {operators.PACKED_LINEAR: ("X", "W")}
        total += SharedOperandMerge(gm, context, "grouped_gemm_pass", packed).run(packed_problem, write_grouped)
    return total


@graph_pass(stage="post_grad")
def concat_linear_woq_int4(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Linear layers with constant int4 weights on one input become one layer with the rows of all."""
    # A kernel may add up the columns of a wider weight in another order.
    if not context.options.cpu_concat_linear or context.options.numerics == "strict":
        return 0
    merge = SharedOperandMerge(gm, context, "concat_linear_woq_int4", {INT4_LINEAR: ("self", "mat2")})
    return merge.run(int4_problem, write_concatenated)


# --- packed layers ----------------------------------------------------------------------------------------------------


def packed_problem(x: torch.fx.Node, members: Sequence[torch.fx.Node]) -> Refusal | None:
    arguments = [arguments_of(member) for member in members]
    first = fake_value(arguments[0]["W"])
    for given in arguments:
        weight, bias = fake_value(given["W"]), given["B"]
        if given["attr"] != "none":
            return Refusal(f"a layer goes on with {given['attr']}")
        if weight.dtype != first.dtype or not all(map(torch_api.known_equal, weight.shape, first.shape)):
            return Refusal("the weights do not provably look alike")
        if bias is not None and fake_value(bias).device.type != "cpu":
            return Refusal("a bias is not on the CPU")
    return None


def write_grouped(writer: Writer, x: torch.fx.Node, members: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    arguments = [arguments_of(member) for member in members]
    weights, biases = [given["W"] for given in arguments], [given["B"] for given in arguments]
    group = writer.call(torch.ops.ferrite.grouped_linear.default, x, weights, biases)
    return [writer.call(operator.getitem, group, index) for index in range(len(members))]


# --- layers as products -----------------------------------------------------------------------------------------------


def plain_problem(x: torch.fx.Node, members: Sequence[torch.fx.Node]) -> Refusal | None:
    first = fake_value(arguments_of(members[0])["mat2"])
    for member in members:
        given = arguments_of(member)
        weight, bias = fake_value(given["mat2"]), bias_of(member)
        if not all(map(torch_api.known_equal, weight.shape, first.shape)):
            return Refusal("the weights do not provably look alike")
        if bias is None:
            continue
        if given["beta"] != 1 or given["alpha"] != 1:
            return Refusal("a layer is scaled")
        row = fake_value(bias)
        if row.device.type != "cpu" or row.ndim != 1 or not torch_api.known_equal(row.shape[0], weight.shape[1]):
            return Refusal("a bias is no row on the CPU")
    return None


def bias_of(member: torch.fx.Node) -> torch.fx.Node | None:
    found: torch.fx.Node | None = arguments_of(member)["self"] if member.target is aten.addmm.default else None
    return found


def write_grouped_products(writer: Writer, x: torch.fx.Node, members: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    weights = [writer.call(aten.permute.default, arguments_of(member)["mat2"], [1, 0]) for member in members]
    biases = [bias_of(member) for member in members]
    group = writer.call(torch.ops.ferrite.grouped_linear.default, x, weights, biases, False)
    return [writer.call(operator.getitem, group, index) for index in range(len(members))]


# --- int4 layers ------------------------------------------------------------------------------------------------------


def int4_problem(x: torch.fx.Node, members: Sequence[torch.fx.Node]) -> Refusal | None:
    arguments = [arguments_of(member) for member in members]
    for given in arguments:
        if any(constant(given[name]) is None for name in ("mat2", "qScaleAndZeros")):
            return Refusal("a weight or its scales are no constants")
        if given["qGroupSize"] != arguments[0]["qGroupSize"]:
            return Refusal("the groups of the scales have different sizes")
        if fake_value(given["mat2"]).shape[1] != fake_value(arguments[0]["mat2"]).shape[1]:
            return Refusal("the weights take different numbers of features")
        if fake_value(given["qScaleAndZeros"]).dtype != fake_value(arguments[0]["qScaleAndZeros"]).dtype:
            return Refusal("the scales have different dtypes")
    return None


def constant(item: Any) -> torch.Tensor | None:
    """The tensor behind a node that reads one from the module."""
    return constant_of(item) if isinstance(item, torch.fx.Node) and item.op == "get_attr" else None


def unpacked(weight: torch.Tensor, group: int) -> torch.Tensor:
    """The numbers 0 to 15 that a weight packs, [out, in]: the identity times the weight with scale 1 and the zero that
    cancels the shift. They are small integers, so the product is exact."""
    rows, features = weight.shape[0], 2 * weight.shape[1]
    scale_and_zero = torch.tensor([1.0, float(ZERO_OF_INT4)]).expand(features // group, rows, 2).contiguous()
    columns: torch.Tensor = INT4_LINEAR(torch.eye(features), weight, group, scale_and_zero)
    return columns.t().round().to(torch.int32)


def write_concatenated(writer: Writer, x: torch.fx.Node, members: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    arguments = [arguments_of(member) for member in members]
    group = arguments[0]["qGroupSize"]
    with torch.no_grad():
        rows = torch.cat([unpacked(attribute_of(given["mat2"]), group) for given in arguments])  # type: ignore[arg-type]
        scales = torch.cat([attribute_of(given["qScaleAndZeros"]) for given in arguments], dim=1)  # type: ignore[misc]
        packed = PACK_INT4(rows.contiguous(), INNER_TILES)
    weight = writer.constant("int4_weight", packed)
    scale = writer.constant("int4_scales", scales.contiguous())
    whole = writer.call(INT4_LINEAR, x, weight, group, scale)
    sizes = [fake_value(member).shape[1] for member in members]
    parts = writer.call(aten.split_with_sizes.default, whole, sizes, 1)
    items = [writer.call(operator.getitem, parts, index) for index in range(len(members))]
    # A copy each: they were tensors of their own, with rows behind each other.
    return [writer.call(aten.clone.default, item, memory_format=torch.contiguous_format) for item in items]


# --- both -------------------------------------------------------------------------------------------------------------


class SharedOperandMerge:
    """Finds groups of calls of some operators that read one tensor, and puts one call in their place."""

    def __init__(self, gm: torch.fx.GraphModule, context: PassContext, name: str, operands: OperandNames) -> None:
        self.gm, self.context, self.name, self.operands = gm, context, name, operands
        self.regions, self.mode = Regions(gm.graph), mode_of(gm.graph)

    def run(self, problem: Problem, write: Write) -> int:
        total = 0
        for x, members in list(self.groups()):
            if not self.context.fuel.left:
                break
            refusal = self.common_problem(x, members) or problem(x, members)
            if (refusal or self.replace(x, members, write)) is not None:
                continue
            self.context.fuel.spend()
            self.context.count(self.name)
            total += 1
        if total:
            self.gm.recompile()
        return total

    def groups(self) -> Iterator[tuple[torch.fx.Node, list[torch.fx.Node]]]:
        """Tensors that two such calls or more read. Linear: each call reads one."""
        for x in self.gm.graph.nodes:
            members = [user for user in x.users if self.reads(user, x)]
            if len(members) > 1:
                yield x, sorted(members)

    def reads(self, node: torch.fx.Node, x: torch.fx.Node) -> bool:
        return node.target in self.operands and arguments_of(node)[self.operands[node.target][0]] is x

    def weight_of(self, member: torch.fx.Node) -> torch.fx.Node:
        found: torch.fx.Node = arguments_of(member)[self.operands[member.target][1]]
        return found

    def common_problem(self, x: torch.fx.Node, members: Sequence[torch.fx.Node]) -> Refusal | None:
        if len(members) != len(x.users):
            return Refusal(f"{x.name} has another user")
        weights = [self.weight_of(member) for member in members]
        for item in (x, *members, *weights):
            value = fake_value(item)
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
                return Refusal(f"{item.name} is no tensor on the CPU")
        if x in weights or len({(node.op, node.target if node.op == "get_attr" else node) for node in weights}) < len(
            weights
        ):
            return Refusal("two layers have the same weight")
        if not self.regions.all_in_one(members):
            return Refusal("a write lies between the layers")
        return None

    def replace(self, x: torch.fx.Node, members: Sequence[torch.fx.Node], write: Write) -> Refusal | None:
        first = members[0]
        operands = {operand for member in members for operand in member.all_input_nodes}
        late = [operand for operand in operands if first < operand and operand.op != "get_attr"]
        # The call stands where the first layer stands, or behind what is computed between the layers.
        where = max(late).next if late else first
        if any(user < where for member in members for user in member.users):
            return Refusal("a layer is read before the weights of another are known")
        for operand in sorted(operand for operand in operands if first < operand and operand.op == "get_attr"):
            where.prepend(operand)  # a constant may be read anywhere
        writer = Writer(self.gm.graph, self.mode)
        with self.gm.graph.inserting_before(where):
            try:
                results = write(writer, x, members)
            except BaseException:
                writer.take_back()
                raise
        for old, new in zip(members, results, strict=True):
            unlike = difference(fake_value(old), fake_value(new))
            if unlike is not None:
                writer.take_back()
                return Refusal(unlike)
        lines = tuple(dict.fromkeys(str(line) for line in map(model_line, members) if line is not None))
        for made in writer.made:
            origin = members[results.index(made)] if made in results else first
            made.meta.update({key: origin.meta[key] for key in INHERITED if key in origin.meta})
            made.meta["rewritten"] = (self.name, lines)
            self.regions.adopt(made, first)
        for old, new in zip(members, results, strict=True):
            old.replace_all_uses_with(new)
            self.gm.graph.erase_node(old)
        # The module keeps what they named: a pass that fails later makes the graph of before, which reads it.
        for operand in operands:
            if operand.op == "get_attr" and not operand.users:
                self.gm.graph.erase_node(operand)
        return None
