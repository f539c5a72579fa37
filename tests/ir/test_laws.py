"""Each law of a program, broken at least once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ferrite.ir.expr import Cast, Const, IndexValue, Masked, Op, Param, Random, cast, const, data, index_value, op
from ferrite.ir.index.algebra import as_index, axis, symbol
from ferrite.ir.invalid import InvalidProgram
from ferrite.ir.program import arguments as host
from ferrite.ir.program.laws import verify_program
from ferrite.ir.program.loop_operations import Combine, Compute, Destination, Reduce, Scan, Sort, Store
from ferrite.ir.program.nodes import (
    Assert,
    Bind,
    Call,
    Collective,
    DeviceCopy,
    If,
    Invoke,
    Item,
    Program,
    RandomState,
    Scalar,
    Seeds,
    Size,
    Wait,
    While,
)
from ferrite.ir.program.parse import parse
from tests.attention_text import PROGRAM as ATTENTION
from tests.loop_programs import BF16, BOOL, F32, I64, PROGRAMS, at, buffer, i0, i1, s0

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_valid_program_is_returned_unchanged(name):
    program = PROGRAMS[name]()
    assert verify_program(program) is program


X, OUT = buffer("x", 8, kind="input"), buffer("out", 8)
ELEMENT, TOTAL, EACH = (at("x", i0),), (Destination("out", ()),), (Destination("out", (i0,)),)
OPERANDS = (host.Ref("x"),)


def program(*operations, buffers=(X, OUT), inputs=("x",), outputs=("out",)):
    return Program("f", tuple(inputs), tuple(buffers), operations, tuple(outputs))


def compute(value=None, where=None, axes=(i0,), mode="set"):
    return Compute(
        tuple(axes), (Store(*(where or ("out", (i0,))), value=at("x", i0) if value is None else value, mode=mode),)
    )


def with_buffers(*buffers, operations=(), **rest):
    return program(compute(), *operations, buffers=(X, OUT, *buffers), **rest)


def stored(value, dtype=F32):
    """A program that stores this value, of this type."""
    return program(compute(value), buffers=(X, buffer("out", 8, dtype=dtype)))


def reduction(kind="sum", values=ELEMENT, destinations=TOTAL, reduced=(i0,), out=()):
    return program(Reduce((), reduced, kind, values, destinations), buffers=(X, buffer("out", *out)))


def scan(combine, destinations=EACH, along=i0):
    return program(Scan((i0,), along, combine, ELEMENT, destinations))


def narrow(operation, out):
    """A program over 16-bit floats."""
    return program(operation, buffers=(Y, out), inputs=("y",))


def call(*results, operator="aten.op.default", args=("x",), **rest):
    return Call(operator, tuple(map(host.Ref, args)), (), results, **rest)


def body(inputs=("p",), outputs=("q",)):
    buffers = (buffer("p", 8, kind="input"), buffer("q", 8), buffer("r", 8))
    return Program("body", inputs, buffers, (Compute((i0,), (Store("q", (i0,), at("p", i0)),)),), outputs)


def invoke(inner, operands=OPERANDS, results=("out",)):
    return program(Invoke(inner, operands, results))


def invoke_on(other):
    """A sub-program for f32[8], given another buffer."""
    return program(Invoke(body(), (host.Ref(other.name),), ("out",)), buffers=(OUT, other), inputs=(other.name,))


def collective(*between, holds=("x", "sent")):
    start = Collective(call("sent"))
    wait = (Wait(call(args=("sent",)), holds),) if holds else ()
    return program(start, *between, *wait, compute(), buffers=(X, OUT, buffer("sent", 8)))


GPU = torch.device("cuda:0")
i2, u0, u1 = axis("i2", 8), symbol("u0", 0, None), symbol("u1", 0, None)
bf16_load = at("y", i0, dtype=BF16)
Y = buffer("y", 8, dtype=BF16, kind="input")
is_small = op("lt", at("x", i0), const(1.0, F32), dtype=BOOL)
params = [Param.intern(place, F32) for place in range(3)]

BROKEN = {
    # names
    "two buffers have one name": ("P1", with_buffers(buffer("out", 4))),
    "a buffer's name is no identifier": ("P1", with_buffers(buffer("a.b", 4))),
    "a buffer's name is a keyword": ("P1", with_buffers(buffer("del", 4))),
    "a buffer is called _": ("P1", with_buffers(buffer("_", 4))),
    "an object has the name of a buffer": ("P1", with_buffers(inputs=("x", host.Constant("out")))),
    "a symbol has the name of a buffer": ("P1", with_buffers(inputs=("x", symbol("out", 1, 2)))),
    "a symbol's name is no identifier": ("P1", with_buffers(inputs=("x", symbol("a b", 1, 2)))),
    "two symbols have one name": ("P1", with_buffers(inputs=("x", s0), outputs=(symbol("s0", 1, 3),))),
    "two symbols of layouts have one name": ("P1", with_buffers(buffer("b", symbol("s0", 1, 3)), inputs=("x", s0))),
    "two axes have one name": ("P1", program(compute(axes=(i0, axis("i0", 4))))),
    "an axis has the name of a buffer": ("P1", program(compute(axes=(i0, axis("x", 4))))),
    "an axis has the name of a symbol": ("P1", program(compute(axes=(i0, axis("s0", 4))), inputs=("x", s0))),
    "an axis's name is a keyword": ("P1", program(compute(axes=(i0, axis("if", 4))))),
    # inputs
    "an input has no buffer": ("P2", program(compute(), inputs=("x", "y"))),
    "an input is owned": ("P2", program(compute(), inputs=("x", "out"))),
    "an input is given twice": ("P2", program(compute(), inputs=("x", "x"))),
    "a buffer of kind input is none": ("P2", program(compute(), inputs=())),
    "a donated buffer is no input": ("P2", with_buffers(buffer("d", 4, kind="donated"))),
    # accesses
    "a load names no buffer": ("P3", program(compute(at("w", i0)))),
    "a store names no buffer": ("P3", program(compute(where=("w", (i0,))))),
    "an argument names no buffer": ("P3", program(call("out", args=("w",)))),
    "a result names no buffer": ("P3", program(call("w"))),
    "an output names no buffer": ("P3", program(compute(), outputs=("w",))),
    "a load has too many coordinates": ("P3", program(compute(at("x", i0, 0)))),
    "a store has too few coordinates": ("P3", program(compute(where=("out", ())))),
    "a target has too many coordinates": ("P3", reduction(destinations=(Destination("out", (as_index(0),)),))),
    # order
    "a buffer is read before it is written": ("P4", program(compute(at("out", i0)))),
    "a store that adds reads what nobody wrote": ("P4", program(compute(mode="add"))),
    "a call reads what nobody wrote": ("P4", program(call("out", args=("out",)))),
    "an item of what nobody wrote": ("P4", with_buffers(buffer("n", dtype=I64), operations=(Item(u0, "n"),))),
    "a view is read before its base is written": (
        "P4",
        program(compute(at("v", i0)), buffers=(X, OUT, buffer("b", 8), buffer("v", 8, kind="view", base="b"))),
    ),
    "a sub-program is given what nobody wrote": ("P4", invoke(body(), (host.Ref("out"),), (None,))),
    "an output is never written": ("P4", program()),
    "an output as a reference is never written": ("P4", program(outputs=(host.Ref("out"),))),
    "a nested output is never written": ("P4", program(outputs=(host.Sequence("list", (host.Ref("out"),)),))),
    "an output reads what nobody wrote": ("P4", program(outputs=(Scalar(at("out", 0)),))),
    # symbols
    "an extent uses an unknown symbol": ("P5", program(compute(axes=(i0, i1)))),
    "a coordinate uses an unknown symbol": ("P5", program(compute(at("x", i0 % s0)))),
    "an argument uses an unknown symbol": ("P5", program(compute(), Call("op", (Size(s0),), (), ()))),
    "an operand uses an unknown symbol": ("P5", invoke(body(inputs=(s0,)), (Size(u0),))),
    "a predicate uses an unknown symbol": ("P5", program(compute(), If(u0, body(), body(), (host.Ref("x"),), (None,)))),
    "what a call returned is read before its size is known": (
        "P5",
        program(call("n"), call("out", args=("n",)), buffers=(X, OUT, buffer("n", u0))),
    ),
    "an output has a size nobody knows": ("P5", program(call("out"), buffers=(X, buffer("out", u0)))),
    "an output is a symbol nobody knows": ("P5", program(compute(), outputs=(u0 + 1,))),
    "an output computes with a symbol nobody knows": ("P5", program(outputs=(Scalar(index_value(u0)),))),
    "a symbol is defined twice": ("P5", program(Bind(s0, "x", "size", 0), inputs=("x", s0))),
    "the extent of what memory holds uses an unknown symbol": (
        "P5",
        with_buffers(
            buffer("j", 8, dtype=I64, kind="constant"),
            operations=(compute(at("x", data(at("j", i0, dtype=I64), s0))),),
        ),
    ),
    # axes
    "a load uses a foreign axis": ("P6", program(compute(at("x", i2)))),
    "a store uses a foreign axis": ("P6", program(compute(where=("out", (i2,))))),
    "an index value uses a foreign axis": ("P6", program(compute(index_value(i2, F32)))),
    "a result uses a reduced axis": ("P6", reduction(destinations=(Destination("out", (i0,)),), out=(8,))),
    "an extent uses an axis": ("P6", program(compute(axes=(i0, axis("j", i0 + 1))))),
    "a scan runs along a foreign axis": ("P6", scan(Combine("sum"), along=i2)),
    "a sort runs along a foreign axis": (
        "P6",
        program(Sort((i0,), i2, (at("x", i0),), (Destination("out", (i0,)), None))),
    ),
    "a condition has an axis": ("P6", program(Assert(op("lt", index_value(i0), const(3, I64), dtype=BOOL), "no"))),
    # types of memory
    "a load has another type than its buffer": ("P7", stored(at("x", i0, dtype=I64), I64)),
    "a stored value has another type than its buffer": ("P7", stored(cast(at("x", i0), torch.float64))),
    # types of values
    "an operator nobody knows": ("P8", stored(op("frobnicate", at("x", i0)))),
    "an operator has too many operands": ("P8", stored(op("sin", at("x", i0), at("x", i0)))),
    "operands differ in type": ("P8", stored(op("add", at("x", i0), const(1, I64)))),
    "an operator for floats gets an integer": ("P8", stored(op("sin", const(1, I64)), I64)),
    "an operator for integers gets a float": ("P8", stored(op("bitwise_not", at("x", i0)))),
    "an operator for bools gets a float": ("P8", stored(op("logical_not", at("x", i0)))),
    "a comparison gives a float": ("P8", stored(op("lt", at("x", i0), at("x", i0)))),
    "a result has another type than its operands": ("P8", stored(op("sin", at("x", i0), dtype=I64), I64)),
    "a choice by a float": ("P8", stored(op("where", at("x", i0), at("x", i0), at("x", i0), dtype=F32))),
    "choices differ in type": ("P8", stored(op("where", is_small, at("x", i0), const(1, I64), dtype=F32))),
    "a reinterpretation changes the size": ("P8", stored(op("bitcast", at("x", i0), dtype=I64), I64)),
    "arithmetic on bf16": ("P8", narrow(compute(op("neg", bf16_load)), buffer("out", 8, dtype=BF16))),
    "a sum of bf16": ("P8", narrow(Reduce((), (i0,), "sum", (bf16_load,), TOTAL), buffer("out"))),
    "a prefix sum of bf16": ("P8", narrow(Scan((i0,), i0, Combine("sum"), (bf16_load,), EACH), OUT)),
    "a mask that is no bool": ("P8", stored(Masked.intern(at("x", i0), at("x", i0), at("x", i0), F32))),
    "masked values differ in type": ("P8", stored(Masked.intern(is_small, at("x", i0), const(1, I64), F32))),
    "a masked value of another type": ("P8", stored(Masked.intern(is_small, at("x", i0), at("x", i0), I64), I64)),
    "a seed that is no i64": ("P8", stored(Random.intern("uniform", at("x", i0), i0, i0, F32))),
    "random numbers of no kind": ("P8", stored(Random.intern("loud", const(1, I64), i0, i0, F32))),
    "an index as a bool": ("P8", stored(IndexValue.intern(i0, BOOL), BOOL)),
    "a constant with too many bits": ("P8", stored(Const.intern(F32, 1 << 32))),
    "a parameter outside a combine function": ("P8", stored(params[0])),
    "a float as an index": ("P8", program(compute(at("x", data(at("x", i0), as_index(8)))))),
    "an error that nobody raises": (
        "P8",
        with_buffers(
            buffer("j", 8, dtype=I64, kind="constant"),
            operations=(compute(at("x", data(at("j", i0, dtype=I64), as_index(8), "Oops: {index}"))),),
        ),
    ),
    "a bool as an index of a store": ("P8", program(compute(where=("out", (data(is_small, as_index(8)),))))),
    "a wrong type inside an index": (
        "P8",
        program(compute(at("x", data(Cast.intern(Op.intern("sin", (const(1, I64),), I64), I64), as_index(8))))),
    ),
    "a wrong type in an output": ("P8", program(outputs=(Scalar(op("sin", const(1, I64))),))),
    "a wrong type in an argument": (
        "P8",
        program(compute(), Call("op", (Scalar(op("sin", const(1, I64))),), (), ())),
    ),
    "a wrong type in a combine function": ("P8", scan(Combine("own", (op("logical_not", params[0]),)))),
    # layouts
    "a size has an axis": ("P9", with_buffers(buffer("b", i0 + 1))),
    "fewer strides than sizes": ("P9", with_buffers(buffer("b", 4, 4, strides=(1,)))),
    "a size is negative": ("P9", with_buffers(buffer("b", -1))),
    # views
    "a view has no base": ("P10", with_buffers(buffer("v", 4, kind="view"))),
    "an owned buffer has a base": ("P10", with_buffers(buffer("v", 4, base="x"))),
    "a base is no buffer": ("P10", with_buffers(buffer("v", 4, kind="view", base="w"))),
    "a base is a view": (
        "P10",
        with_buffers(buffer("v", 4, kind="view", base="x"), buffer("w", 4, kind="view", base="v")),
    ),
    "a view reaches beyond its base": ("P10", with_buffers(buffer("v", 4, kind="view", base="out", offset=5))),
    "a view has too long a stride": ("P10", with_buffers(buffer("v", 2, kind="view", base="out", strides=(8,)))),
    "a view of a wider type reaches beyond": ("P10", with_buffers(buffer("v", 5, dtype=I64, kind="view", base="out"))),
    "a view of symbolic size reaches beyond": (
        "P10",
        with_buffers(buffer("b", s0), buffer("v", s0 + 1, kind="view", base="b"), inputs=("x", s0)),
    ),
    "a view begins before its base": ("P10", with_buffers(buffer("v", 4, kind="view", base="x", offset=-1))),
    # constants
    "a constant is written": (
        "P11",
        with_buffers(buffer("c", 8, kind="constant"), operations=(compute(where=("c", (i0,))),)),
    ),
    "a constant is written through a view": (
        "P11",
        with_buffers(
            buffer("c", 8, kind="constant"),
            buffer("v", 8, kind="view", base="c"),
            operations=(compute(where=("v", (i0,))),),
        ),
    ),
    "a call changes a constant": (
        "P11",
        with_buffers(buffer("c", 8, kind="constant"), operations=(call(writes=("c",)),)),
    ),
    # results of calls
    "a result is an input": ("P12", program(compute(), call("x"))),
    "a result comes from two calls": ("P12", program(call("out"), call("out"))),
    "a result shares memory, but is no view": ("P12", program(call("out", aliases=(("out", "x"),)))),
    "an alias is no result": (
        "P12",
        with_buffers(buffer("v", 8, kind="view", base="x"), operations=(call(aliases=(("v", "x"),)),)),
    ),
    "a result of a sub-program is an input": ("P12", program(compute(), Invoke(body(), (host.Ref("x"),), ("x",)))),
    # reductions, scans, sorts
    "a reduction nobody knows": ("P13", reduction("frobnicate")),
    "a reduction takes too many values": ("P13", reduction(values=(at("x", i0), at("x", i0)))),
    "a reduction gives too few results": ("P13", reduction("argmax")),
    "a reduction whose results nobody wants": ("P13", reduction("argmax", destinations=(None, None))),
    "the largest of nothing": ("P13", reduction("amax", (const(1.0, F32),), reduced=(axis("r", 0),))),
    "a scan nobody knows": ("P13", scan(Combine("frobnicate"))),
    "a scan gives too many results": ("P13", scan(Combine("sum"), destinations=(Destination("out", (i0,)), None))),
    "a combine function reads memory": ("P13", scan(Combine("own", (at("x", i0),)))),
    "a combine function has too many parameters": ("P13", scan(Combine("own", (params[2],)))),
    "a combine function takes another type": ("P13", scan(Combine("own", (cast(Param.intern(0, I64), F32),)))),
    "a combine function gives another type": ("P13", scan(Combine("own", (cast(params[0], I64),)))),
    "a combine function gives too many results": ("P13", scan(Combine("own", (params[0], params[1])))),
    "a sort without places": ("P13", program(Sort((i0,), i0, (at("x", i0),), (Destination("out", (i0,)),)))),
    "a sort without keys": ("P13", program(Sort((i0,), i0, (), (Destination("out", (i0,)),)))),
    # sub-programs
    "an operand too few": ("P14", invoke(body(), ())),
    "a number for a buffer": ("P14", invoke(body(), (Size(as_index(3)),))),
    "a buffer for a number": ("P14", invoke(body(inputs=("p", s0)), (host.Ref("x"), host.Ref("x")))),
    "an operand of another type": ("P14", invoke_on(buffer("n", 8, dtype=I64, kind="input"))),
    "an operand of another rank": ("P14", invoke_on(buffer("n", kind="input"))),
    "a result too many": ("P14", invoke(body(), results=("out", None))),
    "a symbol for a buffer": ("P14", invoke(body(), results=(u0,))),
    "a buffer for a symbol": ("P14", invoke(body(inputs=("p", s0), outputs=(s0,)), (host.Ref("x"), Size(as_index(3))))),
    "branches that give different counts": (
        "P14",
        program(compute(), If(as_index(1), body(), body(outputs=()), (host.Ref("x"),), (None,))),
    ),
    "a loop's condition gives nothing": (
        "P14",
        program(While(body(outputs=()), body(), (host.Ref("x"),), (), ("out",))),
    ),
    "a loop's body gives too little": (
        "P14",
        program(While(body(), body(outputs=()), (host.Ref("x"),), (), ()), outputs=()),
    ),
    "a sub-program breaks a law": ("P4", invoke(body(outputs=("q", "r")), results=("out", None))),
    # collectives
    "somebody reads what a collective writes": ("P15", collective(compute(at("sent", i0)))),
    "somebody writes what a collective reads": ("P15", collective(compute(where=("x", (i0,))))),
    "a second collective uses the result of the first": ("P15", collective(Collective(call("out", args=("sent",))))),
    "a collective without a wait": ("P15", collective(holds=())),
    "a wait for nothing": ("P15", collective(holds=("x", "x", "sent"))),
    # what is asked of buffers
    "an item of many elements": ("P16", program(compute(), Item(u0, "x"))),
    "a predicate of many elements": ("P16", program(compute(), If("x", body(), body(), (host.Ref("x"),), (None,)))),
    "a dimension that is none": ("P16", program(compute(), Bind(u0, "x", "size", 1))),
    "seeds that are floats": ("P16", program(Seeds("out"))),
    "no such generator": ("P16", program(compute(), RandomState(torch.device("cpu"), u0, ((u1, as_index(1)),)))),
    "nothing is drawn": ("P16", program(compute(), RandomState(GPU, u0, ()))),
    "a generator moves back": ("P16", program(compute(), RandomState(GPU, u0, ((u1, as_index(-1)),)))),
    "alignment of what is no input": ("P16", program(compute(), RandomState(GPU, u0, ((u1, as_index(1)),), ("out",)))),
    "a copy that changes the type": (
        "P16",
        with_buffers(buffer("n", 8, dtype=I64), operations=(DeviceCopy("x", "n"),)),
    ),
    "a copy that changes the sizes": ("P16", with_buffers(buffer("n", 4), operations=(DeviceCopy("x", "n"),))),
    "a condition that is no bool": ("P16", program(compute(), Assert(const(1, I64), "no"))),
    "an assertion that is an error of another kind": (
        "P16",
        program(compute(), Assert(const(True, BOOL), "no", error=KeyError)),
    ),
    "a condition that reads memory": (
        "P16",
        program(
            Assert(op("lt", at("y"), const(1.0, F32), dtype=BOOL), "no"),
            buffers=(buffer("y", kind="input"),),
            inputs=("y",),
            outputs=(),
        ),
    ),
    # attention: more of it in test_attention.py
    "attention without a second parameter has one": ("P17", parse(ATTENTION.replace("param(0)", "param(1)"))),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_broken_law_is_cited(case):
    law, broken = BROKEN[case]
    with pytest.raises(InvalidProgram, match=f"^law {law}: "):
        verify_program(broken)


def test_every_law_is_broken_once():
    import ferrite.ir.program.laws as laws

    numbers = [line.split()[0] for line in laws.__doc__.splitlines() if line.startswith("P")]
    assert numbers == [f"P{count}" for count in range(1, len(numbers) + 1)]
    assert set(numbers) == {law for law, _ in BROKEN.values()}


FILLS = Program(
    "fills", ("p",), (buffer("p", 8, kind="input"),), (Compute((i0,), (Store("p", (i0,), const(0.0, F32)),)),), ()
)


def test_near_misses_are_valid():
    """What stands close to a broken law and keeps it."""
    valid = [
        # a collective's source may be read while it runs
        collective(compute(at("x", i0), where=("other", (i0,)))),
        # a call may return what has a size to be asked for
        program(
            call("n"),
            Bind(u0, "n", "size", 0),
            Compute((axis("k", u0),), (Store("out", (axis("k", u0),), at("n", axis("k", u0))),)),
            buffers=(X, buffer("n", u0), buffer("out", u0)),
        ),
        # memory around an input is not ours to know
        with_buffers(buffer("v", 64, kind="view", base="x")),
        # a sub-program may be given memory to fill
        program(Invoke(FILLS, (host.Ref("out"),), ())),
        # nothing of a view without elements lies outside
        with_buffers(buffer("v", 0, kind="view", base="out", offset=64)),
        # choosing between narrow floats computes nothing
        narrow(compute(op("where", const(True, BOOL), bf16_load, bf16_load, dtype=BF16)), buffer("out", 8, dtype=BF16)),
        # the largest of narrow floats is one of them
        narrow(Reduce((), (i0,), "amax", (bf16_load,), TOTAL), buffer("out", dtype=BF16)),
    ]
    valid[0] = replace(valid[0], buffers=(*valid[0].buffers, buffer("other", 8)))
    for program_ in valid:
        assert verify_program(program_) is program_


def test_checking_is_linear_in_the_size():
    """Twice the program, about twice the work: counted in calls, not in seconds."""
    import sys

    def work(count):
        names = [f"b{place}" for place in range(count)]
        steps = [
            Compute((i0,), (Store(name, (i0,), op("sin", at(before, i0))),))
            for before, name in zip(["x", *names], names, strict=False)
        ]
        large = Program("f", ("x",), (X, *(buffer(name, 8) for name in names)), tuple(steps), (names[-1],))
        calls = 0

        def count_calls(frame, event, arg):
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count_calls)
        try:
            verify_program(large)
        finally:
            sys.setprofile(None)
        return calls

    assert work(200) < 2.2 * work(100)
