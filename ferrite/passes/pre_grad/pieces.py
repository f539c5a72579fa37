"""Pieces of a tensor, and what concatenating neighbours of them again gives: the algebra of splits and concats.

A piece is a stretch of a base along one axis: `slice` keeps the axis (split, chunk, narrow, x[2:5]), `select` drops it
(unbind, select, a squeezed slice of one). A run is a stretch of neighbouring operands of a concat that are neighbouring
pieces of one base, in its order. With k pieces of width w and n the part of the base that they cover:

    slices along s, concatenated along s      n
    slices along s, concatenated along c      flatten(movedim(unflatten(n, s, [k, w]), s, c), c, c + 1)
    slices along s, stacked along c           movedim(unflatten(n, s, [k, w]), s, c)
    selects along u, stacked along c          movedim(n, u, c)
    selects along u, concatenated along c     flatten(movedim(n, u, c), c, c + 1)
    any of them, each reshaped to S first,
        stacked along c                       movedim(T, 0, c), where T = reshape(movedim(.., 0), [k, *S])
        concatenated along c                  flatten(movedim(T, 0, c), c, c + 1)

A stack is a concat of operands that were given the axis c first (`lifted`). The rules that take each row are in
`run_rules`; when a rewrite is worth it, `piece_runs` says.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ferrite.capture import torch_api
from ferrite.errors import NotApplied
from ferrite.graph import fake_value
from ferrite.passes.pre_grad.predicates import Concat, is_plain, keeps_order, sole_user
from ferrite.passes.pre_grad.spelling import is_tensor
from ferrite.rewrite import arguments_of, only_ones_differ

aten = torch.ops.aten
Mode = Literal["slice", "select"]
# What a run becomes: the whole stretch; interleaved with another axis; an axis of k of its own; reshaped first.
Form = Literal[
    "stretch", "slices concatenated", "slices stacked", "selects concatenated", "selects stacked", "reshaped"
]


# --- where a value comes from -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Positions lo to hi of a base along an axis. `made_by`: the nodes between, the piece itself first."""

    base: torch.fx.Node
    axis: int
    lo: int
    hi: int
    mode: Mode
    made_by: tuple[torch.fx.Node, ...]

    @property
    def width(self) -> int:
        return self.hi - self.lo

    @property
    def producer(self) -> Any:
        """The operator that took the base apart."""
        return self.made_by[-1].target

    @property
    def squeezed(self) -> bool:
        return self.made_by[0].target is aten.squeeze.dim


def piece_of(node: Any) -> Piece | None:
    """What a value is a piece of; None if it is none, or where nobody knows which."""
    if not isinstance(node, torch.fx.Node) or node.op != "call_function":
        return None
    reader = READERS.get(node.target)
    return reader(node) if reader is not None and fake_value(node) is not None else None


def split_item(node: torch.fx.Node) -> Piece | None:
    """An item of a split or an unbind."""
    producer, index = node.args
    if (
        not isinstance(producer, torch.fx.Node)
        or type(index) is not int
        or not isinstance(fake_value(producer), (list, tuple))
    ):
        return None
    if producer.target not in (aten.split_with_sizes.default, aten.unbind.int):
        return None
    given, count = arguments_of(producer), len(fake_value(producer))
    if not -count <= index < count or type(given["dim"]) is not int:
        return None
    index, base = index % count, given["self"]
    if not has_plain_value(base):
        return None
    axis = given["dim"] % fake_value(base).dim()
    if producer.target is aten.unbind.int:
        return Piece(base, axis, index, index + 1, "select", (node, producer))
    sizes = given["split_sizes"]
    if not isinstance(sizes, (list, tuple)) or not all(type(size) is int for size in sizes):
        return None
    lo = sum(sizes[:index])
    return Piece(base, axis, lo, lo + sizes[index], "slice", (node, producer))


def sliced(node: torch.fx.Node) -> Piece | None:
    """narrow, or a slice in single steps."""
    given = arguments_of(node)
    base, axis, start = given["self"], given["dim"], given["start"]
    if type(axis) is not int or given.get("step", 1) != 1 or not has_plain_value(base):
        return None
    lo = from_the_front(0 if start is None else start, fake_value(base).shape[axis])
    width = fake_value(node).shape[axis]
    if lo is None or type(width) is not int:
        return None
    return Piece(base, axis % fake_value(base).dim(), lo, lo + width, "slice", (node,))


def selected(node: torch.fx.Node) -> Piece | None:
    given = arguments_of(node)
    base, axis = given["self"], given["dim"]
    if type(axis) is not int or not has_plain_value(base):
        return None
    lo = from_the_front(given["index"], fake_value(base).shape[axis])
    return Piece(base, axis % fake_value(base).dim(), lo, lo + 1, "select", (node,)) if lo is not None else None


def squeezed(node: torch.fx.Node) -> Piece | None:
    """A slice of one without its axis."""
    inner, given = piece_of(node.args[0]), arguments_of(node)
    if inner is None or inner.mode != "slice" or inner.width != 1 or type(given["dim"]) is not int:
        return None
    if given["dim"] % fake_value(inner.base).dim() != inner.axis:
        return None
    return Piece(inner.base, inner.axis, inner.lo, inner.hi, "select", (node, *inner.made_by))


def has_plain_value(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and is_plain(fake_value(node))


def from_the_front(index: Any, size: int | torch.SymInt) -> int | None:
    """An index as a distance from the beginning, at most the size; None where that is not known."""
    if type(index) is not int:
        return None
    if type(size) is int:
        return min(max(index + size if index < 0 else index, 0), size)
    return index if index >= 0 and torch_api.known_true(size >= index) else None


READERS: dict[Any, Callable[[torch.fx.Node], Piece | None]] = {
    operator.getitem: split_item,
    aten.narrow.default: sliced,
    aten.slice.Tensor: sliced,
    aten.select.int: selected,
    aten.squeeze.dim: squeezed,
}


# --- operands of a concat ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConcatOperand:
    """What is joined. `piece` is None for a foreign value; `shape` is what the piece is reshaped to, if it is.

    `between`: the nodes from the operand down to the piece, which is not among them.
    """

    node: torch.fx.Node
    piece: Piece | None = None
    lifted: bool = False
    shape: tuple[int, ...] | None = None
    between: tuple[torch.fx.Node, ...] = ()


def operands_of(concat: Concat, rank: int) -> list[ConcatOperand]:
    return [operand_of(node, concat, rank) for node in concat.operands]


def operand_of(node: torch.fx.Node, concat: Concat, rank: int) -> ConcatOperand:
    """An operand as a piece, maybe reshaped, maybe lifted. (Old empty operands have another rank: they are foreign.)"""
    lifted, inner, between = concat.kind == "stack", node, list[torch.fx.Node]()
    foreign = ConcatOperand(node, lifted=lifted)
    if not lifted and fake_value(node).dim() != rank:
        return foreign
    if not lifted and gets_axis(node, concat.dim):
        lifted, inner = True, node.all_input_nodes[0]
        between.append(node)
    piece = piece_of(inner)
    if piece is not None:
        return ConcatOperand(node, piece, lifted, None, tuple(between))
    shape = tuple(fake_value(inner).shape)
    while piece is None:
        if not keeps_order(inner) or sole_user(inner) is None or not is_tensor(inner.args[0]):
            return foreign
        between.append(inner)
        inner = inner.all_input_nodes[0]
        piece = piece_of(inner)
    if not all(type(size) is int for size in shape):
        return foreign
    return ConcatOperand(node, piece, lifted, shape, tuple(between))


def gets_axis(node: torch.fx.Node, dim: int) -> bool:
    """Whether a value was given an axis of one there."""
    if node.target is not aten.unsqueeze.default or type(node.args[1]) is not int:
        return False
    return is_tensor(node.args[0]) and node.args[1] % fake_value(node).dim() == dim


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PieceRun:
    """Neighbours in a concat that are neighbours in a base, in numbers. `whole`: they are all of it along the axis."""

    axis: int
    lo: int
    hi: int
    mode: Mode
    count: int
    lifted: bool = False
    shape: tuple[int, ...] | None = None
    whole: bool = False

    def form(self, dim: int) -> Form:
        """What it becomes in a concat along a dimension."""
        if self.shape is not None:
            return "reshaped"
        if self.mode == "select":
            return "selects stacked" if self.lifted else "selects concatenated"
        if self.lifted:
            return "slices stacked"
        return "stretch" if self.axis == dim else "slices concatenated"


@dataclass(frozen=True)
class Stretch:
    """Neighbouring operands of a concat: one run of a base, or one foreign operand (`run` is None)."""

    operands: tuple[ConcatOperand, ...]
    run: PieceRun | None = None

    @property
    def base(self) -> torch.fx.Node:
        piece = self.operands[0].piece
        assert piece is not None
        return piece.base

    def nodes(self) -> list[torch.fx.Node]:
        """Everything between the base and the concat."""
        pieces = (operand.piece for operand in self.operands)
        made_by = [node for piece in pieces if piece is not None for node in piece.made_by]
        return [node for operand in self.operands for node in operand.between] + made_by


def stretches_of(operands: Sequence[ConcatOperand], dim: int) -> list[Stretch]:
    """All operands in their order, each in the longest run it can be in."""
    groups: list[list[ConcatOperand]] = []
    for operand in operands:
        if groups and continues(groups[-1], operand, dim):
            groups[-1].append(operand)
        else:
            groups.append([operand])
    return [Stretch(tuple(group), run_of(group)) for group in groups]


def continues(group: Sequence[ConcatOperand], operand: ConcatOperand, dim: int) -> bool:
    last, piece = group[-1].piece, operand.piece
    if last is None or piece is None or (group[-1].lifted, group[-1].shape) != (operand.lifted, operand.shape):
        return False
    if (last.base, last.axis, last.mode, last.hi) != (piece.base, piece.axis, piece.mode, piece.lo):
        return False
    as_one = not operand.lifted and operand.shape is None and piece.mode == "slice" and piece.axis == dim
    return as_one or last.width == piece.width


def run_of(group: Sequence[ConcatOperand]) -> PieceRun | None:
    first, last = group[0].piece, group[-1].piece
    if first is None or last is None:
        return None
    size = fake_value(first.base).shape[first.axis]
    whole = first.lo == 0 and torch_api.known_equal(last.hi, size)
    return PieceRun(first.axis, first.lo, last.hi, first.mode, len(group), group[0].lifted, group[0].shape, whole)


# --- what replaces a run ----------------------------------------------------------------------------------------------


class Moves:
    """Writes moves of data in the stage's spelling. `call` makes one, `value` tells what it gives."""

    def __init__(self, call: Callable[..., Any], value: Callable[[Any], Any] = fake_value) -> None:
        self.call, self.value = call, value
        self.made: list[Any] = []

    def write(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        self.made.append(self.call(target, *args, **kwargs))
        return self.made[-1]

    def run(self, base: Any, run: PieceRun, dim: int) -> Any:
        """What the pieces of a run, joined along a dimension, are."""
        taken = base if run.whole else self.write(aten.slice.Tensor, base, run.axis, run.lo, run.hi)
        if run.form(dim) == "stretch":
            return taken
        parts = taken if run.mode == "select" else self.parted(taken, run)
        if run.shape is None:
            placed = self.moved(parts, run.axis, dim)
        else:
            placed = self.moved(self.reshaped(self.moved(parts, run.axis, 0), [run.count, *run.shape]), 0, dim)
        return placed if run.lifted else self.merged(placed, dim)

    def parted(self, tensor: Any, run: PieceRun) -> Any:
        """Its axis as an axis of pieces and one within each. Always a view."""
        sizes, both = list(self.value(tensor).shape), [run.count, (run.hi - run.lo) // run.count]
        if all(type(size) is int for size in sizes):
            return self.write(aten.view.default, tensor, [*sizes[: run.axis], *both, *sizes[run.axis + 1 :]])
        return self.write(aten.unflatten.int, tensor, run.axis, both)

    def moved(self, tensor: Any, source: int, destination: int) -> Any:
        return tensor if source == destination else self.write(aten.movedim.int, tensor, source, destination)

    def merged(self, tensor: Any, dim: int) -> Any:
        """An axis and the next as one. Copies where a view cannot do that."""
        value = self.value(tensor)
        sizes = list(value.shape)
        if all(type(number) is int for number in (*sizes, *value.stride())):
            return self.write(
                aten.reshape.default, tensor, [*sizes[:dim], sizes[dim] * sizes[dim + 1], *sizes[dim + 2 :]]
            )
        if not certain(value, dim):
            raise NotApplied("whether a reshape copies depends on sizes that nobody knows yet")
        return self.write(aten.flatten.using_ints, tensor, dim, dim + 1)

    def strided_like(self, tensor: Any, wanted: torch.Tensor) -> Any:
        """With the strides of a concat along dimensions of one, where only those differ: calls behind it lay out their
        results by them, too."""
        value = self.value(tensor)
        if not only_ones_differ(wanted, value):
            return tensor
        ones = [dim for dim, size in enumerate(value.shape) if type(size) is int and size == 1]
        tensor = self.write(aten.squeeze.dims, tensor, ones)
        for dim in ones:
            tensor = self.write(aten.unsqueeze.default, tensor, dim)
        return tensor

    def reshaped(self, tensor: Any, shape: list[int]) -> Any:
        value = self.value(tensor)
        if not all(type(number) is int for number in (*value.shape, *value.stride())):
            raise NotApplied("whether a reshape copies depends on sizes that nobody knows yet")
        return tensor if list(value.shape) == shape else self.write(aten.reshape.default, tensor, shape)


def certain(value: Any, dim: int) -> bool:
    """Whether it is known, for every size that the symbols may stand for, if an axis and the next are one in memory."""
    both = value.shape[dim : dim + 2]
    outer, inner = value.stride(dim), value.stride(dim + 1) * both[1]
    if any(type(size) is int and size == 1 for size in both) or torch_api.known_equal(outer, inner):
        return True
    apart = torch_api.known_true(outer != inner) and all(torch_api.known_true(size > 1) for size in both)
    return apart and all(torch_api.known_true(size > 0) for size in value.shape)
