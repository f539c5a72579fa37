"""Calls that are there for what they do: ordered effects, user kernels, random states, wrappers, objects."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.nn.attention.flex_attention import flex_attention

from ferrite.capture import torch_api, torch_operators
from ferrite.ir.program.interpret import interpret
from ferrite.ir.program.nodes import Invoke, UserKernel, call_of
from ferrite.lower.effects import ORDERED, RANDOM, effect_of
from ferrite.lower.graph import lower_module
from tests.compare import compile_strict, since
from tests.lower.lowered import INTERPRETER, assert_lowered, calls, operations, programs, traced

aten = torch.ops.aten
SEEN: list[float] = []


@torch.library.custom_op("lower_effects::note", mutates_args=())
def note(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(float(x.sum()))
    return x.clone()


@note.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_register_effectful_op(torch.ops.lower_effects.note.default, _EffectType.ORDERED)


@torch.library.custom_op("lower_effects::say", mutates_args=())
def say(x: torch.Tensor) -> None:
    SEEN.append(float(x.sum()))


@say.register_fake
def _(x: torch.Tensor) -> None:
    return None


def test_ordered_calls_keep_their_order_though_nobody_reads_them() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        note(x)
        note(x * 2)
        return x + 1

    compiled = compile_strict(fn, options=INTERPRETER, fullgraph=True)
    SEEN.clear()
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert SEEN == [2.0, 4.0]
    (program,) = programs()
    assert [call.effect for call in calls(program)] == [ORDERED, ORDERED]


def test_a_call_without_results_is_kept() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.ops.lower_effects.say(x * 3)
        return x + 1

    lowered = lower_module(traced(fn, torch.ones(2)))
    (call,) = calls(lowered.program)
    assert call.effect == ORDERED


def test_what_calls_do_besides_their_results() -> None:
    assert effect_of(aten.bernoulli.p, (), {}) == RANDOM
    assert effect_of(aten.mm.default, (), {}) is None
    assert effect_of(aten._assert_async.msg, (), {}) == ORDERED
    assert effect_of(torch_operators.higher_order("run_with_rng_state"), (), {}) == RANDOM
    assert effect_of(torch_operators.higher_order("cond"), (traced(lambda x: x + 1, torch.ones(2)),), {}) is None
    assert effect_of(torch_operators.higher_order("cond"), (traced(torch.rand_like, torch.ones(2)),), {}) == RANDOM


def test_a_random_state_that_is_saved_and_used_again() -> None:
    save = torch_operators.higher_order("run_and_save_rng_state")
    again = torch_operators.higher_order("run_with_rng_state")

    def fn(x: torch.Tensor, state: torch.Tensor) -> Any:
        return again(state, aten.bernoulli.p, x, 0.5), save(aten.bernoulli.p, x, 0.5)[1]

    lowered = lower_module(traced(fn, torch.ones(32), torch.get_rng_state()))
    assert [call.effect for call in calls(lowered.program)] == [RANDOM, RANDOM]
    state = torch.get_rng_state()
    first, second = interpret(lowered.program, [torch.ones(32), state], lowered.objects)
    assert torch.equal(first, second)


def test_kernels_of_the_user_may_write_every_tensor_they_are_given() -> None:
    """No kernel can be launched without a GPU: what the program says of one is what counts."""
    graph = torch.fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for node in (x, y):
        node.meta["val"] = mode.from_tensor(torch.ones(4))
    before = graph.call_function(aten.mul.Tensor, (y, 2))
    before.meta["val"] = mode.from_tensor(torch.ones(4))
    about = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}
    kernel = torch_operators.higher_order("triton_kernel_wrapper_mutation")
    graph.call_function(kernel, (), {**about, "kwargs": {"source": x, "target": y}}).meta["val"] = None
    after = graph.call_function(aten.add.Tensor, (before, y))
    after.meta["val"] = mode.from_tensor(torch.ones(4))
    graph.output((after,))
    program = lower_module(torch.fx.GraphModule(torch.nn.Module(), graph)).program
    first, launch, last = program.operations
    assert isinstance(launch, UserKernel)
    assert launch.call.writes == ("x", "y")
    assert call_of(first) is None, "what was read before the launch is computed before it"
    assert call_of(last) is None


@pytest.mark.parametrize("name", ["wrap", "invoke_quant"])
def test_wrappers_around_a_graph_are_calls_of_it(name: str) -> None:
    wrapper = torch_operators.higher_order(name)
    body = traced(lambda x: x.sin() + 1, torch.ones(3))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = body.graph.find_nodes(op="placeholder")[0].meta["val"]
    inner = graph.get_attr("body")
    call = graph.call_function(wrapper, (inner, x))
    call.meta["val"] = (x.meta["val"],)
    item = graph.call_function(torch.ops.aten.neg.default, (graph.call_function(operator.getitem, (call, 0)),))
    item.meta["val"] = x.meta["val"]
    graph.output((item,))
    program = lower_module(torch.fx.GraphModule({"body": body}, graph)).program
    assert len(operations(program, Invoke)) == 1
    assert not calls(program)


def test_ranges_of_the_profiler_stay_where_they_are() -> None:
    for name in ("_record_function_enter_new.default", "_record_function_exit._RecordFunction"):
        assert effect_of(torch_api.find_operator(f"profiler.{name}"), (), {}) == ORDERED


def test_attention_with_a_function_on_its_scores_is_products_and_loops() -> None:
    bias = torch.randn(2, 16)

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, score_mod=lambda score, b, h, m, n: score * 2 + (m - n) + bias[h, n])

    inputs = [torch.randn(1, 2, 16, 8) for _ in range(3)]
    compiled = compile_strict(fn, options=INTERPRETER, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), fn(*inputs))
    program = programs()[-1]
    assert {call.operator for call in calls(program)} == {"aten.bmm.default"}


@since(2, 13)  # tracing a generator
def test_objects_pass_through_to_the_calls_that_know_them() -> None:
    generator = torch.Generator()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.bernoulli.p(x, 0.5, generator=generator)

    generator.manual_seed(3)
    lowered = lower_module(traced(fn, torch.ones(16)))
    (call,) = calls(lowered.program)
    assert call.effect == RANDOM
    generator.manual_seed(3)
    (mine,) = interpret(lowered.program, [torch.ones(16)], lowered.objects)
    generator.manual_seed(3)
    assert torch.equal(mine, fn(torch.ones(16)))


def test_tokens_are_nothing() -> None:
    program = assert_lowered(
        lambda x: torch.ops.aten._functional_assert_async(x.sum(), "zero", torch.ones(1)), torch.ones(3)
    )
    assert not calls(program)
