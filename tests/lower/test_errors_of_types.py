"""Types that an operator of eager has no kernel for: eager's error and no number, and kernels for all the others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.lower import errors_of_eager
from tests.compare import assert_same_as_eager, compile_strict, reset

BF16, F16, C64, BOOL = torch.bfloat16, torch.float16, torch.complex64, torch.bool
U8, I8, I16, I32, I64 = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64


def ones(*sizes, dtype=torch.float32):
    return torch.ones(sizes, dtype=dtype)


def places(*sizes):
    return torch.zeros(sizes, dtype=torch.int64)


# name: (function of a tensor, its sizes, a type that eager refuses, one that it takes)
OPERATORS = {
    "argmin": (lambda x: x.argmin(0), (3, 4), BOOL, I8),
    "argmax": (lambda x: x.argmax(), (3, 4), C64, I64),
    "amin": (lambda x: x.amin(1), (3, 4), C64, BOOL),
    "max over rows": (lambda x: x.max(1), (3, 4), C64, U8),
    "nansum": (lambda x: x.nansum(0), (3, 4), C64, BF16),
    "std": (lambda x: x.std(), (3, 4), I32, BF16),
    "var of nothing": (lambda x: x.var(0), (0, 4), I64, F16),
    "sums along": (lambda x: torch.cumsum(x, 0, dtype=x.dtype), (5,), BOOL, I16),
    "celu": (lambda x: F.celu(x), (5,), I64, BF16),
    "logsigmoid": (lambda x: F.logsigmoid(x), (5,), U8, BF16),
    "glu": (lambda x: F.glu(x), (3, 4), I8, BF16),
    "round": (lambda x: torch.round(x, decimals=0), (5,), I16, BF16),
    "a flipped bit": (lambda x: torch.bitwise_not(x), (5,), torch.float64, I32),
    "huber": (lambda x: F.huber_loss(x, x + 1), (5,), I64, BF16),
    "smooth l1": (lambda x: F.smooth_l1_loss(x, x + 1), (0, 5), U8, BF16),
    "soft margin": (lambda x: F.soft_margin_loss(x, x), (5,), I8, BF16),
    "cross entropy": (lambda x: F.cross_entropy(x, places(3)), (3, 4), I16, BF16),
    "nll": (lambda x: F.nll_loss(x, places(3)), (3, 4), I64, BF16),
    "windows": (lambda x: F.unfold(x, 2), (1, 2, 4, 4), I32, BF16),
    "mirrored": (lambda x: F.pad(x, (1, 1), mode="reflect"), (1, 2, 4), BOOL, I32),
    "a maximum put back": (lambda x: F.max_unpool1d(x, places(1, 1, 2), 2, 2, 0), (1, 1, 2), I64, torch.float32),
    "pool": (lambda x: F.avg_pool2d(x, 2), (1, 1, 4, 4), BOOL, I64),
    "pool, adaptive": (lambda x: F.adaptive_max_pool2d(x, 2), (1, 1, 4, 4), I64, BF16),
    "pool of a large image": (lambda x: F.avg_pool2d(x, 3), (1, 8, 120, 120), BOOL, BF16),
    "products": (lambda x: torch.bmm(x, x), (2, 3, 3), BOOL, I64),
    "random": (lambda x: x + torch.rand(3, dtype=x.dtype), (3,), I16, BF16),
}


def outcome(fn, given):
    try:
        fn(given.clone())
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_type_that_eager_refuses_is_its_error(name, dynamic):
    function, sizes, refused, _ = OPERATORS[name]
    given = ones(*sizes, dtype=refused)
    reset()
    eager, ours = outcome(function, given), outcome(compile_strict(function, dynamic=dynamic), given)
    assert eager is not None, "eager does not refuse it any more"
    assert type(ours) is type(eager)
    assert str(ours) == str(eager)


@pytest.mark.parametrize("name", sorted(set(OPERATORS) - {"random", "products"}))
def test_a_type_that_eager_takes_is_compiled(name):
    function, sizes, _, taken = OPERATORS[name]
    assert_same_as_eager(lambda x: function(x), lambda: [ones(*sizes, dtype=taken)])
    (graph,) = ferrite.last_compile().graphs
    assert graph.source
    assert not any("eager refuses" in str(call.refusal) for call in graph.eager_calls)


def test_the_record_has_the_reason():
    reset()
    assert outcome(compile_strict(lambda x: (x + 1).std()), ones(3, dtype=I64)) is not None
    (graph,) = ferrite.last_compile().graphs
    assert not graph.kernels
    assert "eager refuses aten.std" in str(graph.eager_calls[0].refusal)
    assert "std and var only support floating point" in str(graph.eager_calls[0].refusal)


def test_a_call_that_only_a_branch_makes():
    def fn(x, flag):
        return torch.cond(flag, lambda x: x.argmin(0), lambda x: x.sum(0), (x,))

    given = ones(3, 4, dtype=BOOL)
    compiled = compile_strict(fn)
    assert torch.equal(compiled(given, torch.tensor(False)), given.sum(0))
    with pytest.raises(RuntimeError, match="does not support bool"):
        compiled(given, torch.tensor(True))


def test_only_the_backward_is_refused():
    """As the gradient of a pool in a type that only the pool itself knows: backward raises, forward is compiled."""

    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * (grad > 0).argmin()

    reset()
    compiled = compile_strict(lambda x: Refusing.apply(x).sum())
    loss = compiled(torch.ones(3, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"argmin\(\): does not support bool"):
        loss.backward()
    assert [bool(graph.kernels) for graph in ferrite.last_compile().graphs] == [True, False]


def test_random_numbers_of_the_user_are_not_touched():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    reset()
    assert outcome(compile_strict(lambda x: x + torch.rand(3, dtype=I8)), ones(3)) is not None
    assert torch.equal(torch.get_rng_state(), before)


def test_calls_of_usual_types_are_not_asked_about(monkeypatch):
    def asked(node):
        raise AssertionError(f"asked about {node.target}")

    monkeypatch.setattr(errors_of_eager, "refusal", asked)
    reset()
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.LayerNorm(4), torch.nn.GELU(), torch.nn.Flatten())
    compile_strict(model)(torch.randn(1, 1, 6, 6)).softmax(-1).sum().backward()


def test_calls_that_are_alike_are_asked_about_once(monkeypatch):
    calls = []
    made = errors_of_eager.raised
    monkeypatch.setattr(errors_of_eager, "raised", lambda call: calls.append(call.target) or made(call))
    errors_of_eager.passes_but_for_types.cache_clear()
    for rows in (300, 400):
        reset()
        compile_strict(lambda x: (x.tril() + x.tril(1)).sum())(ones(rows, 300, dtype=BF16))
    assert calls.count(torch.ops.aten.add.Tensor) == 1
    assert calls.count(torch.ops.aten.sum.default) == 1


def call_of(target, sizes, *numbers):
    probes = errors_of_eager
    return probes.ProbedCall(
        target,
        (errors_of_eager.ProbedOperand(BF16, sizes), *(errors_of_eager.ProbedConstant(int, each) for each in numbers)),
        {},
    )


def test_calls_are_made_on_few_elements(monkeypatch):
    asked = []
    monkeypatch.setattr(
        errors_of_eager, "passes_but_for_types", lambda call: (asked.append(call.operands()), (False, None))[1]
    )
    for rank in (5, 7):
        errors_of_eager.refusal_of_types(call_of(torch.ops.aten.cumsum.default, (9,) * rank, 0), grows=False)
    assert [operand.sizes for (operand,) in asked] == [(2,) * 5, (8,) * 5, (2,) * 7]
    asked.clear()
    for offset in (10, 10_000):  # a number that says how many
        errors_of_eager.refusal_of_types(call_of(torch.ops.aten.diag_embed.default, (900,), offset), grows=True)
    assert len(asked) == 2


NUMBERS = {
    "boundaries": (lambda x, y: torch.bucketize(x, y), ones(2), torch.tensor(1)),
    "a part of a number": (lambda x, y: torch.select_scatter(x, y, 0, 0), torch.tensor(1), torch.tensor(2)),
    "channels of nothing": (
        lambda x, y: F.batch_norm(x, y, y, y, y),
        ones(0, 5, 5),
        ones(0),
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NUMBERS)
def test_tensors_without_dimensions_or_elements(name, dynamic):
    function, *given = NUMBERS[name]
    reset()
    with pytest.raises(Exception) as eager:
        function(*given)
    with pytest.raises(eager.type):
        compile_strict(function, dynamic=dynamic)(*given)


def symmetric():
    values = torch.randn(5, 5, dtype=torch.float64)
    return values + values.T


FACTORED = {
    "ldl_solve": lambda a, b: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(a), b),
    "lu_solve": lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b),
    "lu_unpack": lambda a, b: torch.lu_unpack(*torch.linalg.lu_factor(a))[1] @ b,
}


@pytest.mark.parametrize("name", FACTORED)
def test_calls_of_a_library_are_not_made_on_zeros(name):
    """Pivots are int32, which is unusual, and count from 1: one that is 0 makes LAPACK write where no memory is."""
    torch.manual_seed(0)
    assert_same_as_eager(lambda a, b: FACTORED[name](a, b) + 1, lambda: [symmetric(), torch.randn(5, 3).double()])
    (graph,) = ferrite.last_compile().graphs
    assert graph.kernels
    assert not any("eager refuses" in str(call.refusal) for call in graph.eager_calls)
