"""The benchmarks run from end to end, write what can be read, and never time what is wrong. No timing is judged."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import compile_time, kernel_text, kernels, models, overhead, picture, report_cost, report_page
from bench.agreement import disagreement_of_models, largest_error
from bench.backends import in_fresh_process, with_own_code
from bench.cases import CASES, Case, tensors_of
from bench.cases.case import LARGE
from bench.fresh import first_call
from bench.measure import interleaved
from bench.memory import peak_bytes
from bench.report import summary_of
from bench.zoo import Model, bert, one_label, padded_text
from tests.rounding import DRAWS

PROGRAMS = (kernels, models, overhead, compile_time, report_cost)
SHORT = ["--no-inductor", "--rounds", "2", "--seconds", "0"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def written(folder: Path, name: str) -> dict[str, Any]:
    """What a program wrote; both files name the command."""
    (path,) = folder.glob(f"{name}-*.json")
    data: dict[str, Any] = json.loads(path.read_text())
    assert data["program"] == name
    assert data["command"].startswith(f"python -m bench.{name} --no-inductor")
    assert data["command"] in path.with_suffix(".md").read_text()
    return data


@pytest.mark.quick
@pytest.mark.parametrize("program", [*PROGRAMS, kernel_text, picture, report_page], ids=lambda module: module.__name__)
def test_help_says_how(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        program.main(["--help"])
    assert stopped.value.code == 0
    assert f"python -m {program.__name__}" in capsys.readouterr().out


@pytest.mark.quick
def test_large_cases_move_enough_and_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert set(kernels.QUICK) <= {case.name for case in CASES}
    for case in CASES:
        assert case.large is not None
        with torch.device("meta"), torch.set_grad_enabled(case.backward):
            inputs = case.make(*case.large)
            outputs = tensors_of(case.function(*inputs))
        assert case.traffic(inputs, outputs) >= LARGE, case.name


@pytest.mark.quick
def test_turns_go_on_until_the_budget_is_spent() -> None:
    def nothing() -> None:
        pass

    seconds = interleaved({"a": nothing, "b": nothing}, 2, seconds_per_turn=1e-5, budget=0.05)
    assert len(seconds["a"]) == len(seconds["b"]) > 2
    assert len(interleaved({"a": nothing}, 2, seconds_per_turn=1e-5)["a"]) == 2


@pytest.mark.quick
def test_functions_share_no_code_object() -> None:
    def function(x: int, more: int = 1) -> int:
        return x + more

    copy = with_own_code(function)
    assert copy.__code__ is not function.__code__
    assert copy(1) == 2


@pytest.mark.quick
def test_peak_memory_counts_what_is_held_at_once() -> None:
    x = torch.ones(1_000_000)

    def one_after_the_other() -> None:
        for _ in range(3):
            x + 1

    def both() -> None:
        y = x + 1
        y + 1

    assert 4_000_000 <= peak_bytes(one_after_the_other) < 4_100_000
    assert 8_000_000 <= peak_bytes(both) < 8_100_000


@pytest.mark.quick
def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    assert "No module named bench.nothing" in in_fresh_process("bench.nothing", {}, tmp_path)["failed"]


@pytest.mark.quick
def test_summary_names_the_worst_and_all_below_one() -> None:
    summary = summary_of({"a": 4.0, "b": 0.25, "c": 0.5})
    assert summary["mean"] == pytest.approx(0.5 ** (1 / 3), abs=1e-3)
    assert (summary["worst"], summary["below"]) == ("b", {"b": 0.25, "c": 0.5})


def test_kernels_are_measured_and_drawn(tmp_path: Path) -> None:
    kernels.main(
        [*SHORT, "--only", "^softmax/small", "^adam/small", "^dropout-backward/small", "--write", str(tmp_path)]
    )
    data = written(tmp_path, "kernels")
    assert [row["case"] for row in data["rows"]] == ["dropout-backward", "adam", "softmax"]
    for row in data["rows"]:
        assert not row["problems"]
        rounds = {name: times["rounds"] for name, times in row["seconds"].items()}
        assert rounds == {"eager": 2, "ferrite": 2, "captured": 2}
        assert row["kernels"] + row["eager_calls"] > 0
    target = tmp_path / "speed.svg"
    picture.main([*map(str, tmp_path.glob("kernels-*.json")), "--to", str(target)])
    labels = [text.text for text in ElementTree.parse(target).iter("{http://www.w3.org/2000/svg}text")]
    assert "softmax, small" in labels
    assert "eager" in labels


def test_what_is_wrong_or_fails_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("sum", "pointwise", torch.sum, lambda *shape: [torch.rand(shape)], (8, 8))
    wrong = {"ferrite": lambda x: x.sum() * 1.001, "inductor": torch.mv}
    given = {**wrong, "captured": torch.sum}
    monkeypatch.setattr(kernels, "CASES", (case,))
    monkeypatch.setattr(kernels, "with_own_code", lambda function: function)
    monkeypatch.setattr(kernels, "backends", lambda inductor: ["eager", *wrong])
    monkeypatch.setattr(kernels, "given_to", lambda name, function, dynamic: given[name])
    monkeypatch.setattr(kernels, "prepared", lambda names: None)
    (row,) = kernels.main([*SHORT])["rows"]
    assert row["problems"]["ferrite"].startswith("wrong: results[0]: off by")
    assert row["problems"]["inductor"].startswith("failed: TypeError")
    assert list(row["seconds"]) == ["eager", "captured"]


def test_what_was_measured_before_an_interruption_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = kernels.measured

    def once(*args: Any) -> Any:
        monkeypatch.setattr(kernels, "measured", interrupted)
        return measured(*args)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "measured", once)
    kernels.main([*SHORT, "--only", "^add-relu", "--write", str(tmp_path)])
    assert [row["size"] for row in written(tmp_path, "kernels")["rows"]] == ["small"]


def tiny() -> Model:
    return Model("tiny", "encoder", lambda: bert(1), padded_text(8), one_label, larger=2)


@pytest.mark.parametrize("kind", ["inference", pytest.param("training", marks=pytest.mark.slow)])
def test_models_are_measured(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "MODELS", {"tiny": tiny()})
    models.main([*SHORT, "--no-cold", "--kinds", kind, "--dtypes", "fp32", "--batches", "2", "--write", str(tmp_path)])
    (row,) = written(tmp_path, "models")["rows"]
    assert row["case"] == f"tiny/2/fp32/{kind}"
    assert not row["problems"]
    assert row["seconds"].keys() == row["peak"].keys() == {"eager", "ferrite"}
    assert min(row["peak"].values()) > 0


def test_a_wrong_model_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MODELS", {"tiny": tiny()})

    def slightly_off(name: str, model: torch.nn.Module) -> Any:
        def call(**inputs: Any) -> Any:
            outputs = model(**inputs)
            outputs.logits = outputs.logits * 1.001
            return outputs

        return call

    monkeypatch.setattr(models, "given_to", slightly_off)
    chosen = ["--no-cold", "--kinds", "inference", "--dtypes", "fp32", "--batches", "2"]
    (row,) = models.main([*SHORT, *chosen])["rows"]
    assert row["problems"]["ferrite"].startswith("wrong: output 0: off by")
    assert list(row["seconds"]) == ["eager"]


@pytest.mark.quick
def test_where_rounding_decides_eager_may_not_be_right_by_luck() -> None:
    """Its largest error over weights and inputs rounded otherwise counts; what is beyond that is wrong."""

    def run(off: float) -> Any:
        return {"outputs": [torch.ones(4)], "gradients": [torch.ones(3), torch.full((2,), 1 + off)]}

    exact, lucky = run(0), [(run(off), run(0)) for off in (2**-10, 2**-7, 2**-9)]
    limit = 2 * 2**-7
    for off, judged in ((0.9 * limit, lucky), (2**-21, ())):
        assert disagreement_of_models("ferrite", run(off), run(0), exact, judged) is None
    for off, judged in ((0.9 * limit, ()), (1.1 * limit, lucky), (float("nan"), lucky)):
        assert str(disagreement_of_models("ferrite", run(off), run(0), exact, judged)).startswith("gradients")
    wrong = {**run(0), "outputs": [torch.full((4,), 1 + 0.5 * limit)]}
    assert str(disagreement_of_models("ferrite", wrong, run(0), exact, lucky)).startswith("output 0")


def test_each_other_rounding_gives_other_errors() -> None:
    setting = models.Setting(tiny(), 2, "fp32", training=True)
    runs = models.nudged_runs(setting, setting.model.inputs(2, torch.float32, True))
    errors = {largest_error([(eager["gradients"], exact["gradients"])]) for eager, exact in runs}
    assert len(errors) == DRAWS
    assert min(errors) > 0


@pytest.mark.slow
def test_compile_time_tells_the_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def here(module: str, request: dict[str, Any], caches: Path) -> dict[str, Any]:
        torch.compiler.reset()
        return first_call(request)

    monkeypatch.setattr(compile_time, "in_fresh_process", here)
    compile_time.main([*SHORT, "--quick", "--layers", "1", "--rounds", "1", "--write", str(tmp_path)])
    rows = {row["start"]: row for row in written(tmp_path, "compile_time")["rows"]}
    assert list(rows) == ["aot_eager, cold", "ferrite, cold", "ferrite, warm"]
    cold = rows["ferrite, cold"]
    assert {"Dynamo", "AOTAutograd", "post_grad", "lower", "codegen"} <= cold["stages"].keys()
    assert 0 < cold["own"] < cold["first_call"]
    assert not cold["failures"]


@pytest.mark.slow
def test_report_cost_tells_both_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def here(module: str, request: dict[str, Any], caches: Path) -> dict[str, Any]:
        torch.compiler.reset()
        return first_call(request)

    monkeypatch.setattr(report_cost, "in_fresh_process", here)
    arguments = ["--models", "bert-1-layers", "--only", "inference", "--rounds", "1", "--write", str(tmp_path)]
    report_cost.main([*SHORT, *arguments])
    (row,) = written(tmp_path, "report_cost")["rows"]
    assert row["ratio"] == pytest.approx(row["report"] / row["plain"])
    assert row["write"] > 0
    assert row["bytes"] > 100_000
    assert row["memory"]["report"] >= row["memory"]["plain"] > 0


@pytest.mark.quick
def test_cost_per_layer_is_that_of_added_layers() -> None:
    rows = [
        {"training": False, "start": "ferrite, cold", "layers": layers, "own": own}
        for layers, own in ((3, 1.0), (12, 6.0), (6, 1.5))
    ]
    slopes = compile_time.per_layer(rows)["inference, cold"]
    assert slopes == {"3 to 6": pytest.approx(0.5 / 3), "6 to 12": pytest.approx(0.75)}


@pytest.mark.slow
def test_overhead_tells_the_own_part(tmp_path: Path) -> None:
    overhead.main([*SHORT, "--quick", "--only", "^one operator$", "--write", str(tmp_path)])
    (row,) = written(tmp_path, "overhead")["rows"]
    assert row["microseconds"].keys() == {"eager", "aot_eager", "ferrite"}
    assert row["inside"] >= row["own"] > 0
    assert not row["failures"]


def test_generated_code_is_the_same_twice_and_a_difference_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = ["--only", "^softmax$", "--models", "none"]
    before, after = tmp_path / "before", tmp_path / "after"
    assert kernel_text.main([str(before), *case]) == 0
    text = (before / "softmax.txt").read_text()
    assert "def inference(args):" in text
    assert "define i64 @kernel_" in text
    assert kernel_text.main([str(after), *case, "--against", str(before)]) == 0
    digests = before / kernel_text.DIGESTS
    digests.write_text(f"{'0' * 32} softmax\n")
    assert kernel_text.differing(after, before) == ["softmax"]
    assert "1 of 1 cases are the same" in capsys.readouterr().out
