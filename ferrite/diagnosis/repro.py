"""What `run.py` of a repro folder calls (`ferrite.debug.repro` writes it)."""

from __future__ import annotations

from typing import Any

import torch

from ferrite import api
from ferrite.errors import CompilerBug


def compile_again(
    module: torch.nn.Module, inputs: list[Any], options: dict[str, Any], dynamic: bool | None, grad: bool
) -> int:
    """Compile strictly, forward and backward; print the failure and return 1, or say that there is none."""
    torch.compiler.reset()
    try:
        with torch.set_grad_enabled(grad):
            outputs = api.compile(module, dynamic=dynamic, **options, strict=True, keep_repro=False)(*inputs)
            losses = [out.float().sum() for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
            if losses:
                torch.stack(losses).sum().backward()
    except CompilerBug as bug:
        print(f"CompilerBug: {bug}")
        return 1
    print("no failure: this version compiles the graph")
    return 0
