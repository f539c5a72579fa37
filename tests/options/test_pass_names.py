"""`skip` and `extra`: which names lead to a pass, what they do, and what the record says."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ferrite
from ferrite.errors import UserError
from ferrite.options import Options, resolve
from ferrite.passes import PIPELINES, PRE_GRAD, checked_options, pre_grad_passes
from ferrite.passes.names import SHORT_NAMES
from ferrite.passes.pre_grad.metadata import add_values
from ferrite.pipeline import PassContext, Pipeline, run_pipeline

PASSES = {step.name for pipeline in PIPELINES for step in pipeline.passes}


def skipped(*names):
    return checked_options(Options(skip=names)).skip


@pytest.mark.quick
def test_every_name_of_a_pass_leads_to_it():
    for name in PASSES:
        assert skipped(name) == (name,)
        assert skipped(f"  {name.replace('_', '-')} ") == (name,)
    assert skipped("remove_noop") == ("remove_noop_pass",)
    assert skipped("fold-conv-bn", "gumbel_argmax") == ("fuse_conv_bn", "apply_gumbel_max_trick")


@pytest.mark.quick
@pytest.mark.parametrize("short", SHORT_NAMES)
def test_every_short_name_leads_to_passes(short):
    assert skipped(short) == SHORT_NAMES[short]


@pytest.mark.quick
def test_blanks_and_repetitions_do_not_count():
    assert skipped("", " ", "remove-noop", "remove_noop_pass ") == ("remove_noop_pass",)
    assert checked_options(resolve(environ={"FERRITE_SKIP": " remove-noop,, ,sink-cat"})).skip == skipped(
        "remove_noop_pass", "sink-cat"
    )


@pytest.mark.quick
@pytest.mark.parametrize("option", ["skip", "extra"])
def test_an_unknown_name_is_an_error_with_the_nearest(option):
    with pytest.raises(UserError) as caught:
        ferrite.compile(lambda x: x, **{option: ["remove_nop_pass"]})
    assert f"option '{option}' names 'remove_nop_pass'" in str(caught.value)
    assert "did you mean    remove_noop_pass" in str(caught.value)


@pytest.mark.quick
def test_what_closes_a_stage_does_not_run_again():
    for name in ("torch_spelling", "remove_noop_ops"):
        with pytest.raises(UserError, match="no pass to run again"):
            checked_options(Options(extra=(name,)))


@pytest.mark.quick
def test_users_own_passes_can_be_skipped():
    @ferrite.graph_pass(stage="pre_grad")
    def mine(gm):
        return 0

    assert checked_options(Options(skip=("mine",), passes=(mine,))).skip == ("mine",)
    with pytest.raises(UserError, match="mine"):
        checked_options(Options(skip=("mine",)))


def names_run(fn, *inputs, **options):
    settings = checked_options(Options(strict=True, **options))
    gm = torch.fx.symbolic_trace(fn)
    add_values(gm, inputs)
    records = run_pipeline(PRE_GRAD, gm, PassContext(settings))
    return records, [record.name for record in records if not record.note]


def test_extra_runs_once_more_before_the_spelling_in_the_order_of_the_stage():
    normal = names_run(lambda x: x + 1, torch.ones(2))[1]
    wanted = ["quant-lift-up", "remove_noop", "remove_noop_pass"]
    more = names_run(lambda x: x + 1, torch.ones(2), extra=wanted)[1]
    assert more == [*normal[:-1], "remove_noop_pass", "quant_lift_up", normal[-1]]


def test_skipped_and_wanted_again_runs_at_the_end_alone():
    records, names = names_run(lambda x: x + 1, torch.ones(2), skip=["remove-noop"], extra=["remove-noop"])
    assert names.count("remove_noop_pass") == 1
    assert names[-2] == "remove_noop_pass"
    assert [record.note for record in records if record.name == "remove_noop_pass"] == ["skipped by option", ""]


# --- rounds -----------------------------------------------------------------------------------------------------------


def counting(finds: int):
    """A pass that finds something so many times, and a stage of it alone that `rounds` may repeat."""
    runs = []

    @ferrite.graph_pass(stage="pre_grad")
    def mine(gm, context):
        runs.append(len(runs))
        return int(len(runs) <= finds)

    @ferrite.graph_pass(stage="pre_grad")
    def last(gm, context):
        return 0

    return runs, Pipeline("pre_grad", (mine, last), closing="last")


@pytest.mark.quick
@pytest.mark.parametrize(("finds", "rounds", "runs"), [(9, 1, 1), (9, 4, 4), (2, 4, 3), (0, 4, 1)])
def test_a_pass_runs_until_it_finds_nothing_at_most_so_often(finds, rounds, runs):
    ran, pipeline = counting(finds)
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    add_values(gm, [torch.ones(2)])
    records = run_pipeline(pipeline, gm, PassContext(Options(strict=True, rounds={"mine": rounds})))
    assert len(ran) == runs
    assert [record.name for record in records] == ["mine"] * runs + ["last"]
    assert sum(sum(record.rewrites.values()) for record in records) == min(finds, rounds)


@pytest.mark.quick
def test_rounds_take_the_same_names_as_extra():
    options = checked_options(resolve(environ={"FERRITE_ROUNDS": "split-cat-again:3, fold-transpose:2"}))
    folds = dict.fromkeys(SHORT_NAMES["fold-transpose"], 2)
    assert {each.name: each.times for each in options.rounds} == {"split_cat_again_pass": 3, **folds}
    assert checked_options(Options(**options.changed())) == options, "what the record keeps says the same"
    assert options.code_key() != Options().code_key()
    for wrong in ("remove_noop_ops", "torch_spelling", "split_cat_agin"):
        with pytest.raises(UserError, match=f"option 'rounds' names '{wrong}', which is no pass to run again"):
            checked_options(Options(rounds={wrong: 2}))


@pytest.mark.quick
@pytest.mark.parametrize("wrong", [{"remove-noop": 0}, {"remove-noop": True}, {"remove-noop": "2"}, ["remove-noop"]])
def test_rounds_are_numbers_from_one(wrong):
    with pytest.raises(UserError, match="option 'rounds'"):
        Options(rounds=wrong)
    with pytest.raises(UserError, match="FERRITE_ROUNDS has 'remove-noop:0'"):
        resolve(environ={"FERRITE_ROUNDS": "remove-noop:0"})


# --- what the record says ---------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.norm(self.conv(x)).relu().mean((2, 3))
        a, b = torch.chunk(self.out(y.reshape(-1, 4).view(-1, 4)), 2, dim=1)
        return torch.argmax(F.softmax(torch.cat([a, b], 1), -1) / torch.empty_like(y).exponential_(1), -1)


def observed(**options):
    """Each pass that ran, with the text of the graph before and after it."""
    settings = checked_options(Options(strict=True, **options))
    gm = torch.fx.symbolic_trace(Model().eval())
    inputs = [torch.randn(2, 3, 6, 6)]
    add_values(gm, inputs)
    texts = [str(gm.graph)]
    found = []

    def look(record, now):
        texts.append(str(now.graph))
        found.append((record, texts[-2], texts[-1]))

    run_pipeline(PRE_GRAD, gm, PassContext(settings, is_inference=True), None, look)
    return found


def test_a_pass_that_says_nothing_happened_left_the_graph_alone():
    found = observed(freeze=True, kernel_rewrites="always")
    assert sum(record.changed for record, _, _ in found) >= 4
    spelling = {step.name for step in PRE_GRAD.passes if step.keeps_values}  # how calls are written does not count
    for record, before, after in found:
        assert record.name in spelling or record.changed == (before != after), record.name


def test_counts_are_those_of_the_pass_that_did_the_work():
    found = {record.name: record.rewrites for record, _, _ in observed(freeze=True, kernel_rewrites="always")}
    assert found["fuse_conv_bn"] == {"fold_conv_bn": 1}
    assert found["apply_gumbel_max_trick"] == {"gumbel_argmax": 1}
    assert not found["efficient_conv_bn_eval"]


def test_the_compile_record_adds_them_up():
    model = Model().eval()
    with torch.no_grad():
        torch.compile(model, backend="ferrite", options={"strict": True, "freeze": True})(torch.randn(2, 3, 6, 6))
        record = ferrite.last_compile()
    passes = record.passes["pre_grad"]
    assert record.rewrites["fold_conv_bn"] == sum(step.rewrites.get("fold_conv_bn", 0) for step in passes) == 1
    assert {step.name for step in passes} == {step.name for step in PRE_GRAD.passes}


def test_the_stage_runs_no_model_and_writes_no_file(tmp_path, monkeypatch):
    """Metadata comes from fakes: a graph without any is not executed, and nothing is written beside it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ran = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            tensors = [each for each in args if isinstance(each, torch.Tensor)]
            if tensors and not any(isinstance(each, torch._subclasses.FakeTensor) for each in tensors):
                ran.append(str(func))
            return func(*args, **(kwargs or {}))

    model, x = Model().eval(), torch.randn(2, 3, 6, 6)
    gm = torch.fx.symbolic_trace(model)
    with Counting():
        pre_grad_passes(gm, [x], Options(strict=True))
    assert not [name for name in ran if "conv" in name or "mm" in name or "relu" in name]
    assert os.listdir(tmp_path) == []
