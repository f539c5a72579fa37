"""The repro folder of a failure: enough to see it again, on its own, without the user's model or data.

run.py          compiles the graph again and shows the failure
graph.py        the captured graph as Python, and stand-ins for its inputs (shapes and types, no contents)
failing.txt     the graph of the direction that failed, as it was when it failed
error.txt       the traceback
about.json      stage, options, versions
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ferrite.cache import check_folder, full_path, make_folders, make_shared, write_folder
from ferrite.capture import CapturedGraph, torch_api
from ferrite.errors import warn_user
from ferrite.graph import module_source
from ferrite.options import Options

RUN = '''"""Compile this graph again with ferrite and show how it fails: python {folder}/run.py"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ferrite.diagnosis import compile_again
from graph import Graph, make_inputs

sys.exit(compile_again(Graph(), make_inputs(), options={options!r}, dynamic={dynamic}, grad={grad}))
'''


OF_THIS_RUN = (
    *("cache_dir", "repro_dir", "dump_dir", "strict", "keep_repro"),
    *("graphs", "progress", "progress_callback"),
)
HEAD = "from ferrite.debug.repro import missing, stand_in\n"


@dataclass(frozen=True)
class Failure:
    stage: str
    because: str
    graph: CapturedGraph | None
    exception: BaseException


@dataclass(frozen=True)
class Inputs:
    """Source of each input, and whether any size is symbolic."""

    sources: tuple[str, ...]
    dynamic: bool


def describe_inputs(example_inputs: Sequence[Any]) -> Inputs:
    """What is known of the inputs, taken before tracing can change it. Costs nothing but a walk over them."""
    return Inputs(tuple(map(input_source, example_inputs)), any(isinstance(x, torch.SymInt) for x in example_inputs))


def input_source(value: Any) -> str:
    """How an input is made again. What cannot be described is missing: a repro is a courtesy, and may not fail."""
    try:
        return known_source(value)
    except Exception:
        return f"missing({type(value).__name__!r})"


def known_source(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return stand_in_source(value)
    if isinstance(value, torch.SymInt):
        return str(torch_api.size_hint(value))
    plain = isinstance(value, (int, float, bool, str, type(None)))
    return repr(value) if plain else f"missing({type(value).__name__!r})"


def stand_in_source(value: torch.Tensor) -> str:
    """A call of `stand_in` that makes a tensor of the same look, at the sizes seen; adds no guard."""
    if value.layout is not torch.strided:
        return f"missing('a {value.layout} tensor')"
    facts = [
        f"shape={tuple(map(torch_api.size_hint, value.shape))}",
        f"stride={tuple(map(torch_api.size_hint, value.stride()))}",
        f"dtype={value.dtype}",
        f"device={str(value.device)!r}",
    ]
    if value.requires_grad:
        facts.append("requires_grad=True")
    return f"stand_in({', '.join(facts)})"


def keep(failure: Failure, gm: torch.fx.GraphModule, inputs: Inputs, grad: bool, options: Options) -> str | None:
    """Write the folder and return its path; None, after a warning, where it cannot be written."""
    if not options.keep_repro:
        return None
    try:
        files = contents(failure, gm, inputs, grad, options)
        digest = hashlib.sha256(written(f"{files['graph.py']}{failure.because}")).hexdigest()[:8]
        folder = options.repro_folder() / f"{failure.stage}-{digest}"
        publish(folder, files, options)
        return str(folder)
    except Exception as problem:  # a repro is a courtesy: failing to keep one must not hide the failure itself
        warn_once(f"ferrite: could not keep a repro folder: {problem}")
        return None


@functools.lru_cache(maxsize=64)
def warn_once(message: str) -> None:
    warn_user(message)


def contents(
    failure: Failure, gm: torch.fx.GraphModule, inputs: Inputs, grad: bool, options: Options
) -> dict[str, str]:
    import ferrite

    settings = settings_of(options)
    about = {
        "stage": failure.stage,
        "because": failure.because,
        "direction": failure.graph.kind.value if failure.graph is not None else None,
        "options": settings,
        "dynamic": inputs.dynamic,
        "grad": grad,
        "versions": {"ferrite": ferrite.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": platform.machine(),
    }
    failing = failure.graph.gm if failure.graph is not None else gm
    error = "".join(traceback.format_exception(failure.exception))
    return {
        "graph.py": graph_file(gm, inputs.sources),
        "run.py": RUN.format(folder="<this folder>", options=settings, dynamic=inputs.dynamic or None, grad=grad),
        "failing.txt": str(failing.graph) + "\n",
        "error.txt": error,
        "about.json": json.dumps(about, indent=2) + "\n",
    }


def settings_of(options: Options) -> dict[str, Any]:
    """The options that matter elsewhere: where files are kept is this machine's affair, and replay always raises."""
    return {name: value for name, value in options.changed().items() if name not in OF_THIS_RUN}


def graph_file(gm: torch.fx.GraphModule, inputs: Sequence[str]) -> str:
    """The text of graph.py: a class `Graph`, and a function that makes its inputs."""
    rows = "".join(f"        {source},\n" for source in inputs)
    return f"{HEAD}{module_source(gm, stand_in_source)}\n\ndef make_inputs():\n    return [\n{rows}    ]\n"


def publish(folder: Path, files: dict[str, str], options: Options) -> None:
    """All files or none, in a folder of the user's own: somebody will run what is in it. No link is followed. The
    folder that the option repro_dir names may be one for all users if they cannot touch each other's files (/tmp)."""
    folder = full_path(folder)
    if options.repro_dir is None:
        make_folders([folder.parent.parent, folder.parent])
    else:
        make_shared(folder.parent)
    try:
        check_folder(folder)
    except FileNotFoundError:
        write_folder(folder, {name: written(text) for name, text in files.items()})


def written(text: str) -> bytes:
    """Text as a file holds it. The name of a file may hold bytes that are no text."""
    return text.encode("utf-8", "backslashreplace")


# --- what graph.py calls ----------------------------------------------------------------------------------------------


def stand_in(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: str = "cpu",
    requires_grad: bool = False,
) -> torch.Tensor:
    """A tensor that looks like the one it stands for; small numbers, so that indices stay in range."""
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    if device == "meta":
        flat = torch.empty(extent, dtype=dtype, device="meta")
    elif dtype.is_floating_point or dtype.is_complex:
        flat = torch.randn(extent, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    else:
        flat = torch.randint(0, 2, (extent,)).to(dtype)
    return flat.to(device).as_strided(tuple(shape), tuple(stride)).requires_grad_(requires_grad)


def missing(what: str) -> Any:
    """Stands where a value or function has no source form; the repro needs it filled in by hand."""
    raise SystemExit(f"this repro needs {what}, which could not be written down: edit graph.py to supply it")
