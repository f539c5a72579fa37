"""Words of 64 bits, which Python, tables of steps and kernels hand to each other.

A run has slots, one word each: pointers and sizes. Python gives the last of them with every call. An argument of a
kernel is a pair in a table, slot and offset: the word in the slot, plus the offset; with slot -1, the offset itself.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

IMMEDIATE = -1  # as a slot

# `at`: a pair of slot and offset.
ARGUMENT = """
define internal i64 @ferrite.argument(ptr %at, ptr %slots) alwaysinline nounwind {
entry:
  %slot = load i64, ptr %at, align 8
  %offset.at = getelementptr i64, ptr %at, i64 1
  %offset = load i64, ptr %offset.at, align 8
  %immediate = icmp slt i64 %slot, 0
  br i1 %immediate, label %found, label %read
read:
  %word.at = getelementptr i64, ptr %slots, i64 %slot
  %word = load i64, ptr %word.at, align 8
  br label %found
found:
  %base = phi i64 [ 0, %entry ], [ %word, %read ]
  %value = add i64 %base, %offset
  ret i64 %value
}
"""

# `given`: `count` Python numbers, of which the first is no slot; the others become the last of the slots. False where
# one is no number, or too large: then Python's error is set.
FROM_PYTHON = """
declare ptr @PyErr_Occurred()
declare i64 @PyLong_AsLongLong(ptr)

define internal i1 @ferrite.from_python(ptr %given, i64 %count, ptr %words, i64 %slots) alwaysinline nounwind {
entry:
  %behind = sub i64 %slots, %count
  %more = icmp sgt i64 %count, 1
  br i1 %more, label %word, label %all
word:
  %place = phi i64 [ 1, %entry ], [ %next, %word ]
  %object.at = getelementptr ptr, ptr %given, i64 %place
  %object = load ptr, ptr %object.at, align 8
  %value = call i64 @PyLong_AsLongLong(ptr %object)
  %slot = add i64 %behind, %place
  %word.at = getelementptr i64, ptr %words, i64 %slot
  store i64 %value, ptr %word.at, align 8
  %next = add i64 %place, 1
  %again = icmp slt i64 %next, %count
  br i1 %again, label %word, label %all
all:
  %problem = call ptr @PyErr_Occurred()
  %good = icmp eq ptr %problem, null
  ret i1 %good
}
"""


def argument_words(arguments: Sequence[tuple[int, int]], most: int) -> list[int]:
    """How many there are, then slot and offset of each."""
    if len(arguments) > most:
        raise ValueError(f"{len(arguments)} arguments; a kernel has at most {most}")
    return [len(arguments), *(word for argument in arguments for word in argument)]


def packed(words: Sequence[int]) -> bytes:
    """A table in memory. Addresses and handles may use the highest bit."""
    return struct.pack(f"<{len(words)}q", *(word - (1 << 64) if word >= 1 << 63 else word for word in words))
