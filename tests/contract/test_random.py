"""Random numbers are eager's: the same values from the same seed, and the same generator state afterwards."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.compare import assert_same_as_eager, compile_strict

RANDOM = {
    "rand": lambda x: torch.rand(x.shape) + x,
    "randn": lambda x: torch.randn(x.shape) * 2 + x,
    "randint": lambda x: torch.randint(0, 10, x.shape) + x,
    "randint_range": lambda x: torch.randint(-5, 100, (x.shape[0],), dtype=torch.int32) + 1,
    "randperm": lambda x: x[torch.randperm(x.shape[0])] + 0,
    "rand_like": lambda x: torch.rand_like(x) * x,
    "randn_like": lambda x: torch.randn_like(x) - x,
    "randint_like": lambda x: torch.randint_like(x, 7) + 1,
    "rand_float64": lambda x: torch.rand(5, dtype=torch.float64) * 2,
    "randn_bfloat16": lambda x: torch.randn(33, dtype=torch.bfloat16).clone(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) + x,
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.3) + 1,
    "bernoulli_": lambda x: x.clone().bernoulli_(0.7) + 1,
    "normal": lambda x: torch.normal(x, 2.0) + 1,
    "normal_": lambda x: torch.empty_like(x).normal_(1.0, 3.0) + x,
    "uniform_": lambda x: torch.empty_like(x).uniform_(-2, 5) + x,
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0) + x,
    "random_": lambda x: torch.empty(9, dtype=torch.int64).random_(50) + 1,
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 3) + 0,
    "multinomial_with_replacement": lambda x: torch.multinomial(x.softmax(-1), 20, replacement=True) + 0,
    "dropout": lambda x: functional.dropout(x, 0.5) * 2,
    "dropout_none": lambda x: functional.dropout(x, 0.0) + 1,
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, training=True) + 0,
    "feature_dropout": lambda x: functional.dropout1d(x, 0.5) + 0,
    "rrelu": lambda x: functional.rrelu(x, training=True) + 0,
}
QUICK = ("rand", "randperm", "dropout", "uniform_", "bernoulli")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.quick if n in QUICK else ()) for n in RANDOM])
def test_random_values_and_generator_state(name: str, rarely_dynamic: bool) -> None:
    assert_same_as_eager(RANDOM[name], lambda: [torch.randn(6, 5)], exact=False, calls=2, dynamic=rarely_dynamic)


def interleaved(x):
    """Order matters: each draw moves the one stream on."""
    first = torch.rand(3)
    kept = functional.dropout(x, 0.3)
    second = torch.randn(3)
    return first, kept, second, torch.randint(0, 9, (2,)), torch.rand(3)


def twice_the_same(x):
    """Two equal draws are two values; merging them as a common subexpression would be wrong."""
    return torch.rand_like(x), torch.rand_like(x), functional.dropout(x, 0.5), functional.dropout(x, 0.5)


def result_unused(x):
    """A draw nobody reads still moves the stream on."""
    torch.rand(7)
    return torch.rand(3) + x.amax()  # equal to the bit in any order, unlike a sum


@pytest.mark.quick
@pytest.mark.parametrize("fn", [interleaved, twice_the_same, result_unused])
def test_order_and_number_of_draws(fn, dynamic: bool) -> None:
    assert_same_as_eager(fn, lambda: [torch.randn(6, 5)], exact=False, dynamic=dynamic)


@pytest.mark.parametrize("name", ["dropout", "alpha_dropout", "bernoulli", "rand_like", "normal_", "rrelu"])
def test_random_in_training(name: str, rarely_dynamic: bool) -> None:
    assert_same_as_eager(
        RANDOM[name],
        lambda: [torch.randn(6, 5, requires_grad=True)],
        exact=False,
        backward=True,
        calls=2,
        dynamic=rarely_dynamic,
    )


def test_write_of_random_values_into_an_input(dynamic: bool) -> None:
    def refill(x: torch.Tensor) -> None:
        x.normal_()
        x[1:].uniform_()

    assert_same_as_eager(refill, lambda: [torch.zeros(4, 3)], exact=False, dynamic=dynamic)


def test_dropout_module_in_training_and_evaluation(dynamic: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Dropout(0.2), torch.nn.Flatten(0))
    inputs = lambda: [torch.randn(8, 3, requires_grad=True)]  # noqa: E731
    assert_same_as_eager(model.train(), inputs, exact=False, backward=True, dynamic=dynamic)
    assert_same_as_eager(torch.nn.Sequential(model, torch.nn.ReLU()).eval(), inputs, backward=True, dynamic=dynamic)


def test_values_differ_from_call_to_call(dynamic: bool) -> None:
    """A random operator must not be folded into a constant."""
    compiled = compile_strict(lambda: torch.rand(4) + 1, dynamic=dynamic)
    assert not torch.equal(compiled(), compiled())


def test_seed_set_inside_the_function() -> None:
    def seeded(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return torch.rand(3) + x

    compiled = compile_strict(seeded)
    x = torch.randn(3)
    assert torch.equal(compiled(x), seeded(x))
    assert torch.equal(torch.rand(5), (seeded(x), torch.rand(5))[1])


def test_state_saved_and_restored_between_calls(dynamic: bool) -> None:
    compiled = compile_strict(lambda x: functional.dropout(x, 0.5), dynamic=dynamic)
    x = torch.randn(50)
    state = torch.get_rng_state()
    first, second = compiled(x), compiled(x)
    torch.set_rng_state(state)
    assert torch.equal(compiled(x), first)
    assert torch.equal(compiled(x), second)
    assert not torch.equal(first, second)


def test_explicit_generator() -> None:
    """Dynamo breaks the graph at it; the default generator must stay untouched."""

    def draw(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return torch.rand(4, generator=generator) + x * 2

    x = torch.randn(4)
    theirs, ours = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    compiled = compile_strict(draw)
    before = torch.get_rng_state()
    for _ in range(2):
        assert torch.equal(compiled(x, ours), draw(x, theirs))
    assert torch.equal(ours.get_state(), theirs.get_state())
    assert torch.equal(torch.get_rng_state(), before)


OF_PYTHON = {
    "float": lambda x: x * random.uniform(1, 2),
    "int": lambda x: x * random.randint(1, 9),
    "two": lambda x: (x * random.uniform(1, 2)).abs() - random.uniform(1, 2),
    "compared": lambda x: x > random.uniform(0, 1),
    "returned": lambda x: (x + 1, random.uniform(0, 1)),
    "one_of_several": lambda x: torch.where(x > 0, x, random.uniform(-1, 1)),
    "made_a_tensor": lambda x: x + torch.full((3,), random.uniform(0, 1)),
    "keyword": lambda x: torch.clamp(x, min=random.uniform(0, 0.5)),
}


@pytest.mark.parametrize("name", OF_PYTHON)
def test_numbers_of_pythons_own_generator(name: str) -> None:
    """Drawn anew for each call, and in eager's type: Dynamo hands over doubles, whatever it says of them."""
    fn: Any = OF_PYTHON[name]
    compiled = compile_strict(fn, fullgraph=True)

    def three(function: Any, x: torch.Tensor) -> list[Any]:
        random.seed(3)
        return [function(x) for _ in range(3)]

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        x = torch.tensor([-0.5, 0.5, 1.5]).to(dtype)
        torch.testing.assert_close(three(compiled, x), three(fn, x), rtol=0, atol=0)
