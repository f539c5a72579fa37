"""Operators of a library in the place of torch's: per compile, where they were measured to be faster."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite
from ferrite.errors import UserError
from ferrite.options import Options
from ferrite.pipeline import PassContext
from ferrite.targets import call_trials, tuning
from ferrite.tune import CallProblem, CallTimes, Record, Where, parsed
from tests.compare import assert_same_as_eager

aten = torch.ops.aten
HERE = Where("a GPU", "3", "2")


@torch.library.custom_op("ferrite_tests::own_mm", mutates_args=())
def own_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@own_mm.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@torch.library.custom_op("ferrite_tests::wrong_mm", mutates_args=())
def wrong_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b + 1


@wrong_mm.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


OWN = torch.ops.ferrite_tests.own_mm.default


def few_rows(a, b):
    return len(a) <= 16


ALWAYS = ferrite.candidate(aten.mm.default, OWN, when=few_rows, taken="always")


def model(x, w):
    return (x.tanh() @ w).relu()


@pytest.mark.parametrize(("rows", "taken"), [(4, 1), (32, 0)])
def test_a_candidate_takes_the_place_of_torchs_operator(rows, taken):
    options = {"passes": (ALWAYS,)}
    assert_same_as_eager(model, lambda: [torch.randn(rows, 24), torch.randn(24, 8)], options=options)
    assert ferrite.last_compile().rewrites.get(str(OWN), 0) == taken


def test_what_was_compiled_with_a_candidate_is_kept_for_it_alone(tmp_path, fresh_compiler):
    x, w, outcomes = torch.randn(4, 24), torch.randn(24, 8), []
    other = ferrite.candidate(aten.mm.default, OWN, when=lambda a, b: len(a) <= 8, taken="always")
    for passes in ((ALWAYS,), (ALWAYS,), (), (other,)):
        torch.compiler.reset()
        settings = {"strict": True, "cache": True, "cache_dir": tmp_path, "passes": passes}
        torch.compile(model, backend="ferrite", options=settings)(x, w)
        outcomes.append(ferrite.last_compile().cache[-1].result)
    assert outcomes == ["miss", "hit", "miss", "miss"]


def rewritten(times, problems=None, candidate=OWN, **more):
    graph = make_fx(lambda a, b: a @ b.t(), tracing_mode="fake")(torch.randn(4, 24), torch.randn(8, 24))
    step = ferrite.candidate(aten.mm.default, candidate, **more)
    asked = [] if problems is None else problems
    return step.function(graph, PassContext(Options(), times=lambda problem: asked.append(problem) or times))


@pytest.mark.quick
def test_what_was_measured_decides():
    problems: list[CallProblem] = []
    assert rewritten(CallTimes(10.0, 8.0), problems) == 1
    operands = ("f32[4, 24]", "f32[24, 8] strides (1, 24)")
    assert problems == [CallProblem("ferrite_tests.own_mm.default", "aten.mm.default", operands)]
    assert rewritten(CallTimes(10.0, 9.9)) == 0
    assert rewritten(None) == 0


@pytest.mark.quick
def test_a_record_has_calls_too():
    problem = CallProblem("lib.op.default", "aten.addmm.default", ("f32[8]", "bf16[8, 4] strides (1, 8)", "beta=2.5"))
    record = Record(HERE, {}, {problem: CallTimes(10.0, 8.5)})
    assert parsed(str(record)) == record
    assert record.find(problem) == CallTimes(10.0, 8.5)
    assert Record(HERE).merged(record).calls == record.calls


@pytest.mark.quick
def test_operands_are_made_of_their_looks():
    texts = ("bf16[8, 4] strides (1, 8)", "i64[3]", "[1, 2]", "beta=2.5")
    (x, index, sizes), named = call_trials.operands_of(CallProblem("a", "b", texts), "cpu")
    assert (x.dtype, x.shape, x.stride()) == (torch.bfloat16, (8, 4), (1, 8))
    assert x.unique().numel() > 8
    assert index.tolist() == [0, 0, 0]
    assert (sizes, named) == ([1, 2], {"beta": 2.5})


@pytest.mark.quick
def test_what_gives_other_numbers_is_no_candidate():
    given = [torch.randn(4, 24).bfloat16(), torch.randn(24, 8).bfloat16()]
    assert not call_trials.reason_against_results(aten.mm.default, OWN, given, {})
    wrong = torch.ops.ferrite_tests.wrong_mm.default
    assert "away" in str(call_trials.reason_against_results(aten.mm.default, wrong, given, {}))
    other_type = call_trials.reason_against_results(aten.mm.default, lambda a, b: (a @ b).float(), given, {})
    assert "another type" in str(other_type)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_max_autotune_measures_it_once_and_the_record_is_replayed(tmp_path, monkeypatch, fresh_compiler):
    from tests.targets.simulated_cuda import SimulatedTarget

    target, asked = SimulatedTarget(), []
    monkeypatch.setattr("ferrite.backend.targets_for", lambda options, devices: {"cuda": target})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tuning, "measured_call", lambda problem: asked.append(problem) or CallTimes(9.0, 6.0))
    monkeypatch.setattr(tuning, "_measured", {})
    monkeypatch.setattr(tuning, "where", lambda: HERE)
    mine, file = ferrite.candidate(aten.mm.default, OWN), tmp_path / "record.txt"
    given = torch.empty(4, 24, device="meta"), torch.empty(24, 8, device="meta")
    for more in ({"max_autotune": True}, {}):
        torch.compiler.reset()
        settings = {"strict": True, "cache": False, "passes": (mine,), "tuning": file, **more}
        torch.compile(model, backend="ferrite", options=settings)(*given)
        assert ferrite.last_compile().rewrites[str(OWN)] == 1
    assert len(asked) == 1
    assert parsed(file.read_text()).calls == {asked[0]: CallTimes(9.0, 6.0)}


@pytest.mark.quick
def test_what_is_no_operator_is_told():
    with pytest.raises(UserError, match="no operator"):
        ferrite.candidate(torch.mm, OWN)
    with pytest.raises(UserError, match="sometimes"):
        ferrite.candidate(aten.mm.default, OWN, taken="sometimes")
