"""What can be compiled, and what a compiled module still is: parameters, state, copies, pickles, modes."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import Any

import pytest
import torch

from tests.compare import assert_same_as_eager, assert_same_tree, compile_strict, compiled_graphs


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.linear(x))) * self.scale

    def linear_part(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin()


class Tied(torch.nn.Module):
    """An embedding whose weight is the output projection too, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.layer = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.layer(self.embedding(tokens)).tanh()))


def assert_like_eager(call: Any, model: torch.nn.Module, x: torch.Tensor, what: str = "output") -> None:
    """`call` gives what `model` gives in eager."""
    exact = copy.deepcopy(model).double()
    assert_same_tree(call(x), model(x), exact(x.double()), what)


def test_tied_parameters_collect_one_gradient(dynamic: bool) -> None:
    assert_same_as_eager(Tied(), lambda: [torch.randint(0, 11, (3, 5))], backward=True, calls=2, dynamic=dynamic)


def test_train_and_eval_switch_after_compiling() -> None:
    model = Net()
    ours = copy.deepcopy(model)
    compiled = compile_strict(ours)
    x = torch.randn(5, 6)
    for training in (True, False, True, False):
        model.train(training)
        compiled.train(training)
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        actual = compiled(x)
        if training:
            assert torch.equal(actual == 0, expected == 0), "dropout drew other values"
        else:
            assert_same_tree(actual, expected, copy.deepcopy(model).double()(x.double()), "output")
        assert ours.training is training
    exact = {name: t.double() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    assert_same_tree(dict(ours.state_dict()), dict(model.state_dict()), exact, "state")


@pytest.mark.quick
def test_parameters_changed_in_place_between_calls(dynamic: bool) -> None:
    model = torch.nn.Linear(6, 4)
    compiled = compile_strict(model, dynamic=dynamic)
    x = torch.randn(3, 6)
    for value in (0.5, -1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(value)
            model.bias.data.add_(1)
        assert_like_eager(compiled, model, x)
    assert compiled_graphs() == 1


def test_parameter_replaced_by_another_object() -> None:
    model = torch.nn.Linear(6, 4)
    compiled = compile_strict(model)
    x = torch.randn(3, 6)
    assert_like_eager(compiled, model, x)
    model.weight = torch.nn.Parameter(torch.randn(4, 6))
    assert_like_eager(compiled, model, x)
    model.bias = None
    assert_like_eager(compiled, model, x)


def test_frozen_and_unfrozen_parameters() -> None:
    model = torch.nn.Linear(6, 4)
    compiled = compile_strict(model)
    x = torch.ones(3, 6)
    for requires_grad in (True, False, True):
        model.weight.requires_grad_(requires_grad)
        model.zero_grad(set_to_none=True)
        compiled(x).sum().backward()
        assert (model.weight.grad is not None) is requires_grad
        assert torch.equal(model.bias.grad, torch.full((4,), 3.0))


def test_state_dict_has_the_same_tensors() -> None:
    model = Net()
    compiled = compile_strict(model)
    compiled(torch.randn(3, 6))
    saved = compiled.state_dict()
    assert {name.removeprefix("_orig_mod."): t.data_ptr() for name, t in saved.items()} == {
        name: t.data_ptr() for name, t in model.state_dict().items()
    }


def test_load_state_dict_after_compiling(dynamic: bool) -> None:
    model, other = Net().eval(), Net().eval()
    compiled = compile_strict(model, dynamic=dynamic)
    x = torch.randn(3, 6)
    assert_like_eager(compiled, model, x)
    model.load_state_dict(other.state_dict())
    assert_like_eager(compiled, other, x)
    compiled.load_state_dict({f"_orig_mod.{k}": v * 2 for k, v in other.state_dict().items()})
    assert_like_eager(compiled, model, x)


def test_deepcopy_is_independent() -> None:
    compiled = compile_strict(Net().eval())
    x = torch.randn(3, 6)
    before = compiled(x).detach().clone()
    twin = copy.deepcopy(compiled)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(compiled(x), before)
    assert_like_eager(twin, twin._orig_mod, x)
    assert not torch.equal(twin(x), before)


def test_pickle_of_the_module_after_compiling_in_place() -> None:
    """`module.compile()` keeps the class, so the module can be pickled; the copy is an eager one."""
    model = Net().eval()
    model.compile(backend="ferrite", options={"strict": True})
    x = torch.randn(3, 6)
    before = model(x)
    assert compiled_graphs() == 1
    twin = pickle.loads(pickle.dumps(model))
    assert_same_tree(twin(x), before, twin.double()(x.double()), "output")


def test_save_and_load_of_the_state() -> None:
    model = Net().eval()
    compiled = compile_strict(model)
    x = torch.randn(3, 6)
    assert_like_eager(compiled, model, x)
    file = io.BytesIO()
    torch.save(compiled.state_dict(), file)
    file.seek(0)
    fresh = compile_strict(Net().eval())
    fresh.load_state_dict(torch.load(file))
    assert_like_eager(fresh, model, x)


def test_module_moved_to_another_dtype_after_compiling() -> None:
    model = torch.nn.Linear(6, 4)
    compiled = compile_strict(model)
    assert_like_eager(compiled, model, torch.randn(3, 6))
    model.to(torch.bfloat16)
    assert_like_eager(compiled, model, torch.randn(3, 6).bfloat16())
    model.to(torch.float64)
    assert_like_eager(compiled, model, torch.randn(3, 6).double())


def test_bound_method() -> None:
    model = Net()
    compiled = compile_strict(model.linear_part)
    x = torch.randn(3, 6)
    expected = model.linear_part(x)
    assert_same_tree(compiled(x), expected, copy.deepcopy(model).double().linear_part(x.double()), "output")
    assert compiled_graphs() == 1


def scaled(x, factor, *, offset=0.0):
    return x * factor + offset


class Callable:
    factor = 3.0

    def __call__(self, x):
        return x * self.factor

    @staticmethod
    def double(x):
        return x * 2

    @classmethod
    def triple(cls, x):
        return x * cls.factor

    def method(self, x):
        return x + self.factor


@pytest.mark.quick
@pytest.mark.parametrize(
    "fn",
    [
        scaled.__get__(torch.ones(3)),
        lambda x: scaled(x, 2.0),
        functools.partial(scaled, factor=2.0, offset=1.0),
        functools.partial(scaled, torch.full((3,), 2.0)),
        Callable(),
        Callable.double,
        Callable.triple,
        Callable().method,
        functools.wraps(scaled)(lambda x: x - 1),
    ],
    ids=[
        "method_of_a_tensor",
        "lambda",
        "partial_keywords",
        "partial_tensor",
        "object",
        "staticmethod",
        "classmethod",
        "method",
        "wrapped",
    ],
)
def test_kinds_of_callables(fn: Any) -> None:
    compiled = compile_strict(fn)
    x = torch.randn(3)
    assert_same_tree(compiled(x), fn(x), None, "output")  # products and sums alone: equal to the bit
    assert compiled_graphs() == 1


def test_as_a_decorator() -> None:
    @functools.partial(compile_strict, dynamic=False)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        """Twice x."""
        return x * 2

    assert torch.equal(doubled(torch.ones(3)), torch.full((3,), 2.0))
    assert doubled.__name__ == "doubled"
    assert doubled.__doc__ == "Twice x."
    assert compiled_graphs() == 1


def test_as_a_decorator_on_forward() -> None:
    class Decorated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((3,), 2.0))

        @compile_strict
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    first, second = Decorated(), Decorated()
    with torch.no_grad():
        second.weight.fill_(5)
    assert torch.equal(first(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(second(torch.ones(3)), torch.full((3,), 5.0))
    assert compiled_graphs() >= 1


def test_modules_in_containers_and_lists() -> None:
    class Listed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
            self.named = torch.nn.ModuleDict({"a": torch.nn.Tanh(), "b": torch.nn.ReLU()})
            self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(4)) for _ in range(3)])

        def forward(self, x: torch.Tensor, kind: str) -> torch.Tensor:
            for layer, weight in zip(self.layers, self.weights, strict=True):
                x = self.named[kind](layer(x)) * weight
            return x

    for kind in ("a", "b"):
        assert_same_as_eager(Listed(), lambda kind=kind: [torch.randn(2, 4), kind], backward=True, dynamic=False)


def test_attribute_changed_by_forward() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("total", torch.zeros(3))
            self.last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.total += x
            self.last = x * 2
            return self.total * self.calls

    model = Counting()
    compiled = compile_strict(model)
    for step in range(1, 4):
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), float(step * step)))
        assert model.calls == step
        assert torch.equal(model.last, torch.full((3,), 2.0))
    assert torch.equal(model.total, torch.full((3,), 3.0))
