"""Which loops become instances of the program, and how large blocks are.

A kernel that was made for a GPU says so itself: see `ferrite.ir.kernel.nodes`. For others, which have loops for the
vectors of a processor, this is how they become programs and blocks.

Independent loops at the top of a kernel, one inside the other and beside nothing but values, are spread over a flat
grid: a parallel loop one iteration each (or `copies` of the innermost), a vector loop one block each. All others run
inside a program: as one block where the extent is bounded and small, as a loop over blocks elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from ferrite.codegen.triton.launch import power_of_two
from ferrite.ir import ONE, Axis, Symbol
from ferrite.ir.kernel import INDEPENDENT, Kernel, Let, Loop, Scratch, Statement, Store, walk

# Elements of such a kernel's blocks: no speed rests on them.
MAX_BLOCK_ELEMENTS = 4096
LOOPED_ELEMENTS = 1024  # elements of a block that a loop takes at a time, or a program of a grid
NESTED_ELEMENTS = 64  # the same, where blocks are nested


@dataclass(frozen=True)
class Spread:
    """One loop of the grid, and the values that stand before it. `most`: elements of its block; 1 for a number."""

    before: tuple[Let, ...]
    loop: Loop
    most: int


def spread_loops(kernel: Kernel) -> tuple[list[Spread], tuple[Statement, ...]]:
    """The loops of the grid, outermost first, and what is left for every program to do."""
    if kernel.warps:
        return stated_loops(kernel)
    written = {statement.buffer for statement in walk(kernel.body) if isinstance(statement, Store)}
    found: list[Spread] = []
    body = kernel.body
    while body:
        *before, last = body
        if not isinstance(last, Loop) or not all(_is_free(item, written) for item in before):
            break
        if not _is_spread(last):
            break
        found.append(Spread(tuple(before), last, 1 if last.kind == "parallel" else block_limit(last)))  # type: ignore[arg-type]
        body = last.body
        if last.kind != "parallel":
            return found, body
    if found and found[-1].loop.copies > 1 and _takes_copies(found[-1].loop):
        last_one = found.pop()
        most = min(block_limit(last_one.loop), power_of_two(last_one.loop.copies))
        found.append(Spread(last_one.before, last_one.loop, most))
    return found, body


def stated_loops(kernel: Kernel) -> tuple[list[Spread], tuple[Statement, ...]]:
    """The same for a kernel that says what its blocks are."""
    written = {statement.buffer for statement in walk(kernel.body) if isinstance(statement, Store)}
    found: list[Spread] = []
    body = kernel.body
    while body:
        *before, last = body
        if not isinstance(last, Loop) or last.kind not in ("parallel", "vector"):
            break
        if not all(_is_free(item, written) for item in before) or not _is_launched(last.axis):
            break
        found.append(Spread(tuple(before), last, last.lanes))  # type: ignore[arg-type]
        body = last.body
    return found, body


def _is_launched(axis: Axis) -> bool:
    """Whether the host can count the iterations."""
    return all(isinstance(atom, Symbol) for atom in axis.extent.atoms)


def block_limit(loop: Loop) -> int:
    """How many elements of a loop to do at a time, where one block does not hold all of them."""
    return NESTED_ELEMENTS if any(_is_blocked(item) for item in walk(loop.body)) else LOOPED_ELEMENTS


def _is_blocked(statement: Statement) -> bool:
    return isinstance(statement, Loop) and statement.kind in INDEPENDENT and statement.axis.extent is not ONE


def _is_free(statement: Statement, written: set[str]) -> bool:
    """Whether every program may do it again: a value that is not read where a program writes."""
    return isinstance(statement, Let) and written.isdisjoint(statement.value.loads)


def _is_spread(loop: Loop) -> bool:
    extent = loop.axis.extent
    if loop.kind not in INDEPENDENT or not _is_launched(loop.axis):
        return False
    return loop.kind == "parallel" or extent.high is None or extent.high > block_limit(loop)


def _takes_copies(loop: Loop) -> bool:
    """Whether several iterations can be one block: no loop inside has another length for each, and no tile is asked
    to have one more dimension."""
    inside = list(walk(loop.body))
    axes: set[Axis] = {loop.axis}
    ragged = any(isinstance(item, Loop) and not axes.isdisjoint(item.axis.extent.atoms) for item in inside)
    return not ragged and not any(isinstance(item, Scratch) for item in inside)
