"""Loads and stores. Under a mask nothing outside is touched: an address that does not count is replaced by one of
zeros, or the lanes are done one by one."""

from __future__ import annotations

import torch

from ferrite.codegen.llvm.addresses import Address, Addresses, flat_index
from ferrite.codegen.llvm.atomics import combine, combine_atomically
from ferrite.codegen.llvm.bounds import ZERO_BYTES, ZEROS, inside
from ferrite.codegen.llvm.emission import AxisValue, Emission, Value
from ferrite.codegen.llvm.indices import LaneIndex
from ferrite.codegen.llvm.operators import Words
from ferrite.codegen.llvm.types import BYTES, MEMORY, vector
from ferrite.ir import Axis, Load
from ferrite.ir.kernel import Prefetch, Store

WORD_BYTES = 4
CACHE_LINE_BYTES = 64  # bytes that come from memory together, on all processors of today


class LoadsAndStores:
    def __init__(self, emission: Emission, places: Addresses) -> None:
        self.e, self.places = emission, places

    # --- loads --------------------------------------------------------------------------------------------------------

    def load(self, node: Load) -> Value:
        element, memory = MEMORY[node.dtype], self.e.memory[node.buffer]
        steps = self.places.steps_in_a_row(flat_index(memory, node.coordinates)) if self.e.mask is None else None
        if steps is not None:
            return self.as_register(self.loaded_at_once(node, steps, element), node.dtype)
        places = self.places.of(memory, node.coordinates, element)
        return self.as_register(self.loaded(node.buffer, places, element), node.dtype)

    def load_word(self, first: Load) -> Value:
        """Four bytes side by side, of which this is the first."""
        places = self.places.of(self.e.memory[first.buffer], first.coordinates, MEMORY[first.dtype], WORD_BYTES)
        return self.loaded(first.buffer, places, "i32")

    def loaded_at_once(self, node: Load, steps: Axis, element: str) -> Value:
        """What the steps of a loop that is written out read one after the other: a vector, read once for all."""
        here = self.e.axes[steps]
        self.e.axes[steps] = AxisValue("0")
        places = self.places.of(self.e.memory[node.buffer], node.coordinates, element)
        self.e.axes[steps] = here
        rows = [self.one(node.buffer, place.pointers[0], element, here.written_out) for place in places]
        return Value(tuple(self.e.lane(row, element, here.written_out, int(here.base)) for row in rows), element, 1)

    def loaded(self, buffer: str, places: list[Address], element: str) -> Value:
        mask = self.e.mask
        count = max(len(places), len(mask.parts) if mask else 1)
        parts = []
        for row in range(count):
            place = places[row * len(places) // count]
            part = mask.parts[row * len(mask.parts) // count] if mask else None
            parts.append(
                self.plain(buffer, place, element) if part is None else self.under(buffer, place, element, part)
            )
        return Value(tuple(parts), element, 1 if places[0].kind == "one" else self.e.lanes)

    def prefetch(self, statement: Prefetch) -> None:
        """Ask for every line of a row once; for nothing that is not in one row, of elements or of words."""
        memory = self.e.memory[statement.buffer]
        for width in (1, WORD_BYTES) if memory.element == "i8" else (1,):
            places = self.places.of(memory, statement.coordinates, memory.element, width)
            if not all(place.kind == "row" for place in places):
                continue
            self.e.declare("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
            size = BYTES[memory.element]
            shifts = self.places.constant_shifts(flat_index(memory, statement.coordinates)) or range(len(places))
            lines = {shift * size // CACHE_LINE_BYTES: place for shift, place in zip(shifts, places, strict=False)}
            for place in lines.values():
                self.e.function.line(f"call void @llvm.prefetch.p0(ptr {place.pointers[0]}, i32 0, i32 3, i32 1)")
            return

    def as_register(self, value: Value, dtype: torch.dtype) -> Value:
        if dtype is not torch.bool:
            return value

        def truth(lanes: int, item: str) -> str:
            w = Words(self.e, "i8", lanes)
            return w.compare("ne", item, w.const(0))

        return self.e.map("i1", [value], truth)

    def plain(self, buffer: str, place: Address, element: str) -> str:
        if place.kind == "one":
            return self.one(buffer, place.pointers[0], element)
        if place.kind == "spread":
            return self.e.gathered([self.one(buffer, pointer, element) for pointer in place.pointers], element)
        if place.kind == "step":
            return self.picked(buffer, place, element)
        row = self.one(buffer, place.pointers[0], element, self.e.lanes)
        return row if place.kind == "row" else self.reversed(row, element)

    def picked(self, buffer: str, place: Address, element: str) -> str:
        """Every second or third element, out of vectors of which the last ends where the last of them lies."""
        lanes, step = self.e.lanes, place.step
        reach = step * (lanes - 1) + 1
        starts = [*range(0, reach - lanes, lanes), reach - lanes]
        rows = [
            self.one(buffer, self.places.beyond(place.pointers[0], LaneIndex(str(start)), element), element, lanes)
            for start in starts
        ]
        type_, found = vector(element, lanes), rows[0]
        at = {lane: lane * step for lane in range(lanes) if lane * step < lanes}  # lanes, and where `found` has them
        for start, row in zip(starts[1:], rows[1:], strict=True):
            new = {lane: lane * step - start for lane in range(lanes) if lane * step < start + lanes and lane not in at}
            places = [at[lane] if lane in at else lanes + new.get(lane, 0) for lane in range(lanes)]
            order = ", ".join(f"i32 {place}" for place in places)
            text = f"shufflevector {type_} {found}, {type_} {row}, <{lanes} x i32> <{order}>"
            found = self.e.op(text, found, row)
            at = {lane: lane for lane in (*at, *new)}
        return found

    def one(self, buffer: str, pointer: str, element: str, lanes: int = 1) -> str:
        function, type_ = self.e.function, vector(element, lanes)
        floor = function.floor(buffer)
        pointer = inside(self.e, buffer, pointer, element, lanes, False, floor)
        align = min(BYTES[element], BYTES[self.e.memory[buffer].element])  # words lie wherever bytes do
        text = f"load {type_}, ptr {pointer}, align {align}"
        key = f"{text} {buffer} {self.e.memory[buffer].version}"
        return function.op(text, pointer, floor=floor, key=key)

    def reversed(self, row: str, element: str) -> str:
        return self.e.op(self.turned(row, element), row)

    def turned(self, row: str, element: str) -> str:
        lanes = self.e.lanes
        type_, order = vector(element, lanes), ", ".join(f"i32 {lanes - 1 - lane}" for lane in range(lanes))
        return f"shufflevector {type_} {row}, {type_} poison, <{lanes} x i32> <{order}>"

    # --- loads under a mask -------------------------------------------------------------------------------------------

    def under(self, buffer: str, place: Address, element: str, mask: str) -> str:
        lanes = self.e.mask.lanes if self.e.mask else 1
        if place.kind == "step" and lanes > 1:
            place = Address("spread", tuple(self.lane_pointers(place, element)))
        if place.kind == "spread":
            bits = [self.e.lane(mask, "i1", lanes, lane) for lane in range(lanes)]
            pointers = [self.safe(pointer, bits[lane % lanes]) for lane, pointer in enumerate(place.pointers)]
            return self.plain(buffer, Address("spread", tuple(pointers)), element)
        if place.kind == "one" or lanes == 1:
            pointer = self.safe(place.pointers[0], self.e.any_lane(mask, lanes))
            return self.plain(buffer, Address(place.kind, (pointer,), place.step), element)
        return self.where_all_count(buffer, place, element, mask)

    def safe(self, pointer: str, counts: str) -> str:
        """The address, or where it does not count one that may be read."""
        self.e.declare(f"{ZEROS} = internal constant [{ZERO_BYTES} x i8] zeroinitializer, align 64")
        return self.e.op(f"select i1 {counts}, ptr {pointer}, ptr {ZEROS}", counts, pointer)

    def where_all_count(self, buffer: str, place: Address, element: str, mask: str) -> str:
        """A row under a mask: at once where every lane counts, which is nearly always; else one by one."""
        function, lanes = self.e.function, self.e.lanes
        type_ = vector(element, lanes)
        key = f"row {type_} {place} {mask} {buffer} {self.e.memory[buffer].version}"
        if key in function.values_by_text:
            return function.values_by_text[key]
        number, every = next(function.counter), self.e.any_lane(mask, lanes, every=True)
        function.line(f"br i1 {every}, label %all{number}, label %some{number}")
        function.block(f"all{number}")
        start = inside(self.e, buffer, place.pointers[0], element, lanes, False, None)
        whole = function.define(f"load {type_}, ptr {start}, align {BYTES[element]}")
        whole = whole if place.kind == "row" else function.define(self.turned(whole, element))
        function.line(f"br label %both{number}")
        scope = function.push(f"some{number}", branch=True)
        some = self.plain(buffer, self.each_lane(place, element, mask), element)
        function.pop()
        function.scope.code += [f"some{number}:", scope.code, f"  br label %both{number}"]
        function.block(f"both{number}")
        found = function.define(f"phi {type_} [ {whole}, %all{number} ], [ {some}, %{scope.label} ]")
        function.values_by_text[key] = found
        function.scope.keys.append(key)
        return found

    def each_lane(self, place: Address, element: str, mask: str) -> Address:
        pointers = self.lane_pointers(place, element)
        bits = [self.e.lane(mask, "i1", self.e.lanes, lane) for lane in range(self.e.lanes)]
        return Address("spread", tuple(map(self.safe, pointers, bits)))

    def lane_pointers(self, place: Address, element: str) -> list[str]:
        """The address of every lane."""
        lanes = self.e.lanes
        if place.kind == "spread":
            return list(place.pointers)
        if place.kind == "one":
            return [place.pointers[0]] * lanes
        if place.kind == "step":
            offsets = [LaneIndex(str(lane * place.step)) for lane in range(lanes)]
            return [self.places.beyond(place.pointers[0], offset, element) for offset in offsets]
        order = range(lanes) if place.kind == "row" else range(lanes - 1, -1, -1)
        return [self.places.beyond(place.pointers[0], LaneIndex(str(lane)), element) for lane in order]

    # --- stores -------------------------------------------------------------------------------------------------------

    def store(self, store: Store, value: Value, dtype: torch.dtype) -> None:
        element, memory = MEMORY[dtype], self.e.memory[store.buffer]
        places = self.places.of(memory, store.coordinates, element)
        if store.atomic and store.mode != "set":
            self.combined_one_by_one(store, places, value, dtype)
        else:
            if store.mode != "set":
                old = self.as_register(self.loaded(store.buffer, places, element), dtype)
                value = combine(self.e, store.mode, dtype, old, value)
            value = self.as_memory(value, dtype)
            if store.mode == "set" and self.crosses(store, places, value):
                self.write_turned(store.buffer, places[0], value, element)
            else:
                self.written(store.buffer, places, value, element)
        memory.version += 1

    def crosses(self, store: Store, places: list[Address], value: Value) -> bool:
        """Whether lanes lie apart and copies side by side, as many as lanes: a square, turned while it is stored."""
        e = self.e
        if e.mask is not None or e.live is not None or not len(places) == len(value.parts) == value.lanes == e.lanes:
            return False
        flat = flat_index(e.memory[store.buffer], store.coordinates)
        return e.lanes > 1 and places[0].kind == "spread" and self.places.constant_shifts(flat) == list(range(e.lanes))

    def write_turned(self, buffer: str, first: Address, value: Value, element: str) -> None:
        """Squares on the diagonal stay and their neighbours change places, for squares of one, two, four lanes."""
        lanes, type_ = value.lanes, vector(element, value.lanes)
        rows = list(value.parts)
        side = 1
        while side < lanes:
            low = [lane if not lane & side else lanes + lane - side for lane in range(lanes)]
            high = [lane + side if not lane & side else lanes + lane for lane in range(lanes)]
            for place in (place for place in range(lanes) if not place & side):
                pair = rows[place], rows[place + side]
                for row, order in ((place, low), (place + side, high)):
                    lane_list = ", ".join(f"i32 {lane}" for lane in order)
                    text = f"shufflevector {type_} {pair[0]}, {type_} {pair[1]}, <{lanes} x i32> <{lane_list}>"
                    rows[row] = self.e.op(text, *pair)
            side *= 2
        for turned, pointer in zip(rows, first.pointers, strict=True):
            pointer = inside(self.e, buffer, pointer, element, lanes, True, None)
            self.e.function.line(f"store {type_} {turned}, ptr {pointer}, align {BYTES[element]}")

    def as_memory(self, value: Value, dtype: torch.dtype) -> Value:
        if dtype is not torch.bool:
            return value
        return self.e.map("i8", [value], lambda lanes, item: Words(self.e, "i1", lanes).convert("zext", item, "i8"))

    def written(self, buffer: str, places: list[Address], value: Value, element: str) -> None:
        masks = self.e.mask.parts if self.e.mask else (None,)
        count = max(len(places), len(value.parts), len(masks))
        for row in range(count):
            place, mask = places[row * len(places) // count], masks[row * len(masks) // count]
            lanes = 1 if place.kind == "one" else self.e.lanes
            part = value.parts[row * len(value.parts) // count]
            if lanes > value.lanes:
                part = self.e.splat(part, element, lanes)
            elif lanes < value.lanes:  # one place for all lanes, which are one
                part = self.e.lane(part, element, value.lanes, value.lanes - 1)
            self.write(buffer, place, part, element, lanes, mask)

    def write(self, buffer: str, place: Address, part: str, element: str, lanes: int, mask: str | None) -> None:
        type_, align = vector(element, lanes), BYTES[element]
        width = self.e.mask.lanes if self.e.mask else 1
        if mask is not None and (place.kind == "one" or width == 1):
            with self.e.branch(self.e.any_lane(mask, width)):
                self.write(buffer, place, part, element, lanes, None)
        elif place.kind in ("spread", "step") or mask is not None:
            self.write_each(buffer, place, part, element, mask)
        else:
            part = part if place.kind != "back" else self.reversed(part, element)
            start = inside(self.e, buffer, place.pointers[0], element, lanes, True, None)
            self.e.function.line(f"store {type_} {part}, ptr {start}, align {align}")

    def write_each(self, buffer: str, place: Address, part: str, element: str, mask: str | None) -> None:
        lanes = self.e.lanes
        for lane, pointer in enumerate(self.lane_pointers(place, element)):
            item = self.e.lane(part, element, lanes, lane)
            if mask is None:
                self.write_one(buffer, pointer, item, element)
                continue
            with self.e.branch(self.e.lane(mask, "i1", lanes, lane)):
                self.write_one(buffer, pointer, item, element)

    def write_one(self, buffer: str, pointer: str, item: str, element: str) -> None:
        pointer = inside(self.e, buffer, pointer, element, 1, True, None)
        self.e.function.line(f"store {element} {item}, ptr {pointer}, align {BYTES[element]}")

    def combined_one_by_one(self, store: Store, places: list[Address], value: Value, dtype: torch.dtype) -> None:
        """Lanes may meet at one place, so each is done after the other; repetitions are not done."""
        e = self.e
        counts = [mask for mask in (e.mask, e.live) if mask is not None]
        for row in range(e.replicas):
            place = places[row * len(places) // e.replicas]
            part = e.part(value, row, e.replicas, e.lanes)
            masks = [e.part(mask, row, e.replicas, e.lanes) for mask in counts]
            for lane, pointer in enumerate(self.lane_pointers(place, MEMORY[dtype])):
                item = e.lane(part, value.element, e.lanes, lane)
                bits = [e.lane(mask, "i1", e.lanes, lane) for mask in masks]
                if not bits:
                    self.combine_one(store, dtype, pointer, item)
                    continue
                with e.branch(bits[0] if len(bits) == 1 else e.op(f"and i1 {bits[0]}, {bits[1]}", *bits)):
                    self.combine_one(store, dtype, pointer, item)

    def combine_one(self, store: Store, dtype: torch.dtype, pointer: str, item: str) -> None:
        pointer = inside(self.e, store.buffer, pointer, MEMORY[dtype], 1, True, None)
        combine_atomically(self.e, store.mode, dtype, pointer, item)
