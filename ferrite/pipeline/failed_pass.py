"""Tell the user that a pass failed and was left out: what, where in the model, why, and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from ferrite.errors import FerriteWarning, layout, warn_user
from ferrite.graph import ModelLine, first_model_line, model_line


def warn_at(line: ModelLine | None, message: str) -> None:
    """A warning that points at a line of the user's model; where none is known, at the one that is running."""
    if line is None:
        warn_user(message)
    else:
        warnings.warn_explicit(message, FerriteWarning, line.file, line.line)


def warn_of_failed_pass(name: str, problem: Exception, line: ModelLine | None, to_stop: str) -> None:
    facts = {
        "in your model": str(line) if line is not None else None,
        "because": f"{type(problem).__name__}: {problem}",
        "what happens": "the pass is taken back and left out for this graph",
        "to stop on it": to_stop,
    }
    warn_at(line, layout(f"ferrite: pass {name!r} failed", facts))


def warn_once_about(gm: torch.fx.GraphModule, to_stop: str) -> Callable[[str, Exception], None]:
    """What `run_pipeline` is to report failures to: one warning for each pass, however many graphs it fails on."""
    warned: set[str] = set()
    whole = first_model_line(gm.graph.nodes)

    def report(name: str, problem: Exception) -> None:
        if name not in warned:
            warned.add(name)
            node = getattr(problem, "node", None)
            line = model_line(node) if isinstance(node, torch.fx.Node) else None
            warn_of_failed_pass(name, problem, line or whole, to_stop)

    return report
