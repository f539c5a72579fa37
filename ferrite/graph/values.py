"""Fake values: whether two say the same, and what an operator makes of them.

Nothing here adds a guard: what cannot be proved equal from what is known of the symbols counts as different.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
    compute_unbacked_bindings,
    rebind_unbacked,
    resolve_unbacked_bindings,
    statically_known_true,
)

from ferrite.graph.aliases import Storage, storages_in, tensor_storages
from ferrite.graph.autocast import autocast_at
from ferrite.graph.facts import attribute_of, bodies_of, fake_value, leaves
from ferrite.graph.regions import mutates
from ferrite.graph.torch_calls import is_barrier

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Entry i is what the i-th tensor of a value lives in: a storage of an operand, or ("fresh", j), where j is the first
# tensor of the value in the same new storage.
AliasClass = tuple[tuple[Storage | tuple[str, int], ...], ...]
Values = Mapping[torch.fx.Node, Any]
CallParts = tuple[str, Any, Any, Any, Any]  # operation, target, arguments, those by name, what a get_attr node reads
NOTHING_ELSE: Values = types.MappingProxyType({})
VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


class MissingValue(Exception):
    """An operand of a node has no fake value, so that the node cannot be run."""


class CannotRun(RuntimeError):
    """A node fails on the fake values of its operands; the cause says how."""

    def __init__(self, node: torch.fx.Node, problem: Exception) -> None:
        super().__init__(f"{node.format_node()} fails on the values of its operands: {problem}")
        self.node = node


def same_metadata(first: Any, second: Any) -> bool:
    """Whether two values have the same kind, shape, strides and so on; where their memory lies is another question."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and _same_tensor(first, second)
    if isinstance(first, (tuple, list)):
        same_kind = isinstance(second, (tuple, list)) and len(first) == len(second)
        return same_kind and all(map(same_metadata, first, second))
    if isinstance(first, dict):
        same_keys = isinstance(second, dict) and list(first) == list(second)
        return same_keys and all(same_metadata(first[key], second[key]) for key in first)
    if isinstance(first, SYMBOLIC) or isinstance(second, SYMBOLIC):
        return same_number(first, second)
    if type(first) is not type(second):
        return False
    return first is second or repr(first) == repr(second) if isinstance(first, float) else bool(first == second)


def _same_tensor(first: torch.Tensor, second: torch.Tensor) -> bool:
    if (first.dtype, first.device, first.layout) != (second.dtype, second.device, second.layout):
        return False
    if not same_sizes(first.shape, second.shape) or first.is_conj() != second.is_conj():
        return False
    if first.is_neg() != second.is_neg():
        return False
    if first.layout is not torch.strided:
        return True
    return same_sizes(first.stride(), second.stride()) and same_number(first.storage_offset(), second.storage_offset())


def same_sizes(first: Any, second: Any) -> bool:
    """Whether two shapes, or strides, are provably equal."""
    return len(first) == len(second) and all(map(same_number, first, second))


def same_number(first: Any, second: Any) -> bool:
    """Whether two numbers, symbolic or plain, are provably equal."""
    if not isinstance(first, SYMBOLIC) and not isinstance(second, SYMBOLIC):
        return bool(first == second)
    if isinstance(first, SYMBOLIC) and isinstance(second, SYMBOLIC):
        if type(first) is not type(second):
            return False
        if first.node.expr == second.node.expr:
            return True
    integers = all(isinstance(each, (int, torch.SymInt)) and not isinstance(each, bool) for each in (first, second))
    return integers and statically_known_true(first == second)


def alias_class(node: torch.fx.Node, value: Any, values: Values = NOTHING_ELSE) -> AliasClass:
    """How the tensors of a node's value share memory with its operands and with each other.

    `values`: what some operands have instead of the fake value on the node.
    """
    operands = [values[each] if each in values else fake_value(each) for each in node.all_input_nodes]
    if is_item(node) and len(operands) == 1:  # of all the others it says nothing, however many there are
        operands = [operands[0][node.args[1]]]
    return sharing_of(operands, value)


def is_item(node: torch.fx.Node) -> bool:
    """Whether a node takes one of several values by its number."""
    return node.target is operator.getitem and isinstance(node.args[1], int)


def sharing_of(operands: Sequence[Any], value: Any) -> AliasClass:
    """`alias_class` of whatever has such a value and was given such operands."""
    given = frozenset().union(*map(storages_in, operands))
    fresh: dict[Storage, int] = {}
    found = []
    for index, tensor in enumerate(leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)):
        storages = tensor_storages(tensor)
        found.append(tuple(each if each in given else ("fresh", fresh.setdefault(each, index)) for each in storages))
    return tuple(found)


def mode_of(graph: torch.fx.Graph) -> Any | None:
    """The fake mode that a graph's values belong to; None if it has no tensor."""
    for node in graph.nodes:
        for leaf in leaves(fake_value(node)):
            if isinstance(leaf, torch.Tensor) and (mode := getattr(leaf, "fake_mode", None)) is not None:
                return mode
    return None


@contextlib.contextmanager
def no_guards(mode: Any) -> Iterator[None]:
    """What is decided about symbols inside is decided by their hints, and leaves no trace."""
    with mode.shape_env.suppress_guards() if mode.shape_env is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def leaving_no_symbols(mode: Any) -> Iterator[None]:
    """For what is only tried out: no guards, and no symbol made inside is waited for in a value that stays.

    `x.nonzero()` makes a symbol for its rows, and whoever asks next where new symbols are bound is told of it.
    """
    with no_guards(mode):
        if mode.shape_env is None:
            yield
        else:
            with mode.shape_env.ignore_fresh_unbacked_symbols():
                yield


def compute(
    node: torch.fx.Node,
    mode: Any,
    values: Values = NOTHING_ELSE,
    deciding: Callable[[Any], contextlib.AbstractContextManager[None]] = no_guards,
) -> tuple[Any, Mapping[Any, Any] | None]:
    """A node's value from its operands' values, and where in it unbacked symbols are bound.

    Symbols that running the node made anew become those that it binds already. `values`: what some operands have
    instead of the fake value on the node. `deciding(mode)` is in force while it runs, for what is to be decided about
    symbols.
    """
    if node.op == "get_attr":
        tensor = attribute_of(node)
        if not isinstance(tensor, torch.Tensor):
            raise MissingValue(node)
        return mode.from_tensor(tensor, static_shapes=True), None
    args, kwargs = torch.fx.node.map_arg(
        (node.args, node.kwargs), lambda operand: values[operand] if operand in values else _operand_value(operand)
    )
    shape_env = mode.shape_env
    with mode, torch.no_grad(), deciding(mode), _no_memory(mode, bool(bodies_of(node))), autocast_at(node):
        if mutates(node):  # a write that changes strides must not change the operand's own value
            args, kwargs = torch.fx.node.map_aggregate((args, kwargs), _detached)
        try:
            if node.op == "call_method":
                value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                assert callable(node.target)
                value = _dense_view(node.target, args)
                value = node.target(*args, **kwargs) if value is None else value
        except Exception as problem:
            if shape_env is not None:
                shape_env.pending_fresh_unbacked_symbols.clear()
            if not (isinstance(problem, GuardOnDataDependentSymNode) and returns_its_operand(node)):
                raise CannotRun(node, problem) from problem
            value = args[0]  # whether the sizes fit, data decides; what comes back does not depend on it
        bindings = _bindings(node, value, shape_env)
        # An operator may return its operand itself; each node has a value object of its own.
        if is_item(node):
            return torch.fx.node.map_aggregate(value, _detached), bindings
        given = {id(item) for item in leaves((args, kwargs))}
        return torch.fx.node.map_aggregate(value, lambda item: _detached(item) if id(item) in given else item), bindings


def returns_its_operand(node: torch.fx.Node) -> bool:
    """Whether a node writes into its first operand and returns that, as it lies: whatever sizes it has are kept."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.arguments or len(schema.returns) != 1:
        return False
    first, result = schema.arguments[0].alias_info, schema.returns[0].alias_info
    written = first is not None and result is not None and first.is_write and first.before_set == result.before_set
    return written and torch.Tag.inplace_view not in node.target.tags  # type: ignore[union-attr]


def _bindings(node: torch.fx.Node, value: Any, shape_env: Any) -> Mapping[Any, Any] | None:
    if shape_env is None or not shape_env.pending_fresh_unbacked_symbols:
        return None
    bound = node.meta.get("unbacked_bindings")
    try:
        found = compute_unbacked_bindings(shape_env, value)
    except PendingUnbackedSymbolNotFound:  # choosing an overload read an element, which the result does not carry
        shape_env.pending_fresh_unbacked_symbols.clear()
        return None
    # Where the symbols sit elsewhere now, the old ones name nothing in the new value.
    if bound and found and sorted(map(str, bound.values())) == sorted(map(str, found.values())):
        rebind_unbacked(shape_env, node, value)
    resolved: Mapping[Any, Any] | None = resolve_unbacked_bindings(shape_env, found)
    return resolved


def keep_names(before: Any, value: Any, made: Iterable[torch.fx.Node], mode: Any) -> None:
    """Numbers that data decides are called in the nodes `made` as they were in what these replace: outputs and whoever
    reads a size have the old names. `value` is what there is now in the place of `before`."""
    binders = [node for node in made if node.meta.get("unbacked_bindings")]
    if not binders:
        return
    old_names = dict(_names_of_sizes(before, value))
    for node in binders:
        bound = node.meta["unbacked_bindings"]
        if bound.keys() <= old_names.keys():
            node.meta["unbacked_bindings"] = {old_names[name]: path for name, path in bound.items()}
            rebind_unbacked(mode.shape_env, node, node.meta["val"])


def _names_of_sizes(before: Any, after: Any) -> Iterator[tuple[Any, Any]]:
    """The symbols that are sizes of values now, each with the symbol it was before."""
    if isinstance(after, torch.Tensor) and isinstance(before, torch.Tensor):
        for old, new in zip(before.shape, after.shape, strict=False):
            yield from _names_of_sizes(old, new)
    elif isinstance(after, torch.SymInt) and isinstance(before, torch.SymInt):
        if after.node.expr.is_Symbol and before.node.expr.is_Symbol:
            yield after.node.expr, before.node.expr
    elif isinstance(before, (tuple, list)) and isinstance(after, (dict, tuple, list)):
        items = after.items() if isinstance(after, dict) else enumerate(after)
        for key, item in items:
            if isinstance(key, int) and key < len(before):
                yield from _names_of_sizes(before[key], item)


def runs_on_values(node: torch.fx.Node) -> bool:
    """Whether a node can be run on fake values.

    The compiler's own routines run when code is generated. What may switch a mode and has no value, such as the calls
    around a region of autocast, would leave it switched here.
    """
    if node.op == "call_function":
        module = str(getattr(node.target, "__module__", None) or "")
        return callable(node.target) and module.partition(".")[0] != "ferrite" and not may_switch_mode(node)
    return node.op in ("call_method", "get_attr")


def may_switch_mode(node: torch.fx.Node) -> bool:
    return "val" in node.meta and node.meta["val"] is None and is_barrier(node)


def _operand_value(operand: torch.fx.Node) -> Any:
    if "val" in operand.meta:
        return operand.meta["val"]
    body = attribute_of(operand) if operand.op == "get_attr" else None
    if body is None:
        raise MissingValue(operand)
    return body


def _dense_view(target: Any, args: Sequence[Any]) -> torch.Tensor | None:
    """A view of what lies dense, by its strides: told in a quarter of the time that torch takes to find them."""
    if target not in VIEWS or len(args) != 2 or not isinstance(args[0], torch.Tensor):
        return None
    tensor: torch.Tensor = args[0]
    shape: Sequence[int] = args[1]
    sizes = (*tensor.shape, *shape, *tensor.stride(), tensor.storage_offset())
    if not all(type(size) is int and size >= 0 for size in sizes) or math.prod(shape) != tensor.numel():
        return None
    if tensor.layout is not torch.strided:
        return None
    if not tensor.numel():
        return empty_view(tensor, tuple(shape))
    if tensor.stride() != _dense_strides(tensor.shape):
        return None
    return tensor.as_strided(shape, _dense_strides(shape), tensor.storage_offset())


def empty_view(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of no elements. It lies in eager where its operand does; torch's fake value of it does only sometimes."""
    strides = _dense_strides([max(size, 1) for size in shape]) if shape != tuple(tensor.shape) else tensor.stride()
    return tensor.as_strided(shape, strides, tensor.storage_offset())


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    steps = itertools.accumulate(reversed(shape), operator.mul, initial=1)
    return tuple(itertools.islice(steps, len(shape)))[::-1]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def _no_memory(mode: Any, needed: bool) -> Iterator[None]:
    """A fake mode remembers what operators returned; a nested graph that was edited since looks the same to it."""
    before = mode.cache_enabled
    mode.cache_enabled = before and not needed
    try:
        yield
    finally:
        mode.cache_enabled = before


def fingerprint(node: torch.fx.Node) -> Hashable:
    """What a node's value depends on besides its operands' values; equal only if nothing was edited."""
    return fingerprint_of(parts_of_call(node))


def parts_of_call(node: torch.fx.Node) -> CallParts:
    """What a node says, as it stands: for as long as these are the same objects, nothing was edited."""
    return node.op, node.target, node.args, node.kwargs, attribute_of(node) if node.op == "get_attr" else None


def fingerprint_of(call: CallParts) -> Hashable:
    op, target, args, kwargs, attribute = call
    return (op, target, _key(args), _key(kwargs), _Same(attribute))


def same_form(first: Any, second: Any) -> bool:
    """Whether two fingerprints differ in nothing but which nodes are operands, each at most once in both."""
    numbers: dict[torch.fx.Node, torch.fx.Node] = {}

    def alike(one: Any, other: Any) -> bool:
        if isinstance(one, torch.fx.Node) and isinstance(other, torch.fx.Node):
            return numbers.setdefault(one, other) is other
        if isinstance(one, tuple) and isinstance(other, tuple):
            return len(one) == len(other) and all(map(alike, one, other))
        return bool(one == other)

    return alike(first, second) and len(set(numbers.values())) == len(numbers)


def _key(value: Any) -> Hashable:
    if isinstance(value, (tuple, list)):
        return ("sequence", *map(_key, value))
    if isinstance(value, dict):
        return ("mapping", *((name, _key(item)) for name, item in value.items()))
    if isinstance(value, slice):
        return ("slice", _key(value.start), _key(value.stop), _key(value.step))
    if isinstance(value, (int, float, complex)):
        return (type(value), repr(value))  # 1, 1.0 and True are equal but not the same, nan is the same but not equal
    if isinstance(value, SYMBOLIC):
        return (type(value), str(value))
    if value is None or isinstance(value, (str, torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return value
    return value if isinstance(value, torch.fx.Node) else _Same(value)


class _Same:
    """Equal for one and the same object alone; holds it, so that no other takes its place."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and operator.is_(self.value, other.value)

    def __hash__(self) -> int:
        return id(self.value)
