"""Calls that are spelled otherwise for passes, and back: nothing of a call is lost on the way."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from ferrite.errors import FerriteError
from ferrite.passes.pre_grad import names, spelling_check, torch_form
from tests.compare import assert_same_as_eager

aten = torch.ops.aten


def compiled(function):
    return torch.compile(function, backend="ferrite", fullgraph=True, options={"strict": True})


CALLS = {
    "a scale that F.elu has not": lambda x, y: aten.elu(x, 1.67, 1.05) + 2,
    "F.elu itself": lambda x, y: F.elu(x, 1.67) + 2,
    "an input scale, by name": lambda x, y: aten.elu(x, alpha=1.5, input_scale=0.5) + 2,
    "no tensor among the terms": lambda x, y: (aten.add(4, 3.3), x + 1),
    "a factor in front": lambda x, y: (aten.mul(3, x), aten.sub(3, x), 3 - x),
    "indices of which some are none": lambda x, y: aten.index_put(x, (None, y.long().flatten()[:2] % 2), x[:, :2] * 2),
    "a padding index": lambda x, y: aten.embedding(x, (y.long() % 2).abs(), 1, True),
    "limits the wrong way round": lambda x, y: aten.hardtanh(x, 0.5, -0.5) + 1,
    "one value per channel": lambda x, y: aten.batch_norm(x[:1], None, None, None, None, True, 0.1, 1e-5, False) + 1,
    "one value per group": lambda x, y: aten.group_norm(x[:1, :, None], 4) + 1,
    "a negative eps": lambda x, y: aten.batch_norm(x, None, None, x[0], x[0].abs() + 1, False, 0.1, -0.1, True) + 1,
}


@pytest.mark.parametrize("name", CALLS)
def test_no_argument_is_lost(name):
    if name == "limits the wrong way round" and torch.__version__ < "2.13":
        pytest.skip("older releases cannot trace it: their fake tensors refuse such limits")
    assert_same_as_eager(CALLS[name], lambda: [torch.randn(3, 4), torch.randn(3, 4)])


def test_a_write_through_indices_of_which_some_are_none():
    def function(a, b, c):
        aten.index_put_(a, (None, b, None), c)
        return a + 1

    assert_same_as_eager(function, lambda: [torch.zeros(2, 3, 2), torch.tensor([1, 0]), torch.tensor(3.0)])


@pytest.mark.parametrize("compare", [operator.eq, operator.ne])
def test_none_is_no_tensor(compare):
    """`x == None` is a truth value of Python's, `x == y` a tensor."""

    def function(x, y):
        return torch.tensor(compare(x, None)), compare(x, y), compare(x, 1) + x

    assert_same_as_eager(function, lambda: [torch.ones(3), torch.arange(3.0)])


def wrong_elu(monkeypatch):
    """A table that takes F.elu for another operator."""
    wrong = names.PythonFunction(F.elu, "celu", {"input": "self", "alpha": "alpha"}, {"inplace": False})
    tables = {**names.BY_FUNCTION, F.elu: wrong}
    monkeypatch.setattr("ferrite.passes.pre_grad.spelling.BY_FUNCTION", tables)
    monkeypatch.setattr(spelling_check, "_compared", set())


def test_strict_compares_what_another_spelling_computes(monkeypatch):
    wrong_elu(monkeypatch)
    with pytest.raises(FerriteError, match="the values differ"):
        compiled(lambda x: F.elu(x, 2.5) + 1)(torch.randn(4))


def test_a_spelling_that_gives_a_number_instead_of_a_tensor_is_found(monkeypatch):
    monkeypatch.setattr(torch_form, "reads_as", lambda form, node: True)
    monkeypatch.setattr(spelling_check, "_compared", set())
    with pytest.raises(FerriteError, match="no tensor"):
        compiled(lambda x: (aten.add.Tensor(4, 3.3), x + 1))(torch.randn(4))


def test_large_operands_and_random_numbers_are_not_compared(monkeypatch):
    ran = []
    monkeypatch.setattr(spelling_check, "_compared", set())
    monkeypatch.setattr(spelling_check, "result_of", lambda call, given: ran.append(call.target))
    compiled(lambda x: F.dropout(x, 0.25) + 1)(torch.randn(4))
    assert F.dropout not in ran
    ran.clear()
    compiled(lambda x: torch.relu(x))(torch.randn(200, 200))
    assert not ran
    compiled(lambda x: torch.relu(x))(torch.randn(20, 20))
    assert ran


def test_the_same_change_is_compared_once(monkeypatch):
    ran = []
    monkeypatch.setattr(spelling_check, "_compared", set())
    run = spelling_check.result_of
    monkeypatch.setattr(spelling_check, "result_of", lambda *given: ran.append(given) or run(*given))
    compiled(lambda x: torch.relu(x).sin())(torch.randn(4))
    first = len(ran)
    assert first
    torch.compiler.reset()
    compiled(lambda x: torch.relu(x).cos())(torch.randn(4))
    assert len(ran) < 2 * first
