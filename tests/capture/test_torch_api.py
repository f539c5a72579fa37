"""The shims over torch's private APIs: each difference between the supported versions, and what we rely on."""

from __future__ import annotations

import types

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import ferrite
from ferrite.capture import torch_api, torch_dynamo, torch_runtime
from tests.fresh_process import run_python


@pytest.mark.quick
@pytest.mark.parametrize(("text", "expected"), [("2.13.0+cpu", (2, 13)), ("2.11.0.dev2026", (2, 11)), ("3.0", (3, 0))])
def test_release(text, expected):
    assert torch_api.release(text) == expected


@pytest.mark.quick
def test_supported_versions_are_taken_without_a_word():
    for version in ("2.11.0", "2.12.1+cu130", "2.13.0+cpu"):
        assert torch_api.check_torch_version(version) is None


@pytest.mark.quick
def test_an_old_torch_is_refused_with_what_to_do():
    with pytest.raises(ferrite.UserError) as caught:
        torch_api.check_torch_version("2.10.1")
    assert str(caught.value) == (
        "torch 2.10.1 is too old for ferrite\n"
        "  supported       torch 2.11 to 2.13\n"
        "  to change that  pip install --upgrade 'torch>=2.11,<2.14'"
    )


@pytest.mark.quick
def test_a_newer_torch_is_tried_with_a_warning():
    warning = torch_api.check_torch_version("2.14.0")
    assert warning == "torch 2.14.0 is newer than ferrite has been tested with (torch 2.11 to 2.13); trying anyway"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.10.0", "UserError"),
        pytest.param("2.14.0", "FerriteWarning 2.0", marks=pytest.mark.slow),
    ],
)
def test_the_version_is_checked_when_compiling(version, expected):
    """In a process of its own: the check runs once."""
    code = f"""
import warnings, torch
import ferrite
torch.__version__ = {version!r}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        value = torch.compile(lambda x: x + 1, backend="ferrite")(torch.ones(1)).item()
        print(*[w.category.__name__ for w in caught if issubclass(w.category, ferrite.FerriteWarning)], value)
    except ferrite.UserError as error:
        print("UserError")
"""
    done = run_python("-c", code)
    assert done.stdout.strip() == expected, done.stderr


def symbolic(value: int) -> torch.SymInt:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    # a size of its own for every dimension: 0 and 1 would be taken as static
    fake = mode.from_tensor(torch.empty(value, value + 1), static_shapes=False)
    return fake.shape[0]


@pytest.mark.quick
def test_size_hint_under_the_name_this_torch_has():
    assert torch_api.size_hint(7) == 7
    assert torch_api.size_hint(symbolic(5) * 3) == 15


@pytest.mark.quick
def test_size_hint_under_the_name_of_torch_2_11(monkeypatch):
    old = types.SimpleNamespace(size_hint=lambda value, fallback: 15)
    monkeypatch.setattr(torch_api, "_symbolic_shapes", old)
    assert torch_api.size_hint(symbolic(5)) == 15


@pytest.mark.quick
def test_asking_whether_sizes_are_equal_adds_no_guard():
    size = symbolic(5)
    assert torch_api.known_equal(size, size)
    assert not torch_api.known_equal(size, 5)
    assert torch_api.known_equal(4, 4)
    assert not size.node.shape_env.guards


@pytest.mark.quick
def test_a_size_that_is_one_symbol_has_its_name():
    size = symbolic(5)
    (symbol,) = torch_api.free_symbols(size * 2 + 3)
    assert torch_api.bare_symbol(size) == symbol
    assert torch_api.bare_symbol(size * 2) is None
    assert torch_api.bare_symbol(3) is None


@pytest.mark.quick
def test_operators_are_found_again_by_name():
    for operator in (torch.ops.aten.add.Tensor, torch.ops.higher_order.cond, torch.ops.aten.relu.default):
        assert torch_api.find_operator(torch_api.operator_name(operator)) is operator
    assert torch_api.operator_name(torch.add) is None
    assert torch_api.find_operator("aten.no_such_operator.default") is None


@pytest.mark.quick
def test_direct_calls_give_the_operators_result():
    call = torch_runtime.direct_call(torch.ops.aten.add.Tensor)
    assert call is not torch.ops.aten.add.Tensor
    assert torch.equal(call(torch.ones(2), torch.ones(2), alpha=3), torch.full((2,), 4.0))
    assert torch_runtime.direct_call(torch.ops.higher_order.cond) is torch.ops.higher_order.cond


def matrices(*sizes, dtype=torch.float32):
    return torch.randn(*sizes).mul(9).to(dtype)


BOUND = {
    "mm": ((matrices(3, 4), matrices(4, 5)), {}),
    "addmm": ((matrices(5), matrices(3, 4), matrices(4, 5)), {"beta": 2, "alpha": 0.5}),
    "bmm": ((matrices(2, 3, 4), matrices(2, 4, 5)), {}),
    "baddbmm": ((matrices(3, 1), matrices(2, 3, 4), matrices(2, 4, 5)), {"beta": 0, "alpha": 3}),
    "_int_mm": ((matrices(32, 16, dtype=torch.int8), matrices(16, 8, dtype=torch.int8)), {}),
    "convolution": (
        (matrices(2, 3, 6, 6), matrices(4, 3, 3, 3), None, [1, 2], [1, 0], [1, 1], False, [0, 0], 1),
        {},
    ),
    "embedding": ((matrices(4, 3), torch.tensor([1, 3]), -1, False, False), {}),
    "native_layer_norm": ((matrices(4, 3), [3], None, matrices(3), 1e-5), {}),
    "native_group_norm": ((matrices(2, 4, 3), matrices(4), None, 2, 4, 3, 2, 1e-5), {}),
    "native_dropout": ((matrices(40), 0.5, True), {}),
    "_scaled_dot_product_flash_attention_for_cpu": (
        (matrices(1, 2, 3, 4), matrices(1, 2, 3, 4), matrices(1, 2, 3, 4), 0.0, True),
        {"attn_mask": None, "scale": 0.3},
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", BOUND)
def test_operators_that_are_bound_to_python_are_the_same(name):
    operator, (args, kwargs) = getattr(torch.ops.aten, name).default, BOUND[name]
    assert str(operator) in torch_runtime.BOUND_TO_PYTHON
    call = torch_runtime.direct_call(operator)
    assert call is not operator._op
    found = []
    for each in (call, operator):
        torch.manual_seed(0)
        found.append(each(*args, **kwargs))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.quick
def test_every_operator_that_is_bound_to_python_is_there():
    """The arguments of those for GPUs are those of their schemas too: a wrong call names the function that refused."""
    for name in torch_runtime.BOUND_TO_PYTHON:
        call = torch_runtime.direct_call(torch_api.find_operator(name))
        with pytest.raises(TypeError, match=name.split(".")[1]):
            call()


@pytest.mark.quick
@pytest.mark.parametrize(
    "error",
    [
        ferrite.UserError("what", {"why": "because"}),
        ferrite.CompilerBug("what", {}, stage="lower", cause=ValueError("x"), repro="folder"),
    ],
)
def test_our_errors_pass_dynamo_unchanged(error):
    twin = torch_dynamo.through_dynamo(error)
    assert isinstance(twin, type(error))
    assert type(twin).__name__ == type(error).__name__
    assert str(twin) == str(error)
    of_torch = {"first_useful_frame", "backend_name", "inner_exception"}
    assert {k: v for k, v in vars(twin).items() if k not in of_torch} == vars(error)


@pytest.mark.quick
def test_a_stage_that_fails_is_torchs_error_of_a_backend_too():
    cause = ValueError("x")
    twin = torch_dynamo.through_dynamo(ferrite.CompilerBug("what", {}, stage="lower", cause=cause))
    assert isinstance(twin, torch._dynamo.exc.BackendCompilerFailed)  # and Dynamo raises it as it is
    assert (twin.backend_name, twin.inner_exception) == ("ferrite", cause)


@pytest.mark.quick
def test_nothing_is_decided_about_symbols_that_is_not_known():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    shape_env = mode.shape_env
    assert shape_env is not None
    size = mode.from_tensor(torch.rand(4, 6), static_shapes=False).shape[0]
    assert isinstance(size, torch.SymInt)
    for _ in range(2):  # a refusal is not remembered as an answer
        with pytest.raises(RuntimeError, match="nobody knows"), torch_api.deciding_nothing(mode):
            bool(size > 3)
    with torch_api.deciding_nothing(mode):
        assert size > 0  # known: it is no guard
    assert not shape_env.guards
    assert size > 3
    assert len(shape_env.guards) == 1
    with torch_api.deciding_nothing(mode):
        assert size > 2  # known now


@pytest.fixture
def on_meta():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("as_in_2_11", [False, True])
def test_a_default_device_is_that_of_compiled_functions_too(on_meta, as_in_2_11):
    """Dynamo of torch 2.11 leaves it out of the graph for most functions that make tensors, until it is told."""
    seen = torch._dynamo.variables.torch.get_overridable_functions()
    if as_in_2_11:
        seen.difference_update(torch.utils._device._device_constructors() - {torch.ones, torch.zeros, torch.full})
        assert torch.arange not in seen
        torch_api.show_constructors_to_modes()
    assert seen.issuperset(torch.utils._device._device_constructors())

    def made(x):
        n = x.shape[0]
        default = torch.arange(n), torch.arange(n).flip(0) + 1, torch.eye(n), torch.linspace(0, 1, n), torch.rand(n)
        return *default, torch.tril_indices(n, n), torch.zeros(n), torch.arange(n, device="cpu")

    compiled = torch.compile(made, backend="ferrite", fullgraph=True, options={"strict": True})
    devices = [[str(each.device) for each in run(torch.randn(3, 3))] for run in (compiled, made)]
    assert devices[0] == devices[1] == [*7 * ["meta"], "cpu"]
