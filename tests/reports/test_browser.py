"""The page of a report in a real browser: links both ways, search, keys, large graphs, nothing injected."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time

import pytest
import torch

import ferrite
from bench import report_page
from ferrite.reports import read_record
from ferrite.reports.page import page as page_of
from ferrite.reports.write import _at_exit
from tests.compare import compile_strict
from tests.reports.browser import browsers
from tests.reports.deep import deep_report
from tests.reports.tuned import tuned_report

STALE: tuple[type[Exception], ...] = ()
with contextlib.suppress(ImportError):
    from selenium.common.exceptions import StaleElementReferenceException

    STALE = (StaleElementReferenceException,)

pytestmark = [pytest.mark.browser, pytest.mark.slow]

EVIL = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 1"><!--'
MODEL = f'''
import torch

EVIL = {EVIL!r}  # {EVIL}


def model(x, w):
    h = torch.relu(x @ w)  # {EVIL}
    y = torch.softmax(h * 2, -1)
    return y.sum(0), "{EVIL.replace(chr(34), "'")}"
'''
SECTIONS = ("overview", "code", "passes", "fusion", "memory", "time", "cache", "guards")
ARROW_DOWN, ARROW_RIGHT, ENTER, ESCAPE = "\ue015", "\ue014", "\ue007", "\ue00c"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    yield from browsers(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages, by what they are about: made once."""
    return {"folder": tmp_path_factory.mktemp("pages <b>")}


@pytest.fixture
def page(pages, llvm_kernels):
    """Of a model whose source and path are full of HTML, measured."""
    if "page" not in pages:
        source = pages["folder"] / "<img src=x onerror=alert(1)>.py"
        source.write_text(MODEL)
        spec = importlib.util.spec_from_file_location("evil_model", source)
        module = sys.modules["evil_model"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        options = {"report": pages["folder"] / "page.html", "measure": True, "own_products": "off"}
        compiled = compile_strict(module.model, options=options)
        w = torch.randn(16, 4, requires_grad=True)
        for _ in range(2):
            compiled(torch.randn(8, 16), w)[0].sum().backward()
        pages["page"] = ferrite.report(options["report"])
        record = read_record(pages["page"])
        newest = {**record, "compiles": record["compiles"][-1:]}  # other tests have compiled, too
        pages["page"].write_text(page_of(newest))
        _at_exit.clear()
    return pages["page"]


def graph_number(page, kind):
    graphs = read_record(page)["compiles"][0]["graphs"]
    return next(number for number, graph in enumerate(graphs) if graph["kind"] == kind)


def click_row(browser, pane, text):
    """Rows come and go as one scrolls: it is looked for again where one is gone."""
    assert_soon(lambda: row_with(browser, pane, text) is not None)
    for _ in range(5):
        try:
            row_with(browser, pane, text).click()
            return
        except STALE:
            time.sleep(0.1)
    raise AssertionError(f"no row with {text} stays in {pane}")


def row_with(browser, pane, text):
    return browser.driver.execute_script(
        "return [...document.querySelectorAll(`.pane[data-pane=${arguments[0]}] .row`)]"
        ".find(each => each.textContent.includes(arguments[1]))",
        pane,
        text,
    )


def lit(browser, pane):
    return browser.texts(f".pane[data-pane={pane}] .row.lit")


def test_every_section_of_every_graph_is_drawn_without_errors(browser, page):
    count = len(read_record(page)["compiles"][0]["graphs"])
    for graph in range(count):
        for section in SECTIONS:
            browser.open(page, f"g={graph}&s={section}")
            assert browser.ask("document.querySelector('[aria-current=page]').dataset.section") == section
            assert browser.ask("document.getElementById('main').textContent.length") > 20
    assert browser.problems() == []
    assert browser.ask("performance.getEntriesByType('resource').length") == 0  # nothing was fetched


def test_a_line_of_the_model_lights_up_what_became_of_it(browser, page):
    browser.open(page, f"g={graph_number(page, 'forward')}&s=code")
    click_row(browser, "model", "y = torch.softmax")
    assert any("_softmax" in row for row in lit(browser, "graph"))
    assert lit(browser, "program")
    assert lit(browser, "kernels")
    assert lit(browser, "code")
    assert not any("aten.mm" in row for row in lit(browser, "graph"))
    browser.press(ESCAPE)
    assert not lit(browser, "graph")
    assert browser.problems() == []


@pytest.mark.parametrize(
    ("pane", "text"), [("graph", "_softmax"), ("program", "reduce("), ("kernels", ".update("), ("host", "run_0(")]
)
def test_a_line_of_each_pane_lights_up_the_model(browser, page, pane, text):
    browser.open(page, f"g={graph_number(page, 'forward')}&s=code")
    if pane == "host":
        browser.all(".toggle[data-pane=host]")[0].click()
    click_row(browser, pane, text)
    assert any("torch.softmax" in row for row in lit(browser, "model"))
    assert browser.problems() == []


def test_a_line_of_generated_code_leads_back(browser, page):
    graph = read_record(page)["compiles"][0]["graphs"][graph_number(page, "forward")]
    text = graph["texts"][graph["kernels"][0]["code"]]
    place = next(place for place, line in enumerate(text["lines"]) if " fmul " in line and text["marks"][place])
    browser.open(page, f"g={graph_number(page, 'forward')}&s=code")
    browser.ask(f"listings.code.reveal({place + 1})")
    click_row(browser, "code", text["lines"][place].strip()[:30])
    assert lit(browser, "model")
    assert lit(browser, "kernels")


def test_search_finds_lines_rules_and_reasons(browser, page):
    browser.open(page)
    browser.press("/")
    browser.press(*"_softmax")
    assert_soon(lambda: browser.texts("#found .hit"))
    assert any("nodes" in group for group in browser.texts("#found .group"))
    assert all("_softmax" in hit for hit in browser.texts("#found .hit"))
    browser.press(ENTER)
    assert browser.ask("document.querySelector('[aria-current=page]').dataset.section") in ("code", "fusion", "passes")
    browser.press("/", *"\b" * 8, *"no such thing anywhere")
    assert_soon(lambda: browser.texts("#found .group") == ["nothing found"])
    assert browser.problems() == []


def assert_soon(question):
    end = time.monotonic() + 3
    while not question() and time.monotonic() < end:
        time.sleep(0.05)
    assert question()


def test_all_can_be_done_by_keys(browser, page):
    browser.open(page, f"g={graph_number(page, 'forward')}")
    browser.press("2")
    assert browser.ask("state.section") == "code"
    browser.press(ARROW_RIGHT)
    assert browser.ask("document.activeElement.getAttribute('aria-label')") == "Model"
    browser.press(ARROW_RIGHT, ARROW_DOWN, ARROW_DOWN, ENTER)
    assert browser.ask("document.activeElement.getAttribute('aria-label')") == "Graph"
    assert len(lit(browser, "graph")) == 1
    browser.press(ESCAPE)
    assert not lit(browser, "graph")
    before = browser.ask("document.documentElement.dataset.theme")
    browser.press("t")
    assert {before, browser.ask("document.documentElement.dataset.theme")} == {"light", "dark"}
    browser.press("]")
    assert browser.ask("state.graph") != graph_number(page, "forward")
    browser.press("?")
    assert browser.ask("document.getElementById('keys').open")
    browser.press(ESCAPE)
    browser.press("4", ARROW_DOWN)
    assert browser.ask("state.section") == "fusion"
    for chosen in ("tr.go", "circle.dot"):  # a row of the table of times, and a circle of the roofline
        browser.open(page, f"g={graph_number(page, 'forward')}&s=time")
        browser.ask(f"document.querySelector('{chosen}').focus()")
        browser.press(ENTER)
        assert browser.ask("state.section") == "fusion"
        assert browser.ask("state.step") >= 0
    assert browser.problems() == []


def test_it_fits_on_a_phone(browser, page):
    browser.resize(390, 800)
    try:
        for section in SECTIONS:
            browser.open(page, f"g={graph_number(page, 'forward')}&s={section}")
            assert browser.ask("document.documentElement.scrollWidth") <= 390, section
        browser.open(page, f"g={graph_number(page, 'forward')}&s=code")
        assert browser.ask("[...document.querySelectorAll('.pane')].map(each => each.dataset.pane)") == ["model"]
        click_row(browser, "model", "y = torch.softmax")
        browser.all(".toggle[data-pane=graph]")[0].click()
        assert any("_softmax" in row for row in lit(browser, "graph"))
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_html_in_a_model_stays_text(browser, page):
    text = page.read_text()
    assert text.count("</script>") == 2  # of the record, and of the page's own
    for section in SECTIONS:
        browser.open(page, f"g={graph_number(page, 'forward')}&s={section}")
        assert browser.ask("window.hacked === undefined")
        assert browser.ask("document.querySelectorAll('img, script:not([id=record])').length") == 1
    browser.open(page, f"g={graph_number(page, 'forward')}&s=code")
    assert any(EVIL in row for row in browser.texts(".pane[data-pane=model] .row"))
    assert browser.problems() == []


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_products_that_were_measured_have_a_section(browser, pages, monkeypatch, fresh_compiler):
    path = pages["folder"] / "tuned.html"
    record = tuned_report(path, monkeypatch)
    _at_exit.clear()
    number = len(read_record(path)["compiles"]) - 1
    browser.open(path, f"c={number}")
    browser.all("[data-section=tuning]")[0].click()
    rows = browser.texts("main tbody tr")
    assert len(rows) == 3
    times = {problem: found for problem, found in record.products.items() if any(str(problem) in row for row in rows)}
    for problem, found in times.items():
        (row,) = [row for row in rows if str(problem) in row]
        assert f"{found.torch:.1f} µs{found.ours:.1f} µs{found.torch / found.ours:.2f}" in row
        assert str(found.config) in row
    browser.press("/", *"4 warps")
    assert_soon(lambda: "tuning" in browser.texts("#found .group"))
    browser.press(ENTER)
    assert browser.ask("state.section") == "tuning"
    assert browser.problems() == []


def test_a_page_without_details_and_one_of_a_failure(browser, pages, llvm_kernels):
    compile_strict(lambda x: x.sin() + 1)(torch.randn(8))
    plain = ferrite.report(pages["folder"] / "plain.html")
    compiled = torch.compile(torch.cos, backend="ferrite", options={"fail_at": "lower", "keep_repro": False})
    with pytest.warns(ferrite.FerriteWarning):
        compiled(torch.ones(3))
    failed = ferrite.report(pages["folder"] / "failed.html")
    for each in (plain, failed):
        number = len(read_record(each)["compiles"]) - 1
        for section in SECTIONS:
            browser.open(each, f"c={number}&s={section}")
    assert "asked to fail" in browser.ask("JSON.stringify(compileNow())")
    assert browser.problems() == []


def test_ten_thousand_nodes_within_two_seconds(browser, pages, llvm_kernels):
    """Of a real training step: every section of its page, a choice of a line and a search."""
    large = pages["folder"] / "large.html"
    record = read_record(deep_report(large))
    large.write_text(page_of({**record, "compiles": record["compiles"][-1:]}))
    _at_exit.clear()
    graphs = read_record(large)["compiles"][0]["graphs"]
    number = next(number for number, graph in enumerate(graphs) if graph["kind"] == "backward")
    assert min(len(graphs[number]["nodes"]), len(graphs[number - 2]["nodes"])) >= 10_000  # of the joint graph, too
    assert large.stat().st_size <= 15_000_000
    for section in SECTIONS:
        browser.open(large, f"g={number}&s={section}")
        assert int(browser.ask("document.documentElement.dataset.ready")) < 2000, section
    browser.open(large, f"g={number}&s=code")
    start = time.monotonic()
    node = browser.ask("graphNow().nodes.findIndex((node, number) => number >= 9000 && node.place >= 0)")
    browser.ask(f"listings.graph.reveal({node})")
    click_row(browser, "graph", f"{graphs[number]['nodes'][node]['name']}:")
    assert lit(browser, "model")
    assert time.monotonic() - start < 2
    start = time.monotonic()
    browser.press("/", *"gelu")
    assert_soon(lambda: browser.texts("#found .hit"))
    assert time.monotonic() - start < 3  # of which 60 ms are waited for each key
    assert browser.problems() == []


def test_the_benchmark_of_the_page_measures_every_graph(browser, tmp_path, llvm_kernels):
    found = report_page.main(["--layers", "1", "--write", str(tmp_path)])
    assert [row["graph"] for row in found["rows"]] == ["torch calls", "forward and backward", "forward", "backward"]
    assert all(row["ready"] > 0 and row["chosen"] > 0 and row["nodes"] > 10 for row in found["rows"])
    assert list(tmp_path.glob("report_page-*.md"))
    _at_exit.clear()
