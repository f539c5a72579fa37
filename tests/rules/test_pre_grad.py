"""The pre-grad stage as a whole: its doors, its guarantees, users' passes in it, and what it leaves alone."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.options import Options
from ferrite.passes import PRE_GRAD, pre_grad_passes
from ferrite.passes.pre_grad import reason_to_leave
from tests.compare import assert_same_as_eager, compile_strict
from tests.torch_level import by_dynamo

quick = pytest.mark.quick
NAMES = [step.name for step in PRE_GRAD.passes]


class Net(torch.nn.Module):
    """Something for several passes: an identity, dropout in eval mode, a split that is joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.same = torch.nn.Identity()
        self.linear = torch.nn.Linear(6, 8)
        self.dropout = torch.nn.Dropout()

    def forward(self, x):
        hidden = self.dropout(self.linear(self.same(x))).clone()
        left, right = hidden.chunk(2, dim=-1)
        return torch.concat([left, right], axis=-1).relu() + 1  # type: ignore[call-arg]


def example():
    return [torch.rand(3, 6)]


def spelled(gm) -> str:
    return gm.code


@quick
@pytest.mark.parametrize("form", ["dynamo", "modules"])
def test_the_public_door_rewrites_in_place_and_keeps_the_users_module(form):
    model = Net().eval()
    state = copy.deepcopy(model.state_dict())
    (x,) = example()
    expected = model(x)
    gm = by_dynamo(model, [x], False).gm if form == "dynamo" else torch.fx.symbolic_trace(model)
    inputs = [x] if form == "modules" else []
    assert pre_grad_passes(gm, inputs, Options(strict=True)) is gm
    code = spelled(gm)
    for gone in ("dropout", "clone", "cat", "split", "chunk", "same"):
        assert gone not in code.replace("self_modules_same", ""), code
    assert "torch._C._nn.linear" in code
    assert "aten" not in code, "calls are torch functions again"
    if form == "modules":
        assert torch.equal(gm(x), expected)
    assert all(map(torch.equal, model.state_dict().values(), state.values()))
    assert isinstance(model.same, torch.nn.Identity)


@quick
def test_running_the_stage_again_changes_nothing():
    gm = torch.fx.symbolic_trace(Net().eval())
    pre_grad_passes(gm, example(), Options(strict=True))
    code = spelled(gm)
    pre_grad_passes(gm, example(), Options(strict=True))
    assert spelled(gm) == code


@quick
def test_example_inputs_are_looked_at_and_never_run_on():
    def writes(x):
        x.add_(1)
        return x.relu()

    x = torch.ones(3, requires_grad=False)
    gm = torch.fx.symbolic_trace(writes)
    pre_grad_passes(gm, [x], Options(strict=True))
    assert torch.equal(x, torch.ones(3))
    assert x._version == 0
    assert torch.equal(gm(x), torch.full((3,), 2.0))


@quick
def test_a_graph_without_metadata_is_refused_with_what_to_do():
    with pytest.raises(ferrite.UserError, match="pre_grad_passes\\(gm, example_inputs\\)"):
        pre_grad_passes(torch.fx.symbolic_trace(Net()))


@quick
def test_at_the_level_of_aten_calls_stay_operators():
    gm = torch.fx.symbolic_trace(Net().eval())
    pre_grad_passes(gm, example(), Options(strict=True, pre_grad_level="aten"))
    assert "torch.ops.aten.linear.default" in spelled(gm)
    assert "torch.relu" not in spelled(gm)


@quick
def test_the_order_of_the_stage():
    def assert_before(first, second):
        assert NAMES.index(first) < NAMES.index(second)

    assert len(NAMES) == len(set(NAMES))
    assert_before("numpy_compat_normalization", "normalize_node_kwargs_pass")
    assert_before("normalize_node_kwargs_pass", "normalization_pass")
    assert_before("normalization_pass", "remove_noop_pass")
    assert_before("remove_noop_pass", "sink_cat_after_pointwise")
    assert_before("sink_cat_after_pointwise", "cancel_split_cat_pass")
    assert_before("cancel_split_cat_pass", "fuse_parallel_linear_pass")
    assert_before("fuse_parallel_linear_pass", "group_batch_fusion_passes")
    assert_before("group_batch_fusion_passes", "split_cat_again_pass")
    assert_before("split_cat_again_pass", "use_triton_dot_compress")
    assert_before("use_triton_dot_compress", "fuse_conv_bn")
    assert_before("efficient_conv_bn_eval", "apply_gumbel_max_trick")
    assert_before("apply_gumbel_max_trick", "pre_grad_custom_pass")
    assert_before("pre_grad_custom_pass", "quant_lift_up")
    assert_before("quant_lift_up", "remove_noop_again_pass")
    assert NAMES[-1] == "torch_spelling"


@pytest.mark.parametrize("step", PRE_GRAD.passes, ids=lambda step: step.name)
def test_every_pass_is_callable_alone_and_can_be_skipped(step):
    model = Net().eval()
    (x,) = example()
    assert getattr(ferrite.passes.pre_grad, step.name) is step
    gm = torch.fx.symbolic_trace(model)
    step(gm, [x])
    assert torch.equal(gm(x), model(x))
    gm = torch.fx.symbolic_trace(model)
    pre_grad_passes(gm, [x], Options(strict=True, skip=(step.name,)))
    assert torch.equal(gm(x), model(x))


@quick
def test_the_stage_can_be_switched_off():
    compile_strict(lambda x: x.clone() + 1, options={"pre_grad": False})(torch.ones(3))
    assert "pre_grad" not in ferrite.last_compile().passes
    assert "pre_grad" not in ferrite.last_compile().stages


def test_the_record_has_the_passes_of_the_stage():
    compile_strict(Net().eval())(*example())
    record = ferrite.last_compile()
    assert [step.name for step in record.passes["pre_grad"]] == NAMES
    assert record.rewrites["dropout_of_nothing"] == 1
    assert record.rewrites["needless_clone"] == 1


# --- users' passes ----------------------------------------------------------------------------------------------------


@quick
def test_a_hook_sees_torch_functions_with_example_values():
    seen = []

    def hook(graph):
        for node in graph.nodes:
            if node.target is F.gelu:
                seen.append(node.meta["example_value"].shape)
                node.target = torch.relu

    compiled = compile_strict(lambda x: F.gelu(x.clone()) * 2, options={"pre_grad_custom_pass": hook})
    x = torch.randn(4)
    assert torch.equal(compiled(x), torch.relu(x) * 2)
    assert seen == [(4,)]


@quick
def test_a_hook_that_fails_is_taken_back_and_reported():
    def hook(graph):
        for node in graph.nodes:
            if node.target is torch.relu:
                node.target = torch.sigmoid
        raise KeyError("lost")

    compiled = torch.compile(lambda x: torch.relu(x) + 1, backend="ferrite", options={"pre_grad_custom_pass": hook})
    x = torch.randn(4)
    with pytest.warns(ferrite.FerriteWarning, match="pass 'pre_grad_custom_pass' failed"):
        assert torch.equal(compiled(x), torch.relu(x) + 1)


@pytest.mark.parametrize("option", ["pre_grad_custom_pass", "joint_custom_pre_pass", "post_grad_custom_post_pass"])
@pytest.mark.parametrize("returned", ["graph", "module"])
def test_another_graph_that_a_hook_returns_is_not_ignored(option, returned):
    """Nobody would run it: the graph at hand is edited in place."""

    def hook(graph):
        module = torch.fx.symbolic_trace(lambda x: x * 100)
        return module if returned == "module" else module.graph

    compiled = ferrite.compile(lambda x: x + 1, **{option: hook})
    with pytest.warns(ferrite.FerriteWarning, match=f"(?s)pass '{option}' failed.*edit the one that it is given"):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    edited = ferrite.compile(lambda x: x + 1, strict=True, **{option: lambda graph: graph})
    assert torch.equal(edited(torch.ones(3)), torch.full((3,), 2.0)), "the one at hand may be returned"


@quick
def test_users_passes_stand_beside_ours_and_see_operators():
    seen = []

    @ferrite.graph_pass(stage="pre_grad", after="normalization_pass")
    def mine(gm):
        """Counts linear layers."""
        seen.append(sum(node.target is torch.ops.aten.linear.default for node in gm.graph.nodes))
        return 0

    compile_strict(Net().eval(), options={"passes": [mine]})(*example())
    assert seen == [1]


# --- what the stage leaves alone --------------------------------------------------------------------------------------


@quick
def test_graphs_of_function_transforms_are_left_as_they_are():
    def fn(x):
        return torch.vmap(lambda row: row.clone().sum())(x)

    assert_same_as_eager(fn, lambda: [torch.rand(3, 4)])
    (record,) = ferrite.last_compile().passes["pre_grad"]
    assert "transform of functions" in record.note


@quick
def test_a_tensor_that_changes_its_shape_in_place_is_left_as_it_is():
    def fn(x):
        y = x.clone()
        y.t_()
        return y + 1

    gm = torch.fx.symbolic_trace(fn)
    assert "shape of a tensor in place" in reason_to_leave(gm).reason
    assert_same_as_eager(fn, lambda: [torch.rand(3, 4)])


@pytest.mark.parametrize("dynamic", [False, True])
def test_modes_and_writes_keep_their_places(dynamic):
    def fn(x, w):
        y = x.clone()
        first = y.relu()
        y.add_(1)
        with torch.no_grad():
            frozen = torch.tanh(w) * 2
        second = y.relu()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            third = y @ w
        return first + second + frozen.sum(), third, y

    assert_same_as_eager(
        fn,
        lambda: [torch.rand(4, 4).requires_grad_(), torch.rand(4, 4).requires_grad_()],
        backward=True,
        dynamic=dynamic,
    )


def test_branches_are_rewritten_too():
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: x.clone().sin() + 1, lambda x: x.clone() * 2, (x,))

    assert_same_as_eager(fn, lambda: [torch.ones(3)])
    assert ferrite.last_compile().rewrites["needless_clone"] == 2


def test_two_threads_compile_at_once():
    results: dict[int, bool] = {}
    models = [Net().eval() for _ in range(4)]
    # traced here: torch.fx patches nn.Module for every thread while it traces
    traced = [torch.fx.symbolic_trace(model) for model in models]

    def work(number):
        model, gm = models[number], traced[number]
        (x,) = example()
        pre_grad_passes(gm, [x], Options(strict=True))
        results[number] = torch.equal(gm(x), model(x))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)
