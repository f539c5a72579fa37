"""Foreign tests run with another backend: each way a test can end is told from the others, and no test is left out."""

from __future__ import annotations

import json
import shutil
import unittest
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.outcomes import Failed

from bench.yardstick import agreeable
from bench.yardstick.__main__ import main
from bench.yardstick.reasons import reason_of
from bench.yardstick.report import Comparison, page
from bench.yardstick.runs import Plan, Result, results_of
from ferrite.errors import CompilerBug

WRITTEN = Path(__file__).parent / "foreign" / "written_for_inductor.py"
# How each test of that file ends with ferrite: outcome, kind, a part of the reason.
ENDS = {
    "test_a_counter": ("passed", "", ""),
    "test_a_default_backend": ("passed", "", ""),
    "test_a_name_that_torch_lacks": ("failed", "exception", "this torch has no torch.nn.of_another_torch"),
    "test_an_option_of_inductor": ("passed", "", ""),
    "test_death": ("crashed", "crashed", "SIGABRT"),
    "test_insides": ("failed", "internals", "found"),
    "test_sleep": ("hung", "hung", "test_sleep"),
    "test_what_ferrite_does_not_compile": ("failed", "strict", "not today"),
    "test_wrong_values": ("failed", "values", "Tensor-likes are not close"),
}
FATAL = ("test_death", "test_sleep")
COMMON = ["--placeholders", "--replace", "counters", "--limit", "20"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The tests, where no settings of this project apply to them."""
    copy = tmp_path / "test_foreign.py"
    shutil.copy(WRITTEN, copy)
    return copy


def short(test: str) -> str:
    return test.split("::")[-1]


def assert_ends(results: list[Result]) -> None:
    for result in results:
        outcome, kind, reason = ENDS[short(result.test)]
        assert (result.outcome, result.kind) == (outcome, kind), result
        assert reason in result.reason, result
        assert result.outcome != "passed" or result.graphs > 0, result


@pytest.mark.slow
def test_what_is_known_is_not_run_again_and_the_rest_is(file: Path) -> None:
    """One process: the tests that end none, but for one whose end is known."""
    names = [f"test_foreign.py::Foreign::{name}" for name in ENDS if name not in FATAL]
    plan = Plan(file, "ferrite", file.parent / "runs", replaced=("counters",), placeholders=True)
    plan.folder.mkdir()
    plan.listed.write_text(json.dumps(names))
    plan.known.write_text(json.dumps({"test": names[0], "outcome": "skipped"}) + "\n")
    first, *others = results_of(plan)
    assert first.outcome == "skipped"
    assert [each.test for each in others] == names[1:]
    assert_ends(others)


@pytest.mark.slow
def test_tests_that_end_the_process_or_none(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = file.parent / "report.md"
    arguments = [str(file), "--out", str(report), *COMMON]
    (found,) = main(arguments)
    assert sorted(short(each.test) for each in found.ours) == sorted(ENDS)
    assert_ends(list(found.ours))
    assert [short(each.test) for each in found.lost()] == ["test_what_ferrite_does_not_compile"]
    text = report.read_text()
    assert "**strict**" in text
    assert main(arguments)[0] == found  # from what is known
    assert "9 of 9" in capsys.readouterr().out


@pytest.mark.quick
def test_a_report_lists_what_was_lost_the_worst_first() -> None:
    ours = [
        Result("f.py::a", "failed", "strict", "no kernel"),
        Result("f.py::b", "crashed", "crashed", "SIGSEGV"),
        Result("f.py::c", "failed", "values", "far off"),
        Result("f.py::d", "failed", "internals", "metrics"),
        Result("f.py::e", "passed"),
    ]
    neutral = [
        *(Result(each.test, "passed") for each in ours[:2]),
        Result("f.py::c", "failed", "values", "far off"),
        Result("f.py::d", "failed", "internals", "metrics"),
        Result("f.py::e", "passed"),
    ]
    found = Comparison(Path("f.py"), ours, neutral)
    assert [each.test for each in found.lost()] == ["f.py::b", "f.py::a"]
    assert [each.test for each in found.internals()] == ["f.py::d"]
    assert found.idle() == 1
    text = page([found], "ferrite", "aot_eager", "the command")
    assert "| f.py | ferrite | 5 | 1 | 3 | 1 | 0 | 0 | 1 | 0 | 2 |" in text
    assert text.index("- b **crashed** SIGSEGV") < text.index("- a **strict** no kernel")
    assert "c **values**" not in text


def read_of_inductor(counters: dict[str, dict[str, int]]) -> None:
    found = counters["inductor"]["matches"]
    assert found == 1


def read_of_another(counters: dict[str, dict[str, int]]) -> None:
    found = counters["inductor"]["matches"]
    found = counters["frames"]["total"]
    assert found == 1


def no_error_comes(counters: dict[str, dict[str, int]]) -> None:
    with pytest.raises(ValueError):
        counters["inductor"].get("matches")


def no_kernel(counters: dict[str, dict[str, int]]) -> None:
    try:
        raise CompilerBug("stage 'lower' failed", {"because": "no kernel"}, stage="lower", cause=ValueError())
    except CompilerBug as bug:
        raise RuntimeError("the backend failed") from bug


@pytest.mark.quick
@pytest.mark.parametrize(
    ("test", "kind"),
    [
        (read_of_inductor, "internals"),
        (read_of_another, "assertion"),
        (no_error_comes, "no error"),
        (no_kernel, "strict"),
    ],
)
def test_a_reason_is_told_from_the_error_and_the_statement(test: Callable[..., None], kind: str) -> None:
    counters = {"inductor": {"matches": 0}, "frames": {"total": 0}}
    with pytest.raises((Exception, Failed)) as caught:
        test(counters)
    assert reason_of(caught.value, Path(__file__)).kind == kind


def test_insides_that_agree_with_every_test() -> None:
    """And with nothing else: dynamo's counters, and texts of the test's own, are compared as ever."""
    table = agreeable.Counters({"inductor": {"fused": 0}, "stats": {"graphs": 2}})
    fused = table["inductor"]["fused"]
    assert fused == 3
    assert fused > 5
    assert table["stats"]["graphs"] == 2
    assert list(table.items()) == [("inductor", {"fused": 0}), ("stats", {"graphs": 2})]
    result, (code,) = agreeable.run_and_get_code(max, 1, 2)
    assert result == 2
    case = unittest.TestCase()
    same, contains = (agreeable.unless_generated(check) for check in (type(case).assertEqual, type(case).assertIn))
    same(case, fused, "another")
    same(case, str(fused), "7")
    contains(case, "a kernel", "\n".join([code]))
    with pytest.raises(AssertionError):
        same(case, 2, 3)
    with pytest.raises(AssertionError):
        contains(case, "a kernel", "a text")
