"""Operators that are called for what they do besides computing: as often as in eager, in order, and though nobody
reads what they return."""

from __future__ import annotations

import pytest
import torch
from torch._library.effects import EffectType
from torch.fx.node import _side_effectful_functions, has_side_effect
from torch.library import _register_effectful_op, custom_op

CALLS: list[tuple[str, int]] = []


def recording(name: str):
    """An operator that notes its calls; it is a copy, as is its derivative."""

    @custom_op(f"contract_effects::{name}", mutates_args=())
    def operator(x: torch.Tensor, number: int) -> torch.Tensor:
        CALLS.append((name, number))
        return x.clone()

    operator.register_fake(lambda x, number: torch.empty_like(x))
    operator.register_autograd(lambda ctx, gradient: (operator(gradient, 100), None))
    return getattr(torch.ops.contract_effects, name).default


registered = has_side_effect(recording("registered"))
ordered = recording("ordered")
_register_effectful_op(ordered, EffectType.ORDERED)
plain = recording("plain")


def unread(x):
    registered(x, 1)
    y = x.sin()
    registered(y, 2)
    return y + 1


def by_packet(x):
    torch.ops.contract_effects.registered(x.cos().exp(), 1)
    return x + 1


def equal_calls(x):
    return registered(x, 1) + registered(x, 1)


def unread_equal_calls(x):
    registered(x, 1)
    registered(x, 1)
    return x * 2


def of_constants(x):
    registered(torch.ones(3), 1)
    registered(torch.ones(3), 1)
    return x - 1


def in_order(x):
    registered(x, 1)
    ordered(x, 2)
    registered(x.exp(), 3)
    ordered(x, 4)
    registered(x, 5)
    return x.cos()


def around_a_write(x):
    y = x.clone()
    registered(y, 1)
    y.add_(1)
    registered(y, 2)
    return y


def in_a_branch(x):
    def then(x):
        registered(x, 1)
        return x + 1

    def otherwise(x):
        registered(x, 2)
        return x - 1

    return torch.cond(x.sum() > 0, then, otherwise, (x,))


def with_derivative(x):
    return (registered(x.sin(), 1) * x).cos()


PROGRAMS = [unread, by_packet, equal_calls, unread_equal_calls, of_constants, in_order, around_a_write, in_a_branch]
PROGRAMS += [with_derivative]


def calls_of(function, how: str) -> list[tuple[str, int]]:
    """What two calls of a function record, and its gradients where they are asked for."""
    CALLS.clear()
    x = torch.rand(3, requires_grad=how == "training")
    with torch.set_grad_enabled(how == "training"):
        for _ in range(2):
            result = function(x)
            if result.requires_grad:
                result.sum().backward()
    return list(CALLS)


def compiled(function, how: str = "inference"):
    torch.compiler.reset()
    options = {"strict": True, "freeze": how == "frozen"}
    return torch.compile(function, backend="ferrite", dynamic=True if how == "dynamic" else None, options=options)


@pytest.mark.parametrize("how", ["inference", "training", pytest.param("dynamic", marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_operators_with_effects_are_called_as_often_as_in_eager(program, how, artifact_cache):
    expected = calls_of(program, how)
    assert expected
    assert calls_of(compiled(program, how), how) == expected
    assert calls_of(compiled(program, how), how) == expected  # out of the cache


def test_they_are_called_where_parameters_are_frozen(artifact_cache):
    layer = torch.nn.Linear(3, 3).eval()

    def function(x):
        registered(layer.weight, 1)
        registered(layer.weight, 1)
        return layer(x)

    assert calls_of(compiled(function, "frozen"), "frozen") == [("registered", 1)] * 4


def test_what_has_no_effect_and_no_reader_is_not_called_until_it_is_registered(artifact_cache):
    def function(x):
        plain(x, 1)
        return x + 1

    assert calls_of(compiled(function), "inference") == []
    has_side_effect(plain)
    try:
        assert calls_of(compiled(function), "inference") == [("plain", 1)] * 2
    finally:
        _side_effectful_functions.discard(plain)
