"""Parallel loops: their body becomes a function of a range, which threads of the OpenMP runtime share evenly.

Loops that stand directly in one another become one. What the body uses of the function around is handed over.
"""

from __future__ import annotations

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
  %thread.short = call i32 @omp_get_thread_num()
  %team.short = call i32 @omp_get_num_threads()
  %thread = zext i32 %thread.short to i64
  %team = zext i32 %team.short to i64
  %each = udiv i64 %total, %team
  %rest = urem i64 %total, %team
  %sooner = mul i64 %each, %thread
  %extra = call i64 @llvm.umin.i64(i64 %thread, i64 %rest)
  %begin = add i64 %sooner, %extra
  %long = icmp ult i64 %thread, %rest
  %more = zext i1 %long to i64
  %size = add i64 %each, %more
  %end = add i64 %begin, %size
  %some = icmp ult i64 %begin, %end
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
        """The function that runs part of the loops."""
        e, outside = self.e, self.e.function
        name = f"@{e.module.name}.part{next(e.module.counter)}"
        e.function = inside = Function(e.module.counter)
        e.parallel = True
        begin, end = inside.parameter("%begin"), inside.parameter("%end")
        body = loops[-1]
        self.statements.counted(loops[0], begin, end, 1, True, lambda base: self.iteration(loops, extents, base))
        e.function, e.parallel = outside, False
        given = [f"{'ptr noalias' if type_ == 'ptr' else type_} {here}" for type_, here in inside.captured.values()]
        head = f"define internal void {name}({', '.join([*given, 'i64 %begin', 'i64 %end'])}) nounwind"
        e.module.functions.append(inside.text(head))
        assert body.kind == "parallel"
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
        e, function = self.e, self.e.function
        captured = [(outer, type_) for outer, (type_, _) in inside.captured.items()]
        given = [f"{type_} {outer}" for outer, type_ in captured]
        grain = 1
        for loop in loops:
            grain *= loop.copies
        rounded = e.op(f"add nsw i64 {total}, {grain - 1}", total)
        parts = e.op(f"udiv i64 {rounded}, {grain}", rounded) if grain > 1 else total
        team = e.intrinsic("smin", "i64", 1, "%threads", parts)
        mark = next(function.counter)
        several, alone, end = f"team{mark}", f"alone{mark}", f"together{mark}"
        many = e.op(f"icmp sgt i64 {team}, 1", team)
        function.line(f"br i1 {many}, label %{several}, label %{alone}")
        function.block(several)
        words = function.variable(f"[{len(captured) + 1} x i64]")
        for place, (outer, type_) in enumerate([*captured, (total, "i64")]):
            at = function.define(f"getelementptr i64, ptr {words}, i64 {place}")
            function.line(f"store {type_} {outer}, ptr {at}, align 8")
        short = function.define(f"trunc i64 {team} to i32")
        function.line(f"call void @GOMP_parallel(ptr {name}.share, ptr {words}, i32 {short}, i32 0)")
        function.line(f"br label %{end}")
        function.block(alone)
        some = function.define(f"icmp sgt i64 {total}, 0")
        function.line(f"br i1 {some}, label %{alone}.run, label %{end}")
        function.block(f"{alone}.run")
        function.line(f"call void {name}({', '.join([*given, 'i64 0', f'i64 {total}'])})")
        function.line(f"br label %{end}")
        function.block(end)
        self.share(name, [type_ for _, type_ in captured])
        if inside.fails:
            function.fails = True
            self.leave_if_stopped()

    def share(self, name: str, types: list[str]) -> None:
        """What a thread runs: its share of the range."""
        self.e.declare("declare i64 @llvm.umin.i64(i64, i64)")
        lines = [f"define internal void {name}.share(ptr %words) nounwind {{", "entry:"]
        for place, type_ in enumerate([*types, "i64"]):
            word = "%total" if place == len(types) else f"%w{place}"
            lines.append(f"  %at{place} = getelementptr i64, ptr %words, i64 {place}")
            lines.append(f"  {word} = load {type_}, ptr %at{place}, align 8")
        given = [f"{type_} %w{place}" for place, type_ in enumerate(types)]
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
