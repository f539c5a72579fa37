"""Attention in programs and kernels: text, laws, what is asked of it, and its meaning."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ferrite.ir.invalid import InvalidProgram
from ferrite.ir.kernel.canonical import canonical
from ferrite.ir.kernel.interpret import run_kernel
from ferrite.ir.kernel.laws import verify_kernel
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.ir.program.interpret import interpret
from ferrite.ir.program.laws import verify_program
from ferrite.ir.program.operation_facts import axes_of, reads, writes
from ferrite.ir.program.parse import BadText, parse
from tests.attention_text import KERNEL, PROGRAM

pytestmark = pytest.mark.quick


def changed(source: str, old: str, new: str) -> str:
    assert old in source
    return source.replace(old, new)


def test_a_program_is_read_back():
    program = verify_program(parse(PROGRAM))
    assert str(program) == PROGRAM
    assert parse(str(program)) == program


def test_a_kernel_is_read_back():
    kernel = verify_kernel(parse_kernel(KERNEL))
    assert str(kernel) == KERNEL
    by_position = verify_kernel(canonical(kernel))
    assert parse_kernel(str(by_position)) == by_position
    assert canonical(by_position) == by_position


def test_what_is_asked_of_an_operation():
    (operation,) = parse(PROGRAM).operations
    read = [access.buffer for access in reads(operation)]
    assert read == ["q", "k", "v", "count", "place", "full_count", "full_place"]
    assert [access.buffer for access in writes(operation)] == ["out", "lse"]
    assert [axis.name for axis in axes_of(operation)] == ["b", "h", "g", "m", "n", "d", "e", "j0", "j1"]


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def test_blocks_in_no_list_are_skipped_and_whole_ones_are_not_asked():
    q, k, v = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 6)
    none, one = torch.zeros(3, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    diagonal = torch.tensor([[0, 0, 0], [1, 0, 0], [2, 0, 0]], dtype=torch.int32)
    before = torch.tensor([[0, 1, 2]] * 3, dtype=torch.int32)
    program = parse(PROGRAM)
    out, lse = interpret(program, [q, k, v, one, diagonal, torch.arange(3, dtype=torch.int32), before], {})
    torch.testing.assert_close(out, expected(q, k, v, 0.5))
    assert not lse.isinf().any()
    out, lse = interpret(program, [q, k, v, none, diagonal, none, before], {})
    assert not out.any()
    assert lse.isinf().all()
    later = before.flip(1)  # whole blocks behind the diagonal: they count all the same
    out, _ = interpret(program, [q, k, v, none, diagonal, one, later], {})
    wanted = F.scaled_dot_product_attention(q, k[:, :, 32:], v[:, :, 32:], scale=0.5, enable_gqa=True)
    torch.testing.assert_close(out, wanted)


def test_a_kernel_is_run_row_by_row():
    q, k, v = torch.randn(2, 2, 20, 8), torch.randn(2, 1, 20, 8), torch.randn(2, 1, 20, 8)
    out = torch.full((640,), torch.nan)
    run_kernel(parse_kernel(KERNEL), [out, q.flatten(), k.flatten(), v.flatten()])
    torch.testing.assert_close(out.view(2, 2, 20, 8), expected(q, k, v, 1.0))


BROKEN = {
    "a key that differs from row to row": ("v1: f32 = k[b, h, n, d]", "v1: f32 = k[b, h, m, d]"),
    "a second parameter": ("v3: f32 = param(0)", "v3: f32 = param(1)"),
    "blocks without sides": ("sides=[16, 16]", "sides=[0, 16]"),
    "a result at the place of a key": ("out[b, g + 2*h, m, e]", "out[b, g + 2*h, n, e]"),
    "what is allowed is no bool": ("attended(v0, v1, v2, v4, v7)", "attended(v0, v1, v2, v4, v4)"),
    "one destination": ("out[b, g + 2*h, m, e], lse[b, g + 2*h, m], _ =", "out[b, g + 2*h, m, e] ="),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_broken_program_is_refused(case):
    with pytest.raises(InvalidProgram, match=r"^law P17: "):
        verify_program(parse(changed(PROGRAM, *BROKEN[case])))


BROKEN_KERNELS = {
    "no loop over rows": ("for m in vector(20, lanes=16)", "for i in vector(20, lanes=16)"),
    "a block that is no power of two": ("lanes=16, copies=2", "lanes=24, copies=2"),
    "one place for all of a batch": ("out[320*b + e + 160*g + 8*m]", "out[e + 160*g + 8*m]"),
}


@pytest.mark.parametrize("case", list(BROKEN_KERNELS))
def test_a_broken_kernel_is_refused(case):
    with pytest.raises(InvalidProgram, match=r"^law K12: "):
        verify_kernel(parse_kernel(changed(KERNEL, *BROKEN_KERNELS[case])))


WRONG = {
    "a list without an entry": ("entries(j0=3, j1=3), ", "entries(j0=3), "),
    "parts in another order": ("group(g=2), rows(m=40)", "rows(m=40), group(g=2)"),
    "too few values": ("attended(v0, v1, v2, v4, v7)", "attended(v0, v1, v2, v4)"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_wrong_text_is_explained(case):
    with pytest.raises(BadText):
        parse(changed(PROGRAM, *WRONG[case]))
