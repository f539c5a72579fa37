"""The slow, obvious meaning of scalar expressions: every element at once, as torch tensors over the axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ferrite.ir.expr import Cast, Const, Data, Expr, IndexValue, Load, Masked, Op, Param, Random
from ferrite.ir.index.algebra import Atom, Axis, Index, Number
from ferrite.ir.index.substitution import evaluate
from ferrite.ir.random import random_numbers
from ferrite.ir.scalar import OPERATORS
from ferrite.ir.types import tensor_of

Known = Mapping[Atom, Any]


class OutOfBounds(IndexError):
    """A coordinate lies outside its buffer: a program that the laws should have refused."""


def out_of_bounds(complaint: str, index: int, size: int) -> Exception:
    """The error that eager raises of an index that points outside."""
    kind, _, message = complaint.partition(": ")
    wrapped = index - size if index < 0 else index
    return ERRORS[kind](message.format(index=index, wrapped=wrapped, size=size))


SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
ERRORS = {"IndexError": IndexError, "RuntimeError": RuntimeError}


class Points:
    """All points of some axes: evaluates expressions there, each once. Results broadcast over the axes."""

    def __init__(
        self,
        axes: Sequence[Axis],
        sizes: Known,
        tensor: Callable[[str], torch.Tensor],
        device: torch.device | str = "cpu",
        params: Sequence[torch.Tensor] = (),
    ) -> None:
        self.axes, self.tensor, self.device, self.params = tuple(axes), tensor, device, params
        self.shape = tuple(int(evaluate(axis.extent, sizes)) for axis in axes)
        self.sizes = sizes
        self.places = {axis: place for place, axis in enumerate(self.axes)}
        self.mask: torch.Tensor | None = None
        self.computed: dict[Expr, torch.Tensor] = {}
        self.coordinates: dict[Atom, Any] = {}

    def under(self, mask: torch.Tensor) -> Points:
        """The same points, of which only those under the mask count."""
        inner = Points.__new__(Points)
        inner.__dict__.update(self.__dict__)
        inner.mask = mask if self.mask is None else mask & self.mask
        inner.computed, inner.coordinates = {}, {}
        return inner

    def along(self, axis: Axis) -> torch.Tensor:
        place = self.places[axis]
        return torch.arange(self.shape[place], device=self.device).reshape(
            [-1 if other == place else 1 for other in range(len(self.shape))]
        )

    def atom(self, atom: Atom) -> Any:
        if atom not in self.coordinates:
            if isinstance(atom, Axis):
                value: Any = self.along(atom)
            elif isinstance(atom, Data):
                value = self.checked(self(atom.value).to(torch.int64), self.index(atom.extent), atom.complaint)
            else:
                value = self.sizes[atom]
            self.coordinates[atom] = value
        return self.coordinates[atom]

    def index(self, index: Index) -> Any:
        return evaluate(index, self.atom)

    def checked(self, value: torch.Tensor, size: Any, complaint: str) -> torch.Tensor:
        wrong = (value < 0) | (value >= size)
        if self.mask is not None:
            wrong = wrong & self.mask
        if bool(wrong.any()):
            first = int(value.broadcast_to(wrong.shape)[wrong][0])
            raise out_of_bounds(complaint, first, int(torch.as_tensor(size).max()))
        return value.clamp(torch.zeros_like(value), torch.as_tensor(size, device=value.device).clamp(min=1) - 1)

    def __call__(self, expr: Expr) -> torch.Tensor:
        found = self.computed.get(expr)
        if found is None:
            found = self.computed[expr] = self.value(expr)
        return found

    def value(self, expr: Expr) -> torch.Tensor:
        match expr:
            case Const():
                return tensor_of(expr.bits, expr.dtype).to(self.device)
            case IndexValue():
                return torch.as_tensor(self.index(expr.index), device=self.device).to(expr.dtype)
            case Load():
                return self.loaded(self.tensor(expr.buffer), expr.coordinates)
            case Op(name="bitcast"):
                return self(expr.operands[0]).contiguous().view(expr.dtype)
            case Op():
                return OPERATORS[expr.name].meaning(*map(self, expr.operands))
            case Cast():
                return self(expr.arg).to(expr.dtype)
            case Masked():
                mask = self(expr.mask)
                return torch.where(mask, self.under(mask)(expr.value), self(expr.other))
            case Random():
                places = (self.index(each) for each in (expr.counter, expr.stream))
                counter, stream = (torch.as_tensor(place, device=self.device) for place in places)
                return random_numbers(expr.kind, self(expr.seed), counter, stream, expr.dtype)
            case Param():
                return self.params[expr.position]
        raise TypeError(f"no meaning for {type(expr).__name__}")

    # --- memory -------------------------------------------------------------------------------------------------------

    def loaded(self, tensor: torch.Tensor, coordinates: Sequence[Index]) -> torch.Tensor:
        view = self.view(tensor, coordinates)
        if view is not None:
            return view
        if tensor.numel() == 0:  # nothing to read: only points that do not count ask for it
            self.check(tensor, coordinates)
            return torch.zeros((), dtype=tensor.dtype, device=self.device)
        return tensor[self.check(tensor, coordinates)]

    def check(self, tensor: torch.Tensor, coordinates: Sequence[Index]) -> tuple[torch.Tensor, ...]:
        """Coordinates as tensors, inside the tensor wherever a point counts (there or nowhere at all)."""
        places = []
        for place, size in zip(map(self.index, coordinates), tensor.shape, strict=True):
            value = torch.as_tensor(place, device=self.device)
            outside = (value < 0) | (value >= size)
            if self.mask is not None:
                outside = outside & self.mask
            if 0 not in self.shape and bool(outside.any()):
                raise OutOfBounds(f"coordinate outside a dimension of size {size}")
            places.append(value.clamp(0, max(size - 1, 0)))
        return tuple(places)

    def view(self, tensor: torch.Tensor, coordinates: Sequence[Index]) -> torch.Tensor | None:
        """The part of a tensor that plain axes and numbers name, laid out over the axes, looking at no element."""
        order: list[Axis] = []
        at: list[int | slice] = []
        for size, coordinate in zip(tensor.shape, coordinates, strict=True):
            if isinstance(coordinate, Number) and 0 <= coordinate.value < size:
                at.append(coordinate.value)
            elif isinstance(coordinate, Axis) and coordinate not in order and self.extent(coordinate) == size:
                at.append(slice(None))
                order.append(coordinate)
            else:
                return None
        part = tensor[tuple(at)]
        ranked = sorted(range(len(order)), key=lambda place: self.places[order[place]])
        shape = [1] * len(self.axes)
        for axis in order:
            shape[self.places[axis]] = self.shape[self.places[axis]]
        return part.permute(ranked).reshape(shape) if part.dim() else part

    def extent(self, axis: Axis) -> int | None:
        return self.shape[self.places[axis]] if axis in self.places else None

    def full(self, value: torch.Tensor) -> torch.Tensor:
        return value.broadcast_to(self.shape)

    def store(self, tensor: torch.Tensor, coordinates: Sequence[Index], value: torch.Tensor, mode: str) -> None:
        value = self.full(value)
        if value.numel() == 0:
            return
        plain = all(isinstance(item, Axis) for item in coordinates) and len(coordinates) == len(self.axes)
        plain = plain and len(set(coordinates)) == len(coordinates)
        if mode == "set" and plain and tuple(tensor.shape) == tuple(self.shape[self.places[a]] for a in coordinates):  # type: ignore[index]
            tensor.copy_(value.permute([self.places[axis] for axis in coordinates]))  # type: ignore[index]
            return
        places = tuple(place.broadcast_to(self.shape) for place in self.check(tensor, coordinates))
        if mode in ("set", "add"):  # the same bits, where torch puts no unsigned integers
            tensor, value = (each.view(SIGNED.get(each.dtype, each.dtype)) for each in (tensor, value))
        if mode == "set":
            tensor[places] = value
        else:
            combine(tensor, places, value, mode)


def combine(tensor: torch.Tensor, places: Sequence[torch.Tensor], value: torch.Tensor, mode: str) -> None:
    """Every value joins what is at its place, one after the other."""
    dense = tensor.contiguous()
    flat = torch.zeros((), dtype=torch.int64, device=value.device)
    for place, size in zip(places, tensor.shape, strict=True):
        flat = flat * size + place
    flat = flat.broadcast_to(value.shape).reshape(-1)
    if mode == "add":
        dense.view(-1).index_put_((flat,), value.reshape(-1), accumulate=True)
    else:
        name = {"mul": "prod"}.get(mode, mode)
        dense.view(-1).scatter_reduce_(0, flat, value.reshape(-1), name, include_self=True)
    tensor.copy_(dense)
