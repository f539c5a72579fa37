"""What operations answer about themselves, one per kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ferrite.ir.expr import Masked, Random, const, data, index_value, nodes_of, op
from ferrite.ir.index.algebra import as_index, axis, symbol
from ferrite.ir.program import arguments as host
from ferrite.ir.program.loop_operations import Compute, Store
from ferrite.ir.program.nodes import Bind, Call, If, Invoke, Program, Scalar, Size, While
from ferrite.ir.program.operation_facts import (
    Access,
    axes_of,
    changed_inputs,
    cost,
    defines,
    expressions,
    has_effect,
    reads,
    roots_of,
    symbols,
    writes,
)
from tests.loop_programs import BOOL, F32, I64, PROGRAMS, at, axes, buffer, i0, i1, program, s0

pytestmark = pytest.mark.quick


def operation(name, place=0):
    return PROGRAMS[name]().operations[place]


def read(item):
    return [access.buffer for access in reads(item)]


def written(item):
    return [access.buffer for access in writes(item)]


# program, operation, what it reads, what it writes, what symbols it needs, what symbols it defines
ANSWERS = [
    ("pointwise", 0, ["x"], ["out"], {"s0"}, []),
    ("widened", 0, ["y"], ["z"], set(), []),
    ("masked_and_indexed", 0, ["table"], ["padded"], set(), []),
    ("gather_and_scatter", 0, ["index", "index", "source", "source", "target"], ["target"], set(), []),
    ("gather_and_scatter", 1, [], ["target"], set(), []),
    ("random_fill", 0, [], ["seeds"], set(), []),
    ("random_fill", 1, ["seeds"], ["noise"], set(), []),
    ("row_sum", 0, ["x"], ["total"], {"s0"}, []),
    ("row_sum", 1, ["x"], ["place"], {"s0"}, []),
    ("full_sum", 0, ["x"], ["total"], {"s0"}, []),
    ("prefix_sums", 0, ["x"], ["first"], {"s0"}, []),
    ("prefix_sums", 1, ["x"], ["second"], {"s0"}, []),
    ("sorted_rows", 0, ["x"], ["keys", "places"], {"s0"}, []),
    ("calls", 0, ["x"], ["view"], set(), []),
    ("calls", 1, ["x"], ["out", "changed"], {"s0"}, []),
    ("calls", 2, [], [], set(), []),
    ("templates", 0, ["a", "b"], ["product"], set(), []),
    ("collectives", 0, ["y"], ["sent"], set(), []),
    ("collectives", 1, ["sent", "y"], ["got"], set(), []),
    ("collectives", 2, ["got"], ["got"], set(), []),
    ("control_flow", 0, ["y", "which"], ["first"], {"s0"}, []),
    ("control_flow", 1, ["y"], ["second"], {"s0"}, ["u0"]),
    ("control_flow", 2, ["y"], ["third"], {"s0"}, []),
    ("control_flow", 3, ["y"], ["fourth"], {"s0"}, []),
    ("numbers", 0, ["count"], [], set(), ["u0"]),
    ("numbers", 1, ["count"], [], set(), ["u1"]),
    ("numbers", 2, [], [], {"u0"}, []),
    ("numbers", 3, [], [], {"u0"}, []),
    ("numbers", 4, ["count"], ["there"], set(), []),
]


@pytest.mark.parametrize("case", range(len(ANSWERS)), ids=lambda case: f"{ANSWERS[case][0]}-{ANSWERS[case][1]}")
def test_answers(case):
    name, place, buffers_read, buffers_written, needed, given = ANSWERS[case]
    item = operation(name, place)
    assert sorted(read(item)) == sorted(buffers_read)
    assert sorted(written(item)) == sorted(buffers_written)
    assert {symbol.name for symbol in symbols(item)} == needed
    assert [symbol.name for symbol in defines(item)] == given


def test_every_operation_has_its_answers_here():
    asked = {(name, place) for name, place, *_ in ANSWERS}
    assert asked == {(name, place) for name, make in PROGRAMS.items() for place in range(len(make().operations))}


def test_accesses_have_coordinates_and_a_mode():
    item = operation("gather_and_scatter")
    (access,) = writes(item)
    assert access.mode == "add"
    assert str(access.coordinates) == "(data(index[i0], 16), k)"
    assert Access("target", access.coordinates) in reads(item)
    assert reads(operation("calls"))[0] == Access("x", None)


def test_a_store_that_replaces_does_not_read():
    item = operation("gather_and_scatter")
    plain = replace(item, stores=(replace(item.stores[0], mode="set"),))
    assert "target" not in read(plain)


def test_what_is_read_below_a_mask_and_inside_an_index_counts():
    place = data(at("n", i0, dtype=I64), as_index(8))
    inner = data(at("m", place, dtype=I64), as_index(8))
    mask = op("lt", at("y", i0), const(1.0, F32), dtype=BOOL)
    value = Masked.intern(mask, at("x", inner), const(0.0, F32), F32)
    assert sorted(read(Compute((i0,), (Store("out", (i0,), value),)))) == ["m", "n", "x", "y"]


def test_an_argument_that_is_a_scalar_reads():
    scalar = Scalar(op("mul", at("x"), index_value(s0 + 1, F32)))
    nested = host.Sequence("list", (host.Mapping((("1", scalar),)),))
    item = Call("op", (nested,), (), ())
    assert read(item) == ["x"]
    assert symbols(item) == {s0}
    assert roots_of(item) == [scalar.value]


def test_symbols_are_found_wherever_they_stand():
    n, m, k = (symbol(name, 1, None) for name in "nmk")
    place = data(at("j", i0, dtype=I64), n * 2)
    value = op("add", at("x", place), index_value(m, F32))
    item = Compute((i0, axis("r", k)), (Store("out", (i0,), value),))
    assert symbols(item) == {n, m, k}
    call = Call("op", (host.Slice(Size(n), host.Literal("None"), Size(m)),), (("a", Size(k)),), ())
    assert symbols(call) == {n, m, k}
    empty = Program("f", (), (), (), ())
    assert symbols(If(n - 1, empty, empty, (Size(m),), ())) == {n, m}
    assert symbols(While(empty, empty, (Size(n),), (Size(m),), ())) == {n, m}
    random = Random.intern("uniform", const(0, I64), i0, n + i0, F32)
    assert symbols(Compute((i0,), (Store("out", (i0,), random),))) == {n}


def test_axes():
    r0 = axis("r0", s0)
    assert axes_of(operation("row_sum")) == (i0, r0)
    assert axes_of(operation("prefix_sums")) == (i0, i1)
    assert axes_of(operation("calls")) == ()


def test_a_sub_program_changes_what_it_writes_through():
    """Through a view, in either branch, in the condition of a loop, two levels down."""
    given, view = buffer("p", 8, kind="input"), buffer("v", 4, kind="view", base="p")
    k = axes("k")[0]
    store = Compute((k,), (Store("v", (k,), const(0.0, F32)),))
    changes = program(store, buffers=(given, view), outputs=(), inputs=("p",), name="changes")
    keeps = program(buffers=(given,), outputs=(), inputs=("p",), name="keeps")
    deeper = program(Invoke(changes, (host.Ref("p"),), ()), buffers=(given,), outputs=(), inputs=("p",), name="deeper")
    assert changed_inputs(changes) == ("p",)
    assert changed_inputs(keeps) == ()
    operand = (host.Ref("x"),)
    for item in (
        If("which", changes, keeps, operand, ()),
        If("which", keeps, changes, operand, ()),
        Invoke(deeper, operand, ()),
        While(keeps, changes, operand, (), ()),
        While(changes, keeps, (), operand, ()),
    ):
        assert written(item) == ["x"]
    assert written(If("which", keeps, keeps, operand, ())) == []


def test_a_sub_program_may_only_write_an_operand():
    """Asking for a size is no reading."""
    n = symbol("n", 1, None)
    k = axis("k", n)
    size, fill = Bind(n, "p", "size", 0), Compute((k,), (Store("p", (k,), const(0.0, F32)),))
    given = buffer("p", n, kind="input")
    fills = program(size, fill, buffers=(given,), outputs=(), inputs=("p",), name="fills")
    returns = replace(fills, outputs=("p",))
    operand = (host.Ref("x"),)
    assert read(Invoke(fills, operand, ())) == []
    assert written(Invoke(fills, operand, ())) == ["x"]
    assert read(Invoke(returns, operand, (None,))) == ["x"]
    assert read(If("which", fills, returns, operand, ())) == ["x", "which"]


def test_effects():
    assert has_effect(operation("calls", 1))
    assert has_effect(operation("numbers", 2))
    assert not has_effect(operation("calls", 0))
    assert not has_effect(operation("pointwise"))


def test_cost_counts_each_value_once():
    value = at("x", i0)
    twice = op("sin", op("add", value, value))
    cheap = Compute((i0,), (Store("out", (i0,), op("add", value, value)),))
    dear = Compute((i0,), (Store("out", (i0,), op("mul", twice, twice)),))
    assert cost(cheap) == 1
    assert cost(dear) == 1 + 20 + 1
    assert cost(operation("calls", 0)) == 0


def test_nodes_come_after_what_they_need():
    value = op("sin", op("add", at("x", data(at("n", i0, dtype=I64), as_index(8))), const(1.0, F32)))
    nodes = nodes_of(value, value)
    assert len(nodes) == len(set(nodes)) == 5
    for place, item in enumerate(nodes):
        assert all(arg in nodes[:place] for arg in item.args)
    assert nodes_of(value, leaving_out={nodes[-2]}) == [value]


def test_deep_expressions_are_walked():
    value = at("x", i0)
    for _ in range(5000):
        value = op("neg", value)
    assert len(nodes_of(value)) == 5001


def test_expressions_of_an_operation():
    assert len(expressions(operation("pointwise"))) == 1
    assert expressions(operation("calls")) == ()
    assert expressions(operation("numbers", 2))[0].dtype == torch.bool
