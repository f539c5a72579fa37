"""Every private API of torch that ferrite uses, behind names of our own.

A new torch release is the work of this file and its neighbours, `torch_dynamo` (what Dynamo says and raises),
`torch_operators` (schemas, decompositions, sizes), `torch_state` (state of modules) and `torch_runtime` (what compiled
programs need while they run): each function says what it hides, and where torch 2.11 and 2.13 differ the difference is
a shim here with a test. Nothing else in ferrite imports a torch module whose name begins with an underscore.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd as _aot_autograd
from torch._dynamo.variables.torch import get_overridable_functions as _functions_that_modes_see
from torch._functorch.partitioners import default_partition as _default_partition
from torch._functorch.partitioners import min_cut_rematerialization_partition as _min_cut_partition
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import symbolic_shapes as _symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils._pytree import tree_leaves as _tree_leaves

from ferrite.errors import UserError

OLDEST = (2, 11)
NEWEST_TESTED = (2, 13)

HigherOrderOperator = torch._ops.HigherOrderOperator
# Takes ownership of one list of arguments and empties it.
BoxedCallable = Callable[[list[Any]], Sequence[Any]]
Parts = tuple[torch.fx.GraphModule, torch.fx.GraphModule]  # of a joint graph: forward, backward


# --- versions ---------------------------------------------------------------------------------------------------------


def release(version: str) -> tuple[int, int]:
    """(2, 13) from '2.13.0+cpu'."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found:
        raise UserError(f"cannot read the version of torch: {version!r}")
    return int(found[1]), int(found[2])


def check_torch_version(version: str | None = None) -> str | None:
    """Raise for a torch that cannot work; return a warning for one that nobody has tried. By default, of this one."""
    version = version or torch.__version__
    found = release(version)
    if found < OLDEST:
        raise UserError(
            f"torch {version} is too old for ferrite",
            {"supported": span(), "to change that": "pip install --upgrade 'torch>=2.11,<2.14'"},
        )
    if found > NEWEST_TESTED:
        return f"torch {version} is newer than ferrite has been tested with ({span()}); trying anyway"
    return None


def span() -> str:
    return f"torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST_TESTED[0]}.{NEWEST_TESTED[1]}"


# --- AOTAutograd ------------------------------------------------------------------------------------------------------


def aot_autograd(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Callable[..., BoxedCallable],
    backward: Callable[..., BoxedCallable],
    inference: Callable[..., BoxedCallable],
    partition: Callable[..., Parts],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """Functionalise, decompose, differentiate and partition; the three compilers get the resulting graphs.

    Only the keywords that 2.11 and 2.13 share. `keep_inference_input_mutations`: a mutated input is written by a
    trailing copy_ inside the graph, so that it can be fused later.
    """
    backend = _aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=dict(decompositions),
        keep_inference_input_mutations=True,
    )
    with _drawing_in_checkpoints(gm):
        compiled: Callable[..., Any] = backend(gm, example_inputs)
    return compiled


def _drawing_in_checkpoints(gm: torch.fx.GraphModule) -> contextlib.AbstractContextManager[Any]:
    """In inference a checkpoint is only what is inside of it. torch looks for gradients that are computed in the same
    graph, to compute what they read a second time, and raises an error for a random operator before it has found any;
    attention counts as one, without dropout too."""
    setting = "remat_using_tags_for_fwd_loss_bwd_graph"
    if not getattr(torch._functorch.config, setting, False):
        return contextlib.nullcontext()
    graphs = [each.graph for each in gm.modules() if isinstance(each, torch.fx.GraphModule)]
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    if not any(graph.find_nodes(op="call_function", target=checkpoint) for graph in graphs):
        return contextlib.nullcontext()
    for node in (node for graph in graphs for node in graph.nodes):
        if node.target is torch.autograd.grad or "phase" in node.meta.get("custom", {}):
            return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[Any] = torch._functorch.config.patch({setting: False})
    return patched


def min_cut_partition(joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Parts:
    """Saves what is cheapest to save. Equal calls are one already: torch would import Inductor to look for them."""
    with torch._functorch.config.patch(cse=False), _redrawing_from_the_default_generator():
        forward, backward = _min_cut_partition(joint, inputs, **kwargs)
    return forward, backward


def save_all_partition(joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Parts:
    with _redrawing_from_the_default_generator():
        forward, backward = _default_partition(joint, inputs, **kwargs)
    return forward, backward


def _redrawing_from_the_default_generator() -> contextlib.AbstractContextManager[Any]:
    """A checkpoint on a GPU draws as eager does: from the default generator, set back for the second time. By default
    torch would give it generators of its own, which CUDA graphs can record: other numbers."""
    patched: contextlib.AbstractContextManager[Any] = torch._functorch.config.patch(
        graphsafe_rng_functionalization=False
    )
    return patched


def forward_metadata() -> Any | None:
    """What AOTAutograd learnt about the function being compiled; None outside a compilation."""
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def static_input_indices() -> tuple[int, ...]:
    """Inputs of the forward graph whose address stays the same from call to call (parameters and buffers)."""
    metadata = forward_metadata()
    return tuple(metadata.static_input_indices) if metadata is not None else ()


def donated_input_indices() -> tuple[int, ...]:
    """Inputs of the backward graph that nobody else holds: they may be overwritten or freed."""
    metadata = forward_metadata()
    return tuple(metadata.bw_donated_idxs or ()) if metadata is not None else ()


def has_saved_tensor_hooks() -> bool:
    """Whether what autograd saves now goes through hooks of the user's."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def user_output_index(node: torch.fx.Node, position: int) -> int | None:
    """Which output of the user's function the graph output at `position` is; None for saved values and the like."""
    descriptors = node.meta.get("desc") or ()
    if position >= len(descriptors) or type(descriptors[position]).__name__ != "PlainAOTOutput":
        return None
    index: int = descriptors[position].idx
    return index


def hidden_view_indices() -> tuple[int, ...]:
    """Which outputs of the user's function AOTAutograd passes through `_unsafe_view` when the forward graph has run."""
    metadata = forward_metadata()
    return tuple(metadata.unsafe_view_out_indices) if metadata is not None else ()


def has_no_gradient(node: torch.fx.Node, position: int) -> bool:
    """Whether the graph output at `position` is an output of the user's function that autograd does not follow."""
    metadata, index = forward_metadata(), user_output_index(node, position)
    if metadata is None or index is None or index >= len(metadata.output_info):
        return False
    return not metadata.output_info[index].requires_grad


def is_saved_for_backward(node: torch.fx.Node, position: int) -> bool:
    descriptors = node.meta.get("desc") or ()
    return position < len(descriptors) and type(descriptors[position]).__name__ == "SavedForBackwardsAOTOutput"


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """The table that leads to the core ATen operators, as a plain dict."""
    return dict(torch._decomp.core_aten_decompositions())


def decompositions_of(operators: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    return dict(torch._decomp.get_decompositions(list(operators)))


def show_constructors_to_modes() -> None:
    """Let Dynamo show all functions that make tensors to modes, of which a default device is one. Torch 2.11 shows
    them `torch.zeros` and a few others: an `arange` came out on the CPU."""
    _functions_that_modes_see().update(_device_constructors())


if release(torch.__version__) < (2, 13):
    # torch 2.11 takes the check behind torch.linalg.inv and its kin for dead code, and with it their errors.
    torch.fx.node.has_side_effect(torch.ops.aten._linalg_check_errors.default)
    show_constructors_to_modes()


# Before 2.13 the fake value of a matrix product of symbolic sizes is of the sizes seen, as if these were fixed.
VALUES_KEEP_SYMBOLS = release(torch.__version__) >= (2, 13)
GUARDS_CAN_GO = VALUES_KEEP_SYMBOLS  # and a guard on a parameter, once taken away, is not asked again


# --- values and symbols -----------------------------------------------------------------------------------------------


def is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def fake_mode_of(graph: torch.fx.Graph) -> Any | None:
    """The fake mode that Dynamo made a graph's values in; it hands AOTAutograd another one."""
    values = (node.meta.get("example_value") for node in graph.nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def fake_mode_for(example_inputs: Sequence[Any]) -> Any:
    """The fake mode of the inputs, if they are fake; a new one otherwise."""
    modes = (value.fake_mode for value in example_inputs if isinstance(value, FakeTensor))
    return next(modes, None) or FakeTensorMode(shape_env=_symbolic_shapes.ShapeEnv())


class DispatchMode(_TorchDispatchMode):
    """Sees every operator that runs while it is active, below autograd."""


def size_hint(value: int | torch.SymInt, unseen: int = 8192) -> int:
    """A likely value of a size, for reports and estimates; adds no guard. 2.13 renamed the function of 2.11."""
    if isinstance(value, int):
        return value
    hint = getattr(_symbolic_shapes, "optimization_hint", None) or getattr(_symbolic_shapes, "size_hint")  # noqa: B009
    found = hint(value, fallback=unseen)
    # a ragged size, of a nested tensor, is a name and no number
    return unseen if isinstance(found, torch.SymInt) and found.node.is_nested_int() else int(found)


def has_hint(value: torch.SymInt) -> bool:
    """Whether a size has been seen: no part of it is known only once the graph runs."""
    return not _symbolic_shapes.free_unbacked_symbols(value)


def known_equal(left: int | torch.SymInt, right: int | torch.SymInt) -> bool:
    """Whether two sizes are equal for every binding of their symbols; adds no guard."""
    return bool(_symbolic_shapes.statically_known_true(left == right))


def known_true(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds for every binding of their symbols; adds no guard."""
    return bool(_symbolic_shapes.statically_known_true(condition))


@contextlib.contextmanager
def deciding_nothing(mode: Any) -> Iterator[None]:
    """What is not known about the symbols of a fake mode is not decided inside: that raises, and adds no guard.

    A ShapeEnv asks one method of its own before it adds a guard, in every release; what raises there is not remembered.
    """
    if mode.shape_env is not None:
        mode.shape_env._check_frozen = _refuse_to_decide
    try:
        yield
    finally:
        if mode.shape_env is not None:
            del mode.shape_env._check_frozen


def _refuse_to_decide(condition: Any, value: Any) -> None:
    raise RuntimeError(f"nobody knows whether {condition} is {value}")


def expression(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The sympy expression behind a symbolic number."""
    return value.node.expr


def free_symbols(value: torch.SymInt) -> Iterator[str]:
    for symbol in expression(value).free_symbols:
        yield str(symbol)


def bare_symbol(value: object) -> str | None:
    """The symbol's name if the value is a SymInt that is just one symbol."""
    if not isinstance(value, torch.SymInt):
        return None
    found = expression(value)
    return str(found) if found.is_Symbol else None


def is_plain_subclass(value: object) -> bool:
    """Whether a tensor has a type of its own but the storage and dispatch of an ordinary tensor."""
    if not isinstance(value, torch.Tensor) or isinstance(value, (torch.nn.Parameter, FakeTensor)):
        return False
    return type(value) is not torch.Tensor and type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def tree_leaves(tree: Any) -> list[Any]:
    return list(_tree_leaves(tree))


# --- calling operators ------------------------------------------------------------------------------------------------


def operator_name(target: object) -> str | None:
    """The path under `torch.ops` by which an operator is found again: 'aten.add.Tensor', 'higher_order.cond'."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, HigherOrderOperator):
        name = f"higher_order.{target.__name__}"
        return name if find_operator(name) is target else None
    return None


def packet_name(target: object) -> str | None:
    """The path of an operator whose overload is chosen when it is called: 'aten.cat'."""
    return str(target) if isinstance(target, torch._ops.OpOverloadPacket) else None


def find_operator(name: str) -> Any:
    """The operator at a path under `torch.ops`; None where there is none."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


def overload_for(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """The overload of 'aten::add' that these values choose; None where none takes them."""
    try:
        return str(torch._C._jit_resolve_packet(name, *args, **kwargs))
    except RuntimeError:
        return None


def built_in(name: str) -> Any | None:
    """The function of torch of that name that is not written in Python; some live in a module of their own."""
    found = getattr(torch, name, None) or getattr(torch._C._nn, name, None)
    return found if getattr(found, "__module__", "") in ("torch", "torch._C._nn") else None


@functools.cache
def quantized_decomposed() -> Any | None:
    """The operators of quantised graphs; a private module defines them. None where torch has none."""
    try:
        importlib.import_module("torch.ao.quantization.fx._decomposed")
    except ImportError:
        return None
    return torch.ops.quantized_decomposed


@functools.cache
def is_unsafe_to_record(name: str) -> bool:
    """Whether an operator says of itself that a GPU's work with it cannot be recorded and replayed."""
    tags = getattr(find_operator(name), "tags", None)
    unsafe = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe}
    return tags is None or not unsafe.isdisjoint(tags)


def traced(module: torch.nn.Module, inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """A module of operators as a graph with forecasts, at the sizes of some inputs."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in inputs]
    with mode, torch.no_grad():
        return make_fx(module)(*fakes)
