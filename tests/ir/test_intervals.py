"""Intervals hold what expressions come to, whatever the positions are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrite.ir.expr import Expr, Local, cast, const, index_value, op
from ferrite.ir.expr_interpret import Points
from ferrite.ir.index.algebra import axis
from ferrite.ir.intervals import interval

quick = pytest.mark.quick
PLACE = axis("i", 37)
FLOATS = (torch.float32, torch.float64, torch.bfloat16)


@st.composite
def expressions(draw: st.DrawFn) -> Expr:
    value = index_value(PLACE * draw(st.integers(-5, 5)) + draw(st.integers(-50, 50)))
    for _ in range(draw(st.integers(1, 6))):
        step = draw(st.sampled_from(["float", "long", "add", "sub", "mul", "maximum", "minimum", "neg", "floor"]))
        if step == "float":
            value = cast(value, draw(st.sampled_from(FLOATS)))
        elif step == "long":
            value = cast(value, torch.int64)
        elif step == "neg":
            value = op("neg", value)
        elif step == "floor":
            value = op("floor", value) if value.dtype.is_floating_point else value
        else:
            number = draw(st.floats(-8, 8, width=16)) if value.dtype.is_floating_point else draw(st.integers(-8, 8))
            value = op(step, value, const(number, value.dtype))
    return value


@quick
@settings(max_examples=200, deadline=None)
@given(expressions())
def test_every_value_lies_in_the_interval(expr: Expr) -> None:
    found = interval(expr)
    if found is not None:
        values = Points((PLACE,), {}, lambda name: torch.empty(0))(expr).to(torch.float64)
        assert values.min().item() >= found[0]
        assert values.max().item() <= found[1]


@quick
def test_the_place_of_an_interpolation_is_known():
    place = op("add", cast(index_value(axis("j", 128)), torch.float32), const(0.5, torch.float32))
    place = op("sub", op("mul", place, const(0.5, torch.float32)), const(0.5, torch.float32))
    place = cast(op("maximum", place, const(0.0, torch.float32)), torch.int64)
    assert interval(place) == (0, 63)


@quick
def test_nothing_is_known_of_what_memory_holds_or_overflows():
    assert interval(Local.intern("x", torch.int64)) is None
    assert interval(op("mul", index_value(PLACE), const(1 << 60, torch.int64))) is None
    assert interval(cast(index_value(PLACE * 100), torch.int8)) is None
