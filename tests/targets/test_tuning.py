"""Measurements that decide: what passes make of them, which records are used, and trials of configurations."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.errors import Refusal
from ferrite.options import Options
from ferrite.passes.post_grad import own_products
from ferrite.pipeline import PassContext
from ferrite.targets import tuner_for, tuning
from ferrite.targets.cuda import CudaTarget
from ferrite.targets.trials import compiled_trials, reason_against
from ferrite.tune import Measured, ProductConfig, ProductProblem, Record, Where, configurations, parsed
from tests.targets.test_cuda_devices import gpus  # noqa: F401  # a fixture

HERE = Where("a GPU", "3", "2")
CONFIG = ProductConfig(16, 32, 16, 4, 3)
PROBLEM = ProductProblem("bf16", 1, 64, 4096, 48, "summed", "summed")
FASTER, SLOWER = Measured(12.0, 9.0, CONFIG), Measured(12.0, 12.1, CONFIG)


def pictured(function, *sizes):
    """The graph of a function of tensors on a GPU that need not be there."""
    with FakeTensorMode():
        given = [torch.empty(*each, dtype=torch.bfloat16, device="cuda:0") for each in sizes]
        return make_fx(function, tracing_mode="fake")(*given)


def linear(x, weight):
    return x @ weight.t()


# --- what passes decide -----------------------------------------------------------------------------------------------


def taken(function, times, **options):
    graph = pictured(function, (64, 48), (4096, 48))
    asked = []
    context = PassContext(Options(**options), times=lambda problem: asked.append(problem) or times)
    return own_products.function(graph, context), asked


@pytest.mark.quick
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (2, 0)])
def test_where_factors_may_be_rounded_a_single_row_is_not(monkeypatch, rows, count):
    monkeypatch.setattr("ferrite.capture.product_libraries.may_round_operands", lambda device: True)
    with FakeTensorMode():
        given = [torch.empty(*each, device="cuda:0") for each in ((rows, 48), (4096, 48))]
        graph = make_fx(linear, tracing_mode="fake")(*given)
    assert own_products.function(graph, PassContext(Options(own_products="always"))) == count


@pytest.mark.quick
def test_what_was_measured_decides():
    assert taken(linear, FASTER) == (1, [PROBLEM])
    assert taken(linear, SLOWER) == (0, [PROBLEM])
    assert taken(linear, None) == (0, [PROBLEM])
    assert taken(linear, SLOWER, own_products="always") == (1, [])
    assert taken(linear, FASTER, own_products="off") == (0, [])


@pytest.mark.quick
def test_what_follows_element_by_element_saves_the_way_through_memory():
    level = Measured(12.0, 11.8, CONFIG)
    assert taken(lambda x, w: linear(x, w).relu(), level)[0] == 1
    assert taken(lambda x, w: linear(x, w).view(2, 32, 4096) * 2, level)[0] == 1
    assert taken(lambda x, w: linear(x, w).softmax(-1), level)[0] == 0


# --- records ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(tuning, "where", lambda: HERE)
    tuning.warn_of_record.cache_clear()
    return {"cuda": CudaTarget()}


@pytest.mark.quick
def test_a_record_is_replayed(a_gpu, tmp_path):
    file = tmp_path / "record.txt"
    file.write_text(str(Record(HERE, {PROBLEM: FASTER})))
    tuner = tuner_for(Options(tuning=file), a_gpu)
    assert tuner(PROBLEM) == FASTER
    assert tuner(PROBLEM.in_pieces(2)) is None, "nothing is measured"
    assert tuner.configurations == {PROBLEM: CONFIG}
    assert tuner_for(Options(tuning=file, own_products="off"), a_gpu) is None


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (str(Record(Where("another GPU", "3", "2"), {PROBLEM: FASTER})), "gpu another GPU, and here it is a GPU"),
        (str(Record(Where("a GPU", "4", "2"))), "triton 4"),
        ("nonsense", "line 1"),
        (None, "No such file"),
    ],
    ids=["gpu", "version", "text", "missing"],
)
def test_a_record_of_something_else_is_refused_with_a_reason(a_gpu, tmp_path, text, reason):
    file = tmp_path / "record.txt"
    if text is not None:
        file.write_text(text)
    with pytest.warns(UserWarning, match=reason):
        tuner = tuner_for(Options(tuning=file), a_gpu)
    assert tuner(PROBLEM) is None


@pytest.mark.quick
def test_without_a_gpu_a_record_is_refused(a_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="no GPU is here"):
        assert tuner_for(Options(tuning=tmp_path / "record.txt"), {}) is None


@pytest.mark.quick
def test_what_is_measured_is_added_to_the_file(a_gpu, tmp_path, monkeypatch):
    file, other = tmp_path / "new" / "record.txt", PROBLEM.in_pieces(2)
    asked = []
    monkeypatch.setattr(tuning, "measured", lambda problem, target: asked.append(problem) or FASTER)
    monkeypatch.setattr(tuning, "_measured", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for problem in (PROBLEM, PROBLEM, other):
        tuner = tuner_for(Options(tuning=file, max_autotune=True), a_gpu)
        assert tuner(problem) == FASTER
    assert asked == [PROBLEM, other]
    assert parsed(file.read_text()) == Record(HERE, {PROBLEM: FASTER, other: FASTER})


# --- trials -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_trials_have_the_configurations_that_they_are_given(gpus):  # noqa: F811
    graph = pictured(lambda x, w: [torch.ops.ferrite.product(x, w.t())], (20, 64), (40, 64))
    problem = ProductProblem("bf16", 1, 20, 40, 64, "summed", "summed")
    configs = [CONFIG, ProductConfig(32, 16, 32, 2, 2, pieces=2)]
    tables = [configurations({problem: Measured(0, 0, config)}) for config in configs]
    given = [torch.randn(20, 64).bfloat16(), torch.randn(40, 64).bfloat16()]
    exact, launched = given[0].double() @ given[1].double().t(), []
    for trial in compiled_trials(graph, gpus, tables):
        assert not isinstance(trial, Refusal)
        before = len(gpus.simulated.launched)
        results = trial(*given)
        launched.append(len(gpus.simulated.launched) - before)
        assert not reason_against(results, [exact], [0.05])
        assert "away" in str(reason_against(results, [exact + 1], [0.05]))
    assert launched == [1, 2]
