"""The option check_numerics: a wrong pass is found and named, and nothing of the user's is touched."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import ferrite
from ferrite.errors import CompilerBug, FerriteWarning
from ferrite.options import Options
from ferrite.passes import pre_grad_passes

aten = torch.ops.aten


@ferrite.graph_pass(stage="pre_grad", after="normalization_pass")
def sin_to_cos(gm, context):
    """Wrong."""
    found = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
    for node in found:
        node.target = aten.cos.default
    return len(found)


@ferrite.graph_pass(stage="pre_grad", after="sin_to_cos")
def exp_to_expm1(gm, context):
    """Wrong too, but later."""
    found = gm.graph.find_nodes(op="call_function", target=aten.exp.default)
    for node in found:
        node.target = aten.expm1.default
    return len(found)


@ferrite.graph_pass(stage="pre_grad", after="normalization_pass")
def add_twice(gm, context):
    """Right values, wrong gradient."""
    count = 0
    for node in gm.graph.find_nodes(op="call_function", target=aten.sin.default):
        with gm.graph.inserting_after(node):
            cut = gm.graph.call_function(aten.detach.default, (node,))
        node.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)
        count += 1
    return count


def compiled(fn, *steps, check=("raise",), **options):
    settings = {"strict": True, "passes": list(steps), "check_numerics": check, **options}
    return torch.compile(fn, backend="ferrite", options=settings)


def curve(x):
    return (x.sin().exp() * 2).relu()


def test_right_passes_pass():
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(curve)(x), curve(x))


def test_a_wrong_pass_is_an_error():
    with pytest.raises(CompilerBug, match="the pre-grad passes changed what the graph computes") as caught:
        compiled(curve, sin_to_cos)(torch.randn(3, 4))
    assert "output 0: off by" in str(caught.value)
    assert caught.value.stage == "pre_grad"


def test_a_warning_instead():
    with pytest.warns(FerriteWarning, match="changed what the graph computes"):
        compiled(curve, sin_to_cos, check={"warn": {}})(torch.randn(3, 4))


def test_the_first_wrong_pass_is_named_and_graphs_are_kept(tmp_path):
    with pytest.raises(CompilerBug) as caught:
        compiled(curve, sin_to_cos, exp_to_expm1, check=["bisect"], dump_dir=tmp_path)(torch.randn(3, 4))
    lines = caught.value.lines
    assert lines["in the pass"] == "sin_to_cos"
    assert lines["to leave it out"] == 'options={"skip": ["sin_to_cos"]}'
    folder = Path(lines["kept"])
    before, after = ((folder / f"00_{name}_sin_to_cos.py").read_text() for name in ("before", "after"))
    assert "aten.sin" in before
    assert "aten.sin" not in after
    with pytest.raises(CompilerBug) as caught:
        compiled(curve, sin_to_cos, exp_to_expm1, check=["bisect"], skip=["sin_to_cos"])(torch.randn(3, 4))
    assert caught.value.lines["in the pass"] == "exp_to_expm1"


def test_gradients_are_compared():
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(CompilerBug, match=r"requires_grad|gradient"):
        compiled(lambda x: x.sin() * 2 + x, add_twice)(x)
    compiled(lambda x: x.sin() * 2 + x, add_twice, check={"raise": {"gradients": False}})(x)


def test_nothing_of_the_users_is_touched():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.randn(3, 4, requires_grad=True)
    content, version = x.detach().clone(), x._version
    environment = dict(os.environ)
    torch.manual_seed(5)
    expected = module(x)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    result = compiled(module, check={"raise": {"steps": 2}})(x)
    assert torch.equal(torch.get_rng_state(), after), "the generator is where one call leaves it"
    torch.testing.assert_close(result, expected)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(x, content)
    assert x._version == version
    assert all(torch.equal(module.state_dict()[name], value) for name, value in state.items())
    assert torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert dict(os.environ) == environment


def test_an_input_is_written_once():
    def fn(x, count):
        count.add_(1)
        return x * count

    count = torch.zeros(1)
    compiled(fn, check={"raise": {"steps": 3}})(torch.ones(2), count)
    assert count.item() == 1


def test_inputs_that_share_memory_still_do():
    def fn(whole, part):
        whole.mul_(2)
        return part + 1

    whole = torch.ones(4)
    result = compiled(fn)(whole, whole[:2])
    assert torch.equal(result, torch.full((2,), 3.0))


def test_what_cannot_be_run_is_said():
    """Random numbers fit no lookup in a table of one row."""
    table, indices = torch.randn(1, 3), torch.zeros(64, dtype=torch.int64)
    with pytest.warns(FerriteWarning, match="the numeric check was not made"):
        compiled(nn.functional.embedding, check={"raise": {"inputs": "random"}})(indices, table)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FerriteWarning)
        compiled(nn.functional.embedding)(indices, table)


def test_symbolic_sizes_and_half_precision():
    fn = torch.compile(
        lambda x: x.sin() @ x.mT, backend="ferrite", dynamic=True, options={"strict": True, "check_numerics": ["raise"]}
    )
    for size in (3, 5):
        x = torch.randn(size, 4).bfloat16()
        assert fn(x).shape == (size, size)


def test_on_a_graph_without_the_compiler():
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    pre_grad_passes(gm, [torch.randn(2, 3)], Options(check_numerics=["raise"], strict=True))
    assert gm(torch.randn(2, 3)).shape == (2, 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["rise"], "unknown reaction 'rise'\n  did you mean    raise"),
        ({"raise": {"input": "random"}}, "the reaction 'raise' has no setting 'input'\n  did you mean    inputs"),
        ({"raise": {"inputs": "zeros"}}, "possible        captured or random"),
        ({"raise": {"steps": 0}}, "possible        a whole number from 1"),
    ],
)
def test_wrong_settings_say_what_is_possible(value, message):
    with pytest.raises(ferrite.UserError) as caught:
        ferrite.compile(curve, check_numerics=value)
    assert message in str(caught.value)


def test_it_does_not_change_the_code():
    assert Options(check_numerics=["raise"]).code_key() == Options().code_key()
