"""Operators registered by users: pure, mutating, differentiable, with no, several or unusual results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.decorators

from tests.compare import assert_same_as_eager
from tests.custom_operators import increment, swap


@torch.library.custom_op("contract::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    assert type(x) is torch.Tensor
    return x * factor


@scale.register_fake
def _(x, factor):
    return torch.empty_like(x)


scale.register_autograd(
    lambda ctx, gradient: (scale(gradient, ctx.factor * 10), None),  # not the true one: must be the one used
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


@torch.library.custom_op("contract::parts", mutates_args=())
def parts(xs: list[torch.Tensor], weight: torch.Tensor | None, count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    total = torch.stack(xs).sum(0)
    if weight is not None:
        total = total * weight
    return total, [x.t().contiguous() for x in xs[:count]]


@parts.register_fake
def _(xs, weight, count):
    return torch.empty_like(xs[0]), [x.new_empty(x.shape[::-1]) for x in xs[:count]]


@torch.library.custom_op("contract::maximum_index", mutates_args=())
def maximum_index(x: torch.Tensor) -> int:
    return int(x.argmax())


@maximum_index.register_fake
def _(x):
    return torch.library.get_ctx().new_dynamic_size()


LIBRARY = torch.library.Library("contract_views", "DEF")
LIBRARY.define("first_row(Tensor(a) x) -> Tensor(a)")
LIBRARY.impl("first_row", lambda x: x[0], "CompositeImplicitAutograd")
LIBRARY.define("clamp_low_(Tensor(a!) x, float low) -> Tensor(a!)")
LIBRARY.impl("clamp_low_", lambda x, low: x.clamp_(min=low), "CompositeImplicitAutograd")


@torch.library.custom_op("contract::column_major", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def column_major(x: torch.Tensor) -> torch.Tensor:
    """Its answer depends on the strides it is given, so these must be eager's."""
    return torch.tensor(x.stride(), dtype=torch.int64).repeat(2)


@column_major.register_fake
def _(x):
    return torch.empty(2 * x.dim(), dtype=torch.int64)


PURE = {
    "one": lambda x: scale(x + 1, 3.0) * 2,
    "on_a_view": lambda x: scale(x.t(), 3.0) + 1,
    "twice": lambda x: scale(scale(x, 2.0), 0.5),
    "list_argument_and_results": lambda x: parts([x, x * 2, x + 1], None, 2),
    "optional_argument": lambda x: parts([x, x * 2], x.exp(), 1),
    "result_unused": lambda x: (scale(x, 2.0), x + 1)[1],
    "strides_seen": lambda x: (column_major(x.t() + 1), column_major((x * 2).contiguous()), column_major(x[:, ::2])),
    "registered_view": lambda x: (torch.ops.contract_views.first_row(x), x + 1),
}


@pytest.mark.parametrize("name", PURE)
def test_pure_operator(name: str, dynamic: bool) -> None:
    assert_same_as_eager(PURE[name], lambda: [torch.randn(3, 4)], fullgraph=True, graphs=1, dynamic=dynamic)


@pytest.mark.parametrize("name", ["one", "on_a_view", "twice"])
def test_registered_derivative(name: str, dynamic: bool) -> None:
    assert_same_as_eager(
        PURE[name], lambda: [torch.randn(3, 4, requires_grad=True)], backward=True, graphs=1, dynamic=dynamic
    )


def increment_a_slice(x):
    increment(x[1:], 2.0)
    return x * 2


def increment_an_intermediate(x):
    y = x.sin()
    increment(y, 1.0)
    increment(y[0], 5.0)
    return y


def increment_between_reads(x):
    before = x * 2
    increment(x, 1.0)
    return before, x * 2


def swap_intermediates(x):
    a, b = x + 1, x - 1
    return swap(a, b), a, b


def swap_input_and_intermediate(x):
    y = x.exp()
    return swap(x, y), y * 2


def swap_two_views(x):
    return swap(x[0], x[1]), x + 1


def low_clamp(x):
    y = torch.ops.contract_views.clamp_low_(x, 0.5)
    return y + 1


MUTATING = {
    "nothing_returned": lambda x: increment(x, 2.0),
    "slice": increment_a_slice,
    "intermediate": increment_an_intermediate,
    "between_reads": increment_between_reads,
    "two_intermediates": swap_intermediates,
    "input_and_intermediate": swap_input_and_intermediate,
    "two_views": swap_two_views,
    "returns_its_argument": low_clamp,
}


@pytest.mark.parametrize("name", MUTATING)
def test_mutating_operator(name: str, dynamic: bool) -> None:
    assert_same_as_eager(MUTATING[name], lambda: [torch.randn(3, 4)], fullgraph=True, graphs=1, dynamic=dynamic)


@pytest.mark.quick
def test_mutating_operator_on_aliased_inputs() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        increment(x, 1.0)
        return y * 2

    assert_same_as_eager(fn, lambda: [torch.randn(4)], prepare=lambda x: [x[:3], x[1:]], dynamic=False)


def test_operator_that_returns_a_number() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_same_as_eager(
            lambda x: (maximum_index(x), x * 2),
            lambda: [torch.randn(5)],
            fullgraph=True,
            graphs=1,
        )


def test_operator_that_raises_keeps_its_error() -> None:
    @torch.library.custom_op("contract::refuse", mutates_args=())
    def refuse(x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            raise KeyError("negative sum")
        return x.clone()

    refuse.register_fake(torch.empty_like)
    compiled: Any = assert_same_as_eager(lambda x: refuse(x * 2) + 1, lambda: [torch.rand(3)], dynamic=False)
    with pytest.raises(KeyError, match="negative sum"):
        compiled(-torch.ones(3))
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))


@pytest.mark.parametrize("name", ["self", "target", "graph"])
def test_mutating_operator_with_any_name_for_its_argument(name: str) -> None:
    with torch.library._scoped_library("named_arguments", "FRAGMENT") as library:
        library.define(f"scale_{name}(Tensor(a!) {name}) -> ()")
        library.impl(f"scale_{name}", lambda x: (x.mul_(3), None)[1], "CPU")
        library.impl(f"scale_{name}", lambda x: None, "Meta")

        def function(x):
            y = x + 1
            getattr(torch.ops.named_arguments, f"scale_{name}")(y)
            return y * 2

        assert_same_as_eager(function, lambda: [torch.randn(4)])


@torch.library.custom_op("contract::places", mutates_args={"counts"})
def places(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    counts.add_(1)
    return x.nonzero()


@places.register_fake
def _(x, counts):
    return x.new_empty((torch.library.get_ctx().new_dynamic_size(), x.dim()), dtype=torch.int64)


def places_of_an_input(x, counts):
    return places(x, counts), counts * 2


def places_and_what_is_made_of_them(x, counts):
    own = counts.clone()
    found = places(x, own)
    return found, found * 2, own, found.shape[0] + 1


def places_twice(x, counts):
    first, second = places(x, counts), places(x + 1, counts)
    return first, second, torch.cat([first, second])


@pytest.mark.parametrize("fn", [places_of_an_input, places_and_what_is_made_of_them, places_twice])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
def test_mutating_operator_whose_result_has_a_size_that_data_decides(fn) -> None:
    assert_same_as_eager(fn, lambda: [torch.tensor([1.0, 0.0, -1.0]), torch.zeros(3)], fullgraph=True)


# --- functions that the compiler does not look into -------------------------------------------------------------------

CALLED: list[str] = []
leaf_function: Any = torch._dynamo.decorators.leaf_function


@leaf_function
def looks(x):
    CALLED.append("looks")


@looks.register_fake
def _(x):
    pass


def multiplying(factor: int) -> Any:
    @leaf_function
    def multiply(x, y):
        CALLED.append(f"times {factor}")
        return x.sin() * factor, y + factor

    @multiply.register_fake
    def _(x, y):
        return x.sin(), y + 1

    return multiply


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_leaf_functions_are_called_as_in_eager(training: bool) -> None:
    """They are objects beside the graph, of which no text tells one from another: each graph has its own."""
    for factor in (2, 3):
        multiply = multiplying(factor)

        def fn(x: torch.Tensor) -> torch.Tensor:
            looks(x)
            first, second = multiply(x * 2, x)  # noqa: B023
            return first + second

        CALLED.clear()
        assert_same_as_eager(fn, lambda: [torch.rand(3, requires_grad=training)], backward=training, graphs=1)
        assert CALLED.count("looks") == CALLED.count(f"times {factor}")
        assert len(set(CALLED)) == 2
