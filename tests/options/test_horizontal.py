"""The option `horizontal` as names with limits: only those rules run, wherever they are right, within the limits."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.errors import Refusal
from ferrite.options import Options, resolve
from ferrite.options.values import Choice
from ferrite.passes import checked_options, horizontal_rules, pre_grad_passes
from ferrite.passes.freezing.siblings import merge

pytestmark = pytest.mark.quick


def several(x, *weights):
    """Three layers on one input, and three small calls of one kind."""
    return [torch.tanh(F.linear(x, weight)) for weight in weights]


def inputs():
    return [torch.rand(2, 3), *[torch.rand(4, 3) for _ in range(3)]]


def rewrites(horizontal):
    torch.compiler.reset()
    options = {"strict": True, "horizontal": horizontal}
    compiled = torch.compile(several, backend="ferrite", options=options)
    given = inputs()
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), several(*given))
    found = ferrite.last_compile().rewrites
    return {name: found.get(name, 0) for name in ("parallel_linear", "batch_tanh")}


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("horizontal", "layers", "calls"),
    [
        ("off", 0, 0),
        ("auto", 0, 0),
        ("always", 1, 0),  # there are fewer than five calls
        (["parallel_linear"], 1, 0),
        ({"parallel_linear": {"min_members": 4}}, 0, 0),
        ({"batch_tanh": {"min_members": 3}}, 0, 1),
        ({"batch_tanh": {"min_members": 2, "max_members": 2}}, 0, 1),
        ({"batch_tanh": {"min_members": 3}, "parallel_linear": {}}, 1, 1),
        ({}, 0, 0),
    ],
)
def test_named_rules_run_within_their_limits(horizontal, layers, calls):
    assert rewrites(horizontal) == {"parallel_linear": layers, "batch_tanh": calls}


def test_as_text_and_as_json():
    options = resolve(environ={"FERRITE_HORIZONTAL": "batch_tanh:min_members=3,parallel_linear"})
    assert options.horizontal == (Choice("batch_tanh", (("min_members", 3),)), Choice("parallel_linear"))
    assert Options(**json.loads(json.dumps(options.changed()))) == options
    assert options.code_key() != Options().code_key()
    for word in ("off", "auto", "always"):
        assert resolve(environ={"FERRITE_HORIZONTAL": word}).horizontal == word


@pytest.mark.parametrize(
    ("horizontal", "message"),
    [
        ("alwys", "option 'horizontal' is 'alwys'\n  did you mean    always"),
        (3, "option 'horizontal' is 3, a int\n  expected        off | auto | always, a list of names, or settings by"),
        (["batch_tahn"], "option 'horizontal' has an unknown rule 'batch_tahn'\n  did you mean    batch_tanh"),
        ({"batch_tanh": {"members": 3}}, "the rule 'batch_tanh' has no setting 'members'\n  did you mean    "),
        ({"batch_tanh": {"min_members": 1}}, "the setting 'min_members' of the rule 'batch_tanh' is 1"),
        ({"split_linear_add": {"min_members": 2}}, "the rule 'split_linear_add' has no setting 'min_members'"),
    ],
)
def test_mistakes_are_reported_at_once(horizontal, message):
    with pytest.raises(ferrite.UserError) as caught:
        ferrite.compile(several, horizontal=horizontal)
    assert str(caught.value).startswith(message)
    with pytest.raises(ferrite.UserError):
        pre_grad_passes(torch.fx.symbolic_trace(lambda x: x + 1), [torch.ones(2)], Options(horizontal=horizontal))


def test_every_name_is_accepted():
    names = horizontal_rules()
    assert {"batch_linear", "parallel_linear", "shared_linear", "split_linear_add", "merge_sibling_products"} <= {
        *names
    }
    assert checked_options(Options(horizontal=list(names))).horizontal == tuple(map(Choice, names))


def test_what_freezing_joins_is_named_too():
    class Site:
        options = Options(horizontal=["parallel_linear"])

    assert isinstance(merge(Site()), Refusal)


def test_sums_of_layers_are_named_too():
    def summed(x, w, v):
        return F.linear(x[:, :3], w) + F.linear(x[:, 3:], v)

    for horizontal, fires in ((["split_linear_add"], 1), (["batch_tanh"], 0)):
        gm = torch.fx.symbolic_trace(summed)
        given = [torch.rand(2, 6), torch.rand(4, 3), torch.rand(4, 3)]
        pre_grad_passes(gm, given, Options(strict=True, horizontal=horizontal))
        assert gm.code.count("nn.linear(") == 2 - fires
        torch.testing.assert_close(gm(*given), summed(*given))
