"""Small valid programs of the loop IR, one per kind of operation, for tests of its text, laws and questions."""

from __future__ import annotations

import torch

from ferrite.graph import ModelLine
from ferrite.ir.expr import Expr, Masked, Param, Random, cast, const, data, index_value, load, op
from ferrite.ir.index.algebra import ZERO, Axis, Index, as_index, axis, minimum, symbol
from ferrite.ir.program import arguments as host
from ferrite.ir.program.loop_operations import Combine, Compute, Destination, Origin, Reduce, Scan, Sort, Store
from ferrite.ir.program.nodes import (
    Assert,
    Bind,
    Buffer,
    Call,
    Collective,
    DeviceCopy,
    If,
    Invoke,
    Item,
    Program,
    Scalar,
    Seeds,
    Size,
    Template,
    UserKernel,
    Wait,
    While,
)

CPU, F32, BF16, I64, BOOL = torch.device("cpu"), torch.float32, torch.bfloat16, torch.int64, torch.bool
s0 = symbol("s0", 2, 1024)
i0, i1 = axis("i0", 8), axis("i1", s0)


def strides_of(sizes) -> tuple[Index, ...]:
    strides, step = [], as_index(1)
    for size in reversed(sizes):
        strides.insert(0, step)
        step = step * size
    return tuple(strides)


def buffer(name: str, *sizes, dtype=F32, kind="owned", base=None, device=CPU, offset=ZERO, strides=None) -> Buffer:
    sizes = tuple(map(as_index, sizes))
    strides = strides_of(sizes) if strides is None else tuple(map(as_index, strides))
    return Buffer(name, dtype, sizes, strides, as_index(offset), torch.device(device), kind, base)


def program(*operations, buffers, outputs, inputs=("x",), name="forward") -> Program:
    return Program(name, tuple(inputs), tuple(buffers), operations, tuple(outputs))


def at(name: str, *coordinates, dtype=F32) -> Expr:
    return load(name, tuple(map(as_index, coordinates)), dtype)


x, out = buffer("x", 8, s0, kind="input"), buffer("out", 8, s0)
IN = (s0, "x")
ORIGIN = Origin(("sin", "add"), ModelLine("/home/me/net.py", 41, "forward", "y = x.sin()"))


def pointwise() -> Program:
    shifted = op("add", at("x", i0, i1), const(0.1, F32))
    value = op("mul", op("sin", shifted), shifted)
    return program(
        Compute((i0, i1), (Store("out", (i0, i1), value),), ORIGIN), buffers=(x, out), outputs=("out",), inputs=IN
    )


def widened() -> Program:
    """16-bit floats are computed on as f32."""
    y, z = buffer("y", 8, dtype=BF16, kind="input"), buffer("z", 8, dtype=BF16)
    value = cast(op("exp", cast(at("y", i0, dtype=BF16), F32)), BF16)
    return program(Compute((i0,), (Store("z", (i0,), value),)), buffers=(y, z), outputs=("z",), inputs=("y",))


def masked_and_indexed() -> Program:
    """A padded row: elements outside are a constant, and are not read."""
    j = axis("j", 12)
    table = buffer("table", 8, kind="constant")
    inside = op("lt", index_value(j), const(8, I64), dtype=BOOL)
    value = Masked.intern(inside, at("table", minimum(j, 7)), const(float("-inf"), F32), F32)
    padded = buffer("padded", 12)
    store = Store("padded", (j,), op("add", value, index_value(j * 2, F32)))
    return program(Compute((j,), (store,)), buffers=(table, padded), outputs=("padded",), inputs=())


def gather_and_scatter() -> Program:
    """Two levels of indirection, and a store that adds to what is there."""
    index = buffer("index", 8, dtype=I64, kind="input")
    source = buffer("source", 16, 4, kind="input")
    target = buffer("target", 16, 4, kind="donated")
    k = axis("k", 4)
    row = data(at("index", i0, dtype=I64), as_index(16))
    other = data(at("index", row // 2, dtype=I64), as_index(16), "RuntimeError: {index} is no row")
    store = Store("target", (row, k), op("mul", at("source", other, k), at("source", row, k)), "add")
    last = Store("target", (0 * row + 15, k), const(0.0, F32))
    operations = (Compute((i0, k), (store,)), Compute((k,), (last,)))
    inputs = ("index", "source", "target")
    return program(*operations, buffers=(index, source, target), outputs=("target",), inputs=inputs)


def random_fill() -> Program:
    seeds, noise = buffer("seeds", 1, dtype=I64), buffer("noise", 8)
    value = Random.intern("uniform", at("seeds", 0, dtype=I64), i0 + 3, i0 // 4, F32)
    steps = (Seeds("seeds"), Compute((i0,), (Store("noise", (i0,), value),)))
    return program(*steps, buffers=(seeds, noise), outputs=("noise",), inputs=())


def row_sum() -> Program:
    r0 = axis("r0", s0)
    total, place = buffer("total", 8), buffer("place", 8, dtype=I64)
    square = op("mul", at("x", i0, r0), at("x", i0, r0))
    operations = (
        Reduce((i0,), (r0,), "sum", (square,), (Destination("total", (i0,)),), ORIGIN),
        Reduce((i0,), (r0,), "argmax", (at("x", i0, r0),), (None, Destination("place", (i0,)))),
    )
    return program(*operations, buffers=(x, total, place), outputs=("total", "place"), inputs=IN)


def full_sum() -> Program:
    """Nothing but reduced axes; the result has no dimension."""
    a, b = axis("a", 8), axis("b", s0)
    total = buffer("total")
    reduce = Reduce((), (a, b), "sum", (at("x", a, b),), (Destination("total", ()),))
    return program(reduce, buffers=(x, total), outputs=("total",), inputs=IN)


def prefix_sums() -> Program:
    first, second = buffer("first", 8, s0), buffer("second", 8, s0)
    named = Scan((i0, i1), i1, Combine("sum"), (at("x", i0, i1),), (Destination("first", (i0, i1)),))
    a, b, c, d = (Param.intern(place, F32) for place in range(4))
    custom = Combine("linear", (op("mul", a, c), op("add", op("mul", b, c), d)))
    values = (const(0.5, F32), at("x", i0, i1))
    own = Scan((i0, i1), i1, custom, values, (None, Destination("second", (i0, i1))))
    return program(named, own, buffers=(x, first, second), outputs=("first", "second"), inputs=IN)


def sorted_rows() -> Program:
    keys, places = buffer("keys", 8, s0), buffer("places", 8, s0, dtype=I64)
    destinations = (Destination("keys", (i0, i1)), Destination("places", (i0, i1)))
    sort = Sort((i0, i1), i1, (at("x", i0, i1),), destinations, descending=True, stable=True)
    return program(sort, buffers=(x, keys, places), outputs=("keys", "places"), inputs=IN)


def calls() -> Program:
    """Every kind of argument, results that are views, changed operands, effects."""
    view = buffer("view", s0, 8, kind="view", base="x", strides=(1, s0))
    changed = buffer("changed", 8, kind="input")
    literals = host.Sequence(
        "list", (host.Literal("1"), Size(s0 * 2), host.Sequence("tuple", (host.Literal("'a b'"),)))
    )
    nested = host.Mapping((("'key'", host.Slice(host.Literal("None"), host.Literal("(1+2j)"), host.Literal("-1"))),))
    scalar = Scalar(op("div", index_value(s0, torch.float64), const(3.0, torch.float64)))
    operations = (
        Call("aten.t.default", (host.Ref("x"),), (), ("view",), aliases=(("view", "x"),)),
        Call(
            "aten.many.default",
            (host.Ref("x"), literals, nested, scalar, host.Constant("generator")),
            (("dtype", host.Literal("torch.float32")), ("value", host.Literal("float('nan')"))),
            ("out", None),
            packed=True,
            writes=("changed",),
            effect="rng",
            reason="not yet lowered",
            origin=ORIGIN,
        ),
        Call(host.Constant("custom"), (host.Constant("state"),), (), ()),
    )
    inputs = (s0, "x", "changed", host.Constant("state"))
    outputs = ("view", s0, s0 * 2 + 1, as_index(3), host.Literal("None"), "out")
    return program(*operations, buffers=(x, view, changed, out), outputs=outputs, inputs=inputs)


def templates() -> Program:
    a, b = buffer("a", 8, 16, kind="input"), buffer("b", 16, 4, kind="input")
    product = buffer("product", 8, 4)
    call = Call("aten.mm.default", (host.Ref("a"), host.Ref("b")), (), ("product",))
    return program(Template("matmul", call), buffers=(a, b, product), outputs=("product",), inputs=("a", "b"))


def collectives() -> Program:
    y, sent, got = buffer("y", 8, kind="input"), buffer("sent", 8), buffer("got", 8, kind="view", base="sent")
    start = Call("_c10d_functional.all_reduce.default", (host.Ref("y"), host.Literal("'sum'")), (), ("sent",))
    wait = Call("_c10d_functional.wait_tensor.default", (host.Ref("sent"),), (), ("got",), aliases=(("got", "sent"),))
    kernel = Call(host.Constant("kernel"), (host.Ref("got"),), (), (), writes=("got",))
    operations = (Collective(start), Wait(wait, ("y", "sent")), UserKernel(kernel))
    return program(*operations, buffers=(y, sent, got), outputs=("got",), inputs=("y",))


def _body(name: str, *operators: str) -> Program:
    value = at("p", i0)
    for operator in operators:
        value = op(operator, value)
    parameter, result = buffer("p", 8, kind="input"), buffer("result", 8)
    store = Compute((i0,), (Store("result", (i0,), value),))
    return program(store, buffers=(parameter, result), outputs=("result", s0), inputs=("p", s0), name=name)


def control_flow() -> Program:
    """Both branches have one name, a body is shared, one name is no name in Python."""
    y, which = buffer("y", 8, kind="input"), buffer("which", dtype=BOOL, kind="input")
    names = ("first", "second", "third", "fourth")
    u0 = symbol("u0", 0, None)
    operands = (host.Ref("y"), Size(s0))
    shared = _body("body", "exp")
    cond = Program("condition", ("p", s0), (buffer("p", 8, kind="input"),), (), (as_index(0),))
    operations = (
        If("which", _body("body", "sin"), _body("body", "cos"), operands, ("first", None)),
        If(s0 - 3, shared, _body("not a name"), operands, ("second", u0)),
        Invoke(shared, operands, ("third", None)),
        While(cond, shared, operands, (), ("fourth", None), stacked=True),
    )
    buffers = (y, which, *(buffer(name, 8) for name in names))
    return program(*operations, buffers=buffers, outputs=(*names, u0), inputs=("y", "which", s0))


def numbers() -> Program:
    """Symbols that data decides, assertions, a copy to another device."""
    u0, u1 = symbol("u0", 0, None), symbol("u1", None, None)
    count, there = buffer("count", dtype=I64, kind="input"), buffer("there", dtype=I64, device="cuda:0")
    condition = op("ge", index_value(u0), const(2, I64), dtype=BOOL)
    operations = (
        Item(u0, "count"),
        Bind(u1, "count", "offset"),
        Assert(condition, "at least two, 'please'", ORIGIN),
        Assert(condition, "no such element", ORIGIN, IndexError),
        DeviceCopy("count", "there", blocking=False),
    )
    return program(*operations, buffers=(count, there), outputs=("there", u0 // 2, u1), inputs=("count",))


PROGRAMS = {
    make.__name__: make
    for make in (
        pointwise, widened, masked_and_indexed, gather_and_scatter, random_fill, row_sum, full_sum, prefix_sums,
        sorted_rows, calls, templates, collectives, control_flow, numbers,
    )
}  # fmt: skip


def axes(*names: str) -> tuple[Axis, ...]:
    return tuple(axis(name, 8) for name in names)
