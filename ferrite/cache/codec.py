"""Frozen dataclasses as plain data, and back: all that entries of the cache say goes through here.

    RunTable(0, 2, (KernelCall(0, ((1, 0),)),))     [0, 2, [[0, [[1, 0]], []]], [], "cpu", []]

A dataclass is a list of its fields in their order; the annotations of the fields say how. Numbers, words, tuples,
mappings by name or number, and what may be None can stand in it, and `LEAVES`: lines of the model, programs. A field
with `metadata={"read as": value}` is not written: whoever reads it gets that value.

Reading checks every type, so that what is made of an entry is what its annotations say; whatever else has to hold is a
law (`ferrite.cache.laws`). An entry has thousands of values and a warm start has little time: so whole columns are read
at once. The rows of a list of dataclasses become columns, those of a field are read together, and then become rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ferrite.cache.entry import Damaged
from ferrite.errors import ModelLine
from ferrite.graph import PlaceIndex, Places
from ferrite.ir import Expr, Symbol
from ferrite.ir.program import Program, Scalar, parse

Kind = TypeVar("Kind")
Data = Any
Column = list[Any]
Write = Callable[[Any, PlaceIndex], Data] | None  # None: it is written as it is
Read = Callable[[Column, Places | None], Column]
MAX_NUMBER = 1 << 62  # of any number
SCALARS = (bool, int, float, str)
NOT_WRITTEN = "read as"  # metadata of a field
NumberOverSymbols = tuple[Expr, tuple[Symbol, ...]]


NOWHERE = PlaceIndex({}, {})


class Strange(Damaged):
    """What an entry says that cannot be."""


def encode(kind: Any, value: Any, index: PlaceIndex = NOWHERE) -> Data:
    """`kind`: the type of the value. `index`: of the graph as it was captured, by which lines are named."""
    write = writer(kind)
    return value if write is None else write(value, index)


def decode(kind: type[Kind], data: Data, places: Places | None = None) -> Kind:
    """`places`: of the graph that the value is for. Strange says what the data cannot be."""
    read: Read = reader(typing.cast(Any, kind))
    (value,) = read([data], places)
    return value  # type: ignore[no-any-return]


# --- what has a form of its own ---------------------------------------------------------------------------------------


def line_at(number: Data, places: Places | None) -> ModelLine | None:
    if number is None or places is None:
        return None
    if type(number) is not int or not 0 <= number < len(places.nodes):
        raise Strange("a line of no node")
    return places.line(number)


def program_of(text: Data, _places: Places | None) -> Program:
    if type(text) is not str:
        raise Strange("a program is no text")
    return parse(text)


def number_of(text: Data, places: Places | None) -> NumberOverSymbols:
    program = program_of(text, places)
    output = program.outputs[0] if len(program.outputs) == 1 else None
    if not isinstance(output, Scalar):
        raise Strange("a program that returns no number")
    return output.value, tuple(item for item in program.inputs if isinstance(item, Symbol))


def text_of_number(value: NumberOverSymbols, _index: PlaceIndex) -> str:
    """A number over symbols as a program that returns it: programs have a text."""
    expr, symbols = value
    return str(Program("scalar", symbols, (), (), (Scalar(expr),)))


LEAVES: Mapping[Any, tuple[Callable[[Any, PlaceIndex], Data], Callable[[Data, Places | None], Any]]] = {
    ModelLine: (lambda line, index: index.place_of_line(line), line_at),
    Program: (lambda program, _index: str(program), program_of),
    NumberOverSymbols: (text_of_number, number_of),
}


# --- writing ----------------------------------------------------------------------------------------------------------


@functools.cache
def writer(kind: Any) -> Write:
    if kind in LEAVES:
        return LEAVES[kind][0]
    if kind in SCALARS:
        return None
    if (inner := within_optional(kind)) is not None:
        return optional_writer(writer(inner))
    if is_record(kind):
        return row_writer([(name, writer(each)) for name, each in fields_of(kind).items()])
    if is_mapping(kind):
        name, item = typing.get_args(kind)
        return mapping_writer(writer(item), by_name=name is str)
    if (item := item_of(kind)) is not None:
        return list_writer(writer(item))
    writes = list(map(writer, typing.get_args(kind)))
    if not writes:
        raise TypeError(f"{kind} has no form as data")
    if not any(writes):
        return None
    return lambda values, index: [written(write, value, index) for write, value in zip(writes, values, strict=True)]


def written(write: Write, value: Any, index: PlaceIndex) -> Data:
    return value if write is None else write(value, index)


def optional_writer(write: Write) -> Write:
    return None if write is None else lambda value, index: None if value is None else write(value, index)


def list_writer(write: Write) -> Write:
    return None if write is None else lambda values, index: [write(value, index) for value in values]


def row_writer(fields: Sequence[tuple[str, Write]]) -> Write:
    get = operator.attrgetter(*(name for name, _write in fields))
    changed = [(place, write) for place, (_name, write) in enumerate(fields) if write is not None]
    if len(fields) == 1:
        return lambda value, index: [written(fields[0][1], get(value), index)]

    def write_row(value: Any, index: PlaceIndex) -> Data:
        row = list(get(value))
        for place, write in changed:
            row[place] = write(row[place], index)
        return row

    return write_row


def mapping_writer(write: Write, by_name: bool) -> Write:
    if write is None:
        return lambda values, _index: dict(values) if by_name else list(values.items())

    def write_mapping(values: Mapping[Any, Any], index: PlaceIndex) -> Data:
        pairs = [(name, write(value, index)) for name, value in values.items()]
        return dict(pairs) if by_name else pairs

    return write_mapping


# --- reading, a column at a time --------------------------------------------------------------------------------------


@functools.cache
def reader(kind: Any, what: str = "it") -> Read:
    """`what` is read, for messages."""
    if kind in LEAVES:
        read = LEAVES[kind][1]
        return lambda column, places: [read(data, places) for data in column]
    if kind in SCALARS:
        return functools.partial(scalars, kind, what)
    if (inner := within_optional(kind)) is not None:
        return optional_reader(reader(inner, what))
    if is_record(kind):
        fields = [reader(each, f"{kind.__name__}.{name}") for name, each in fields_of(kind).items()]
        return row_reader(fields, kind, kind.__name__, left_out(kind))
    if is_mapping(kind):
        name, value = typing.get_args(kind)
        if name is str:
            return named_reader(reader(value, what), what, value in SCALARS)
        return pairs_reader(reader(types.GenericAlias(tuple, (name, value)), what))
    if (item := item_of(kind)) is not None:
        return list_reader(reader(item, what), what, item is ModelLine, typing.get_origin(kind))
    kinds = typing.get_args(kind)
    return row_reader([reader(each, what) for each in kinds], lambda *values: values, what)


def scalars(kind: type, what: str, column: Column, _places: Places | None) -> Column:
    if not {kind}.issuperset(map(type, column)):
        raise Strange(f"{what} is no {kind.__name__}")
    if kind is int and column and not -MAX_NUMBER < min(column) <= max(column) < MAX_NUMBER:
        raise Strange(f"{what} is out of range")
    if kind is float and not all(map(math.isfinite, column)):
        raise Strange(f"{what} is no number")
    return column


def optional_reader(read: Read) -> Read:
    def read_optional(column: Column, places: Places | None) -> Column:
        found = iter(read([data for data in column if data is not None], places))
        return [None if data is None else next(found) for data in column]

    return read_optional


def row_reader(
    fields: Sequence[Read], make: Callable[..., Any], what: str, others: Sequence[tuple[int, Any]] = ()
) -> Read:
    """`others`: what stands at some places in every row that is made."""
    width = len(fields)

    def read_rows(column: Column, places: Places | None) -> Column:
        if not {list}.issuperset(map(type, column)) or not {width}.issuperset(map(len, column)):
            raise Strange(f"{what} has not {width} parts")
        if not column:
            return []
        parts = zip(fields, zip(*column, strict=True), strict=True)
        columns: list[Iterable[Any]] = [read(list(part), places) for read, part in parts]
        for place, value in others:
            columns.insert(place, itertools.repeat(value))
        return list(map(make, *columns))

    return read_rows


def list_reader(read: Read, what: str, may_be_lost: bool, make: Callable[[Any], Any]) -> Read:
    """`may_be_lost`: items that are not known here are left out."""

    def read_lists(column: Column, places: Places | None) -> Column:
        if not {list}.issuperset(map(type, column)):
            raise Strange(f"{what} is no list")
        found = iter(read(list(itertools.chain.from_iterable(column)), places))
        lists = [itertools.islice(found, len(data)) for data in column]
        if may_be_lost:
            return [make(item for item in some if item is not None) for some in lists]
        return list(map(make, lists))

    return read_lists


def named_reader(read: Read, what: str, as_they_are: bool) -> Read:
    """`as_they_are`: reading only checks the values."""

    def read_mappings(column: Column, places: Places | None) -> Column:
        if not {dict}.issuperset(map(type, column)):
            raise Strange(f"{what} has no names")
        values = read([item for data in column for item in data.values()], places)
        if as_they_are:
            return column
        found = iter(values)
        return [dict(zip(data, found, strict=False)) for data in column]

    return read_mappings


def pairs_reader(read: Read) -> Read:
    """Mappings by number are pairs; what is not known here is left out."""

    def read_mappings(column: Column, places: Places | None) -> Column:
        if not {list}.issuperset(map(type, column)):
            raise Strange("a mapping is no list of pairs")
        found = iter(read(list(itertools.chain.from_iterable(column)), places))
        some = [itertools.islice(found, len(data)) for data in column]
        return [{name: item for name, item in pairs if item is not None} for pairs in some]

    return read_mappings


# --- types ------------------------------------------------------------------------------------------------------------


@functools.cache
def fields_of(kind: Any) -> Mapping[str, Any]:
    """The types of the fields of a dataclass, in their order."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if NOT_WRITTEN not in field.metadata}


def left_out(kind: Any) -> list[tuple[int, Any]]:
    """Fields of a dataclass that are not written: their places, and what they are read as."""
    fields = enumerate(field.metadata for field in dataclasses.fields(kind))
    return [(place, facts[NOT_WRITTEN]) for place, facts in fields if NOT_WRITTEN in facts]


def is_record(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def within_optional(kind: Any) -> Any | None:
    """`X` for the type `X | None`."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return None
    (inner,) = (each for each in typing.get_args(kind) if each is not types.NoneType)
    return inner


def is_mapping(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def item_of(kind: Any) -> Any | None:
    """`X` for the types `tuple[X, ...]` and `list[X]`."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is list or (origin is tuple and len(inside) == 2 and inside[1] is ...):
        return inside[0]
    return None
