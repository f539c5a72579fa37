"""CUDA graphs on a GPU that is simulated: which parts of a program are recorded, when they are replayed, and that no
number changes under anybody's hands. The simulated GPU replays by running a part again on the memory it was recorded
with, so what should be copied, and is not, shows."""

from __future__ import annotations

import contextlib
import gc
import threading
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.capture import torch_runtime
from ferrite.runtime.cuda import recorded, recording

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None):
    from tests.targets.simulated_cuda import SimulatedTarget

    target = SimulatedTarget()
    monkeypatch.setattr("ferrite.backend.targets_for", lambda options, devices: {"cpu": target})
    monkeypatch.setattr("ferrite.codegen.host.recording.MIN_LAUNCHES", 1)
    return target


def compiled(function, fullgraph=True, gradients="copied", **more):
    options = {"strict": True, "cuda_graphs": True, "recorded_gradients": gradients}
    return torch.compile(function, backend="ferrite", options=options, fullgraph=fullgraph, **more)


def assert_same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def is_lent(tensor):
    memory = recorded.POOL.storages.get(torch_runtime.storage_handle(tensor))
    return memory is not None and memory.lent


@contextlib.contextmanager
def another_thread():
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        yield
    finally:
        end.set()
        other.join()


def layers(x, w):
    y = torch.softmax(x @ w, -1)
    return (y @ w.t()).relu() + 1, y.sum(0)


def test_a_part_is_run_then_recorded_then_replayed(gpu):
    f, w = compiled(layers), torch.randn(5, 5)
    kept = []
    for place in range(5):
        x = torch.randn(4, 5)
        kept.append((f(x, w), layers(x, w), x))  # so that no input is where another was
        assert (gpu.graphs.recorded, gpu.graphs.replayed) == (int(place > 0), place)
    for found, wanted, _x in kept:  # what was given out does not change
        assert_same(found, wanted)
    record = ferrite.last_compile()
    assert record.not_recorded == ()
    assert [recorder.replayed for recorder in record.recordings] == [4]
    assert "recorded_0(inference_part_0" in record.graphs[0].source


def test_without_the_option_there_are_no_parts(gpu):
    torch.compile(layers, backend="ferrite", options={"strict": True})(torch.randn(4, 5), torch.randn(5, 5))
    assert "recorded" not in ferrite.last_compile().graphs[0].source


def test_the_modes_ask_for_it(gpu):
    for mode in ("reduce-overhead", "max-autotune"):
        f = torch.compile(layers, backend="ferrite", mode=mode)
        for _ in range(3):
            x, w = torch.randn(4, 5), torch.randn(5, 5)
            assert_same(f(x, w), layers(x, w))
        assert ferrite.last_compile().recordings[0].replayed == 2
        torch.compiler.reset()


@pytest.mark.parametrize("gradients", ["copied", "lent"])
@pytest.mark.parametrize("holds", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training(gpu, holds, gradients):
    """What forward keeps for backward stays in the memory of its recording, and is taken from there. Gradients are
    handed out in that of theirs where that is asked for: whoever holds them gets others."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    f = compiled(model, gradients=gradients)
    seen = []
    for _ in range(5):
        x = torch.randn(7, 6)
        grads = []
        for run in (f, model):
            model.zero_grad(set_to_none=True)
            result = run(x)
            result.square().sum().backward()
            grads.append([result.detach(), *(parameter.grad for parameter in model.parameters())])
        assert_same(*grads)
        seen.append(grads if holds else [[each.clone() for each in row] for row in grads])
    for found, wanted in seen:
        assert_same(found, wanted)
    forward, backward = ferrite.last_compile().recordings
    assert forward.replayed == 4
    assert forward.recordings <= 2  # an input may have been at one place twice by chance
    assert backward.replayed == 4
    assert ferrite.last_compile().not_recorded == ()
    if holds and gradients == "lent":
        # and perhaps one more, for what the allocator put elsewhere
        assert recording.MAX_HELD <= backward.recordings <= recording.MAX_HELD + 1


class Layers(torch.nn.Module):
    """What is saved is seen in many ways: views, the result itself, the same twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x):
        y = F.layer_norm(self.first(x).sigmoid(), (6,)).view(-1, 6)
        return (self.second(y).tanh() @ y.t()).sigmoid(), y.sum(0)


def step(model, run, x):
    first, second = run(x)
    (first.square().sum() + second.sin().sum()).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return [first.detach(), second.detach(), *grads]


def test_a_step_makes_no_tensors_but_those_that_leave(gpu, monkeypatch):
    """What only backward sees is handed over as the same tensors every time. Gradients are as autograd wants them: it
    takes them as they are, and clones none."""
    model, made = Layers(), []
    f, x = compiled(model), torch.randn(5, 6)
    for _ in range(3):
        step(model, f, x)
    window = torch_runtime.quick_untracked_view
    monkeypatch.setattr(torch_runtime, "quick_untracked_view", lambda *args: made.append(args) or window(*args))
    with torch.autograd.profiler.profile() as profile:
        found = step(model, f, x)
    assert_same(found, step(model, model, x))
    assert made == []
    assert "aten::clone" not in [event.name for event in profile.function_events]
    assert [each.replayed for each in ferrite.last_compile().recordings] == [3, 3]
    for graph in ferrite.last_compile().graphs:
        behind = graph.source.split("recorded_0(")[1]
        assert "from_pool" not in behind
        assert "buf" not in behind.split("return")[0]  # views of what the part makes are made in it


def test_saved_tensors_that_somebody_holds(gpu):
    """By the graph of a call whose backward is yet to come, by a hook, as a view: nothing is written over."""
    model, kept = Layers(), []
    f = compiled(model)

    def keep(saved):
        kept.append((saved, saved.clone(), saved.detach()[:1]))
        return saved

    for place in range(6):
        x = torch.randn(5, 6)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            first, second = f(x)
        kept = [(None, copy, view) for _saved, copy, view in kept] if place % 2 else kept
        loss = first.square().sum() + second.sin().sum()
        loss.backward(retain_graph=True)
        other = step(model, model, torch.randn(5, 6))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        assert_same([first, second, *grads], step(model, model, x))
        assert len(other) == 6
    for saved, copy, view in kept:
        assert_same(view, copy[:1])
        if saved is not None:
            assert_same(saved, copy)
    assert max(each.recordings for each in ferrite.last_compile().recordings) > 1


def test_a_change_of_what_backward_needs_shows(gpu):
    def function(x, w):
        y = (x @ w).exp()
        return y, (y.view(-1) @ y.view(-1)).reshape(1)

    f = compiled(function)
    for place in range(4):
        for run in (f, function):
            x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
            first, second = run(x, w)
            with torch.no_grad():
                (first if place % 2 else x).add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                (first.sum() + second.sum()).backward()
    assert (
        "view_of(primals" in ferrite.last_compile().graphs[0].source.split("recorded_0(")[1]
    )  # torch knows such views


def test_backward_as_it_is_after_a_forward_that_was_recorded(gpu):
    """A gradient may take over memory of what forward saved, which is its recording's."""
    f = compiled(lambda x, w: ((x @ w).tanh().exp() @ w).tanh())
    kept = []
    for place in range(6):
        x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
        result = f(x, w)
        gpu.graphs.fails = "not backward" if place == 1 else ""
        result.sum().backward()
        y, v = (each.detach().clone().requires_grad_() for each in (x, w))
        ((y @ v).tanh().exp() @ v).tanh().sum().backward()
        kept.append(([x.grad, w.grad], [y.grad, v.grad]))
    for found, wanted in kept:
        assert_same(found, wanted)
    forward, backward = ferrite.last_compile().recordings
    assert (forward.replayed, backward.replayed) == (5, 0)


def test_a_parameter_of_two_graphs(gpu):
    """Autograd adds the gradients of one to those of the other; steps pile up, and an optimizer reads them."""
    model, other = Layers(), Layers()
    other.first = model.first
    runs = compiled(model, gradients="lent"), compiled(other, gradients="lent")
    parameters = list({*model.parameters(), *other.parameters()})
    wanted = [torch.zeros_like(each) for each in parameters]
    optimizer = torch.optim.SGD(parameters, 0.01)
    for place in range(8):
        x = torch.randn(5, 6)
        losses = [sum(each.square().sum() for each in run(x)) for run in (model, other)]
        for total, grad in zip(wanted, torch.autograd.grad(sum(losses), parameters), strict=True):
            total += grad
        for run in runs:
            sum(each.square().sum() for each in run(x)).backward()
        assert_same([each.grad for each in parameters], wanted)
        if place % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=place > 3)
            wanted = [torch.zeros_like(each) for each in parameters]


def test_gradients_of_the_step_before_are_held_while_forward_runs(gpu):
    """Some take over the memory of what forward saved: those are copied, or forward would need another recording."""
    f = compiled(lambda x, w: ((x @ w).tanh().exp() @ w).tanh(), gradients="lent")
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    x.requires_grad_()
    w.requires_grad_()
    for _ in range(6):
        result = f(x, w)
        x.grad = w.grad = None
        result.sum().backward()
        y, v = (each.detach().clone().requires_grad_() for each in (x, w))
        ((y @ v).tanh().exp() @ v).tanh().sum().backward()
        assert_same([x.grad, w.grad], [y.grad, v.grad])
    forward, backward = ferrite.last_compile().recordings
    assert forward.replayed == backward.replayed == 5
    assert forward.recordings <= 2
    assert any(map(is_lent, (x.grad, w.grad)))
    assert gpu.graphs.waited == backward.replayed  # another stream may still read gradients that nobody holds

    def assert_not_lent():
        x.grad = w.grad = None
        f(x, w).sum().backward()
        assert not any(map(is_lent, (x.grad, w.grad)))
        assert backward.replayed == gpu.graphs.waited == 5
        assert "some stream may be captured" in ferrite.last_compile().not_recorded[-1]
        assert not any(recorded.POOL.keeps(torch_runtime.storage_handle(each.grad)) for each in (x, w))

    with another_thread():  # it may be capturing
        assert_not_lent()
    gpu.graphs.can_wait = False
    assert_not_lent()


def test_a_lent_gradient_whose_storage_was_resized(gpu):
    """Its memory is gone: what was recorded for it is not replayed."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    f, x = compiled(model, gradients="lent"), torch.randn(7, 6)
    for step in range(6):
        grads = []
        for run in (f, model):
            model.zero_grad(set_to_none=True)
            run(x).square().sum().backward()
            grads.append([parameter.grad.clone() for parameter in model.parameters()])
            if run is f and step == 3:
                lent = [each.grad for each in model.parameters()]
                lent = list(filter(is_lent, lent))
                assert lent
                for each in lent:
                    each.untyped_storage().resize_(0)
                    each.untyped_storage().resize_(1 << 16)
                del lent, each
        assert_same(*grads)
    backward = ferrite.last_compile().recordings[1]
    # once more for the gradient that is gone, and perhaps for what comes in, which the allocator may put elsewhere
    assert 2 <= backward.recordings <= 3


@pytest.mark.parametrize("gradients", ["copied", "lent"])
def test_memory_is_shared_by_recordings_whose_results_all_leave(gpu, gradients):
    """No other one writes, when it is replayed, where one keeps what its backward needs, or gradients that are lent."""
    f, w, model = compiled(layers), torch.randn(5, 5), Layers()
    g = compiled(model, gradients=gradients)
    for _ in range(4):
        x, y = torch.randn(5, 6), torch.randn(4, 5)
        assert_same(f(y, w), layers(y, w))
        first, second = g(x)
        f(y, w)
        (first.square().sum() + second.sin().sum()).backward()
        f(y, w)
        found = [first.detach(), second.detach(), *(each.grad for each in model.parameters())]
        model.zero_grad(set_to_none=True)
        assert_same(found, step(model, model, x))
    forward, backward = (each.recordings for each in ferrite.last_compile().recordings)
    assert gpu.graphs.recorded - len(gpu.graphs.pool) == forward + (backward if gradients == "lent" else 0) > 0


def test_only_so_much_is_kept_for_further_sizes(gpu):
    gpu.graphs.most = 1
    f, w = compiled(layers, dynamic=True), torch.randn(5, 5)
    for rows in (3, 4, 3, 4, 3, 4):
        x = torch.randn(rows, 5)
        assert_same(f(x, w), layers(x, w))
    (recorder,) = ferrite.last_compile().recordings
    assert recorder.recordings == 1
    assert any("MiB already" in note for note in recorder.notes)


def test_gradients_that_pile_up(gpu):
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    f, wanted = compiled(model), None
    x = torch.randn(7, 6)
    for times in range(1, 6):
        f(x).square().sum().backward()
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        kept = [parameter.grad for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
        model(x).square().sum().backward()
        wanted = [parameter.grad * times for parameter in model.parameters()]
        for parameter, grad in zip(model.parameters(), kept, strict=True):
            parameter.grad = grad
        assert_same(grads, wanted)


def test_forwards_before_their_backwards(gpu):
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3), torch.nn.Sigmoid())
    f = compiled(model)
    for count in (1, 1, 2, 6, 2, 6):
        given = [torch.randn(7, 6, requires_grad=True) for _ in range(count)]
        losses = [f(x).square().sum() for x in given]
        for loss in losses:
            loss.backward()
        for x in given:
            (wanted,) = torch.autograd.grad(model(y := x.detach().requires_grad_()).square().sum(), y)
            assert_same(x.grad, wanted)
    notes = ferrite.last_compile().not_recorded
    assert "results of all recordings are held" in notes


@pytest.mark.parametrize("steady", [True, False])
def test_inputs_that_are_written(gpu, steady):
    def function(x, state):
        state.mul_(0.5).add_(x)
        return (state @ x.t()).relu()

    f = compiled(function)
    found, wanted = torch.ones(4, 4), torch.ones(4, 4)
    for _ in range(5):
        x = torch.randn(4, 4)
        assert_same(f(x, found), function(x, wanted))
        assert_same(found, wanted)
        if not steady:
            found = found.clone()
    assert gpu.graphs.replayed == 4


def test_results_that_are_inputs_or_share_memory(gpu):
    def function(x, w):
        y = (x @ w).relu() + 1
        return y, y[1:], x, x.view(-1)[3:], (w @ w).tanh().t()

    f, w = compiled(function), torch.randn(4, 4)
    for _ in range(4):
        x = torch.randn(4, 4)
        found, wanted = f(x, w), function(x, w)
        assert_same(found, wanted)
        assert [each.stride() for each in found] == [each.stride() for each in wanted]
        assert found[2] is x
        assert found[3]._base is x or found[3].data_ptr() == x.data_ptr() + 12
        found[0].add_(1)
        assert_same(found[1], wanted[1] + 1)


def test_inputs_whose_addresses_change(gpu):
    """A parameter that is another one from now on; and what is always elsewhere is copied."""
    f = compiled(layers)
    w = torch.randn(5, 5)
    kept = [w]
    for place in range(8):
        if place == 4:
            w = torch.randn(5, 5)
        x = torch.randn(4, 5)
        kept.append(x)
        assert_same(f(x, w), layers(x, w))
    (recorder,) = ferrite.last_compile().recordings
    assert recorder.recordings == 2
    assert recorder.replayed == 7


def test_expanded_and_overlapping_inputs(gpu):
    def function(x):
        return (x @ x.t()).relu(), x + 1

    row = [torch.randn(1, 5) for _ in range(4)]
    f = compiled(function)
    for each in row:
        assert_same(f(each.expand(4, 5)), function(each.expand(4, 5)))
    assert gpu.graphs.replayed == 3
    torch.compiler.reset()
    f = compiled(function)
    for each in [torch.randn(20) for _ in range(4)]:
        x = each.unfold(0, 4, 2)
        assert_same(f(x), function(x))
    assert any("share memory" in note for note in ferrite.last_compile().not_recorded)


def test_a_recording_for_each_set_of_sizes(gpu, monkeypatch):
    monkeypatch.setattr(recording, "MAX_RECORDINGS", 3)
    f, w = compiled(layers, dynamic=True), torch.randn(5, 5)
    for _turn in range(3):
        for rows in (3, 4, 6, 7):
            x = torch.randn(rows, 5)
            assert_same(f(x, w), layers(x, w))
    (recorder,) = ferrite.last_compile().recordings
    assert recorder.recordings == 3
    assert recorder.replayed == 6
    assert any("3 recordings" in note for note in ferrite.last_compile().not_recorded)


def test_random_numbers_are_eagers(gpu):
    def function(x):
        return F.dropout((x @ x.t()).relu(), 0.5) + torch.rand(4, 4)

    f = compiled(function)
    for seed in range(5):
        x = torch.randn(4, 4)
        torch.manual_seed(seed)
        found = f(x), f(x), torch.rand(3)
        torch.manual_seed(seed)
        assert_same(found, (function(x), function(x), torch.rand(3)))
    assert gpu.graphs.replayed == 9


def test_what_waits_for_the_gpu_stands_between_parts(gpu):
    def function(x):
        y = (x @ x.t()).relu() + 1
        n = int((y > 2).sum().item())
        z = y[: n % 2 + 1].sum(0)
        return torch.mv(y, z).softmax(-1) * 2, (z @ z).tanh() + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        f = compiled(function)
        for _ in range(4):
            x = torch.randn(4, 4)
            assert_same(f(x), function(x))
    record = ferrite.last_compile()
    assert [recorder.replayed for recorder in record.recordings] == [3, 3]
    assert any("the host reads a number" in reason for reason in record.not_recorded)


def test_sizes_that_data_decide(gpu):
    def function(x):
        y = (x @ x.t()).relu() + 1
        return y[y > 2] * 2, y.softmax(-1)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        f = compiled(function)
        for _ in range(4):
            x = torch.randn(4, 4)
            assert_same(f(x), function(x))
    reasons = " ".join(ferrite.last_compile().not_recorded)
    assert "size that data decides" in reasons
    assert gpu.graphs.replayed


def test_where_it_cannot_be_recorded_it_runs_as_it_is(gpu):
    f, w = compiled(layers), torch.randn(5, 5)
    gpu.graphs.fails = "no recording today"
    for _ in range(3):
        x = torch.randn(4, 5)
        assert_same(f(x, w), layers(x, w))
    assert ferrite.last_compile().not_recorded == ("RuntimeError: no recording today",)


def test_nothing_is_recorded_beside_threads_that_may_draw_random_numbers(gpu):
    """Torch's generators refuse to draw while anything is recorded. What is recorded already is replayed."""
    f, w = compiled(layers), torch.randn(5, 5)
    with another_thread():
        for _ in range(3):
            x = torch.randn(4, 5)
            assert_same(f(x, w), layers(x, w))
        assert gpu.graphs.recorded == 0
        assert "random numbers" in ferrite.last_compile().not_recorded[0]
    f(x, w)
    assert gpu.graphs.recorded == 1


def test_a_thread_runs_a_part_before_it_records_it(gpu):
    f, w, x = compiled(layers), torch.randn(5, 5), torch.randn(4, 5)
    f(x, w)
    counts = []
    thread = threading.Thread(target=lambda: counts.extend((f(x, w), gpu.graphs.recorded)[1] for _ in range(2)))
    thread.daemon = True
    thread.start()
    thread.join()
    assert counts == [0, 0]  # then the main thread may be drawing
    f(x, w)
    assert gpu.graphs.recorded == 1


def test_a_recording_of_the_users_own_has_no_other_inside(gpu):
    f, w = compiled(layers), torch.randn(5, 5)
    gpu.graphs.capturing = True
    for _ in range(3):
        x = torch.randn(4, 5)
        assert_same(f(x, w), layers(x, w))
    assert gpu.graphs.recorded == 0


def test_small_parts_are_not_worth_it(gpu, monkeypatch):
    monkeypatch.setattr("ferrite.codegen.host.recording.MIN_LAUNCHES", 3)
    f, x = compiled(lambda x: x * 2 + 1), torch.randn(4)
    assert_same(f(x), x * 2 + 1)
    assert ferrite.last_compile().not_recorded[0].startswith("too few launches to record: 1")


def test_parts_come_from_the_cache(gpu, artifact_cache):
    for expected in ("miss", "hit"):
        f, w = compiled(layers), torch.randn(5, 5)
        for _ in range(3):
            x = torch.randn(4, 5)
            assert_same(f(x, w), layers(x, w))
        record = ferrite.last_compile()
        assert [outcome.result for outcome in record.cache] == [expected]
        assert record.recordings[0].replayed == 2
        torch.compiler.reset()


def test_memory_of_a_recording_is_the_pools_until_it_is_gone(gpu):
    gc.collect()
    before = len(recorded.POOL.storages)
    f, w = compiled(layers), torch.randn(5, 5)
    for _ in range(3):
        f(torch.randn(4, 5), w)
    assert len(recorded.POOL.storages) > before
    del f  # the record knows numbers, and holds no memory
    torch.compiler.reset()
    gc.collect()
    assert len(recorded.POOL.storages) == before
