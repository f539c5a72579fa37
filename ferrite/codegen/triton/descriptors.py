"""Blocks of factors that a GPU moves by itself: from a descriptor of a matrix, and where the block begins.

    d0 = tl.make_tensor_descriptor(p1, [4096, 1024], [1024, 1], [128, 64])
    ...
    block = d0.load([row, k])

No thread computes an address, and what lies outside of the matrix is zero. A descriptor needs memory that begins at a
multiple of 16 bytes, and rows that do: for other memory the same source is compiled with `DESCRIPTORS = 0`, and loads
blocks by pointers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ferrite.codegen.triton.module import BlockAxis, Module, Scope
from ferrite.ir import ONE, ZERO, Axis, Expr, Index, Load, Number, substitute
from ferrite.schedule import step_of

ALIGNED_BYTES = 16  # bytes
MAX_SIDE = 256  # elements of a block along one dimension


@dataclass(frozen=True)
class Described:
    """A block of a factor by its descriptor. `turned`: its two dimensions are the other way round in memory."""

    name: str
    start: tuple[str, ...]
    shape: str
    turned: bool
    in_batch: bool

    @property
    def text(self) -> str:
        block = f"{self.name}.load([{', '.join(self.start)}])"
        if self.in_batch:
            block = f"tl.reshape({block}, {self.shape})"
        return f"{block}.T" if self.turned else block


def described(module: Module, value: Expr, scope: Scope) -> Described | None:
    """How a block of a factor is loaded by a descriptor; None where it cannot be. `scope`: its two dimensions."""
    if not module.describes or not isinstance(value, Load) or len(value.coordinates) != 1 or len(scope.axes) != 2:
        return None
    (place,) = value.coordinates
    size, first, second = value.dtype.itemsize, *scope.axes
    turned = step_of(place, first.axis) is ONE
    rows, inner = (second, first) if turned else (first, second)
    step = numeric(step_of(place, rows.axis))
    others = [atom for atom in place.atoms if atom not in (first.axis, second.axis)]
    if step_of(place, inner.axis) is not ONE or step is None or len(others) > 1:
        return None
    extents = [numeric(item.axis.extent) for item in (rows, inner)]
    batch = others[0] if others else None
    if batch is not None:
        if not isinstance(batch, Axis):
            return None
        extents.insert(0, numeric(batch.extent))
    apart = [numeric(step_of(place, batch))] if isinstance(batch, Axis) else []
    base = offset_of(place, [item for item in (batch, first.axis, second.axis) if isinstance(item, Axis)])
    if base is None or None in extents or None in apart:
        return None
    steps = [*(each for each in apart if each is not None), step]
    if any(each <= 0 or each * size % ALIGNED_BYTES for each in steps) or base * size % ALIGNED_BYTES:
        return None
    if any(item.block.most > MAX_SIDE for item in (rows, inner)) or inner.block.most * size < ALIGNED_BYTES:
        return None
    lengths = [rows.block.name, inner.block.name]
    pointer = module.pointers[value.buffer]
    source = f"{pointer} + {base}" if base else pointer
    ones = ["1"] if batch is not None else []
    text = f"tl.make_tensor_descriptor({source}, {extents}, {[*steps, 1]}, [{', '.join([*ones, *lengths])}])"
    start = [start_of(module, rows), start_of(module, inner)]
    if isinstance(batch, Axis):
        start.insert(0, module.atoms[batch][0].text)
    shape = f"[{', '.join(lengths)}]"
    return Described(module.descriptor(text), tuple(start), shape, turned, batch is not None)


def start_of(module: Module, item: BlockAxis) -> str:
    return module.bases.get(item.axis) or "0"


def numeric(index: Index | None) -> int | None:
    return index.value if isinstance(index, Number) else None


def offset_of(place: Index, axes: list[Axis]) -> int | None:
    """Where a place is with all axes at their beginning."""
    found = substitute(place, dict.fromkeys(axes, ZERO))
    return found.value if isinstance(found, Number) else None
