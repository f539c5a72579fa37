"""What a report holds: every stage linked to the model's lines, passes, steps, memory, times, cache, guards."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.debug import last_compile
from ferrite.reports import read_record
from ferrite.reports.passes import hunks_between
from ferrite.reports.write import _at_exit, write_all
from tests.compare import compile_strict
from tests.ranks import imagined_ranks
from tests.reports.tuned import tuned_report

pytestmark = pytest.mark.usefixtures("llvm_kernels")


def model(x, w):
    h = torch.relu(x @ w)
    return torch.softmax(h.clone() * 2, -1).sum(0)


@pytest.fixture
def path(tmp_path):
    yield tmp_path / "report.json"
    _at_exit.clear()


def reported(path, function, *inputs, options=None, **kwargs):
    """The newest compilation of a report about a function, and the whole of it."""
    compile_strict(function, options={"report": path, "own_products": "off", **(options or {})}, **kwargs)(*inputs)
    record = read_record(ferrite.report(path))
    return record["compiles"][-1], record


def nodes_at(graph, record, code):
    """Nodes that come from the line of the model with some text."""
    places = {number for number, place in enumerate(record["places"]) if code in place["text"]}
    return {number for number, node in enumerate(graph["nodes"]) if node["place"] in places}


def lines_of(graph, text, nodes):
    """Lines of a text that come from some nodes."""
    found = graph["texts"][text]
    pairs = zip(found["lines"], found["marks"], strict=True)
    return [line for line, mark in pairs if not nodes.isdisjoint(graph["sets"][mark])]


def own_lines_of(graph, text, nodes):
    """Lines of a text that come from these nodes alone."""
    found = graph["texts"][text]
    pairs = zip(found["lines"], found["marks"], strict=True)
    return [line for line, mark in pairs if graph["sets"][mark] and nodes.issuperset(graph["sets"][mark])]


def operators_in(lines):
    """Of values: `v1: f32 = add(v0, a1)`."""
    return {match[1] for line in lines if (match := re.match(r"\s*v\d+: \w+ = (\w+)\(", line))}


def test_every_stage_leads_to_the_lines_of_the_model_and_back(path):
    compile_data, record = reported(path, model, torch.randn(8, 16), torch.randn(16, 4))
    graph = compile_data["graphs"][-1]
    assert graph["kind"] == "inference"
    assert graph["detailed"]
    product, rest = nodes_at(graph, record, "h = torch.relu"), nodes_at(graph, record, "return torch.softmax")
    assert {graph["nodes"][number]["name"] for number in product} >= {"mm", "relu"}
    assert {graph["nodes"][number]["name"] for number in rest} >= {"mul", "_softmax", "sum_1"}
    assert any("aten.mm.default" in line for line in lines_of(graph, graph["program"], product))
    (kernel, *_) = graph["kernels"]
    assert any(".update(" in line for line in lines_of(graph, kernel["text"], rest))
    code = lines_of(graph, kernel["code"], rest)
    assert any("fmul" in line or "fadd" in line for line in code)
    assert not any(line.startswith("declare") for line in code)
    assert any("run_0(" in line for line in lines_of(graph, graph["host"], rest))
    assert any("op_aten_mm(" in line for line in lines_of(graph, graph["host"], product))
    (source,) = [file for file in record["files"] if file["path"] == __file__]
    used = [source["lines"][line - source["first"]] for line in source["used"]]
    assert any("h = torch.relu(x @ w)" in line for line in used)


def test_statements_of_one_kernel_are_told_apart(path):
    def both(x):
        small = x.sin()
        large = x.exp()
        return small, large

    compile_data, record = reported(path, both, torch.randn(64, 16))
    graph = compile_data["graphs"][-1]
    (kernel,) = graph["kernels"]
    sin, exp = (nodes_at(graph, record, code) for code in ("small = x.sin()", "large = x.exp()"))
    lines = {name: lines_of(graph, kernel["text"], nodes) for name, nodes in (("sin", sin), ("exp", exp))}
    assert any("sin(" in line for line in lines["sin"])
    assert not any("exp(" in line for line in lines["sin"])
    assert any("exp(" in line for line in lines["exp"])
    assert not any("sin(" in line for line in lines["exp"])


def test_operators_computed_inside_one_another_have_lines_of_their_own(path):
    """All but `a` is one operation, and everything is one kernel: still each line of the model has its own."""

    def nested(x, w):
        a = x.sin()
        b = a * w
        c = F.gelu(b)
        d = c.exp() + a
        return torch.softmax(d, -1)

    compile_data, record = reported(path, nested, torch.randn(64, 32), torch.randn(64, 32))
    graph = compile_data["graphs"][-1]
    (kernel,) = graph["kernels"]
    lines = ("b = a * w", "c = F.gelu(b)", "d = c.exp() + a", "return torch.softmax(d, -1)")
    for number in (graph["program"], kernel["text"]):
        b, c, d, softmax = (own_lines_of(graph, number, nodes_at(graph, record, line)) for line in lines)
        assert operators_in(b) == {"mul"}
        assert operators_in(c) == {"special_ndtr", "mul"}
        assert operators_in(d) == {"exp", "add"}
        assert operators_in(softmax) >= {"sub", "exp", "div"}
        assert not {*b} & {*c, *d, *softmax}
    b, c, d, softmax = (own_lines_of(graph, kernel["code"], nodes_at(graph, record, line)) for line in lines)
    assert any("fmul" in line for line in b)
    assert any("special_ndtr" in line for line in c)
    assert any("@ferrite_exp" in line for line in d)
    assert any("fdiv" in line or "fmul" in line for line in softmax)
    assert not any("special_ndtr" in line or "@ferrite_sin" in line for line in (*b, *d, *softmax))
    whole = lines_of(graph, kernel["text"], nodes_at(graph, record, "b = a * w"))
    assert any(line.strip().startswith("for ") for line in whole)  # a loop belongs to all that is in it


def test_what_is_computed_around_reductions_is_told_apart_in_training(path):
    """The gradient of a layer norm takes two sums over rows, and is added to another one in their kernel."""

    def residual(x, weight):
        return torch.sin(x) + F.layer_norm(x, (64,), weight)

    x, weight = torch.randn(32, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    compile_strict(residual, options={"report": path})(x, weight).square().sum().backward()
    graph = read_record(ferrite.report(path))["compiles"][-1]["graphs"][-1]
    assert graph["kind"] == "backward"
    names = [node["name"] for node in graph["nodes"]]
    (kernel,) = graph["kernels"]
    for text in (graph["program"], kernel["text"]):
        own = {name: own_lines_of(graph, text, {number}) for number, name in enumerate(names)}
        assert operators_in(own["native_layer_norm_backward"]) == {"mul", "sub", "div"}
        assert [operators_in(own[name]) for name in ("cos", "mul", "add_1")] == [{"cos"}, {"mul"}, {"add"}]
    updates = [line for line in graph["texts"][kernel["text"]]["lines"] if ".update(" in line]
    assert updates
    assert {*updates} <= {*own["native_layer_norm_backward"]}  # none is a sum of the others


def test_equal_operators_on_other_memory_and_views_are_told_apart(path):
    def alike(x, y):
        a = x.sin()
        b = y.sin()
        c = b.t().reshape(8, 8)
        return a * 2 + c

    compile_data, record = reported(path, alike, torch.randn(8, 8), torch.randn(8, 8))
    graph = compile_data["graphs"][-1]
    a, b, c = (
        own_lines_of(graph, graph["program"], nodes_at(graph, record, line))
        for line in ("a = x.sin()", "b = y.sin()", "c = b.t().reshape(8, 8)")
    )
    assert [line for line in a if "sin(" in line]
    assert [line for line in b if "sin(" in line]
    assert not {*a} & {*b}
    assert not operators_in(c)  # a view computes nothing: its line leads to all of what is made through it
    assert lines_of(graph, graph["program"], nodes_at(graph, record, "c = b.t().reshape(8, 8)"))


def test_passes_lead_from_the_captured_graph_to_the_last(path):
    compile_data, _ = reported(path, model, torch.randn(8, 16), torch.randn(16, 4))
    assert {graph["kind"] for graph in compile_data["graphs"]} == {"torch", "inference"}
    gone, fired = set(), set()
    for graph in compile_data["graphs"]:
        rows = list(graph["first"])
        for each in graph["passes"]:
            before, place, made = rows, 0, []
            for hunk in each["hunks"]:
                made += before[place : hunk["at"]] + list(hunk["added"])
                place = hunk["at"] + hunk["removed"]
            rows = made + before[place:]
            assert bool(each["hunks"]) <= bool(each["rewrites"] or each["name"] == "captured" or each["facts"])
        assert rows == [node["row"] for node in graph["nodes"]]
        left = {node["row"] for node in graph["nodes"]}
        gone |= {graph["rows"][row] for row in graph["first"] if row not in left}
        fired |= {each["name"] for each in graph["passes"] if each["rewrites"] and each["hunks"]}
    assert any("clone" in row for row in gone)
    assert fired
    graph = compile_data["graphs"][-1]
    assert any(each["reason"] and each["count"] for each in graph["near_misses"])


def test_steps_say_what_they_read_move_and_why_they_are_torchs(path):
    compile_data, record = reported(path, model, torch.randn(8, 16), torch.randn(16, 4))
    graph = compile_data["graphs"][-1]
    product, kernel, *_ = graph["steps"]
    assert (product["kind"], product["title"]) == ("template", "aten.mm.default")
    assert product["reason"]
    assert product["flops"] == 2 * 8 * 16 * 4
    assert product["bytes"] == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert kernel["kind"] == "kernel"
    assert kernel["reads"] == [0]
    assert kernel["bytes"] >= 8 * 4 * 4
    assert "h = torch.relu" in record["places"][product["places"][0]]["text"]


def test_memory_adds_up_to_the_peak(path):
    def deep(x, w):
        for _ in range(3):
            x = torch.relu(x @ w) + x.sum(-1, keepdim=True)
        return x

    compile_data, _ = reported(path, deep, torch.randn(64, 32), torch.randn(32, 32))
    memory = compile_data["graphs"][-1]["memory"]
    assert max(memory["by_step"]) == memory["peak"] > 0
    at = memory["by_step"].index(memory["peak"])
    holders = [each for each in memory["held"] if each["first"] <= at <= each["last"] and not each["within"]]
    assert sum(each["bytes"] for each in holders) == memory["peak"]
    assert len(memory["steps"]) == len(memory["by_step"])


def test_training_has_all_its_graphs(path):
    w = torch.randn(16, 4, requires_grad=True)
    compiled = compile_strict(model, options={"report": path})
    compiled(torch.randn(8, 16), w).sum().backward()
    (compile_data,) = read_record(ferrite.report(path))["compiles"][-1:]
    assert [graph["kind"] for graph in compile_data["graphs"]] == ["torch", "joint", "forward", "backward"]
    assert all(graph["detailed"] and graph["nodes"] for graph in compile_data["graphs"])
    assert all(graph["kernels"] for graph in compile_data["graphs"][2:])
    assert {each["how"] for each in compile_data["saved"]} <= {"saved", "recomputed"}
    assert set(compile_data["stages"]) == set(last_compile().stages)


def test_sizes_that_change_are_measured_at_what_was_seen(path):
    compile_data, _ = reported(path, model, torch.randn(8, 16), torch.randn(16, 4), dynamic=True)
    product = compile_data["graphs"][-1]["steps"][0]
    assert product["flops"] == 2 * 8 * 16 * 4


def test_what_the_cache_has_is_told_and_compiled_again(path, artifact_cache):
    inputs = torch.randn(8, 16), torch.randn(16, 4)
    first, _ = reported(path, model, *inputs)
    assert {each["result"] for each in first["cache"]} == {"miss"}
    torch.compiler.reset()
    again, _ = reported(path, model, *inputs)
    assert {each["result"] for each in again["cache"]} == {"hit"}
    assert again["graphs"][-1]["texts"] == first["graphs"][-1]["texts"]
    torch.compiler.reset()
    other, _ = reported(path, model, torch.randn(9, 16), inputs[1], dynamic=False)
    (question,) = [each for each in other["cache"] if each["what"] == "inference graph"]
    assert question["result"] == "miss"
    differing = {each["name"]: (each["there"], each["here"]) for each in question["differences"]}
    assert any("8" in str(there) and "9" in str(here) for there, here in differing.values())


def test_breaks_guards_and_recompilations_with_the_value_that_failed(path):
    def broken(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    compiled = compile_strict(broken, options={"report": path}, dynamic=False)
    compiled(torch.randn(3))
    compiled(torch.randn(5))
    record = read_record(ferrite.report(path))
    (found,) = {each["reason"] for each in record["breaks"]}
    assert "graph_break" in found
    assert {record["places"][each["place"]]["text"] for each in record["breaks"]} == {"torch._dynamo.graph_break()"}
    reasons = [each["recompiled"] for each in record["compiles"][-4:] if each["recompiled"]]
    assert any("expected 3, actual 5" in reason for reason in reasons)
    assert any("TENSOR_MATCH" in guard for guard in record["compiles"][-4]["guards"])


def test_a_branch_on_a_tensor_is_told_in_words(path):
    def branching(x):
        y = x.sin()
        return y.cos() if y.sum() > 100 else y.exp()

    compile_strict(branching, options={"report": path})(torch.randn(3))
    (found,) = {each["reason"] for each in read_record(ferrite.report(path))["breaks"]}
    assert found.startswith("a branch depends on the value of a tensor (")


def test_what_dynamo_begins_anew_is_one_compilation(path):
    """A number that is no constant makes torch capture the same function twice."""

    def scaled(x, factor):
        return x.sin() * factor

    before = {id(each) for each in ferrite.recent_compiles()}
    compiled = compile_strict(scaled, options={"report": path}, dynamic=True)
    for factor in (0.5, 0.25):
        torch.testing.assert_close(compiled(torch.ones(4), factor), scaled(torch.ones(4), factor))
    new = [each for each in ferrite.recent_compiles() if id(each) not in before]
    assert new
    assert all(each.graphs for each in new)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_collectives_from_start_to_wait(path):
    import torch.distributed._functional_collectives as collectives

    def gathered(x, w):
        whole = collectives.all_gather_tensor(x * 2, 0, [0, 1])
        return whole.sum() + (w @ w).sum()

    with imagined_ranks(2):
        compile_data, record = reported(path, gathered, torch.randn(16, 16), torch.randn(16, 16))
    graph = compile_data["graphs"][-1]
    (found,) = graph["collectives"]
    assert found["title"] == "_c10d_functional.all_gather_into_tensor.default"
    assert graph["steps"][found["first"]]["title"] == found["title"]
    assert graph["steps"][found["last"]]["title"] == "_c10d_functional.wait_tensor.default"
    assert found["bytes"] == 4 * (16 * 16 + 32 * 16)
    assert {record["places"][place]["text"] for place in found["places"]} == {
        "whole = collectives.all_gather_tensor(x * 2, 0, [0, 1])"
    }


def test_measured_steps_have_times_and_limits(path):
    compiled = compile_strict(model, options={"report": path, "measure": True, "own_products": "off"})
    x, w = torch.randn(8, 16), torch.randn(16, 4)
    results = [compiled(x, w) for _ in range(3)]
    torch.testing.assert_close(results[-1], model(x, w))
    record = read_record(ferrite.report(path))
    steps = record["compiles"][-1]["graphs"][-1]["steps"]
    assert steps
    assert all(step["seconds"] > 0 and step["calls"] == 3 for step in steps)
    (limits,) = record["limits"]
    assert limits["device"] == "cpu"
    assert limits["bytes_per_second"] > 1e8
    assert limits["flops_per_second"] > 1e8


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_products_that_were_measured(path, monkeypatch, fresh_compiler):
    record = tuned_report(path, monkeypatch)
    (compile_data,) = read_record(path)["compiles"][-1:]
    found = {each["problem"]: each for each in compile_data["tuning"]}
    asked = {str(problem): times for problem, times in record.products.items() if str(problem) in found}
    assert len(asked) == len(found) == 3
    assert all("bf16 1 x 8 x" in problem for problem in found)
    for problem, times in asked.items():
        assert (found[problem]["torch"], found[problem]["ours"]) == (times.torch, times.ours)
        assert found[problem]["configuration"] == str(times.config)
    assert [step["title"] for step in compile_data["graphs"][-1]["steps"]].count("ferrite.product.default") == 3


def test_nothing_was_measured_where_nobody_asked(path):
    compile_data, _ = reported(path, model, torch.randn(8, 16), torch.randn(16, 4))
    assert compile_data["tuning"] == []


def test_branches_and_the_kernels_in_them(path):
    def either(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() - 1, (x,))

    compile_data, _ = reported(path, either, torch.ones(16), options={"measure": True})
    graph = compile_data["graphs"][-1]
    kernels = [step for step in graph["steps"] if step["kind"] == "kernel"]
    assert len(kernels) >= 2
    assert sum(step["seconds"] is not None for step in kernels) < len(kernels)  # one branch ran


def test_without_asking_nothing_is_kept_and_the_page_has_what_the_record_has(tmp_path):
    compile_strict(model)(torch.randn(8, 16), torch.randn(16, 4))
    found = last_compile()
    assert found.details == []
    assert found.capture is None
    record = read_record(ferrite.report(tmp_path / "page.html"))
    graph = record["compiles"][-1]["graphs"][-1]
    assert not graph["detailed"]
    assert [step["title"] for step in graph["steps"] if step["kind"] == "kernel"] == [k.name for k in found.kernels]
    assert "def inference(args):" in graph["texts"][graph["host"]]["lines"]
    assert any("FERRITE_REPORT" in note for note in record["notes"])


def test_a_graph_that_runs_in_eager_says_why(path):
    options = {"report": path, "fail_at": "lower", "keep_repro": False}
    compiled = torch.compile(model, backend="ferrite", options=options)
    with pytest.warns(ferrite.FerriteWarning):
        compiled(torch.ones(8, 16), torch.ones(16, 4))
    graph = read_record(ferrite.report(path))["compiles"][-1]["graphs"][-1]
    assert "asked to fail" in graph["failure"]
    assert graph["eager_calls"]


def test_pages_are_written_when_the_process_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("FERRITE_REPORT", str(tmp_path / "end.html"))
    compile_strict(lambda x: F.gelu(x) * 2)(torch.randn(8))
    write_all()
    first = (tmp_path / "end.html").stat().st_mtime_ns
    write_all()  # nothing is new
    assert (tmp_path / "end.html").stat().st_mtime_ns == first
    monkeypatch.setenv("RANK", "3")
    compile_strict(lambda x: F.gelu(x) * 3)(torch.randn(8))
    write_all()
    assert (tmp_path / "end.rank3.html").exists()
    _at_exit.clear()


def test_a_page_that_cannot_be_written_is_an_error_of_the_user(tmp_path):
    compile_strict(torch.sin)(torch.randn(8))
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file" / "page.html", tmp_path):
        with pytest.raises(ferrite.UserError, match="cannot write the report"):
            ferrite.report(wrong)


def test_the_record_is_versioned_json(path):
    _, record = reported(path, torch.sin, torch.randn(8))
    assert record["format"] == "ferrite report"
    assert record["version"] == 1
    assert json.loads(path.read_text()) == record


@pytest.mark.quick
@pytest.mark.parametrize(
    ("before", "after"),
    [([], [1]), ([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [3, 2, 1]), ([1, 2, 3, 4], [0, 2, 5, 4, 1]), ([1], [])],
)
def test_hunks_make_one_list_of_the_other(before, after):
    made, place = [], 0
    for hunk in hunks_between(before, after):
        made += [*before[place : hunk.at], *hunk.added]
        place = hunk.at + hunk.removed
    assert made + before[place:] == after
