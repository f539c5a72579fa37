"""What torch's tables hold, as one list: operators, modules, optimizers, higher order and custom operators.

An `Entry` is one line of a table. `samples(entry, dtype, way, limit)` are the calls to try: an operator and what it is
given, on the entry's device. A way is how they are compiled: `static` and `dynamic` (sizes known or not), `backward`,
`in place`, `errors` (calls that the table says eager refuses) and `other types` (those that the table does not name:
eager refuses most).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal import common_methods_invocations as invocations
from torch.testing._internal.autograd_function_db import autograd_function_db
from torch.testing._internal.common_modules import ErrorModuleInput, module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.testing._internal.custom_op_db import custom_op_db
from torch.testing._internal.hop_db import hop_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo
from torch.utils import _pytree as pytree

WAYS = ("static", "dynamic", "backward", "in place", "errors", "other types")
PLAIN_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool)
PLAIN_TYPES += (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FOREACH = [f"foreach_{kind}_op_db" for kind in ("unary", "binary", "pointwise", "reduce", "other")]
OPERATOR_TABLES: dict[str, list[Any]] = {
    "op": invocations.op_db,
    "foreach": [info for name in FOREACH for info in getattr(invocations, name, [])],
    "hop": hop_db,
    "custom": custom_op_db,
    "autograd_function": autograd_function_db,
}


@dataclass(frozen=True)
class Entry:
    """One line of a table. `name` is `op:nn.functional.relu`, with the variant after it where there are several."""

    name: str
    kind: str  # "operator", "module" or "optimizer"
    info: Any
    training: bool = False
    device: str = "cpu"

    @property
    def takes_edges(self) -> bool:
        """Functions of single elements do, but for polynomials: eager takes as many steps as the degree says, and does
        not come back from an infinite one."""
        is_pointwise = isinstance(self.info, (UnaryUfuncInfo, BinaryUfuncInfo))
        return is_pointwise and "_polynomial_" not in self.name


@dataclass
class Sample:
    """One call: `build(wrap)` gives the function to call with the arguments, compiled by `wrap`."""

    build: Callable[[Callable[..., Any]], Callable[..., Any]]
    arguments: tuple[Any, tuple[Any, ...], dict[str, Any]]


@functools.cache
def entries(device: str = "cpu") -> dict[str, Entry]:
    """Every entry of every table by name."""
    found: list[Entry] = []
    for table, infos in OPERATOR_TABLES.items():
        for info in infos:
            variant = f".{info.variant_test_name}" if info.variant_test_name else ""
            found.append(Entry(f"{table}:{info.name}{variant}", "operator", info))
    for info in module_db:
        name = f"module:{info.module_cls.__module__.removeprefix('torch.')}.{info.module_cls.__name__}"
        found.append(Entry(f"{name}.train", "module", info, training=True))
        if info.train_and_eval_differ:
            found.append(Entry(f"{name}.eval", "module", info))
    found += [Entry(f"optimizer:{info.optim_cls.__name__}", "optimizer", info) for info in optim_db]  # type: ignore[attr-defined]
    named: dict[str, Entry] = {}
    for entry in found:
        again = sum(name.split("#")[0] == entry.name for name in named)
        name = f"{entry.name}#{again}" if again else entry.name
        named[name] = Entry(name, entry.kind, entry.info, entry.training, device)
    return named


def dtypes_of(entry: Entry, way: str) -> set[torch.dtype]:
    """The types an entry knows on its device; the only one for errors, which name their own."""
    info = entry.info
    if way == "errors":
        return {torch.float32}
    if way == "other types":
        return set(PLAIN_TYPES) - set(info.supported_dtypes(entry.device)) if entry.kind == "operator" else set()
    if entry.kind == "optimizer":
        return {torch.float32, torch.float64} if way in ("static", "dynamic") else set()
    if entry.kind == "module":
        known = set(info.supported_dtypes(entry.device))
        differentiable = {dtype for dtype in known if dtype.is_floating_point or dtype.is_complex}
        return differentiable if way == "backward" else set() if way == "in place" else known
    if way == "backward":
        known = set(info.supported_backward_dtypes(entry.device))
        return {dtype for dtype in known if dtype.is_floating_point or dtype.is_complex}
    if way == "in place" and info.get_inplace() is None:
        return set()
    return set(info.supported_dtypes(entry.device))


def samples(entry: Entry, dtype: torch.dtype, way: str, limit: int) -> Iterator[Sample]:
    """The first calls of an entry; an entry that does not know the type has none."""
    if dtype not in dtypes_of(entry, way):
        return
    makers = {"operator": operator_samples, "module": module_samples, "optimizer": optimizer_samples}
    if way == "errors":
        makers |= {"operator": operator_errors, "module": module_errors}
        if entry.kind == "optimizer":
            return
    if way == "other types":
        makers |= {"operator": operator_in_other_types}
    yield from itertools.islice(makers[entry.kind](entry, dtype, way), limit)


def operator_samples(entry: Entry, dtype: torch.dtype, way: str) -> Iterator[Sample]:
    info = entry.info
    operator = info.get_inplace() if way == "in place" else info.op
    for sample in info.sample_inputs(entry.device, dtype, requires_grad=way == "backward"):
        if way == "in place" and (sample.broadcasts_input or not changeable(sample.input)):
            continue
        yield Sample(compiled_call(operator), (sample.input, tuple(sample.args), dict(sample.kwargs)))


def operator_errors(entry: Entry, dtype: torch.dtype, way: str) -> Iterator[Sample]:
    if entry.info.error_inputs_func is None:
        return
    for error in entry.info.error_inputs(entry.device):
        sample = error.sample_input
        yield Sample(compiled_call(entry.info.op), (sample.input, tuple(sample.args), dict(sample.kwargs)))


def operator_in_other_types(entry: Entry, dtype: torch.dtype, way: str) -> Iterator[Sample]:
    """Samples of a known type, their tensors of that type in another one."""
    known = next((each for each in PLAIN_TYPES if each in entry.info.supported_dtypes(entry.device)), None)
    if known is None:
        return

    def changed(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype is known else leaf

    for sample in operator_samples(entry, known, "static"):
        yield Sample(sample.build, pytree.tree_map(changed, sample.arguments))


def changeable(value: Any) -> bool:
    """Whether a call may write to it: a tensor whose elements lie apart, or a list of such."""
    if isinstance(value, (list, tuple)):
        return all(map(changeable, value))
    return isinstance(value, torch.Tensor) and not (value.layout is torch.strided and 0 in value.stride())


def without_seed(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The table seeds random numbers inside of the call, which no graph can hold: `judge` does it before."""
    if not isinstance(operator, FunctionType) or "wrapper_set_seed" not in operator.__code__.co_names:
        return operator
    around = {**operator.__globals__, "wrapper_set_seed": lambda op, *args, **kwargs: op(*args, **kwargs)}
    return FunctionType(operator.__code__, around, operator.__name__, operator.__defaults__, operator.__closure__)


def compiled_call(operator: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    operator = without_seed(operator)

    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    return lambda wrap: wrap(call)


# --- modules ----------------------------------------------------------------------------------------------------------


def module_samples(entry: Entry, dtype: torch.dtype, way: str) -> Iterator[Sample]:
    """The state of the module is an argument too, so that its gradients and its buffers are compared."""
    info = entry.info
    given = info.module_inputs_func(
        info, device=entry.device, dtype=dtype, requires_grad=way == "backward", training=entry.training
    )
    for sample in given:
        if sample.forward_input is not None:
            yield module_sample(entry, sample, dtype, way == "backward")


def module_errors(entry: Entry, dtype: torch.dtype, way: str) -> Iterator[Sample]:
    info = entry.info
    if info.module_error_inputs_func is None:
        return
    given: Iterable[ErrorModuleInput] = info.module_error_inputs_func(
        info, device=entry.device, dtype=dtype, requires_grad=False, training=entry.training
    )
    for error in given:
        try:
            yield module_sample(entry, error.module_error_input, dtype, False)
        except Exception:  # the constructor refuses already: nothing is left to compile
            continue


def module_sample(entry: Entry, sample: Any, dtype: torch.dtype, backward: bool) -> Sample:
    torch.manual_seed(7)
    made = entry.info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).to(entry.device)
    made = made.to(dtype) if dtype.is_floating_point or dtype.is_complex else made
    made.train(entry.training)
    given = sample.forward_input
    if isinstance(made, LazyModuleMixin) and made.has_uninitialized_params():
        made(*given.args, **given.kwargs)  # its first call makes the parameters, and it is lazy no more
    state = {name: value.detach().clone() for name, value in {**dict(made.named_parameters())}.items()}
    for value in state.values():
        value.requires_grad_(backward and (value.is_floating_point() or value.is_complex()))
    state |= {name: value.detach().clone() for name, value in made.named_buffers()}

    def call(state: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(made, state, args, kwargs)

    return Sample(lambda wrap: wrap(call), (state, tuple(given.args), dict(given.kwargs)))


# --- optimizers -------------------------------------------------------------------------------------------------------


def optimizer_samples(entry: Entry, dtype: torch.dtype, way: str) -> Iterator[Sample]:
    """Two compiled steps of every spelling (one tensor at a time, many at once); parameters are the result."""
    info = entry.info
    if info.step_requires_closure or info.only_supports_sparse_grads:
        return
    flags = [{"foreach": value} for value in (False, True)] if "foreach" in info.supported_impls else [{}]
    for flag, given in itertools.product(flags, info.optim_inputs_func(device=entry.device, dtype=dtype)):
        generator = torch.Generator().manual_seed(3)
        shapes = [(5, 4), (3,), (1, 2, 3)]
        parameters = [torch.randn(shape, generator=generator, dtype=dtype).to(entry.device) for shape in shapes]
        gradients = [torch.randn(shape, generator=generator, dtype=dtype).to(entry.device) for shape in shapes]
        yield Sample(stepping(info.optim_cls, {**given.kwargs, **flag}), (parameters, (gradients,), {}))


def stepping(cls: Any, settings: dict[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def build(wrap: Callable[..., Any]) -> Callable[..., Any]:
        def call(parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> Any:
            own = [torch.nn.Parameter(tensor.detach().clone()) for tensor in parameters]
            optimizer = cls(own, **settings)
            step = wrap(optimizer.step)
            for turn in range(2):
                for parameter, gradient in zip(own, gradients, strict=True):
                    parameter.grad = (gradient * (1 + turn)).to(parameter.dtype)
                step()
            return [parameter.detach() for parameter in own]

        return call

    return build
