"""How compressions of embeddings are written: finding them in a graph (see `compress`)."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.machines import host_machine
from ferrite.passes.pre_grad.predicates import concat_view, is_plain, linear_view, matmul_view, sole_user
from ferrite.rewrite import arguments_of

aten = torch.ops.aten
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# The last call of each form.
ROOTS = (
    *(aten.matmul.default, aten.einsum.default, aten.linear.default, aten.add.Tensor),
    *(aten.transpose.int, aten.permute.default),
)
Form = Literal["product", "linear"]


@dataclass(frozen=True)
class Lce:
    """W @ X + b[:, None]; `swapped`: the graph has it transposed, [B, D, K]. `inner`: the calls it is made of, without
    the last; `reader` is the one of all that reads X."""

    x: torch.fx.Node
    weight: torch.fx.Node
    bias: torch.fx.Node | None
    form: Form
    swapped: bool
    inner: tuple[torch.fx.Node, ...]
    reader: torch.fx.Node

    def turned(self, writer: Any, result: torch.fx.Node) -> torch.fx.Node:
        """[B, K, D] as the graph has it."""
        made: torch.fx.Node = writer.call(aten.transpose.int, result, 1, 2) if self.swapped else result
        return made


def lce_of(node: torch.fx.Node) -> Lce | Refusal:
    """The compression whose last call is a node, or why there is none."""
    found = biased_product(node) or product(node) or linear_between_swaps(node)
    if found is None:
        return Refusal("it is no compression of rows")
    problem = lce_problem(found)
    return found if problem is None else problem


def lce_problem(found: Lce) -> Refusal | None:
    x, weight = fake_value(found.x), fake_value(found.weight)
    bias = fake_value(found.bias) if found.bias is not None else None
    values = [x, weight] if bias is None else [x, weight, bias]
    if not all(map(is_plain, values)) or len({(value.dtype, value.device) for value in values}) > 1:
        return Refusal("its operands do not have one dtype and device")
    if x.dtype not in DTYPES:
        return Refusal(f"no kernel compresses {x.dtype}")
    if x.dim() != 3 or weight.dim() != 2:
        return Refusal("it does not mix the rows of samples in one way")
    most = host_machine().compression.max_weight_side
    if not all(isinstance(size, int) and size <= most for size in weight.shape):
        return Refusal(f"its weight is not known to have at most {most} rows and columns")
    if bias is not None and list(bias.shape) != [weight.shape[0]]:
        return Refusal("its bias is not one number for each row")
    return None


# --- W @ X ------------------------------------------------------------------------------------------------------------


def product(node: torch.fx.Node) -> Lce | None:
    """matmul(W, X), or an einsum that says the same."""
    found = matmul_view(node)
    if found is not None and found.kind == "matmul":
        if is_rank(found.left, 2) and is_rank(found.right, 3):
            return Lce(found.right, found.left, None, "product", False, (), node)
        return None
    if node.target is not aten.einsum.default:
        return None
    given = arguments_of(node)
    operands = given["tensors"]
    if given["path"] is not None or len(operands) != 2 or operands[0] is operands[1]:
        return None
    weight, x = operands if is_rank(operands[0], 2) else reversed(operands)
    equation = str(given["equation"]).replace(" ", "")
    if not is_rank(weight, 2) or not is_rank(x, 3) or not mixes_rows(equation, weight is operands[0]):
        return None
    return Lce(x, weight, None, "product", False, (), node)


def mixes_rows(equation: str, weight_first: bool) -> bool:
    """Whether an equation is "kn,bnd->bkd", with any four letters, or the same with the operands swapped."""
    found = re.fullmatch(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)", equation)
    if found is None:
        return False
    first, second, result = found.groups()
    weight, x = (first, second) if weight_first else (second, first)
    if len(weight) != 2 or len(x) != 3 or len(set(weight + x)) != 4:
        return False
    return x[1] == weight[1] and result == x[0] + weight[0] + x[2]


def biased_product(node: torch.fx.Node) -> Lce | None:
    """A product plus a column, in either order."""
    if node.target is not aten.add.Tensor:
        return None
    given = arguments_of(node)
    left, right = given["self"], given["other"]
    if given["alpha"] != 1 or not isinstance(left, torch.fx.Node) or not isinstance(right, torch.fx.Node):
        return None
    for term, column in ((left, right), (right, left)):
        found, bias = product(term), as_column(column)
        if found is not None and bias is not None and sole_user(term) is node:
            inner = (term, column) if len(column.users) == 1 else (term,)
            return Lce(found.x, found.weight, bias, "product", False, inner, term)
    return None


def as_column(node: torch.fx.Node) -> torch.fx.Node | None:
    """What is written `b.unsqueeze(-1)`, `b[:, None]` or `b.view(-1, 1)`."""
    source: Any = node.args[0] if node.args else None
    if not isinstance(source, torch.fx.Node) or not is_rank(source, 1) or not is_rank(node, 2):
        return None
    if node.target is aten.unsqueeze.default:
        return source if arguments_of(node)["dim"] in (1, -1) else None
    if node.target is operator.getitem:
        return source if node.args[1] == (slice(None), None) else None
    if node.target in (aten.view.default, aten.reshape.default):
        return source if torch_api.known_equal(fake_value(node).shape[1], 1) else None
    return None


# --- linear(X.mT, W, b).mT --------------------------------------------------------------------------------------------


def linear_between_swaps(node: torch.fx.Node) -> Lce | None:
    last = swapped(node)
    layer = last if last is not None else node
    found = linear_view(layer)
    if found is None or (last is not None and sole_user(layer) is None):
        return None
    x = swapped(found.input)
    if x is None:
        return None
    inner = (found.input,) if last is None else (layer, found.input)
    return Lce(x, found.weight, found.bias, "linear", last is None, inner, found.input)


def swapped(node: Any) -> torch.fx.Node | None:
    """What a node is with its last two dimensions of three exchanged."""
    if not isinstance(node, torch.fx.Node) or node.target not in (aten.transpose.int, aten.permute.default):
        return None
    given = arguments_of(node)
    if not is_rank(node, 3):
        return None
    if node.target is aten.transpose.int:
        exchanged = {given["dim0"] % 3, given["dim1"] % 3} == {1, 2}
    else:
        exchanged = [dim % 3 for dim in given["dims"]] == [0, 2, 1]
    return given["self"] if exchanged else None


def is_rank(node: Any, rank: int) -> bool:
    value = fake_value(node) if isinstance(node, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == rank


# --- X as a concat ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConcatParts:
    """What a concat along the rows holds: [B, n, D] each, or [B, D] where it is a stack."""

    nodes: Sequence[torch.fx.Node]
    widths: Sequence[int]
    stacked: bool

    def written(self, writer: Any) -> list[torch.fx.Node]:
        """The parts as [B, n, D]."""
        if not self.stacked:
            return list(self.nodes)
        return [writer.call(aten.unsqueeze.default, node, 1) for node in self.nodes]


def joined_parts(found: Lce) -> ConcatParts | Refusal:
    """The parts of a concat that is read for the compression alone."""
    concat = concat_view(found.x)
    if concat is None or concat.dim != 1:
        return Refusal("what is compressed is no concat of rows")
    if sole_user(found.x) is None or (found.form == "linear" and sole_user(found.reader) is None):
        return Refusal("the concat is read elsewhere and stays")
    values = [fake_value(part) for part in concat.operands]
    rank, dtype = (2 if concat.kind == "stack" else 3), fake_value(found.x).dtype
    if any(value.dim() != rank or value.dtype != dtype for value in values):
        return Refusal("a part has another rank or dtype")
    widths = [1 if concat.kind == "stack" else value.shape[1] for value in values]
    if not all(isinstance(width, int) for width in widths):
        return Refusal("the rows of a part are not known")
    return ConcatParts(concat.operands, widths, concat.kind == "stack")


# --- (X @ Y.mT) @ W ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dot:
    x: torch.fx.Node
    y: torch.fx.Node
    weight: torch.fx.Node
    inner: tuple[torch.fx.Node, ...]


def product_of_products(node: torch.fx.Node) -> Dot | Refusal:
    outer = matmul_view(node)
    between = matmul_view(outer.left) if outer is not None else None
    if outer is None or between is None or outer.kind == "mm" or between.kind == "mm":
        return Refusal("it is no product of a product")
    y = swapped(between.right)
    if y is None:
        return Refusal("its second factor is not transposed")
    if sole_user(outer.left) is None:
        return Refusal("the products of rows are read elsewhere")
    found = Dot(between.left, y, outer.right, (outer.left, between.right))
    problem = dot_problem(found)
    return found if problem is None else problem


def dot_problem(found: Dot) -> Refusal | None:
    x, y, weight = map(fake_value, (found.x, found.y, found.weight))
    if not all(map(is_plain, (x, y, weight))) or len({(value.dtype, value.device) for value in (x, y, weight)}) > 1:
        return Refusal("its operands do not have one dtype and device")
    if x.dtype not in DTYPES or x.dtype is torch.float16:
        return Refusal(f"in {x.dtype} another order may overflow, or no kernel has it")
    if (x.dim(), y.dim()) != (3, 3) or weight.dim() not in (2, 3):
        return Refusal("it is no product of samples")
    samples = [value.shape[0] for value in (x, y, weight) if value.dim() == 3]
    if not all(torch_api.known_equal(size, samples[0]) for size in samples):
        return Refusal("its factors have different numbers of samples")
    most = host_machine().compression.max_weight_side
    if not all(isinstance(size, int) and size <= most for size in (x.shape[1], *weight.shape[-2:])):
        return Refusal(f"its sizes are not known to be at most {most}")
    return None
