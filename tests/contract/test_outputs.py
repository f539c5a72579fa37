"""Everything a function may return besides one tensor."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any, NamedTuple

import pytest
import torch

from tests.compare import assert_same_as_eager, compile_strict, wide_table


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    count: int
    rest: list[Any] = dataclasses.field(default_factory=list)


def counted_in_a_default_dict(x):
    found = collections.defaultdict(list)
    found["a"].append(x + 1)
    found["a"].append(x.shape[0])
    return dict(found)


OUTPUTS = {
    "tuple": lambda x: (x + 1, x * 2),
    "list": lambda x: [x + 1, x * 2],
    "dict": lambda x: {"b": x + 1, "a": x * 2},
    "one_element_tuple": lambda x: (x + 1,),
    "ordered_dict": lambda x: collections.OrderedDict(z=x + 1, a=x * 2),
    "default_dict": counted_in_a_default_dict,
    "namedtuple": lambda x: Pair(x + 1, x.sum()),
    "nested_namedtuple": lambda x: Pair(x + 1, Pair(x * 2, None)),
    "torch_return_type": lambda x: torch.max(x, dim=1),
    "topk_return_type": lambda x: torch.topk(x, 2),
    "dataclass": lambda x: Result(x + 1, 3),
    "dataclass_with_tensors_inside": lambda x: Result(x + 1, x.shape[0], [x * 2, None]),
    "nested": lambda x: {"a": [x + 1, (x * 2, {"b": x - 1})], "c": ((), [], {})},
    "none_between": lambda x: (x + 1, None, x * 2, None),
    "ints": lambda x: (x + 1, 7, -3),
    "floats": lambda x: (x + 1, 0.5, math.inf),
    "nan": lambda x: (x + 1, math.nan),
    "bools": lambda x: (x + 1, True, x.dim() == 2),
    "strings": lambda x: (x + 1, "name"),
    "dtype_and_device": lambda x: (x + 1, x.dtype, x.device, x.layout),
    "size": lambda x: (x + 1, x.shape),
    "size_of_result": lambda x: (torch.cat([x, x]), torch.cat([x, x]).shape),
    "one_size": lambda x: (x + 1, x.shape[0]),
    "computed_sizes": lambda x: (x + 1, x.shape[0] * 2 + x.shape[1], x.numel() // 4, x.shape[0] % 3),
    "float_of_size": lambda x: (x + 1, x.shape[0] / x.shape[1], math.sqrt(x.shape[0])),
    "bool_of_size": lambda x: (x + 1, x.shape[0] > 2, x.shape[0] == x.shape[1]),
    "stride": lambda x: (x.t() + 1, x.t().stride(), x[1:].storage_offset()),
    "size_in_a_tensor": lambda x: torch.full((3,), x.shape[0]) + x.numel(),
    "constant_tensors": lambda x: (x + 1, torch.ones(2, 3), torch.tensor([1, 2]), torch.arange(4)),
    "only_constants": lambda x: (torch.zeros(x.shape[0]), torch.eye(3)),
    "scalar_tensors": lambda x: (x.sum(), x.argmax(), x.all(), x.mean()),
    "empty_tensor": lambda x: (x[:0] + 1, x.new_empty(0, 3), x + 1),
    "unused_results": lambda x: (x.exp(), x * 2)[1],
}
TERMS = {"namedtuple": 3.0, "scalar_tensors": 3.0}  # sums of numbers drawn from a normal distribution


QUICK = ("nested", "namedtuple", "dataclass_with_tensors_inside", "none_between", "computed_sizes", "empty_tensor")


@pytest.mark.parametrize(("name", "dynamic"), wide_table(OUTPUTS, QUICK))
def test_output_structure(name: str, dynamic: bool) -> None:
    assert_same_as_eager(OUTPUTS[name], lambda: [torch.randn(4, 6)], dynamic=dynamic, terms=TERMS.get(name, 0.0))


@pytest.mark.parametrize(
    "name",
    [
        "tuple",
        "namedtuple",
        "nested",
        "none_between",
        "dataclass",
        "computed_sizes",
        "stride",
        "topk_return_type",
    ],
)
def test_output_structure_in_training(name: str, rarely_dynamic: bool) -> None:
    def make_inputs():
        return [torch.randn(4, 6, requires_grad=True)]

    assert_same_as_eager(OUTPUTS[name], make_inputs, backward=True, dynamic=rarely_dynamic, terms=TERMS.get(name, 0.0))


def test_only_none_while_an_input_changes(dynamic: bool) -> None:
    def change(x: torch.Tensor) -> None:
        x.add_(1)

    assert_same_as_eager(change, lambda: [torch.randn(4)], dynamic=dynamic)


@pytest.mark.quick
def test_symbolic_size_comes_back_as_int(dynamic: bool) -> None:
    compiled = compile_strict(lambda x: (x.shape[0] * 3, x + 1), dynamic=dynamic)
    for size in (4, 9):
        count, _ = compiled(torch.zeros(size))
        assert type(count) is int
        assert count == size * 3


@pytest.mark.quick
def test_differentiable_and_integer_outputs_together(dynamic: bool) -> None:
    def mixed(x: torch.Tensor) -> Any:
        return x.argsort(-1), x.sin(), x > 0, x.detach() * 2, x.shape[0]

    assert_same_as_eager(mixed, lambda: [torch.randn(4, 6, requires_grad=True)], backward=True, dynamic=dynamic)


def test_the_arguments_themselves_as_output(dynamic: bool) -> None:
    def echo(x: torch.Tensor, count: int, name: str, nothing: None) -> Any:
        return {"x": x, "count": count, "name": name, "nothing": nothing, "y": x * count}

    assert_same_as_eager(echo, lambda: [torch.randn(3), 5, "name", None], dynamic=dynamic)


def test_hundreds_of_outputs() -> None:
    assert_same_as_eager(lambda x: [x + i for i in range(300)], lambda: [torch.randn(3)], dynamic=False)


def test_data_dependent_size_of_an_output() -> None:
    """Sizes known only while running, inside one graph."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_same_as_eager(
            lambda x: (x[x > 0] * 2, torch.nonzero(x > 0)),
            lambda: [torch.randn(4, 6)],
            fullgraph=True,
            graphs=1,
        )


def test_number_out_of_a_tensor_in_one_graph() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_same_as_eager(
            lambda x, n: (x * n.item(), n.item() + 1),
            lambda: [torch.randn(4), torch.tensor(3)],
            fullgraph=True,
            graphs=1,
        )


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1])
def test_unpooled_planes_of_which_padding_leaves_nothing(dims: int, padding: int) -> None:
    """Without a plane no index is looked at, and nothing is written; with one, elements go to their places."""
    unpool = getattr(torch.nn.functional, f"max_unpool{dims}d")

    def unpooled(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return unpool(x, places, 2, 2, padding) + 1

    ones = (1,) * (dims + 2)
    assert_same_as_eager(unpooled, lambda: [torch.randn(ones), torch.zeros(ones, dtype=torch.int64)])
