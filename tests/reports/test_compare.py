"""`python -m ferrite report` and `diff`: what they write, say, and return."""

from __future__ import annotations

import copy

import pytest
import torch

import ferrite
from ferrite.__main__ import main
from ferrite.reports import as_text, compare, read_record
from ferrite.reports.page import BEGIN, END, escaped, page
from ferrite.reports.write import _at_exit
from tests.compare import compile_strict

NET = """
import torch

def softmax_of_product(x, w):
    return torch.softmax(torch.relu(x @ w).clone(), -1)
"""


@pytest.fixture
def net(tmp_path, monkeypatch, llvm_kernels):
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    yield str(tmp_path / "net.py:softmax_of_product")
    _at_exit.clear()


@pytest.fixture
def record(tmp_path, llvm_kernels):
    """Of one small function, alone."""
    options = {"report": tmp_path / "record.json", "own_products": "off"}
    compile_strict(lambda x, w: torch.relu(x @ w).sum(-1), options=options)(torch.randn(8, 16), torch.randn(16, 4))
    found = read_record(ferrite.report(options["report"]))
    _at_exit.clear()
    return {**found, "compiles": found["compiles"][-1:]}


def test_report_and_diff_on_the_command_line(net, tmp_path, capsys):
    arguments = [net, "f32[8,16]", "f32[16,4]"]
    assert main(["report", *arguments, "--to", "one.html", "--measure"]) == 0
    assert "one.html: " in capsys.readouterr().out
    text = (tmp_path / "one.html").read_text()
    assert text.startswith("<!doctype html>")
    around = text.partition(BEGIN)[0] + text.partition(BEGIN)[2].partition(END)[2]  # sources may have what they like
    assert "http://" not in around.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in around
    torch.compiler.reset()
    main(["report", *arguments, "--to", "two.html", "-o", "numerics=strict", "-o", "skip=remove_noop_ops"])
    for name in ("one.html", "two.html"):  # each about its own compilation alone
        record = read_record(tmp_path / name)
        (tmp_path / name).write_text(page({**record, "compiles": record["compiles"][-1:]}))
    capsys.readouterr()
    assert main(["diff", "one.html", "one.html"]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["diff", "one.html", "two.html", "--tolerance", "inf", "--html", "diff.html"]) == 1
    said = capsys.readouterr().out
    assert "numerics: new (strict)" in said
    assert "skipped by option" in said
    shown = (tmp_path / "diff.html").read_text()
    assert "skipped by option" in shown
    assert "<script" not in shown


def test_a_place_that_cannot_be_written_is_told_before_anything_is_compiled(net, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    before = ferrite.recent_compiles()
    assert main(["report", net, "f32[8,16]", "f32[16,4]", "--to", str(tmp_path / "file" / "page.html")]) == 2
    assert capsys.readouterr().err.startswith("UserError: cannot write the report")
    assert ferrite.recent_compiles() == before


def test_what_changed_is_found(record):
    assert compare(record, record, 0.0) == []
    other = copy.deepcopy(record)
    other["versions"]["torch"] = "9.9"
    other["machine"]["threads"] = "64"
    graph = other["compiles"][0]["graphs"][-1]
    graph["memory"]["peak"] += 1
    gone = next(step for step in graph["steps"] if step["kind"] == "kernel")
    graph["steps"].remove(gone)
    graph["kernels"][0]["digest"] = "another"
    graph["eager_calls"] = []
    graph["failure"] = "it broke"
    other["breaks"].append({"reason": "print", "place": -1, "function": "f"})
    other["compiles"][0]["options"]["fuel"] = 3
    found = {(each.section, each.what): each for each in compare(record, other, 0.0)}
    assert found["versions", "torch"].after == "9.9"
    assert found["machine", "threads"].after == "64"
    assert found["kernels", f"kernel {gone['title']}"].after == ""
    assert found["kernels", f"kernel {graph['kernels'][0]['name']} as scheduled"].after == "another"
    assert ("memory", "peak bytes") in found
    assert found["graphs", "failure"].after == "it broke"
    assert found["graph breaks", "print"].after == "once"
    assert found["options", "fuel"].after == "3"
    text = as_text(list(found.values()))
    assert f"kernel {gone['title']}: gone (was once)" in text


def test_times_count_beyond_the_tolerance(record):
    before, after = copy.deepcopy(record), copy.deepcopy(record)
    for side, seconds in ((before, 0.010), (after, 0.012)):
        side["compiles"][0]["stages"] = {"codegen": 100 * seconds}
        for step in side["compiles"][0]["graphs"][-1]["steps"]:
            step["seconds"] = seconds
    assert {each.section for each in compare(before, after, 0.1)} == {"compile time", "run time"}
    assert compare(before, after, 0.25) == []
    assert compare(before, after, float("inf")) == []


@pytest.mark.quick
def test_what_is_no_report_is_an_error(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.html").write_text("<html></html>")
    (tmp_path / "newer.json").write_text('{"format": "ferrite report", "version": 99}')
    for name, said in (("missing.html", "cannot read"), ("other.html", "no report"), ("newer.json", "version 99")):
        assert main(["diff", name, name]) == 2
        assert said in capsys.readouterr().err
    assert main(["diff", "other.html", "other.html", "--tolerance", "-1"]) == 2


@pytest.mark.quick
def test_nothing_of_a_record_ends_its_element():
    text = escaped({"name": f"</script><!--{END} & \u2028"})
    assert not set(text) & {"<", ">", "&", "\u2028"}
    whole = page({"format": "{{script}} {{record}}", "name": "</script><script>alert(1)</script>"})
    assert whole.count("<script") == 2
    assert "{{script}} {{record}}" in whole.partition(BEGIN)[2].partition(END)[0]
