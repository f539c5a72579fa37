"""Many kernels in one native call: a table of steps, and a loop over it.

The table is words of 64 bits, one after the other:

    groups, slots, then for every group: steps, threads, words of its steps, then for every step: address, arguments,
    then for every argument: slot, offset (`ferrite.codegen.llvm.words`)

Behind the slots is room for what a kernel says that fails.

Steps of a group with one thread run one after the other, and each may share its own loops among all threads. A group
with more is one parallel region: the threads of a team, so many at most, take the next step that nobody has taken yet,
and run it alone. Such steps depend on no other of their group, and never fail.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from ferrite.codegen.llvm.build import load, object_code
from ferrite.codegen.llvm.processor import host_processor
from ferrite.codegen.llvm.words import ARGUMENT, argument_words, packed

NAME = "ferrite_run"
FAILURE_WORDS = 3  # words that a failing kernel leaves: value, extent, step
MAX_ARGUMENTS = 1024
Step = tuple[int, Sequence[tuple[int, int]]]

# One step: its words, and its call.
STEP = f"""
define internal i64 @{NAME}.step(ptr %at, ptr %slots, i64 %threads, ptr %words, ptr %failure) alwaysinline nounwind {{
entry:
  %address = load i64, ptr %at, align 8
  %function = inttoptr i64 %address to ptr
  %arguments.at = getelementptr i64, ptr %at, i64 1
  %arguments = load i64, ptr %arguments.at, align 8
  %first = getelementptr i64, ptr %at, i64 2
  %empty = icmp eq i64 %arguments, 0
  br i1 %empty, label %call, label %argument
argument:
  %place = phi i64 [ 0, %entry ], [ %place.next, %argument ]
  %twice = shl i64 %place, 1
  %argument.at = getelementptr i64, ptr %first, i64 %twice
  %value = call i64 @ferrite.argument(ptr %argument.at, ptr %slots)
  %value.at = getelementptr i64, ptr %words, i64 %place
  store i64 %value, ptr %value.at, align 8
  %place.next = add nuw i64 %place, 1
  %more = icmp ult i64 %place.next, %arguments
  br i1 %more, label %argument, label %call
call:
  %result = call i64 %function(ptr %words, i64 %threads, ptr %failure)
  ret i64 %result
}}

define internal ptr @{NAME}.after(ptr %at) alwaysinline nounwind {{
  %arguments.at = getelementptr i64, ptr %at, i64 1
  %arguments = load i64, ptr %arguments.at, align 8
  %pairs = shl i64 %arguments, 1
  %words = add i64 %pairs, 2
  %after = getelementptr i64, ptr %at, i64 %words
  ret ptr %after
}}
"""

# What each thread of a team does, given: the number of the next step, how many there are, the first one, the slots, and
# where a kernel leaves words about a failure. Of the first that fails, what it gave and the number of its step follow.
SHARE = f"""
define internal void @{NAME}.share(ptr %team) nounwind {{
entry:
  %words = alloca [{MAX_ARGUMENTS} x i64], align 16
  %steps.at = getelementptr i64, ptr %team, i64 1
  %steps = load i64, ptr %steps.at, align 8
  %first.at = getelementptr i64, ptr %team, i64 2
  %first = load ptr, ptr %first.at, align 8
  %slots.at = getelementptr i64, ptr %team, i64 3
  %slots = load ptr, ptr %slots.at, align 8
  %failure.at = getelementptr i64, ptr %team, i64 4
  %failure = load ptr, ptr %failure.at, align 8
  br label %take
take:
  %before = phi i64 [ 0, %entry ], [ %taken, %found ]
  %there = phi ptr [ %first, %entry ], [ %at, %found ]
  %taken = atomicrmw add ptr %team, i64 1 monotonic, align 8
  %some = icmp slt i64 %taken, %steps
  br i1 %some, label %look, label %done
look:
  %number = phi i64 [ %before, %take ], [ %number.next, %walk ]
  %at = phi ptr [ %there, %take ], [ %following, %walk ]
  %same = icmp eq i64 %number, %taken
  br i1 %same, label %found, label %walk
walk:
  %number.next = add nuw i64 %number, 1
  %following = call ptr @{NAME}.after(ptr %at)
  br label %look
found:
  %result = call i64 @{NAME}.step(ptr %at, ptr %slots, i64 1, ptr %words, ptr %failure)
  %good = icmp eq i64 %result, 0
  br i1 %good, label %take, label %failed
failed:
  %result.at = getelementptr i64, ptr %team, i64 5
  %pair = cmpxchg ptr %result.at, i64 0, i64 %result monotonic monotonic, align 8
  %is.first = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %is.first, label %report, label %done
report:
  %failed.at = getelementptr i64, ptr %team, i64 6
  store i64 %taken, ptr %failed.at, align 8
  br label %done
done:
  ret void
}}
"""

RUN = f"""
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i64 @llvm.smin.i64(i64, i64)

define i64 @{NAME}(ptr %table, ptr %slots, i64 %threads) nounwind {{
entry:
  %groups = load i64, ptr %table, align 8
  %slots.at = getelementptr i64, ptr %table, i64 1
  %first = getelementptr i64, ptr %table, i64 2
  %many = load i64, ptr %slots.at, align 8
  %failure = getelementptr i64, ptr %slots, i64 %many
  %words = alloca [{MAX_ARGUMENTS} x i64], align 16
  %team = alloca [7 x i64], align 8
  br label %group
group:
  %left = phi i64 [ %groups, %entry ], [ %left.next, %over ]
  %number = phi i64 [ 0, %entry ], [ %number.next, %over ]
  %group.at = phi ptr [ %first, %entry ], [ %group.next, %over ]
  %none = icmp sle i64 %left, 0
  br i1 %none, label %done, label %begin
begin:
  %left.next = sub i64 %left, 1
  %steps = load i64, ptr %group.at, align 8
  %wanted.at = getelementptr i64, ptr %group.at, i64 1
  %wanted = load i64, ptr %wanted.at, align 8
  %size.at = getelementptr i64, ptr %group.at, i64 2
  %size = load i64, ptr %size.at, align 8
  %step.first = getelementptr i64, ptr %group.at, i64 3
  %group.next = getelementptr i64, ptr %step.first, i64 %size
  %number.next = add i64 %number, %steps
  %used = call i64 @llvm.smin.i64(i64 %wanted, i64 %threads)
  %shared = icmp sgt i64 %used, 1
  br i1 %shared, label %region, label %step
region:
  store i64 0, ptr %team, align 8
  %team.steps = getelementptr i64, ptr %team, i64 1
  store i64 %steps, ptr %team.steps, align 8
  %team.first = getelementptr i64, ptr %team, i64 2
  store ptr %step.first, ptr %team.first, align 8
  %team.slots = getelementptr i64, ptr %team, i64 3
  store ptr %slots, ptr %team.slots, align 8
  %team.failure = getelementptr i64, ptr %team, i64 4
  store ptr %failure, ptr %team.failure, align 8
  %team.result.at = getelementptr i64, ptr %team, i64 5
  store i64 0, ptr %team.result.at, align 8
  %short = trunc i64 %used to i32
  call void @GOMP_parallel(ptr @{NAME}.share, ptr %team, i32 %short, i32 0)
  %team.result = load i64, ptr %team.result.at, align 8
  %team.good = icmp eq i64 %team.result, 0
  br i1 %team.good, label %over, label %team.failed
team.failed:
  %team.step.at = getelementptr i64, ptr %team, i64 6
  %team.step = load i64, ptr %team.step.at, align 8
  br label %failed
step:
  %past = phi i64 [ 0, %begin ], [ %past.next, %next ]
  %at = phi ptr [ %step.first, %begin ], [ %after, %next ]
  %result = call i64 @{NAME}.step(ptr %at, ptr %slots, i64 %threads, ptr %words, ptr %failure)
  %good = icmp eq i64 %result, 0
  br i1 %good, label %next, label %failed
next:
  %past.next = add nuw i64 %past, 1
  %after = call ptr @{NAME}.after(ptr %at)
  %more = icmp slt i64 %past.next, %steps
  br i1 %more, label %step, label %over
over:
  br label %group
failed:
  %what = phi i64 [ %result, %step ], [ %team.result, %team.failed ]
  %which = phi i64 [ %past, %step ], [ %team.step, %team.failed ]
  %number.failed = add i64 %number, %which
  %number.at = getelementptr i64, ptr %failure, i64 2
  store i64 %number.failed, ptr %number.at, align 8
  ret i64 %what
done:
  ret i64 0
}}
"""
DRIVER = ARGUMENT + STEP + SHARE + RUN


@functools.cache
def driver_address() -> int:
    """`ferrite_run(table, slots, threads)`: 0, or what the first kernel that failed gave; then the words behind the
    slots are what it left, and the number of its step."""
    return load({NAME: object_code(DRIVER, host_processor())})[NAME]


def pack_steps(steps: Sequence[Step], slots: int, parallel_regions: Sequence[tuple[int, int, int]] = ()) -> bytes:
    """The table for `ferrite_run`: the address of each function, and (slot, byte offset) of each of its arguments.
    `parallel_regions`: steps that threads run side by side, in order: the first, how many, and threads at most."""
    regions = list(with_rest(parallel_regions, len(steps)))
    words = [len(regions), slots]
    for first, count, threads in regions:
        calls = [
            word
            for address, arguments in steps[first : first + count]
            for word in (address, *argument_words(arguments, MAX_ARGUMENTS))
        ]
        words += [count, threads, len(calls), *calls]
    return packed(words)


def with_rest(parallel_regions: Sequence[tuple[int, int, int]], steps: int) -> Iterator[tuple[int, int, int]]:
    """The regions, and what lies between them as regions of one thread."""
    next_step = 0
    for first, count, threads in parallel_regions:
        if first > next_step:
            yield next_step, first - next_step, 1
        yield first, count, threads
        next_step = first + count
    if steps > next_step:
        yield next_step, steps - next_step, 1
