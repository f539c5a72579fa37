"""Parallel loops: their body becomes a function of a range, which threads of the OpenMP runtime share evenly.

Loops that stand directly in one another become one. What the body uses of the function around is handed over.
"""

from __future__ import annotations

import math

from ferrite.codegen.llvm.emission import AxisValue, Emission
from ferrite.codegen.llvm.function import Function
from ferrite.codegen.llvm.statements import Statements
from ferrite.ir.kernel import Loop

DECLARES = (
    "declare void @GOMP_parallel(ptr, ptr, i32, i32)",
    "declare i32 @omp_get_num_threads()",
    "declare i32 @omp_get_thread_num()",
)
SHARE = """
  %alone = icmp sle i64 %wanted, 1
  br i1 %alone, label %all, label %part
all:
  br label %range
part:
  %thread.short = call i32 @omp_get_thread_num()
  %team.short = call i32 @omp_get_num_threads()
  %thread = zext i32 %thread.short to i64
  %team = zext i32 %team.short to i64
  %each = udiv i64 %total, %team
  %rest = urem i64 %total, %team
  %sooner = mul i64 %each, %thread
  %extra = call i64 @llvm.umin.i64(i64 %thread, i64 %rest)
  %first = add i64 %sooner, %extra
  %long = icmp ult i64 %thread, %rest
  %more = zext i1 %long to i64
  %size = add i64 %each, %more
  %last = add i64 %first, %size
  br label %range
range:
  %begin = phi i64 [ 0, %all ], [ %first, %part ]
  %end = phi i64 [ %total, %all ], [ %last, %part ]
  %some = icmp slt i64 %begin, %end
  br i1 %some, label %work, label %done
""".strip("\n")


class Parallel:
    def __init__(self, emission: Emission, statements: Statements) -> None:
        self.e, self.statements = emission, statements

    def loop(self, loop: Loop) -> None:
        e = self.e
        for line in DECLARES:
            e.declare(line)
        loops = nested(loop)
        scalar = self.statements.expressions.indices.scalar
        extents = [scalar(item.axis.extent) for item in loops]
        total = extents[0]
        for extent in extents[1:]:
            total = e.op(f"mul nsw i64 {total}, {extent}", total, extent)
        inside, name = self.outlined(loops, extents)
        self.call(inside, name, total, loops)
        for buffer in self.statements.written(loop.body):
            if buffer in e.memory:
                e.memory[buffer].version += 1

    def outlined(self, loops: list[Loop], extents: list[str]) -> tuple[Function, str]:
        """The function that runs part of the loops. It stands alone so that its pointers are known to be apart."""
        e, outside = self.e, self.e.function
        name = f"@{e.module.name}.part{next(e.module.counter)}"
        e.function = inside = Function(e.module.counter)
        e.parallel = True
        begin, end = inside.parameter("%begin"), inside.parameter("%end")
        self.statements.counted(loops[0], begin, end, 1, True, lambda base: self.iteration(loops, extents, base))
        e.function, e.parallel = outside, False
        given = [f"{'ptr noalias' if type_ == 'ptr' else type_} {here}" for type_, here in inside.captured.values()]
        head = f"define internal void {name}({', '.join([*given, 'i64 %begin', 'i64 %end'])}) alwaysinline nounwind"
        e.module.functions.append(inside.text(head))
        return inside, name

    def iteration(self, loops: list[Loop], extents: list[str], place: str) -> None:
        e = self.e
        for item, extent in zip(loops[:0:-1], extents[:0:-1], strict=True):
            size = e.here(extent, "i64")
            rest = e.op(f"urem i64 {place}, {size}", place, size)
            e.axes[item.axis] = AxisValue(rest)
            place = e.op(f"udiv i64 {place}, {size}", place, size)
        e.axes[loops[0].axis] = AxisValue(place)
        self.statements.block(loops[-1].body)

    def call(self, inside: Function, name: str, total: str, loops: list[Loop]) -> None:
        """Hand over what the function uses, to a team or to this thread alone."""
        function = self.e.function
        team, mark = self.team(total, loops), next(function.counter)
        captured = [(outer, type_) for outer, (type_, _) in inside.captured.items()]
        words = function.variable(f"[{len(captured) + 2} x i64]")
        for place, (outer, type_) in enumerate([*captured, (total, "i64"), (team, "i64")]):
            at = function.define(f"getelementptr i64, ptr {words}, i64 {place}")
            function.line(f"store {type_} {outer}, ptr {at}, align 8")
        many = function.define(f"icmp sgt i64 {team}, 1")
        function.line(f"br i1 {many}, label %team{mark}, label %alone{mark}")
        function.block(f"team{mark}")
        short = function.define(f"trunc i64 {team} to i32")
        function.line(f"call void @GOMP_parallel(ptr {name}.share, ptr {words}, i32 {short}, i32 0)")
        function.line(f"br label %together{mark}")
        function.block(f"alone{mark}")
        function.line(f"call void {name}.share(ptr {words})")
        function.line(f"br label %together{mark}")
        function.block(f"together{mark}")
        self.share(name, [type_ for _, type_ in captured])
        if inside.fails:
            function.fails = True
            self.leave_if_stopped()

    def team(self, total: str, loops: list[Loop]) -> str:
        """How many threads are worth it."""
        e, grain = self.e, math.prod(loop.copies for loop in loops)
        parts = total
        if grain > 1:
            rounded = e.op(f"add nsw i64 {total}, {grain - 1}", total)
            parts = e.op(f"udiv i64 {rounded}, {grain}", rounded)
        return e.intrinsic("smin", "i64", 1, "%threads", parts)

    def share(self, name: str, types: list[str]) -> None:
        """What a thread runs: its share of the range."""
        self.e.declare("declare i64 @llvm.umin.i64(i64, i64)")
        lines = [f"define internal void {name}.share(ptr %words) nounwind {{", "entry:"]
        names = [*(f"%w{place}" for place in range(len(types))), "%total", "%wanted"]
        for place, (word, type_) in enumerate(zip(names, [*types, "i64", "i64"], strict=True)):
            lines.append(f"  %at{place} = getelementptr i64, ptr %words, i64 {place}")
            lines.append(f"  {word} = load {type_}, ptr %at{place}, align 8")
        given = [f"{type_} {word}" for type_, word in zip(types, names, strict=False)]
        lines += [SHARE, "work:"]
        lines.append(f"  call void {name}({', '.join([*given, 'i64 %begin', 'i64 %end'])})")
        lines += ["  br label %done", "done:", "  ret void", "}"]
        self.e.module.functions.append("\n".join(lines))

    def leave_if_stopped(self) -> None:
        function = self.e.function
        mark = next(function.counter)
        state = function.define("load i64, ptr %status, align 8")
        bad = function.define(f"icmp ne i64 {state}, 0")
        function.line(f"br i1 {bad}, label %leave, label %fine{mark}")
        function.block(f"fine{mark}")


def nested(loop: Loop) -> list[Loop]:
    """The loop and those that stand alone in it, as far as their extents do not depend on it."""
    loops = [loop]
    while len(loops[-1].body) == 1:
        (inner,) = loops[-1].body
        if not isinstance(inner, Loop) or inner.kind != "parallel":
            break
        if any(item.axis in inner.axis.extent.atoms for item in loops):
            break
        loops.append(inner)
    return loops
