"""`python -m ferrite replay DUMP/003_forward --from STAGE`: one stage, and those behind it, again, from what the dump
holds; edited by hand, if you like.

    captured     00_captured.py, the graph as it came: passes, lower, schedule, codegen, load
    lower        the graph after the last pass, the .py file with the highest number
    schedule     program.py, the loop program, with objects.json beside it
    codegen      kernels.py, the kernels as text of the loop IR; the rest of the plan is made anew from program.py
    load         kernel_0.ll (kernel_0.py on a GPU) and the like: what the kernels are compiled from

Numbers are stand-ins: a dump holds shapes and types, no contents. What is run is held against the captured graph in
eager, on the same numbers.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ferrite.backend import compile_graph
from ferrite.capture import CapturedGraph, GraphKind, torch_api
from ferrite.codegen import Executable, named_objects, verify_host
from ferrite.debug import Compilation, missing, stand_in
from ferrite.diagnosis.bisect import compare
from ferrite.diagnosis.user_code import load_source
from ferrite.errors import UserError, nearest
from ferrite.ir.kernel import Kernel, parse_kernel, verify_kernel
from ferrite.ir.program import parse, verify_program
from ferrite.options import Options, resolve
from ferrite.passes import Tolerance, unlike_values
from ferrite.runtime import Boxed, least_seconds, load_host, run_in_eager
from ferrite.schedule import Plan, Run, Step, device_type, make_plan
from ferrite.targets import Targets, buildable, executable_of, kernel_sources, runs_of, targets_for

From = Literal["captured", "lower", "schedule", "codegen", "load"]
STAGES: tuple[From, ...] = ("captured", "lower", "schedule", "codegen", "load")
KERNEL = re.compile(r"kernel_(\d+)\.(ll|py)$")
HEAD = re.compile(r"^# kernel (\d+) on [^\n]*\n", re.MULTILINE)


@dataclass(frozen=True)
class Replayed:
    """How it went: what differs from eager, if anything, and seconds of a call. `files`: what was made, by name."""

    stage: str
    difference: str | None
    seconds: float
    files: Mapping[str, str]

    def __str__(self) -> str:
        same = "the same as the captured graph in eager" if self.difference is None else f"differs: {self.difference}"
        return f"from {self.stage}: {same}; {self.seconds * 1e3:.3f} ms a call"


class Dumped:
    """The folder of one graph, with files that stand in for some of its own."""

    def __init__(self, folder: Path, instead: Mapping[str, Path]) -> None:
        self.folder, self.instead = folder, dict(instead)
        if not (folder / "replay.json").is_file():
            inside = sorted(path.parent.name for path in folder.glob("*/replay.json"))
            raise UserError(
                f"{folder} is no dump of a graph",
                {"inside are": ", ".join(inside) or None, "to make one": "FERRITE_DUMP=dir python program.py"},
            )
        self.about: dict[str, Any] = json.loads((folder / "replay.json").read_text())
        unknown = [name for name in self.instead if not (folder / name).exists()]
        if unknown:
            given, names = self.instead[unknown[0]], [path.name for path in folder.iterdir()]
            stands_for = nearest(unknown[0], names) or "kernels.py"
            raise UserError(
                f"{folder} holds no {unknown[0]}",
                {"to say which": f"--replace {stands_for}={given}"},
            )

    def text(self, name: str) -> str:
        path = self.instead.get(name, self.folder / name)
        if not path.is_file():
            raise UserError(f"{self.folder} holds no {name}", {"because": "the compile did not come so far"})
        return path.read_text()

    def graphs(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("[0-9][0-9]*_*.py"))

    def kernel_files(self) -> dict[int, str]:
        """Sources of kernels, by number."""
        found = (KERNEL.match(path.name) for path in self.folder.iterdir())
        return {int(each[1]): each[0] for each in found if each is not None}


def replay(folder: Path, stage: From | None = None, instead: Mapping[str, Path] | None = None) -> Replayed:
    """Run a graph again from a stage on: by default from the first that a replaced file belongs to."""
    dumped = Dumped(folder, instead or {})
    stage = stage or stage_of(list(dumped.instead))
    if dumped.about["kind"] in ("torch", "joint"):
        return replay_whole(dumped)
    torch.manual_seed(0)
    captured = load_source(dumped.text("00_captured.py"))
    graph, inputs = captured.Graph(), captured.make_inputs()
    options = resolve({**dumped.about["options"], "cache": False, "strict": True})
    if stage in ("captured", "lower"):
        function, files = compiled_graph(dumped, stage, inputs, options), dict[str, str]()
    else:
        function, files = from_program(dumped, stage, graph, options)
    return held_against(function, graph, inputs, stage, files)


def stage_of(names: Sequence[str]) -> From:
    """The first stage that files belong to."""
    stages = [
        "load" if KERNEL.match(name) else {"kernels.py": "codegen", "program.py": "schedule"}.get(name, "captured")
        for name in names
    ]
    return next((stage for stage in STAGES if stage in stages), "captured")


def replay_whole(dumped: Dumped) -> Replayed:
    """A graph of torch calls: the whole compiler, forward and backward."""
    captured, start = load_source(dumped.text("00_captured.py")), time.perf_counter()
    options = {**dumped.about["options"], "cache": False, "strict": True}
    difference = None
    try:
        compare(captured.Graph(), captured.make_inputs(), grad=dumped.about["grad"], options=options)
    except AssertionError as problem:
        difference = str(problem)
    return Replayed("captured", difference, time.perf_counter() - start, {})


# --- from a graph -----------------------------------------------------------------------------------------------------


def compiled_graph(dumped: Dumped, stage: From, inputs: Sequence[Any], options: Options) -> Boxed:
    """A functional graph through the compiler; from `lower` on without the passes, which it has behind it."""
    name = "00_captured.py" if stage == "captured" else dumped.graphs()[-1]
    module = load_source(dumped.text(name))
    gm = torch_api.traced(module.Graph(), list(inputs))
    about = dumped.about
    strides = tuple(None if each is None else tuple(each) for each in about["strides"])
    kind = GraphKind(about["kind"])
    graph = CapturedGraph(kind, gm, frozenset(about["static"]), frozenset(about["donated"]), strides)
    settings = replace(options, post_grad=False, joint=False) if stage == "lower" else options
    with torch.no_grad():
        return compile_graph(graph, Compilation(gm, list(inputs), settings))


# --- from a program ---------------------------------------------------------------------------------------------------


def from_program(dumped: Dumped, stage: From, graph: torch.nn.Module, options: Options) -> tuple[Boxed, dict[str, str]]:
    program = parse(dumped.text("program.py"))
    verify_program(program)
    objects = {name: made(source) for name, source in json.loads(dumped.text("objects.json")).items()}
    targets = buildable(targets_for(options, {buffer.device.type for buffer in program.buffers}))
    plan = make_plan(program, {device: target.scheduling for device, target in targets.items()}, verify=True)
    if stage in ("codegen", "load"):
        plan = with_kernels(plan, dumped.text("kernels.py"))
    executable = executable_of(plan, targets, checked=options.check_bounds)
    files = {"program.py": str(program), "kernels.py": plan.kernel_text()}
    files |= {"host.py": executable.source.commented, **kernel_sources(plan, targets, options.check_bounds)}
    if stage == "load":
        executable = with_sources(executable, plan, targets, dumped, files, options)
    source = verify_host(executable.source, objects)
    in_eager = run_in_eager(torch.fx.symbolic_trace(graph)) if "in_eager(" in source.text else None
    named = named_objects(source, objects)
    return load_host(source, runs_of(executable, targets), named, (), in_eager), files


def made(source: str) -> Any:
    """An object of a program, made again."""
    namespace = {"torch": torch, "stand_in": stand_in, "missing": missing, "operator": torch_api.find_operator}
    return eval(source, namespace)


def with_kernels(plan: Plan, text: str) -> Plan:
    """A plan with kernels that were read from a text, by their numbers."""
    kernels = kernels_in(text)
    known = plan.kernels
    if len(kernels) != len(known):
        raise UserError(f"kernels.py has {len(kernels)} kernels, and the plan {len(known)}")
    for kernel in kernels:
        verify_kernel(kernel)
    return with_kernels_of(plan, dict(zip(known, kernels, strict=True)))


def with_kernels_of(plan: Plan, new: Mapping[tuple[str, Kernel], Kernel]) -> Plan:
    def again(step: Step) -> Step:
        if not isinstance(step, Run):
            return step
        launches = [replace(each, kernel=new[each.device, each.kernel]) for each in step.launches]
        return replace(step, launches=tuple(launches))

    bodies = {place: tuple(with_kernels_of(body, new) for body in some) for place, some in plan.bodies.items()}
    return replace(plan, steps=tuple(map(again, plan.steps)), bodies=bodies)


def kernels_in(text: str) -> list[Kernel]:
    """The kernels of a dump, in order: each stands behind a comment with its number."""
    heads = list(HEAD.finditer(text))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    return [parse_kernel(text[head.end() : end]) for head, end in zip(heads, ends, strict=True)]


def with_sources(
    executable: Executable,
    plan: Plan,
    targets: Targets,
    dumped: Dumped,
    files: dict[str, str],
    options: Options,
) -> Executable:
    """Kernels from the sources in the dump, where these are others than what was generated now."""
    kernels, code = list(executable.kernels), dict(executable.code)
    for number, name in dumped.kernel_files().items():
        text = dumped.text(name)
        if text == files.get(name) or number >= len(kernels):
            continue
        device, kernel = plan.kernels[number]
        new, made = targets[device_type(device)].built_from(kernel, text, options.check_bounds)
        code[new], files[name] = made, text
        kernels[number] = (new, kernels[number][1])
    return replace(executable, kernels=tuple(kernels), code=code)


# --- comparing --------------------------------------------------------------------------------------------------------


def held_against(
    function: Boxed, graph: torch.nn.Module, inputs: Sequence[Any], stage: str, files: Mapping[str, str]
) -> Replayed:
    """The outputs of a program and those of the captured graph in eager, on copies of the same inputs."""

    def given() -> list[Any]:
        return [each.clone() if isinstance(each, torch.Tensor) else each for each in inputs]

    with torch.no_grad():
        torch.manual_seed(0)
        eager = list(graph(*given()))
        torch.manual_seed(0)
        ours = list(function(given()))
        seconds = least_seconds(function, arguments=lambda: (given(),))
    difference = None
    for place, (old, new) in enumerate(zip(eager, ours, strict=True)):
        problem = unlike_values(old, new, None, Tolerance(0.0, 0.0, values=True))
        if problem is not None:
            difference = f"output {place}: {problem}"
            break
    return Replayed(stage, difference, seconds, files)
