"""The compilers that are compared, how a function is given to each, and processes with empty caches."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

EAGER, OURS, INDUCTOR = "eager", "ferrite", "inductor"
CAPTURED = "captured"  # eager behind torch.compile: what the call costs that any backend pays
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "FERRITE_CACHE_DIR": "ferrite", "TRITON_CACHE_DIR": "triton"}
ROOT = Path(__file__).parents[1]


def backends(with_inductor: bool) -> list[str]:
    """What is compared; Inductor only if it is asked for and can work, which needs a C++ compiler."""
    if not with_inductor:
        return [EAGER, OURS]
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        print("no compiler: Inductor needs g++, and is left out", file=sys.stderr)
        return [EAGER, OURS]
    return [EAGER, OURS, INDUCTOR]


def given_to(backend: str, function: Callable[..., Any], dynamic: bool = False, **options: Any) -> Callable[..., Any]:
    """The function as a backend runs it, for the sizes it is called with first, or for any. `options`: ferrite's."""
    if backend == EAGER:
        return function
    name = EAGER if backend == CAPTURED else backend
    own = options if backend == OURS else None
    compiled: Callable[..., Any] = torch.compile(function, backend=name, dynamic=dynamic, options=own)
    return compiled


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy that shares no code object: Dynamo keeps what it compiled, and looks through it, per code object."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace()
    return types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


@contextlib.contextmanager
def empty_caches() -> Iterator[Path]:
    """Compilers find nothing that was compiled before, here and in processes started meanwhile."""
    before = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            os.environ.update(cache_variables(Path(folder)))
            yield Path(folder)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def cache_variables(folder: Path) -> dict[str, str]:
    return {name: str(folder / part) for name, part in CACHES.items()}


def in_fresh_process(module: str, request: Mapping[str, Any], caches: Path) -> dict[str, Any]:
    """Run `python -m MODULE REQUEST` with caches in a folder; what it prints last is its answer.

    An answer with the key `failed` says why there is no other.
    """
    environment = {**os.environ, **cache_variables(caches), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", module, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return {"failed": lines[-1] if lines else f"exit status {done.returncode}"}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def reason(failure: BaseException) -> str:
    """One line about an exception, and one about what caused it."""
    lines = [f"{type(each).__name__}: {str(each).strip().splitlines()[0]}" for each in causes(failure) if str(each)]
    return "; ".join(dict.fromkeys([lines[0], lines[-1]]))[:300] if lines else type(failure).__name__


def causes(failure: BaseException | None) -> Iterator[BaseException]:
    while failure is not None:
        yield failure
        failure = failure.__cause__
