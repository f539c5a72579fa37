"""Values that combine with what is in memory, alone or while others do the same."""

from __future__ import annotations

import torch

from ferrite.codegen.llvm.casts import converted
from ferrite.codegen.llvm.emission import Emission, Value
from ferrite.codegen.llvm.function import Function
from ferrite.codegen.llvm.operators import ROWS, is_whole
from ferrite.codegen.llvm.types import BYTES, MEMORY, REGISTER, is_narrow
from ferrite.ir import short
from ferrite.ir.program import OPERATOR_OF_MODE

LOOP = """
define internal void {name}(ptr %where, {value} %value) nounwind {{
entry:
{before}
  %first = load atomic {cell}, ptr %where monotonic, align {align}
  br label %again
again:
  %seen = phi {cell} [ %first, %entry ], [ %other, %again ]
{code}
  %pair = cmpxchg weak ptr %where, {cell} %seen, {cell} {new} monotonic monotonic, align {align}
  %other = extractvalue {{ {cell}, i1 }} %pair, 0
  %done = extractvalue {{ {cell}, i1 }} %pair, 1
  br i1 %done, label %leave, label %again
leave:
  ret void
}}
"""


def combine(e: Emission, mode: str, dtype: torch.dtype, old: Value, new: Value) -> Value:
    return e.map(old.element, [old, new], lambda lanes, *pair: _together(e, mode, dtype, lanes, *pair))


def _together(e: Emission, mode: str, dtype: torch.dtype, lanes: int, old: str, new: str) -> str:
    wide = torch.float32 if is_narrow(dtype) else dtype
    left, right = (converted(e, item, lanes, dtype, wide) for item in (old, new))
    return converted(e, ROWS[OPERATOR_OF_MODE[mode]](e, wide, lanes, left, right), lanes, wide, dtype)


def combine_atomically(e: Emission, mode: str, dtype: torch.dtype, pointer: str, value: str) -> None:
    """One element, where other threads may combine at the same time."""
    cell, align = MEMORY[dtype], BYTES[MEMORY[dtype]]
    function = e.function
    if not e.parallel:
        old = function.define(f"load {cell}, ptr {pointer}, align {align}")
        new = _from_register(e, _together(e, mode, dtype, 1, _to_register(e, old, dtype), value), dtype)
        function.line(f"store {cell} {new}, ptr {pointer}, align {align}")
    elif mode == "add" and is_whole(dtype):
        function.line(f"atomicrmw add ptr {pointer}, {cell} {value} monotonic, align {align}")
    else:
        name = f"@ferrite_atomic_{mode}_{short(dtype)}"
        if name not in e.module.helpers:
            e.module.helpers[name] = _loop(e, name, mode, dtype)
        function.line(f"call void {name}(ptr {pointer}, {REGISTER[dtype]} {value})")


def _loop(e: Emission, name: str, mode: str, dtype: torch.dtype) -> str:
    """Compare and exchange until nobody came between."""
    cell = f"i{8 * BYTES[MEMORY[dtype]]}"
    inside = Emission(e.module, Function(e.module.counter))
    inside.function.rank.update({"%value": 0, "%seen": 1})
    element = MEMORY[dtype]
    seen = inside.op(f"bitcast {cell} %seen to {element}", "%seen")
    new = _from_register(inside, _together(inside, mode, dtype, 1, _to_register(inside, seen, dtype), "%value"), dtype)
    last = inside.op(f"bitcast {element} {new} to {cell}", new)
    entry, start = (scope.code for scope in inside.function.scopes)
    parts = {"before": "\n".join(entry), "code": "\n".join(start), "new": last, "cell": cell}
    return LOOP.format(name=name, value=REGISTER[dtype], align=BYTES[element], **parts).strip()


def _to_register(e: Emission, item: str, dtype: torch.dtype) -> str:
    return e.op(f"icmp ne i8 {item}, 0", item) if dtype is torch.bool else item


def _from_register(e: Emission, item: str, dtype: torch.dtype) -> str:
    return e.op(f"zext i1 {item} to i8", item) if dtype is torch.bool else item
