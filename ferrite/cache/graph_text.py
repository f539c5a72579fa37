"""A captured graph as text: two graphs with one text compile to the same code.

    0 input
    1 input
    2 aten.mm.default(%0, %1)
    output (%2,)

Beside the calls, what inputs look like (type, sizes, strides, memory they share), what is known of symbols, and the
contents of constants. Names do not matter: values are numbered in order, symbols by their first use. Parameters are
inputs, so only their looks are in here. What has no text that says all about it makes a graph uncacheable.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import inspect
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_list

from ferrite.cache.identities import identity
from ferrite.capture import size_facts, torch_api, torch_operators, torch_state
from ferrite.errors import NotCached
from ferrite.graph import (
    SYMBOLIC,
    TORCH_FOLDER,
    USER_KERNEL,
    WRITTEN_AFTER,
    Storage,
    attribute_of,
    fake_value,
    schema_of,
    storages_in,
)

# What compiling a captured graph reads from the metadata of its nodes. A test finds every key that ferrite reads, here
# or in the list of those that do not matter.
READ = frozenset(("unbacked_bindings", "eager_input_vals", "custom", "desc", "quant_options", WRITTEN_AFTER))
IN_ORDER = tuple(sorted(READ))
PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, type(...), range))
SEQUENCES = frozenset((tuple, list, immutable_list))
NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
ORDINARY = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
WORD = re.compile(r"[A-Za-z_]\w*")
# What these return follows from what they are given, for one version of torch, unless it depends on data.
FOLLOWING = ("aten.", "prims.", "_operator.")
# Functions of Python and torch that graphs call beside operators: their names say all, for one version of torch.
KNOWN_MODULES = ("_operator", "operator", "math", "builtins", "torch")


class GraphText:
    """Writes a graph and the graphs nested in it. Numbers of symbols, storages and constants are common to all."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.operators: list[str] = []
        self.values: list[str] = []  # what results look like that follow from nothing else
        self.inputs: list[str] = []  # what each input of the outermost graph looks like
        self.constants: list[str] = []
        self.symbols: dict[str, str] = {}
        self.likely: dict[str, int | None] = {}
        self.any_symbolic: Any = None  # a number with symbols: it leads to what is known of them
        self._expressions: dict[Any, str] = {}
        self._storages: dict[Storage, int] = {}
        self._bodies: dict[int, int] = {}
        self._looks: dict[Any, str] = {}
        self._names: dict[int, str] = {}  # of what the graph calls, which it keeps alive meanwhile

    def add(self, gm: torch.fx.GraphModule) -> None:
        outermost = not self._bodies
        self._bodies[id(gm)] = len(self._bodies)
        numbers: dict[torch.fx.Node, int] = {}
        for number, node in enumerate(gm.graph.nodes):
            numbers[node] = number
            notes = "" if READ.isdisjoint(node.meta) else self.noted(node, numbers)
            if node.op == "placeholder":
                self.calls.append(f"{number} input")
                looks = self.value(fake_value(node)) + self.shared(fake_value(node))
                (self.inputs if outermost else self.values).append(looks + notes)
            elif node.op == "get_attr":
                self.calls.append(f"{number} {self.attribute(attribute_of(node))}{notes}")
            elif node.op == "output":
                self.calls.append(f"output {self.text(node.args, numbers)}{notes}")
            else:
                self.add_call(node, number, notes, numbers)

    def add_call(self, node: torch.fx.Node, number: int, notes: str, numbers: Mapping[torch.fx.Node, int]) -> None:
        named: Mapping[str, Any] = node.kwargs
        if USER_KERNEL not in node.meta:
            name = self.target(node.target)
        else:
            # By number it says nothing. Whoever loads the entry launches the kernel of his own graph, whatever is in
            # it: what it writes, its arguments and grids are all that a program depends on.
            name = str(torch_api.operator_name(node.target))
            named = {key: value for key, value in named.items() if key not in ("kernel_idx", "constant_args_idx")}
        self.operators.append(name)
        given = ", ".join(self.items(node.args, numbers))
        by_name = self.text(named, numbers) if named else ""
        self.calls.append(f"{number} {name}({given}){by_name}{notes}")
        if not name.startswith(FOLLOWING) or (notes and node.meta.get("unbacked_bindings")):  # has symbols of its own
            self.values.append(f"{number} {self.value(fake_value(node))}")

    @property
    def bodies(self) -> int:
        """How many graphs were written, the outermost included."""
        return len(self._bodies)

    def components(self) -> dict[str, str]:
        """The components of a key that are about the graph, less those about its inputs."""
        return {
            "operators": " ".join(self.operators),
            "calls": "\n".join(self.calls),
            "values": "\n".join(self.values),
            "constants": "; ".join(self.constants),
            "symbols": self.known_of_symbols(),
        }

    # --- values -------------------------------------------------------------------------------------------------------

    def value(self, value: Any) -> str:
        """What a value looks like, in full."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(self.value, value))})"
        if isinstance(value, dict):
            return f"({', '.join(f'{name!r}: {self.value(item)}' for name, item in value.items())})"
        if isinstance(value, SYMBOLIC):
            return f"{type(value).__name__} {self.symbolic(value)}"
        return repr(value) if type(value) in PLAIN else type(value).__qualname__

    def tensor(self, value: torch.Tensor) -> str:
        strided = value.layout is torch.strided
        strides, offset = (value.stride(), value.storage_offset()) if strided else ((), 0)
        bits = (value.requires_grad, value.is_conj(), value.is_neg())
        kind = torch.Tensor if torch_api.is_fake(value) else type(value)
        looks = (kind, value.dtype, value.layout, value.device, tuple(value.shape), strides, offset, bits)
        try:
            return self._looks[looks]  # few looks make up a graph
        except KeyError:
            return self._looks.setdefault(looks, self.looks_text(*looks))
        except TypeError:  # sizes with symbols cannot be looked up
            return self.looks_text(*looks)

    def looks_text(
        self,
        kind: type,
        dtype: torch.dtype,
        layout: torch.layout,
        device: torch.device,
        shape: Sequence[Any],
        strides: Sequence[Any],
        offset: Any,
        bits: Sequence[bool],
    ) -> str:
        facts = [str(dtype).removeprefix("torch."), f"[{', '.join(map(self.size, shape))}]"]
        if layout is torch.strided:
            facts.append(f"strides ({', '.join(map(self.size, strides))})")
        else:
            facts.append(str(layout))
        if not isinstance(offset, int) or offset:
            facts.append(f"from {self.size(offset)}")
        if device.type != "cpu":
            facts.append(f"on {device}")
        facts += [name for name, holds in zip(("grad", "conj", "neg"), bits, strict=True) if holds]
        if kind not in ORDINARY:
            facts.append(f"as {kind.__module__}.{kind.__qualname__}")
        return " ".join(facts)

    def size(self, value: int | torch.SymInt) -> str:
        return str(value) if isinstance(value, int) else self.symbolic(value)

    def symbolic(self, value: Any) -> str:
        expression = torch_api.expression(value)
        found = self._expressions.get(expression)
        if found is None:
            free = {str(symbol) for symbol in expression.free_symbols}
            if free:
                self.any_symbolic = value
                near = size_facts.likely_value(value)
                self.likely |= {str(symbol): near(symbol) for symbol in expression.free_symbols}
            found = self._expressions[expression] = self.renamed(str(expression), free)
        return found

    def renamed(self, text: str, free: set[str] | frozenset[str]) -> str:
        """The same with symbols as `s0`, `s1` and so on, by first use. Graphs that differ in names alone agree."""

        def number(word: re.Match[str]) -> str:
            name = word[0]
            return self.symbols.setdefault(name, f"s{len(self.symbols)}") if name in free else name

        return WORD.sub(number, text)

    def shared(self, value: Any) -> str:
        """Which memory an input has: numbers that are common to those that share it."""
        found = [str(self._storages.setdefault(each, len(self._storages))) for each in storages_in(value)]
        return f" memory {' '.join(sorted(found))}" if found else ""

    def noted(self, node: torch.fx.Node, numbers: Mapping[torch.fx.Node, int]) -> str:
        """What compiling reads from the metadata of a node, if there is something."""
        kept = {key: node.meta[key] for key in IN_ORDER if node.meta.get(key)}
        parts = []
        if (bound := kept.pop("unbacked_bindings", None)) is not None:
            parts.append(", ".join(f"{self.renamed(str(name), {str(name)})} at {at}" for name, at in bound.items()))
        if (eager := kept.pop("eager_input_vals", None)) is not None:
            parts.append(f"eager {self.value(eager)}")
        if (described := kept.pop("desc", None)) is not None:
            parts.append(repr(described))
        parts += [f"{key} {self.text(value, numbers)}" for key, value in kept.items()]
        return "".join(f" | {part}" for part in parts)

    # --- arguments ----------------------------------------------------------------------------------------------------

    def text(self, value: Any, numbers: Mapping[torch.fx.Node, int]) -> str:
        """An argument of a call."""
        kind = type(value)
        if kind is torch.fx.Node:
            return f"%{numbers[value]}"
        if kind in PLAIN:
            return repr(value)
        if kind in SEQUENCES or isinstance(value, (tuple, list)):
            if kind in SEQUENCES and PLAIN.issuperset(map(type, value)):  # most are sizes
                return repr(value)
            inner = ", ".join(self.items(value, numbers))
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
        if isinstance(value, dict):
            inner = ", ".join(f"{self.text(key, numbers)}: {self.text(item, numbers)}" for key, item in value.items())
            return f"{{{inner}}}"
        if isinstance(value, slice):
            return f"slice{self.text((value.start, value.stop, value.step), numbers)}"
        if isinstance(value, SYMBOLIC):
            return self.symbolic(value)
        if isinstance(value, NAMED) or type(value).__name__ == "TreeSpec":
            return str(value)
        if isinstance(value, enum.Enum):
            return f"{type(value).__module__}.{value}"
        return self.target(value)

    def items(self, values: Sequence[Any], numbers: Mapping[torch.fx.Node, int]) -> list[str]:
        """Several arguments. Most are nodes and plain numbers: these take no call."""
        return [
            f"%{numbers[item]}"
            if type(item) is torch.fx.Node
            else repr(item)
            if type(item) in PLAIN
            else self.text(item, numbers)
            for item in values
        ]

    def target(self, target: Any) -> str:
        found = self._names.get(id(target))
        if found is None:
            found = self._names[id(target)] = target_name(target)
        return found

    def attribute(self, value: Any) -> str:
        """What a graph reads from its module: a graph, a constant, the structure of arguments."""
        if isinstance(value, torch.fx.GraphModule):
            if id(value) not in self._bodies:
                here, self.calls = self.calls, []
                self.add(value)
                body, self.calls = self.calls, here
                lines = "".join(f"\n  {line}" for line in body)
                return f"graph {self._bodies[id(value)]}{lines}"
            return f"graph {self._bodies[id(value)]}"
        if isinstance(value, torch.Tensor):
            digest = contents(value)  # first, since it refuses what the others cannot read
            self.constants.append(f"{self.tensor(value)}{self.shared(value)} {digest}")
            return f"constant {len(self.constants) - 1}"
        return f"attribute {self.text(value, {})}"

    # --- symbols ------------------------------------------------------------------------------------------------------

    def known_of_symbols(self) -> str:
        """Ranges, guards and assertions over the symbols of the graph, and over symbols that these bring in.

        Sizes that were seen steer choices that are right for every size: they count by their order of magnitude only.
        """
        if self.any_symbolic is None:
            return ""
        facts, wanted = dict.fromkeys(size_facts.facts_of_symbols(self.any_symbolic)), set(self.symbols)
        found: list[str] = []
        while new := [fact for fact in facts if fact[0] & wanted]:
            for names, text in new:
                found.append(self.renamed(text, names))
                wanted |= names
                del facts[names, text]
        found += [f"{self.symbols[name]} about {size}" for name, size in self.likely.items()]
        return "; ".join(sorted(found))


def target_name(target: Any) -> str:
    """The name of what a node calls, if that says all about it."""
    name = torch_api.operator_name(target)
    if name is not None:
        if torch_operators.launches_user_kernel(target):
            raise NotCached(f"it calls {name}, whose kernels are known by number only")
        return name if name.startswith(("aten.", "prims.", "higher_order.")) else f"{name} {declared(target)}"
    if isinstance(target, (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)):
        module = str(target.__module__ or "")
        if module.split(".")[0] in KNOWN_MODULES and "<" not in target.__qualname__:
            return f"{module}.{target.__qualname__}"
        raise NotCached(f"it calls {module}.{target.__qualname__}, a function without an operator's name")
    raise NotCached(f"it holds a {type(target).__module__}.{type(target).__qualname__}, which has no text")


def declared(operator: Any) -> str:
    """What an operator that torch does not bring declares of itself; its code runs by name, unless there is another
    form of it that lowering takes: then that counts too."""
    function = torch_operators.decomposition(operator) if torch_operators.is_operator(operator) else None
    other = "" if function is None or is_torchs(function) else f" as {identity(function)}"
    effect = " with an effect" if torch_operators.has_registered_effect(operator) else ""
    return f"<{schema_of(operator)} {' '.join(sorted(map(str, operator.tags)))}{effect}{other}>"


def is_torchs(function: Any) -> bool:
    """Whether a function is part of torch itself, whose version is in every key."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and code.co_filename.startswith(TORCH_FOLDER) and not isinstance(function, types.MethodType)


def contents(tensor: torch.Tensor) -> str:
    """A digest of the elements of a constant."""
    if torch_api.is_fake(tensor):
        raise NotCached("a constant has no contents yet")
    if type(tensor) not in ORDINARY or tensor.layout is not torch.strided or tensor.is_quantized:
        raise NotCached(f"a constant is a {type(tensor).__name__} of layout {tensor.layout}")
    with torch_state.on_real_tensors():
        dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        count = dense.numel() * dense.element_size()
        return hashlib.sha256((ctypes.c_char * count).from_address(dense.data_ptr()) if count else b"").hexdigest()
