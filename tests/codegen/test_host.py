"""The text of host programs: readable, stable, and right where Python's precedence could bite."""

from __future__ import annotations

import linecache
import traceback

import pytest
import torch

import ferrite
from compare import compile_strict
from ferrite.codegen import print_host
from ferrite.ir import Call, Constant, Evaluate, HostProgram, Input, Literal, Mapping, Ref, Sequence, Slice
from ferrite.runtime import load

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("program_of_calls")]


def evaluate(function, *args):
    """Print and run one Evaluate step over literal arguments."""
    arguments = tuple(Literal(repr(arg)) for arg in args)
    program = HostProgram("f", (), (Evaluate("r", function, arguments),), (Ref("r"),))
    return load(print_host(program), {})([])[0]


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        ("operator.add", (2, 3), 5),
        ("operator.sub", (2, -3), 5),
        ("operator.pow", (-2, 2), 4),
        ("operator.floordiv", (-7, 2), -4),
        ("operator.mod", (-7, 2), 1),
        ("operator.neg", (-7,), 7),
        ("operator.not_", (0,), True),
        ("operator.truediv", (1, 4), 0.25),
        ("operator.ge", (1, 4), False),
        ("operator.lshift", (1, 4), 16),
        ("math.ceil", (1.5,), 2),
        ("operator.abs", (-3,), 3),
        ("torch.sym_max", (3, 5), 5),
    ],
)
def test_python_arithmetic_keeps_its_meaning(function, args, expected):
    value = evaluate(function, *args)
    assert value == expected
    assert type(value) is type(expected)


def test_all_forms_of_arguments_are_printed():
    def show(*args, **kwargs):
        return args, kwargs

    nested = Sequence("list", (Ref("x"), Sequence("tuple", (Literal("1"),)), Sequence("tuple", ())))
    mapping = Mapping((("'k'", Ref("x")), ("2", Literal("None"))))
    call = Call(
        result="r",
        operator=Constant("show"),
        args=(nested, Slice(Literal("None"), Ref("x"), Literal("-1"))),
        kwargs=(("m", mapping),),
        reason="",
        line=None,
    )
    program = HostProgram("f", (Input("x", "int"),), (call,), (Ref("r"),))
    ((args, kwargs),) = load(print_host(program), {"show": show})([5])
    assert args == ([5, (1,), ()], slice(None, 5, -1))
    assert kwargs == {"m": {"k": 5, 2: None}}


def test_an_operator_never_shadows_a_value():
    """A node named like the global of its operator must not hide it."""
    call = Call("aten_add_Tensor", "aten.add.Tensor", (Ref("x"), Literal("1")), (), "", None)
    again = Call("r", "aten.add.Tensor", (Ref("aten_add_Tensor"), Literal("1")), (), "", None)
    program = HostProgram("f", (Input("x", ""),), (call, again), (Ref("r"),))
    (result,) = load(print_host(program), {})([torch.zeros(2)])
    assert torch.equal(result, torch.full((2,), 2.0))


def model(x, w):
    h = torch.relu(x @ w)
    return h.sum(0), h.shape[0] * 2


def test_static_inference_text(golden):
    compile_strict(model)(torch.ones(3, 4), torch.ones(4, 5))
    (graph,) = ferrite.last_compile().graphs
    assert graph.kind == "inference"
    assert graph.operators == 3
    assert graph.source == golden


def test_dynamic_training_text(golden):
    x, w = torch.ones(3, 4), torch.ones(4, 5, requires_grad=True)
    total, rows = compile_strict(model, dynamic=True)(x, w)
    total.sum().backward()
    forward, backward = ferrite.last_compile().graphs
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert rows == 6
    assert "static" not in forward.source  # w is a plain input here, no parameter of a module
    assert "donated" in backward.source
    assert forward.source + backward.source == golden


def test_tracebacks_show_the_generated_line():
    @torch.library.custom_op("ferrite_test::boom", mutates_args=())
    def boom(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("from inside")

    boom.register_fake(torch.empty_like)
    with pytest.raises(ValueError, match="from inside") as caught:
        compile_strict(lambda x: boom(x) + 1)(torch.ones(2))
    text = "".join(traceback.format_exception(caught.value))
    assert "<ferrite inference" in text
    assert "boom = ferrite_test_boom(arg0_1)" in text


def test_the_text_of_a_dead_function_is_forgotten():
    program = HostProgram("f", (), (), ())
    function = load(print_host(program), {})
    name = function.__code__.co_filename
    assert name in linecache.cache
    del function
    import gc

    gc.collect()
    assert name not in linecache.cache
