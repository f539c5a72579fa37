"""The laws that one operation keeps by itself; `ferrite.ir.program.laws` numbers them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ferrite.ir.expr import Expr, Load, Local, Param, indices_of, nodes_of
from ferrite.ir.expr_laws import is_narrow, wrong_data, wrong_type
from ferrite.ir.index.algebra import ZERO, Axis, Index, Symbol
from ferrite.ir.invalid import InvalidProgram
from ferrite.ir.program.attention_laws import check_attention
from ferrite.ir.program.loop_operations import Attention, Reduce, Scan, Sort
from ferrite.ir.program.nodes import ASSERTED, Assert, Bind, Buffer, DeviceCopy, If, Item, Operation, RandomState, Seeds
from ferrite.ir.program.operation_facts import axes_of, destinations_of, expressions, roots_of, stores_of
from ferrite.ir.program.scans import SCANS
from ferrite.ir.reductions import REDUCTIONS
from ferrite.ir.types import short

Buffers = Mapping[str, Buffer]
ADDING = frozenset(["sum", "prod", "welford", "softmax", "logsumexp"])  # kinds that compute, rather than choose


def check_operation(operation: Operation, buffers: Buffers) -> None:
    """Axes, coordinates, types, counts. Every buffer it names is one of the program."""
    nodes = nodes_of(*roots_of(operation))
    _axes(operation, nodes)
    _values(operation, nodes, buffers)
    if isinstance(operation, Reduce | Scan | Sort):
        _arity(operation)
    if isinstance(operation, Attention):
        check_attention(operation)
    _fits(operation, buffers)


def _word(operation: Operation) -> str:
    return type(operation).__name__


def _axes(operation: Operation, nodes: list[Expr]) -> None:
    axes = axes_of(operation)
    for axis in axes:
        if not all(isinstance(atom, Symbol) for atom in axis.extent.atoms):
            raise InvalidProgram("P6", f"the extent {axis.extent} of axis {axis} is no size")
    if isinstance(operation, Scan | Sort) and operation.along not in axes:
        raise InvalidProgram("P6", f"{operation.along} is no axis of the {_word(operation)}")
    outer = frozenset(operation.axes if isinstance(operation, Reduce) else axes)
    for destination in () if isinstance(operation, Attention) else destinations_of(operation):
        for index in destination.coordinates:
            _uses(index, outer, operation)
    for item in nodes:
        for index in indices_of(item):
            _uses(index, frozenset(axes), operation)


def _uses(index: Index, axes: frozenset[Axis], operation: Operation) -> None:
    for atom in index.atoms:
        if isinstance(atom, Axis) and atom not in axes:
            raise InvalidProgram("P6", f"{index} uses {atom}, no axis of the {_word(operation)} there")


def _values(operation: Operation, nodes: list[Expr], buffers: Buffers) -> None:
    for item in nodes:
        is_unknown = isinstance(item, Local) or (isinstance(item, Param) and not isinstance(operation, Attention))
        problem = f"{item} has no value here" if is_unknown else wrong_type(item)
        if problem:
            raise InvalidProgram("P8", f"{problem}, in {_word(operation)}")
        if isinstance(item, Load) and item.dtype != buffers[item.buffer].dtype:
            raise InvalidProgram("P7", f"{item} is loaded as {short(item.dtype)}, but {typed(buffers[item.buffer])}")
    for destination in destinations_of(operation):
        problem = next(filter(None, map(wrong_data, destination.coordinates)), None)
        if problem:
            raise InvalidProgram("P8", f"{problem}, in {_word(operation)}")
    for store in stores_of(operation):
        if store.value.dtype != buffers[store.buffer].dtype:
            raise InvalidProgram("P7", f"{short(store.value.dtype)} is stored, but {typed(buffers[store.buffer])}")


def _arity(operation: Reduce | Scan | Sort) -> None:
    values, destinations = expressions(operation), operation.destinations
    kind, takes, gives = _shape(operation)
    if (len(values), len(destinations)) != (takes, gives):
        counts = f"{len(values)} values and {len(destinations)} destinations"
        raise InvalidProgram("P13", f"{kind} takes {takes} values and gives {gives}, not {counts}")
    if all(destination is None for destination in destinations):
        raise InvalidProgram("P13", f"nobody wants a result of {kind}")
    if kind in ADDING and any(is_narrow(value.dtype) for value in values):
        raise InvalidProgram("P8", f"{kind} of {short(values[0].dtype)}: narrow floats are added in a wider type")


def _shape(operation: Reduce | Scan | Sort) -> tuple[str, int, int]:
    """The kind, how many values it takes, and how many results it gives."""
    match operation:
        case Reduce(kind=kind) if kind in REDUCTIONS:
            row = REDUCTIONS[kind]
            if not row.empty and any(axis.extent is ZERO for axis in operation.reduced):
                raise InvalidProgram("P13", f"{kind} of nothing has no result")
            return kind, row.takes, row.gives
        case Scan(combine=combine) if combine.results:
            _combine(operation)
            return combine.name, len(combine.results), len(combine.results)
        case Scan(combine=combine) if combine.name in SCANS:
            takes, gives, _ = SCANS[combine.name]
            return combine.name, takes, gives
        case Sort(keys=keys):
            return "sort", max(len(keys), 1), len(keys) + 1
        case Scan(combine=combine):
            raise InvalidProgram("P13", f"no scan {combine.name!r}")
    raise InvalidProgram("P13", f"no reduction {operation.kind!r}")


def _combine(operation: Scan) -> None:
    """The function of a scan: parameters of the types of the state, and nothing else."""
    types = [value.dtype for value in operation.values] * 2
    for item in nodes_of(*operation.combine.results):
        is_right = not isinstance(item, Param) or types[item.position : item.position + 1] == [item.dtype]
        if item.atoms or item.loads or not is_right:
            raise InvalidProgram("P13", f"the combine function of a scan uses {item}")
        problem = wrong_type(item)
        if problem:
            raise InvalidProgram("P8", f"{problem}, in the combine function of a scan")
    if [result.dtype for result in operation.combine.results] != types[: len(operation.values)]:
        raise InvalidProgram("P13", "the combine function of a scan gives other types than it takes")


def _fits(operation: Operation, buffers: Buffers) -> None:
    match operation:
        case Item(source=name) | If(predicate=str(name)) if not has_one_element(buffers[name]):
            raise InvalidProgram("P16", f"{name} has more elements than the one of an {_word(operation)}")
        case Bind(buffer=name, query=query, axis=axis):
            if query != "offset" and not 0 <= axis < len(buffers[name].sizes):
                raise InvalidProgram("P16", f"{name} has no dimension {axis}")
        case Seeds(target=target) if buffers[target].dtype != torch.int64:
            raise InvalidProgram("P16", f"seeds are i64, but {typed(buffers[target])}")
        case RandomState(device=device, draws=draws, aligned=aligned, multiples=multiples):
            if any(divisor < 1 for _index, divisor in multiples):
                raise InvalidProgram("P16", "nothing is a multiple of no number")
            if device.type != "cuda" or not draws:
                raise InvalidProgram("P16", f"{len(draws)} draws from a generator of {device}, which has no such state")
            if any(blocks.low is None or blocks.low < 0 for _symbol, blocks in draws):
                raise InvalidProgram("P16", "a draw may move the generator back")
            for name in aligned:
                if name not in buffers or buffers[name].kind not in ("input", "donated"):
                    raise InvalidProgram("P16", f"{name} is no input, so that nobody can ask where it lies")
        case DeviceCopy(source=source, target=target):
            one, other = buffers[source], buffers[target]
            if (one.dtype, one.sizes) != (other.dtype, other.sizes):
                raise InvalidProgram("P16", f"a copy from {source} to {target} changes the type or the sizes")
        case Assert(condition=condition, error=error):
            if condition.loads or condition.dtype != torch.bool:
                raise InvalidProgram("P16", f"the condition {condition} reads memory, or is no bool")
            if error not in ASSERTED:
                raise InvalidProgram("P16", f"an assertion raises none of {ASSERTED}")
        case _:
            pass


def has_one_element(buffer: Buffer) -> bool:
    """Not proved otherwise."""
    return all(size.low is None or size.low <= 1 for size in buffer.sizes) and ZERO not in buffer.sizes


def typed(buffer: Buffer) -> str:
    return f"{buffer.name} is {short(buffer.dtype)}[{', '.join(map(str, buffer.sizes))}]"
