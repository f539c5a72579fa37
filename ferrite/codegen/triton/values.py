"""Expressions as lines of Triton source, one per node: what one statement evaluates, each node once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ferrite.codegen.triton.indices import WIDE, IndexText, is_narrow, without
from ferrite.codegen.triton.interleaved_loads import Pair
from ferrite.codegen.triton.launch import Block
from ferrite.codegen.triton.module import NO_DIMS, BlockAxis, Dims, Known, Mask, Module, Scope, Tile, Value
from ferrite.codegen.triton.operators import (
    APART,
    INFIX_NAMES,
    constant,
    converted,
    literal,
    operation,
    plain_number,
    rounds_apart,
)
from ferrite.errors import NotGenerated
from ferrite.ir import (
    DIGITS,
    ZERO,
    Atom,
    Cast,
    Const,
    Data,
    Expr,
    Index,
    IndexValue,
    Load,
    Local,
    Masked,
    Op,
    Param,
    Random,
    Sum,
    axis,
    data_of,
    indices_of,
    number,
    substitute,
)

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
Masks = tuple[Mask, ...]
Place = tuple[Value, tuple[Value, ...]]  # an index, and where what it read from memory is inside its extent


class Evaluation:
    """The values of one statement, and what is known of statements before it. A load under a mask touches memory only
    where it holds. `params`: what parameters of an expression are; nothing of that is known elsewhere."""

    def __init__(self, module: Module, scope: Scope, params: Sequence[Value] = ()) -> None:
        self.module, self.scope, self.params = module, scope, params
        self.known = Known() if params else module.known
        self.fillings: dict[tuple[Expr, Masks], Const] = {}  # what a load under a mask gives where it does not hold

    # --- nodes --------------------------------------------------------------------------------------------------------

    def value(self, root: Expr) -> Value:
        stack = [(root, self.scope.masks)]
        while stack:  # no recursion: expressions may be deep
            item, masks = stack[-1]
            key = self.key(item, masks)
            if key in self.known:
                stack.pop()
                continue
            missing = [pair for pair in self.parts(item, masks) if self.key(*pair) not in self.known]
            if not missing:
                stack.pop()
                before, self.module.note = self.module.note, self.module.note_of(item)
                self.known.set(key, self.compute(item, masks))
                self.module.note = before
            else:
                stack += reversed(missing)
        return self.get(root, self.scope.masks)

    def key(self, item: Expr, masks: Masks) -> tuple[str, Expr, Masks]:
        """What is known under a weaker mask is known under this one."""
        if not item.loads and not any(isinstance(atom, Data) for atom in item.atoms):
            return "value", item, ()
        around: Masks | None = masks
        while around is not None:
            if ("value", item, around) in self.known:
                return "value", item, around
            around = self.known.get(("outer", around))
        return "value", item, masks

    def get(self, item: Expr, masks: Masks) -> Value:
        found = self.known.get(self.key(item, masks))
        assert isinstance(found, Value)
        return found

    def parts(self, item: Expr, masks: Masks) -> list[tuple[Expr, Masks]]:
        found = [(value, masks) for index in indices_of(item) for value in data_of(index)]
        if isinstance(item, Op) and compares_indices(item):
            return [(value, masks) for part in item.operands for index in indices_of(part) for value in data_of(index)]
        if not isinstance(item, Masked):
            return found + [(part, masks) for part in item.args]
        if self.key(item.mask, masks) not in self.known:
            return [(item.mask, masks)]
        inner = self.under(self.get(item.mask, masks), masks)
        if isinstance(item.value, Load) and isinstance(item.other, Const) and filling(item.other) is not None:
            self.fillings.setdefault((item.value, inner), item.other)
        return [(item.value, inner), (item.other, masks)]

    def compute(self, item: Expr, masks: Masks) -> Value:
        match item:
            case Const():
                return Value(constant(item))
            case Local():
                return self.module.values[item.name]
            case Param():
                return self.params[item.position]
            case Load():
                return self.load(item, masks)
            case IndexValue():
                place, _ = self.index(item.index, masks)
                if item.dtype is torch.int32 and is_narrow(item.index):
                    return self.named(place.text, place.dims)
                text = f"tl.cast({place.text}, tl.int64)"
                return self.named(converted(self.module.needs, text, torch.int64, item.dtype), place.dims)
            case Cast():
                arg = self.get(item.arg, masks)
                return self.named(converted(self.module.needs, arg.text, item.arg.dtype, item.dtype), arg.dims)
            case Op():
                return self.operation(item, masks)
            case Masked():
                mask = self.get(item.mask, masks)
                inner = self.under(mask, masks)
                value = self.get(item.value, inner)
                if self.module.filled.get(value.text) == (item.other, inner):
                    return value
                return self.call("tl.where", mask, value, self.get(item.other, masks))
            case Random():
                return self.random(item, masks)
        raise TypeError(f"no Triton source for {type(item).__name__}")

    def named(self, text: str, dims: Dims) -> Value:
        return Value(self.module.set("v", text), dims)

    def call(self, function: str, *values: Value) -> Value:
        dims, texts = self.together(*values)
        return self.named(f"{function}({', '.join(texts)})", dims)

    def together(self, *values: Value) -> tuple[Dims, list[str]]:
        """The dimensions of all, and their texts at one rank."""
        dims = NO_DIMS.union(*(value.dims for value in values))
        return dims, [value.at(max(dims, default=-1) + 1) for value in values]

    def operation(self, item: Op, masks: Masks) -> Value:
        if compares_indices(item):
            values = [self.compared(operand, masks) for operand in item.operands]
        else:
            values = [self.get(operand, masks) for operand in item.operands]
        dims, texts = self.together(*values)
        if rounds_apart(item, self.module.products):
            self.module.needs(APART[item.name])
            return self.named(f"{APART[item.name]}({', '.join(texts)})", dims)
        if item.name in INFIX_NAMES and not all(isinstance(operand, Const) for operand in item.operands):
            plain = [plain_number(operand) if isinstance(operand, Const) else None for operand in item.operands]
            texts = [number or text for number, text in zip(plain, texts, strict=True)]
        quick = self.module.quick or (self.module.exact is not None and item not in self.module.exact)
        if quick and item in self.module.beside_one and item.dtype is torch.float32:
            self.module.needs("quick_exp")
            return self.named(f"quick_exp({texts[0]})", dims)
        return self.named(operation(self.module.needs, item, texts, quick, self.module.at_least_one), dims)

    def compared(self, item: Expr, masks: Masks) -> Value:
        """An index beside another one, in the type that indices have here."""
        if isinstance(item, Const):
            return Value(constant(item))
        assert isinstance(item, IndexValue)
        key = ("compared", item)
        if key not in self.known:
            place, _ = self.index(item.index, masks)
            self.known.set(key, place if place.text.isidentifier() else self.named(place.text, place.dims))
        found: Value = self.known.get(key)
        return found

    def random(self, item: Random, masks: Masks) -> Value:
        seed, places = self.get(item.seed, masks), [self.index(each, masks)[0] for each in (item.counter, item.stream)]
        dims, given = self.together(seed, *(Value(f"tl.cast({each.text}, tl.int64)", each.dims) for each in places))
        needs = self.module.needs
        if item.dtype is torch.float64 or item.kind == "bits":
            name, made = ("random_bits", torch.int64) if item.kind == "bits" else ("random_double", torch.float64)
            needs(name)
            return self.named(converted(needs, f"{name}({', '.join(given)})", made, item.dtype), dims)
        four = self.fours(item.counter, item.stream) if not seed.dims else None
        drawn, words = ("random_word", given) if four is None else ("random_four", [seed.text, *four])
        name, more = ("random_float", f", {DIGITS[item.dtype]}") if item.kind == "uniform" else ("curand_float", "")
        needs(drawn)
        needs(name)
        text = f"{name}({drawn}({', '.join(words)}){more})"
        return self.named(converted(needs, text, torch.float32, item.dtype), dims)

    def fours(self, counter: Index, stream: Index) -> list[str] | None:
        """The counter and the stream of every fourth lane, where four lanes side by side have one stream, and counters
        side by side from a multiple of four on: their words come from one block."""
        if len(self.scope.axes) != 1:
            return None
        (lane,) = self.scope.axes
        block, base = lane.block, self.module.bases.get(lane.axis)
        if base is None or block.most % 4 or not block.name.isdigit() or data_of(counter) or data_of(stream):
            return None
        fourth = axis("fourth_lane", (lane.axis.extent + 3) // 4) * 4
        first, *others = [[substitute(each, {lane.axis: fourth + n}) for each in (counter, stream)] for n in range(4)]
        if first[0] % number(4) is not ZERO or any(
            other != [first[0] + n, first[1]] for n, other in enumerate(others, 1)
        ):
            return None
        _, wide = self.module.atoms[lane.axis]
        lanes = Value(f"({base or 0} + tl.arange(0, {block.most // 4}) * 4)", frozenset([0])), wide
        texts = [self.index(each, at={lane.axis: lanes})[0] for each in (counter, stream)]
        if any(not text.dims <= frozenset([0]) for text in texts):
            return None
        return [f"tl.cast({each.text}, tl.int64)" for each in texts]

    # --- masks --------------------------------------------------------------------------------------------------------

    def under(self, mask: Value, masks: Masks) -> Masks:
        """The lanes of a mask that count. It stands for all others: lanes beyond an extent may hold anything."""
        inner: Masks | None = self.known.get(("inner", mask, masks))
        if inner is None:
            inner = (Mask(self.both(mask, *(item.value for item in masks))),)
            self.known.set(("inner", mask, masks), inner)
            self.known.set(("outer", inner), masks)
            self.known.set(("parts", inner), (Mask(mask), *self.parts_of(masks)))
        return inner

    def parts_of(self, masks: Masks) -> Masks:
        """The masks that some were made of."""
        found = [self.known.get(("parts", (mask,))) or (mask,) for mask in masks]
        return tuple(part for some in found for part in some)

    def both(self, *masks: Value) -> Value:
        if len(masks) == 1:
            return masks[0]
        joined: Value | None = self.known.get(("both", masks))
        if joined is None:
            dims, texts = self.together(*masks)
            joined = Value(self.module.set("mask", " & ".join(texts)), dims)
            self.known.set(("both", masks), joined)
        return joined

    def guard(self, masks: Masks, dims: Dims, inside: Sequence[Value] = ()) -> Value | None:
        """Where an access that differs along these dimensions is made; None: everywhere.

        The bounds of another dimension do not matter: some lane of it is inside, and makes the same access.
        """
        dims = dims.union(*(value.dims for value in inside))
        while True:
            kept = [mask.value for mask in masks if mask.bounds is None or mask.bounds in dims]
            wider = dims.union(*(value.dims for value in kept))
            if wider == dims:
                break
            dims = wider
        kept += inside
        return self.both(*kept) if kept else None

    # --- indices and memory -------------------------------------------------------------------------------------------

    def index(
        self, index: Index, masks: Masks | None = None, at: Mapping[Atom, tuple[Value, bool]] | None = None
    ) -> Place:
        """Evaluates what it reads first, if nothing has. `at`: atoms that stand for something else here."""
        masks = self.scope.masks if masks is None else masks
        found: dict[Atom, tuple[Value, bool]] = {}
        inside = []
        for atom in sorted(index.atoms, key=lambda atom: atom.text):
            if isinstance(atom, Data):
                value, wide, fits = self.datum(atom, masks)
                found[atom] = value, wide
                inside.append(fits)
            else:
                found[atom] = (at or {}).get(atom) or self.module.atoms[atom]
        dims = NO_DIMS.union(*(value.dims for value, _ in found.values()))
        rank = max(dims, default=-1) + 1
        look = {atom: (value.at(rank), wide) for atom, (value, wide) in found.items()}
        text, wide = IndexText(look.__getitem__, self.module.needs, self.module.index_type, self.module.named).text(
            index
        )
        if wide:
            self.module.wide_indices[without(index, self.module.drawn)] = None
        return Value(text, dims), tuple(inside)

    def datum(self, atom: Data, masks: Masks) -> tuple[Value, bool, Value]:
        """A checked index: its value, whether it is 64 bits wide, and where it is inside."""
        key = ("datum", atom, masks)
        found: tuple[Value, bool, Value] | None = self.known.get(key)
        if found is None:
            found = self.checked(atom, masks)
            self.known.set(key, found)
        return found

    def checked(self, atom: Data, masks: Masks) -> tuple[Value, bool, Value]:
        given = self.get(atom.value, masks) if self.key(atom.value, masks) in self.known else self.value(atom.value)
        value = Value(self.module.set("at", f"tl.cast({given.text}, tl.int64)"), given.dims)
        extent, _ = self.index(atom.extent, masks)
        dims, (left, right) = self.together(value, extent)
        inside = Value(self.module.set("inside", f"({left} >= 0) & ({left} < {right})"), dims)
        wrong = Value(f"~{inside.text}", dims)
        counted = self.guard(masks, dims)
        if counted is not None:
            wide, (part, outside) = self.together(counted, inside)
            wrong = Value(f"{part} & ~{outside}", wide)
        number = self.module.checks.index(atom) + 1
        _, texts = self.together(value, extent, wrong)
        self.module.needs("report")
        self.module.line(f"report(failure, {number}, {', '.join(texts)})")
        if not is_narrow(atom):
            same = self.module.index_type == WIDE
            return (value if same else self.named(self.module.widened(value.text), value.dims)), True, inside
        return Value(self.module.set("at", f"tl.cast({value.text}, tl.int32)"), value.dims), False, inside

    def load(self, item: Load, masks: Masks) -> Value:
        tile = self.module.tiles.get(item.buffer)
        if tile is not None:
            return self.tile(tile, item.coordinates)
        other = self.fillings.get((item, masks))
        pair = self.module.pairs.get(item)
        if pair is not None and (both := self.pair(pair, masks, other)) is not None:
            return both[pair.place]
        pointer, guard, dims = self.pointer(item.buffer, item.coordinates[0], masks)
        masked = "" if guard is None else f", mask={guard}, other={filling(other) if other is not None else 0}"
        masked += self.module.eviction_of(item.buffer)
        found = self.named(f"tl.load({pointer}{masked})", dims)
        if other is not None and guard is not None:
            self.module.filled[found.text] = other, masks
        return found

    def pair(self, pair: Pair, masks: Masks, other: Const | None) -> tuple[Value, Value] | None:
        """An even place and the one behind it. Where that is there less often, it comes later: then there is a pair."""
        key = ("pair", pair.even)
        if key not in self.known and pair.place == 0:
            both = self.load_pair(pair, masks, other)
            self.known.set(key, both)
            if both is not None and other is not None and masks:
                self.module.filled |= {value.text: (other, masks) for value in both}
        found: tuple[Value, Value] | None = self.known.get(key)
        return found

    def load_pair(self, pair: Pair, masks: Masks, other: Const | None) -> tuple[Value, Value] | None:
        """Both elements for every lane; None where a mask tells lanes apart otherwise than by an extent."""
        module, axes = self.module, self.scope.axes
        lane, last = axes[-1], len(axes) - 1
        base = module.bases[lane.axis]
        lanes = f"tl.arange(0, {2 * lane.block.most})[{'None, ' * last}:]"
        places = module.set("j", f"({base}) * 2 + {lanes}" if base else lanes)
        _, wide = module.atoms[lane.axis]
        kept = []
        for mask in self.parts_of(masks):
            if last not in mask.value.dims:
                kept.append(mask.value.at(last + 1))
            elif mask.bounds == last:
                end, _ = self.index(pair.end)
                if end.dims:
                    return None
                kept.append(f"({places} < {end.text})")
            else:
                return None
        start, inside = self.index(pair.even.coordinates[0], at={lane.axis: (Value("0"), wide)})
        assert not inside
        names = [axis.block.name for axis in axes[:-1]]
        shape = [*names, str(2 * lane.block.most)]
        pointer = f"{module.pointers[pair.even.buffer]} + ({start.at(last + 1)} + {places})"
        pointer = f"tl.broadcast_to({pointer}, [{', '.join(shape)}])"
        masked = ""
        if kept:
            masked = f", mask={' & '.join(kept)}, other={(filling(other) if other is not None else None) or 0}"
        loaded = module.set("v", f"tl.load({pointer}{masked}{module.eviction_of(pair.even.buffer)})")
        first, second = module.fresh("v"), module.fresh("v")
        module.line(
            f"{first}, {second} = tl.split(tl.reshape({loaded}, [{', '.join([*names, lane.block.name, '2'])}]))"
        )
        dims = frozenset(range(last + 1))
        return Value(first, dims), Value(second, dims)

    def pointer(
        self, buffer: str, coordinate: Index, masks: Masks, spread: Dims = NO_DIMS
    ) -> tuple[str, str | None, Dims]:
        """An address for every lane, where it may be touched, and along which dimensions it differs or is spread."""
        place, inside = self.index(coordinate, masks)
        guard = self.guard(masks, place.dims | spread, inside)
        dims = place.dims | spread | (guard.dims if guard is not None else NO_DIMS)
        rank = max(dims, default=-1) + 1
        known = self.known.get(("address", coordinate, buffer))
        if isinstance(coordinate, Sum) and coordinate.constant and place.dims and not inside:
            text = f"{self.near(buffer, coordinate - coordinate.constant, rank)} + {coordinate.constant}"
        elif known is not None:
            text = known.at(rank)
        else:
            text = f"{self.module.pointers[buffer]} + {_grouped(place, rank)}"
        if place.dims != dims:
            text = f"tl.broadcast_to({text}, {self.scope.shape(dims)})"
        return text, None if guard is None else guard.at(rank), dims

    def near(self, buffer: str, coordinate: Index, rank: int) -> str:
        """An address to which only a number has to be added, which a load does by itself: the elements of a window
        share one."""
        found: Value | None = self.known.get(("address", coordinate, buffer))
        if found is None:
            place, _ = self.index(coordinate)
            found = self.named(f"{self.module.pointers[buffer]} + {_grouped(place, place.rank)}", place.dims)
            self.known.set(("address", coordinate, buffer), found)
        return found.at(rank)

    def tile(self, tile: Tile, coordinates: Sequence[Index]) -> Value:
        """A tile is one block: it can be used where lane i of a dimension is place i, and nowhere else. Its dimensions
        are those of the scope in their order; where the scope has more between, the tile has size one there."""
        kept = list(range(tile.depth))
        dim = tile.depth
        for coordinate, block in zip(coordinates, tile.blocks, strict=True):
            if block is None:
                if coordinate.high != 0:
                    raise NotGenerated(f"scratch memory at {coordinate}, which is not a lane of a block")
                continue
            while dim < len(self.scope.axes) and not _is_lane(self.scope.axes[dim], coordinate, block):
                dim += 1
            if dim == len(self.scope.axes):
                raise NotGenerated(f"scratch memory at {coordinate}, which is not a lane of a block")
            kept.append(dim)
            dim += 1
        places = [":" if place in kept else "None" for place in range(max(kept, default=-1) + 1)]
        text = tile.text if "None" not in places else f"{tile.text}[{', '.join(places)}]"
        return Value(text, frozenset(kept))


def compares_indices(item: Op) -> bool:
    """Whether it compares nothing but indices and numbers, which it need not have in 64 bits."""
    places = [isinstance(each, IndexValue) and each.dtype is torch.int64 for each in item.operands]
    numbers = [isinstance(each, Const) and each.dtype is torch.int64 for each in item.operands]
    every = all(one or other for one, other in zip(places, numbers, strict=True))
    return item.name in COMPARISONS and any(places) and every


def filling(other: Const) -> str | None:
    """A number as what a load gives where it reads nothing. No infinity of 16 bits: where it is all that a lane has, as
    the fourth of a window of three, the assembler of CUDA 12 finds the greater of two negative ones, in instructions
    for pairs of 16 bits that LLVM chooses, to be positive."""
    value = other.value
    if other.dtype is torch.bool or isinstance(value, complex) or value != value:
        return None
    if other.dtype.itemsize == 2 and other.dtype.is_floating_point and math.isinf(value):
        return None
    return None if value == 0 and other.bits else literal(value)


def _is_lane(around: BlockAxis, coordinate: Index, block: Block) -> bool:
    return around.axis is coordinate and around.block == block and around.whole


def _grouped(place: Value, rank: int) -> str:
    """The text of an index beside which something is added."""
    text = place.at(rank)
    return f"({text})" if text == place.text and " " in text else text
