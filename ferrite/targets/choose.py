"""Which targets compile a graph, by the types of their devices. Operators on any other device are calls."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ferrite.errors import layout, warn_user
from ferrite.options import Options
from ferrite.targets.cpu import CPU, INTERPRETER
from ferrite.targets.target import Target

Targets = Mapping[str, Target]


def targets_for(options: Options) -> Targets:
    """Those that a graph is compiled for, and looked up for. It may have been compiled elsewhere: loading needs no
    compiler."""
    if options.executor == "interpreter":
        return {"cpu": INTERPRETER}
    return {"cpu": CPU} if options.executor == "native" else {}


def buildable(targets: Targets) -> Targets:
    """Those whose compilers are here; on the devices of the others every operator is a call."""
    return {device: target for device, target in targets.items() if target is not CPU or llvm_is_here()}


@functools.lru_cache
def llvm_is_here() -> bool:
    """Whether kernels can be compiled; where they cannot, that is said once."""
    try:
        import llvmlite.binding  # noqa: F401  # only here: a program of calls does not need it
    except (ImportError, OSError) as problem:
        facts = {
            "because": f"{type(problem).__name__}: {problem}",
            "what happens": "operators run one by one, as in eager",
            "to change that": "pip install llvmlite",
            "to say no more": 'torch.compile(..., options={"executor": "calls"})',
        }
        headline = "ferrite: without llvmlite nothing is compiled to kernels"
        warn_user(layout(headline, facts))
        return False
    return True
