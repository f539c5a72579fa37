"""How functions are called and how Dynamo splits them: arguments, generators, graph breaks, recompilation."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import pytest
import torch

from tests.compare import assert_same_as_eager, assert_same_tree, compile_strict, compiled_graphs


def every_kind(x, /, y, *rest, scale=2.0, flag, **more):
    total = x + y * scale
    for tensor in rest:
        total = total - tensor
    for name in sorted(more):
        total = total * more[name]
    return (total, total.sin()) if flag else total


@pytest.mark.parametrize(
    ("positional", "named"),
    [
        (2, {"flag": True}),
        (2, {"flag": False, "scale": 0.5}),
        (4, {"flag": True, "a": torch.full((3,), 2.0)}),
        (3, {"flag": False, "b": 3, "a": torch.ones(3)}),
    ],
    ids=["defaults", "keyword_number", "variadic", "variadic_keywords"],
)
def test_argument_kinds(positional: int, named: dict[str, Any], dynamic: bool) -> None:
    args = [torch.randn(3) for _ in range(positional)]
    compiled = compile_strict(every_kind, dynamic=dynamic)
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in named.items()}
    exact = every_kind(*(a.double() for a in args), **wide)
    assert_same_tree(compiled(*args, **named), every_kind(*args, **named), exact, "output")
    assert compiled_graphs() == 1


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Settings:
    factor: float
    weight: torch.Tensor


class Color(enum.Enum):
    RED = 1
    BLUE = 2


ARGUMENTS = {
    "list": (lambda a: a[0] + a[1], lambda: [[torch.randn(3), torch.randn(3)]]),
    "dict": (lambda a: a["x"] * a["y"], lambda: [{"x": torch.randn(3), "y": torch.randn(3)}]),
    "nested": (lambda a: a["x"][0] - a["y"][1]["z"], lambda: [{"x": [torch.randn(3)], "y": (1, {"z": torch.ones(3)})}]),
    "namedtuple": (lambda a: Point(a.y, a.x * 2), lambda: [Point(torch.randn(3), torch.randn(3))]),
    "dataclass": (lambda a, x: x * a.factor + a.weight, lambda: [Settings(2.0, torch.ones(3)), torch.randn(3)]),
    "number_and_string": (lambda x, n, s: x * n if s == "mul" else x + n, lambda: [torch.randn(3), 3, "mul"]),
    "bool_and_none": (lambda x, b, n: x * 2 if b and n is None else x, lambda: [torch.randn(3), True, None]),
    "dtype_and_device": (
        lambda x, d, c: x.to(d).to(c) + 1,
        lambda: [torch.randn(3), torch.float64, torch.device("cpu")],
    ),
    "enum": (lambda x, c: x + 1 if c is Color.RED else x - 1, lambda: [torch.randn(3), Color.BLUE]),
    "function": (lambda x, f: f(x) * 2, lambda: [torch.randn(3), torch.sin]),
    "size": (lambda x, s: x.reshape(s) + 1, lambda: [torch.randn(6), torch.Size([2, 3])]),
    "slice": (lambda x, s: x[s] + 1, lambda: [torch.randn(6), slice(1, 4)]),
    "float": (lambda x, f: x * f + f, lambda: [torch.randn(6), 0.25]),
    "scalar_tensor": (lambda x, t: x * t, lambda: [torch.randn(6), torch.tensor(2.0, dtype=torch.float64)]),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_argument_types(name: str, rarely_dynamic: bool) -> None:
    fn, inputs = ARGUMENTS[name]
    assert_same_as_eager(fn, inputs, dynamic=rarely_dynamic)


def test_default_argument_that_is_a_tensor() -> None:
    held = torch.zeros(3)

    def accumulate(x: torch.Tensor, total: torch.Tensor = held) -> torch.Tensor:
        total += x
        return total * 2

    compiled = compile_strict(accumulate)
    compiled(torch.ones(3))
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 4.0))
    assert torch.equal(held, torch.full((3,), 2.0))


GLOBAL_WEIGHT = torch.ones(3)


def test_globals_and_closures_are_read_at_call_time() -> None:
    factor = torch.full((3,), 2.0)
    count = 1

    def use(x: torch.Tensor) -> torch.Tensor:
        return x * factor + GLOBAL_WEIGHT * count

    compiled = compile_strict(use)
    x = torch.ones(3)
    assert torch.equal(compiled(x), torch.full((3,), 3.0))
    factor.fill_(5)
    assert torch.equal(compiled(x), torch.full((3,), 6.0))
    count = 10
    assert torch.equal(compiled(x), torch.full((3,), 15.0))


def items(x):
    for i in range(3):
        yield x[i] * i


def test_generator_used_inside(dynamic: bool) -> None:
    assert_same_as_eager(
        lambda x: sum(items(x)) + sum(t for t in (x + 1).unbind(0)), lambda: [torch.randn(3, 4)], dynamic=dynamic
    )


def test_compiled_function_called_from_a_generator() -> None:
    compiled = compile_strict(lambda x, i: x * 2 + i, dynamic=False)
    x = torch.ones(3)
    assert [out[0].item() for out in (compiled(x, i) for i in range(4))] == [2, 3, 4, 5]
    assert compiled_graphs() >= 1


def broken_by_print(x):
    y = x * 2
    print("between")
    return y + 1


def broken_by_item(x):
    y = x * 2
    return y * y[0, 0].item() + 1


def broken_by_branch(x):
    y = x * 2
    if y.sum() > 0:
        return y + 1
    return y - 1


def broken_by_graph_break(x):
    y = x.sin()
    torch._dynamo.graph_break()
    y.add_(x)
    torch._dynamo.graph_break()
    return y * x, y


@pytest.mark.parametrize(
    ("fn", "graphs"),
    [(broken_by_print, 2), (broken_by_item, 2), (broken_by_branch, 2), (broken_by_graph_break, 3)],
)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_graph_breaks(fn: Any, graphs: int, training: bool, rarely_dynamic: bool, capsys: Any) -> None:
    assert_same_as_eager(
        fn,
        lambda: [torch.randn(3, 4, requires_grad=training)],
        backward=training,
        graphs=graphs,
        dynamic=rarely_dynamic,
    )
    if fn is broken_by_print:
        assert capsys.readouterr().out == "between\n" * 3


@pytest.mark.quick
def test_branch_on_data_takes_the_right_side_each_time() -> None:
    compiled = compile_strict(broken_by_branch)
    for sign in (1, -1, 1, -1):
        x = torch.full((3,), float(sign))
        assert torch.equal(compiled(x), broken_by_branch(x))


@pytest.mark.quick
def test_recompiles_for_new_ranks_and_dtypes() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    compiled = compile_strict(fn, dynamic=False)
    kinds = [torch.ones(3), torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.int64), torch.ones(2, 3)]
    for _ in range(2):
        for x in kinds:
            assert_same_tree(compiled(x), fn(x), None, "output")
    assert compiled_graphs() == len(kinds)


def test_recompiles_for_new_python_values() -> None:
    def fn(x: torch.Tensor, name: str, flag: bool) -> torch.Tensor:
        return (x * 2 if name == "a" else x + 1) - int(flag)

    compiled = compile_strict(fn)
    x = torch.ones(3)
    for name in ("a", "b"):
        for flag in (True, False):
            assert torch.equal(compiled(x, name, flag), fn(x, name, flag))


def test_nested_compiled_functions() -> None:
    inner = compile_strict(lambda x: x.sin() * 2)
    assert_same_as_eager(lambda x: inner(x) + inner(x + 1), lambda: [torch.randn(4, requires_grad=True)], backward=True)


def test_disabled_function_inside_runs_in_eager() -> None:
    seen: list[type] = []

    @torch.compiler.disable
    def outside(x: torch.Tensor) -> torch.Tensor:
        seen.append(type(x))
        return x.sin()

    assert_same_as_eager(lambda x: outside(x * 2) + 1, lambda: [torch.randn(4)], graphs=2)
    assert seen == [torch.Tensor] * 3


def test_fullgraph_with_a_break_raises() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_strict(broken_by_graph_break, fullgraph=True)(torch.ones(3, 3))


def test_container_argument_changed_by_the_function() -> None:
    def change(x: torch.Tensor, store: dict[str, Any]) -> torch.Tensor:
        store["y"] = x * 2
        store["list"].append(x + 1)
        return x - 1

    assert_same_as_eager(change, lambda: [torch.randn(3), {"list": []}], dynamic=False)
