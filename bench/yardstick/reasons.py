"""Why a test failed: one line, a kind, and whether it asks for Inductor's own insides.

Kinds, the worst first: `crashed` and `hung` are told by the parent; the others from the exception.

    values      numbers differ from those of eager
    layout      types, shapes, strides or memory differ
    no error    eager's error did not come
    exception   an error that is not eager's
    strict      ferrite would have run the graph in eager
    internals   the statement that failed reads generated code, counters or metrics of Inductor
    assertion   any other assertion
"""

from __future__ import annotations

import ast
import linecache
import re
import traceback
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("crashed", "hung", "values", "layout", "no error", "exception", "assertion", "strict", "internals")
LENGTH = 220
VALUES = re.compile(r"Tensor-likes are not (close|equal)|not allclose|allclose.* is not true|Mismatched elements")
LAYOUT = re.compile(r"(?i)\b(strides?|storage|data_ptr|dtypes?|shapes?|is_contiguous|layout|memory_format)\b")
NO_ERROR = re.compile(r"(?i)\bnot raised\b|did not raise|not triggered|did not warn")
INSIDES = re.compile(r"torch\._inductor\.(?!config\b)|counters\[.inductor.\]")
HARMLESS = ("torch._inductor.config", "torch._inductor.test_case")  # settings, and the class that tests derive from
TEXTS = ("FileCheck",)  # a check of generated text
WITH_RESULT = "run_and_get"  # helpers that return the result first, then what was generated


@dataclass(frozen=True)
class Reason:
    kind: str
    line: str


def reason_of(error: BaseException, file: Path) -> Reason:
    """Why a test of this file failed with this error."""
    bug = next((each for each in chain(error) if type(each).__name__ == "CompilerBug"), None)
    if bug is not None:
        return Reason("strict", one_line(bug))
    line = f"{type(error).__name__}: {one_line(error)}"
    if VALUES.search(str(error)):
        return Reason("values", line)
    insides = insides_read(error, file)
    if insides is not None:
        return Reason("internals", f"{insides}: {line}"[:LENGTH])
    if NO_ERROR.search(line):
        return Reason("no error", line)
    if not isinstance(error, AssertionError):
        return Reason("exception", line)
    return Reason("layout" if LAYOUT.search(line) else "assertion", line)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        inner = getattr(error, "inner_exception", None)  # Dynamo's wrapper of a backend's error
        error = inner if isinstance(inner, BaseException) else error.__cause__ or error.__context__


def one_line(error: BaseException) -> str:
    """The lines of a message up to a blank one or a traceback, as one."""
    kept: list[str] = []
    for line in str(error).splitlines():
        if line.startswith(("Traceback", "Set TORCHDYNAMO", "To execute this test")):
            break
        if line.startswith("  kept "):  # a folder that is gone when the line is read
            continue
        kept += [line.strip()] if line.strip() else []
        if len(kept) == 6:
            break
    return " ".join(" / ".join(kept).replace("|", "¦").split())[:LENGTH]


def insides_read(error: BaseException, file: Path) -> str | None:
    """What of Inductor's insides the failing statement of the test reads, or None."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return None
    raised_in = frames[-1][0].f_globals.get("__name__", "")
    if raised_in.startswith("torch._inductor") and not raised_in.startswith(HARMLESS):
        return raised_in
    folder = str(file.resolve().parent)
    for frame, number in reversed(frames):  # the innermost statement that uses them
        if str(Path(frame.f_code.co_filename).resolve()).startswith(folder):
            found = insides_in_frame(frame, number)
            if found is not None:
                return found
    return None


def insides_in_frame(frame: types.FrameType, number: int) -> str | None:
    function = function_at(frame.f_code.co_filename, number)
    if function is None:
        return None
    known = {**frame.f_globals, **frame.f_locals}
    derived: set[str] = set()
    for statement in statements(function):
        if isinstance(statement, ast.Assign) and insides_in(statement.value, known, derived) is not None:
            derived |= derived_names(statement)
        elif isinstance(statement, ast.Assign):
            derived -= names_in(*statement.targets)
        first, last = span(statement)
        if first <= number <= last:
            return next(filter(None, (insides_in(part, known, derived) for part in head_of(statement))), None)
    return None


def insides_in(node: ast.AST, known: Mapping[str, Any], derived: set[str]) -> str | None:
    """The first name or text in a piece of syntax that means Inductor's insides."""
    found = INSIDES.search(ast.unparse(node))
    if found is not None:
        return found.group().rstrip(".")
    for name in sorted(names_in(node)):
        if name in derived or name in TEXTS:
            return name
        value = known.get(name)
        home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if isinstance(home, str) and home.startswith("torch._inductor") and not home.startswith(HARMLESS):
            if callable(value) and hasattr(value, "__wrapped__") and name == "compile_fx":
                continue  # the one that was exchanged
            return name
    return None


def derived_names(statement: ast.Assign) -> set[str]:
    """The names that an assignment makes stand for something of Inductor's."""
    names: set[str] = set()
    for target in statement.targets:
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        if isinstance(target, ast.Tuple) and WITH_RESULT in ast.unparse(statement.value):
            parts = parts[1:]
        names |= names_in(*parts)
    return names


def names_in(*nodes: ast.AST) -> set[str]:
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def function_at(path: str, number: int) -> ast.FunctionDef | None:
    """The innermost function of a file around a line."""
    found = None
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef) and span(node)[0] <= number <= span(node)[1]:
            found = node  # ast.walk goes from the outside to the inside
    return found


def statements(function: ast.FunctionDef) -> list[ast.stmt]:
    """The simple statements of a function in the order of the text, and the heads of `with` and the like."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
    return sorted(found, key=lambda node: node.lineno)


def span(node: ast.stmt) -> tuple[int, int]:
    """The lines of a statement; of a compound one, those of its head."""
    body = getattr(node, "body", None)
    if isinstance(node, ast.FunctionDef) or not isinstance(body, list):
        return node.lineno, node.end_lineno or node.lineno
    return node.lineno, max(node.lineno, body[0].lineno - 1)


def head_of(statement: ast.stmt) -> list[ast.AST]:
    """A statement, or of one with others inside it the expressions that stand before them."""
    if not isinstance(getattr(statement, "body", None), list):
        return [statement]
    found: list[ast.AST] = list(getattr(statement, "items", []))
    return found + [part for name in ("test", "iter") if (part := getattr(statement, name, None)) is not None]


_PARSED: dict[str, ast.Module] = {}


def parsed(path: str) -> ast.Module:
    if path not in _PARSED:
        try:
            _PARSED[path] = ast.parse("".join(linecache.getlines(path)))
        except SyntaxError:
            _PARSED[path] = ast.Module([], [])
    return _PARSED[path]
