"""torch.func: transforms inside a compiled function, and a compiled function under transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._higher_order_ops import scan
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tests.compare import assert_same_as_eager, assert_same_tree, compile_strict, compiled_graphs


def loss(x, w):
    return (x @ w).sin().sum()


INSIDE = {
    "grad": lambda x, w: grad(loss)(x, w) * 2,
    "grad_of_two": lambda x, w: grad(loss, argnums=(0, 1))(x, w),
    "grad_and_value": lambda x, w: grad_and_value(loss)(x, w),
    "second_grad": lambda x, w: grad(lambda x: grad(loss)(x, w).sum())(x),
    "vmap": lambda x, w: vmap(lambda row: (row @ w).exp())(x),
    "vmap_in_and_out_dims": lambda x, w: vmap(torch.dot, in_dims=(0, 1), out_dims=0)(x, w),
    "nested_vmap": lambda x, w: vmap(lambda r: vmap(lambda c: torch.dot(r, c), in_dims=1)(w))(x),
    "vmap_of_grad": lambda x, w: vmap(grad(loss), in_dims=(0, None))(x, w),
    "jvp": lambda x, w: jvp(lambda x: (x @ w).tanh(), (x,), (torch.ones_like(x),)),
    "vjp": lambda x, w: vjp(lambda x: (x @ w).tanh(), x)[1](torch.ones_like(x)),
    "jacrev": lambda x, w: jacrev(lambda x: (x @ w).sin())(x),
    "jacfwd": lambda x, w: jacfwd(lambda x: (x @ w).sin())(x),
    "hessian": lambda x, w: hessian(lambda x: loss(x, w))(x),
}


@pytest.mark.parametrize("name", INSIDE)
def test_transform_inside(name: str, rarely_dynamic: bool) -> None:
    assert_same_as_eager(INSIDE[name], lambda: [torch.randn(3, 3), torch.randn(3, 3)], dynamic=rarely_dynamic)


@pytest.mark.parametrize("name", ["grad", "vmap", "vmap_of_grad", "vjp"])
def test_transform_inside_in_training(name: str) -> None:
    assert_same_as_eager(
        INSIDE[name],
        lambda: [torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)],
        backward=True,
        dynamic=False,
    )


def test_random_numbers_under_vmap_inside() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return vmap(lambda row: row + torch.rand(4), randomness="different")(x)

    assert_same_as_eager(noisy, lambda: [torch.randn(3, 4)], exact=False, dynamic=False)


def plain(x):
    return (x.sin() * x).sum()


def rows(x):
    return x.sin() * x.sum()


OUTSIDE = {
    "grad": lambda call, x: grad(call)(x),
    "grad_and_value": lambda call, x: grad_and_value(call)(x),
    "vmap": lambda call, x: vmap(call)(x),
    "vmap_of_grad": lambda call, x: vmap(grad(call))(x),
    "jvp": lambda call, x: jvp(call, (x,), (torch.ones_like(x),)),
    "vjp": lambda call, x: vjp(call, x)[1](torch.ones((), dtype=x.dtype)),
    "jacrev": lambda call, x: jacrev(call)(x),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_transform_of_a_compiled_function(name: str) -> None:
    """Dynamo may step aside under a transform; the result must be true, and plain calls stay compiled."""
    transform = OUTSIDE[name]
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    compiled = compile_strict(plain)
    for _ in range(2):
        assert_same_tree(compiled(x), plain(x), plain(x.double()), "plain call")
        assert_same_tree(transform(compiled, x), transform(plain, x), transform(plain, x.double()), name)
    assert compiled_graphs() >= 1


def test_vmap_of_a_compiled_function_that_was_compiled_before() -> None:
    compiled = compile_strict(rows)
    x = torch.randn(3, 4)
    assert_same_tree(compiled(x), rows(x), rows(x.double()), "plain call")
    assert_same_tree(vmap(compiled)(x), vmap(rows)(x), vmap(rows)(x.double()), "under vmap")
    assert_same_tree(compiled(x), rows(x), rows(x.double()), "plain call again")


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())


def test_functional_call_inside(dynamic: bool) -> None:
    model = module()

    def call(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, params, (x,)) * 2

    assert_same_as_eager(
        call,
        lambda: [{"0.weight": torch.randn(3, 4), "0.bias": torch.randn(3)}, torch.randn(2, 4)],
        dynamic=dynamic,
    )


def test_functional_call_of_a_compiled_module() -> None:
    model = module()
    compiled = compile_strict(model)
    params = {name: p.detach() * 2 for name, p in model.named_parameters()}
    wrapped = {f"_orig_mod.{name}": p for name, p in params.items()}
    x = torch.randn(2, 4)
    expected = functional_call(model, params, (x,))
    ours = functional_call(compiled, wrapped, (x,))
    exact = functional_call(module().double(), {n: p.double() for n, p in params.items()}, (x.double(),))
    assert_same_tree(ours, expected, exact, "output")


def test_per_sample_gradients() -> None:
    model = module()

    def sample_loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, params, (x[None],)).square().sum()

    assert_same_as_eager(
        lambda params, x: vmap(grad(sample_loss), in_dims=(None, 0))(params, x),
        lambda: [{"0.weight": torch.randn(3, 4), "0.bias": torch.randn(3)}, torch.randn(5, 4)],
        dynamic=False,
    )


def test_a_transform_in_the_body_of_a_loop() -> None:
    """Its values have no storage, inside of a graph in a graph, too."""

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        def step(carry: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = grad(lambda w: torch.addmm(b, rows, w.t()).abs().sum())(w)
            return carry + found, found * 2

        return scan(step, torch.zeros_like(w), x)

    assert_same_as_eager(fn, lambda: [torch.rand(4, 2, 3), torch.rand(5, 3), torch.rand(5)], graphs=1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_written_input_whose_part_is_taken_under_vmap(dynamic: bool) -> None:
    """What is inside of the transform has no storage that could be asked for."""

    def fn(x):
        x.mul_(2)
        parts = torch.vmap(lambda row: row[1:])(x)
        return parts, torch.vmap(lambda row: row * 2)(x), x[x.shape[0] // 2 :]

    assert_same_as_eager(fn, lambda: [torch.randn(4, 5)], prepare=lambda x: [x[:, 1:]], dynamic=dynamic)
