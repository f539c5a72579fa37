"""Calls of every ATen overload, in every spelling that torch has for it, with arguments away from their defaults.

    for name, operator in operators():
        calls = spellings(operator, arguments(operator))

Arguments come from torch's own samples where asked for (`recorded_calls`). For operators that rules ask for they are
made of the schema where there is none: shapes are tried until the operator takes them. Then each argument that has a
default is given another value, where the operator takes that, too. A spelling counts if eager can call it.
"""

from __future__ import annotations

import copy
import itertools
import keyword
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ferrite.capture import torch_api
from ferrite.capture.torch_operators import every_operator
from ferrite.graph.torch_calls import OPERATORS
from ferrite.passes.pre_grad.names import NAMES, PYTHON_FUNCTIONS, SAME_AS

Arguments = dict[str, Any]
LARGEST = 20_000  # elements of a sample
SEED = 3
# Why an overload is not called.
NOT_DISPATCHED = "a spelling of TorchScript, which the dispatcher does not know"
NO_SAMPLE = "torch has no sample of it, and on made-up arguments some operators end the process"
DATA = "data decides what it does: it runs on no fake values"
NOTHING_FITS = "no arguments that it takes were found"
REASONS = frozenset({NOT_DISPATCHED, NO_SAMPLE, NOTHING_FITS, DATA})
DTYPES = {"dtype": torch.float64, "layout": torch.strided, "device": torch.device("cpu"), "pin_memory": False}
SHAPES = [(), (4,), (4, 4), (2, 4), (2, 4, 4), (2, 4, 4, 4), (1, 2, 4, 4, 4)]
TEXTS = ["none", "mean", "tanh", "floor", "same", "linear", "reduced", "sum", "ij", "L", "fro", "i,i->i", "constant"]


@dataclass(frozen=True)
class Spelled:
    """One call as somebody may write it: `kind` is overload, packet, function, method or operator."""

    kind: str
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self, args: Any, kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.op == "call_method":
                return getattr(args[0], self.target)(*args[1:], **kwargs)
            return self.target(*args, **kwargs)


def operators() -> list[tuple[str, Any]]:
    return [(name, each) for name, each in every_operator() if name.startswith("aten.")]


def short_name(overload: Any) -> str:
    return str(overload._schema.name).removeprefix("aten::")


def fresh(tree: Any) -> Any:
    """The same with tensors of its own."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), tree)


def takes(overload: Any, given: Arguments) -> bool:
    torch.manual_seed(SEED)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            overload(**fresh(given))
    except Exception:
        return False
    return True


# --- arguments --------------------------------------------------------------------------------------------------------


def arguments(overload: Any, samples: Mapping[Any, list[Arguments]] = {}) -> Arguments | str:
    """Arguments by name that an overload takes, away from its defaults; or why there are none."""
    if not torch._C._dispatch_has_kernel(overload.name()):
        return NOT_DISPATCHED
    found = next((given for given in samples.get(overload, ()) if takes(overload, given)), None)
    if found is None and short_name(overload) not in NAMES:
        return NO_SAMPLE
    found = made(overload) if found is None else found
    return NOTHING_FITS if found is None else away(overload, found)


def images(rank: int) -> torch.Tensor:
    return torch.rand(2, 4, *(4,) * rank, generator=torch.Generator().manual_seed(rank))


def given_by_hand() -> dict[str, Arguments]:
    """For operators whose arguments must fit each other in more than shape."""
    statistics = {"weight": torch.rand(4), "bias": torch.rand(4), "running_mean": torch.rand(4)}
    statistics["running_var"] = torch.rand(4) + 1
    norm = {"momentum": 0.25, "eps": 1e-3, "cudnn_enabled": True}
    truth = torch.arange(8).reshape(2, 4) % 2 == 0
    return {
        "batch_norm.default": {"input": images(2), **statistics, "training": False, **norm},
        "instance_norm.default": {"input": images(2), **statistics, "use_input_stats": True, **norm},
        "clamp.default": {"self": images(1), "min": 0.25},
        "clamp.Tensor": {"self": images(1), "min": torch.tensor(0.25)},
        "einsum.default": {"equation": "ij,jk->ki", "tensors": [images(0), images(0).t()]},
        "narrow.Tensor": {"self": images(1), "dim": 1, "start": torch.tensor(1), "length": 2},
        "to.other": {"self": images(0), "other": images(1).double()},
        "where.self": {"condition": truth, "self": images(0), "other": images(0) + 1},
        "where.ScalarSelf": {"condition": truth, "self": 0.5, "other": images(0)},
        "where.ScalarOther": {"condition": truth, "self": images(0), "other": 0.5},
        "where.Scalar": {"condition": truth, "self": 0.5, "other": 2},
        "conv_transpose1d.default": {"input": images(1), "weight": images(1).transpose(0, 1)},
        "conv_transpose2d.input": {"input": images(2), "weight": images(2).transpose(0, 1)},
        "conv_transpose3d.input": {"input": images(3), "weight": images(3).transpose(0, 1)},
    }


def made(overload: Any) -> Arguments | None:
    """Arguments without a default, made of their types: the first combination of shapes that is taken."""
    by_hand = given_by_hand().get(f"{short_name(overload)}.{overload._overloadname}")
    if by_hand is not None and takes(overload, by_hand):
        return by_hand
    needed = [each for each in overload._schema.arguments if not each.has_default_value()]
    for shape, number, whole in itertools.product(SHAPES, (1, 2), (False, True)):
        choices = [list(candidates(each, shape, number, whole))[:6] for each in needed]
        for chosen in itertools.islice(itertools.product(*choices), 12):
            given = {each.name: value for each, value in zip(needed, chosen, strict=True)}
            if takes(overload, given):
                return given
    return None


def candidates(parameter: Any, shape: tuple[int, ...], number: int, whole: bool) -> Iterator[Any]:
    kind = str(parameter.type)
    kind = kind[len("Optional[") : -1] if kind.startswith("Optional[") else kind
    generator = torch.Generator().manual_seed(len(parameter.name))
    if "Tensor" in kind:
        one = torch.rand(shape, generator=generator) + 0.25
        indices = torch.randint(0, 2, shape, generator=generator)
        named_index = parameter.name in ("index", "indices", "target", "offsets")
        tensors = [indices, one, one > 0.7] if whole or named_index else [one, indices, one > 0.7]
        yield from ([[each, each + 1] for each in tensors[:2]] if kind.startswith("List[") else tensors)
    elif kind in ("List[int]", "List[SymInt]"):
        dims = [[0], [1], [0, 1]] if "dim" in parameter.name else []
        yield from (*dims, list(shape), [number] * len(shape), [number], [number] * max(len(shape) - 2, 1), [2, 2])
    elif kind == "List[float]":
        yield from ([2.0] * max(len(shape) - 2, 1), [0.5])
    elif kind == "List[bool]":
        yield from ([True, True, True], [True, False])
    elif parameter.name in DTYPES or parameter.name == "memory_format":
        yield DTYPES.get(parameter.name, torch.contiguous_format)
    elif kind in ("int", "SymInt"):
        yield from (number, 0, 2)
    elif kind == "float":
        yield from (0.5, 1e-3)
    elif kind in ("number", "Scalar"):
        yield from (2, 0.5)
    elif kind == "bool":
        yield from (True, False)
    elif kind == "str":
        yield from TEXTS


def away(overload: Any, found: Arguments) -> Arguments:
    """The same, and as many arguments as the overload takes with values that are not their defaults."""
    first = next((value for value in found.values() if isinstance(value, torch.Tensor)), None)
    shape = tuple(first.shape) if first is not None else (2, 4)
    for parameter in overload._schema.arguments:
        if not parameter.has_default_value() or parameter.name in ("out", "generator", "pin_memory"):
            continue
        default = parameter.default_value
        if parameter.name in found and not is_default(found[parameter.name], default):
            continue
        for value in others(parameter, default, shape):
            if takes(overload, {**found, parameter.name: value}):
                found = {**found, parameter.name: value}
                break
    return found


def others(parameter: Any, default: Any, shape: tuple[int, ...]) -> Iterator[Any]:
    """Values that are not the default."""
    if isinstance(default, bool):
        yield not default
    elif isinstance(default, float):
        yield from (default + 0.25, default / 2, default * 3)
    elif isinstance(default, int) and parameter.name not in DTYPES:
        yield from (default + 1, default - 1, 0)
    elif isinstance(default, (list, tuple)):
        yield from ([each + 1 for each in default], [2] * len(default))
    else:
        made_up = candidates(parameter, shape, 1, False)
        yield from (value for value in made_up if not is_default(value, default))
    if parameter.name == "memory_format":
        yield torch.channels_last


def is_default(value: Any, default: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(default, torch.Tensor):
        return False
    return type(value) is type(default) and bool(value == default)


# --- torch's samples --------------------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Keeps what overloads are called with."""

    def __init__(self, found: dict[Any, list[Arguments]]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keep(self.found, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Keeps what torch's functions are called with, by the overloads that they stand for."""

    def __init__(self, found: dict[Any, list[Arguments]]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(getattr(func, "__name__", ""))
        packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
        if hasattr(packet, "overloads"):
            named = dict(kwargs or {})
            chosen = torch_api.overload_for(f"aten::{name}", args, named)
            if chosen is not None:
                keep(self.found, getattr(packet, chosen or "default"), args, named)
        return func(*args, **(kwargs or {}))


def keep(found: dict[Any, list[Arguments]], overload: Any, args: Any, kwargs: Any) -> None:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    plain = all(type(each) is torch.Tensor and each.layout is torch.strided for each in tensors)
    if not plain or sum(each.numel() for each in tensors) > LARGEST or len(found.setdefault(overload, [])) >= 4:
        return
    parameters = overload._schema.arguments
    given = {each.name: value for each, value in zip(parameters, args, strict=False)}
    given |= {("self" if key == "input" else key): value for key, value in kwargs.items()}
    if set(given) <= {each.name for each in parameters}:
        found[overload].append(fresh(given))


def recorded_calls(per_operator: int = 3) -> dict[Any, list[Arguments]]:
    """What torch's samples for its own tests call, by overload."""
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[Any, list[Arguments]] = {}
    for info, dtype in itertools.product(op_db, (torch.float32, torch.int64, torch.bool, torch.complex64)):
        if dtype in info.supported_dtypes("cpu"):
            record(info, dtype, found, per_operator)
    return found


def record(info: Any, dtype: torch.dtype, found: dict[Any, list[Arguments]], count: int) -> None:
    for name in (info.op, info.inplace_variant):
        if name is None:
            continue
        try:
            for sample in itertools.islice(info.sample_inputs("cpu", dtype), count):
                given = fresh((sample.input, *sample.args)), fresh(sample.kwargs)
                with torch.no_grad(), warnings.catch_warnings(), Operators(found), Functions(found):
                    warnings.simplefilter("ignore")
                    name(*given[0], **given[1])
        except Exception:
            continue


# --- spellings --------------------------------------------------------------------------------------------------------


def spellings(overload: Any, given: Arguments) -> list[Spelled]:
    """Every way to write a call that eager takes: functions, methods, `torch.ops`, by position and by name."""
    return [each for each in ways(overload, given) if can_be_called(each)]


def can_be_called(call: Spelled) -> bool:
    if any(map(keyword.iskeyword, call.kwargs)):  # uniform_(x, from=0): nobody can write that
        return False
    torch.manual_seed(SEED)
    try:
        with torch.no_grad():
            call.run(*fresh((call.args, dict(call.kwargs))))
    except Exception:
        return False
    return True


def ways(overload: Any, given: Arguments) -> Iterator[Spelled]:
    name = short_name(overload)
    names = [name, *(other for other, same in SAME_AS.items() if same == name)]
    by_place, by_name = positional(overload, given), ((), given)
    for args, kwargs in (by_place, by_name):
        yield Spelled("overload", "call_function", overload, args, kwargs)
        yield Spelled("packet", "call_function", overload._overloadpacket, args, kwargs)
        for function in functions(names):
            yield Spelled("function", "call_function", function, args, kwargs)
            yield Spelled("function", "call_function", function, args, as_input(kwargs))
    first = next(iter(overload._schema.arguments), None)
    if first is not None and isinstance(given.get(first.name), torch.Tensor):
        rest = {key: value for key, value in given.items() if key != first.name}
        for method in names:
            yield Spelled("method", "call_method", method, *by_place)
            yield Spelled("method", "call_method", method, (given[first.name],), rest)
            if len(by_place[0]) == 2 and isinstance(by_place[0][1], (list, tuple)):
                yield Spelled("method", "call_method", method, (by_place[0][0], *by_place[0][1]), by_place[1])
    yield from python_ways(name, given, by_place)


def functions(names: list[str]) -> list[Callable[..., Any]]:
    homes = (torch, torch._C._nn, torch.special, torch.linalg, torch.fft)
    found = [getattr(home, name, None) for home in homes for name in names]
    return [each for each in dict.fromkeys(found) if callable(each)]


def as_input(kwargs: Mapping[str, Any]) -> Arguments:
    return {("input" if key == "self" else key): value for key, value in kwargs.items()}


def python_ways(name: str, given: Arguments, by_place: tuple[Any, Any]) -> Iterator[Spelled]:
    """Python's operators, and functions of torch that are written in Python."""
    for function, same in OPERATORS.items():
        if same == name and not by_place[1]:
            yield Spelled("operator", "call_function", function, by_place[0], {})
            yield Spelled("operator", "call_function", function, by_place[0][::-1], {})
    for entry in PYTHON_FUNCTIONS:
        back = {parameter: python for python, parameter in entry.parameters.items()}
        if entry.name == name and set(given) <= set(back):
            yield Spelled("function", "call_function", entry.function, (), {back[k]: v for k, v in given.items()})
    if name == "split":
        yield Spelled("function", "call_function", torch.functional.split, tuple(given.values()), {})
    if name == "einsum":
        yield Spelled("function", "call_function", torch.functional.einsum, tuple(given.values())[:2], {})


def positional(overload: Any, given: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """Arguments by position as far as that goes."""
    args: list[Any] = []
    rest = dict(given)
    for parameter in overload._schema.arguments:
        if parameter.kwarg_only or (parameter.name not in rest and not parameter.has_default_value()):
            break
        if not rest.keys() - {each.name for each in overload._schema.arguments if each.kwarg_only}:
            break
        args.append(rest.pop(parameter.name, parameter.default_value))
    return tuple(args), rest


# --- graphs -----------------------------------------------------------------------------------------------------------


def graph_of(calls: list[Spelled]) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """A graph that makes every call, each on inputs of its own, and returns all results; and its inputs."""
    graph, inputs = torch.fx.Graph(), list[torch.Tensor]()
    results, given = [], []
    for call in calls:  # all inputs come first
        leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                inputs.append(leaf.detach().clone())
                leaves[place] = graph.placeholder(f"x{len(inputs)}")
        given.append(pytree.tree_unflatten(leaves, spec))
    for call, (args, kwargs) in zip(calls, given, strict=True):
        node = graph.call_method(call.target, args, kwargs) if call.op == "call_method" else None
        results.append(graph.call_function(call.target, args, kwargs) if node is None else node)
    graph.output(tuple(results))
    return torch.fx.GraphModule(torch.nn.Module(), graph), inputs


def outcome(function: Any, inputs: list[torch.Tensor]) -> list[Any]:
    """What a graph, or a compiled one, returns, and what it leaves in its inputs."""
    own = copy.deepcopy(function) if isinstance(function, torch.fx.GraphModule) else function
    if isinstance(own, torch.fx.GraphModule):
        own.recompile()
    copies = fresh(inputs)
    torch.manual_seed(SEED)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [own(*copies), copies]


def same(old: Any, new: Any, values: bool = True) -> bool:
    """To the bit, types of results, dtypes, shapes and strides included."""
    if isinstance(old, torch.Tensor):
        if not isinstance(new, torch.Tensor) or looks(old) != looks(new):
            return False
        return not values or not old.numel() or torch.equal(bits(old), bits(new))
    if isinstance(old, (list, tuple)):
        same_kind = isinstance(new, (list, tuple)) and len(old) == len(new)
        return same_kind and all(same(*pair, values) for pair in zip(old, new, strict=True))
    return type(old) is type(new) and (bool(old == new) or (old != old and new != new))


def looks(tensor: torch.Tensor) -> Any:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.dtype, tuple(tensor.shape), tensor.layout, strides, tensor.is_conj(), tensor.is_neg()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    plain = tensor.resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
    plain = torch.where(plain.isnan(), torch.zeros_like(plain), plain) if plain.is_floating_point() else plain
    return plain.view(torch.uint8)
