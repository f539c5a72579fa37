"""What the value of a node looks like: `f32[2, s0]`, its bytes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch

HALVES = (torch.float16, torch.bfloat16)  # floats of 16 bits
SHORT_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


# Operators that change the memory of an argument, although their schemas do not say so: the names of such arguments.
WRITES_UNSAID = {"inductor::resize_storage_bytes_": ("variable",)}


def fake_value(node: torch.fx.Node) -> Any:
    """The stand-in that tracing computed for a node: a fake tensor, a symbolic or plain number, or None."""
    return node.meta.get("val", node.meta.get("example_value"))


def note_for_another(note: Any) -> Any:
    """Metadata of a node for one that takes its place: what can be edited is its own, operators stay themselves."""
    return copy.copy(note) if isinstance(note, (list, dict)) else note


def dtype_name(dtype: torch.dtype) -> str:
    """`f32` for torch.float32; the plain name for types without a short one."""
    return SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def describe_value(value: Any) -> str:
    """A value in a few characters: `f32[2, s0]`, `int s0`, `(f32[2], i64[2])`."""
    if isinstance(value, torch.Tensor):
        text = f"{dtype_name(value.dtype)}[{', '.join(map(str, value.shape))}]"
        return text if value.device.type == "cpu" else f"{text} on {value.device}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(describe_value, value))})"
    if isinstance(value, torch.SymInt):
        return f"int {value}"
    if isinstance(value, torch.SymFloat):
        return f"float {value}"
    if isinstance(value, torch.SymBool):
        return f"bool {value}"
    return type(value).__name__ if value is not None else "None"


def storage_bytes(value: Any) -> int | torch.SymInt:
    """Bytes the elements of a tensor take; symbolic where its shape is. Zero for what is no tensor."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0
    return value.numel() * value.element_size()


def schema_of(operator: object) -> Any | None:
    """The schema of an operator; None for higher-order operators and plain functions."""
    return getattr(operator, "_schema", None)


# In the metadata of a call that selects an element by a number of which its maker knows that there is such an element.
INDEX_INSIDE = "index_inside"

# Calls of these operators compute what their names say, and nothing else.
KNOWN_NAMESPACES = frozenset({"aten", "prims", "ferrite"})


@functools.lru_cache(1024)
def is_elementwise(target: Any) -> bool:
    """Whether torch says of an operator that each element of its result is a function of those at the same place."""
    return torch.Tag.pointwise in getattr(target, "tags", ())


def is_known_operator(node: torch.fx.Node) -> bool:
    """Whether a node calls an operator that computes what its name says."""
    schema = schema_of(node.target)
    return schema is not None and str(schema.name).partition("::")[0] in KNOWN_NAMESPACES


def produces_value(node: torch.fx.Node) -> bool:
    """Whether a node computes something others can read: not the output, an assertion, or the body of a loop."""
    if node.op == "output" or body_of(node) is not None:
        return False
    if node.op == "get_attr" and fake_value(node) is None:
        # else an object that is kept beside a higher-order operator: the structure of its arguments, a function
        return isinstance(attribute_of(node), (torch.Tensor, type(None)))
    schema = schema_of(node.target)
    if schema is None:  # a function of torch that only checks something
        return not str(getattr(node.target, "__name__", "")).startswith("_assert_")
    return bool(schema.returns)


def body_of(node: torch.fx.Node) -> torch.fx.GraphModule | None:
    """The graph that a get_attr node names: the body of a conditional, of a loop, of an invoked subgraph."""
    if node.op != "get_attr":
        return None
    found = attribute_of(node)
    return found if isinstance(found, torch.fx.GraphModule) else None


def attribute_of(node: torch.fx.Node) -> Any | None:
    """What a get_attr node reads from the module that owns its graph; None if it is not there.

    `ferrite.graph.attributes.attribute` says what is missing instead.
    """
    found: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found


def bodies_of(node: torch.fx.Node) -> list[torch.fx.GraphModule]:
    """The graphs that a higher-order operator is given to run."""
    return [body for operand in node.all_input_nodes if (body := body_of(operand)) is not None]


def innermost_first(gm: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """A module and the graphs nested in it, each once, the nested ones before their owners."""
    seen: set[torch.fx.GraphModule] = set()

    def visit(module: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
        seen.add(module)
        for node in module.graph.find_nodes(op="get_attr"):
            body = body_of(node)
            if body is not None and body not in seen:
                yield from visit(body)
        yield module

    yield from visit(gm)


def leaves(value: Any) -> Iterator[Any]:
    """A value's parts, inside tuples, lists and dictionaries; the value itself if it is none of them."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def argument(node: torch.fx.Node, name: str) -> Any | None:
    """What a call passes for one parameter of its operator's schema, or that parameter's default."""
    schema = schema_of(node.target)
    for position, parameter in enumerate(schema.arguments if schema is not None else ()):
        if parameter.name == name:
            given = node.args[position] if position < len(node.args) else parameter.default_value
            return node.kwargs.get(name, given)
    return None


def stream_of(node: torch.fx.Node) -> Any | None:
    """The execution stream that capturing noted on a node; None for the one that is current when the graph runs."""
    return (node.meta.get("custom") or {}).get("stream")
