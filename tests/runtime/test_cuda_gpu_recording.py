"""On a GPU: `mode="reduce-overhead"`. Recordings of CUDA are held against eager: values, memory that is written, random
numbers, training, what is kept from call to call, and what cannot be recorded."""

from __future__ import annotations

import gc
import re
import threading

import pytest
import torch
import torch.nn.functional as F

import ferrite
from tests.triton_kernels import ON_A_GPU

pytestmark = ON_A_GPU
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    torch.manual_seed(0)


def compiled(function, gradients="copied", **more):
    options = {"strict": True, "cuda_graphs": True, "recorded_gradients": gradients}
    return torch.compile(function, backend="ferrite", options=options, **more)


def random(*sizes):
    return torch.randn(*sizes, device=DEVICE)


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def layers(x, w):
    for _ in range(4):
        x = F.gelu(x @ w).softmax(-1) + x
    return x, x.sum(0)


def replayed():
    return [recorder.replayed for recorder in ferrite.last_compile().recordings]


def test_replays_compute_what_eager_does():
    f, w, kept = compiled(layers, fullgraph=True), random(64, 64) / 8, []
    for _ in range(6):
        x = random(32, 64)
        kept.append((f(x, w), layers(x, w)))
    for found, wanted in kept:
        assert_close(found, wanted)
    assert replayed() == [5], ferrite.last_compile().not_recorded
    assert not ferrite.last_compile().not_recorded


def test_the_mode():
    f, w = torch.compile(layers, backend="ferrite", mode="reduce-overhead"), random(64, 64) / 8
    for _ in range(4):
        x = random(32, 64)
        assert_close(f(x, w), layers(x, w))
    assert replayed() == [3]


class Net(torch.nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 32)
        self.dropout = dropout

    def forward(self, x):
        x = F.dropout(F.gelu(self.norm(self.first(x))), self.dropout, self.training)
        return self.last(x)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_training_with_an_optimizer(dropout):
    runs = []
    for is_compiled in (True, False):
        torch.manual_seed(5)
        model = Net(dropout).to(DEVICE)
        run = compiled(model) if is_compiled else model
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []
        torch.cuda.manual_seed(9)
        for _ in range(8):
            optimizer.zero_grad(set_to_none=True)
            loss = run(random(48, 32)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        state = [*losses, *(each.detach().clone() for each in model.state_dict().values()), torch.cuda.get_rng_state()]
        runs.append(state)
        if is_compiled:
            assert replayed() == [7, 7], ferrite.last_compile().not_recorded
    assert_close(*runs)


def test_lent_gradients_are_not_kept_twice():
    """Peak memory of a step, with what recordings keep: the model's gradients once, and what forward saves."""

    def made(size):
        several = [each for _ in range(4) for each in (torch.nn.Linear(size, size), torch.nn.GELU())]
        return torch.nn.Sequential(*several).to(DEVICE), random(64, size)

    small, x = made(32)
    run = compiled(small)
    for _ in range(3):  # libraries have a workspace of 32 MiB for recordings of forward, and for those of backward
        run(x).sum().backward()
    model, x = made(2048)
    size, peaks = sum(each.numel() * 4 for each in model.parameters()), []
    for run in (model, compiled(model, gradients="lent")):
        for _ in range(4):
            run(x).square().sum().backward()
            model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run(x).square().sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        model.zero_grad(set_to_none=True)
    assert peaks[1] < peaks[0] + size // 2


def test_gradients_pile_up():
    model = Net().to(DEVICE).eval()
    f, x = compiled(model), random(48, 32)
    for _ in range(5):
        f(x).square().mean().backward()
    found = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    assert_close(found, [5 * each.grad for each in model.parameters()])


def gradients_of(model, run, x):
    """Of one step, and they stay where autograd puts them."""
    run(x).square().mean().backward()
    return [each.grad for each in model.parameters()]


WAYS = pytest.mark.parametrize("gradients", ["copied", "lent"])


@WAYS
def test_gradients_that_are_kept(gradients):
    """Each step's, to the end; what they are read for on other streams is theirs, too."""
    model = Net().to(DEVICE).eval()
    f, kept = compiled(model, gradients=gradients), []
    for _ in range(6):
        x, rows = random(48, 32), []
        for run in (f, model):
            model.zero_grad(set_to_none=True)
            rows.append(gradients_of(model, run, x))
        kept.append(rows)
    torch.cuda.synchronize()
    for found, wanted in kept:
        assert_close(found, wanted)
    assert replayed() == [5, 5], ferrite.last_compile().not_recorded


@WAYS
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_pile_up_between_steps_of_an_optimizer(gradients, to_none):
    runs = []
    for is_compiled in (True, False):
        torch.manual_seed(5)
        model = Net().to(DEVICE).eval()
        run = compiled(model, gradients=gradients) if is_compiled else model
        optimizer, seen = torch.optim.AdamW(model.parameters(), 0.01), []
        for place in range(9):
            grads = gradients_of(model, run, random(48, 32))
            if place % 3 == 2:
                seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            del grads
        runs.append([*seen, *(each.detach().clone() for each in model.parameters())])
        if is_compiled:
            assert replayed() == [8, 8], ferrite.last_compile().not_recorded
    assert_close(*runs)


@WAYS
def test_two_models_in_turns_with_one_parameter_shared(gradients):
    model, other = Net().to(DEVICE).eval(), Net().to(DEVICE).eval()
    other.last = model.last
    runs = [compiled(each, gradients=gradients) for each in (model, other)]
    parameters = list(dict.fromkeys([*model.parameters(), *other.parameters()]))
    for _ in range(6):
        x, rows = random(48, 32), []
        for first, second in (runs, (model, other)):
            y = first(x)
            z = second(x)  # before the backward of the first
            rows.append(torch.autograd.grad(y.square().mean() + z.sin().mean(), parameters))
            (first(x).square().mean() + second(y.detach()).sin().mean()).backward()
            rows[-1] += tuple(each.grad for each in parameters)
            for each in parameters:
                each.grad = None
        assert_close(*rows)


@WAYS
def test_no_recording_writes_where_another_keeps_results(gradients):
    """What one frees while it is made is no place for what a later one keeps: it is written at every replay."""
    f, w, model = compiled(layers), random(64, 64) / 8, Net().to(DEVICE).eval()
    for _ in range(3):
        f(random(48, 64), w)
    run = compiled(model, gradients=gradients)
    for _ in range(5):
        x = random(48, 32)
        result = run(x)
        f(random(48, 64), w)
        result.square().mean().backward()
        found = [each.grad for each in model.parameters()]
        f(random(48, 64), w)
        model.zero_grad(set_to_none=True)
        assert_close(found, gradients_of(model, model, x))
        model.zero_grad(set_to_none=True)
        del found


@WAYS
def test_a_graph_that_is_kept_for_a_second_backward(gradients):
    model = Net().to(DEVICE).eval()
    f = compiled(model, gradients=gradients)
    for _ in range(5):
        x, rows = random(48, 32), []
        for run in (f, model):
            loss = run(x).square().mean()
            first = torch.autograd.grad(loss, model.parameters(), retain_graph=True)
            between = run(random(48, 32)).sum()  # forward again, while the first is still needed
            loss.backward()
            rows.append([*first, *(each.grad for each in model.parameters())])
            model.zero_grad(set_to_none=True)
            del between
        assert_close(*rows)


@WAYS
def test_hooks_see_gradients_and_what_is_saved(gradients):
    """Hooks keep, change and replace gradients; others hold what forward saved beyond the step."""

    def triple(parameter):
        parameter.grad.mul_(3)

    model = Net().to(DEVICE).eval()
    f, wrong, held = compiled(model, gradients=gradients), [], []
    seen: list[torch.Tensor] = []
    model.first.weight.register_hook(lambda grad: seen.append(grad))
    model.last.weight.register_hook(lambda grad: grad * 2)
    model.last.bias.register_post_accumulate_grad_hook(triple)

    def keep(saved):
        new.append(saved)
        return saved

    for _ in range(5):
        x, rows, new = random(48, 32), [], []
        for run in (f, model):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
                result = run(x)
            result.square().mean().backward()
            rows.append([each.grad for each in model.parameters()])
            model.zero_grad(set_to_none=True)
        assert_close(*rows)
        wrong += [saved for saved, copy in held if not torch.equal(saved, copy)]
        held = [(saved, saved.clone()) for saved in new]  # backward is done, which may write what is donated to it
    assert not wrong
    assert_close(seen[0::2], seen[1::2])


@WAYS
def test_a_gradient_that_another_stream_reads(gradients):
    """`record_stream` keeps its memory from being written before that stream is done."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to(DEVICE)
    f, x, side = compiled(model, gradients=gradients), random(64, 1024), torch.cuda.Stream()
    for _ in range(3):
        gradients_of(model, f, x)
        model.zero_grad(set_to_none=True)
    wanted = [each.clone() for each in gradients_of(model, f, x)]
    side.wait_stream(torch.cuda.current_stream())
    found = []
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        for each in model.parameters():
            found.append(each.grad.clone())
            each.grad.record_stream(side)
    model.zero_grad(set_to_none=True)
    for _ in range(3):
        gradients_of(model, f, random(64, 1024))
        model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    assert_close(found, wanted)


def test_forwards_before_their_backwards():
    model = Net().to(DEVICE).eval()
    f = compiled(model)
    for count in (1, 1, 2, 5, 2):
        given = [random(48, 32).requires_grad_() for _ in range(count)]
        for loss in [f(x).square().mean() for x in given]:
            loss.backward()
        for x in given:
            y = x.detach().clone().requires_grad_()
            model(y).square().mean().backward()
            assert_close(x.grad, y.grad)


def test_state_that_is_written():
    def step(x, cache, place):
        cache.index_copy_(0, place, (x @ x.t()).relu())
        return F.softmax(cache @ x, -1).sum(0) + 1

    f, found = compiled(step), random(16, 16)
    wanted = found.clone()
    for place in range(6):
        x, at = random(16, 16), torch.arange(16, device=DEVICE).roll(place)
        assert_close(f(x, found, at), step(x, wanted, at))
        assert_close(found, wanted)


def test_random_numbers_are_those_of_plain_runs():
    def function(x):
        for _ in range(3):
            x = F.dropout((x @ x).relu(), 0.5) + torch.rand_like(x)
        return x / x.max()

    f, runs = compiled(function), []
    for run in (f, function):
        torch.cuda.manual_seed(3)
        runs.append([*(run(torch.ones(16, 16, device=DEVICE)) for _ in range(5)), torch.cuda.get_rng_state()])
    assert_close(*runs)
    assert replayed() == [4]


def test_sizes():
    f, w = compiled(layers, dynamic=True), random(64, 64) / 8
    for _ in range(3):
        for rows in (8, 32, 50):
            x = random(rows, 64)
            assert_close(f(x, w), layers(x, w))
    assert sum(replayed()) == 6


def test_what_the_host_waits_for():
    def function(x):
        y = F.gelu(x @ x).softmax(-1) @ x
        n = int((y > 0).sum().item())
        z = F.gelu(y[: n % 2 + 1].sum(0) @ x).softmax(-1)
        return (z @ x).relu() @ x, y.cpu()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        f = compiled(function)
        for _ in range(4):
            x = random(32, 32)
            assert_close(f(x), function(x))
    assert any("the host reads a number" in reason for reason in ferrite.last_compile().not_recorded)


def test_numbers_on_the_cpu_are_not_recorded():
    def function(x, number):
        return ((x @ x).relu() * number).softmax(-1) @ x

    f = compiled(function)
    for place in range(5):
        x, number = random(32, 32), torch.tensor(0.1 * place)
        assert_close(f(x, number), function(x, number))


def test_a_capture_that_fails(monkeypatch):
    """It runs as it is, from then on, and random numbers go on."""
    monkeypatch.setattr("ferrite.codegen.host.recording.WAITING", re.compile("never"))
    monkeypatch.setattr("ferrite.capture.torch_api.is_unsafe_to_record", lambda name: False)

    def function(x):
        y = (x @ x.t()).relu()
        total = torch.bincount(y[0].long(), minlength=4)[:4].sum()  # the host asks how many there are
        return (F.dropout(y, 0.5) @ x).relu() @ x + total

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        f = compiled(function)
        for seed in range(4):
            x = random(16, 16)
            torch.cuda.manual_seed(seed)
            found = f(x), torch.rand(3, device=DEVICE)
            torch.cuda.manual_seed(seed)
            assert_close(found, (function(x), torch.rand(3, device=DEVICE)))


def test_streams_and_threads():
    f, w, wrong = compiled(layers), random(64, 64) / 8, []
    for _ in range(3):
        f(random(32, 64), w)
    torch.cuda.synchronize()

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                x = random(32, 64)
                if not torch.allclose(f(x, w)[0], layers(x, w)[0], atol=1e-4):
                    wrong.append(x)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_inside_a_recording_of_the_users():
    f, x, w = compiled(layers), random(32, 64), random(64, 64) / 8
    for _ in range(3):
        f(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = f(x, w)
    for _ in range(3):
        x.copy_(random(32, 64))
        graph.replay()
        torch.cuda.synchronize()
        assert_close(found, layers(x, w))


def test_what_is_held_outlives_the_function():
    f, w = compiled(layers), random(64, 64) / 8
    x = random(32, 64)
    for _ in range(3):
        found = f(x, w)
    wanted = layers(x, w)
    del f
    torch.compiler.reset()
    gc.collect()
    for _ in range(20):
        random(32, 64)
    assert_close(found, wanted)
