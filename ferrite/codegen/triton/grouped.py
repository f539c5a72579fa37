"""Grouped kernels: a program finds its problem, its pointers and its sizes in a table in memory.

A row of the table has the addresses of one problem, its sizes, and the number of its first program, each 64 bits:

    p0, p1, .., s0, .., first

Pointers as arguments would be so many that a choice among them takes more registers than the body of the kernel; of a
table, a program loads one row. Another kernel writes the table: all its words are arguments, which the driver copies
when it is launched, so that no memory of the host has to stay as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ferrite.codegen.triton.indices import is_narrow
from ferrite.codegen.triton.launch import ALIGNMENT, MAX_PROGRAMS
from ferrite.codegen.triton.module import Module, Value
from ferrite.codegen.triton.operators import type_name
from ferrite.errors import NotGenerated
from ferrite.ir import Atom, Index, evaluate
from ferrite.ir.kernel import MASK_MULTIPLE, Kernel

Word = TypeVar("Word")
# Words that a kernel writes: with the address of the table, and what Triton adds, 4 KiB of arguments at most.
WRITTEN_WORDS = (16, 64, 256, 480)


def rows_of(kernel: Kernel, programs: Index) -> tuple[tuple[int, ...], ...]:
    """What stands behind the addresses of each problem. `programs`: of one problem, over the sizes."""
    rows, first = [], 0
    for problem in kernel.problems:
        values: dict[Atom, int] = dict(zip(kernel.sizes, problem, strict=True))
        rows.append((*problem, first))
        first += int(evaluate(programs, values))
    return tuple(rows)


def programs_of(kernel: Kernel, programs: Index) -> int:
    """Of all problems."""
    total = sum(int(evaluate(programs, dict(zip(kernel.sizes, each, strict=True)))) for each in kernel.problems)
    if total > MAX_PROGRAMS:
        raise NotGenerated(f"{total} programs of a grouped kernel")
    return total


def print_choice(kernel: Kernel, module: Module) -> str:
    """Prints how a program finds its problem, and binds pointers and sizes. Gives the number of the program among those
    of its problem."""
    table = module.table = module.fresh("table")
    count, width = len(kernel.problems), len(kernel.pointers) + len(kernel.sizes) + 1
    module.line("pid = tl.program_id(0)")
    problem = module.set("problem", "0")
    step = 1 << max(count - 1, 0).bit_length()
    while (step := step // 2) > 0:  # the last problem that begins no later than here
        later = f"{problem} + {step}"
        inside = "" if count & (count - 1) == 0 else f", mask={later} < {count}, other={MAX_PROGRAMS}"
        first = f"tl.load({table} + ({later}) * {width} + {width - 1}{inside})"
        problem = module.set("problem", f"tl.where({first} <= pid, {later}, {problem})")
    row = module.set("row", f"{table} + {problem} * {width}")
    for place, pointer in enumerate(kernel.pointers):
        address = f"tl.load({row} + {place}).to(tl.pointer_type({type_name(pointer.dtype)}))"
        module.line(f"{module.pointers[pointer.name]} = tl.multiple_of({address}, {ALIGNMENT})")
    for place, size in enumerate(kernel.sizes):
        text = f"tl.load({row} + {len(kernel.pointers) + place})" + (".to(tl.int32)" if is_narrow(size) else "")
        if all(each[place] % MASK_MULTIPLE == 0 for each in kernel.problems):
            text = f"tl.multiple_of({text}, {MASK_MULTIPLE})"
        name = module.set(size.name, text)
        module.atoms[size] = Value(name), not is_narrow(size)
    return module.set("program", f"pid - tl.load({row} + {width - 1}).to(tl.int32)")


def table_words(addresses: Sequence[Word], rows: Sequence[Sequence[Word]]) -> list[Word]:
    """The table, row after row."""
    width = len(addresses) // len(rows)
    pairs = ((addresses[place * width : (place + 1) * width], row) for place, row in enumerate(rows))
    return [word for pointers, row in pairs for word in (*pointers, *row)]


def written_at_once(words: int) -> tuple[int, ...]:
    """How many words each of the kernels writes that write a table of so many; the last one may write more."""
    most = WRITTEN_WORDS[-1]
    rest = words % most
    last = [next(count for count in WRITTEN_WORDS if count >= rest)] if rest else []
    return (most,) * (words // most) + tuple(last)


def table_lengths(kernel: Kernel) -> tuple[int, ...]:
    """The same for the table of a grouped kernel; for others none."""
    width = len(kernel.pointers) + len(kernel.sizes) + 1
    return written_at_once(width * len(kernel.problems))


def writer_source(name: str, words: int) -> str:
    """A kernel that writes its arguments to memory, one after the other."""
    names = [f"word_{place}" for place in range(words)]
    lines = [f"    tl.store(table + {place}, {word})" for place, word in enumerate(names)]
    head = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
    return "\n".join([f"{head}def {name}(table, {', '.join(names)}):", *lines]) + "\n"
