"""Triton kernels that the user wrote: `kernel[grid](x, y)` in a compiled function, or behind `torch.library.triton_op`.

In a graph such a launch knows its kernel by a number of this process, and by name what the kernel writes, which torch
has read off the kernel's own code. Here the kernel comes to stand beside its node, as something that can be called:
lowering makes a step of it, and a cached program that is loaded in another process finds that process's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_operators
from ferrite.graph import USER_KERNEL, innermost_first

Grid = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class LaunchedKernel:
    """`kernel`: as Triton's decorators made it. `constants`: arguments that no graph can hold. `writes`: names of the
    arguments that it writes; None where nobody knows."""

    kernel: Any
    constants: Mapping[str, Any]
    writes: tuple[str, ...] | None

    @property
    def name(self) -> str:
        kernel = self.kernel
        while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
            kernel = kernel.fn
        return str(getattr(kernel, "__name__", "kernel"))

    def __call__(self, grids: Sequence[Grid], descriptors: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """`grids`: one for each configuration that the kernel may have. `descriptors`: which arguments are descriptors
        of their tensors, and of which blocks."""
        named = {**self.constants, **given}
        for name, about in descriptors.items():
            named[name] = descriptor(named[name], *about)
        in_order = []  # hooks of a tuned kernel know arguments by their places
        for name in self.kernel.arg_names:
            if name not in named:
                break
            in_order.append(named.pop(name))
        grid = grids[0] if len(grids) == 1 else grid_by_config(self.kernel.configs, grids)
        self.kernel[grid](*in_order, **named)

    def __deepcopy__(self, memo: Any) -> LaunchedKernel:
        return self


def grid_by_config(configs: Sequence[Any], grids: Sequence[Grid]) -> Any:
    """The grid of the configuration that Triton is about to run. Some differ only in what a grid does not depend on."""

    def grid(chosen: Mapping[str, Any]) -> Grid:
        for config, its_grid in zip(configs, grids, strict=True):
            if all(chosen.get(name) == value for name, value in config.kwargs.items()):
                return its_grid
        raise ValueError("a configuration that was not there when the graph was captured")

    return grid


def descriptor(tensor: torch.Tensor, kind: str, about: tuple[Any, ...]) -> Any:
    """What a kernel is given in place of a tensor that it moves by blocks; Triton has had two kinds."""
    if kind == "experimental":
        from triton.tools import experimental_descriptor

        sizes, block, element = about
        make = getattr(experimental_descriptor, f"create_{len(sizes)}d_tma_descriptor")
        return make(tensor.data_ptr(), *sizes, *block, element)
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, about[0])


def note_user_kernels(gm: torch.fx.GraphModule) -> None:
    """Puts the kernel of each launch beside its node."""
    for module in innermost_first(gm):
        for node in module.graph.nodes:
            if node.op == "call_function" and torch_operators.launches_user_kernel(node.target):
                numbers = node.kwargs["kernel_idx"], node.kwargs["constant_args_idx"]
                kernel, constants = torch_operators.user_kernel(*numbers)
                writes = node.kwargs.get("tensors_to_clone")
                node.meta[USER_KERNEL] = LaunchedKernel(kernel, constants, None if writes is None else tuple(writes))
