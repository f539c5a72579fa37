"""Documentation that runs: every Python block of the pages, every doctest, every command the README names."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import ferrite

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
ELSEWHERE = ("extending.md",)  # its blocks are about files of their own: test_extending.py
GENERATED = ("operators.md", "options.md", "passes.md")  # `make docs`: tables, and lists of names
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in ELSEWHERE and BLOCK.search(page.read_text())],
    ids=lambda page: page.name,
)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """The blocks of one page run in order, as one program."""
    if page.name == "freezing.md" and not torch.__version__ >= "2.13":
        pytest.skip("parameters are discarded with torch 2.13 and newer")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(BLOCK.findall(page.read_text())):
        path = tmp_path / f"{page.stem}_{number}.py"
        path.write_text(block)
        exec(compile(block, str(path), "exec"), namespace)


@pytest.mark.quick
def test_the_readme_has_examples_and_names_commands_that_exist():
    text = (ROOT / "README.md").read_text()
    assert len(BLOCK.findall(text)) >= 2
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z-]+)", text))
    assert {"demo", "test"} <= named <= targets


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """`tests/compare.py`: from the root; `lower/sizes.py`: inside the package; `fusion/`: in one of its folders."""
    roots = [ROOT, ROOT / "ferrite", *(path for path in (ROOT / "ferrite").iterdir() if path.is_dir())]
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for name in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", prose):
        assert any((root / name).exists() for root in roots), f"{page.name} names {name}"


@pytest.mark.quick
def test_modules_that_comments_name_exist():
    """`ferrite.schedule.memory.arena` in a docstring or a comment is a module, or a name in one."""
    wrong = []
    for path in sorted((ROOT / "ferrite").rglob("*.py")):
        for name in set(re.findall(r"`(ferrite(?:\.\w+)+)`", path.read_text())):
            parts = name.split(".")
            if (ROOT / "ferrite" / parts[1]).is_dir() and not is_there(parts):
                wrong.append(f"{path.relative_to(ROOT)} names {name}")
    assert not wrong


def is_there(parts: list[str]) -> bool:
    folder = ROOT
    for place, part in enumerate(parts):
        if (folder / part).is_dir():
            folder /= part
            continue
        module = folder / f"{part}.py"
        if module.exists():
            return len(parts) == place + 1 or bool(re.search(rf"\b{parts[place + 1]}\b", module.read_text()))
        return bool(re.search(rf"\b{part}\b", (folder / "__init__.py").read_text()))
    return True


@pytest.mark.quick
@pytest.mark.parametrize("page", ["docs/design.md", "CONTRIBUTING.md"])
def test_every_folder_of_the_package_has_its_place(page):
    text = (ROOT / page).read_text()
    folders = [path.parent.name for path in (ROOT / "ferrite").glob("*/__init__.py")]
    assert len(folders) > 15
    assert not [name for name in folders if f"ferrite/{name}/" not in text]


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "file"), [("K", "ir/kernel/laws.py"), ("P", "ir/program/laws.py")])
def test_the_page_about_soundness_counts_the_laws(kind, file):
    laws = re.findall(rf"^{kind}(\d+) ", (ROOT / "ferrite" / file).read_text(), re.MULTILINE)
    assert f"{kind}1 to {kind}{max(map(int, laws))}" in (ROOT / "docs" / "soundness.md").read_text()


LAWS = re.compile(r"^\| ([A-Z])1 to \1(\d+) \| .* \| `([\w/]+\.py)` \| .* \| (.*) \|$", re.MULTILINE)


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "count", "file", "tests"), LAWS.findall((ROOT / "docs" / "design.md").read_text()))
def test_every_law_is_checked_and_broken_where_the_design_says(kind, count, file, tests):
    text = (ROOT / "ferrite" / file).read_text()
    numbered = re.findall(rf"^{kind}(\d+) ", text, re.MULTILINE)
    assert numbered == [str(number) for number in range(1, int(count) + 1)]
    folder = (ROOT / "ferrite" / file).parent
    raised = {law for path in folder.rglob("*.py") for law in re.findall(rf'"{kind}(\d+)"', path.read_text())}
    assert raised == set(numbered)
    broken = "".join((ROOT / test).read_text() for test in re.findall(r"`(tests/.*?)`", tests))
    assert set(re.findall(rf"\b{kind}(\d+)\b", broken)) == set(numbered)


@pytest.mark.quick
def test_the_design_lists_all_laws():
    assert [kind for kind, *_ in LAWS.findall((ROOT / "docs" / "design.md").read_text())] == ["G", "P", "K", "S", "H"]


@pytest.mark.quick
@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name)
def test_prose_fits_into_120_columns(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")]
    assert not lines, "\n".join(lines)


def test_doctests():
    attempted = 0
    for info in pkgutil.walk_packages(ferrite.__path__, "ferrite."):
        if info.name == "ferrite.__main__":
            continue
        module = importlib.import_module(info.name)
        if ">>>" not in Path(str(module.__file__)).read_text():
            continue  # to look for examples in every object takes far longer
        results = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
        assert results.failed == 0, info.name
        attempted += results.attempted
    assert attempted >= 5
