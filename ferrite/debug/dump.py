"""`FERRITE_DUMP=dir`: every graph before and after each pass that changed it, as Python that runs by itself.

dir/003_forward/00_captured.py            the graph as the stage got it
dir/003_forward/05_remove_noop_ops.py     after this pass
dir/003_forward/host.py                   the host program
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import torch

from ferrite.debug.repro import HEAD, input_source, stand_in_source
from ferrite.errors import FerriteWarning
from ferrite.graph import fake_value
from ferrite.graph.as_python import module_source
from ferrite.pipeline import PassRecord

_numbers = itertools.count()


class Dump:
    """Writes the steps of one graph; a folder that cannot be written costs one warning, nothing else."""

    def __init__(self, folder: Path | None, kind: str) -> None:
        self.folder = folder / f"{next(_numbers):03}_{kind}" if folder is not None else None
        self.steps = 0

    def graph(self, name: str, gm: torch.fx.GraphModule) -> None:
        if self.folder is not None:
            self.write(f"{self.steps:02}_{name}.py", runnable(gm))

    def after_pass(self, record: PassRecord, gm: torch.fx.GraphModule) -> None:
        self.steps += 1
        if record.changed:
            self.graph(record.name, gm)

    def write(self, name: str, text: str) -> None:
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text, encoding="utf-8")
        except OSError as problem:
            warnings.warn(f"ferrite: could not write {self.folder / name}: {problem}", FerriteWarning, stacklevel=2)
            self.folder = None


def runnable(gm: torch.fx.GraphModule) -> str:
    """The graph as a script: stand-ins for its inputs, then one run."""
    values = [fake_value(node) for node in gm.graph.nodes if node.op == "placeholder"]
    inputs = "".join(f"        {input_source(value)},\n" for value in values)
    tail = 'if __name__ == "__main__":\n    print(Graph()(*make_inputs()))\n'
    return f"{HEAD}{module_source(gm, stand_in_source)}\n\ndef make_inputs():\n    return [\n{inputs}    ]\n\n\n{tail}"
