"""From a node of a graph to the line of the user's model it came from."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable

import torch

from ferrite.errors import ModelLine

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)(?:\n\s+(?P<code>[^\n]+))?')
TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep


def model_line(node: torch.fx.Node) -> ModelLine | None:
    """The innermost line outside torch itself that made this node; None if nothing was recorded."""
    trace = node.meta.get("stack_trace")
    return _innermost(trace) if trace else None


def first_model_line(nodes: Iterable[torch.fx.Node]) -> ModelLine | None:
    """The first line of the model that a graph covers: how a person would name the graph."""
    return next((line for line in map(model_line, nodes) if line is not None), None)


@functools.lru_cache(maxsize=4096)  # many nodes share a line, and a line's trace is long
def _innermost(trace: str) -> ModelLine | None:
    frames = [
        ModelLine(found["file"], int(found["line"]), found["function"].strip(), (found["code"] or "").strip())
        for found in FRAME.finditer(trace)
    ]
    outside = [frame for frame in frames if not frame.file.startswith(TORCH_FOLDER)]
    return (outside or frames)[-1] if frames else None
