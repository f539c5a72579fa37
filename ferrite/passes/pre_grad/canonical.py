"""The first passes of the stage: names as torch has them, one spelling per call, one form per operation."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.graph import (
    aten_name,
    body_of,
    fake_value,
    is_torch_function,
    mutates,
    same_sizes,
    says_so,
    signature,
    storages_of,
)
from ferrite.passes.pre_grad.modules import inline_module
from ferrite.passes.pre_grad.names import NAMES, NUMPY_NAMES, Arguments
from ferrite.passes.pre_grad.spelling import SpelledCall, asking_nothing, is_tensor, operator_call
from ferrite.passes.pre_grad.spelling_check import PassFunction, compared
from ferrite.pipeline import GraphPass, PassContext, graph_pass
from ferrite.rewrite import MISSING, arguments_of, parameters_of, same_literal

aten = torch.ops.aten
Given = tuple[tuple[Any, ...], Arguments]  # arguments by position, and by name
DIMENSIONS = frozenset({"dim", "dims", "dim0", "dim1", "start_dim", "end_dim", "source", "destination"})
LISTS = frozenset({"List[int]", "Optional[List[int]]", "List[Tensor]"})  # one number stands for a list of one
ONE_MORE = frozenset({aten.stack.default, aten.unsqueeze.default})  # their dimension counts in the result
SPLITS = frozenset(
    {
        *(aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default),
        *(aten.tensor_split.sections, aten.tensor_split.indices, aten.hsplit.int, aten.hsplit.array),
        *(aten.vsplit.int, aten.vsplit.array, aten.dsplit.int, aten.dsplit.array),
    }
)
SPLIT_DIMS = {"hsplit": 1, "vsplit": 0, "dsplit": 2}
OF_SLICES = frozenset({"tensor_split", "hsplit", "vsplit", "dsplit"})
RESHAPES = frozenset(
    {
        *(aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.ravel.default),
        *(aten.view_as.default, aten.reshape_as.default),
    }
)


def by_itself(step: GraphPass, gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> torch.fx.GraphModule:
    from ferrite.passes.pre_grad.stage import run_alone  # which is built on these passes

    return run_alone(step, gm, *args, **kwargs)


def spelling_pass(function: PassFunction) -> GraphPass:
    """A pass that only spells calls otherwise: no value changes, and under `strict` that is looked at."""
    found: GraphPass = graph_pass(compared(function), stage="pre_grad", keeps_values=True, alone=by_itself)
    return found


@spelling_pass
def numpy_compat_normalization(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """NumPy's names for parameters (axis, keepdims, x1) become torch's."""
    renamed = 0
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method") or not node.kwargs:
            continue
        known = parameter_names(node)
        new = {name: torch_name(name, node.kwargs, known) for name in node.kwargs}
        if any(new[name] != name for name in new):
            node.kwargs = {new[name]: value for name, value in node.kwargs.items()}
            renamed += 1
    return renamed


def torch_name(name: str, given: dict[str, Any], known: frozenset[str]) -> str:
    """The name that torch has for a parameter; the same where the operation has one of that name, or both are given."""
    better = NUMPY_NAMES.get(name)
    if better is None or name in known or better in given or better not in known:
        return name
    return better


def parameter_names(node: torch.fx.Node) -> frozenset[str]:
    """Every name that some overload of an operation has for a parameter; none for what torch does not own."""
    name = aten_name(node.target)
    if name is None or (node.op == "call_function" and not is_torch_function(node.target)):
        return frozenset()
    packet = getattr(aten, name)
    schemas = (getattr(packet, overload)._schema for overload in packet.overloads())
    names = {argument.name for schema in schemas for argument in schema.arguments}
    python = signature(node.target) if callable(node.target) else None
    names |= set(python.parameters) if python is not None else set()
    return frozenset(names | {"input"} if "self" in names else names)


@spelling_pass
def normalize_node_kwargs_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Functions, methods, operators and plain modules of torch become calls of the operator they stand for.

    Arguments at their defaults are left out and dimensions count from the front, so that equal calls are equal.
    """
    rewritten = write_settled_numbers(gm)
    for node in list(gm.graph.nodes):
        if node.op == "call_module":
            rewritten += inline_module(gm, node)
            continue
        if node.op not in ("call_function", "call_method"):
            continue
        if hasattr(node.target, "overloads"):
            rewritten += choose_overload(node)
        if hasattr(node.target, "_schema"):
            rewritten += shorten(node)
            continue
        call = None if hasattr(node.target, "overloads") else read_call(node)
        if call is not None and not call[0]._schema.is_mutable:
            write(node, *call)
            rewritten += 1
    return rewritten


def write_settled_numbers(gm: torch.fx.GraphModule) -> int:
    """A number that has one value in every call, as a guard says, is that number: `dim` of `x.sum(dim)` is an argument
    of the function, but nobody computes with dimensions that are not known."""
    written = 0
    for node in gm.graph.nodes:
        value = fake_value(node)
        number = torch_api.expression(value) if isinstance(value, torch.SymInt) else None
        if number is None or not number.is_Integer:
            continue
        for user in [each for each in node.users if each.op == "call_method" or is_torch_function(each.target)]:
            put = partial(instead, node, int(number))
            user.args, user.kwargs = torch.fx.node.map_arg((user.args, user.kwargs), put)
            written += 1
    return written


def instead(node: torch.fx.Node, number: int, operand: torch.fx.Node) -> Any:
    return number if operand is node else operand


def shorten(node: torch.fx.Node) -> bool:
    """The call of an operator that rules ask for, with its arguments in their shortest form, as all have them."""
    name = node.target._schema.name  # type: ignore[union-attr]
    if node.target._schema.is_mutable or str(name).removeprefix("aten::") not in NAMES:  # type: ignore[union-attr]
        return False
    given = arguments_of(node)
    if any(value is MISSING for value in given.values()) or not node.kwargs.keys() <= given.keys():
        return False
    args, kwargs = shortest(fake_value(node), node.target, given)
    if same_arguments((args, kwargs), (node.args, node.kwargs)):
        return False
    node.args, node.kwargs = args, kwargs
    return True


def read_call(node: torch.fx.Node | SpelledCall) -> tuple[Any, Arguments] | None:
    """The overload that a call stands for, and its arguments by name; None for one that stays as it is."""
    return indexing_call(node) if node.target is operator.getitem else operator_call(node)


def choose_overload(node: torch.fx.Node) -> bool:
    """`torch.ops.library.name` becomes the overload that its arguments choose: only that says what it writes."""
    if any(body_of(operand) is None and fake_value(operand) is None for operand in node.all_input_nodes):
        return False  # nobody knows what it is given
    values, keywords = torch.fx.node.map_arg((node.args, node.kwargs), fake_value)
    name = str(node.target).replace(".", "::")
    with asking_nothing((values, keywords)):
        overload = torch_api.overload_for(name, values, keywords)
        if overload is not None and overload != torch_api.overload_for(name, *with_numbers(values, keywords)):
            return False  # with the element at hand torch may choose another
    if overload is not None:
        node.target = getattr(node.target, overload or "default")
    return overload is not None


def with_numbers(args: tuple[Any, ...], kwargs: Arguments) -> Given:
    """The same arguments with numbers in place of tensors of one element, but for the first argument: torch reads such
    tensors where a number is due, even one of floats for an integer."""

    def number(value: Any) -> Any:
        return 1 if isinstance(value, torch.Tensor) and value.dim() == 0 else value

    rest: Any = torch.fx.node.map_aggregate((args[1:], kwargs), number)
    return args[:1] + rest[0], rest[1]


def indexing_call(node: torch.fx.Node | SpelledCall) -> tuple[Any, Arguments] | None:
    """`x[2]`, `x[:, 1:3]`, `x[..., None]`: one number, one stretch or one new dimension; `x[:]`: all of it."""
    source, index = node.args
    if not isinstance(source, torch.fx.Node) or not is_tensor(source):
        return None
    items = list(index) if isinstance(index, tuple) else [index]
    rank = fake_value(source).dim()
    taken = sum(item is not None and item is not Ellipsis for item in items)
    if any(item is Ellipsis for item in items):
        place = next(position for position, item in enumerate(items) if item is Ellipsis)
        items[place : place + 1] = [slice(None)] * (rank - taken)
    chosen = [(dim, item) for dim, item in enumerate(items) if not is_whole(item)]
    if rank == 0 or taken > rank or len(chosen) > 1 or any(item is Ellipsis for item in items):
        return None
    dim, item = chosen[0] if chosen else (0, slice(None))
    if item is None:
        return aten.unsqueeze.default, {"self": source, "dim": dim}
    if type(item) is int:
        return aten.select.int, {"self": source, "dim": dim, "index": item}
    if not isinstance(item, slice) or item.step not in (None, 1):
        return None
    if not all(bound is None or type(bound) is int for bound in (item.start, item.stop)):
        return None
    return aten.slice.Tensor, {"self": source, "dim": dim, "start": item.start, "end": item.stop}


def is_whole(item: Any) -> bool:
    return isinstance(item, slice) and (item.start, item.stop, item.step) == (None, None, None)


def write(node: torch.fx.Node, overload: Any, found: Arguments) -> None:
    """Turn a node into a call of an overload, its arguments in their shortest form."""
    node.args, node.kwargs = shortest(fake_value(node), overload, found)
    node.op, node.target = "call_function", overload


def shortest(result: Any, overload: Any, found: Arguments) -> Given:
    """Arguments of an overload by position and by name, those at their defaults left out, dimensions from the front.

    `result` is the fake value of the call: for relu(input=x) it is ((x,), {}).
    """
    parameters = parameters_of(overload)
    rank = dimensions_of(result, overload, found)
    args: list[Any] = []
    kwargs: Arguments = {}
    for name, type_, kwarg_only, default, length in parameters:
        value = found.get(name, None if default is MISSING else default)
        if name in DIMENSIONS and rank is not None:
            value = from_the_front(value, rank)
        if type_ in LISTS:
            value = as_list(value, length)
        if name == "memory_format" and overload is aten.contiguous.default:
            value = default if value is torch.contiguous_format else value
        if not kwarg_only:
            args.append(value)
        elif not same_literal(value, default):
            kwargs[name] = value
    positional = [parameter for parameter in parameters if not parameter.kwarg_only]
    while args and same_literal(args[-1], positional[len(args) - 1].default):
        args.pop()
    return tuple(args), kwargs


def same_arguments(first: Given, second: Given) -> bool:
    """Whether two calls of one overload are given the same, in the same way."""
    (args, kwargs), (other_args, other_kwargs) = first, second
    if kwargs.keys() != other_kwargs.keys() or not same_literal(args, other_args):
        return False
    return all(same_literal(kwargs[name], other_kwargs[name]) for name in kwargs)


def as_list(value: Any, length: int | None) -> Any:
    """One number stands for a list of equal ones: a stride of 2 is one of [2, 2]."""
    if type(value) is int:
        return [value] * (length or 1)
    return list(value) if isinstance(value, tuple) else value


def dimensions_of(result: Any, overload: Any, found: Arguments) -> int | None:
    """How many dimensions a call's `dim` counts in."""
    if overload in ONE_MORE or overload is aten.cat.default:
        value = result
    else:
        first = found.get("self", found.get("input"))
        value = fake_value(first) if isinstance(first, torch.fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else None


def from_the_front(value: Any, rank: int) -> Any:
    if isinstance(value, (list, tuple)):
        return [from_the_front(item, rank) for item in value]
    return value + rank if type(value) is int and -rank <= value < 0 else value


@spelling_pass
def normalization_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Every way to split is split_with_sizes, every way to flatten a reshape with all its sizes."""
    rewritten = 0
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in SPLITS:
            rewritten += normal_split(node)
        elif node.target in RESHAPES or node.target is aten.view.default:
            rewritten += normal_reshape(node)
        elif node.target is aten.squeeze.dims and len(node.args[1]) == 1:
            write(node, aten.squeeze.dim, {"self": node.args[0], "dim": node.args[1][0]})
            rewritten += 1
        elif node.target is aten.t.default and fake_value(node).dim() == 2:
            write(node, aten.transpose.int, {"self": node.args[0], "dim0": 0, "dim1": 1})
            rewritten += 1
        elif node.target is aten.unbind.int:
            rewritten += normal_items(node, len(fake_value(node)))
    return rewritten


def normal_split(node: torch.fx.Node) -> bool:
    """Sizes come from the metadata: a chunk may give fewer pieces than asked for, and a short last one."""
    pieces = fake_value(node)
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    source = node.args[0]
    dim = arguments_of(node).get("dim", SPLIT_DIMS.get(name, 0))
    if name == "hsplit" and isinstance(source, torch.fx.Node) and fake_value(source).dim() == 1:
        dim = 0
    sizes = [piece.shape[dim] for piece in pieces] if type(dim) is int else [None]
    if not all(type(size) is int for size in sizes) or not read_by_position(node):
        return False
    if name in OF_SLICES and may_be_written(node):
        return False
    changed = normal_items(node, len(pieces))
    new = (source, sizes, dim) if dim else (source, sizes)
    if node.target is aten.split_with_sizes.default and same_literal(node.args, new):
        return changed
    write(node, aten.split_with_sizes.default, {"self": source, "split_sizes": sizes, "dim": dim})
    return True


def read_by_position(node: torch.fx.Node) -> bool:
    """Whether every reader takes one piece out, by a number."""
    return all(user.target is operator.getitem and type(user.args[1]) is int for user in node.users)


def may_be_written(split: torch.fx.Node) -> bool:
    """Whether someone writes into a piece, here or as its holder later. Autograd lets each slice be written, which is
    what these splits are made of; pieces that split_with_sizes gives are not to be written."""
    memory, differentiated = storages_of(split), any(says_so(operand) for operand in split.all_input_nodes)
    seen, waiting = {split}, [split]
    while waiting:
        for user in waiting.pop().users:
            if mutates(user) or (differentiated and user.op == "output"):
                return True
            if user not in seen and not memory.isdisjoint(storages_of(user)):
                seen.add(user)
                waiting.append(user)
    return False


def normal_items(node: torch.fx.Node, count: int) -> bool:
    changed = False
    if read_by_position(node):
        for user in list(node.users):
            index: Any = user.args[1]
            if index < 0:
                user.args = (user.args[0], index + count)
                changed = True
    return changed


def normal_reshape(node: torch.fx.Node) -> bool:
    """A reshape by sizes, with -1 filled in. A view stays a view, and what returns its operand itself is left."""
    value, source = fake_value(node), node.args[0]
    sizes = list(value.shape)
    if not all(type(size) is int for size in sizes) or not isinstance(source, torch.fx.Node):
        return False
    before = fake_value(source).shape
    same = same_sizes(before, sizes)  # symbols may be among them
    target = node.target
    if target in (aten.flatten.using_ints, aten.ravel.default) and same:
        return False
    if target is aten.ravel.default and not known_contiguous(fake_value(source)):
        return False  # it copies, where a reshape may be a view
    is_view = target in (aten.view.default, aten.view_as.default, aten.unflatten.int)
    wanted = aten.view.default if is_view else aten.reshape.default
    if target is wanted and same_literal(node.args[1], sizes):
        return False
    node.target, node.args, node.kwargs = wanted, (source, sizes), {}
    return True


def known_contiguous(value: torch.Tensor) -> bool:
    """Nothing is asked of symbols."""
    return all(type(step) is int for step in (*value.shape, *value.stride())) and value.is_contiguous()


CANONICAL = (numpy_compat_normalization, normalize_node_kwargs_pass, normalization_pass)
