"""What Dynamo did and says about it, and the exceptions by which it steers: see `torch_api`."""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo import exc as dynamo_exc
from torch._dynamo import explain as _explain
from torch._guards import TracingContext

from ferrite.errors import FerriteError, ModelLine

# --- errors that belong to Dynamo -------------------------------------------------------------------------------------

# Dynamo steers by exceptions: restarts, graph breaks and skipped frames pass through a backend. An IndexError while
# tracing is taken as the user's own.
CONTROL_FLOW: tuple[type[BaseException], ...] = (
    dynamo_exc.TorchDynamoException,
    *dynamo_exc.exceptions_allowed_to_be_fallback,
    IndexError,
)
RESTARTS: tuple[type[BaseException], ...] = (dynamo_exc.RestartAnalysis,)


def through_dynamo(error: FerriteError) -> FerriteError:
    """The same error in a type that Dynamo hands to the user unchanged. It is torch's error of a backend that failed,
    too, for those who catch that one, with the fields it has.

    Its traceback starts at the caller of this function: what lies above is Dynamo's.
    """
    kind = type(error)
    twin: type = types.new_class(kind.__name__, (kind, dynamo_exc.BackendCompilerFailed))
    twin.__module__ = kind.__module__
    raised: FerriteError = Exception.__new__(twin)
    raised.__dict__.update(error.__dict__, first_useful_frame=sys._getframe(1))
    raised.__dict__.update(backend_name="ferrite", inner_exception=getattr(error, "cause", error))
    raised.args = error.args
    raised.__cause__ = error.__cause__
    return raised


# --- what Dynamo did --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AboutCapture:
    """What Dynamo says of the graph that it has just captured. `number`: its frame, and how often that was compiled
    before, as "0/1". `recompiled`: why code that was there could not be used, with the value that failed. `guards`:
    what is checked before each call."""

    number: str
    recompiled: str | None
    guards: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo ended a graph, and why."""

    reason: str
    file: str
    line: int
    function: str


def about_capture() -> AboutCapture | None:
    """None where nothing is being captured."""
    context = TracingContext.try_get()
    if context is None:
        return None
    found = torch._guards.CompileContext.current_compile_id()
    metrics: Mapping[str, Any] = getattr(torch._dynamo.utils.get_metrics_context(), "_metrics", {})
    reason = metrics.get("recompile_reason")
    try:
        guards = [_guard_text(each) for each in sorted(context.guards_context.dynamo_guards)]
    except Exception:  # its guards are torch's affair: without them a page has less to show
        guards = []
    return AboutCapture(str(found or ""), str(reason) if reason else None, tuple(dict.fromkeys(guards)))


def _guard_text(guard: Any) -> str:
    name = guard.name() if callable(guard.name) else guard.name  # a method until torch 2.11
    return f"{guard.create_fn_name()} {name}".strip()


def graph_breaks() -> list[GraphBreak]:
    """All since the last `torch.compiler.reset()`."""
    found = []
    for each in torch._dynamo.utils.graph_break_reasons:
        frame = each.user_stack[-1] if each.user_stack else None
        place = (frame.filename, frame.lineno or 0, frame.name) if frame is not None else ("", 0, "")
        found.append(GraphBreak(in_words(str(each.reason)), *place))
    return found


def in_words(reason: str) -> str:
    """Dynamo's reason for a graph break; for the one that is a name inside of Dynamo, with what it means."""
    return f"a branch depends on the value of a tensor ({reason})" if reason.startswith("generic_jump") else reason


def graph_breaks_of(function: Callable[..., Any], args: Sequence[Any]) -> list[tuple[str, ModelLine | None]]:
    """Why Dynamo makes more than one graph of a function, and the line where it stops. It runs the function once, and
    forgets what was compiled before."""
    found: list[tuple[str, ModelLine | None]] = []
    own = os.path.dirname(torch.__file__)
    for each in _explain(function)(*args).break_reasons:
        frames = [frame for frame in each.user_stack if not frame.filename.startswith(own)]
        line = None
        if frames:
            last = frames[-1]
            line = ModelLine(last.filename, last.lineno or 0, last.name, (last.line or "").strip())
        headline = next((row.strip() for row in str(each.reason).splitlines() if row.strip()), "")
        found.append((in_words(headline), line))
    return found
