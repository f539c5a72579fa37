"""Batch norms in eval mode that become part of the layer before them, in every form a model can have."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ferrite
from ferrite.graph.verify import verify_graph
from ferrite.options import Options
from ferrite.passes import pre_grad_passes
from ferrite.passes.pre_grad.conv_bn import FOLD, FOLD_LIVE
from ferrite.passes.pre_grad.conv_bn_cases import conv_inputs
from ferrite.passes.pre_grad.torch_form import as_torch
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules, why
from tests.cases import seldom
from tests.compare import assert_same_as_eager, since
from tests.torch_level import Captured, assert_same, captured

aten = torch.ops.aten
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def lived(module: nn.Module) -> nn.Module:
    """Statistics and parameters as training leaves them, in eval mode."""
    torch.manual_seed(1)
    for each in module.modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            each.running_mean.normal_()
            each.running_var.uniform_(0.3, 2)
            if each.affine:
                nn.init.normal_(each.weight)
                nn.init.normal_(each.bias)
    return module.eval()


def fold(graph: Captured, rule: Any = FOLD, inference: bool = True) -> tuple[Captured, int]:
    after = graph.copy()
    options = Options(freeze=True) if rule is FOLD else Options(eval_conv_bn=True)
    count = apply_rules(after.gm, (rule,), PassContext(options, inference))
    verify_graph(after.gm, deep=True)
    return after, count


def targets(graph: Captured) -> list[Any]:
    return [node.target for node in graph.gm.graph.nodes]


def constants(graph: Captured) -> set[str]:
    return {str(node.target) for node in graph.gm.graph.find_nodes(op="get_attr")}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", seldom([1, 2, 3], 1))
def test_every_kind_of_convolution_folds_in_both_modes(dims, transposed):
    def inputs():
        return [torch.randn(2, 4, *(4,) * dims)]

    for bias, affine, groups in itertools.product((False, True), (False, True), (1, 2, 4)):
        kind, channels = (TRANSPOSED, 8) if transposed else (CONVS, 4)
        layer = kind[dims](4, channels, 2, stride=2, padding=1, groups=groups, bias=bias)
        module = lived(nn.Sequential(layer, NORMS[dims](channels, affine=affine)))
        with torch.no_grad():
            graph = captured(module, inputs(), "modules")
            folded, fired = fold(graph)
            assert fired == 1, module
            assert aten.batch_norm.default not in targets(folded)
            assert len(constants(folded) - constants(graph)) == 2, "computed at once"
            assert_same(graph, folded, inputs, exact=False)
        if bias == affine:  # the same matcher and arithmetic; here with gradients of all parameters
            live, fired = fold(graph, FOLD_LIVE, inference=False)
            assert fired == 1, module
            assert_same(graph, live, inputs, exact=False)


CALLS = {
    "positional": lambda y, m, v, g, b: F.batch_norm(y, m, v, g, b, False, 0.1, 1e-5),
    "by name": lambda y, m, v, g, b: F.batch_norm(input=y, running_mean=m, running_var=v, weight=g, bias=b, eps=1e-3),
    "defaults": lambda y, m, v, g, b: F.batch_norm(y, m, v) * g[0] + b[0],
    "torch": lambda y, m, v, g, b: torch.batch_norm(y, g, b, m, v, False, 0.1, 1e-5, True),
    "scale alone": lambda y, m, v, g, b: F.batch_norm(y, m, v, g) + b[0],
    "no momentum": lambda y, m, v, g, b: F.batch_norm(y, m, v, g, b, momentum=0.0),
}


def test_every_way_to_call_a_norm():
    def inputs():
        return [torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), *norm_parameters()]

    for name, call in CALLS.items():
        graph = captured(lambda x, w, m, v, g, b, call=call: call(torch.conv2d(x, w), m, v, g, b), inputs())
        folded, fired = fold(graph)
        assert fired == 1, name
        assert_same(graph, folded, inputs, exact=False)


def norm_parameters() -> list[torch.Tensor]:
    return [torch.randn(4), torch.rand(4) + 0.5, torch.randn(4), torch.randn(4)]


@pytest.mark.parametrize(("shape", "fires"), [((5, 3), 1), ((5, 4, 3), 0)])
def test_a_linear_layer_on_rows_alone(shape, fires):
    module = lived(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))

    def inputs():
        return [torch.randn(*shape)]

    with torch.no_grad():
        graph = captured(module, inputs(), "modules")
        folded, fired = fold(graph)
        assert fired == fires
        assert_same(graph, folded, inputs, exact=False)


class Shared(nn.Module):
    """One convolution: twice with one norm, once with another, once alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x, y):
        return self.first(self.conv(x)), self.first(self.conv(y)), self.second(self.conv(x)), self.conv(x)


def test_a_shared_convolution_keeps_its_own_weights():
    module = lived(Shared())
    state = copy.deepcopy(module.state_dict())

    def inputs():
        return [torch.randn(1, 3, 5, 5), torch.randn(2, 3, 5, 5)]

    with torch.no_grad():
        graph = captured(module, inputs(), "modules")
        folded, fired = fold(graph)
        assert fired == 3
        new = [name for name in constants(folded) if "conv_bn" in name]
        assert len(new) == 4, "one pair for the first norm, however often, one for the second"
        assert_same(graph, folded, inputs, exact=False)
        alone = folded.gm.graph.output_node().args[0][3]
        assert [operand.target for operand in alone.args[1:3]] == ["conv.weight", "conv.bias"]
        expected = module(*inputs())
    assert all(torch.equal(module.state_dict()[name], state[name]) for name in state), "the user's module is as it was"
    assert len(expected) == 4


def test_a_whole_model_folds_as_dynamo_captures_it():
    """Parameters are inputs there, and no module is left to look at."""
    module = lived(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False)))
    module.append(nn.SyncBatchNorm(4)).eval()
    lived(module)
    with torch.no_grad():
        assert_same_as_eager(module, lambda: [torch.randn(2, 3, 8, 8)], options={"freeze": True})
        assert ferrite.last_compile().rewrites["fold_conv_bn"] == 2
    torch.compile(module, backend="ferrite", options={"freeze": True, "strict": True})(torch.randn(2, 3, 8, 8))
    assert "fold_conv_bn" not in ferrite.last_compile().rewrites, "gradients are wanted"


def test_eval_norms_inside_a_training_model():
    module = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4))
    lived(module).train()
    module[1].eval()
    assert_same_as_eager(module, lambda: [torch.randn(2, 3, 9)], options={"eval_conv_bn": True}, backward=True, calls=2)
    assert ferrite.last_compile().rewrites["eval_conv_bn"] == 1


def test_the_rewritten_graph_is_python_that_runs():
    module = lived(nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4)))
    x = torch.randn(2, 3, 7, 7)
    graph = captured(module, [x], "modules")
    live, _ = fold(graph, FOLD_LIVE, inference=False)
    as_torch(live.gm)
    live.gm.recompile()
    names = dict(live.gm.graph.python_code("self").globals)
    exec(live.gm.code, names)
    torch.testing.assert_close(names["forward"](live.gm, x), module(x))


def test_a_writer_anywhere_forbids_to_freeze():
    def updated(x, w, mean, var):
        y = F.batch_norm(torch.conv2d(x, w), mean, var)
        w.mul_(2)
        return y

    def inputs():
        return [torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4), torch.rand(4) + 0.5]

    graph = captured(updated, inputs())
    assert fold(graph)[1] == 0
    live, fired = fold(graph, FOLD_LIVE)
    assert fired == 1, "computed in every step, before the write"
    assert_same(graph, live, inputs, exact=False)


@pytest.mark.parametrize("what", ["weight", "variance"])
def test_statistics_written_between_the_two(what):
    def moved(x, w, mean, var):
        y = torch.conv2d(x, w)
        (w if what == "weight" else var).zero_()
        return F.batch_norm(y, mean, var, eps=1e-2)

    def inputs():
        return [torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4), torch.rand(4) + 0.5]

    graph = captured(moved, inputs())
    for rule in (FOLD, FOLD_LIVE):
        same, fired = fold(graph, rule)
        assert fired == 0
        assert_same(graph, same, inputs)


def test_what_would_overflow_stays():
    module = lived(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))).half()
    graph = captured(module, [torch.randn(2, 3, 5, 5).half()], "modules")
    with torch.no_grad():
        assert fold(graph)[1] == 1, "the numbers are known to fit"
    module[1].running_var.zero_()
    module[1].weight.data.fill_(3e4)
    graph = captured(module, [torch.randn(2, 3, 5, 5).half()], "modules")
    with torch.no_grad():
        assert fold(graph)[1] == 0


def test_a_hook_or_a_parametrisation_keeps_the_layer_whole():
    x = torch.randn(2, 3, 5, 5)
    hooked = lived(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    hooked[0].register_forward_hook(lambda module, given, result: result * 2)
    normed = lived(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 1)), nn.BatchNorm2d(4)))
    for module in (hooked, normed):
        gm = torch.fx.symbolic_trace(module)
        expected = gm(x)
        with torch.no_grad():
            pre_grad_passes(gm, [x], Options(freeze=True, strict=True))
        assert not [node for node in gm.graph.nodes if "conv_bn" in str(node.target)]
        torch.testing.assert_close(gm(x), expected, rtol=0, atol=0)


@since(2, 13)
def test_a_batch_of_any_size():
    torch._dynamo.mark_dynamic(x := torch.randn(3, 3, 6, 6), 0)
    module = lived(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    with torch.no_grad():
        compiled = torch.compile(module, backend="ferrite", options={"freeze": True, "strict": True})
        torch.testing.assert_close(compiled(x), module(x))
        assert ferrite.last_compile().rewrites["fold_conv_bn"] == 1


def test_other_layouts_and_an_empty_batch():
    module = lived(nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.BatchNorm2d(4)))
    wide = torch.randn(2, 6, 6, 3).permute(0, 3, 1, 2)
    for x in (wide, torch.randn(0, 3, 6, 6), torch.randn(2, 3, 6, 12)[..., ::2]):
        with torch.no_grad():
            assert_same_as_eager(
                module, lambda x=x: [x.clone(memory_format=torch.preserve_format)], options={"freeze": True}
            )
            assert ferrite.last_compile().rewrites["fold_conv_bn"] == 1


@pytest.mark.parametrize("rule", [FOLD, FOLD_LIVE])
def test_a_flag_that_is_only_known_at_run_time(rule):
    def fn(x, w, mean, var, training):
        return F.batch_norm(torch.conv2d(x, w), mean, var, training=training)

    inputs = [torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4), torch.rand(4) + 0.5, False]
    graph = captured(fn, inputs, "modules")
    assert fold(graph, rule)[1] == 0


def test_an_operator_of_the_users_that_writes():
    """Dynamo keeps `torch.ops.library.name` as it was called; only its overload says that it writes."""
    library = torch.library.Library("ferrite_conv_bn", "DEF")
    library.define("double(Tensor(a!) x) -> ()")

    def double(x):
        x.mul_(2)

    library.impl("double", double, "CompositeExplicitAutograd")

    def fn(x, w, mean, var):
        y = torch.conv2d(x, w)
        torch.ops.ferrite_conv_bn.double(var)
        return F.batch_norm(y, mean, var)

    def inputs():
        return [torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4), torch.rand(4) + 0.5]

    graph = captured(fn, inputs())
    same, fired = fold(graph, FOLD_LIVE)
    assert fired == 0
    assert_same(graph, same, inputs)
    library._destroy()


def test_inside_autocast():
    module = lived(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    with torch.no_grad():
        assert_same_as_eager(fn, lambda: [torch.randn(2, 3, 6, 6)], options={"eval_conv_bn": True}, exact=False)
    assert "eval_conv_bn" not in ferrite.last_compile().rewrites, "the dtypes there are not the parameters'"


@since(2, 13)  # before, torch itself refuses it
def test_an_epsilon_of_zero_is_left():
    def fn(x, w, mean, var, gamma, beta):
        return F.batch_norm(torch.conv2d(x, w), mean, var, gamma, beta, eps=0.0)

    for rule in (FOLD, FOLD_LIVE):
        graph = captured(fn, conv_inputs())
        (miss,) = why(graph.gm, rule, Options(freeze=rule is FOLD, eval_conv_bn=True))
        assert miss.reason
