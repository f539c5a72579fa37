"""Graphs as text in the children that try them: written down when they are captured, and run again."""

from __future__ import annotations

import copy
import json
import logging
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ferrite.debug import graph_file, input_source, settings_of
from ferrite.diagnosis.bisect.checks import compare, seconds_of
from ferrite.diagnosis.user_code import load_module, load_source

FILE = "<graph.py>"


class SourceKeeper(logging.Handler):
    """Writes a graph down as it is captured, with the modes and options that it is compiled under."""

    def __init__(self, path: Path, number: int) -> None:
        super().__init__(logging.DEBUG)
        self.path, self.number = path, number

    def emit(self, record: logging.LogRecord) -> None:
        compilation = getattr(record, "compilation", None)
        if compilation is None or compilation.record.number != self.number or self.path.exists():
            return
        inputs = compilation.inputs
        settings = {name: value for name, value in settings_of(compilation.options).items() if name != "cache"}
        about = {"grad": compilation.grad_enabled, "dynamic": inputs.dynamic, "options": settings}
        self.path.with_suffix(".json").write_text(json.dumps(about))
        self.path.write_text(graph_file(compilation.gm, inputs.sources))


def check_source(text: str, about: Mapping[str, Any], timed: bool = False) -> Callable[[], float | None]:
    """A check that a graph, as text, gives what it gives in eager; `timed`: by how many seconds it is slower."""

    def check() -> float | None:
        if setup := about.get("setup"):
            load_module(setup)
        torch.manual_seed(0)
        module = load_source(text, FILE)
        graph, inputs, grad = module.Graph(), module.make_inputs(), about["grad"]
        try:
            with torch.set_grad_enabled(grad):
                graph(*copy.deepcopy(inputs))
        except Exception:
            return None  # it is no graph that eager knows
        common = {"grad": grad, "dynamic": about["dynamic"] or None, "options": about["options"]}
        found = compare(graph, inputs, **common, timed=timed)
        return None if found is None else found - seconds_of(graph, inputs, grad)

    return check


def describe_values(text: str, about: Mapping[str, Any], into: Path) -> None:
    """Write down how everything that a graph computes can be made again as an input, by name."""
    import sys

    module = load_source(text, FILE)
    graph, inputs = module.Graph(), module.make_inputs()
    found: dict[str, str] = {}

    def look(frame: types.FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename != FILE or frame.f_code.co_name != "forward":
            return None
        for name, value in frame.f_locals.items():
            if name not in found and name != "self" and value is not None:
                found[name] = input_source(value)
        return look

    with torch.set_grad_enabled(about["grad"]):
        sys.settrace(look)
        try:
            graph(*inputs)
        finally:
            sys.settrace(None)
    into.write_text(json.dumps(found))
