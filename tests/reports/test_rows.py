"""Lines with where they come from are the lines of the text."""

from __future__ import annotations

import re

import pytest

from ferrite.codegen.llvm import host_processor, kernel_rows, kernel_text
from ferrite.codegen.triton import kernel_rows as triton_rows
from ferrite.codegen.triton import kernel_source
from ferrite.ir import Load, Op, nodes_of
from ferrite.ir.kernel import Accumulate, nodes_in, walk
from ferrite.ir.kernel import kernel_rows as rows_of_kernel
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.ir.program import program_rows, roots_of
from tests.loop_kernels import KERNELS, SOFTMAX
from tests.loop_programs import PROGRAMS

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("source", KERNELS.values(), ids=KERNELS)
def test_rows_of_a_kernel_are_its_text(source):
    kernel = parse_kernel(source)
    rows = rows_of_kernel(kernel)
    assert "\n".join(text for text, _, _ in rows) + "\n" == str(kernel)
    statements = list(walk(kernel.body))
    assert {number for _, number, _ in rows if number is not None} == set(range(len(statements)))
    for text, number, value in rows:
        is_value = re.match(r"\s*v\d+: ", text) and not isinstance(
            statements[number], Accumulate
        )  # but of a state's rule
        assert (value is not None) == bool(is_value)
        assert value is None or value in nodes_in(statements[number])


@pytest.mark.parametrize("source", KERNELS.values(), ids=KERNELS)
def test_rows_of_llvm_are_its_text(source):
    kernel = parse_kernel(source)
    rows = kernel_rows(kernel, host_processor(), "kernel")
    assert "\n".join(text for text, _, _ in rows) + "\n" == kernel_text(kernel, host_processor(), "kernel")
    numbers = {number for _, number, _ in rows if number is not None}
    assert numbers <= set(range(sum(1 for _ in walk(kernel.body))))
    assert any("store" in text for text, number, _ in rows if number is not None)
    computed = [(text, number, value) for text, number, value in rows if value is not None]
    assert {type(value) for *_, value in computed} & {Load, Op}
    assert all(number is not None for _, number, _ in computed)


def test_rows_of_triton_are_its_source():
    kernel = parse_kernel(SOFTMAX)
    rows = triton_rows(kernel, "kernel")
    assert "\n".join(text for text, _, _ in rows) + "\n" == kernel_source(kernel, "kernel")
    assert any("tl.store" in text for text, number, _ in rows if number is not None)
    assert any("exp(" in text for text, _, value in rows if isinstance(value, Op) and value.name == "exp")


@pytest.mark.parametrize("source", PROGRAMS.values(), ids=PROGRAMS)
def test_rows_of_a_program_are_its_text(source):
    program = source()
    rows = program_rows(program)
    assert "\n".join(text for text, _, _ in rows) + "\n" == str(program)
    assert sorted({number for _, number, _ in rows if number is not None}) == list(range(len(program.operations)))
    for _, number, value in rows:
        assert value is None or number is None or value in nodes_of(*roots_of(program.operations[number]))
