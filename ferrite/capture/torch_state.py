"""Private APIs of torch about the state of modules: where an input of a graph comes from, and computing on the real
tensors behind it while a graph of stand-ins is being compiled.

The second door beside `torch_api`, for the same reason: a new torch release is the work of these files.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.source import RandomValueSource
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

PATH = re.compile(r"\._(modules|parameters|buffers)\[(['\"])(.*?)\2\]")


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """What makes a tensor makes a real one, and what reads a number reads it, whatever modes are active.

    AOTAutograd calls its compilers under a fake mode: there `torch.tensor(2.0).item()` fails, and a constant joined
    with another is none. Stand-ins compute with stand-ins all the same, by the mode that each of them knows.
    """
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


@contextlib.contextmanager
def on_real_tensors() -> Iterator[None]:
    """Operators compute as they do outside of a compilation, without gradients, whatever modes are active.

    Tensors made inside are ordinary ones, also while inference mode is on.
    """
    with (
        outside_of_modes(),
        torch._C._DisableAutocast(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield


@functools.cache
def gradients_of_pointwise_weights_lie_as_images() -> bool:
    """Whether the gradient of a contiguous weight of 1 by 1 has its channels last where the image has: torch 2.11 lays
    it out as the weight, though its fake tensors say otherwise. Asked with an image so large that oneDNN has it."""
    with on_real_tensors():
        image = torch.ones(1, 64, 32, 32).contiguous(memory_format=torch.channels_last)
        window = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        backward = torch.ops.aten.convolution_backward.default
        found = backward(image, image, torch.ones(64, 64, 1, 1), None, *window, [False, True, False])
    return bool(found[1].stride() == (64, 1, 64, 64))


def source_of(placeholder: torch.fx.Node) -> Any | None:
    """Where Dynamo found what it passes for an input of its graph; None for what it made itself."""
    source = getattr(placeholder, "_dynamo_source", None)
    return source if source is not None else getattr(placeholder.meta.get("grapharg"), "source", None)


def state_path(source: Any) -> tuple[str, ...] | None:
    """('layers', '0', 'weight') for a parameter or buffer of a module; None for any other source.

    A module whose parameters are sharded replaces them between calls, so its state is not taken for state.
    """
    if source is None or not source.guard_source.is_unspecialized_nn_module() or source.guard_source.is_fsdp_module():
        return None
    name = str(source.name() if callable(source.name) else source.name)
    found = list(PATH.finditer(name))
    if not found or found[-1][1] == "modules" or found[-1].end() != len(name):
        return None
    return tuple(part[3] for part in found)


def is_from_dynamo(gm: torch.nn.Module) -> bool:
    """Whether Dynamo made a module. What such a module keeps is the user's, and AOTAutograd asks where it came from."""
    return hasattr(gm, "_param_name_to_source")


def input_origin(placeholder: torch.fx.Node) -> int | str | None:
    """What an input of an AOTAutograd graph was: the position of an argument, or the name of an attribute of the
    module that was traced. None for what AOTAutograd made: parts of subclasses, common bases of views, tokens."""
    descriptor = placeholder.meta.get("desc")
    match type(descriptor).__name__:
        case "PlainAOTInput":
            return int(descriptor.idx)  # type: ignore[union-attr]
        case "ParamAOTInput" | "BufferAOTInput":
            return str(descriptor.target)  # type: ignore[union-attr]
        case _:
            return None


def forget_guards(sources: Sequence[Any]) -> None:
    """Let Dynamo not ask about some sources when it decides whether compiled code can be used. While compiling only."""
    context = TracingContext.try_get()
    if context is not None:
        for source in sources:
            context.guards_context.dynamo_guards.remove_guards_with_source(source)


def inputs_written_after(joint: torch.fx.Graph) -> list[torch.fx.Node]:
    """Inputs of a joint graph whose new values its caller writes into them, after the forward part has run."""
    returned = joint.output_node().meta.get("desc") or ()
    written = [each.mutated_input for each in returned if type(each).__name__ == "InputMutationAOTOutput"]
    return [node for node in joint.find_nodes(op="placeholder") if node.meta.get("desc") in written]


def called_with_fakes(gm: torch.fx.GraphModule) -> bool:
    """Whether the user's own tensors are fake ones, which have no memory. Dynamo compiles anew for real ones."""
    arguments = (node.meta.get("grapharg") for node in gm.graph.nodes if node.op == "placeholder")
    examples = [getattr(argument, "example", None) for argument in arguments]  # some are lists: compiled autograd's
    return any(isinstance(each, FakeTensor) for each in tree_leaves(examples))


def drawn_by_python(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Inputs of a graph that are numbers of Python's generator, drawn before each call."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sources = [getattr(node.meta.get("grapharg"), "source", None) for node in inputs]
    return [node for node, source in zip(inputs, sources, strict=True) if isinstance(source, RandomValueSource)]
