"""One spelling per operation: however a call is written, the stage sees the same node; and it computes the same."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ferrite.graph import fake_value
from ferrite.options import Options
from ferrite.passes.pre_grad.canonical import CANONICAL, numpy_compat_normalization
from ferrite.passes.pre_grad.metadata import add_values
from ferrite.passes.pre_grad.predicates import linear_view, matmul_view
from ferrite.passes.pre_grad.torch_form import as_torch
from ferrite.pipeline import PassContext
from tests.compare import assert_same_as_eager, since
from tests.torch_level import canonical, captured

pytestmark = pytest.mark.quick
aten = torch.ops.aten


def traced(function: Callable[..., Any], *inputs: Any) -> torch.fx.GraphModule:
    """The calls that a function of tensors makes, in canonical form; built-in functions are traced too."""
    graph = torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    result = function(
        *(torch.fx.Proxy(graph.placeholder(name), tracer) for name, _ in zip("xyz", inputs, strict=False))
    )
    graph.output(torch.fx.node.map_aggregate(result, lambda each: getattr(each, "node", each)))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    add_values(gm, inputs)
    canonical(gm)
    return gm


def calls(gm: torch.fx.GraphModule) -> list[str]:
    """The graph's calls as text, without the names that tracing gives to results."""
    numbers: dict[torch.fx.Node, str] = {}
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            numbers[node] = node.name
        elif node.op != "output":
            numbers[node] = f"%{len(numbers)}"
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: numbers[each])
            lines.append(f"{node.target}{args}{kwargs}")
    return lines


def make(*shape: int) -> torch.Tensor:
    return torch.rand(shape) + 0.25


X, Y, M, V = make(2, 3, 4), make(2, 3, 4), make(3, 4), make(4)
A, B = make(2, 3, 4), make(2, 4, 5)
SPELLINGS: dict[str, tuple[tuple[Any, ...], list[Callable[..., Any]]]] = {
    "relu": ((X,), [torch.relu, F.relu, lambda x: x.relu(), lambda x: F.relu(input=x, inplace=False)]),
    "tanh": ((X,), [torch.tanh, F.tanh, lambda x: x.tanh(), lambda x: torch.tanh(input=x)]),
    "sigmoid": ((X,), [torch.sigmoid, F.sigmoid, lambda x: x.sigmoid(), lambda x: x.sigmoid()]),
    "silu": ((X,), [F.silu, lambda x: F.silu(input=x), lambda x: F.silu(x, False)]),
    "gelu": ((X,), [F.gelu, lambda x: F.gelu(x, approximate="none"), lambda x: F.gelu(input=x)]),
    "elu": ((X,), [lambda x: F.elu(x, 2.0), lambda x: F.elu(alpha=2.0, input=x)]),
    "leaky_relu": ((X,), [F.leaky_relu, lambda x: F.leaky_relu(x, 0.01), lambda x: F.leaky_relu(x, inplace=False)]),
    "hardtanh": ((X,), [F.hardtanh, lambda x: F.hardtanh(x, -1.0, 1.0), lambda x: F.hardtanh(x, max_val=1.0)]),
    "hardswish": ((X,), [F.hardswish, lambda x: F.hardswish(input=x)]),
    "softplus": ((X,), [F.softplus, lambda x: F.softplus(x, 1, 20), lambda x: F.softplus(x, beta=1)]),
    "exp": ((X,), [torch.exp, lambda x: x.exp(), lambda x: torch.exp(input=x)]),
    "log1p": ((X,), [torch.log1p, lambda x: x.log1p()]),
    "sqrt": ((X,), [torch.sqrt, lambda x: x.sqrt()]),
    "rsqrt": ((X,), [torch.rsqrt, lambda x: x.rsqrt()]),
    "abs": ((X,), [torch.abs, abs, lambda x: x.abs(), torch.absolute, lambda x: x.absolute()]),
    "neg": ((X,), [torch.neg, operator.neg, lambda x: x.neg(), torch.negative, lambda x: -x]),
    "sign": ((X,), [torch.sign, lambda x: x.sign()]),
    "erf": ((X,), [torch.erf, lambda x: x.erf()]),
    "round": ((X,), [torch.round, lambda x: x.round()]),
    "clamp": ((X,), [lambda x: x.clamp(0, 1), lambda x: torch.clip(x, 0, 1), lambda x: torch.clamp(x, max=1, min=0)]),
    "clamp from below": ((X,), [lambda x: x.clamp(min=0), lambda x: torch.clamp(x, 0), lambda x: x.clip(0, None)]),
    "nan_to_num": ((X,), [torch.nan_to_num, lambda x: x.nan_to_num(), lambda x: torch.nan_to_num(x, nan=None)]),
    "add": ((X, Y), [operator.add, torch.add, lambda x, y: x.add(y), lambda x, y: torch.add(x, other=y, alpha=1)]),
    "add a number": ((X,), [lambda x: x + 2, lambda x: 2 + x, lambda x: x.add(2), lambda x: torch.add(x, 2)]),
    "sub": ((X, Y), [operator.sub, torch.sub, torch.subtract, lambda x, y: x.subtract(y)]),
    "mul": ((X, Y), [operator.mul, torch.mul, torch.multiply, lambda x, y: x.multiply(y)]),
    "div": ((X, Y), [operator.truediv, torch.div, torch.true_divide, lambda x, y: x.divide(y)]),
    "pow": ((X,), [lambda x: x**2, lambda x: x.pow(2), lambda x: torch.pow(x, exponent=2)]),
    "gt": ((X, Y), [operator.gt, torch.gt, torch.greater, lambda x, y: x.greater(y)]),
    "ne": ((X, Y), [operator.ne, torch.ne, torch.not_equal, lambda x, y: x.ne(y)]),
    "where": ((X, Y), [lambda x, y: torch.where(x > y, x, y), lambda x, y: x.where(x > y, y)]),
    "maximum": ((X, Y), [torch.maximum, lambda x, y: x.maximum(y), lambda x, y: torch.maximum(x, other=y)]),
    "matmul": ((A, B), [operator.matmul, torch.matmul, lambda x, y: x.matmul(y), lambda x, y: x @ y]),
    "linear": ((X, make(5, 4), make(5)), [F.linear, lambda x, w, b: F.linear(x, bias=b, weight=w)]),
    "linear without bias": (
        (X, make(5, 4)),
        [F.linear, lambda x, w: F.linear(x, w, None), lambda x, w: F.linear(x, w)],
    ),
    "softmax": (
        (X,),
        [
            lambda x: x.softmax(-1),
            lambda x: F.softmax(x, dim=2),
            lambda x: torch.softmax(x, -1),
            lambda x: x.softmax(dim=2),
        ],
    ),
    "sum": (
        (X,),
        [lambda x: x.sum(-1), lambda x: torch.sum(x, dim=(2,)), lambda x: x.sum(axis=-1), lambda x: x.sum([2], False)],
    ),
    "mean": ((X,), [lambda x: x.mean((0, -1)), lambda x: torch.mean(x, dim=[0, 2]), lambda x: x.mean((0, 2), False)]),
    "sum, kept": (
        (X,),
        [lambda x: x.sum(1, True), lambda x: x.sum(axis=1, keepdims=True), lambda x: x.sum((-2,), keepdim=True)],
    ),
    "argmax": ((X,), [lambda x: x.argmax(-1), lambda x: torch.argmax(x, dim=2), lambda x: torch.argmax(x, axis=2)]),  # type: ignore[call-arg]
    "cumsum": (
        (X,),
        [lambda x: x.cumsum(-1), lambda x: torch.cumsum(x, dim=2), lambda x: torch.cumsum(input=x, dim=-1)],
    ),
    "layer_norm": (
        (X, make(4), make(4)),
        [lambda x, w, b: F.layer_norm(x, (4,), w, b), lambda x, w, b: F.layer_norm(x, [4], bias=b, weight=w, eps=1e-5)],
    ),
    "dropout": (
        (X,),
        [
            lambda x: F.dropout(x, 0.5, False),
            lambda x: F.dropout(x, training=False),
            lambda x: torch.dropout(x, 0.5, False),
        ],
    ),
    "cat": (
        (X, Y),
        [
            *(lambda x, y: torch.cat([x, y], -1), lambda x, y: torch.cat((x, y), dim=2)),
            *(lambda x, y: torch.concat([x, y], axis=2), lambda x, y: torch.concatenate((x, y), -1)),  # type: ignore[call-arg]
        ],
    ),
    "cat in front": (
        (X, Y),
        [lambda x, y: torch.cat([x, y]), lambda x, y: torch.cat((x, y), -3), lambda x, y: torch.cat([x, y], 0)],
    ),
    "stack": ((X, Y), [lambda x, y: torch.stack([x, y], -1), lambda x, y: torch.stack((x, y), dim=3)]),
    "permute": (
        (X,),
        [
            *(lambda x: x.permute(0, 2, 1), lambda x: x.permute((0, 2, 1)), lambda x: x.permute(dims=(0, -1, -2))),
            lambda x: torch.permute(x, [0, 2, 1]),
        ],
    ),
    "transpose": (
        (X,),
        [
            *(lambda x: x.transpose(1, -1), lambda x: torch.swapaxes(x, 1, 2), lambda x: x.swapdims(-2, -1)),
            *(lambda x: x.mT, lambda x: torch.transpose(x, dim0=1, dim1=2)),
        ],
    ),
    "transpose of a matrix": (
        (M,),
        [lambda x: x.t(), torch.t, lambda x: x.T, lambda x: x.mT, lambda x: x.transpose(0, 1)],
    ),
    "movedim": (
        (X,),
        [lambda x: x.movedim(0, -1), lambda x: torch.moveaxis(x, 0, 2), lambda x: torch.movedim(x, -3, 2)],
    ),
    "reshape": (
        (X,),
        [
            *(lambda x: x.reshape(2, -1), lambda x: torch.reshape(x, (2, 12)), lambda x: x.reshape([2, 12])),
            *(lambda x: x.flatten(1), lambda x: torch.flatten(x, start_dim=-2)),
        ],
    ),
    "view": ((X,), [lambda x: x.view(2, -1), lambda x: x.view((2, 12)), lambda x: x.view(size=[2, 12])]),
    "ravel": ((X,), [lambda x: x.ravel(), torch.ravel, lambda x: x.flatten(), lambda x: x.reshape(-1)]),
    "unflatten": ((X,), [lambda x: x.unflatten(-1, (2, 2)), lambda x: x.view(2, 3, 2, -1)]),
    "squeeze": ((make(2, 1, 3),), [lambda x: x.squeeze(1), lambda x: torch.squeeze(x, -2), lambda x: x.squeeze((1,))]),
    "unsqueeze": (
        (X,),
        [
            lambda x: x.unsqueeze(-1),
            lambda x: torch.unsqueeze(x, 3),
            lambda x: x[..., None],
            lambda x: x[:, :, :, None],
        ],
    ),
    "expand": ((V,), [lambda x: x.expand(3, -1), lambda x: x.expand((3, -1)), lambda x: x.expand(size=(3, -1))]),
    "repeat": ((V,), [lambda x: x.repeat(2, 1), lambda x: x.repeat((2, 1)), lambda x: x.repeat([2, 1])]),
    "select": (
        (X,),
        [lambda x: x[:, 1], lambda x: x.select(1, 1), lambda x: torch.select(x, -2, 1), lambda x: x[:, 1, :]],
    ),
    "slice": (
        (X,),
        [lambda x: x[:, 1:3], lambda x: x[:, 1:3, :], lambda x: x[:, 1:3, ...], lambda x: x[slice(None), 1:3]],
    ),
    "whole": ((X,), [lambda x: x[:], lambda x: x[...], lambda x: x[:, :]]),
    "unbind": ((X,), [lambda x: x.unbind(-1)[0], lambda x: torch.unbind(x, dim=2)[0], lambda x: x.unbind(2)[-4]]),
    "to": (
        (X,),
        [
            lambda x: x.double(),
            lambda x: x.to(torch.float64),
            lambda x: x.to(dtype=torch.float64),
            lambda x: x.type(torch.float64),
        ],
    ),
    "to a device": ((X,), [lambda x: x.to("cpu"), lambda x: x.to(torch.device("cpu")), lambda x: x.to(device="cpu")]),
    "contiguous": ((X,), [lambda x: x.contiguous(), lambda x: x.contiguous(memory_format=torch.contiguous_format)]),
    "clone": ((X,), [torch.clone, lambda x: x.clone()]),
    "detach": ((X,), [torch.detach, lambda x: x.detach()]),
    "conv2d": (
        (make(1, 2, 5, 5), make(3, 2, 3, 3)),
        [
            *(lambda x, w: F.conv2d(x, w, None, 2, 1), lambda x, w: F.conv2d(x, w, stride=(2, 2), padding=(1, 1))),
            lambda x, w: torch.conv2d(x, w, None, [2, 2], 1, dilation=1, groups=1),
        ],
    ),
    "einsum": ((M, M), [lambda x, y: torch.einsum("ab,ab->a", x, y), lambda x, y: torch.einsum("ab,ab->a", [x, y])]),
    "split": (
        (make(2, 6),),
        [
            *(lambda x: torch.split(x, 2, 1)[1], lambda x: x.split(2, dim=-1)[1], lambda x: x.split([2, 2, 2], 1)[-2]),
            *(lambda x: x.chunk(3, 1)[1], lambda x: torch.chunk(x, 3, dim=-1)[1]),
            *(lambda x: x.tensor_split(3, -1)[1], lambda x: torch.tensor_split(x, (2, 4), dim=1)[1]),
            *(lambda x: torch.hsplit(x, 3)[1], lambda x: x.hsplit([2, 4])[1]),
            lambda x: torch.split_with_sizes(x, [2, 2, 2], 1)[1],
        ],
    ),
    "split of rows": (
        (make(4, 2),),
        [lambda x: x.split(2)[0], lambda x: torch.vsplit(x, 2)[0], lambda x: x.chunk(2)[0], lambda x: x.vsplit([2])[0]],
    ),
    "split in depth": (
        (make(2, 2, 4),),
        [lambda x: torch.dsplit(x, 2)[0], lambda x: x.split(2, 2)[0], lambda x: x.dsplit([2])[0]],
    ),
    "hsplit of a vector": ((make(4),), [lambda x: torch.hsplit(x, 2)[0], lambda x: x.split(2, -1)[0]]),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_one_node(name):
    inputs, functions = SPELLINGS[name]
    assert len(functions) > 1
    graphs = [traced(function, *inputs) for function in functions]
    first = calls(graphs[0])
    assert first
    assert all(line.startswith(("aten.", "<built-in function getitem>")) for line in first)
    for function, gm in zip(functions, graphs, strict=True):
        assert calls(gm) == first
        expected = function(*inputs)
        assert_equal(gm, inputs, expected)
        as_torch(gm)
        assert_equal(gm, inputs, expected)


def assert_equal(gm: torch.fx.GraphModule, inputs: tuple[Any, ...], expected: torch.Tensor) -> None:
    gm.recompile()
    result = gm(*inputs)
    assert result.stride() == expected.stride()
    assert torch.equal(result, expected)


@pytest.mark.parametrize("name", ["cat", "permute", "sum", "split", "conv2d", "dropout", "to a device"])
def test_a_second_time_changes_nothing(name):
    inputs, functions = SPELLINGS[name]
    gm = traced(functions[-1], *inputs)
    before = calls(gm)
    assert sum(step.function(gm, PassContext(Options())) or 0 for step in CANONICAL) == 0
    assert calls(gm) == before


# --- what stays as it was written -------------------------------------------------------------------------------------


def in_place(x: Any) -> Any:
    y = x.sin()
    y.relu_()
    F.relu(y, inplace=True)
    torch.add(y, 1, out=y)
    return y


UNTOUCHED = {
    "writes": (in_place, (X,), {"relu_", "relu", "add"}),
    "a number in front": (lambda x: 2 - x, (X,), {"sub"}),
    "softmax of a guessed dimension": (lambda x: F.softmax(x), (M,), {"softmax"}),
    "two items": (lambda x: x[0, 1], (X,), {"getitem"}),
    "steps": (lambda x: x[::2], (X,), {"getitem"}),
    "an index": (lambda x, i: x[i], (X, torch.tensor([0])), {"getitem"}),
    "a list": (lambda x: x[[0, 1]], (X,), {"getitem"}),
    "dropout2d of what is no batch": (lambda x: F.dropout2d(x, 0.5, False), (M,), {"dropout2d"}),
    "an unknown operator": (lambda x: torch.logcumsumexp(x, -1), (X,), {"logcumsumexp"}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_cannot_be_read_stays(name):
    function, inputs, names = UNTOUCHED[name]
    gm = traced(function, *inputs)
    left = [
        node.target for node in gm.graph.nodes if node.op.startswith("call") and not hasattr(node.target, "_schema")
    ]
    assert {target if isinstance(target, str) else target.__name__ for target in left} == names


def test_a_dimension_of_unknown_rank_stays():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_method("softmax", (x, -1)))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    for step in CANONICAL:
        step.function(gm, PassContext(Options()))
    assert calls(gm) == ["softmax('x', -1){}"]


# --- names that NumPy gives to parameters -----------------------------------------------------------------------------


def renamed(function: Callable[..., Any], *inputs: Any) -> list[dict[str, Any]]:
    gm = torch.fx.symbolic_trace(function)
    add_values(gm, inputs)
    numpy_compat_normalization.function(gm, PassContext(Options()))
    return [dict(node.kwargs) for node in gm.graph.nodes if node.kwargs]


RENAMED = {
    "sum": (lambda x: torch.sum(x, axis=1, keepdims=True), {"dim": 1, "keepdim": True}),
    "sum method": (lambda x: x.sum(axis=1), {"dim": 1}),
    "mean": (lambda x: x.mean(axis=(0, 1), keepdims=False), {"dim": (0, 1), "keepdim": False}),
    "stack": (lambda x: torch.stack([x, x], axis=1), {"dim": 1}),  # type: ignore[call-arg]
    "cat": (lambda x: torch.cat([x, x], axis=1), {"dim": 1}),  # type: ignore[call-arg]
    "squeeze": (lambda x: torch.squeeze(x, axis=0), {"dim": 0}),
    "argmax": (lambda x: x.argmax(axis=0), {"dim": 0}),
    "order is kept": (lambda x: torch.sum(keepdims=True, axis=1, input=x), ["keepdim", "dim", "input"]),
}


@pytest.mark.parametrize("name", RENAMED)
def test_names_of_numpy_become_those_of_torch(name):
    function, expected = RENAMED[name]
    (found,) = renamed(function, M)
    assert (list(found) if isinstance(expected, list) else found) == expected


@torch.fx.wrap
def along(x: torch.Tensor, axis: int) -> torch.Tensor:
    return x.sum(axis)


def test_names_that_belong_to_the_function_stay():
    assert list(renamed(lambda y: torch.trapezoid(y, x=y), M)[0]) == ["x"]
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(along, (x,), {"axis": 1}), graph.call_method("sum", (x,), {"axis": 1, "dim": 1})))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    assert numpy_compat_normalization.function(gm, PassContext(Options())) == 0
    assert [dict(node.kwargs) for node in gm.graph.nodes if node.kwargs] == [{"axis": 1}, {"axis": 1, "dim": 1}]


# --- splits -----------------------------------------------------------------------------------------------------------


def test_chunks_are_as_many_as_there_are():
    gm = traced(lambda x: (lambda parts: (parts[0], parts[-1]))(x.chunk(4)), make(6))  # three of two, none left over
    assert calls(gm)[0] == "aten.split_with_sizes.default('x', [2, 2, 2]){}"
    assert [node.args[1] for node in gm.graph.nodes if node.target is operator.getitem] == [0, 2]
    assert calls(traced(lambda x: x.chunk(2)[1], make(5)))[0] == "aten.split_with_sizes.default('x', [3, 2]){}"


@since(2, 13)
def test_a_dimension_without_elements_has_one_empty_piece():
    assert calls(traced(lambda x: x.split(2)[0], make(0)))[0] == "aten.split_with_sizes.default('x', [0]){}"


def test_a_piece_read_twice():
    gm = traced(lambda x: (lambda p: p[-1] + p[1])(x.split(2)), make(4))
    items = [node for node in gm.graph.nodes if node.target is operator.getitem]
    assert [node.args[1] for node in items] == [1, 1]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat(x.split(2)),
        lambda x: torch.cat(x.split(2)[1:]),
        lambda x: torch.cat(torch.chunk(x, 2, dim=-1)),
    ],
)
def test_a_split_read_as_a_whole_stays(function):
    gm = traced(function, make(4))
    (split,) = (
        node for node in gm.graph.nodes if isinstance(fake_value(node), tuple) and node.target is not operator.getitem
    )
    assert split.target is not aten.split_with_sizes.default
    assert_equal(gm, (torch.arange(4.0),), function(torch.arange(4.0)))


def test_symbolic_sizes_stay_symbolic():
    found = captured(lambda x: x.chunk(2)[0] + x.reshape(-1)[:1], [make(4, 2)], symbolic=True).gm
    targets = {node.target for node in found.graph.nodes}
    assert aten.chunk.default in targets
    assert aten.split_with_sizes.default not in targets
    sizes = [node.args[1] for node in found.graph.nodes if node.target is aten.reshape.default]
    assert sizes == [[-1]]


# --- operands of products ---------------------------------------------------------------------------------------------

PRODUCTS = {
    "torch.matmul": (torch.matmul, "matmul"),
    "torch.matmul, by name": (lambda a, b: torch.matmul(input=a, other=b), "matmul"),
    "torch.matmul, other by name": (lambda a, b: torch.matmul(a, other=b), "matmul"),
    "operator.matmul": (operator.matmul, "matmul"),
    "@": (lambda a, b: a @ b, "matmul"),
    "x.matmul": (lambda a, b: a.matmul(b), "matmul"),
    "x.matmul, by name": (lambda a, b: a.matmul(other=b), "matmul"),
    "__matmul__": (lambda a, b: a.__matmul__(b), "matmul"),
    "__rmatmul__": (lambda a, b: b.__rmatmul__(a), "matmul"),
    "torch.bmm": (torch.bmm, "bmm"),
    "torch.bmm, by name": (lambda a, b: torch.bmm(input=a, mat2=b), "bmm"),
    "torch.bmm, mat2 by name": (lambda a, b: torch.bmm(a, mat2=b), "bmm"),
    "x.bmm": (lambda a, b: a.bmm(b), "bmm"),
    "x.bmm, by name": (lambda a, b: a.bmm(mat2=b), "bmm"),
    "aten.bmm": (aten.bmm.default, "bmm"),
    "aten.matmul": (aten.matmul.default, "matmul"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_of_a_product(name):
    function, kind = PRODUCTS[name]
    gm = traced(function, A, B)
    (found,) = (view for node in gm.graph.nodes if (view := matmul_view(node)) is not None)
    assert (found.left.name, found.right.name, found.kind) == (
        *(node.name for node in gm.graph.find_nodes(op="placeholder")),
        kind,
    )


@pytest.mark.parametrize("function", [torch.mm, lambda a, b: torch.mm(input=a, mat2=b), lambda a, b: a.mm(b)])
def test_operands_of_mm(function):
    gm = traced(function, M, make(4, 2))
    (found,) = (view for node in gm.graph.nodes if (view := matmul_view(node)) is not None)
    assert (found.left.name, found.right.name, found.kind) == (
        *(node.name for node in gm.graph.find_nodes(op="placeholder")),
        "mm",
    )


LAYERS = {
    "F.linear": (F.linear, 3),
    "by name": (lambda x, w, b: F.linear(bias=b, input=x, weight=w), 3),
    "bias by name": (lambda x, w, b: F.linear(x, w, bias=b), 3),
    "aten": (aten.linear.default, 3),
    "no bias": (lambda x, w, b: F.linear(x, w), 2),
    "bias None": (lambda x, w, b: F.linear(x, weight=w, bias=None), 2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_operands_of_a_layer(name):
    function, count = LAYERS[name]
    gm = traced(function, X, make(5, 4), make(5))
    (found,) = (view for node in gm.graph.nodes if (view := linear_view(node)) is not None)
    expected = [node.name for node in gm.graph.find_nodes(op="placeholder")][:count]
    assert [node.name for node in found if node is not None] == expected


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Holder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def hooked() -> nn.Module:
    layer = nn.Linear(4, 5)
    layer.register_forward_hook(lambda module, args, result: result + 1)
    return layer


class Leaves(torch.fx.Tracer):
    """Does not look into layers, be they of torch or not."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not isinstance(module, Holder)


def views_of_module(layer: nn.Module) -> tuple[torch.fx.GraphModule, list[Any]]:
    holder = Holder(layer)
    gm = torch.fx.GraphModule(holder, Leaves().trace(holder))
    add_values(gm, [X])
    for step in CANONICAL:
        step.function(gm, PassContext(Options()))
    return gm, [view for node in gm.graph.nodes if (view := linear_view(node)) is not None]


def test_a_module_is_a_layer():
    layer = nn.Linear(4, 5)
    gm, (found,) = views_of_module(layer)
    assert [node.target for node in found] == ["x", "layer.weight", "layer.bias"]
    assert gm.get_parameter("layer.weight") is layer.weight
    assert_equal(gm, (X,), layer(X))


@pytest.mark.parametrize("layer", [Doubled(4, 5), hooked(), nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))])
def test_other_modules_are_none(layer):
    gm, found = views_of_module(layer)
    assert found == []
    assert_equal(gm, (X,), layer(X))


def test_what_is_no_product():
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    wrong = graph.call_function(torch.bmm, (), {"input": a, "other": b})  # bmm has no parameter of that name
    out = graph.call_function(torch.matmul, (a, b), {"out": a})
    graph.output((wrong, out))
    a.meta["val"], b.meta["val"] = A, B
    gm = torch.fx.GraphModule(nn.Module(), graph)
    for step in CANONICAL:
        step.function(gm, PassContext(Options()))
    assert [matmul_view(node) for node in gm.graph.nodes] == [None] * 5
    assert [node.target for node in gm.graph.nodes if node.op == "call_function"] == [torch.bmm, torch.matmul]
    bilinear = traced(lambda x, y, w: F.bilinear(x, y, w), M, M, make(2, 4, 4))
    assert [linear_view(node) for node in bilinear.graph.nodes] == [None] * len(bilinear.graph.nodes)


def test_a_split_into_slices_stays_where_its_parts_may_be_written():
    def parts(x):
        return [part.sin() for part in x.tensor_split(2, 1)]

    def written(x):
        first, second = x.tensor_split(2, 1)
        first.t().mul_(2)
        return second.sin()

    def returned(x):
        return x.tensor_split(2, 1)[0].t()

    def splits(fn, x):
        nodes = captured(fn, [x]).gm.graph.nodes
        return [str(node.target) for node in nodes if "split" in str(node.target)]

    x, leaf = make(4, 4), make(4, 4).requires_grad_()
    kept, normal = ["aten.tensor_split.sections"], ["aten.split_with_sizes.default"]
    assert [splits(parts, x), splits(parts, leaf)] == [normal, normal]
    assert [splits(returned, x), splits(returned, leaf)] == [normal, kept]
    assert splits(written, x) == kept


def test_a_view_whose_sizes_are_known_of_one_whose_are_not():
    """Whether they are the same sizes is not asked: the answer would be a guard."""
    assert_same_as_eager(lambda x: x.sin().view(8, -1, 4), lambda: [torch.randn(17, 5, 0)], dynamic=True)
