"""From the records of compilations to the data of a report."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ferrite.cache import Outcome
from ferrite.capture import torch_dynamo
from ferrite.debug import CompileRecord, GraphDetails, GraphRecord, explained
from ferrite.errors import ModelLine
from ferrite.reports import data
from ferrite.reports.memory import memory_data
from ferrite.reports.passes import near_misses, pass_data, passes_of, with_skipped
from ferrite.reports.sources import SourceLines
from ferrite.reports.steps import Steps
from ferrite.reports.texts import GraphTexts, digest_of

MAX_CODE_CHARACTERS = 8_000_000  # of generated code in a report: what is beyond is left out, and it says so


def gather(records: Sequence[CompileRecord], limits: Sequence[data.Limits] = ()) -> data.Report:
    import ferrite

    places, notes = SourceLines(), list[str]()
    budget = Budget(MAX_CODE_CHARACTERS)
    compiles = [compile_data(record, places, budget) for record in records]
    breaks = [
        data.GraphBreak(each.reason, places.at(each.file, each.line) if each.file else -1, each.function)
        for each in torch_dynamo.graph_breaks()
    ]
    if budget.left_out:
        notes.append(f"The code of {budget.left_out} kernels is left out: the page would be too large.")
    if any(not graph.detailed for compile in compiles for graph in compile.graphs):
        notes.append(
            "Some graphs were compiled before a report was asked for, so that less is known of them. To see all: "
            "FERRITE_REPORT=page.html, or the option report, before they are compiled."
        )
    files, lines = places.files()
    return data.Report(
        format=data.FORMAT,
        version=data.VERSION,
        made=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=command(),
        versions={
            "ferrite": ferrite.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **other_versions(),
        },
        machine=machine(),
        files=files,
        places=lines,
        compiles=tuple(compiles),
        breaks=tuple(breaks),
        limits=tuple(limits),
        notes=tuple(notes),
    )


def command() -> str:
    program, *arguments = sys.orig_argv
    return shlex.join([os.path.basename(program), *arguments])[:500]


class Budget:
    """How much generated code there is room for."""

    def __init__(self, characters: int) -> None:
        self.left, self.left_out = characters, 0

    def has_room_for(self, text: data.Text) -> bool:
        size = sum(len(line) + 4 for line in text.lines)
        if size > self.left:
            self.left_out += 1
            return False
        self.left -= size
        return True


def other_versions() -> dict[str, str]:
    import importlib.metadata

    found = {}
    for name in ("llvmlite", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    found = {"processor": processor_name(), "system": platform.system(), "cores": str(os.cpu_count() or 1)}
    found["threads"] = str(torch.get_num_threads())
    if torch.cuda.is_available():
        found["GPU"] = ", ".join(
            dict.fromkeys(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        )
    return found


def processor_name() -> str:
    from ferrite.codegen.llvm import host_processor

    try:
        return f"{host_processor().cpu} ({platform.machine()})"
    except Exception:  # without LLVM
        return platform.machine()


# --- one compilation --------------------------------------------------------------------------------------------------


def compile_data(record: CompileRecord, places: SourceLines, budget: Budget) -> data.Compile:
    capture = record.capture
    matched = {id(graph): details for graph in record.graphs if (details := details_of(graph, record)) is not None}
    taken = {id(each) for each in matched.values()}
    before = [before_data(each, record, places) for each in record.details if id(each) not in taken and each.steps]
    known = {graph.kind for graph in before}
    plain = [
        data.Graph(
            "torch" if stage == "pre_grad" else stage, title_of(stage), -1, False, passes=plain_passes(stage, passes)
        )
        for stage, passes in record.passes.items()
        if ("torch" if stage == "pre_grad" else stage) not in known
    ]
    graphs = [graph_data(graph, matched.get(id(graph)), places, budget) for graph in record.graphs]
    return data.Compile(
        title=str(record.line) if record.line is not None else "a graph",
        place=places.of(record.line),
        number=capture.number if capture is not None else "",
        recompiled=capture.recompiled if capture is not None else None,
        guards=capture.guards if capture is not None else (),
        options=record.options.changed(),
        stages=dict(record.stages),
        graphs=(*plain, *before, *graphs),
        cache=tuple(cache_data(each) for each in record.asked),
        saved=tuple(saved_data(record, places)),
        tuning=tuple(
            data.Tuned(str(problem), found.torch, found.ours, found.how)
            for problem, found in sorted(record.tuning.items(), key=str)
        ),
    )


def details_of(graph: GraphRecord, record: CompileRecord) -> GraphDetails | None:
    for each in record.details:
        if each.compiled is not None and each.compiled.executable.source.commented == graph.source:
            return each
    return None


def title_of(kind: str) -> str:
    titles = {"torch": "torch calls", "pre_grad": "torch calls", "joint": "forward and backward"}
    return titles.get(kind, kind)


def plain_passes(stage: str, passes: Sequence[Any]) -> tuple[data.Pass, ...]:
    return tuple(pass_data(stage, each) for each in passes)


def cache_data(outcome: Outcome) -> data.CacheQuestion:
    found = explained(outcome)
    return data.CacheQuestion(
        outcome.what,
        outcome.result,
        outcome.reason,
        outcome.key.digest[:12] if outcome.key is not None else "",
        outcome.seconds,
        found.nearest[:12],
        tuple(data.Difference(each.name, each.there, each.here) for each in found.differences[:40]),
    )


def saved_data(record: CompileRecord, places: SourceLines) -> list[data.SavedValue]:
    if (saved := record.saved) is None:
        return []
    pairs = [("saved", value) for value in saved.kept] + [("recomputed", value) for value in saved.recomputed]
    return [data.SavedValue(how, each.operator, each.about, each.bytes, places.of(each.line)) for how, each in pairs]


# --- one graph --------------------------------------------------------------------------------------------------------


def before_data(details: GraphDetails, record: CompileRecord, places: SourceLines) -> data.Graph:
    """A graph that others were made of: of torch calls, or of forward and backward."""
    first, passes, last = passes_of(details)
    return data.Graph(
        kind=details.kind,
        title=title_of(details.kind),
        place=-1,
        detailed=True,
        operators=len(last),
        rows=tuple(row.text for row in details.rows),
        first=first,
        passes=with_skipped(record.passes.get("pre_grad" if details.kind == "torch" else details.kind, ()), passes),
        near_misses=near_misses(details, places),
        nodes=nodes_of(details, last, places),
    )


def nodes_of(details: GraphDetails, rows: Sequence[int], places: SourceLines) -> tuple[data.Node, ...]:
    return tuple(data.Node(details.rows[row].name, row, places.of(details.rows[row].line)) for row in rows)


def graph_data(graph: GraphRecord, details: GraphDetails | None, places: SourceLines, budget: Budget) -> data.Graph:
    plain = data.Graph(
        kind=graph.kind,
        title=graph.kind,
        place=places.of(graph.line),
        detailed=False,
        operators=graph.operators,
        failure=graph.failure,
        passes=tuple(pass_data("", each) for each in graph.passes),
        steps=tuple(launches_without_details(graph, places)),
        eager_calls=tuple(
            data.EagerCall(each.operator, each.reason, places.of(each.line)) for each in graph.eager_calls
        ),
        not_fused=tuple(data.NotFused(each.nodes, each.group, each.refusal.reason) for each in graph.not_fused),
        not_recorded=tuple(map(str, graph.not_recorded)),
        memory=data.Memory(graph.memory.peak, graph.memory.eager) if graph.memory is not None else None,
    )
    if graph.source:
        text = data.Text("host program", tuple(graph.source.rstrip("\n").split("\n")), ())
        plain = replace(plain, texts=(text,), host=0)
    if details is None or details.compiled is None:
        return plain
    compiled = details.compiled
    first, passes, last = passes_of(details)
    nodes = nodes_of(details, last, places)
    rows = [details.rows[row] for row in last]
    texts = GraphTexts(compiled, rows, details.computed)
    program = texts.add_program()
    pairs = compiled.plan.kernels
    made = texts.add_kernels(pairs)
    host = texts.add_host()
    steps = Steps(compiled, texts, places)
    steps.all()
    launches = [step.kernel for step in steps.found]
    kernels = [
        data.Kernel(
            next((step.title for step in steps.found if step.kernel == number), "kernel"),
            device,
            language,
            text,
            code if code >= 0 and budget.has_room_for(texts.texts[code]) else -1,
            launches.count(number),
            digest_of(kernel),
        )
        for number, ((device, kernel), (text, code, language)) in enumerate(zip(pairs, made, strict=True))
    ]
    kept = {program, host, *(each.text for each in kernels), *(each.code for each in kernels)}
    shown = [
        text if number in kept else data.Text(text.title, ("; left out",), (0,))
        for number, text in enumerate(texts.texts)
    ]
    return replace(
        plain,
        detailed=True,
        rows=tuple(row.text for row in details.rows),
        first=first,
        passes=with_skipped(graph.passes, passes),
        near_misses=near_misses(details, places),
        nodes=nodes,
        sets=texts.sets.data(),
        texts=tuple(shown),
        program=program,
        host=host,
        kernels=tuple(kernels),
        steps=tuple(steps.with_times(details)),
        memory=memory_data(compiled.plan, graph.memory, dict(compiled.hints), places),
        collectives=steps.collectives(),
    )


def launches_without_details(graph: GraphRecord, places: SourceLines) -> list[data.Step]:
    """What is known of steps without the plan: kernels, then calls."""
    found = [
        data.Step("kernel", each.name, -1, -1, each.region, (), line_numbers(each.lines, places), "", (), None, None)
        for each in graph.kernels
    ]
    for call in graph.eager_calls:
        at = line_numbers(() if call.line is None else (call.line,), places)
        found.append(data.Step("call", call.operator, -1, -1, None, (), at, call.reason, (), None, None))
    return found


def line_numbers(lines: Sequence[ModelLine], places: SourceLines) -> tuple[int, ...]:
    return tuple(map(places.of, lines))
