"""ferrite: a compiler for PyTorch models.

    torch.compile(model, backend="ferrite")      # found by name once ferrite is installed
    ferrite.compile(model, strict=True)          # the same, with options as keywords
    ferrite.freeze(model.eval())                 # for inference: parameters become constants
    print(ferrite.last_compile())                # what was compiled, and what runs in eager and why
    ferrite.report("page.html")                  # the same and more, to look at
    print(ferrite.explain(model, x))             # what takes the time, and what to try

Importing this package loads neither LLVM nor the compiler itself; the first compilation does.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ferrite.errors import CompilerBug, FerriteError, FerriteWarning, UserError
from ferrite.options import Options, using

__version__ = "0.1.0"

# torch's compiler imports this, and once the main thread has ended that is refused. Another thread may still compile.
with contextlib.suppress(ImportError, RuntimeError):
    import concurrent.futures.process  # noqa: F401

if TYPE_CHECKING:
    from ferrite import passes
    from ferrite.api import compile, freeze
    from ferrite.debug import explain_cache, last_compile, recent_compiles
    from ferrite.diagnosis import explain
    from ferrite.passes import candidate, why
    from ferrite.pipeline import graph_pass
    from ferrite.reports import report

__all__ = [
    "CompilerBug",
    "FerriteError",
    "FerriteWarning",
    "Options",
    "UserError",
    "__version__",
    "candidate",
    "compile",
    "explain",
    "explain_cache",
    "freeze",
    "graph_pass",
    "last_compile",
    "passes",
    "recent_compiles",
    "report",
    "using",
    "why",
]

# Names whose modules import torch's compiler stack (about a second): loaded when first used.
_LAZY = {
    "compile": "ferrite.api",
    "freeze": "ferrite.api",
    "explain": "ferrite.diagnosis",
    "explain_cache": "ferrite.debug.explain_cache",
    "candidate": "ferrite.passes",
    "graph_pass": "ferrite.pipeline",
    "passes": "ferrite.passes",
    "why": "ferrite.passes",
    "last_compile": "ferrite.debug.record",
    "recent_compiles": "ferrite.debug.record",
    "report": "ferrite.reports",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ferrite' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(_LAZY[name])
    value = module if module.__name__ == f"ferrite.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
