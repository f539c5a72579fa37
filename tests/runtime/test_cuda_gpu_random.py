"""On a GPU: dropout and its like in kernels of our own draw the numbers that eager draws, and leave the generator where
eager does; and so does what stays torch's beside it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import ferrite
from tests.triton_kernels import ON_A_GPU

pytestmark = ON_A_GPU
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    torch.manual_seed(0)


def compiled(function, **more):
    return torch.compile(function, backend="ferrite", fullgraph=True, options={"strict": True}, **more)


def draws_itself() -> bool:
    """Whether kernels of the last compilation draw."""
    return any("random_state(" in graph.source for graph in ferrite.last_compile().graphs)


def states(function, *given, runs=3):
    """What a function gives in several runs from one seed on, gradients too, and where the generator is then."""
    torch.cuda.manual_seed((1 << 63) + 77)
    found = []
    for _ in range(runs):
        each = [x.detach().requires_grad_(x.requires_grad) for x in given]
        results = function(*each)
        results = results if isinstance(results, tuple) else (results,)
        found += [x.detach() for x in results]
        losses = [(x.float() + 1).square().sum() for x in results if x.requires_grad]
        if losses:  # what is dropped would have a gradient, too
            sum(losses).backward()
            found += [x.grad for x in each if x.grad is not None]
    return [*found, torch.cuda.get_rng_state()]


def assert_same_draws(function, *given, exact=True, draws=True, **more):
    """Whatever is zero in one is zero in the other, so that the masks are the same bits."""
    ours, eager = states(compiled(function, **more), *given), states(function, *given)
    assert draws_itself() is draws
    for one, other in zip(ours, eager, strict=True):
        assert torch.equal(one == 0, other == 0)
        torch.testing.assert_close(one, other, **({"rtol": 0, "atol": 0} if exact else {"rtol": 0.05, "atol": 0.05}))


def random(*sizes, dtype=torch.float32, grad=False):
    return torch.randn(*sizes, device=DEVICE, dtype=dtype).requires_grad_(grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(4, 8), (3, 1001, 4), (1 << 20, 5), (2048, 1024), (5000, 1004)], ids=str)
def test_dropout(dtype, sizes):
    """Of one turn and of many; in vectors of four and of eight."""
    assert_same_draws(lambda x: F.dropout(x * 2, 0.3), random(*sizes, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training(dtype):
    """The backward part has the mask of the forward part: a result and its gradient are zero where the mask is. Of a
    sum that could not be said: in eager its terms are rounded before they are added, and may cancel out."""

    def function(x, y):
        return F.dropout(F.gelu(x), 0.1), F.dropout(y * 3, 0.5)

    assert_same_draws(function, *(random(64, 256, dtype=dtype, grad=True) for _ in range(2)), exact=False)


def test_draws_of_ours_and_of_torch_keep_their_order():
    def function(x):
        y = F.dropout(x + 1, 0.3) * torch.rand_like(x)
        y = F.dropout(F.dropout(y, 0.5).relu(), 0.25) + torch.randn(x.shape, device=x.device)
        return F.dropout(y, 0.75), torch.randint(9, (5,), device=x.device), F.dropout(x.double() + 1, 0.5)

    assert_same_draws(function, random(70, 32), exact=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(3, 5), (32, 1, 1, 1), (1 << 18,)], ids=str)
def test_distributions(dtype, sizes):
    """Of at most as many elements as the GPU holds threads."""

    def function(x):
        noise, mask = torch.rand_like(x), torch.empty_like(x).bernoulli_(0.3)
        between, hits = torch.empty_like(x).uniform_(-2, 2), torch.empty_like(x, dtype=torch.bool).bernoulli_(0.8)
        return noise + 0, mask * 2, between + 0, hits | (x > 9), torch.rand(sizes, device=x.device) * 1

    assert_same_draws(function, random(*sizes, dtype=dtype))


def test_distributions_of_sizes_that_vary():
    """Whether a thread draws one number or several is a matter of the size alone."""

    def function(x):
        return torch.rand_like(x) + 0, torch.empty_like(x).bernoulli_(0.3) * 2

    f = compiled(function, dynamic=True)
    for rows in (3, 100, 5000):
        x = random(rows, 333)
        assert all(map(torch.equal, states(f, x), states(function, x)))
        assert draws_itself()


def test_distributions_of_many_elements_are_torchs():
    assert_same_draws(lambda x: torch.rand_like(x) + x, random(1 << 20), draws=False)


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_vary(dynamic):
    """Kernels draw, also where all sizes vary: how many elements a thread of torch's kernel reads at once is found out
    in each call."""

    def function(x):
        return F.dropout(x * 2, 0.3)

    f = compiled(function, dynamic=dynamic)
    for rows in (2, 33, 700, 5000):
        x = random(rows, 1024)
        with torch.compiler.set_stance("default" if rows < 700 else "fail_on_recompile"):
            assert all(map(torch.equal, states(f, x), states(function, x)))
    assert draws_itself()


@pytest.mark.parametrize("sizes", [(7, 9), (30,), (1, 2)], ids=str)
def test_sizes_that_are_no_multiples_of_four(sizes):
    assert_same_draws(lambda x: F.dropout(x * 2, 0.3), random(*sizes), draws=False)


def test_inputs_that_lie_otherwise():
    def function(x):
        return F.dropout(x, 0.3)

    f, memory = compiled(function), random(1 << 12)
    for start in (0, 1, 2, 0, 4, 3):
        x = memory.narrow(0, start, 1 << 11)
        assert all(map(torch.equal, states(f, x), states(function, x)))
    for x in (random(64, 48).t(), random(64, 48)[:, :40], random(3, 5, 7).permute(2, 0, 1)):
        assert all(map(torch.equal, states(f, x), states(function, x)))


def test_checkpoints():
    def function(x, w):
        return checkpoint(lambda y: F.dropout((y @ w).relu(), 0.4) * 2, x, use_reentrant=False) + F.dropout(x, 0.5)

    given = random(32, 64, grad=True), random(64, 64)
    ours, eager = states(compiled(function), *given), states(function, *given)
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one, other)


def test_while_the_user_records_a_graph():
    """Each replay draws new numbers, as a recording of eager does."""

    def function(x):
        return F.dropout(x * 2, 0.3)

    f, x = compiled(function), random(64, 256)
    f(x)
    found = []
    for run in (f, function):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.manual_seed(5)
        with torch.cuda.graph(graph):
            result = run(x)
        replays = []
        for _ in range(3):
            graph.replay()
            replays.append(result.clone())
        assert not torch.equal(replays[0], replays[1])
        found.append([*replays, run(x), torch.cuda.get_rng_state()])
    assert all(map(torch.equal, *found))


def test_a_large_model_asks_once_and_shares_kernels():
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True, device=DEVICE)
    model = torch.nn.Sequential(*(layer for _ in range(3))).train()
    assert_same_draws(lambda x: model(x), random(4, 16, 64), exact=False)
