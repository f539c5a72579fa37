"""Scalar expressions: what builders make, the types that operators take and give, rewriting."""

from __future__ import annotations

import pytest
import torch

from ferrite.ir.expr import (
    Cast,
    Const,
    Data,
    IndexValue,
    Load,
    Masked,
    Op,
    Param,
    Random,
    cast,
    const,
    data,
    index_value,
    masked,
    op,
    rewrite_indices,
    rewrite_loads,
)
from ferrite.ir.expr_laws import wrong_type
from ferrite.ir.index.algebra import as_index, axis, number
from ferrite.ir.scalar import OPERATORS, TAKES
from ferrite.ir.types import SHORT, bits_of, foldable, is_integer, short, tensor_of, value_of
from tests.loop_programs import BF16, BOOL, F32, I64, at, i0, s0

pytestmark = pytest.mark.quick

COMPUTED = (F32, torch.float64, I64, torch.int32, torch.uint8, BOOL, torch.complex64)
NARROW = (BF16, torch.float16, torch.float8_e4m3fn)


def node(name, dtype):
    """An operator on operands of one type, where it takes such, and the type it gives."""
    row = OPERATORS[name]
    types = [dtype] * row.arity
    if name == "where":
        types[0] = BOOL
    result = BOOL if row.gives == "bool" else dtype
    return Op.intern(name, tuple(Param.intern(place, one) for place, one in enumerate(types)), result)


@pytest.mark.parametrize("dtype", COMPUTED, ids=short)
def test_what_the_table_takes_torch_takes(dtype):
    """The types that the laws let through are those that eager computes on, and it gives the type that is stated."""
    checked = 0
    for name, row in OPERATORS.items():
        item = node(name, dtype)
        if wrong_type(item) is not None:
            continue
        result = row.meaning(*(torch.ones((), dtype=operand.dtype) for operand in item.operands))
        assert row.gives == "free" or result.dtype == item.dtype, name
        checked += 1
    assert checked > 15


@pytest.mark.parametrize("dtype", NARROW, ids=short)
def test_narrow_floats_are_not_computed_on(dtype):
    allowed = {name for name in OPERATORS if wrong_type(node(name, dtype)) is None}
    assert allowed == {"where", "bitcast"}


def test_every_row_says_what_it_takes():
    assert {row.takes for row in OPERATORS.values()} == set(TAKES)
    assert {row.gives for row in OPERATORS.values()} == {"same", "bool", "free"}
    assert all(row.cost >= 1 for row in OPERATORS.values())


def test_an_integer_may_go_with_ldexp_and_polygamma():
    x, count = at("x", i0), const(2, torch.int32)
    assert wrong_type(op("ldexp", x, count)) is None
    assert wrong_type(op("ldexp", x, x)) is None
    assert wrong_type(op("ldexp", count, x)) is not None
    assert wrong_type(op("polygamma", count, x, dtype=F32)) is None
    assert wrong_type(op("polygamma", x, count, dtype=F32)) is not None


# --- builders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [dtype for dtype in SHORT if foldable(dtype)], ids=short)
def test_constants_have_the_bits_that_torch_gives(dtype):
    numbers: list[bool | int | float | complex] = [0, 1, True, 2, 100]
    if not is_integer(dtype):
        numbers += [0.1, -0.0, 1e-7, float("inf"), float("-inf"), 1e300]
    if dtype.is_complex:
        numbers += [1 + 2j, complex(-0.0, 0.1)]
    if dtype.is_signed and is_integer(dtype):
        numbers += [-1, -100]
    for value in numbers:
        exact = {complex: torch.complex128, float: torch.float64}.get(type(value), I64)
        expected = torch.tensor([value], dtype=exact).to(dtype)
        made = tensor_of(bits_of(value, dtype), dtype).reshape(1)
        assert torch.equal(made.view(torch.uint8), expected.view(torch.uint8)), value


@pytest.mark.parametrize("dtype", [dtype for dtype in SHORT if foldable(dtype)], ids=short)
def test_bits_come_back_as_the_number(dtype):
    for bits in (0, 1, 37, (1 << 8 * dtype.itemsize - 1) | 5, (1 << 8 * dtype.itemsize) - 1):
        if dtype is torch.bool:
            bits &= 1
        value, expected = value_of(bits, dtype), tensor_of(bits, dtype).item()
        assert str(value) == str(expected)
        if value == value:
            assert bits_of(value, dtype) == bits


def test_nan_and_minus_zero_keep_their_bits():
    assert const(float("nan"), F32) is const(float("nan"), F32)
    assert const(-0.0, F32) is not const(0.0, F32)
    assert Const.intern(F32, 0x7FC00001) is not const(float("nan"), F32)


def test_casts_that_change_nothing_are_none():
    x = at("x", i0)
    assert cast(x, F32) is x
    assert isinstance(cast(x, I64), Cast)


def test_casts_of_constants_are_done_at_once():
    assert cast(const(1, I64), F32) is const(1.0, F32)
    assert cast(const(1.0, F32), BF16) is const(1.0, BF16)
    assert cast(const(3.0, F32), I64) is const(3, I64)
    assert cast(const(0, I64), BOOL) is const(False, BOOL)


def test_known_indices_are_numbers():
    assert index_value(number(3)) is const(3, I64)
    assert isinstance(index_value(i0), IndexValue)
    assert data(const(3, I64), as_index(8)) is number(3)
    assert data(index_value(i0 + 1), as_index(9)) is i0 + 1
    assert isinstance(data(at("n", i0, dtype=I64), as_index(8)), Data)


def test_data_is_bounded_by_its_extent():
    place = data(at("n", i0, dtype=I64), as_index(8))
    assert (place.low, place.high) == (0, 7)
    assert place // 8 is number(0)
    unbounded = data(at("n", i0, dtype=I64), s0)
    assert (unbounded.low, unbounded.high) == (0, 1023)


def test_a_masked_value_has_the_type_of_its_values():
    item = masked(const(True, BOOL), at("x", i0), const(0.0, F32))
    assert item.dtype == F32
    assert wrong_type(item) is None


# --- what an expression depends on ------------------------------------------------------------------------------------


def test_loads_and_atoms_are_those_of_the_whole():
    place = data(at("n", i0, dtype=I64), as_index(8))
    value = op("add", at("x", place), Random.intern("uniform", at("seed", dtype=I64), s0 + 1, place, F32))
    assert value.loads == {"x", "n", "seed"}
    assert value.atoms == {place, i0, s0}


# --- rewriting --------------------------------------------------------------------------------------------------------


def test_axes_are_replaced_everywhere():
    j = axis("j", 4)
    place = data(at("n", i0, dtype=I64), as_index(8))
    value = Masked.intern(
        op("lt", index_value(i0), const(3, I64), dtype=BOOL), op("sin", at("x", place, i0)), const(0.0, F32), F32
    )
    moved = rewrite_indices(value, {i0: j * 2})
    assert str(moved) == "masked(lt(index(2*j), i64(3)), sin(x[data(n[2*j], 8), 2*j]), f32(0.0))"
    assert rewrite_indices(value, {j: i0}) is value
    assert rewrite_indices(moved, {}) is moved


def test_a_known_place_replaces_what_was_read():
    place = data(index_value(i0), as_index(8))
    assert rewrite_indices(at("x", place), {i0: number(3)}) is at("x", 3)


def test_loads_are_replaced_everywhere():
    place = data(at("n", i0, dtype=I64), as_index(8))
    value = op("add", at("x", place), at("x", i0))

    def new(item: Load):
        return op("neg", item) if item.buffer == "x" else at("m", *item.coordinates, dtype=I64)

    assert str(rewrite_loads(value, new)) == "add(neg(x[data(m[i0], 8)]), neg(x[i0]))"
    assert rewrite_loads(value, lambda item: item) is value
