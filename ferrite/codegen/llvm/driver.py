"""Many kernels in one native call: a table of steps, and a loop over it.

The table is words of 64 bits, one after the other:

    steps, slots, then for every step: address, arguments, then for every argument: slot, offset

An argument is the word in a slot, plus the offset: a pointer somewhere into an arena, or a size. A slot may be -1: the
offset itself is the argument. Behind the slots is room for what a kernel says that fails.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

from ferrite.codegen.llvm.build import load, object_code
from ferrite.codegen.llvm.target import host_target

NAME = "ferrite_run"
IMMEDIATE = -1
FAILURE = 3  # words that a failing kernel leaves: value, extent, step
MOST_ARGUMENTS = 512
DRIVER = f"""
define i64 @{NAME}(ptr %table, ptr %slots, i64 %threads) nounwind {{
entry:
  %count = load i64, ptr %table, align 8
  %slots.at = getelementptr i64, ptr %table, i64 1
  %steps = getelementptr i64, ptr %table, i64 2
  %many = load i64, ptr %slots.at, align 8
  %failure = getelementptr i64, ptr %slots, i64 %many
  %words = alloca [{MOST_ARGUMENTS} x i64], align 16
  %none = icmp sle i64 %count, 0
  br i1 %none, label %done, label %step
step:
  %number = phi i64 [ 0, %entry ], [ %following, %next ]
  %at = phi ptr [ %steps, %entry ], [ %after, %next ]
  %address = load i64, ptr %at, align 8
  %function = inttoptr i64 %address to ptr
  %arguments.at = getelementptr i64, ptr %at, i64 1
  %arguments = load i64, ptr %arguments.at, align 8
  %first = getelementptr i64, ptr %at, i64 2
  %pairs = shl i64 %arguments, 1
  %after = getelementptr i64, ptr %first, i64 %pairs
  %empty = icmp eq i64 %arguments, 0
  br i1 %empty, label %call, label %argument
argument:
  %place = phi i64 [ 0, %step ], [ %place.next, %copied ]
  %twice = shl i64 %place, 1
  %slot.at = getelementptr i64, ptr %first, i64 %twice
  %slot = load i64, ptr %slot.at, align 8
  %offset.at = getelementptr i64, ptr %slot.at, i64 1
  %offset = load i64, ptr %offset.at, align 8
  %immediate = icmp slt i64 %slot, 0
  br i1 %immediate, label %copied, label %read
read:
  %word.at = getelementptr i64, ptr %slots, i64 %slot
  %word = load i64, ptr %word.at, align 8
  br label %copied
copied:
  %base = phi i64 [ 0, %argument ], [ %word, %read ]
  %value = add i64 %base, %offset
  %value.at = getelementptr i64, ptr %words, i64 %place
  store i64 %value, ptr %value.at, align 8
  %place.next = add nuw i64 %place, 1
  %more = icmp ult i64 %place.next, %arguments
  br i1 %more, label %argument, label %call
call:
  %result = call i64 %function(ptr %words, i64 %threads, ptr %failure)
  %good = icmp eq i64 %result, 0
  br i1 %good, label %next, label %failed
next:
  %following = add nuw i64 %number, 1
  %again = icmp slt i64 %following, %count
  br i1 %again, label %step, label %done
failed:
  %number.at = getelementptr i64, ptr %failure, i64 2
  store i64 %number, ptr %number.at, align 8
  ret i64 %result
done:
  ret i64 0
}}
"""


@functools.cache
def driver_address() -> int:
    """`ferrite_run(table, slots, threads)`: 0, or what the first kernel that failed gave; then the words behind the
    slots are what it left, and the number of its step."""
    return load({NAME: object_code(DRIVER, host_target())})[NAME]


def pack_steps(steps: Sequence[tuple[int, Sequence[tuple[int, int]]]], slots: int) -> bytes:
    """The table for `ferrite_run`: the address of each function, and (slot, byte offset) of each of its arguments."""
    words = [len(steps), slots]
    for address, arguments in steps:
        if len(arguments) > MOST_ARGUMENTS:
            raise ValueError(f"{len(arguments)} arguments; a kernel has at most {MOST_ARGUMENTS}")
        words += [address, len(arguments)]
        for slot, offset in arguments:
            words += [slot, offset]
    return struct.pack(f"<{len(words)}q", *words)
