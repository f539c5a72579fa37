"""What is asked of torch's private side about operators: schemas, decompositions, sizes, those of higher order."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._decomp import decomposition_table, global_decomposition_table
from torch._higher_order_ops.effects import _get_effect as _effect_of
from torch._library import simple_registry as _simple_registry
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx.experimental.symbolic_shapes import constrain_range
from torch.fx.node import _side_effectful_functions
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_unflatten as _tree_unflatten
from torch.utils._sympy.interp import sympy_interp as _sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis as _SympyOnPython

from ferrite.capture import torch_api
from ferrite.graph import WRITES_UNSAID


def known_contiguous(value: torch.Tensor) -> bool:
    """Whether a tensor is contiguous for every binding of its symbols; adds no guard."""
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not torch_api.known_equal(stride, expected):
            return False
        expected = expected * (1 if torch_api.known_equal(size, 0) else size)
    return True


def begins_its_storage(value: torch.Tensor) -> bool:
    """Whether a tensor made in the graph lies at the beginning of its storage, in order: places of the storage are its
    elements, one by one. Adds no guard."""
    return known_contiguous(value) and torch_api.known_equal(value.storage_offset(), 0)


def eager_form(operator: Any) -> Callable[..., Any]:
    """What a higher-order operator runs in eager: a function of tensors that calls plain operators."""
    found: Callable[..., Any] = operator.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
    return found


def number_in(tensor: torch.Tensor) -> Any:
    """The number in a real tensor without dimensions, while modes are active that would see it read."""
    with _disable_current_modes():
        return tensor.item()


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A real tensor on another device, while modes are active that would see it moved."""
    with _disable_current_modes():
        return tensor.to(device)


def dropout_mask(x: torch.Tensor, chance: float, generator: torch.Generator) -> torch.Tensor:
    """What the kernel of `native_dropout` on a GPU keeps, with a generator of its own: that operator takes none."""
    mask: torch.Tensor = torch.ops.aten._fused_dropout.default(x, chance, generator)[1]
    return mask.bool()


def is_operator(target: object) -> bool:
    return isinstance(target, OpOverload)


def is_higher_order(target: object) -> bool:
    return isinstance(target, HigherOrderOperator)


def overloads(operator: Any) -> Iterator[Any]:
    """The overloads of an operator; an overload itself is its only one."""
    if isinstance(operator, OpOverloadPacket):
        yield from (getattr(operator, name) for name in operator.overloads())
    else:
        yield operator


def name_of(operator: Any) -> str:
    """'add' for aten.add.Tensor, 'cond' for the higher-order operator."""
    if is_operator(operator):
        return str(operator._schema.name).rpartition("::")[2]
    return str(getattr(operator, "__name__", ""))


def launches_user_kernel(operator: Any) -> bool:
    """Whether it launches a Triton kernel that the user wrote."""
    return isinstance(operator, HigherOrderOperator) and name_of(operator).startswith("triton_kernel_wrapper")


def user_kernel(number: int, constants: int) -> tuple[Any, Mapping[str, Any]]:
    """A kernel that the user wrote, and arguments that no graph holds, by the numbers that graphs know them by."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table.get_kernel(number), kernel_side_table.get_constant_args(constants)


def schema(operator: Any) -> Any:
    return operator._schema


def result_types(operator: Any) -> tuple[str, ...]:
    """What an operator gives: 'Tensor', 'Tensor[]', 'int'."""
    return tuple(str(item.type) for item in operator._schema.returns)


def written_arguments(operator: Any) -> tuple[str, ...]:
    """The names of the arguments an operator changes."""
    if not is_operator(operator):
        return ()
    if operator._schema.name in WRITES_UNSAID:
        return WRITES_UNSAID[operator._schema.name]
    return tuple(
        item.name for item in operator._schema.arguments if item.alias_info is not None and item.alias_info.is_write
    )


@functools.lru_cache(maxsize=4096)
def shared_arguments(operator: Any) -> tuple[str | None, ...]:
    """For each result, the argument whose memory it shares; None for a result of its own."""
    if not is_operator(operator):
        return ()
    owners = {
        name: item.name
        for item in operator._schema.arguments
        if item.alias_info is not None
        for name in item.alias_info.before_set
    }
    found: list[str | None] = []
    for result in operator._schema.returns:
        names = result.alias_info.before_set if result.alias_info is not None else ()
        found.append(next((owners[name] for name in names if name in owners), None))
    return tuple(found)


def is_view(operator: Any) -> bool:
    """Whether an operator only looks at memory in another way."""
    return bool(shared_arguments(operator)) and all(shared_arguments(operator)) and not written_arguments(operator)


@functools.lru_cache(maxsize=4096)
def functional_twin(operator: Any) -> Any | None:
    """`add.Tensor` of `add_.Tensor`: the operator that computes what this one writes to its first argument."""
    if not is_operator(operator) or operator._schema.name in WRITES_UNSAID:
        return None
    name = operator._schema.name.split("::")[1]
    if (
        not name.endswith("_")
        or name.startswith("__")
        or written_arguments(operator) != (operator._schema.arguments[0].name,)
    ):
        return None
    packet = getattr(getattr(torch.ops, operator.namespace), name[:-1], None)
    if packet is None:
        return None
    found = {
        overload: getattr(packet, overload) for overload in packet.overloads() if _exists(getattr(packet, overload))
    }
    if operator._overloadname in found:
        return found[operator._overloadname]
    wanted = _signature(operator)
    return next((each for each in found.values() if _signature(each) == wanted), None)


def _exists(operator: Any) -> bool:
    """Whether the dispatcher knows an overload; some are only spellings of TorchScript."""
    return bool(torch._C._dispatch_has_kernel(operator.name()))


def has_kernel(operator: Any, device: str) -> bool:
    """Whether an operator of a backend alone runs on tensors of a kind of device, itself and not by others."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), device.upper()))


def _signature(operator: Any) -> list[tuple[str, str]]:
    return [(item.name, str(item.type)) for item in operator._schema.arguments]


@functools.lru_cache(maxsize=4096)
def decomposition(operator: Any) -> Callable[..., Any] | None:
    """A function of tensors that does what an operator does, from torch's own tables."""
    for table in (decomposition_table, global_decomposition_table["post_autograd"]):
        if operator in table:
            found: Callable[..., Any] = table[operator]
            return found
    if is_operator(operator) and is_composite(operator):
        return operator.decompose  # type: ignore[no-any-return]
    return None


def overloads_of(name: str) -> list[OpOverload]:
    """ATen's operators of a name; none for `__xor__`, say, which is a name of the namespace itself."""
    operator = getattr(torch.ops.aten, name, None)
    return list(overloads(operator)) if isinstance(operator, OpOverloadPacket) else []


def is_composite(operator: OpOverload) -> bool:
    """Whether torch computes it by calls of other operators, on every device and with gradients."""
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    return _exists(operator) and operator.has_kernel_for_dispatch_key(implicit)


def bound_arguments(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, as the schema has them, defaults filled in."""
    bound: dict[str, Any] = {}
    for place, item in enumerate(operator._schema.arguments):
        if place < len(args) and not item.kwarg_only:
            bound[item.name] = args[place]
        elif item.name in kwargs:
            bound[item.name] = kwargs[item.name]
        elif item.has_default_value():
            bound[item.name] = item.default_value
        else:
            raise TypeError(f"{operator} misses the argument {item.name}")
    return bound


# Namespaces of operators that torch, or ferrite, defines itself.
OF_TORCH = {"aten", "prims", "prim", "quantized", "quantized_decomposed", "onednn", "mkldnn", "mkldnn_prepacked", "mkl"}
OF_TORCH |= {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "symm_mem"}
OF_TORCH |= {"inductor", "ferrite"}


def sizes_follow(operator: Any) -> bool:
    """Whether the sizes of results follow from those of the arguments, in a way that torch itself has written down. Of
    an operator of the user's they are what its fake function says."""
    if not is_operator(operator):
        return is_higher_order(operator)
    return operator.namespace in OF_TORCH and torch.Tag.dynamic_output_shape not in operator.tags


def is_random(operator: Any) -> bool:
    return is_operator(operator) and torch.Tag.nondeterministic_seeded in operator.tags


def has_registered_effect(operator: Any) -> bool:
    """Whether somebody told torch that calling an operator does more than compute: `torch.fx.node.has_side_effect`, or
    `torch.library._register_effectful_op`. Asked anew each time, as both can be done at any time."""
    return operator in _side_effectful_functions or (is_operator(operator) and _effect_of(operator) is not None)


def every_operator() -> Iterator[tuple[str, Any]]:
    """Every overload of aten and prims that a graph may hold, by name, in order: not those that write to `out`."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        if namespace not in ("aten", "prims"):
            continue
        packet, _, overload = rest.partition(".")
        operator = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
        if operator is None or any(item.is_out for item in operator._schema.arguments):
            continue
        if len(written_arguments(operator)) == 0 or functional_twin(operator) is not None:
            yield f"{namespace}.{packet}.{overload or 'default'}", operator


# --- sizes ------------------------------------------------------------------------------------------------------------


def evaluate(value: torch.SymInt, bound: Mapping[str, Any]) -> Any:
    """The expression behind a size, computed on other things than numbers: proxies write the arithmetic as nodes."""
    found = torch_api.expression(value)
    return _sympy_interp(_SympyOnPython, {symbol: bound[str(symbol)] for symbol in found.free_symbols}, found)


def index_below(shape_env: Any, length: int | torch.SymInt) -> torch.SymInt:
    """A number of its own that is known to be at least 0 and less than a length: the counter of a loop."""
    with shape_env.ignore_fresh_unbacked_symbols():
        index: torch.SymInt = shape_env.create_unbacked_symint()
    highest = length - 1 if isinstance(length, int) else None
    constrain_range(index, min=0, max=highest)
    return index


def register_fake(library: torch.library.Library, name: str, function: Callable[..., Any]) -> None:
    """`torch.library.register_fake`, without its search through all modules for the line that calls it."""
    entry = _simple_registry.singleton.find(f"{library.ns}::{name}")
    handle = entry.fake_impl.register(function, f"{function.__module__}.{function.__qualname__}", lib=library)
    library._registration_handles.append(handle)


# --- higher-order operators -------------------------------------------------------------------------------------------


def functional_wrappers() -> frozenset[Any]:
    """The operators that copy operands, call a mutating operator on the copies, and return these."""
    names = ("auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional")
    return frozenset(found for name in names if (found := higher_order(name)) is not None)


@functools.cache
def higher_order(name: str) -> Any:
    """A higher-order operator by its name; None where this torch has none. Their modules are loaded when asked for."""
    modules = {
        **dict.fromkeys(("auto_functionalized", "auto_functionalized_v2"), "auto_functionalize"),
        **dict.fromkeys(("invoke_quant", "invoke_quant_packed"), "_invoke_quant"),
        **dict.fromkeys(("wrap_with_set_grad_enabled", "wrap_with_autocast", "tag_activation_checkpoint"), "wrap"),
        "with_effects": "effects",
        "flex_attention_backward": "flex_attention",
        "while_loop_stack_output": "while_loop",
        "call_torchbind": "torchbind",
        "hints_wrapper": "hints_wrap",
    }
    module = "triton_kernel_wrap" if name.startswith("triton") else modules.get(name, name.removesuffix("_impl"))
    path = "torch._prims.rng_prims" if name.endswith(("rng_state", "rng_op")) else f"torch._higher_order_ops.{module}"
    try:
        importlib.import_module(path)
    except ImportError:
        return None
    return torch_api.find_operator(f"higher_order.{name}")


def schema_beside(spec: Any) -> Any:
    """The schema that torch keeps beside a higher-order operator that it made functional, as a tree without leaves."""
    return _tree_unflatten([], spec).schema


def bind(schema: Any, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a higher-order operator from their names: its schema lists them flat."""
    if schema.tree_spec is not None:
        args, kwargs = _tree_unflatten([given[each.name] for each in schema.arguments], schema.tree_spec)
        return tuple(args), dict(kwargs)
    positional = tuple(given[each.name] for each in schema.arguments if not each.kwarg_only)
    return positional, {each.name: given[each.name] for each in schema.arguments if each.kwarg_only}
