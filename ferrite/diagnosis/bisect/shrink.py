"""The smallest graph that still shows it: calls left out, then results, then sizes made smaller.

A captured graph is Python text (`graph_file`): one assignment per call. Leaving a call out makes its result an input,
if somebody reads it; so any part of a graph is a graph. Nothing runs in this process: it works on the text, and every
try is a child.
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ferrite.debug import log
from ferrite.diagnosis.bisect.probe import Prober, TryResult
from ferrite.diagnosis.bisect.sources import SourceKeeper, check_source, describe_values

MAX_TRIES = 80
STAND_IN = re.compile(r"stand_in\(shape=\(([^)]*)\), stride=\(([^)]*)\)")


@dataclass(frozen=True)
class Small:
    """A graph as text, with what it takes to run it: about its modes and options. `calls`: how many it has."""

    text: str
    about: Mapping[str, Any]
    calls: int
    before: int  # calls that the captured graph had


@dataclass(frozen=True)
class Statement:
    """One assignment of a graph's `forward`: what it defines, its text, and the names that it reads."""

    name: str
    text: str
    reads: frozenset[str]


@dataclass(frozen=True)
class GraphSource:
    """The text of a graph, taken apart. `values`: how each name can be made again as an input. `head`: imports and the
    classes of graphs inside; `attributes`: lines of `__init__`."""

    head: str
    attributes: tuple[tuple[str, str], ...]
    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    values: Mapping[str, str]
    order: tuple[str, ...] = ()  # of inputs
    outputs: tuple[str, ...] | None = None  # None: whatever is read elsewhere
    everything: tuple[Statement, ...] = field(default=(), compare=False)

    def text(self) -> str:
        defined = [statement.name for statement in self.statements]
        inputs = [name for name in self.order if any(name in each.reads for each in self.statements)]
        inputs += self.cut(defined)
        rows = [f"    {each.name} = {each.text}" for each in self.statements]
        body = "\n".join(
            f"    {row}" for row in [*rows, f"    return ({''.join(f'{name}, ' for name in self.leaving())})"]
        )
        used = "\n".join(row for name, row in self.attributes if f"self.{name}" in body)
        init = f"    def __init__(self):\n        super().__init__()\n{used}\n" if used else ""
        made = "".join(f"        {self.values[name]},\n" for name in inputs)
        return (
            f"{self.head}\n\nclass Graph(torch.nn.Module):\n{init}"
            f"    def forward({', '.join(['self', *inputs])}):\n{body}\n\n\n"
            f"def make_inputs():\n    return [\n{made}    ]\n"
        )

    def cut(self, defined: Sequence[str]) -> list[str]:
        """What is read here, and computed by what was left out."""
        read = dict.fromkeys(name for each in self.statements for name in sorted(each.reads))
        return [name for name in read if name not in defined and name not in self.order]

    def leaving(self) -> list[str]:
        """Results: of the graph, and what was read by something that is not here any more."""
        if self.outputs is not None:
            return list(self.outputs)
        here = {each.name for each in self.statements}
        gone = (each for each in self.everything if each.name not in here)
        wanted = {*self.results, *(name for each in gone for name in each.reads)}
        return [each.name for each in self.statements if each.name in wanted]


def taken_apart(source: str, values: Mapping[str, str]) -> GraphSource:
    """A text of `graph_file` as data. ValueError for one that is not of assignments alone."""
    tree = ast.parse(source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    (outer,) = [node for node in classes if node.name == "Graph"]
    functions = {node.name: node for node in outer.body if isinstance(node, ast.FunctionDef)}
    forward, statements, results = functions["forward"], list[Statement](), tuple[str, ...]()
    for node in forward.body:
        if isinstance(node, ast.Return) and node.value is not None:
            results = tuple(sorted(names_in(node.value)))
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            reads = frozenset(names_in(node.value))
            statements.append(Statement(node.targets[0].id, ast.unparse(node.value), reads))
        elif not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)):
            raise ValueError(f"no assignment: {ast.unparse(node)}")
    statements = [each for each in statements if each.text != "None"]  # what is freed
    local = {each.name for each in statements} | {argument.arg for argument in forward.args.args[1:]}
    statements = [replace(each, reads=each.reads & local) for each in statements]
    order = tuple(argument.arg for argument in forward.args.args[1:])
    head = "\n".join(ast.unparse(node) for node in tree.body if node is not outer and not is_maker(node))
    attributes = tuple(
        (node.targets[0].attr, f"        {ast.unparse(node)}")
        for node in functions["__init__"].body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
    )
    results = tuple(name for name in results if name in local)
    return GraphSource(head, attributes, tuple(statements), results, values, order, everything=tuple(statements))


def is_maker(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "make_inputs"


def names_in(node: ast.expr) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


# --- making it smaller ------------------------------------------------------------------------------------------------


class Shrinker:
    def __init__(
        self, prober: Prober, settings: Mapping[str, Any], about: Mapping[str, Any], kind: str, stage: str
    ) -> None:
        self.prober, self.settings, self.about, self.kind, self.stage = prober, settings, about, kind, stage
        self.left, self.limit = MAX_TRIES, 0.0  # tries, and seconds

    def outcome(self, text: str, settings: Mapping[str, Any] | None = None) -> TryResult:
        self.left -= 1
        work = check_source(text, self.about, timed=self.kind == "slow")
        return self.prober.run(self.settings if settings is None else settings, work, self.limit)

    def shows(self, found: TryResult) -> bool:
        if self.kind == "slow":
            return found.cost is not None and found.cost > self.limit
        return found.kind == self.kind and found.stage == self.stage

    def shows_it(self, graph: GraphSource) -> bool:
        return (
            self.left > 0
            and bool(graph.statements)
            and bool(graph.leaving())
            and self.shows(self.outcome(graph.text()))
        )

    def fewer_calls(self, graph: GraphSource) -> GraphSource:
        size = (len(graph.statements) + 1) // 2
        while size:
            place = len(graph.statements)
            while place > 0:
                kept = graph.statements[: max(0, place - size)] + graph.statements[place:]
                smaller = replace(graph, statements=kept)
                graph = smaller if self.shows_it(smaller) else graph
                place -= size
            size = 0 if size == 1 else (size + 1) // 2
        return graph

    def fewer_results(self, graph: GraphSource) -> GraphSource:
        for name in graph.leaving():
            outputs = tuple(other for other in graph.leaving() if other != name)
            smaller = replace(graph, outputs=outputs)
            graph = smaller if outputs and self.shows_it(smaller) else graph
        return graph

    def smaller_sizes(self, graph: GraphSource) -> GraphSource:
        """Every number among the sizes in turn, wherever it stands: two if that does, else halves."""
        tried: set[tuple[int, int]] = set()
        while self.left > 0:
            sizes = sorted({size for value in self.made(graph) for size in sizes_in(value) if size > 2}, reverse=True)
            steps = [(size, new) for size in sizes for new in dict.fromkeys((2, size // 2)) if (size, new) not in tried]
            if not steps:
                break
            tried.add(steps[0])
            smaller = with_size(graph, *steps[0])
            graph = smaller if self.shows_it(smaller) else graph
        return graph

    def made(self, graph: GraphSource) -> list[str]:
        inputs = {name for each in graph.statements for name in each.reads}
        return [graph.values[name] for name in inputs if name in graph.values]


def sizes_in(value: str) -> list[int]:
    found = STAND_IN.match(value)
    return [int(size) for size in found[1].split(",") if size.strip()] if found else []


def with_size(graph: GraphSource, old: int, new: int) -> GraphSource:
    """One size replaced everywhere: in inputs, which lie in memory in the same order as before, and in the calls."""
    number = re.compile(rf"(?<![\w.]){old}(?![\w.])")
    statements = tuple(replace(each, text=number.sub(str(new), each.text)) for each in graph.statements)
    values = {name: resized(value, old, new) for name, value in graph.values.items()}
    attributes = tuple((name, resized(row, old, new)) for name, row in graph.attributes)
    return replace(graph, statements=statements, values=values, attributes=attributes)


def resized(value: str, old: int, new: int) -> str:
    def again(found: re.Match[str]) -> str:
        sizes, strides = ([int(number) for number in part.split(",") if number.strip()] for part in found.groups())
        sizes = [new if size == old else size for size in sizes]
        made, step = list(strides), 1
        for place in sorted(range(len(sizes)), key=lambda place: (strides[place], -place)):
            if strides[place]:
                made[place], step = step, step * max(sizes[place], 1)
        return f"stand_in(shape={tuple(sizes)}, stride={tuple(made)}"

    return STAND_IN.sub(again, value)


def shrunk(
    prober: Prober,
    settings: Mapping[str, Any],
    without: Mapping[str, Any],
    symptom: TryResult,
    setup: str,
    tell: Callable[[str], None],
) -> Small | None:
    """The smallest graph that fails alone as the check does, on numbers of no meaning, and does not `without` what is
    to blame; None where none does: then it takes the user's own numbers, or what is around the graph."""
    with tempfile.TemporaryDirectory(prefix="ferrite-bisect-") as folder:
        path = Path(folder) / "graph.py"
        number = int(str(settings.get("graphs", "0")).rpartition("-")[2])

        def check() -> Any:
            log.addHandler(SourceKeeper(path, number))
            return prober.check()

        prober.run(settings, check)
        if not path.exists():
            return None
        source, about = path.read_text(), {**json.loads(path.with_suffix(".json").read_text()), "setup": setup}
        values_file = Path(folder) / "values.json"
        prober.run({"graphs": "none"}, lambda: describe_values(source, about, values_file))
        values = json.loads(values_file.read_text()) if values_file.exists() else {}
    alone = {name: value for name, value in settings.items() if name != "graphs"}
    shrinker = Shrinker(prober, alone, about, symptom.kind, symptom.stage)
    found = shrinker.outcome(source)
    if symptom.kind == "slow" and found.cost is not None:
        shrinker.limit = found.cost / 3  # a part of it may be of other calls, and what is measured differs
    if not shrinker.shows(found):
        tell("the graph alone, on other numbers, does not show it")
        return None
    if shrinker.shows(shrinker.outcome(source, {**alone, **{k: v for k, v in without.items() if k != "graphs"}})):
        tell("the graph alone shows it, but with another cause as well")
    try:
        graph = whole = taken_apart(source, values)
        if not shrinker.shows_it(whole):
            raise ValueError("taken apart, it does not show it")
    except (ValueError, KeyError, SyntaxError) as problem:
        tell(f"the graph is not made smaller: {problem}")
        return Small(source, about, source.count(" = "), source.count(" = "))
    for step in (shrinker.fewer_calls, shrinker.fewer_results, shrinker.smaller_sizes):
        graph = step(graph)
        tell(f"{step.__name__.replace('_', ' ')}: {len(graph.statements)} calls of {len(whole.statements)}")
    return Small(graph.text(), about, len(graph.statements), len(whole.statements))
