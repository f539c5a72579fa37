"""Arguments that are rare and hard: libm answers for them, one lane after the other."""

from __future__ import annotations

from ferrite.codegen.llvm.math.text import FunctionLines, Value


def rare_by_libm(rare: Value, usual: Value, called: str, *arguments: Value) -> Value:
    """`usual`, but where `rare` holds what a function of libm gives. If no lane is rare, that costs one branch."""
    written, element = usual.written, usual.element
    called += "f" if element == "float" else ""
    written.declares.add(f"declare {element} @{called}({', '.join([element] * len(arguments))})")
    helper = f"{written.symbol}_{called}"
    full, mask = written.type(element), written.type("i1")
    written.helpers += _lane_by_lane(written, helper, called, element, len(arguments))
    some = rare.name
    if written.lanes > 1:
        written.declares.add(f"declare i1 @llvm.vector.reduce.or.v{written.lanes}i1({mask})")
        some = written.instruction(f"call i1 @llvm.vector.reduce.or.v{written.lanes}i1({mask} {rare.name})", "i1").name
    before, slow, after = written.block, f"slow{written.count}", f"after{written.count}"
    listed = ", ".join(f"{full} {argument.name}" for argument in (*arguments, usual))
    written.lines.append(f"  br i1 {some}, label %{slow}, label %{after}")
    written.start(slow)
    replaced = written.instruction(f"call {full} {helper}({listed}, {mask} {rare.name})", element)
    written.lines.append(f"  br label %{after}")
    written.start(after)
    return written.instruction(f"phi {full} [ {usual.name}, %{before} ], [ {replaced.name}, %{slow} ]", element)


def _lane_by_lane(written: FunctionLines, helper: str, called: str, element: str, arity: int) -> list[str]:
    full, mask, lanes = written.type(element), written.type("i1"), written.lanes
    names = [f"%x{i}" for i in range(arity)]
    parameters = ", ".join([*(f"{full} {name}" for name in names), f"{full} %usual", f"{mask} %rare"])
    head = f"define internal {full} {helper}({parameters}) cold noinline nounwind {{"
    if lanes == 1:
        given = ", ".join(f"{element} {name}" for name in names)
        return [head, f"  %r = call {element} @{called}({given})", f"  ret {element} %r", "}"]
    scalars = [f"  %s{i} = extractelement {full} {name}, i64 %lane" for i, name in enumerate(names)]
    given = ", ".join(f"{element} %s{i}" for i in range(arity))
    return [
        head,
        "entry:",
        "  br label %each",
        "each:",
        "  %lane = phi i64 [ 0, %entry ], [ %next, %each ]",
        f"  %so_far = phi {full} [ %usual, %entry ], [ %result, %each ]",
        f"  %is_rare = extractelement {mask} %rare, i64 %lane",
        f"  %old = extractelement {full} %so_far, i64 %lane",
        *scalars,
        f"  %slow = call {element} @{called}({given})",
        f"  %new = select i1 %is_rare, {element} %slow, {element} %old",
        f"  %result = insertelement {full} %so_far, {element} %new, i64 %lane",
        "  %next = add i64 %lane, 1",
        f"  %more = icmp ult i64 %next, {lanes}",
        "  br i1 %more, label %each, label %done",
        "done:",
        f"  ret {full} %result",
        "}",
    ]
