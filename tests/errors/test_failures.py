"""When a stage fails: eager and one warning by default, a CompilerBug with `strict`, a repro folder either way."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

import ferrite
from ferrite.lower import lower_graph
from ferrite.lower.walk import Walk
from ferrite.options import STAGES as ALL_STAGES
from ferrite.options import resolve
from tests.fresh_process import run_python

STAGES = [stage for stage in ALL_STAGES if stage != "freeze"]  # for inference alone: see contract/test_freezing.py
EXECUTORS = ("native", "calls", "interpreter")
# Something that every stage needs, whatever the executor.
PATCHABLE = {
    "lower": "ferrite.backend.lower_graph",
    "schedule": "ferrite.backend.make_plan",
    "codegen": "ferrite.targets.executable.print_host",
    "load": "ferrite.backend.load_host",
    "cache": "ferrite.backend.Places",
}


def model(x, w):
    hidden = torch.tanh(x @ w)
    return hidden.sum()


def inputs():
    torch.manual_seed(0)
    return torch.randn(3, 4), torch.randn(4, 5, requires_grad=True)


def run_and_differentiate(fn):
    x, w = inputs()
    out = fn(x, w)
    out.backward()
    return out.detach(), w.grad


def assert_like_eager(compiled):
    """Equal to the bit, as what runs in eager is."""
    ours, eager = run_and_differentiate(compiled), run_and_differentiate(model)
    assert all(map(torch.equal, ours, eager))


@pytest.mark.quick
@pytest.mark.parametrize("stage", STAGES)
def test_by_default_a_failing_stage_costs_speed_and_one_warning(stage, tmp_path):
    compiled = torch.compile(model, backend="ferrite", options={"fail_at": stage, "repro_dir": str(tmp_path)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_like_eager(compiled)
        assert_like_eager(compiled)
    ours = [str(w.message) for w in caught if issubclass(w.category, ferrite.FerriteWarning)]
    whole = ("pre_grad", "capture", "joint", "partition")
    graphs = 1 if stage in whole else 2  # the forward and the backward graph each fail
    assert len(ours) == graphs
    for message in ours:
        assert message.startswith(f"ferrite: stage {stage!r} failed")
        assert "hidden = torch.tanh(x @ w)" in message  # the model line
        assert f"asked to fail at {stage!r}" in message
        assert str(tmp_path) in message
        assert "runs in eager" in message
    record = ferrite.last_compile()
    assert all(f"stage {stage!r} failed" in graph.failure for graph in record.graphs)
    assert {call.reason for call in record.eager_calls} == {f"stage {stage!r} failed"}


@pytest.mark.quick
@pytest.mark.parametrize("stage", STAGES)
def test_strict_raises_a_compiler_bug(stage):
    with pytest.raises(ferrite.CompilerBug) as caught:
        run_and_differentiate(torch.compile(model, backend="ferrite", options={"fail_at": stage, "strict": True}))
    bug = caught.value
    assert bug.stage == stage
    assert bug.headline == f"stage {stage!r} failed"
    assert bug.lines["in your model"].endswith("hidden = torch.tanh(x @ w)")
    assert Path(bug.repro).is_dir()
    assert isinstance(bug.cause, RuntimeError)


@pytest.mark.parametrize("executor", ["native", "calls"])
@pytest.mark.parametrize("stage", PATCHABLE)
def test_an_unforeseen_exception_is_a_failure_of_its_stage(executor, stage, monkeypatch, tmp_path):
    def broken(*_args, **_settings):
        raise IndexError("an index of our own")  # Dynamo would take one that leaves the backend as the user's

    monkeypatch.setattr(PATCHABLE[stage], broken)
    options = {"repro_dir": str(tmp_path), "executor": executor}
    with pytest.warns(ferrite.FerriteWarning, match=f"stage {stage!r} failed"):
        assert_like_eager(torch.compile(model, backend="ferrite", options=options))
    torch.compiler.reset()
    with pytest.raises(ferrite.CompilerBug, match="IndexError: an index of our own") as caught:
        run_and_differentiate(torch.compile(model, backend="ferrite", options={"strict": True, "executor": executor}))
    assert caught.value.stage == stage


@pytest.mark.quick
def test_a_kernel_that_llvm_refuses_is_a_failure_of_codegen(monkeypatch, tmp_path):
    monkeypatch.setattr("ferrite.runtime.cpu.kernels.kernel_text", lambda kernel, target, name: "no LLVM at all")

    def unlike_any_other(x):  # a kernel that no other test has compiled in this process
        return (x * 0.123 + 4.567).sin()

    compiled, x = (
        torch.compile(unlike_any_other, backend="ferrite", options={"repro_dir": str(tmp_path)}),
        torch.rand(3),
    )
    with pytest.warns(ferrite.FerriteWarning, match="stage 'codegen' failed"):
        ours = compiled(x)
    assert torch.equal(ours, unlike_any_other(x))
    (graph,) = ferrite.last_compile().graphs
    assert "stage 'codegen' failed" in graph.failure


@pytest.mark.quick
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_failing_node_is_named_by_its_own_line(executor, monkeypatch):
    original = Walk.lower_node

    def broken(self, node):
        if node.target is torch.ops.aten.sum.default:
            raise KeyError("no lowering")
        return original(self, node)

    monkeypatch.setattr(Walk, "lower_node", broken)
    with pytest.raises(ferrite.CompilerBug) as caught:
        torch.compile(model, backend="ferrite", options={"strict": True, "executor": executor})(*inputs())
    assert caught.value.lines["in your model"].endswith("return hidden.sum()")
    assert caught.value.lines["because"] == "KeyError: 'no lowering'"


@pytest.mark.quick
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_failing_backward_graph_leaves_the_forward_graph_compiled(executor, monkeypatch, tmp_path):
    def only_forward(graph, *about):
        if graph.kind.value == "backward":
            raise ValueError("backward only")
        return lower_graph(graph, *about)

    monkeypatch.setattr("ferrite.backend.lower_graph", only_forward)
    options = {"repro_dir": str(tmp_path), "executor": executor}
    with pytest.warns(ferrite.FerriteWarning, match="backward only"):
        ours = run_and_differentiate(torch.compile(model, backend="ferrite", options=options))
    torch.testing.assert_close(ours, run_and_differentiate(model), rtol=1e-6, atol=1e-6)
    forward, backward = ferrite.last_compile().graphs
    assert (forward.kind, forward.failure) == ("forward", None)
    assert forward.source
    assert bool(forward.kernels) == (executor == "native")
    assert backward.kind == "backward"
    assert "backward only" in backward.failure
    torch.compiler.reset()
    with pytest.raises(ferrite.CompilerBug, match="backward only"):
        run_and_differentiate(torch.compile(model, backend="ferrite", options={"strict": True, "executor": executor}))


def replay(folder: Path) -> CompletedProcess[str]:
    env = {**os.environ, "FERRITE_CACHE_DIR": str(folder / "cache")}
    return run_python(str(folder / "run.py"), env=env, cwd="/")


@pytest.mark.parametrize("stage", [pytest.param("capture", marks=pytest.mark.slow), "codegen"])
def test_a_repro_folder_shows_the_same_failure_by_itself(stage, tmp_path):
    options = {"fail_at": stage, "repro_dir": str(tmp_path)}
    with pytest.warns(ferrite.FerriteWarning):
        assert_like_eager(torch.compile(model, backend="ferrite", options=options))
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [
        "about.json",
        "error.txt",
        "failing.txt",
        "graph.py",
        "run.py",
    ]
    done = replay(folder)
    assert done.returncode == 1, done.stderr
    assert f"CompilerBug: stage {stage!r} failed" in done.stdout
    assert f"asked to fail at {stage!r}" in done.stdout
    assert not (folder / "cache").exists()  # replaying keeps nothing
    about = json.loads((folder / "about.json").read_text())
    assert about["stage"] == stage
    assert about["versions"]["torch"] == torch.__version__
    in_force = {name: value for name, value in resolve().changed().items() if name != "cache_dir"}
    assert about["options"] == {**in_force, "fail_at": stage}


@pytest.mark.slow
def test_a_repro_of_a_failure_that_is_gone_says_so(tmp_path, monkeypatch):
    def broken(*args):
        raise ValueError("only in this process")

    monkeypatch.setattr("ferrite.targets.executable.print_host", broken)
    with pytest.warns(ferrite.FerriteWarning):
        torch.compile(model, backend="ferrite", options={"repro_dir": str(tmp_path)})(*inputs())
    (folder,) = tmp_path.iterdir()
    done = replay(folder)
    assert (done.returncode, done.stdout) == (0, "no failure: this version compiles the graph\n"), done.stderr


def test_a_repro_covers_sub_graphs_constants_and_symbolic_sizes(tmp_path):
    scale = torch.tensor([2.0, 3.0, 4.0])

    def branching(x):
        y = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        return y * scale, x.shape[0]

    options = {"fail_at": "codegen", "repro_dir": str(tmp_path)}
    x = torch.randn(5, 3)
    with pytest.warns(ferrite.FerriteWarning):
        y, rows = torch.compile(branching, backend="ferrite", dynamic=True, options=options)(x)
    assert torch.equal(y, branching(x)[0])
    assert rows == 5
    (folder,) = tmp_path.iterdir()
    done = replay(folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "CompilerBug: stage 'codegen' failed" in done.stdout


@pytest.mark.quick
def test_a_repro_holds_no_tensor_contents(tmp_path):
    secret = torch.full((2, 3), 12345.678)
    options = {"fail_at": "lower", "repro_dir": str(tmp_path)}
    with pytest.warns(ferrite.FerriteWarning):
        torch.compile(lambda x: x + secret, backend="ferrite", options=options)(torch.full((2, 3), 98765.432))
    (folder,) = tmp_path.iterdir()
    text = "".join(path.read_text() for path in folder.iterdir())
    assert "12345" not in text
    assert "98765" not in text
    assert "shape=(2, 3), stride=(3, 1), dtype=torch.float32" in text


@pytest.mark.quick
def test_equal_failures_share_a_folder(tmp_path):
    options = {"fail_at": "lower", "repro_dir": str(tmp_path)}
    for _ in range(2):
        torch.compiler.reset()
        with pytest.warns(ferrite.FerriteWarning):
            torch.compile(model, backend="ferrite", options=options)(*inputs())
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.quick
def test_a_repro_can_be_declined(tmp_path):
    options = {"fail_at": "lower", "repro_dir": str(tmp_path), "keep_repro": False}
    with pytest.warns(ferrite.FerriteWarning) as caught:
        torch.compile(model, backend="ferrite", options=options)(*inputs())
    assert "kept" not in str(caught[0].message)
    assert not list(tmp_path.iterdir())


@pytest.mark.quick
def test_an_unwritable_repro_folder_degrades_with_one_warning(tmp_path):
    blocked = tmp_path / "a file, not a folder"
    blocked.write_text("")
    options = {"fail_at": "lower", "repro_dir": str(blocked)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_like_eager(torch.compile(model, backend="ferrite", options=options))
    messages = [str(w.message) for w in caught if issubclass(w.category, ferrite.FerriteWarning)]
    assert sum("could not keep a repro folder" in message for message in messages) == 1
    assert sum(message.startswith("ferrite: stage 'lower' failed") for message in messages) == 2


def failing_in(folder: Path) -> list[str]:
    """The messages of a function whose stage fails, with repros kept in a folder; it gives what eager gives."""
    torch.compiler.reset()
    options = {"fail_at": "lower", "repro_dir": str(folder)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = torch.ones(3)
        assert torch.equal(torch.compile(torch.sin, backend="ferrite", options=options)(x), torch.sin(x))
    return [str(w.message) for w in caught if issubclass(w.category, ferrite.FerriteWarning)]


@pytest.mark.quick
def test_a_repro_is_kept_where_nobody_else_can_write(tmp_path):
    (message,) = failing_in(tmp_path / "mine")
    assert "kept" in message
    (folder,) = (tmp_path / "mine").iterdir()
    assert {path.stat().st_mode & 0o777 for path in (folder, tmp_path / "mine")} == {0o700}
    shared = tmp_path / "shared"
    shared.mkdir()
    for mode, kept in ((0o1777, True), (0o777, False)):
        shared.chmod(mode)
        messages = failing_in(shared)
        assert any(f"kept            {shared}" in each for each in messages) == kept
        assert any("could not keep a repro folder" in each for each in messages) != kept


@pytest.mark.quick
def test_a_folder_that_somebody_planted_is_no_repro(tmp_path):
    """Whoever knows its name could have put a run.py there, or a link to a folder of the user's."""
    assert len(failing_in(tmp_path / "first")) == 1
    (folder,) = (tmp_path / "first").iterdir()
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    for path in (shared, victim):
        path.mkdir()
    shared.chmod(0o1777)
    (shared / folder.name).symlink_to(victim)
    assert any("is not a folder" in each for each in failing_in(shared))
    assert list(victim.iterdir()) == []
    (shared / folder.name).unlink()
    (shared / folder.name).mkdir()
    (shared / folder.name).chmod(0o777)
    assert any("can be written by others" in each for each in failing_in(shared))
    (tmp_path / "link").symlink_to(victim)
    assert any("is not a folder" in each for each in failing_in(tmp_path / "link"))
    assert list(victim.iterdir()) == []


def test_nothing_compiled_yet_is_said_plainly():
    code = "import ferrite\ntry: ferrite.last_compile()\nexcept ferrite.FerriteError as e: print(e)"
    done = run_python("-c", code)
    assert done.stdout.startswith("nothing has been compiled yet\n  to change that")


@pytest.mark.quick
def test_messages_leave_out_what_is_not_known():
    assert str(ferrite.UserError("headline", {"a": None, "b": "", "c": "x\ny"})) == (
        "headline\n  c               x\n                  y"
    )
