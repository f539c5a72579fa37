"""Pieces of the text of host programs: what a step needs, what a call gives, names and numbers."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping

import torch

from ferrite.capture import torch_api, torch_operators
from ferrite.graph import ModelLine
from ferrite.ir import Const, Expr, Index, IndexValue, Op, contiguous_strides
from ferrite.ir.program import Buffer, Call, If, Invoke, Operation, While, argument_names, arguments_of, call_of, reads
from ferrite.schedule import Plan, Run

STRING = r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\""
# A name that stands for something: no attribute, no keyword of a call, nothing inside a string.
NAME = re.compile(rf"(?:{STRING})|(?<![\w.])([A-Za-z_]\w*)(?!\w|=[^=])")


def names_in(line: str) -> list[str]:
    """Names that a line of a host program reads, binds or frees."""
    return [] if line.lstrip().startswith("#") else [name for name in NAME.findall(line) if name]


def tensors_of(step: Operation) -> list[str]:
    """Buffers that must be tensors before a call: what it is given, not what it gives."""
    call = call_of(step)
    given = {access.buffer for access in reads(step)}
    if call is not None:
        given |= set(call.writes) - set(call.results)
        given |= set(argument_names(*arguments_of(step)))
    else:
        given |= set(argument_names(*arguments_of(step)))
        if isinstance(step, If) and isinstance(step.predicate, str):
            given.add(step.predicate)
    return sorted(given)


def read_by_strides(plan: Plan) -> Iterator[str]:
    """Storages that must lie in memory as the program says. For others it does not matter: torch's forecast of the
    strides that an operator gives may be wrong, and then eager's are the right ones."""
    for step in plan.steps:
        if isinstance(step, Run):
            yield from (name for launch in step.launches for name in launch.arguments)
        elif isinstance(step, If | Invoke | While):
            yield from argument_names(*arguments_of(step))
    yield from (buffer.storage for buffer in plan.program.buffers if buffer.kind == "view")


PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")


def gives_contiguous(call: Call, buffers: Mapping[str, Buffer]) -> bool:
    """Whether a result is contiguous on every device, as a program expects: nobody needs to look."""
    if call.operator not in PRODUCTS:
        return False
    buffer = buffers[str(call.results[0])]
    return contiguous_strides(buffer.sizes) == tuple(buffer.strides)


@functools.cache
def _tensors_given(operator: str) -> int | None:
    """How many results an operator has, where all of them are tensors."""
    found = torch_api.find_operator(operator)
    kinds = torch_operators.result_types(found) if torch_operators.is_operator(found) else ()
    return len(kinds) if kinds and set(kinds) == {"Tensor"} else None


def gives_tensors(call: Call) -> int | None:
    """How many tensors a call gives, in one flat tuple; None where that is not known."""
    return _tensors_given(call.operator) if isinstance(call.operator, str) else None


COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def comparison(value: Expr) -> str | None:
    """`u0 >= 2` for a comparison of sizes with sizes or numbers: what Python says at once. None for anything else."""
    if not isinstance(value, Op) or value.name not in COMPARISONS:
        return None
    sides = [
        item.index.text if isinstance(item, IndexValue) else str(item.value) if isinstance(item, Const) else None
        for item in value.operands
        if item.dtype == torch.int64
    ]
    return f"({sides[0]} {COMPARISONS[value.name]} {sides[1]})" if len(sides) == 2 and None not in sides else None


def numbers(sizes: Iterable[Index]) -> str:
    texts = [size.text for size in sizes]
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def first_line(run: Run) -> ModelLine | None:
    """The first line of the model that a run comes from."""
    lines = (step.origin.line for launch in run.launches for step in launch.operations)
    return next((line for line in lines if line is not None), None)
