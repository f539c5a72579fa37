"""A kernel as one LLVM module with one exported function.

    i64 @NAME(ptr %args, i64 %threads, ptr %failure)

`args`: words of 8 bytes, the pointers by position, then the sizes. It gives 0, or k > 0 where check k (from 1, in the
order of `checks`) failed, with failure[0] the value and failure[1] the extent, -1 where an integer was divided by
zero, or -2 where there was no memory for its tiles, with failure[0] their bytes.

A checked kernel has two words more for every pointer, behind the sizes: the addresses between which it may be used.
`codes_of_bounds` has what it gives where it would go outside (`ferrite.codegen.llvm.bounds`).
"""

from __future__ import annotations

import weakref

from ferrite.codegen.llvm.bounds import NOWHERE_BYTES, codes_of_bounds
from ferrite.codegen.llvm.emission import AddressBounds, Emission, Memory, Module
from ferrite.codegen.llvm.expressions import Expressions
from ferrite.codegen.llvm.function import Function
from ferrite.codegen.llvm.operators import TAKES
from ferrite.codegen.llvm.parallel import Parallel
from ferrite.codegen.llvm.processor import Processor
from ferrite.codegen.llvm.statements import Statements
from ferrite.codegen.llvm.types import MEMORY, REGISTER
from ferrite.errors import Refusal
from ferrite.ir import Expr, Op, data_of, indices_of, nodes_of, short
from ferrite.ir.kernel import Kernel, Notes, Row, checks

NOTE = " ;@"  # a comment: what a line comes from


def kernel_rows(kernel: Kernel, processor: Processor, name: str) -> list[Row]:
    """The lines of the text, each with the statement that it comes from, where that is known, and its value there."""
    notes = Notes(kernel, NOTE)
    return notes.rows(kernel_text(kernel, processor, name, notes=notes).splitlines())


def kernel_text(
    kernel: Kernel, processor: Processor, name: str, checked: bool = False, notes: Notes | None = None
) -> str:
    """`notes`: lines say in a comment what they come from."""
    *codes, tile_code = codes_of_bounds(kernel, len(checks(kernel)))
    module = Module(processor, name, tile_code=tile_code if checked else 0)
    module.declares["malloc"] = "declare noalias ptr @malloc(i64)"
    module.declares["free"] = "declare void @free(ptr)"
    emission = Emission(module, Function(module.counter))
    pointers = [f"%p.{pointer.name}" for pointer in kernel.pointers]
    sizes = [f"%size.{size.name}" for size in kernel.sizes]
    ends = [f"%{end}.{pointer.name}" for pointer in kernel.pointers for end in ("low", "high")] if checked else []
    shared = ["i64 %threads", "ptr %status", "ptr %failure", *(["ptr %nowhere"] if checked else [])]
    for word in (*pointers, *sizes, *ends, *(each.split()[1] for each in shared)):
        emission.function.parameter(word)
    for place, (pointer, word) in enumerate(zip(kernel.pointers, pointers, strict=True)):
        bounds = AddressBounds(ends[2 * place], ends[2 * place + 1], codes[place]) if checked else None
        emission.memory[pointer.name] = Memory(word, MEMORY[pointer.dtype], bounds=bounds)
    statements = Statements(emission, Expressions(emission, checks(kernel)))
    statements.parallel = Parallel(emission, statements).loop
    statements.notes = statements.expressions.notes = notes
    statements.block(kernel.body)
    given = [*(f"ptr noalias {word}" for word in pointers), *(f"i64 {word}" for word in (*sizes, *ends)), *shared]
    module.functions.append(
        emission.function.text(f"define internal void @{name}.body({', '.join(given)}) alwaysinline nounwind")
    )
    module.functions.append(_exported(name, pointers, [*sizes, *ends], shared))
    return module.text()


def _exported(name: str, pointers: list[str], sizes: list[str], shared: list[str]) -> str:
    lines = [f"define i64 @{name}(ptr %args, i64 %threads, ptr %failure) nounwind {{", "entry:"]
    lines += ["  %status = alloca i64, align 8", "  store i64 0, ptr %status, align 8"]
    lines += [f"  %nowhere = alloca [{NOWHERE_BYTES} x i8], align 64"] if "ptr %nowhere" in shared else []
    given = []
    for place, word in enumerate((*pointers, *sizes)):
        type_ = "ptr" if place < len(pointers) else "i64"
        lines.append(f"  %at{place} = getelementptr i64, ptr %args, i64 {place}")
        lines.append(f"  {word} = load {type_}, ptr %at{place}, align 8")
        given.append(f"{type_} {word}")
    given += shared
    lines += [f"  call void @{name}.body({', '.join(given)})", "  %result = load i64, ptr %status, align 8"]
    return "\n".join([*lines, "  ret i64 %result", "}"])


# --- what has no native form ------------------------------------------------------------------------------------------

_reasons: weakref.WeakKeyDictionary[Expr, Refusal | None] = weakref.WeakKeyDictionary()
_SHAPES = frozenset(["where", "bitcast"])


def unsupported(expr: Expr) -> Refusal | None:
    """Why an expression has no native form; None where it has one."""
    for item in nodes_of(expr, leaving_out=_reasons):
        inside = [value for index in indices_of(item) for value in data_of(index)]
        reason = next((reason for part in (*inside, *item.args) if (reason := _reasons.get(part)) is not None), None)
        _reasons[item] = reason or _unsupported(item)
    return _reasons[expr]


def _unsupported(item: Expr) -> Refusal | None:
    if item.dtype not in REGISTER:
        return Refusal(f"{short(item.dtype)} has no native form")
    if isinstance(item, Op) and item.name not in _SHAPES:
        dtype = item.operands[0].dtype
        if dtype not in REGISTER:
            return Refusal(f"{short(dtype)} has no native form")
        if item.name not in TAKES or not TAKES[item.name](dtype):
            return Refusal(f"{item.name} on {short(dtype)} has no native form")
    return None
