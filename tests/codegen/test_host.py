"""The text of host programs: readable, stable, and right where Python's precedence could bite."""

from __future__ import annotations

import gc
import inspect
import linecache
import traceback

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.ir.index.algebra import ZERO
from ferrite.ir.program.arguments import Constant, Literal, Mapping, Ref, Sequence, Slice
from ferrite.ir.program.loop_operations import Origin
from ferrite.ir.program.nodes import Buffer, Call, Program
from ferrite.runtime import Boxed, load_host
from ferrite.runtime.host_program import Saved
from ferrite.schedule.plan import make_plan
from ferrite.targets import executable_of, runs_of
from tests.compare import assert_same_as_eager, compile_strict

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("program_of_calls")]

X = Buffer("x", torch.float32, (), (), ZERO, torch.device("cpu"), "input")


def owned(name: str) -> Buffer:
    return Buffer(name, torch.float32, (), (), ZERO, torch.device("cpu"), "owned")


def call(result: str, operator, *args, **kwargs) -> Call:
    return Call(operator, args, tuple(kwargs.items()), (result,), False, (), (), None, "", Origin((), None))


def loaded(program: Program, **objects) -> Boxed:
    executable = executable_of(make_plan(program, {}), {})
    return load_host(executable.source, runs_of(executable, {}), objects)


@pytest.mark.parametrize(
    "size",
    [
        lambda n: n + 3,
        lambda n: n - 3,
        lambda n: -n + 9,
        lambda n: n * n,
        lambda n: (n + 1) * (n - 2),
        lambda n: -(n // 2),
        lambda n: (-n) // 2,
        lambda n: (n + 1) % 3,
        lambda n: (2 * n + 1) // (n - 1),
        lambda n: n / 4,
        lambda n: n > 4,
        lambda n: max(n, 5),
        lambda n: torch.sym_not(n == 5),
        lambda n: int(n / 4) + 1,
    ],
)
@pytest.mark.parametrize("rows", [4, pytest.param(7, marks=pytest.mark.lengthy)])
def test_arithmetic_of_sizes_keeps_its_meaning(size, rows):
    def fn(x):
        return x + 1, size(x.shape[0])

    compiled = compile_strict(fn, dynamic=True)
    (_, ours), (_, eager) = compiled(torch.ones(rows)), fn(torch.ones(rows))
    assert ours == eager
    assert type(ours) is type(eager)


def test_all_forms_of_arguments_are_printed():
    seen = []

    def show(*args, **kwargs):
        seen.append((args, kwargs))
        return args[0][0]

    nested = Sequence("list", (Ref("x"), Sequence("tuple", (Literal("1"),)), Sequence("tuple", ())))
    mapping = Mapping((("'k'", Ref("x")), ("2", Literal("None"))))
    slices = Slice(Literal("None"), Literal("5"), Literal("-1"))
    program = Program("f", ("x",), (X, owned("r")), (call("r", Constant("show"), nested, slices, m=mapping),), ("r",))
    x = torch.ones(())
    assert loaded(program, show=show)([x]) == [x]
    assert seen == [(([x, (1,), ()], slice(None, 5, -1)), {"m": {"k": x, 2: None}})]


def test_an_operator_never_shadows_a_value():
    """A buffer named like the operator that makes it must not hide it."""
    first = call("aten_add_Tensor", "aten.add.Tensor", Ref("x"), Literal("1"))
    again = call("r", "aten.add.Tensor", Ref("aten_add_Tensor"), Literal("1"))
    program = Program("f", ("x",), (X, owned("aten_add_Tensor"), owned("r")), (first, again), ("r",))
    assert loaded(program)([torch.zeros(())]) == [torch.tensor(2.0)]


def test_an_input_named_like_a_helper_is_no_helper():
    def fn(view_of, run_0, torch_, op_aten_add_Tensor):
        return (view_of + run_0).t() + torch_ + op_aten_add_Tensor

    assert_same_as_eager(fn, lambda: [torch.ones(2, 2) for _ in range(4)])


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
    assert forward.source + backward.source == golden


def test_text_with_kernels(golden):
    x, w = torch.ones(3, 4), torch.ones(4, 5)
    compile_strict(lambda x, w: torch.softmax(x @ w, -1), options={"executor": "native"})(x, w)
    assert ferrite.last_compile().graphs[0].source == golden


def test_text_with_the_interpreter(golden):
    compile_strict(lambda x: torch.softmax(x, -1), options={"executor": "interpreter"})(torch.ones(3, 4))
    assert ferrite.last_compile().graphs[0].source == golden


def linears(x, w, v, b):
    return F.linear(x, w, b), F.linear(x, v, b), x.flatten(0, 1) @ w


def test_equal_views_that_only_calls_read_are_made_once():
    given = torch.randn(2, 3, 4), torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
    found = compile_strict(linears)(*given)
    torch.testing.assert_close(found, linears(*given))
    text = ferrite.last_compile().graphs[0].source
    assert text.count("= untracked_view(") == 3  # rows of x, and two weights the other way round
    assert text.count("leaves(") == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x.flatten(0, 1) @ w, x.flatten(0, 1)),
        lambda x, w: (x[0] @ w.t(), w.t()),
        lambda x, w: (w.t().mul_(2), x[0] @ w.t()),
        lambda x, w: (x[1].view(torch.int32).bitwise_and(3), x[1] @ w),
    ],
)
def test_views_that_users_see_stay_views(function):
    given, others = ([torch.arange(24.0).view(2, 3, 4), torch.arange(16.0).view(4, 4).clone()] for _ in range(2))
    found, wanted = compile_strict(function)(*given), function(*others)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(given, others)
    assert [each._is_view() for each in found] == [each._is_view() for each in wanted]
    assert [each.stride() for each in found] == [each.stride() for each in wanted]


def test_what_backward_is_given_is_mended_where_it_is_not_as_forecast():
    saved, dtypes = Saved(), (torch.float32, torch.bfloat16)
    right = torch.randn(3, 4), torch.randn(5, 1).bfloat16()
    assert saved.differ(*right)
    assert all(new is old for new, old in zip(saved.mended(right, dtypes, ((4, 1), (1, 1))), right, strict=True))
    assert not saved.differ(torch.randn(3, 4), torch.randn(5, 1).bfloat16())
    for x, y in (
        (torch.randn(4, 3).t(), right[1]),
        (right[0].double(), right[1]),
        (right[0], torch.randn(5, 3).bfloat16()[:, :1]),
        (torch.randn(2, 4), right[1]),
    ):
        assert saved.differ(x, y)
        a, b = saved.mended((x, y), dtypes, ((4, 1), (1, 1)))
        assert (a.dtype, a.stride(), b.dtype, b.stride()) == (torch.float32, (4, 1), torch.bfloat16, (1, 1))
        torch.testing.assert_close((a, b), (x.float(), y))
    assert not saved.differ(torch.randn(2, 4), right[1])  # as at the last call without anything to mend
    assert saved.differ(*right)


def test_tracebacks_show_the_generated_line():
    @torch.library.custom_op("ferrite_test::boom", mutates_args=())
    def boom(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("from inside")

    boom.register_fake(torch.empty_like)
    with pytest.raises(ValueError, match="from inside") as caught:
        compile_strict(lambda x: boom(x) + 1)(torch.ones(2))
    text = "".join(traceback.format_exception(caught.value))
    assert "<ferrite inference" in text
    assert "= op_ferrite_test_boom(arg0_1)" in text


def test_the_text_of_a_dead_function_is_forgotten():
    function = loaded(Program("f", (), (), (), ()))
    name = inspect.unwrap(function).__code__.co_filename
    assert name in linecache.cache
    del function
    gc.collect()
    assert name not in linecache.cache
