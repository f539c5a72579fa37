"""Programs and expressions as text: readable, stable, and read back to the same thing."""

from __future__ import annotations

import re
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrite.errors import UserError
from ferrite.ir.expr import Cast, Const, cast, const, data, index_value, op
from ferrite.ir.index.algebra import as_index, axis, maximum, minimum, symbol
from ferrite.ir.program import arguments as host
from ferrite.ir.program.loop_operations import Compute, Store
from ferrite.ir.program.nodes import Call, Scalar
from ferrite.ir.program.parse import BadText, parse
from ferrite.ir.program.spelling import constant_text
from ferrite.ir.program.text import expression_text
from ferrite.ir.types import LONG
from tests.loop_programs import BF16, BOOL, F32, I64, PROGRAMS, at, buffer, i0, i1, pointwise, program, s0

pytestmark = pytest.mark.quick


def without_comments(text):
    return re.sub(r"  # .*", "", text)


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_program_is_read_back(name):
    made = PROGRAMS[name]()
    text = str(made)
    read = parse(text)
    assert read == made
    assert hash(read) == hash(made)
    assert str(read) == without_comments(text)


def test_the_text_of_a_program():
    assert str(pointwise()) == textwrap.dedent(
        """\
        def forward(s0, x):
            s0 = symbol(2, 1024)
            x = input(f32, [8, s0], strides=[s0, 1])
            out = owned(f32, [8, s0], strides=[s0, 1])
            with compute(i0=8, i1=s0):  # net.py:41  y = x.sin()  (sin, add)
                v0: f32 = x[i0, i1]
                v1: f32 = add(v0, f32(0.1))
                v2: f32 = sin(v1)
                v3: f32 = mul(v2, v1)
                out[i0, i1] = v3
            return out
        """
    )


def test_the_text_of_indirect_access():
    text = str(PROGRAMS["gather_and_scatter"]())
    assert "v1: i64 = index[data(v0, 16) // 2]" in text
    assert "target[data(v0, 16), k].add(v4)" in text


def test_values_have_names_of_their_own():
    """A buffer called v0 is no value."""
    names = ("v0", "v_1", "v__")
    buffers = [buffer(name, 8, kind="input") for name in names]
    value = op("add", op("add", at("v0", i0), at("v_1", i0)), at("v__", i0))
    made = program(Compute((i0,), (Store("v0", (i0,), value),)), buffers=buffers, outputs=("v0",), inputs=names)
    assert parse(str(made)) == made
    assert "v__0: f32 = v0[i0]" in str(made)


def test_literals_that_look_like_something_else():
    texts = [
        "x",
        "[1, 2]",
        "(1, 2)",
        "1 + 2",
        "size(3)",
        "float('inf')",
        "torch.ops.aten.add.Tensor",
        "...",
        "'é\\n'",
        "-1",
    ]
    args = tuple(map(host.Literal, texts))
    keys = host.Mapping((("(1, 2)", host.Ref("x")), ("3", host.Literal("'#'"))))
    call = Call("aten.op.default", (*args, keys), (), (), reason='it\'s "so"\n# no comment')
    made = program(
        call, buffers=(buffer("x", 8, kind="input"),), outputs=(host.Sequence("tuple", (host.Literal("1"),)),)
    )
    assert parse(str(made)) == made


def test_outputs_of_every_kind():
    ref, index = host.Ref("x"), s0 * 2 - 1
    some = ("x", ref, s0, -s0, index, minimum(s0, 7), as_index(3), host.Literal("-3"), host.Literal("None"))
    some += (Scalar(op("neg", index_value(symbol("only_here", 0, 9)))),)
    nested = host.Sequence("tuple", (ref, host.Sequence("list", ())))
    for outputs in (some, (), (nested,), (nested, nested), (host.Sequence("tuple", ()),), (host.Literal("None"),)):
        made = program(buffers=(buffer("x", 8, kind="input"),), outputs=outputs, inputs=("x", s0))
        assert parse(str(made)) == made


@given(st.sampled_from(sorted(LONG)), st.integers(min_value=0))
@settings(max_examples=100, deadline=None)
def test_a_constant_keeps_its_bits(name, bits):
    dtype = LONG[name]
    bits %= 2 if dtype == torch.bool else 1 << (8 * dtype.itemsize)
    value = Const.intern(dtype, bits)
    made = program(Compute((i0,), (Store("x", (i0,), value),)), buffers=(buffer("x", 8, kind="input"),), outputs=())
    assert parse(str(made)) == made


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (0.1, F32, "f32(0.1)"),
        (0.1, BF16, "bf16(0.1)"),
        (1 / 3, torch.float64, "f64(0.3333333333333333)"),
        (-0.0, F32, "f32(-0.0)"),
        (float("inf"), F32, "f32(inf)"),
        (float("nan"), F32, "f32(nan)"),
        (True, BOOL, "b8(True)"),
        (-1, I64, "i64(-1)"),
        (255, torch.uint8, "u8(255)"),
        (1 + 2j, torch.complex64, "c64(1+2j)"),
        (complex(float("inf"), 0.0), torch.complex64, "c64(bits=0x7f800000)"),
    ],
)
def test_constants_are_readable(value, dtype, text):
    assert constant_text(const(value, dtype)) == text


def test_a_nan_that_carries_something_is_written_by_its_bits():
    assert constant_text(Const.intern(F32, 0x7FC00001)) == "f32(bits=0x7fc00001)"


# --- expressions in one line ------------------------------------------------------------------------------------------


def test_an_expression_in_one_line():
    shared = op("sin", at("x", i0))
    assert expression_text(op("add", shared, cast(shared, F32))) == "add((_0 := sin(x[i0])), _0)"
    assert str(cast(op("mul", at("x", i0), const(2.0, F32)), BF16)) == "bf16.cast(mul(x[i0], f32(2.0)))"
    assert str(op("bitcast", at("x", i0), dtype=torch.int32)) == "i32.bitcast(x[i0])"


def test_shared_parts_do_not_multiply():
    value = at("x", i0)
    for _ in range(100):
        value = op("add", value, value)
    assert len(str(value)) < 4000


def test_shared_parts_in_indices_do_not_multiply():
    value = at("n", i0, dtype=I64)
    for _ in range(30):
        place = data(value, as_index(8))
        value = op("add", at("n", place, dtype=I64), at("n", (place + 1) % 8, dtype=I64))
    assert len(str(value)) < 4000


def test_deep_expressions_have_text():
    value = at("x", i0)
    for _ in range(5000):
        value = op("sin", value)
    assert str(value).count("sin") == 5000
    made = program(Compute((i0,), (Store("x", (i0,), value),)), buffers=(buffer("x", 8, kind="input"),), outputs=())
    assert parse(str(made)) == made


def test_text_does_not_depend_on_the_order_of_making():
    """Sets of nodes have no order of their own; the text must not show it."""
    a, b = (data(at(name, i0, dtype=I64), as_index(8)) for name in ("a", "b"))
    assert str(at("x", a * 8 + b)) == str(at("x", b + a * 8)) == "x[8*data(a[i0], 8) + data(b[i0], 8)]"


# --- random programs --------------------------------------------------------------------------------------------------


@st.composite
def indices(draw, depth=3):
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from([i0, i1, s0, as_index(draw(st.integers(-9, 9)))]))
    one, other = draw(indices(depth - 1)), draw(indices(depth - 1))
    divisor = draw(st.sampled_from([2, 3, 8, s0]))
    make = draw(
        st.sampled_from([
            lambda: one + other, lambda: one - other, lambda: one * draw(st.sampled_from([2, -3, s0, i1])),
            lambda: one // divisor, lambda: one % divisor, lambda: minimum(one, other), lambda: maximum(one, other),
        ])
    )  # fmt: skip
    return make()


@st.composite
def expressions(draw, depth=4):
    kind = draw(st.integers(0, 5 if depth else 1))
    if kind == 0:
        return const(draw(st.floats(width=32)), F32)
    if kind == 1:
        return at("x", draw(indices()), draw(indices()))
    if kind == 2:
        return index_value(draw(indices()), F32)
    if kind == 3:
        place = data(Cast.intern(draw(expressions(depth - 1)), I64), draw(indices()))
        return at("x", place, draw(indices()) + place)
    one = draw(expressions(depth - 1))
    return op("sin", one) if kind == 4 else op("add", one, draw(expressions(depth - 1)))


@pytest.mark.lengthy
@given(st.lists(expressions(), min_size=1, max_size=3), indices())
@settings(max_examples=60, deadline=None)
def test_random_programs_are_read_back(values, size):
    stores = tuple(Store("x", (i0, i1), value) for value in values)
    buffers = (buffer("x", 8, s0, kind="input"), buffer("y", 8, strides=(size,)))
    made = program(Compute((i0, i1), stores), buffers=buffers, outputs=("x",), inputs=(s0, "x"))
    if any(atom is not s0 for atom in size.atoms):
        return  # no size: nothing that a layout could be
    assert parse(str(made)) == made


# --- text that is wrong -----------------------------------------------------------------------------------------------

HEAD = """\
def f(x):
    x = input(f32, [8], strides=[1])
    with compute(i0=8):
        v0: f32 = x[i0]
        x[i0] = v0
"""


def in_block(line):
    return HEAD.replace("        x[i0] = v0\n", f"        {line}\n") + "    return x\n"


def at_end(line):
    return HEAD + f"    {line}\n    return x\n"


WRONG = {
    "no Python": ("def f(x:\n", 1, "Python syntax"),
    "a null byte": ("def f():\n    return 'a\0b'\n", 1, ""),
    "nothing at all": ("", 1, "one function"),
    "two functions": ("def f():\n    return\ndef g():\n    return\n", 3, "one function"),
    "no return": (HEAD, 3, "return"),
    "a statement of another kind": (at_end("import os"), 6, "an operation"),
    "an unknown declaration": (at_end("y = onwed(f32, [8], strides=[1])"), 6, "owned"),
    "an unknown type": (at_end("y = owned(f31, [8], strides=[1])"), 6, "f31"),
    "no strides": (at_end("y = owned(f32, [8])"), 6, "strides=[...]"),
    "a size that is no index": (at_end("y = owned(f32, ['8'], strides=[1])"), 6, "an index"),
    "an unknown argument": (at_end("y = owned(f32, [8], stride=[1])"), 6, "'stride' is unknown"),
    "a device nobody knows": (at_end("y = owned(f32, [8], strides=[1], device='abacus')"), 6, "device"),
    "a symbol nobody declared": (at_end("u0 = item(x)"), 6, "symbol(low, high)"),
    "a bound that is no number": (at_end("u0 = symbol('a', None)"), 6, "a number or None"),
    "a query nobody knows": (at_end("u0 = symbol(0, 1)\n    u0 = bind(x, 'weight', 0)"), 7, "size, stride, offset"),
    "an unknown operation": (at_end("frobnicate(x)"), 6, "frobnicate"),
    "an unknown block": (at_end("with frobnicate(i0=8):\n        pass"), 6, "compute"),
    "a call without operator": (at_end("call()"), 6, "'operator'"),
    "a call of a number": (at_end("call(3, [])"), 6, "an operator"),
    "arguments that are no list": (at_end("call('op', x)"), 6, "a list"),
    "an argument that is arithmetic": (at_end("call('op', [1 + 2])"), 6, "an argument"),
    "an alias of one": (at_end("call('op', [], aliases=[(x,)])"), 6, "(result, buffer)"),
    "a function nobody defined": (at_end("invoke(g, [], results=[])"), 6, "'g'"),
    "a wait for no call": (at_end("wait(x)"), 6, "call(...)"),
    "an unknown axis": (in_block("x[i1] = v0"), 5, "'i1'"),
    "an unknown value": (in_block("x[i0] = v1"), 5, "perhaps v0"),
    "a value twice": (in_block("v0: f32 = x[i0]"), 5, "twice"),
    "a value without type": (in_block("v1 = sin(v0)"), 5, "a value"),
    "an unknown operator": (in_block("v1: f32 = sinn(v0)"), 5, "perhaps sin"),
    "too many operands": (in_block("v1: f32 = sin(v0, v0)"), 5, "1 for sin"),
    "a nested operand": (in_block("v1: f32 = sin(sin(v0))"), 5, "a value, as v0"),
    "a constant with too many bits": (in_block("x[i0] = u8(bits=0x100)"), 5, "8"),
    "a constant that is no number": (in_block("x[i0] = f32('a')"), 5, "a number"),
    "a fraction as an integer": (in_block("x[i0] = i64(1.5)"), 5, "a number of this type"),
    "a number as a bool": (in_block("x[i0] = b8(1)"), 5, "a number of this type"),
    "a decimal in a type without": (in_block("x[i0] = f8e4m3(1.0)"), 5, "bits="),
    "an index that is no integer": (in_block("x[i0 / 2] = v0"), 5, "an index"),
    "an index divided by zero": (in_block("x[i0 // 0] = v0"), 5, "zero"),
    "an unknown mode": (in_block("x[i0].frobnicate(v0)"), 5, "amax"),
    "a reduction without result": (
        at_end("with reduce('sum', axes(i0=8), over()):\n        v0: f32 = x[i0]"),
        7,
        "reduced(...)",
    ),
    "a scan along two axes": (
        at_end("with scan('sum', axes(i0=8), along(i0=8, i1=2)):\n        x[i0] = scanned()"),
        6,
        "along(",
    ),
    "a sort with a flag nobody knows": (
        at_end("with sort(axes(i0=8), along(i0=8), upwards=True):\n        x[i0] = sorted()"),
        6,
        "descending",
    ),
    "a starred argument": (at_end("call(*x)"), 6, "without stars"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_wrong_text_is_explained(case):
    text, line, words = WRONG[case]
    with pytest.raises(BadText) as caught:
        parse(text)
    assert caught.value.line == line
    assert words in str(caught.value)
    assert isinstance(caught.value, UserError)


def test_a_message_shows_the_line():
    with pytest.raises(BadText) as caught:
        parse(in_block("x[i0] = v1"))
    assert str(caught.value) == textwrap.dedent(
        """\
        line 5: no value 'v1'
          expected        perhaps v0
          text            x[i0] = v1"""
    )


def test_names_of_symbols_with_and_without_bounds():
    made = program(buffers=(), outputs=(symbol("a", None, 5), symbol("b", -1, None)), inputs=())
    assert parse(str(made)) == made
    assert axis("i", 3).text == "i"
