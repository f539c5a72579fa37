"""Index arithmetic as 64-bit integers, and where elements lie.

Sums are written from the outermost axis to the innermost, so that what belongs to a row is computed once per row. A
vector of indices is made of 32-bit integers where the bounds prove that they fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ferrite.codegen.llvm.emission import AxisValue, Emission, Value
from ferrite.codegen.llvm.types import is_literal, vector
from ferrite.ir import (
    ONE,
    ZERO,
    Atom,
    Axis,
    Data,
    FloorDiv,
    Index,
    Max,
    Min,
    Mod,
    Number,
    Product,
    Sum,
    Symbol,
    data_atoms,
    number,
)

LIMIT_IN_32_BITS = 1 << 31


@dataclass(frozen=True)
class LaneIndex:
    """An index in one copy: a scalar, or a vector."""

    name: str
    lanes: int = 1


class Indices:
    def __init__(self, emission: Emission, data: Callable[[Data], Value]) -> None:
        self.e = emission
        self.data = data

    # --- values -------------------------------------------------------------------------------------------------------

    def value(self, index: Index) -> Value:
        """An index as numbers, 32 or 64 bits wide."""
        element = "i32" if fits(index) else "i64"
        found = [self.at(index, replica, element) for replica in range(self.copies(index))]
        lanes = max(item.lanes for item in found)
        return Value(tuple(self.e.splat(item.name, element, lanes // item.lanes) for item in found), element, lanes)

    def scalar(self, index: Index) -> str:
        """An index that no vector axis is in: an extent."""
        return self.at(index, 0, "i64").name

    def copies(self, index: Index) -> int:
        """How many different copies there may be: one, or all of them."""
        axes = all(len(self.e.axes[atom].shifts) == 1 for atom in index.atoms if isinstance(atom, Axis))
        return 1 if axes and all(map(self._once, data_atoms(index))) else self.e.replicas

    def _once(self, atom: Data) -> bool:
        return len(self.data(atom).parts) == 1 and self.copies(atom.extent) == 1

    def at(self, index: Index, replica: int, element: str, lane_zero: bool = False) -> LaneIndex:
        """The index in one copy; `lane_zero`: in its first lane."""
        match index:
            case Number():
                return LaneIndex(str(index.value))
            case Atom():
                return self.atom(index, replica, element, lane_zero)
            case Sum():
                parts = [(self.at(item, replica, element, lane_zero), factor) for item, factor in index.terms]
                parts.sort(key=lambda part: self.rank(part[0].name))
                total = LaneIndex(str(index.constant))
                for item, factor in parts:
                    total = self.add(total, self.multiply(item, LaneIndex(str(factor)), element), element)
                return total
            case Product():
                parts = [(self.at(item, replica, element, lane_zero), 1) for item in index.factors]
                parts.sort(key=lambda part: self.rank(part[0].name))
                product = parts[0][0]
                for item, _ in parts[1:]:
                    product = self.multiply(product, item, element)
                return product
            case FloorDiv() | Mod():
                top = self.at(index.top, replica, element, lane_zero)
                return self.divide(index, top, self.at(index.bottom, replica, element, lane_zero), element)
            case Min() | Max():
                word = "smin" if isinstance(index, Min) else "smax"
                items = [self.at(item, replica, element, lane_zero) for item in index.items]
                items.sort(key=lambda item: self.rank(item.name))
                least = items[0]
                for item in items[1:]:
                    least = self.intrinsic(word, least, item, element)
                return least
        raise TypeError(f"no index: {index!r}")

    def atom(self, atom: Atom, replica: int, element: str, lane_zero: bool) -> LaneIndex:
        if isinstance(atom, Symbol):
            return self.as_element(self.e.here(f"%size.{atom.name}", "i64"), "i64", 1, element)
        if isinstance(atom, Data):
            value = self.data(atom)
            part = value.parts[replica * len(value.parts) // self.e.replicas]
            return self.as_element(part, value.element, value.lanes, element)
        assert isinstance(atom, Axis)
        axis = self.e.axes[atom]
        found = self.as_element(self.e.here(axis.base, "i64"), "i64", 1, element)
        found = self.add(found, LaneIndex(str(axis.shifts[replica * len(axis.shifts) // self.e.replicas])), element)
        if axis.lanes == 1 or lane_zero:
            return found
        return self.add(found, LaneIndex(self.lane_offsets(axis, element), axis.lanes), element)

    def lane_offsets(self, axis: AxisValue, element: str) -> str:
        if all(map(is_literal, axis.offsets)):
            return f"<{', '.join(f'{element} {offset}' for offset in axis.offsets)}>"
        return self.e.gathered([self.as_element(item, "i64", 1, element).name for item in axis.offsets], element)

    # --- arithmetic ---------------------------------------------------------------------------------------------------

    def rank(self, name: str) -> int:
        return self.e.function.rank.get(name, 0)

    def as_element(self, name: str, element: str, lanes: int, wanted: str) -> LaneIndex:
        if element == wanted or (is_literal(name) and lanes == 1):
            return LaneIndex(name, lanes)
        word = "trunc" if (element, wanted) == ("i64", "i32") else "sext"
        types = vector(element, lanes), vector(wanted, lanes)
        return LaneIndex(self.e.op(f"{word} {types[0]} {name} to {types[1]}", name), lanes)

    def both(self, left: LaneIndex, right: LaneIndex, element: str) -> tuple[str, str, int]:
        lanes = max(left.lanes, right.lanes)
        names = (
            item.name if item.lanes == lanes else self.e.splat(item.name, element, lanes) for item in (left, right)
        )
        return (*names, lanes)  # type: ignore[return-value]

    def binary(self, word: str, left: LaneIndex, right: LaneIndex, element: str) -> LaneIndex:
        one, other, lanes = self.both(left, right, element)
        return LaneIndex(self.e.op(f"{word} {vector(element, lanes)} {one}, {other}", one, other), lanes)

    def add(self, left: LaneIndex, right: LaneIndex, element: str) -> LaneIndex:
        if is_constant(left) and is_constant(right):
            return LaneIndex(str(int(left.name) + int(right.name)))
        if left.name == "0" or right.name == "0":
            return right if left.name == "0" else left
        return self.binary("add nsw", left, right, element)

    def multiply(self, left: LaneIndex, right: LaneIndex, element: str) -> LaneIndex:
        if is_constant(left) and is_constant(right):
            return LaneIndex(str(int(left.name) * int(right.name)))
        if left.name == "1" or right.name == "1":
            return right if left.name == "1" else left
        if left.name == "0" or right.name == "0":
            return LaneIndex("0")
        return self.binary("mul nsw", left, right, element)

    def intrinsic(self, word: str, left: LaneIndex, right: LaneIndex, element: str) -> LaneIndex:
        one, other, lanes = self.both(left, right, element)
        return LaneIndex(self.e.intrinsic(word, element, lanes, one, other), lanes)

    def divide(self, index: FloorDiv | Mod, top: LaneIndex, bottom: LaneIndex, element: str) -> LaneIndex:
        """Rounding down, whatever the signs. Written outside a loop it may meet a size that is 0, so it never traps."""
        quotient = isinstance(index, FloorDiv)
        if is_constant(top) and is_constant(bottom):
            pair = divmod(int(top.name), max(int(bottom.name), 1))
            return LaneIndex(str(pair[0 if quotient else 1]))
        if is_constant(bottom) and (value := int(bottom.name)) & (value - 1) == 0:
            if quotient:
                return self.binary("ashr", top, LaneIndex(str(value.bit_length() - 1)), element)
            return self.binary("and", top, LaneIndex(str(value - 1)), element)
        if (index.bottom.low or 0) < 1:
            bottom = self.intrinsic("smax", bottom, LaneIndex("1"), element)
        if index.top.low is not None and index.top.low >= 0:
            return self.binary("udiv" if quotient else "urem", top, bottom, element)
        rest = self.binary("srem", top, bottom, element)
        one, zero, lanes = self.both(rest, LaneIndex("0"), element)
        below = self.e.op(f"icmp slt {vector(element, lanes)} {one}, {zero}", one)
        type_ = vector(element, lanes)
        if quotient:
            plain = self.binary("sdiv", top, bottom, element)
            less = self.e.op(f"sext {vector('i1', lanes)} {below} to {type_}", below)
            return self.binary("add", plain, LaneIndex(less, lanes), element)
        moved = self.binary("add", rest, bottom, element)
        one, other, _ = self.both(moved, rest, element)
        return LaneIndex(
            self.e.op(f"select {vector('i1', lanes)} {below}, {type_} {one}, {type_} {other}", below, one, other), lanes
        )


def is_constant(item: LaneIndex) -> bool:
    return item.lanes == 1 and is_literal(item.name)


def fits(index: Index) -> bool:
    """Whether an index and all it is made of are integers of 32 bits; scalars are not worth asking."""
    if isinstance(index, Data) or index.low is None or index.high is None:
        return False
    if index.low <= -LIMIT_IN_32_BITS or index.high >= LIMIT_IN_32_BITS:
        return False
    if isinstance(index, Sum):
        reach = abs(index.constant) + sum(
            abs(factor) * max(abs(item.low or 0), abs(item.high or 0)) for item, factor in index.terms
        )
        return reach < LIMIT_IN_32_BITS and all(fits(item) for item, _ in index.terms)
    return all(map(fits, index.parts))


# --- how an index moves with an axis ----------------------------------------------------------------------------------


def factor_of(index: Index, axis: Axis, aligned: int = 1, lanes: int = 1) -> Index | None:
    """What the index grows by from one lane to the next; None where that is no single number.

    Division by a multiple of the lanes does not move within a vector that begins at a multiple of them.
    """
    if axis not in index.atoms:
        return ZERO
    match index:
        case Axis():
            return ONE
        case Sum():
            total: Index = ZERO
            for item, factor in index.terms:
                part = factor_of(item, axis, aligned, lanes)
                if part is None:
                    return None
                total = total + part * factor
            return total
        case Product():
            mine = [item for item in index.factors if axis in item.atoms]
            part = factor_of(mine[0], axis, aligned, lanes) if len(mine) == 1 else None
            if part is None:
                return None
            for item in index.factors:
                if item is not mine[0]:
                    part = part * item
            return part
        case FloorDiv(top=top, bottom=Number(value=value)) | Mod(top=top, bottom=Number(value=value)):
            if lanes == 1 or aligned % lanes or value % lanes or factor_of(top, axis) is not ONE:
                return None
            if (top - axis) % number(lanes) is not ZERO:
                return None
            return ZERO if isinstance(index, FloorDiv) else ONE
    return None
