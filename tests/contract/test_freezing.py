"""Parameters as constants: the same answers, and new ones when the parameters change."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import ferrite
import ferrite.backend
from ferrite.runtime import load_host
from ferrite.runtime.frozen import MAX_FROZEN_SETS
from tests.compare import assert_no_farther, compile_strict, compiled_graphs, since


class Net(torch.nn.Module):
    """Something of each kind: a norm to fold, siblings to merge, a buffer to add."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4)
        self.left, self.right = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.register_buffer("shift", torch.rand(4))
        self.norm.running_mean.uniform_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return torch.tanh(self.left(x)) * torch.sigmoid(self.right(x)) + self.shift


def image(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 2, 6, 6)


def assert_like_eager(function: Any, model: torch.nn.Module, *inputs: torch.Tensor) -> None:
    with torch.no_grad():
        ours, eager = function(*inputs), model(*inputs)
        dtype = next(model.parameters()).dtype
        wide = model.double()(*(x.double() for x in inputs))
        model.to(dtype)
    assert ours.stride() == eager.stride()
    assert_no_farther(ours, eager, wide, "result")


def frozen(model: torch.nn.Module, **options: Any) -> Any:
    return ferrite.freeze(model, strict=True, **options)


def compilations() -> int:
    """Of one captured graph: each time it was frozen, it joined the same record."""
    return len(ferrite.last_compile().graphs)


@pytest.fixture
def net() -> Net:
    return Net().eval()


@pytest.fixture(params=["native", "calls"])
def executor(request: pytest.FixtureRequest, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """For tests that look at what is compiled, or get in its way: with each thing that runs a graph."""
    monkeypatch.setenv("FERRITE_EXECUTOR", request.param)
    return str(request.param)


@pytest.fixture
def loaded(executor: str, monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    """The constants of each program, in the order of compiling."""
    found: list[list[torch.Tensor]] = []

    def load(source, kernels, objects, *more):
        found.append([value for value in objects.values() if isinstance(value, torch.Tensor)])
        return load_host(source, kernels, objects, *more)

    monkeypatch.setattr("ferrite.backend.load_host", load)
    return found


# --- what is compiled -------------------------------------------------------------------------------------------------


def calls_in_order() -> list[str]:
    return [call.operator.removeprefix("aten.") for call in ferrite.last_compile().graphs[-1].eager_calls]


@pytest.mark.parametrize(
    "options",
    [{}, {"pre_grad": False}, {"decompose": "core"}, {"joint": False, "post_grad": False}],
    ids=["all stages", "without pre-grad", "core operators", "freezing alone"],
)
def test_a_frozen_model_answers_as_before_with_fewer_calls(net, options):
    function, x = frozen(net, **options), image()
    for _ in range(2):
        with torch.no_grad():
            assert torch.allclose(function(x), net(x), atol=1e-6)
    (graph,) = ferrite.last_compile().graphs
    assert len(graph.inputs) == 1, "the parameters are no inputs any more"
    names = calls_in_order()
    assert names.count("convolution.default") == 1
    assert not [name for name in names if "batch_norm" in name or name in ("permute.default", "t.default")]
    assert names.count("addmm.default") == 1, "the two linear layers are one product"
    inlining = next(step for step in graph.passes if step.name == "inline_parameters")
    assert inlining.facts["parameters"] >= 7


def test_the_door_and_the_option_are_the_same(net):
    with torch.no_grad():
        compile_strict(net, options={"freeze": True})(image())
    assert len(ferrite.last_compile().graphs[0].inputs) == 1


def test_sizes_may_be_symbols(net):
    function = frozen(net, dynamic=True)
    for batch in (2, 3, 5):
        assert_like_eager(function, net, image(batch))
    assert "s" in "".join(ferrite.last_compile().graphs[0].inputs)


def test_with_gradients_nothing_is_frozen(net):
    x = image()
    compiled = compile_strict(net, options={"freeze": True})
    compiled(x).sum().backward()
    ours = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
    net.zero_grad()
    net(x).sum().backward()
    assert all(torch.allclose(ours[name], parameter.grad) for name, parameter in net.named_parameters())


def test_the_model_itself_still_trains(net):
    function, x = frozen(net), image()
    function(x)
    net.train()
    net(x).sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_a_model_in_training_mode_is_refused(net):
    net.norm.train()
    with pytest.raises(ferrite.UserError, match="training mode") as caught:
        ferrite.freeze(net)
    assert "norm" in str(caught.value)


def test_a_parameter_that_is_an_argument_is_no_constant():
    """Each call may bring another one."""

    def function(x, weight):
        return x @ weight

    compiled = compile_strict(function, options={"freeze": True})
    with torch.no_grad():
        for _ in range(3):
            x, weight = torch.randn(2, 3), torch.nn.Parameter(torch.randn(3, 3))
            assert torch.equal(compiled(x, weight), x @ weight)
    assert (compiled_graphs(), compilations()) == (1, 1)


def test_frozen_code_runs_under_inference_mode_and_autocast(net):
    function, x = frozen(net), image()
    with torch.inference_mode():
        assert torch.allclose(function(x), net(x), atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        ours = function(x)
        with torch.no_grad():
            net.left.bias.add_(1)  # compiling anew must not see autocast twice
            again, eager = function(x), net(x)
    assert ours.dtype == again.dtype == eager.dtype
    assert torch.allclose(again.float(), eager.float(), atol=0.05)


def test_control_flow_reads_frozen_parameters():
    class Branching(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: self.one(x) * 2, lambda x: self.other(x) - 1, (x,))

    model = Branching().eval()
    function = frozen(model)
    with torch.no_grad():
        for x in (torch.ones(2, 3), -torch.ones(2, 3)):
            assert torch.allclose(function(x), model(x), atol=1e-6)
        model.one.bias.add_(1)
        for x in (torch.ones(2, 3), -torch.ones(2, 3)):
            assert torch.allclose(function(x), model(x), atol=1e-6)


# --- what stays an input ----------------------------------------------------------------------------------------------


def test_a_buffer_that_the_model_writes_stays_an_input():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x):
            self.calls.add_(1)
            return x * self.scale * self.calls

    model = Counting().eval()
    function, x = frozen(model), torch.ones(3)
    assert [function(x)[0].item() for _ in range(3)] == [2.0, 4.0, 6.0]
    assert model.calls == 3
    assert compilations() == 1, "its own writes are no changes from outside"
    assert len(ferrite.last_compile().graphs[0].inputs) == 2


def test_a_parameter_that_is_returned_is_the_parameter():
    class Returning(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = torch.nn.Parameter(torch.rand(4)), torch.nn.Parameter(torch.rand(4))

        def forward(self, x):
            return x * self.weight + self.bias, self.weight, self.bias.view(2, 2), self.bias * 2

    model = Returning().eval()
    _, weight, view, double = frozen(model)(torch.rand(4))
    assert weight is model.weight
    assert view.data_ptr() == model.bias.data_ptr()
    assert double.data_ptr() != model.bias.data_ptr()
    double.fill_(0)  # what was made for the caller is his alone
    assert torch.equal(frozen(model)(torch.rand(4))[3], model.bias * 2)


def test_parameters_of_inference_mode_stay_inputs():
    """Nobody counts what is written into them."""
    with torch.inference_mode():
        model = torch.nn.Linear(3, 3).eval()
        function, x = frozen(model), torch.rand(2, 3)
        assert torch.allclose(function(x), model(x))
        model.bias.add_(1)
        assert torch.allclose(function(x), model(x))


# --- changes ----------------------------------------------------------------------------------------------------------


def step_of_an_optimizer(net):
    net.conv.weight.grad = torch.ones_like(net.conv.weight)
    torch.optim.SGD([net.conv.weight], lr=0.1).step()
    net.conv.weight.grad = None


def other_state(net):
    net.load_state_dict(Net().state_dict())


def another_object(net):
    net.right.weight = torch.nn.Parameter(torch.rand(4, 4))


def other_memory(net):
    net.left.weight.data = torch.rand(4, 4)


def through_another_type(net):
    net.half().float()


def buffer_written(net):
    net.norm.running_var.add_(1)


CHANGES = (step_of_an_optimizer, other_state, another_object, other_memory, through_another_type, buffer_written)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_noticed(net, change):
    function, x = frozen(net), image()
    before = function(x)
    function(x)
    assert compilations() == 1
    with torch.no_grad():
        change(net)
        after, eager = function(x), net(x)
        function(x)
    assert not torch.allclose(before, after, atol=1e-5)
    assert torch.allclose(after, eager, atol=1e-6)
    assert compilations() == 2, "once for the change"


def test_parameters_that_dynamo_keeps_in_its_module_are_watched(net):
    """As with Inductor's setting `freezing`: no inputs of the graph, but attributes of its module."""
    x = torch.randn(2, 2, 5, 5)
    with torch._dynamo.config.patch(prepare_freezing=True), torch.no_grad():
        frozen = compile_strict(net, options={"freeze": True})
        for parameter in (net.conv.weight, net.norm.running_mean):
            assert torch.allclose(frozen(x), net(x), atol=1e-5)
            parameter.mul_(1.5)
        assert torch.allclose(frozen(x), net(x), atol=1e-5)
    assert len(ferrite.last_compile().graphs) == 3


def test_too_many_changes_end_the_freezing(net):
    function, x = frozen(net), image()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(MAX_FROZEN_SETS + 3):
            with torch.no_grad():
                net.shift.add_(1)
                assert torch.allclose(function(x), net(x), atol=1e-6)
    ours = [warning for warning in caught if issubclass(warning.category, ferrite.FerriteWarning)]
    assert len(ours) == 1
    assert "changes too often" in str(ours[0].message)
    assert compilations() == MAX_FROZEN_SETS + 1
    assert len(ferrite.last_compile().graphs[-1].inputs) > 1


def test_one_piece_of_code_serves_several_modules():
    """Dynamo compiles it once; each module's parameters are frozen once."""
    models = [Net().eval() for _ in range(3)]

    @torch.compile(backend="ferrite", options={"strict": True, "freeze": True})
    def run(model, x):
        return model(x)

    x = image()
    with torch.no_grad():
        for model in models * 3:
            assert torch.allclose(run(model, x), model(x), atol=1e-6)
    assert (compiled_graphs(), compilations()) == (1, len(models))


def test_compiling_anew_uses_the_options_of_then(net):
    with ferrite.using(horizontal="off", pre_grad=False):
        function = frozen(net)
        function(image())
    first = calls_in_order()
    assert first.count("addmm.default") == 2
    with torch.no_grad(), ferrite.using(horizontal="always"):
        net.left.weight.add_(1)
    function(image())
    assert calls_in_order() == first


@since(2, 12)  # Dynamo takes another thread's tracing for its own
def test_threads_share_what_is_frozen(net):
    function, x = frozen(net), image()
    with torch.no_grad():
        eager, results = net(x), []

    def work():
        for _ in range(5):
            results.append(function(x))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    assert all(torch.allclose(result, eager, atol=1e-6) for result in results)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_constants_are_the_parameters_themselves(loaded):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)).eval()
    frozen(model)(torch.rand(2, 4))
    (constants,) = loaded
    assert {value.data_ptr() for value in constants} == {parameter.data_ptr() for parameter in model.parameters()}


def test_a_folded_weight_takes_the_place_of_its_parts(net, loaded):
    frozen(net)(image())
    (constants,) = loaded
    own = {value.data_ptr() for value in (*net.parameters(), *net.buffers())}
    assert {value.data_ptr() for value in constants} & own == {net.shift.data_ptr()}
    weights = sorted(value.numel() for value in constants)
    assert weights == [4, 4, 8, 32, 72]  # the shift; biases of the convolution and the product; their weights


def bytes_alive() -> int:
    """Of all tensors that Python knows of, each piece of memory once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    tensors = [each for each in tensors if each.layout is torch.strided]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


class Wide(torch.nn.Module):
    """64 KiB that are used as they are, 64 KiB that are folded, 128 KiB that are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.scaled, self.left, self.right = (torch.nn.Linear(128, 128, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.scaled(torch.relu(self.plain(x))) * 2)
        return torch.tanh(self.left(x)) * torch.sigmoid(self.right(x))


WEIGHT, SMALL = 4 * 128 * 128, 10_000


def test_no_weight_is_kept_twice_but_what_it_became():
    model, x = Wide().eval(), torch.randn(4, 128)
    before = bytes_alive()
    function = frozen(model)
    function(x)
    made = bytes_alive() - before
    assert 3 * WEIGHT <= made < 3 * WEIGHT + SMALL, "a folded one and two joined ones; not the parts, not copies"


@since(2, 13)
def test_with_parameters_discarded_no_weight_is_kept_twice_at_all():
    model, x = Wide().eval(), torch.randn(4, 128)
    before = bytes_alive()
    function = frozen(model, freeze_discard_parameters=True)
    function(x)
    assert bytes_alive() < before + SMALL


@since(2, 13)
def test_discarded_parameters_leave_no_memory_behind(net):
    x = image()
    with torch.no_grad():
        eager = net(x)
    state = {name: value for name, value in net.state_dict(keep_vars=True).items() if "batches" not in name}
    memory = {name: StorageWeakRef(value.untyped_storage()) for name, value in state.items()}
    del state
    function = frozen(net, freeze_discard_parameters=True)
    for _ in range(3):
        assert torch.allclose(function(x), eager, atol=1e-6)
    assert compilations() == 1
    gc.collect()
    assert {name for name, place in memory.items() if not place.expired()} == {"shift"}, "the one that is a constant"


@since(2, 13)
def test_a_discarded_parameter_raises_with_its_name(net):
    function = frozen(net, freeze_discard_parameters=True)
    function(image())
    for use in (lambda: net(image()), lambda: net.conv.weight + 1, lambda: net.conv.weight.zero_()):
        with pytest.raises(ferrite.UserError, match=r"parameter 'weight' of module 'conv' has no contents"):
            use()
    with pytest.raises(ferrite.UserError, match=r"buffer 'shift' of the module itself has no contents"):
        net.state_dict()
    with pytest.raises(ferrite.UserError, match="has no contents"):
        net.left.weight.data = torch.rand(4, 4)
    assert net.conv.weight.shape == (4, 2, 3, 3)
    assert next(net.parameters()).device.type == "cpu"
    assert "weight" in repr(net.conv.weight)


@since(2, 13)
def test_after_discarding_nothing_can_be_compiled_anew(net):
    function = frozen(net, freeze_discard_parameters=True)
    function(image())
    with pytest.raises(Exception, match=r"parameter '\w+' of module '\w+' has no contents"):
        function(image(3))
    net.left.weight = torch.nn.Parameter(torch.rand(4, 4))
    with pytest.raises(ferrite.UserError, match="other parameters than it was frozen with"):
        function(image())


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_failure_costs_speed_and_one_warning(net, tmp_path):
    function, x = ferrite.freeze(net, fail_at="freeze", repro_dir=tmp_path), image()
    with pytest.warns(ferrite.FerriteWarning, match="stage 'freeze' failed"):
        assert torch.allclose(function(x), net(x).detach(), atol=1e-6)
    assert len(list(tmp_path.iterdir())) == 1
    torch.compiler.reset()
    with pytest.raises(ferrite.CompilerBug, match="stage 'freeze' failed"):
        frozen(net, fail_at="freeze", repro_dir=tmp_path)(x)


def test_a_failure_while_compiling_anew_costs_speed_alone(net, tmp_path, monkeypatch, executor):
    function, x = ferrite.freeze(net, repro_dir=tmp_path), image()
    function(x)

    def broken(*args):
        raise ValueError("once it worked")

    monkeypatch.setattr(ferrite.backend, "lower_graph", broken)
    with torch.no_grad():
        net.shift.add_(1)
        with pytest.warns(ferrite.FerriteWarning, match="stage 'lower' failed"):
            ours = function(x)
        assert torch.allclose(ours, net(x), atol=1e-6)
        assert torch.allclose(function(x), net(x), atol=1e-6)
