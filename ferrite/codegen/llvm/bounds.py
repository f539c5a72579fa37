"""Checked kernels: every address is compared with the bounds of its memory before it is touched.

What lies outside is neither read nor written: the kernel reports the first such place, goes on with memory that belongs
to nobody, and fails when it is done. This is about addresses, as the machine will have them: it finds mistakes of any
stage, of the printer's, too (vectors that reach beyond the end of a row).
"""

from __future__ import annotations

from ferrite.codegen.llvm.checks import STOP
from ferrite.codegen.llvm.emission import Emission
from ferrite.codegen.llvm.types import BYTES
from ferrite.ir.kernel import Kernel

NOWHERE_BYTES = 1024  # more than any vector has
ZEROS = "@ferrite_zeros"
ZERO_BYTES = 1024
INSIDE = f"""
define internal ptr @ferrite_inside(ptr %at, i64 %bytes, ptr %base, i64 %low, i64 %high, i64 %item, i64 %code,
  ptr %nowhere, ptr %status, ptr %failure) noinline nounwind {{
entry:
  %first = ptrtoint ptr %at to i64
  %last = add i64 %first, %bytes
  %below = icmp ult i64 %first, %low
  %above = icmp ugt i64 %last, %high
  %outside = or i1 %below, %above
  %zeros = ptrtoint ptr {ZEROS} to i64
  %into = sub i64 %last, %zeros
  %masked = icmp ule i64 %into, {ZERO_BYTES}
  %fine = xor i1 %outside, true
  %allowed = or i1 %fine, %masked
  br i1 %allowed, label %inside, label %report
inside:
  ret ptr %at
report:
  %start = ptrtoint ptr %base to i64
  %far = sub i64 %first, %start
  %index = sdiv i64 %far, %item
  %room = sub i64 %high, %start
  %extent = sdiv i64 %room, %item
  call void @ferrite_stop(ptr %status, ptr %failure, i64 %code, i64 %index, i64 %extent)
  ret ptr %nowhere
}}
""".strip()


def inside(e: Emission, buffer: str, pointer: str, element: str, lanes: int, writes: bool, floor: int | None) -> str:
    """The address itself, or where it is not inside of its memory one that may be touched; as it is where nobody asks.
    `floor`: how far out it may be computed; None: here and now."""
    memory = e.memory[buffer]
    bounds = memory.bounds
    if bounds is None:
        return pointer
    e.module.helpers["@ferrite_stop"], e.module.helpers["@ferrite_inside"] = STOP, INSIDE
    e.declare(f"{ZEROS} = internal constant [{ZERO_BYTES} x i8] zeroinitializer, align 64")
    words = [e.here(word, "ptr") for word in (memory.pointer, "%nowhere", "%status", "%failure")]
    low, high = e.here(bounds.low, "i64"), e.here(bounds.high, "i64")
    text = (
        f"call ptr @ferrite_inside(ptr {pointer}, i64 {lanes * BYTES[element]}, ptr {words[0]}, i64 {low}, i64 {high}, "
        f"i64 {BYTES[element]}, i64 {bounds.code + writes}, ptr {words[1]}, ptr {words[2]}, ptr {words[3]})"
    )
    e.function.fails = True
    if floor is None:
        return e.function.define(text)
    return e.function.op(text, pointer, low, high, *words, floor=floor)


def codes_of_bounds(kernel: Kernel, checks: int) -> tuple[int, ...]:
    """What a checked kernel gives for reading outside of each pointer, and last of its tiles; for writing, one more.
    Indices that are read from memory come first, `checks` of them."""
    return tuple(checks + 1 + 2 * place for place in range(len(kernel.pointers) + 1))
