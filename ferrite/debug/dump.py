"""`FERRITE_DUMP=dir`: every stage of every graph. Graphs are Python that runs by itself.

dir/001_torch/00_captured.py              the graph of torch calls, before autograd has seen it
dir/002_joint/00_captured.py              forward and backward in one, before they are partitioned
dir/003_forward/00_captured.py            the graph as the stage got it
dir/003_forward/05_remove_noop_ops.py     after this pass
dir/003_forward/program.py                the loop program that it is lowered to
dir/003_forward/accesses.txt              why each place that it reads or writes is inside of its buffer
dir/003_forward/31_fuse.txt               after this step of scheduling
dir/003_forward/kernels.py                the kernels, as text of the loop IR
dir/003_forward/kernel_0.ll               what kernel 0 is compiled from (on a GPU: kernel_0.py, for Triton)
dir/003_forward/host.py                   the host program
dir/003_forward/replay.json               what else it takes to run a stage again: `python -m ferrite replay`
"""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ferrite.cache import full_path, make_folders, make_shared, write_over
from ferrite.capture import CapturedGraph, torch_api
from ferrite.codegen import Executable
from ferrite.debug.details import Compiled, GraphDetails, KernelCode, flops_in
from ferrite.debug.memory import hints_of
from ferrite.debug.repro import HEAD, input_source, settings_of, stand_in_source, written
from ferrite.errors import warn_user
from ferrite.graph import fake_value, module_source
from ferrite.ir.program import Program, facts_text
from ferrite.lower import LoweredProgram
from ferrite.options import Options
from ferrite.pipeline import PassRecord
from ferrite.runtime import StepTimes
from ferrite.schedule import Plan

_numbers = itertools.count()


@dataclass
class DumpFolder:
    """Where one compilation writes; None where nothing is asked for, or the folder could not be written. `inside`: the
    folder of ferrite's own that it lies in, if it does."""

    path: Path | None
    inside: Path | None = None

    def make(self, path: Path) -> Path:
        """A folder for one graph, of the user's own."""
        root = full_path(path.parent)
        if self.inside is None:
            make_shared(root)
        else:
            make_folders([full_path(self.inside), root])
        make_folders([root / path.name])
        return root / path.name


class Dump:
    """Writes the steps of one graph; a folder that cannot be written costs one warning, nothing else. `details`: what a
    report is to have of them, where one is asked for."""

    def __init__(self, root: DumpFolder, kind: str, details: GraphDetails | None = None) -> None:
        self.root, self.steps, self.details = root, 0, details
        self.stage = "captured"
        self.name = f"{next(_numbers):03}_{kind}" if root.path is not None else kind

    def graph(self, name: str, gm: torch.fx.GraphModule) -> None:
        if self.details is not None:
            self.details.graph(name, gm)
        self.write_graph(name, gm)

    def write_graph(self, name: str, gm: torch.fx.GraphModule) -> None:
        if self.root.path is not None:
            self.write(f"{self.steps:02}_{name}.py", runnable(gm))

    def after_pass(self, record: PassRecord, gm: torch.fx.GraphModule) -> None:
        self.steps += 1
        if self.details is not None:
            self.details.after_pass(self.stage, record, gm)
        if record.changed:
            self.write_graph(record.name, gm)

    def lowered(self, found: LoweredProgram) -> None:
        """The program that a graph was lowered to, and how the objects that it names can be made again."""
        if self.details is not None:
            self.details.computed = found.computed
        self.write("program.py", lambda: str(found.program))
        self.write("accesses.txt", lambda: facts_text(found.program, found.relations()))
        self.write("objects.json", lambda: objects_text(found.objects))

    def generated(
        self,
        graph: CapturedGraph,
        program: Program,
        plan: Plan,
        executable: Executable,
        targets: Mapping[str, KernelCode],
        sources: Callable[[], Mapping[str, str]],
    ) -> None:
        """What the graph became. `program`: as it was lowered, which the scheduler may have changed since; `sources`:
        what its kernels are compiled from, as files."""
        self.write("host.py", lambda: executable.source.commented)
        if self.root.path is not None:
            for name, text in sources().items():
                self.write(name, text)
        if self.details is not None:
            flops = flops_in(graph.gm)
            self.details.finished(Compiled(program, plan, executable, targets, hints_of(graph.gm), flops))

    def measured(self, is_wanted: bool) -> StepTimes | None:
        """What measures the steps of the graph, where a report is to have their times."""
        if self.details is None or not is_wanted:
            return None
        self.details.times = StepTimes()
        return self.details.times

    def schedule(self, step: str, schedule: object) -> None:
        """What a step of scheduling made."""
        self.steps += 1
        self.write(f"{self.steps:02}_{step}.txt", lambda: str(schedule))

    def write(self, name: str, text: str | Callable[[], str]) -> None:
        """Write a file; a text that costs something to make may be a function, called only where it is wanted."""
        if self.root.path is None:
            return
        text = text() if callable(text) else text
        folder = self.root.path / self.name
        try:
            write_over(self.root.make(folder) / name, written(text))
        except OSError as problem:
            warn_user(f"ferrite: could not write {folder / name}: {problem}")
            self.root.path = None


def objects_text(objects: Mapping[str, Any]) -> str:
    return json.dumps({name: object_source(value) for name, value in objects.items()}, indent=2) + "\n"


def object_source(value: object) -> str:
    """How something that a program names can be made again: a tensor that looks the same, a number, an operator."""
    if isinstance(value, torch.Tensor):
        return input_source(value)
    name = torch_api.operator_name(value)
    return f"operator({name!r})" if name is not None else input_source(value)


def about_calls(options: Options) -> str:
    """replay.json of a graph of torch calls."""
    return json.dumps({"kind": "torch", **about_run(options)}, indent=2) + "\n"


def about_graph(graph: CapturedGraph, options: Options) -> str:
    """replay.json of a functional graph, as it was captured."""
    strides = [None if each is None else [torch_api.size_hint(one) for one in each] for each in graph.output_strides]
    facts = {
        "kind": graph.kind.value,
        "static": sorted(graph.static_inputs),
        "donated": sorted(graph.donated_inputs),
        "strides": strides,
        **about_run(options),
    }
    return json.dumps(facts, indent=2) + "\n"


def about_run(options: Options) -> dict[str, Any]:
    """What a run depends on besides its graph and its numbers."""
    import ferrite

    versions = {"ferrite": ferrite.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "options": settings_of(options),
        "versions": versions,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
    }


def runnable(gm: torch.fx.GraphModule) -> str:
    """The graph as a script: stand-ins for its inputs, then one run."""
    values = [fake_value(node) for node in gm.graph.nodes if node.op == "placeholder"]
    inputs = "".join(f"        {input_source(value)},\n" for value in values)
    tail = 'if __name__ == "__main__":\n    print(Graph()(*make_inputs()))\n'
    return f"{HEAD}{module_source(gm, stand_in_source)}\n\ndef make_inputs():\n    return [\n{inputs}    ]\n\n\n{tail}"
