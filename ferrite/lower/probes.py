"""Results of which eager is asked how they lie, because torch's forecast of their strides cannot be trusted.

Along a dimension of one, and in a tensor without elements, a stride addresses nothing. Eager orders dimensions by it
all the same, and the forecast does so otherwise:

    x = torch.randn(8, 1).t()       sizes (1, 8), strides (1, 1)
    x + 1                           eager: (1, 1), forecast: (8, 1)

Such calls are made on tensors of ones that lie as the operands do, where sizes are numbers, and small. Elsewhere
eager's rules are asked (`eager_strides`). Where they depend on what is not known of sizes before the program runs, and
the result is returned, the call is made in eager when it does.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ferrite.capture import torch_state
from ferrite.graph import (
    CannotRun,
    MetadataUpdater,
    empty_view,
    fake_value,
    has_effect,
    is_elementwise,
    is_known_operator,
    is_random,
    leaves,
    mutates,
    no_guards,
    same_sizes,
    storages_in,
)
from ferrite.ir import contiguous_strides
from ferrite.lower.eager_strides import (
    Placed,
    Undecided,
    decided,
    is_surely_dense,
    like_operand,
)
from ferrite.lower.fake_operands import dense, extent, is_as_in_memory, is_plain, is_small, is_static
from ferrite.lower.forecasts import OperandLayout, correct_misforecasts, may_be_misforecast, misforecast
from ferrite.lower.sizes import Sizes, UnknownSize
from ferrite.lower.stride_rules import (
    ASKED,
    BY_ARGUMENTS,
    BY_LIBRARY,
    ITERATED,
    LIKE,
    LIKE_ANYWHERE,
    RULES,
    computed_in,
    packet_of,
    rule_of,
)
from ferrite.lower.written_in_place import is_seen_after_write, lies_as_before, owner_before_write, written_operand

aten = torch.ops.aten
# In a node's meta: that its strides are eager's, why nobody can tell, and why it is called in eager.
KNOWN, UNDECIDED, IN_EAGER = "strides_of_eager", "strides_of_nobody", "call_in_eager"
MAX_CORRECTIONS = 64  # corrections of one graph, each of which may change everything behind it
EMPTY_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})


def correct_forecasts(gm: torch.fx.GraphModule) -> None:
    """Make the forecasts of results eager's, and mark those of which eager's strides are known for certain, with all
    that is made of them and lies otherwise now."""
    before = {node: node.meta.get("val") for node in gm.graph.nodes}
    # since the joint graph, in which each write still has the operand that the user's program gave it
    told = {node for node in gm.graph.nodes if KNOWN in node.meta}
    if correct_misforecasts(gm):
        mark_changed(before)
    asked = Asked()
    updater = None
    for node in gm.graph.nodes:
        if updater is not None:
            mark_changed({node: before[node]})
        if node.op != "call_function":
            continue
        if is_seen_through(node) and any(KNOWN in each.meta for each in node.all_input_nodes[:1]):
            node.meta[KNOWN] = True
        if is_misplaced_empty_view(node):
            updater = updater or MetadataUpdater(gm.graph)
            correct_empty_view(node, updater)
        written = written_operand(node)
        if written is not None and node in told:
            continue
        asks = written is not None or is_asked(node)
        if (asks or is_view_in_doubt(node)) and is_in_doubt(node):
            continue
        if not asks:
            continue
        found = asked.strides(node) if written is None else asked.strides_of_written(node, written)
        if found is None:
            continue
        node.meta[KNOWN] = True
        if all(map(same_sizes, found, (each.stride() for each in tensors_of(fake_value(node))))):
            continue
        if updater is None:
            updater = MetadataUpdater(gm.graph)
        if updater.mode is None or len(asked.corrected) == MAX_CORRECTIONS:
            break
        asked.corrected.append(node)
        correct(node, laid_out_as(node, found, updater.mode), updater)
    if updater is not None:
        mark_changed(before)


def is_seen_through(node: torch.fx.Node) -> bool:
    """Whether a result is a part or a view of the first operand, and lies by how that one does alone. There may be
    none: autograd takes the conjugate of a number."""
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def is_misplaced_empty_view(node: torch.fx.Node) -> bool:
    """Whether the fake value of a view without elements lies elsewhere than its operand, as it does when torch finds
    it in its cache."""
    if node.target not in EMPTY_VIEWS:
        return False
    value, operand = fake_value(node), fake_value(node.all_input_nodes[0])
    if not all(isinstance(each, torch.Tensor) and is_static(each) for each in (value, operand)) or value.numel():
        return False
    return bool(value.storage_offset() != operand.storage_offset() or storages_in(value) != storages_in(operand))


def correct_empty_view(node: torch.fx.Node, updater: MetadataUpdater) -> None:
    if updater.mode is None:
        return
    with updater.mode, torch.no_grad(), no_guards(updater.mode):
        value = empty_view(fake_value(node.all_input_nodes[0]), tuple(fake_value(node).shape))
    correct(node, value, updater)


def is_in_doubt(node: torch.fx.Node) -> bool:
    """Whether an operand lies nobody knows how: so does what is computed of it, then."""
    doubt = next((each.meta[UNDECIDED] for each in node.all_input_nodes if UNDECIDED in each.meta), None)
    if doubt is not None:
        node.meta[UNDECIDED] = doubt
    return doubt is not None


def is_view_in_doubt(node: torch.fx.Node) -> bool:
    """Whether a call is a view of something that lies nobody knows how, or one of several such results."""
    operands = [each for each in node.all_input_nodes if UNDECIDED in each.meta]
    if node.target is operator.getitem:
        return bool(operands)
    return bool(operands) and any(storages_in(fake_value(node)) == storages_in(fake_value(each)) for each in operands)


def mark_changed(before: Mapping[torch.fx.Node, Any]) -> None:
    for node, value in before.items():
        if node.meta.get("val") is not value:
            node.meta[KNOWN] = True


def strides_of_outputs(gm: torch.fx.GraphModule, forecast: Sequence[Any]) -> tuple[Any, ...]:
    """Strides of outputs as they were forecast; where the graph knows better, its own. Where nobody can tell, the calls
    that decide are to be made in eager, and there is nothing to say of the result."""
    results = gm.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    return tuple(map(strides_of_output, results, forecast))


def strides_of_output(result: Any, forecast: Any) -> Any:
    if forecast is None or not isinstance(result, torch.fx.Node):
        return forecast
    if UNDECIDED in result.meta:
        deciding = [result]
        while deciding:
            node = deciding.pop()
            if UNDECIDED in node.meta and IN_EAGER not in node.meta:
                node.meta[IN_EAGER] = f"where its result lies depends on sizes: {node.meta[UNDECIDED]}"
                deciding += node.all_input_nodes
        return None
    if is_seen_after_write(result) and not lies_as_before(result):
        owner = owner_before_write(result)
        return forecast if owner is None or KNOWN not in owner.meta else tuple(fake_value(owner).stride())
    return tuple(fake_value(result).stride()) if KNOWN in result.meta else forecast


def correct(node: torch.fx.Node, value: Any, updater: MetadataUpdater) -> None:
    """Give a call another forecast, unless what is made of it cannot be told then."""
    before = fake_value(node)
    updater.correct(node, value)
    try:
        updater.update()
    except CannotRun:
        updater.correct(node, before)
        updater.update()


class Asked:
    """What eager, or a rule of eager's, says of the calls of one graph."""

    def __init__(self) -> None:
        self.sizes = Sizes()
        self.corrected: list[torch.fx.Node] = []

    def strides(self, node: torch.fx.Node) -> tuple[tuple[Any, ...], ...] | None:
        """Eager's strides of the results of a call whose forecast may be wrong; None for others, and where nobody can
        tell."""
        results, operands = tensors_of(fake_value(node)), [fake_value(each) for each in node.all_input_nodes]
        tensors = [each for each in operands if isinstance(each, torch.Tensor)]
        static = all(map(is_static, (*results, *tensors)))
        if static and len(tensors) < len(operands):
            return None
        by_library = packet_of(node) in BY_LIBRARY
        try:
            is_wrong = self.is_misforecast(node, tensors)
            if static and not is_wrong and not is_doubtful(node, results, tensors):
                return None
            cuts = packet_of(node) is aten.constant_pad_nd
            is_asked_anyway = static or is_wrong or by_library or is_by_formula(node, tensors)
            if not is_asked_anyway and not self.may_surprise((*results, *tensors), cuts=cuts):
                return None
        except UnknownSize:  # a size that goes through fractions, say
            return None
        if not results or not all(map(is_as_in_memory, (*results, *tensors))):  # last, since it takes longest
            return None
        on_cpu = all(each.device.type == "cpu" for each in (*results, *tensors))
        if not on_cpu and not is_elementwise(node.target) and packet_of(node) not in LIKE_ANYWHERE:
            return None  # how results of a GPU's other operators lie is their own business
        if on_cpu and static and all(map(is_small, (*results, *tensors))):
            found = strides_in_eager(node)
            if found is not None or not (by_library or packet_of(node) in RULES):
                return found
        try:
            return self.by_rule(node, results)
        except Undecided as reason:
            node.meta[UNDECIDED] = str(reason)
        except UnknownSize:
            pass
        return None

    def is_misforecast(self, node: torch.fx.Node, operands: Sequence[torch.Tensor]) -> bool:
        """Whether it is known that torch forecasts other strides than the result has. It is called in eager then; what
        is made of it is not, and goes by how it lies."""
        if not may_be_misforecast(node.target) or not all(map(is_plain, operands)):
            return False
        layouts = (
            OperandLayout(self.sizes.indices(each.shape), self.sizes.indices(each.stride()), each.dtype, each.device)
            for each in operands
        )
        return misforecast(node.target, layouts) is not None

    def strides_of_written(self, node: torch.fx.Node, operand: torch.fx.Node) -> tuple[tuple[Any, ...], ...] | None:
        """The strides of an operand that was written in place, where they may be wrong for the result."""
        value = fake_value(operand)
        if same_sizes(value.stride(), fake_value(node).stride()):
            return (tuple(value.stride()),) if KNOWN in operand.meta else None
        if not is_plain(value):
            return None
        try:
            placed = Placed(self.sizes.indices(value.shape), self.sizes.indices(value.stride()))
            return (tuple(value.stride()),) if is_surely_dense(placed) else None
        except (Undecided, UnknownSize):
            return None

    def may_surprise(self, tensors: Sequence[torch.Tensor], cuts: bool = False) -> bool:
        """Whether a size may be 0, or 1 in a tensor that is not contiguous as it is written. `cuts`: or has become so,
        in a part of an operand."""
        for each in tensors:
            if each.layout is not torch.strided or all(type(size) is int and size > 1 for size in each.shape):
                continue
            sizes = self.sizes.indices(each.shape)
            if any(size.low is None or size.low < 1 for size in sizes):
                return True
            small = any(size.low is None or size.low < 2 for size in sizes)
            if small and (cuts or self.sizes.indices(each.stride()) != contiguous_strides(sizes)):
                return True
        return False

    def by_rule(self, node: torch.fx.Node, results: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], ...] | None:
        rule, operands = rule_of(node)
        if rule is None or not results:
            return None
        # a GPU converts operands on the way; a processor makes tensors of the other type first
        dtype = computed_in(node, results[0].dtype, operands) if results[0].device.type == "cpu" else None
        strides = [self.as_computed_with(each, dtype) for each in operands]
        if packet_of(node) is aten.where and node.all_input_nodes[0].meta.get("val") is operands[0]:
            strides[0] = operands[0].stride()  # a condition is not converted
        placed = [
            Placed(self.sizes.indices(each.shape), self.sizes.indices(own))
            for each, own in zip(operands, strides, strict=True)
        ]
        found = []
        for each in results:
            steps = decided(rule, placed, self.sizes.indices(each.shape))
            found.append(tuple(step.of(each.shape, strides, self.at_least_one) for step in steps))
        return tuple(found)

    def as_computed_with(self, operand: torch.Tensor, dtype: torch.dtype | None) -> tuple[Any, ...]:
        """The strides of an operand once it has the type that is computed in."""
        if dtype is None or operand.dtype == dtype:
            return operand.stride()
        placed = Placed(self.sizes.indices(operand.shape), self.sizes.indices(operand.stride()))
        steps = decided(like_operand, [placed], placed.sizes)
        return tuple(step.of(operand.shape, [operand.stride()], self.at_least_one) for step in steps)

    def at_least_one(self, size: Any) -> Any:
        index = self.sizes.index(size)
        return size if index.low is not None and index.low > 0 else torch.sym_max(size, 1)


def is_doubtful(node: torch.fx.Node, results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> bool:
    """Whether the forecast of a call on sizes that are numbers may be wrong."""
    if not results:
        return False
    if any(0 in each.shape for each in (*results, *operands)):
        return True
    out = results[0]
    if is_by_formula(node, operands):
        return True
    if packet_of(node) in BY_LIBRARY:
        return out.ndim > 1
    if packet_of(node) is aten.expand and any(out.ndim > each.ndim for each in operands) and 1 in out.shape:
        return True
    if packet_of(node) is aten.constant_pad_nd and 1 in out.shape:  # of a part that was larger
        return True
    return any(1 in each.shape and tuple(each.stride()) != dense(each.shape) for each in operands)


def is_by_formula(node: torch.fx.Node, operands: Sequence[torch.Tensor]) -> bool:
    """Whether a call is forecast as several, the first of which may not take the first of operands that lie
    differently: `where(x >= 1, 0, gradient)`."""
    return packet_of(node) in ITERATED and not all(same_sizes(each.stride(), operands[0].stride()) for each in operands)


def is_asked(node: torch.fx.Node) -> bool:
    packet = packet_of(node)
    if packet in RULES:
        return True
    if not is_elementwise(node.target) and not any(packet in each for each in (ASKED, BY_ARGUMENTS, ITERATED)):
        return False
    return is_known_operator(node) and not (mutates(node) or is_random(node) or has_effect(node))


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [each for each in leaves(value) if isinstance(each, torch.Tensor)]


def strides_in_eager(node: torch.fx.Node) -> tuple[tuple[int, ...], ...] | None:
    """The strides that a call's results have; None where it cannot be made on ones."""
    with as_in_eager():
        try:
            number = 0 if packet_of(node) is aten.index else 1  # a place there is
            args, kwargs = torch.fx.node.map_arg(
                (node.args, node.kwargs), lambda each: filled(fake_value(each), number)
            )
            call: Any = aten.empty_like.default if packet_of(node) in LIKE else node.target
            result = call(*(args[:1] if packet_of(node) in LIKE else args), **kwargs)
        except Exception:  # its own business: the call may need other numbers
            return None
    found, wanted = tensors_of(result), tensors_of(fake_value(node))
    if [(each.shape, each.dtype) for each in found] != [(each.shape, each.dtype) for each in wanted]:
        return None
    return tuple(tuple(each.stride()) for each in found)


def filled(value: torch.Tensor, number: int) -> torch.Tensor:
    return torch.full((extent(value),), number, dtype=value.dtype).as_strided(value.shape, value.stride())


@contextlib.contextmanager
def as_in_eager() -> Iterator[None]:
    with torch_state.on_real_tensors(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def laid_out_as(node: torch.fx.Node, strides: Sequence[Sequence[Any]], mode: Any) -> Any:
    """Fakes of a call's results with other strides, in the same memory where one is a view of an operand."""
    wanted = iter(strides)

    def laid_out(out: Any) -> Any:
        if not isinstance(out, torch.Tensor):
            return out
        for operand in node.all_input_nodes:
            if storages_in(fake_value(operand)) == storages_in(out):
                return fake_value(operand).as_strided(out.shape, next(wanted), out.storage_offset())
        return torch.empty_strided(out.shape, next(wanted), dtype=out.dtype, device=out.device)

    with mode, torch.no_grad(), no_guards(mode):
        return torch.fx.node.map_aggregate(fake_value(node), laid_out)
