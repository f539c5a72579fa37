"""Which target compiles a graph."""

from __future__ import annotations

import functools

from ferrite.errors import layout, warn_user
from ferrite.options import Options
from ferrite.targets.cpu import CALLS, CPU, INTERPRETER
from ferrite.targets.target import Target

TARGETS: dict[str, Target] = {"native": CPU, "calls": CALLS, "interpreter": INTERPRETER}


def target_for(options: Options) -> Target:
    """The target that a graph is compiled for, and looked up for. It may have been compiled elsewhere: loading needs no
    compiler."""
    return TARGETS[options.executor]


def buildable(target: Target) -> Target:
    """The target itself, or calls where its compiler is missing."""
    return CALLS if target is CPU and not llvm_is_here() else target


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
