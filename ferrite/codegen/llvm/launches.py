"""Many launches on a GPU in one native call: a table of them, and a loop over it, that Python calls as its own.

    ferrite_launch(table, stream, word, ...)

`table` is what the function is bound to: an integer, the address of words of 64 bits:

    context, slots, steps, mode, exec, seven functions of CUDA's driver, pointers, then the slot of each,
    then for every step: function, node, slot and offset of its programs, threads, shared bytes, arguments, then for
    every argument: slot, offset (`ferrite.codegen.llvm.words`); then the programs of the last call, and its arguments

The words fill the last slots; a run without an arena leaves out the first. Mode 0 launches every step; mode 1 renews
the arguments of a CUDA graph, whose nodes the steps are, and launches that. A node whose arguments are those of the
last call is left as it is: memory that was given back is often given out again for the same.

Where another context is current, as that of the first GPU while parts of a model are on the second, the run's own is
for as long as it takes.

Where something is not as the table has it (a pointer is no multiple of 16, a step has nothing to do in a graph, the
stream is being captured) nothing is launched: the table itself is called, with the same arguments. It does the same by
Python's means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ferrite.codegen.llvm.words import ARGUMENT, FROM_PYTHON, argument_words, packed

NAME = "ferrite_launch"
MAX_ARGUMENTS = 512
MAX_PROGRAMS = (1 << 31) - 1
LAUNCH, GRAPH = 0, 1
NEVER = -1  # the programs of the last call, where there was none, or it failed
# Functions of the driver, in the order of the table.
DRIVER_FUNCTIONS = (
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuStreamIsCapturing",
    "cuLaunchKernel",
    "cuGraphExecKernelNodeSetParams",
    "cuGraphLaunch",
)
HEAD = 5 + len(DRIVER_FUNCTIONS)

RUN = f"""
define internal i64 @{NAME}.run(ptr %table, ptr %slots, ptr %stream) nounwind {{
entry:
  %current = alloca ptr, align 8
  %context = load ptr, ptr %table, align 8
  %unknown = icmp eq ptr %context, null
  br i1 %unknown, label %different, label %where
where:
  %get.at = getelementptr i64, ptr %table, i64 5
  %get = load ptr, ptr %get.at, align 8
  %asked = call i32 %get(ptr %current)
  %current.value = load ptr, ptr %current, align 8
  %same = icmp eq ptr %current.value, %context
  br i1 %same, label %here, label %elsewhere
here:
  %done.here = call i64 @{NAME}.all(ptr %table, ptr %slots, ptr %stream)
  ret i64 %done.here
elsewhere:
  %push.at = getelementptr i64, ptr %table, i64 6
  %push = load ptr, ptr %push.at, align 8
  %pushed = call i32 %push(ptr %context)
  %entered = icmp eq i32 %pushed, 0
  br i1 %entered, label %there, label %different
there:
  %done.there = call i64 @{NAME}.all(ptr %table, ptr %slots, ptr %stream)
  %pop.at = getelementptr i64, ptr %table, i64 7
  %pop = load ptr, ptr %pop.at, align 8
  %left = call i32 %pop(ptr %current)
  ret i64 %done.there
different:
  ret i64 1
}}

define internal i64 @{NAME}.all(ptr %table, ptr %slots, ptr %stream) nounwind {{
entry:
  %places = alloca [{MAX_ARGUMENTS} x ptr], align 16
  %node.params = alloca [7 x i64], align 16
  %capturing = alloca i32, align 4
  %steps.at = getelementptr i64, ptr %table, i64 2
  %steps = load i64, ptr %steps.at, align 8
  %mode.at = getelementptr i64, ptr %table, i64 3
  %mode = load i64, ptr %mode.at, align 8
  %graph = icmp eq i64 %mode, {GRAPH}
  %exec.at = getelementptr i64, ptr %table, i64 4
  %exec = load ptr, ptr %exec.at, align 8
  %captures.at = getelementptr i64, ptr %table, i64 8
  %captures = load ptr, ptr %captures.at, align 8
  %launch.at = getelementptr i64, ptr %table, i64 9
  %launch = load ptr, ptr %launch.at, align 8
  %renew.at = getelementptr i64, ptr %table, i64 10
  %renew = load ptr, ptr %renew.at, align 8
  %launch.graph.at = getelementptr i64, ptr %table, i64 11
  %launch.graph = load ptr, ptr %launch.graph.at, align 8
  %pointers.at = getelementptr i64, ptr %table, i64 {HEAD}
  %pointers = load i64, ptr %pointers.at, align 8
  %pointer.first = getelementptr i64, ptr %table, i64 {HEAD + 1}
  %step.first = getelementptr i64, ptr %pointer.first, i64 %pointers
  br label %look
look:
  %some = icmp sgt i64 %pointers, 0
  br i1 %some, label %pointer, label %ready
pointer:
  %pointer.place = phi i64 [ 0, %look ], [ %pointer.next, %pointer ]
  %bits = phi i64 [ 0, %look ], [ %bits.next, %pointer ]
  %pointer.at = getelementptr i64, ptr %pointer.first, i64 %pointer.place
  %pointer.slot = load i64, ptr %pointer.at, align 8
  %pointer.word.at = getelementptr i64, ptr %slots, i64 %pointer.slot
  %pointer.word = load i64, ptr %pointer.word.at, align 8
  %bits.next = or i64 %bits, %pointer.word
  %pointer.next = add nuw i64 %pointer.place, 1
  %pointer.more = icmp slt i64 %pointer.next, %pointers
  br i1 %pointer.more, label %pointer, label %aligned
aligned:
  %low = and i64 %bits.next, 15
  %fits = icmp eq i64 %low, 0
  br i1 %fits, label %ready, label %different
ready:
  br i1 %graph, label %captured, label %step
captured:
  store i32 0, ptr %capturing, align 4
  %captures.asked = call i32 %captures(ptr %stream, ptr %capturing)
  %captures.status = load i32, ptr %capturing, align 4
  %captures.either = or i32 %captures.asked, %captures.status
  %free = icmp eq i32 %captures.either, 0
  br i1 %free, label %step, label %different
step:
  %number = phi i64 [ 0, %ready ], [ 0, %captured ], [ %number.next, %next ]
  %at = phi ptr [ %step.first, %ready ], [ %step.first, %captured ], [ %after, %next ]
  %node.at = getelementptr i64, ptr %at, i64 1
  %programs.slot.at = getelementptr i64, ptr %at, i64 2
  %programs.offset.at = getelementptr i64, ptr %at, i64 3
  %threads.at = getelementptr i64, ptr %at, i64 4
  %shared.at = getelementptr i64, ptr %at, i64 5
  %arguments.at = getelementptr i64, ptr %at, i64 6
  %first = getelementptr i64, ptr %at, i64 7
  %function = load ptr, ptr %at, align 8
  %node = load ptr, ptr %node.at, align 8
  %threads = load i64, ptr %threads.at, align 8
  %shared = load i64, ptr %shared.at, align 8
  %arguments = load i64, ptr %arguments.at, align 8
  %twice.all = shl i64 %arguments, 1
  %last.programs.at = getelementptr i64, ptr %first, i64 %twice.all
  %words = getelementptr i64, ptr %last.programs.at, i64 1
  %after = getelementptr i64, ptr %words, i64 %arguments
  %programs = call i64 @ferrite.argument(ptr %programs.slot.at, ptr %slots)
  %number.next = add nuw i64 %number, 1
  %nothing = icmp sle i64 %programs, 0
  br i1 %nothing, label %idle, label %enough
idle:
  br i1 %graph, label %different, label %next
enough:
  %too.many = icmp sgt i64 %programs, {MAX_PROGRAMS}
  br i1 %too.many, label %different, label %begin
begin:
  %empty = icmp eq i64 %arguments, 0
  br i1 %empty, label %start, label %argument
argument:
  %place = phi i64 [ 0, %begin ], [ %place.next, %argument ]
  %change = phi i64 [ 0, %begin ], [ %change.next, %argument ]
  %twice = shl i64 %place, 1
  %slot.at = getelementptr i64, ptr %first, i64 %twice
  %value = call i64 @ferrite.argument(ptr %slot.at, ptr %slots)
  %value.at = getelementptr i64, ptr %words, i64 %place
  %value.last = load i64, ptr %value.at, align 8
  %value.change = xor i64 %value, %value.last
  %change.next = or i64 %change, %value.change
  store i64 %value, ptr %value.at, align 8
  %place.at = getelementptr ptr, ptr %places, i64 %place
  store ptr %value.at, ptr %place.at, align 8
  %place.next = add nuw i64 %place, 1
  %more = icmp slt i64 %place.next, %arguments
  br i1 %more, label %argument, label %start
start:
  %change.all = phi i64 [ 0, %begin ], [ %change.next, %argument ]
  br i1 %graph, label %compared, label %launched
launched:
  %grid = trunc i64 %programs to i32
  %block = trunc i64 %threads to i32
  %bytes = trunc i64 %shared to i32
  %result = call i32 %launch(ptr %function, i32 %grid, i32 1, i32 1, i32 %block, i32 1, i32 1, i32 %bytes,
                             ptr %stream, ptr %places, ptr null)
  %good = icmp eq i32 %result, 0
  br i1 %good, label %next, label %different
compared:
  %last.programs = load i64, ptr %last.programs.at, align 8
  %programs.change = xor i64 %last.programs, %programs
  %any.change = or i64 %change.all, %programs.change
  %as.before = icmp eq i64 %any.change, 0
  br i1 %as.before, label %next, label %renewed
renewed:
  store i64 {NEVER}, ptr %last.programs.at, align 8
  %grid.both = or i64 %programs, {1 << 32}
  %block.high = shl i64 %threads, 32
  %block.both = or i64 %block.high, 1
  store ptr %function, ptr %node.params, align 8
  %param.1 = getelementptr i64, ptr %node.params, i64 1
  store i64 %grid.both, ptr %param.1, align 8
  %param.2 = getelementptr i64, ptr %node.params, i64 2
  store i64 %block.both, ptr %param.2, align 8
  %param.3 = getelementptr i64, ptr %node.params, i64 3
  store i64 {(1 << 32) + 1}, ptr %param.3, align 8
  %param.4 = getelementptr i64, ptr %node.params, i64 4
  store i64 %shared, ptr %param.4, align 8
  %param.5 = getelementptr i64, ptr %node.params, i64 5
  store ptr %places, ptr %param.5, align 8
  %param.6 = getelementptr i64, ptr %node.params, i64 6
  store ptr null, ptr %param.6, align 8
  %renewed.result = call i32 %renew(ptr %exec, ptr %node, ptr %node.params)
  %renewed.good = icmp eq i32 %renewed.result, 0
  br i1 %renewed.good, label %noted, label %different
noted:
  store i64 %programs, ptr %last.programs.at, align 8
  br label %next
next:
  %steps.more = icmp slt i64 %number.next, %steps
  br i1 %steps.more, label %step, label %over
over:
  br i1 %graph, label %play, label %done
play:
  %played = call i32 %launch.graph(ptr %exec, ptr %stream)
  %played.good = icmp eq i32 %played, 0
  br i1 %played.good, label %done, label %different
done:
  ret i64 0
different:
  ret i64 1
}}
"""

# Python's lock is kept: a graph has one set of arguments, and two threads would renew them at once.
ENTRY = f"""{ARGUMENT}{RUN}{FROM_PYTHON}
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyObject_Vectorcall(ptr, ptr, i64, ptr)

define ptr @{NAME}(ptr %self, ptr %given, i64 %count) nounwind {{
entry:
  %address = call i64 @PyLong_AsLongLong(ptr %self)
  %table = inttoptr i64 %address to ptr
  %stream.object = load ptr, ptr %given, align 8
  %stream.word = call i64 @PyLong_AsLongLong(ptr %stream.object)
  %stream = inttoptr i64 %stream.word to ptr
  %slots.at = getelementptr i64, ptr %table, i64 1
  %slots = load i64, ptr %slots.at, align 8
  %words = alloca i64, i64 %slots, align 16
  %numbers = call i1 @ferrite.from_python(ptr %given, i64 %count, ptr %words, i64 %slots)
  br i1 %numbers, label %run, label %wrong
wrong:
  ret ptr null
run:
  %result = call i64 @{NAME}.run(ptr %table, ptr %words, ptr %stream)
  %good = icmp eq i64 %result, 0
  br i1 %good, label %done, label %otherwise
done:
  %zero = call ptr @PyLong_FromLongLong(i64 0)
  ret ptr %zero
otherwise:
  %made = call ptr @PyObject_Vectorcall(ptr %self, ptr %given, i64 %count, ptr null)
  ret ptr %made
}}
"""


@dataclass(frozen=True)
class LaunchStep:
    """One launch, as the table has it. `programs` and `arguments`: slots and offsets. `is_free`: in a graph, it waits
    for nothing."""

    function: int
    programs: tuple[int, int]
    threads: int
    shared: int
    arguments: Sequence[tuple[int, int]]
    node: int = 0
    is_free: bool = False


def pack_launches(
    steps: Sequence[LaunchStep],
    slots: int,
    pointers: Sequence[int],
    context: int = 0,
    functions: Sequence[int] = (0,) * len(DRIVER_FUNCTIONS),
    exec_graph: int = 0,
) -> bytes:
    """The table. `pointers`: slots that must be multiples of 16 bytes. A context of 0 is never the current one."""
    words = [context, slots, len(steps), GRAPH if exec_graph else LAUNCH, exec_graph, *functions, len(pointers)]
    words += pointers
    for step in steps:
        words += [step.function, step.node, *step.programs, step.threads, step.shared]
        words += argument_words(step.arguments, MAX_ARGUMENTS)
        words += [NEVER, *(0 for _ in step.arguments)]
    return packed(words)
