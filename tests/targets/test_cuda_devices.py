"""Graphs with tensors on several devices, traced without any: torch can picture a GPU that is not there. The host
program runs on memory of the CPU, and a simulated driver runs the kernels."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.codegen import named_objects, verify_host
from ferrite.errors import Refusal
from ferrite.ir.program import verify_program
from ferrite.lower import correct_forecasts, no_threads
from ferrite.lower.graph import lower_module
from ferrite.machines import GpuMachine
from ferrite.options import Options
from ferrite.passes import post_grad_passes
from ferrite.runtime import load_host, run_in_eager
from ferrite.schedule import make_plan
from ferrite.schedule.gpu import GpuScheduling
from ferrite.targets import executable_of, runs_of
from ferrite.targets.cpu import CPU
from tests.targets.simulated_cuda import SimulatedTarget

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture
def gpus(monkeypatch):
    """Two of them: tensors are on the CPU, whatever they say."""
    from ferrite.codegen import CudaSpelling

    class Target(SimulatedTarget):
        spelling = CudaSpelling()
        scheduling = GpuScheduling(GpuMachine())

    target = Target()

    def empty(sizes, strides, dtype, index):
        assert index in (0, 1)
        return torch.empty_strided(sizes, strides, dtype=dtype)

    monkeypatch.setattr("ferrite.capture.torch_runtime.empty_on_cuda", empty)
    monkeypatch.setattr(
        "ferrite.capture.torch_runtime.current_stream_of", lambda index: target.simulated.STREAM + index
    )
    return target


def compiled(function, devices, given, target, random_threads=no_threads, options=None):
    """The host program of a function of tensors on these devices, and a function that runs it. `options`: of post-grad
    passes, which are left out otherwise."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        pairs = zip(given, devices, strict=True)
        pictures = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x, device in pairs]
        graph = make_fx(function, tracing_mode="fake")(*pictures)
    if options is not None:
        post_grad_passes(graph, is_inference=True, options=Options(**options))
    return compiled_graph(graph, target, random_threads)


def compiled_graph(graph, target, random_threads=no_threads):
    targets = {"cpu": CPU, "cuda": target}
    lowered = lower_module(graph, kernels_on=targets, random_threads=random_threads)
    verify_program(lowered.program)
    schedulings = {device: each.scheduling for device, each in targets.items()}
    executable = executable_of(make_plan(lowered.program, schedulings, verify=True), targets)
    source = verify_host(executable.source, lowered.objects)
    objects = named_objects(source, lowered.objects)
    run = load_host(source, runs_of(executable, targets), objects, in_eager=run_in_eager(graph))
    return source, lambda *given: run(list(given))


def assert_computes(function, devices, given, target):
    source, run = compiled(function, devices, given, target)
    for _ in range(2):
        torch.testing.assert_close(run(*given), function(*given), rtol=1e-5, atol=1e-5)
    return source


def test_a_graph_on_a_gpu(gpus):
    source = assert_computes(
        lambda x, w: [torch.softmax(x * w, -1), x.sum(0)], ["cuda:0"] * 2, [torch.randn(5, 9), torch.randn(9)], gpus
    )
    assert "stream_of(0)" in source.text
    assert "empty_on_first_cuda(" in source.text
    assert {table.device for table in source.runs} == {"cuda:0"}
    assert {each.way for each in gpus.simulated.launched} >= {"python"}


def layer(x, weight, bias, residual):
    return [torch.relu(torch.nn.functional.linear(x, weight, bias)) + residual]


def layer_inputs(rows=5, dtype=torch.bfloat16):
    return [torch.randn(*sizes).to(dtype) for sizes in ((rows, 33), (40, 33), (40,), (rows, 40))]


@pytest.mark.parametrize("rows", [1, 2, 20])
def test_a_matrix_product_of_our_own(gpus, rows):
    given = layer_inputs(rows)
    source, run = compiled(layer, ["cuda:0"] * 4, given, gpus, options={"own_products": "always"})
    assert "mm" not in source.text
    (table,) = source.runs
    assert len(table.calls) == 1, "with all that follows it"
    (result,), (right,) = run(*given), layer(*(each.double() for each in given))
    assert (result.double() - right).abs().max() <= 2**-7 * right.abs().max()


@pytest.mark.parametrize(("rows", "kernels"), [(4, 1), (100, 2)])
def test_a_weight_of_8_bits_is_widened_where_it_is_read(gpus, rows, kernels):
    """With many rows it would be done again and again: then it is in memory."""

    def function(x, weight, scale):
        return [x @ (weight.to(x.dtype) * scale).t()]

    given = [torch.randn(rows, 32).bfloat16(), torch.randint(-9, 9, (64, 32), dtype=torch.int8), torch.rand(64, 1)]
    given[2] = given[2].bfloat16()
    source, run = compiled(function, ["cuda:0"] * 3, given, gpus, options={"own_products": "always"})
    (table,) = source.runs
    assert len(table.calls) == kernels
    (result,), (right,) = run(*given), function(*given)
    torch.testing.assert_close(result, right, rtol=2e-2, atol=2e-2 * right.abs().max().item())


@pytest.mark.parametrize(
    ("options", "dtype"), [({}, torch.bfloat16), ({"own_products": "always"}, torch.float64)], ids=str
)
def test_other_matrix_products_are_torchs(gpus, options, dtype):
    given = layer_inputs(dtype=dtype)
    source, _run = compiled(layer, ["cuda:0"] * 4, given, gpus, options=options)
    assert "mm" in source.text


def test_two_gpus_have_runs_of_their_own(gpus):
    def function(x, y):
        return [x * 2 + 1, y * 2 + 1, (x + 1).sum(0)]

    given = [torch.randn(5, 9), torch.randn(5, 9)]
    source = assert_computes(function, ["cuda:0", "cuda:1"], given, gpus)
    assert {table.device for table in source.runs} == {"cuda:0", "cuda:1"}
    for table in source.runs:
        number = f"run_{source.runs.index(table)}("
        assert f"{number}stream_of({table.device[-1]})" in source.text


def test_each_gpu_is_the_current_one_while_it_is_given_work(gpus):
    """As it is in eager; before and after, the current one is the user's."""

    def function(x, y):
        return [x * 2 + 1, y.softmax(0), y.sum(1)]

    given = [torch.randn(5, 9), torch.randn(5, 9)]
    _source, run = compiled(function, ["cuda:0", "cuda:1"], given, gpus)
    driver = gpus.simulated
    for user in (0, 0, 1, 1, 0):
        driver.current = driver.context(user)
        del driver.launched[:]
        torch.testing.assert_close(run(*given), function(*given), rtol=1e-5, atol=1e-5)
        assert driver.current == driver.context(user)
    assert {each.way for each in driver.launched} == {"native"}

    def refuses(*given):
        raise RuntimeError("CUDA error")

    driver.launch, driver.capturing = refuses, 1
    aside = [x[:, 1:].clone() for x in given]
    with pytest.raises(RuntimeError):
        compiled(function, ["cuda:0", "cuda:1"], aside, gpus)[1](*aside)
    assert driver.current == driver.context(0), "after an error, too"


def test_each_run_is_given_the_stream_that_is_current_on_its_gpu(gpus, monkeypatch):
    """Asked for at every call: memory comes from torch's allocator for the same stream, which is all that it needs to
    know of it (`record_stream` is for those who use it elsewhere)."""
    given = [torch.randn(5, 9), torch.randn(5, 9)]
    source, run = compiled(lambda x, y: [x + 1, y + 1], ["cuda:0", "cuda:1"], given, gpus)
    assert all(text in source.text for text in ("stream_of(0)", "stream_of(1)"))
    for stream in (7, 40):
        monkeypatch.setattr(gpus.simulated, "STREAM", stream)
        torch.testing.assert_close(run(*given), [x + 1 for x in given])


def test_a_number_on_the_cpu_is_given_by_value(gpus):
    source = assert_computes(lambda x, s: [x * s + s], ["cuda:0", "cpu"], [torch.randn(5, 9), torch.tensor(0.3)], gpus)
    assert source.text.count(".fill_(") == 1
    assert {table.device for table in source.runs} == {"cuda:0"}


def test_kernels_on_both_kinds_of_device(gpus):
    def function(x, y):
        return [x * 2 + 1, y.sin() + y]

    source = assert_computes(function, ["cuda:0", "cpu"], [torch.randn(5, 9), torch.randn(7)], gpus)
    assert {table.device for table in source.runs} == {"cuda:0", "cpu"}


class Apart(GpuScheduling):
    """Every operation is a kernel."""

    def slower(self, *given):
        return Refusal("apart")


def chain(x, w):
    """Several kernels that only hand each other something."""
    for _ in range(3):
        x = (x.repeat(2, 1) * w).cumsum(0).tanh()
    return [x.sum(0)]


@pytest.mark.parametrize("device", ["cuda:1", pytest.param("cuda:0", marks=pytest.mark.slow)])
def test_without_memory_for_an_arena_each_part_has_its_own(gpus, monkeypatch, device):
    """A GPU may have enough memory, but not in one piece."""
    from ferrite.capture import torch_runtime

    full, kept = [True], torch_runtime.empty_on_cuda
    monkeypatch.setattr(gpus, "scheduling", Apart(GpuMachine()))

    def empty(sizes, strides, dtype, index):
        if full[0] and dtype is torch.uint8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return kept(sizes, strides, dtype, index)

    monkeypatch.setattr("ferrite.capture.torch_runtime.empty_on_cuda", empty)
    given = [torch.randn(3, 9), torch.randn(9)]
    source, run = compiled(chain, [device] * 2, given, gpus)
    (table,) = source.runs
    assert table.arena
    assert len(table.arena_parts) >= 3
    assert len({part.last for part in table.arena_parts}) >= 3  # and not as long as the run
    for full[0] in (True, True, False, False, True, False):
        del gpus.simulated.separate[:]
        torch.testing.assert_close(run(*given), chain(*given), rtol=1e-5, atol=1e-5)
        assert len(gpus.simulated.separate) == (len(table.arena_parts) if full[0] else 0)

    def memory(size, device):
        raise torch.OutOfMemoryError("CUDA out of memory, really.")

    full[0] = True
    monkeypatch.setattr(gpus.simulated, "memory", memory)
    with pytest.raises(torch.OutOfMemoryError, match="really"):
        run(*given)
    full[0] = False
    torch.testing.assert_close(run(*given), chain(*given), rtol=1e-5, atol=1e-5)


def test_a_table_without_memory_for_an_arena(gpus, monkeypatch):
    from ferrite.capture import torch_runtime

    full, kept = [True], torch_runtime.empty_on_cuda

    def empty(sizes, strides, dtype, index):
        if full[0] and dtype is torch.uint8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return kept(sizes, strides, dtype, index)

    monkeypatch.setattr("ferrite.capture.torch_runtime.empty_on_cuda", empty)
    given = [torch.randn(size) for size in (5, 9, 17, 3, 40)]
    source, run = compiled(lambda *given: [x.sin() + 1 for x in given], ["cuda:0"] * 5, given, gpus)
    (table,) = source.runs
    assert [(part.offset, part.first, part.last) for part in table.arena_parts] == [(0, 0, 0)]
    for full[0] in (True, False, True):
        torch.testing.assert_close(run(*given), [x.sin() + 1 for x in given], rtol=1e-5, atol=1e-5)
    assert len(gpus.simulated.separate) == 2


@pytest.mark.parametrize(
    ("function", "strides"), [(lambda x: x.t() + 1, (1, 1)), (lambda x: x.t() * x.t().to(torch.float16), (8, 1))]
)
def test_strides_along_dimensions_of_one_are_eagers(function, strides):
    """torch forecasts (8, 1); eager has it where all operands are contiguous tensors of one shape."""
    assert function(torch.empty(8, 1)).stride() == strides
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = make_fx(function, tracing_mode="fake")(torch.empty(8, 1, device="cuda:0"))
    correct_forecasts(graph)
    result = graph.graph.output_node().args[0]
    assert result.meta["val"].stride() == strides


def test_the_greatest_of_a_short_row_are_a_kernel_and_of_a_long_one_torchs(gpus):
    def function(x):
        values, places = x.softmax(-1).topk(3)
        return values / values.sum(-1, keepdim=True), places

    for count, call in ((9, False), (1000, True)):
        x = torch.randn(4, count)
        source, run = compiled(function, ["cuda:0"], [x], gpus)
        assert ("topk" in source.text) is call
        torch.testing.assert_close(list(run(x)), list(function(x)))


FORMS = {
    "complex numbers": (lambda x, y: ((x * y).abs(), (x / y).sum(0)), [torch.randn(4, 6, dtype=torch.complex64)] * 2),
    "views of complex numbers": (
        lambda x, y: (torch.view_as_real(torch.view_as_complex(x) * y),),
        [torch.randn(4, 6, 2), torch.randn(6, dtype=torch.complex64)],
    ),
    "floats of 8 bits": (
        lambda x, y: ((x * 2).to(torch.float8_e4m3fn).float(), y.float()),
        [torch.randn(4, 6), torch.randn(6).to(torch.float8_e5m2)],
    ),
    "sorted rows": (lambda x, y: (*(x * y).sort(-1), *x.median(0)), [torch.randn(4, 6), torch.randn(6)]),
    "running logarithms": (lambda x, y: ((x * y).logcumsumexp(-1),), [torch.randn(4, 6), torch.randn(6)]),
}


@pytest.mark.parametrize("name", FORMS, ids=lambda name: name.replace(" ", "-"))
def test_rarer_types_and_forms_are_kernels(name, gpus):
    function, given = FORMS[name]
    source, run = compiled(function, ["cuda:0", "cuda:0"], given, gpus)
    assert not source.programs, "nothing is left to torch"
    torch.testing.assert_close(list(run(*given)), list(function(*given)), rtol=1e-5, atol=1e-5)
