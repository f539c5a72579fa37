"""Random numbers by counting: the generator, the distributions, and what a program can tell of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite
from ferrite.ir.philox import philox
from ferrite.options import Options
from ferrite.passes.joint import replace_random
from ferrite.passes.joint.counter_rng import words
from ferrite.passes.joint.random_ops import RANDOM_RULES
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules
from tests.compare import compile_strict, reset
from tests.graphs import operators

quick = pytest.mark.quick
aten = torch.ops.aten
draw, draw_key = torch.ops.ferrite.random.default, torch.ops.ferrite.random_key.default
hits = torch.ops.ferrite.random_hits.default
COUNTER = {"rng": "counter"}


def key(first=1, second=2):
    return torch.tensor([first, second])


# --- the generator ----------------------------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize(
    ("counter", "keys", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_words_are_those_of_philox(counter, keys, expected):
    found = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, keys)))
    assert tuple(word.item() for word in found) == expected


@quick
def test_no_two_calls_or_elements_share_a_word():
    drawn = torch.cat([words(key(*pair), index, 999) for pair in ((1, 2), (2, 1)) for index in range(4)])
    collisions = drawn.numel() - drawn.unique().numel()
    assert drawn.min() >= 0
    assert drawn.max() < 2**32
    assert collisions <= 2  # 8000 of 2**32: 0.007 are expected


@quick
def test_a_longer_call_begins_like_a_shorter_one_and_shapes_do_not_matter():
    assert torch.equal(words(key(), 3, 100)[:37], words(key(), 3, 37))
    numbers = draw(key(), 0, [4, 5], "uniform", torch.float32)
    assert torch.equal(numbers.flatten(), draw(key(), 0, [20], "uniform", torch.float32))
    assert draw(key(), 0, [0, 3], "normal", torch.float32).shape == (0, 3)
    assert draw(key(), 0, [], "uniform", torch.float64).shape == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_uniform_numbers(dtype):
    numbers = draw(key(), 0, [100_000], "uniform", dtype)
    assert numbers.dtype == dtype
    assert numbers.min() >= 0
    assert numbers.max() < 1
    exact = numbers.double()
    step = {torch.float16: 2**-11, torch.bfloat16: 2**-8}.get(dtype, 0)  # numbers are multiples of it: rounded down
    assert abs(exact.mean() - 0.5 + step / 2) < 4 / math.sqrt(12 * 100_000)
    counts = torch.histc(exact.float(), 16, 0, 1)
    assert ((counts - 6250) ** 2 / 6250).sum() < 40  # chi squared with 15 degrees of freedom: 1 in 2000 is above


@quick
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.lengthy
def test_normal_numbers(dtype):
    numbers = draw(key(), 5, [100_000], "normal", dtype).double()
    assert abs(numbers.mean()) < 4 / math.sqrt(100_000)
    assert abs(numbers.var() - 1) < 4 * math.sqrt(2 / 100_000)
    assert abs((numbers**4).mean() - 3) < 4 * math.sqrt(96 / 100_000)
    inside = (numbers.abs() < 1).double().mean()
    assert abs(inside - math.erf(math.sqrt(0.5))) < 0.006


@quick
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.lengthy
def test_exponential_numbers(dtype):
    numbers = draw(key(), 4, [100_000], "exponential", dtype)
    assert numbers.dtype == dtype
    assert numbers.min() > 0, "people divide by them"
    exact = numbers.double()
    assert abs(exact.mean() - 1) < 4 / math.sqrt(100_000)
    assert abs((exact**2).mean() - 2) < 4 * math.sqrt(20 / 100_000)
    for quantile in (0.1, 0.5, 0.9):
        share = (exact < -math.log1p(-quantile)).double().mean()
        assert abs(share - quantile) < 0.006


@quick
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.lengthy
def test_hits_come_true_as_often_as_their_chance_says(dtype):
    chances = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=dtype).repeat(25_000, 1)
    shares = hits(key(), 3, chances).double().mean(0)
    assert (shares[0], shares[3]) == (0, 1)
    assert ((shares - chances[0].double()).abs() < 4 * 0.5 / math.sqrt(25_000)).all()
    for impossible in (1.5, -0.5, math.nan):
        with pytest.raises(RuntimeError, match="p_in >= 0 && p_in <= 1"):
            hits(key(), 3, torch.tensor([0.5, impossible], dtype=dtype))
        with pytest.raises(RuntimeError, match="p_in >= 0 && p_in <= 1"):
            torch.bernoulli(torch.tensor([0.5, impossible], dtype=dtype))


@quick
@pytest.mark.parametrize(("low", "high"), [(0, 7), (-3, 3), (0, 1), (-(2**62), 2**62 - 1)])
@pytest.mark.lengthy
def test_integers(low, high):
    numbers = draw(key(), 2, [70_000], "integer", torch.int64, low, high)
    assert numbers.min() >= low
    assert numbers.max() < high
    if high - low < 100:
        counts = torch.bincount(numbers - low, minlength=high - low).double()
        expected = 70_000 / (high - low)
        assert ((counts - expected) ** 2 / expected).sum() < 30
    else:
        assert abs((numbers.double() / 2**62).mean()) < 0.01


@quick
@pytest.mark.lengthy
def test_neighbours_and_calls_are_not_correlated():
    rows = torch.stack([draw(key(), index, [50_000], "normal", torch.float64) for index in range(3)])
    assert (torch.corrcoef(rows) - torch.eye(3)).abs().max() < 5 / math.sqrt(50_000)
    assert abs((rows[0, 1:] * rows[0, :-1]).mean()) < 5 / math.sqrt(50_000)


@quick
def test_the_operators_keep_the_rules_of_torch():
    tests = ("test_schema", "test_faketensor")
    kinds = (
        ("uniform", torch.float16),
        ("normal", torch.float32),
        ("exponential", torch.float64),
        ("integer", torch.int32),
    )
    torch.library.opcheck(hits, (key(), 1, torch.rand(4, 3)), test_utils=tests)
    for kind, dtype in kinds:
        torch.library.opcheck(draw, (key(), 1, [4, 3], kind, dtype), test_utils=tests)
    torch.manual_seed(3)
    first, second = draw_key(0, device=torch.device("cpu")), draw_key(0, device=torch.device("cpu"))
    torch.manual_seed(3)
    assert torch.equal(draw_key(0, device=torch.device("cpu")), first)
    assert not torch.equal(first, second)
    with pytest.raises(ValueError, match="no kind"):
        draw(key(), 0, [3], "cauchy", torch.float32)


# --- the rule ---------------------------------------------------------------------------------------------------------


def traced(function, *inputs, mode="fake"):
    gm = make_fx(function, tracing_mode=mode)(*inputs)
    count = apply_rules(gm, RANDOM_RULES, PassContext(Options(**COUNTER)))
    return gm, count


@quick
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_one_key_for_all_calls_and_a_number_for_each(mode):
    def function(x):
        return torch.rand_like(x), torch.randn(3), torch.native_dropout(x, 0.5, True)[0], torch.randint(9, (4,))

    gm, count = traced(function, torch.rand(4, 3), mode=mode)
    calls = gm.graph.find_nodes(op="call_function", target=draw)
    assert count == 4
    assert len(gm.graph.find_nodes(op="call_function", target=draw_key)) == 1
    assert sorted(node.args[1] for node in calls) == [0, 1, 2, 3]
    first, second = gm(torch.rand(5, 3) if mode == "symbolic" else torch.rand(4, 3)), gm(torch.rand(4, 3))
    assert first[0].shape == ((5, 3) if mode == "symbolic" else (4, 3))
    assert not torch.equal(first[1], second[1])


@quick
def test_the_backward_part_has_a_key_of_its_own():
    gm = make_fx(lambda x: (torch.rand(3), torch.rand(3)), tracing_mode="fake")(torch.rand(1))
    second = gm.graph.find_nodes(op="call_function", target=aten.rand.default)[1]
    second.meta["partitioner_tag"] = "is_backward"
    assert apply_rules(gm, RANDOM_RULES, PassContext(Options(**COUNTER))) == 2
    keys = gm.graph.find_nodes(op="call_function", target=draw_key)
    assert [node.meta.get("partitioner_tag") for node in keys] == [None, "must_be_in_backward"]
    assert [node.args for node in keys] == [(0,), (1,)]


@quick
def test_what_eager_must_look_at_stays():
    gm, count = traced(lambda x: (torch.poisson(x), torch.multinomial(x, 2)), torch.rand(4))
    assert count == 0
    assert operators(gm) == ["poisson.default", "multinomial.default"]


@quick
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.lengthy
def test_cauchy_numbers(dtype):
    gm, count = traced(lambda x: aten.cauchy.default(x, 3.0, 2.0), torch.empty(100_000, dtype=dtype))
    assert count == 1
    numbers = gm(torch.empty(100_000, dtype=dtype))
    assert numbers.dtype == dtype
    for quantile in (0.05, 0.25, 0.5, 0.75, 0.95):
        share = (numbers.double() < 3 + 2 * math.tan(math.pi * (quantile - 0.5))).double().mean()
        assert abs(share - quantile) < 0.006


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int16, torch.int64], ids=str)
@pytest.mark.parametrize("p", [0.05, 0.5, 0.999])
def test_geometric_numbers(dtype, p):
    gm, count = traced(lambda x: aten.geometric.default(x, p), torch.empty(100_000, dtype=dtype))
    assert count == 1
    numbers = gm(torch.empty(100_000, dtype=dtype))
    assert numbers.dtype == dtype
    exact = numbers.double()
    assert exact.min() == 1
    assert torch.equal(exact, exact.round())
    assert abs(exact.mean() - 1 / p) < 4 * math.sqrt(1 - p) / p / math.sqrt(100_000) + 1e-9
    for most in (1, 2, 5):
        assert abs((exact <= most).double().mean() - (1 - (1 - p) ** most)) < 0.006


@quick
@pytest.mark.parametrize(
    ("target", "parameters", "message"),
    [
        (aten.bernoulli.p, (1.5,), "p"),
        (aten.bernoulli.p, (-0.5,), "p"),
        (aten.exponential.default, (0.0,), "lambda > 0"),
        (aten.log_normal.default, (0.0, -1.0), "std > 0"),
        (aten.cauchy.default, (0.0, 0.0), "sigma > 0"),
        (aten.geometric.default, (1.0,), r"p to be in \(0, 1\)"),
        (aten.geometric.default, (0.0,), r"p to be in \(0, 1\)"),
    ],
)
def test_an_impossible_parameter_is_the_error_of_eager(target, parameters, message):
    gm = torch.fx.GraphModule({}, torch.fx.Graph())
    x = gm.graph.placeholder("x")
    drawn = gm.graph.call_function(target, (x, *parameters))
    gm.graph.output(drawn)
    x.meta["val"] = drawn.meta["val"] = torch.empty(3, device="meta")
    gm.recompile()
    assert apply_rules(gm, RANDOM_RULES, PassContext(Options(**COUNTER))) == 0
    with pytest.raises(RuntimeError, match=message):
        gm(torch.rand(3))


@quick
def test_eager_numbers_are_the_default():
    gm = make_fx(lambda x: x + torch.rand(3), tracing_mode="fake")(torch.rand(3))
    replace_random(gm)
    assert "rand.default" in operators(gm)


# --- compiled ---------------------------------------------------------------------------------------------------------


def compiled(function, **options):
    reset()
    return compile_strict(function, options={**COUNTER, **options})


def seeded(function, *inputs, seed=0):
    torch.manual_seed(seed)
    return function(*inputs)


def test_a_seed_decides_the_numbers():
    function = compiled(lambda x: x + torch.rand(4, 8) + torch.randn(8))
    x = torch.zeros(4, 8)
    first = seeded(function, x)
    assert torch.equal(seeded(function, x), first)
    assert not torch.equal(seeded(function, x, seed=1), first)
    assert not torch.equal(function(x), function(x))


@pytest.mark.parametrize("decompose", ["spelling", "core"])
def test_draws_in_place_have_their_distributions(decompose):
    def function(x):
        noise = torch.empty_like(x).exponential_(2.0)
        far = x.clone().cauchy_(), x.clone().geometric_(0.25)
        return noise, torch.bernoulli(x), x.clone().log_normal_(0.0, 0.5), x.clone().bernoulli_(0.25), *far

    noise, hit, logs, rare, far, tries = compiled(function, decompose=decompose)(torch.full((50_000,), 0.75))
    names = [call.operator for call in ferrite.last_compile().graphs[0].eager_calls]
    drawing = ("bernoulli", "exponential", "log_normal", "cauchy", "geometric")
    assert not [name for name in names if any(word in name for word in drawing)]
    assert abs((far.abs() < 1).float().mean() - 0.5) < 0.02
    assert abs(tries.mean() - 4) < 0.2
    assert abs(noise.mean() - 0.5) < 0.02
    assert abs(hit.mean() - 0.75) < 0.02
    assert abs(logs.log().std() - 0.5) < 0.02
    assert abs(rare.mean() - 0.25) < 0.02
    assert set(hit.unique().tolist()) == set(rare.unique().tolist()) == {0.0, 1.0}


def test_the_record_says_what_is_left_to_eager_and_why():
    function = compiled(lambda x: (torch.poisson(x), torch.multinomial(x, 2), torch.randperm(4), torch.rand(4)))
    torch.manual_seed(0)
    found = function(torch.rand(4))
    assert [each.shape for each in found] == [(4,), (2,), (4,), (4,)]
    (graph,) = ferrite.last_compile().graphs
    (step,) = [step for step in graph.passes if step.name == "replace_random"]
    assert step.rewrites == {"replace_random": 1}
    assert step.facts == {
        "aten.poisson.default left to eager: how many numbers it draws depends on its operand": 1,
        "aten.multinomial.default left to eager: eager looks at its weights first, and draws without putting back": 1,
        "aten.randperm.default left to eager: a permutation is no function of single places": 1,
    }


@pytest.mark.parametrize("partition", ["min-cut", "save-all"])
@pytest.mark.parametrize("decompose", ["spelling", "core"])
def test_dropout_has_one_mask_in_both_directions(partition, decompose):
    def function(x):
        y = torch.nn.functional.dropout(x.sin(), 0.25)
        return torch.nn.functional.dropout(y * 2, 0.5)

    x = torch.rand(40, 50) + 0.5
    x.requires_grad_()
    out = compiled(function, partition=partition, decompose=decompose)(x)
    out.sum().backward()
    kept = out != 0
    factor = 2 / 0.75 / 0.5
    torch.testing.assert_close(out, torch.where(kept, x.sin() * factor, 0.0))
    torch.testing.assert_close(x.grad, torch.where(kept, x.cos() * factor, 0.0))
    assert abs(kept.double().mean() - 0.375) < 0.05


def test_a_backward_part_that_draws_draws_again_each_time():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.rand(6)

    x = torch.ones(6, requires_grad=True)
    out = compiled(lambda x: Noisy.apply(x) + torch.rand(6))(x).sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    (second,) = torch.autograd.grad(out, x)
    assert not torch.equal(first, second)
