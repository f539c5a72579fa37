"""The doors to the stages: a pass that fails is reported once and left out; names of passes are understood alike."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite
from ferrite.options import Options
from ferrite.passes import freezing, freezing_passes, joint_graph_passes, post_grad_passes, pre_grad_passes
from ferrite.pipeline import PassFailure, Pipeline, graph_pass

pytestmark = pytest.mark.quick


def breaks(graph):
    raise KeyError("lost")


def aten_graph():
    return make_fx(lambda x: x.clone().sin() + 1, tracing_mode="fake")(torch.rand(3))


def through_pre_grad(**options):
    gm = torch.fx.symbolic_trace(lambda x: x.clone().sin() + 1)
    return pre_grad_passes(gm, [torch.rand(3)], Options(pre_grad_custom_pass=breaks, **options))


def through_joint(**options):
    return joint_graph_passes(aten_graph(), True, Options(joint_custom_pre_pass=breaks, **options))


def through_post_grad(**options):
    return post_grad_passes(aten_graph(), True, Options(post_grad_custom_pre_pass=breaks, **options))


DOORS = {
    "pre_grad_custom_pass": through_pre_grad,
    "joint_custom_pre_pass": through_joint,
    "post_grad_custom_pre_pass": through_post_grad,
}


@pytest.mark.parametrize("name", DOORS)
def test_a_failing_pass_is_reported_and_the_others_run(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gm = DOORS[name]()
    (message,) = [str(each.message) for each in caught if each.category is ferrite.FerriteWarning]
    assert f"pass {name!r} failed" in message
    assert "KeyError: 'lost'" in message
    assert "the pass is taken back and left out for this graph" in message
    assert "ferrite.Options(strict=True)" in message
    assert "clone" not in gm.code, "the other passes ran"
    x = torch.rand(3)
    assert torch.equal(gm(x), x.sin() + 1)


@pytest.mark.parametrize("name", DOORS)
def test_with_strict_the_failure_is_raised(name):
    with pytest.raises(PassFailure, match=name):
        DOORS[name](strict=True)


def test_the_door_to_freezing_reports_too(monkeypatch):
    @graph_pass(stage="freeze")
    def broken(gm, context):
        raise KeyError("lost")

    monkeypatch.setattr(freezing, "FREEZE", Pipeline("freeze", (broken,)))
    with pytest.warns(ferrite.FerriteWarning, match="pass 'broken' failed"):
        freezing_passes(aten_graph())


def test_one_warning_for_a_pass_that_fails_on_several_graphs():
    def branches(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    gm = make_fx(branches, tracing_mode="fake")(torch.rand(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        joint_graph_passes(gm, True, Options(joint_custom_pre_pass=breaks))
    assert len([each for each in caught if each.category is ferrite.FerriteWarning]) == 1


def test_the_warning_points_at_the_line_of_the_node():
    def leaves_a_node_without_value(graph):
        (sine,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
        sine.args = (1.5, 2, 3)

    gm = aten_graph()
    for number, node in enumerate(gm.graph.nodes):
        node.meta["stack_trace"] = f'File "/home/me/net.py", line {number}, in forward\n    y = {node.name}'
    with pytest.warns(ferrite.FerriteWarning) as caught:
        post_grad_passes(gm, True, Options(post_grad_custom_pre_pass=leaves_a_node_without_value))
    (warning,) = caught
    assert "in your model   net.py:2  y = sin" in str(warning.message)
    assert (warning.filename, warning.lineno) == ("/home/me/net.py", 2)


SKIPPED = {
    "joint": (lambda options: joint_graph_passes(aten_graph(), True, options), "remove-noop-ops"),
    "post_grad": (lambda options: post_grad_passes(aten_graph(), True, options), " remove_noop-ops "),
    "pre_grad": (
        lambda options: pre_grad_passes(torch.fx.symbolic_trace(lambda x: x.clone() + 1), [torch.rand(3)], options),
        "remove-noop",
    ),
}


@pytest.mark.parametrize("stage", SKIPPED)
def test_every_door_knows_the_short_names(stage):
    door, short = SKIPPED[stage]
    assert "clone" not in door(Options(strict=True)).code
    again = ("remove-noop-again",) if stage == "pre_grad" else ()
    assert "clone" in door(Options(strict=True, skip=(short, *again))).code
    with pytest.raises(ferrite.UserError, match="option 'skip' names 'remove-nop'"):
        door(Options(strict=True, skip=("remove-nop",)))
    with pytest.raises(ferrite.UserError, match="option 'extra' names 'remove-nop'"):
        door(Options(strict=True, extra=("remove-nop",)))
