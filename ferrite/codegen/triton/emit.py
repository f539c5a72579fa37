"""Kernels as Triton source: the second printer of `ferrite.ir.kernel.nodes`.

source = kernel_source(kernel, "rows")      a Python module with one function of that name
launch = launch_of(kernel, "rows")          how it is started: grid, constants, checks
reason = unsupported(kernel)                why there is none, or None
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ferrite.codegen.triton.grouped import programs_of, rows_of
from ferrite.codegen.triton.helpers import functions
from ferrite.codegen.triton.launch import ALIGNMENT, DESCRIPTORS, LaunchConfig
from ferrite.codegen.triton.statements import Printer
from ferrite.errors import NotGenerated, Refusal
from ferrite.ir import number, substitute
from ferrite.ir.kernel import Kernel, Notes, Row
from ferrite.ir.program import comment

NOTE = "  #@"  # a comment: what a line comes from


def kernel_source(kernel: Kernel, name: str) -> str:
    return written(kernel, name).source


def kernel_rows(kernel: Kernel, name: str) -> list[Row]:
    """The lines of the source, each with the statement that it comes from, where that is known, and its value there."""
    notes = Notes(kernel, NOTE)
    return notes.rows(written(kernel, name, notes).source.splitlines())


def launch_of(kernel: Kernel, name: str) -> LaunchConfig:
    return written(kernel, name).launch


@functools.lru_cache(maxsize=512)
def fixed_launch(kernel: Kernel) -> LaunchConfig:
    """How a kernel is started whose blocks are the same for all sizes: programs are counted over the sizes alone."""
    launch = launch_of(kernel, "kernel")
    blocks = {block: number(value) for block, value in launch.values(None).items()}
    promises = tuple((name, substitute(word, blocks)) for name, word in launch.promises)
    return replace(launch, programs=substitute(launch.programs, blocks), promises=promises)


def unsupported(kernel: Kernel) -> Refusal | None:
    """Why a kernel has no Triton source; None where it has."""
    try:
        written(kernel, "kernel")
    except NotGenerated as error:
        return error.refusal
    return None


@dataclass(frozen=True)
class Written:
    source: str
    launch: LaunchConfig


def written(kernel: Kernel, name: str, notes: Notes | None = None) -> Written:
    """Both at once. The kernel keeps its laws."""
    printer = Printer(kernel, name, notes)
    programs = printer.kernel(kernel)
    module = printer.module
    blocks = tuple(module.blocks.values())
    launch = LaunchConfig(name, kernel.arguments, kernel.sizes, blocks, programs, module.checks, kernel.warps)
    launch = replace(launch, descriptors=len(module.descriptors), promises=printer.promises(kernel))
    arguments = [
        *(module.pointers[pointer.name] for pointer in kernel.pointers),
        *(module.atoms[size][0].text for size in kernel.sizes),
        *(["failure"] if module.checks else []),
        *(f"{block.name}: tl.constexpr" for block in blocks),
        *(f"{promise}: tl.constexpr" for promise, _word in launch.promises),
        *([f"{DESCRIPTORS}: tl.constexpr"] if module.descriptors else []),
    ]
    if kernel.problems:
        rows, total = rows_of(kernel, programs), number(programs_of(kernel, programs))
        launch = replace(launch, sizes=(), programs=total, rows=rows)
        arguments = [module.table, f"{ALIGNMENT}: tl.constexpr"]
    own = [f"@triton.jit\n{text}" for text in module.functions.values()]
    main = f"@triton.jit\ndef {name}({', '.join(arguments)}):\n{module.text()}"
    parts = [*functions(module.helpers), *own, main]
    origins = [comment(origin).strip() for origin in kernel.origins if comment(origin)]
    library = any("libdevice." in part for part in parts)
    head = [
        *origins,
        "import triton",
        "import triton.language as tl",
        *(["from triton.language.extra import libdevice"] if library else []),
    ]
    return Written("\n\n\n".join(["\n".join(head), *parts]) + "\n", launch)
