"""Dropout on a GPU, drawn by our own kernels: the numbers that eager draws there, by the rule of torch's kernels.

There is no GPU here. A stand-in for the generator says where it is, and numbers are compared with a Philox in plain
Python; that torch draws by the same rule is what `ferrite.targets.random_probe` asks the GPU itself.
"""

from __future__ import annotations

import contextlib
import functools
from importlib.util import find_spec

import pytest
import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy

from ferrite.capture import torch_api, torch_operators, torch_runtime
from ferrite.capture.aot import complete_drawn_again
from ferrite.ir.program import RandomState, call_of, has_effect, interpret, parse, verify_program
from ferrite.lower.graph import lower_module
from ferrite.runtime import run_in_eager
from tests.targets.test_cuda_devices import compiled, compiled_graph
from tests.targets.test_cuda_devices import gpus as gpus

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

THREADS = 256  # of a small GPU: a few elements are several turns
WORD = (1 << 32) - 1


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    a, b, c, d = counter
    for n in range(10):
        k = (key[0] + n * 0x9E3779B9) & WORD, (key[1] + n * 0xBB67AE85) & WORD
        low, high = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (high >> 32) ^ b ^ k[0], high & WORD, (low >> 32) ^ d ^ k[1], low & WORD
    return a, b, c, d


def test_the_reference_itself():
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


def mask_of(elements: int, itemsize: int, p: float, seed: int, offset: int) -> torch.Tensor:
    """What torch's kernel keeps, thread by thread and turn by turn."""
    vector = 16 // itemsize
    while elements % vector:
        vector //= 2
    threads = min(-(-elements // 256) * 256, THREADS)
    chance, kept = torch.tensor(1 - p, dtype=torch.float32), torch.empty(elements, dtype=torch.bool)
    for thread in range(threads):
        calls = offset // 4
        for start in range(thread * vector, elements, threads * vector):
            for four in range(start, start + vector, 4):
                words = philox((calls & WORD, calls >> 32, thread, 0), (seed & WORD, seed >> 32))
                drawn = torch.tensor(words).to(torch.float32) * 2.0**-32 + 2.0**-33
                kept[four : four + 4] = drawn < chance
                calls += 1
    return kept


def numbers_of(elements: int, seed: int, offset: int) -> torch.Tensor:
    """What torch's kernel of a distribution draws, thread by thread and turn by turn."""
    threads, found = min(-(-elements // 256) * 256, THREADS), torch.empty(elements)
    for thread in range(threads):
        for calls, start in enumerate(range(thread, elements, 4 * threads), offset // 4):
            words = philox((calls & WORD, calls >> 32, thread, 0), (seed & WORD, seed >> 32))
            for word, place in zip(words, range(start, elements, threads), strict=False):
                found[place] = torch.tensor(word).to(torch.float32) * 2.0**-32 + 2.0**-33
    return found


def growth(elements: int) -> int:
    threads = min(-(-elements // 256) * 256, THREADS)
    return 4 * ((elements - 1) // (threads * 4) + 1)


class Generator:
    """As much of a GPU's generator as programs ask for."""

    def __init__(self, seed: int, offset: int) -> None:
        self.seed, self.offset, self.is_recorded = seed, offset, False

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset


@pytest.fixture
def generator(monkeypatch):
    made = Generator((1 << 64) - 12345, 4 * ((1 << 32) - 2))
    monkeypatch.setattr("ferrite.ir.random.default_generator", lambda device: made)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: made.is_recorded)
    return made


def threads(device, kernel):
    return THREADS


here = functools.partial(compiled, random_threads=threads)


def lowered(function, *given, tracing_mode="fake"):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = [mode.from_tensor(x).shape[0] if tracing_mode == "symbolic" else x.shape[0] for x in given]
    with mode:
        shapes = [(count, *x.shape[1:]) for count, x in zip(rows, given, strict=True)]
        pictures = [torch.empty(shape, dtype=x.dtype, device="cuda:0") for shape, x in zip(shapes, given, strict=True)]
        graph = make_fx(function, tracing_mode=tracing_mode)(*pictures)
    return verify_program(lower_module(graph, kernels_on=["cuda"], random_threads=threads).program)


def meaning(program, *given):
    """What a program gives by its slow meaning: with its tensors on the CPU, and the generator of a GPU."""
    return interpret(parse(str(program).replace(", device='cuda:0'", "")), list(given), {})


@pytest.mark.parametrize(("dtype", "sizes"), [
    (torch.float32, (3, 8)), (torch.float32, (5, 1020)), (torch.bfloat16, (9, 1024)), (torch.float16, (7, 596)),
], ids=str)  # fmt: skip
def test_one_dropout(generator, dtype, sizes):
    """Elements in one turn and in several; vectors of four and of eight; a counter that needs more than 32 bits."""
    p = 0.3
    x = torch.randn(sizes).to(dtype)
    program = lowered(lambda x: torch.native_dropout(x * 2, p, True), x)
    assert parse(str(program)) == program
    for _ in range(2):
        before = generator.offset
        result, mask = meaning(program, x)
        expected = mask_of(x.numel(), dtype.itemsize, p, generator.seed, before).view(sizes)
        assert torch.equal(mask, expected)
        scale = torch.tensor(1 / torch.tensor(1 - p, dtype=torch.float32).item(), dtype=torch.float32)
        assert torch.equal(result, ((x * 2).float() * expected * scale).to(dtype))
        assert generator.offset == before + growth(x.numel())


def test_a_kernel_draws_the_same(gpus, generator):
    x, start = torch.randn(2, 16).bfloat16(), generator.offset
    source, run = here(lambda x: torch.native_dropout(x * 2, 0.5, True), ["cuda:0"], [x], gpus)
    assert "op_" not in source.text
    result, mask = run(x)
    assert torch.equal(mask.flatten(), mask_of(32, 2, 0.5, generator.seed, start))
    assert torch.equal(result, x * 4 * mask)


def three(x, y):
    """Two draws that follow each other, then one of torch, then another of ours."""
    a, first = torch.native_dropout(x + 1, 0.5, True)
    b, second = torch.native_dropout(y + 1, 0.25, True)
    drawn = torch.rand_like(x)
    c, third = torch.native_dropout(a + b.sum() + drawn, 0.75, True)
    return first, second, third, c


def test_draws_keep_their_order(generator):
    x, y = torch.randn(6, 1024), torch.randn(4, 256)
    program = lowered(three, x, y)
    drawing = [each for each in program.operations if has_effect(each)]
    assert [isinstance(each, RandomState) for each in drawing] == [True, False, True]
    assert drawing[0] is program.operations[0]  # before all kernels, which it would part
    start, one, other = generator.offset, growth(x.numel()), growth(y.numel())
    first, second, third, _ = meaning(program, x, y)
    assert torch.equal(first.flatten(), mask_of(x.numel(), 4, 0.5, generator.seed, start))
    assert torch.equal(second.flatten(), mask_of(y.numel(), 4, 0.25, generator.seed, start + one))
    assert torch.equal(third.flatten(), mask_of(x.numel(), 4, 0.75, generator.seed, start + one + other))
    assert generator.offset == start + 2 * one + other


def test_equal_draws_share_a_kernel(gpus, generator):
    """Where each begins is an argument: a model of many layers has few kernels."""

    def layers(x, w):
        for _ in range(3):
            x = torch.native_dropout(x @ w, 0.5, True)[0]
        return [x]

    source, _ = here(layers, ["cuda:0"] * 2, [torch.randn(8, 64), torch.randn(64, 64)], gpus)
    assert source.text.count("random_state(") == 1
    assert len({call.kernel for table in source.runs for call in table.calls}) == 1


def test_what_cannot_be_known_is_left_to_eager(gpus, generator):
    """While the user records a CUDA graph nobody can say where the generator is; and for an operand that lies otherwise
    other numbers are drawn."""
    x = torch.randn(33)
    source, run = here(lambda x: torch.native_dropout(x, 0.5, True), ["cuda:0"], [x[:32]], gpus)
    assert "if is_recording() or (x_1.data_ptr()) % 16: return in_eager(args)" in source.text
    start = generator.offset
    for given, is_recorded, moved in ((x[:32], True, 0), (x[1:], False, 0), (x[:32], False, 4)):
        generator.is_recorded = is_recorded
        torch.manual_seed(3)
        result, mask = run(given)
        if not moved:
            torch.manual_seed(3)
            assert torch.equal(mask, torch.native_dropout(given, 0.5, True)[1])
        assert torch.equal(result, given * mask * 2)
        assert generator.offset == start + moved


LEFT = {
    "nothing is dropped": lambda x: torch.native_dropout(x + 1, 0.0, True),
    "everything is dropped": lambda x: torch.native_dropout(x + 1, 1.0, True),
    "in double precision": lambda x: torch.native_dropout(x.double(), 0.5, True),
    "other strides": lambda x: torch.native_dropout((x + 1).t(), 0.5, True),
    "with gaps": lambda x: torch.native_dropout((x + 1).narrow(1, 0, 8), 0.5, True),
    "not aligned": lambda x: torch.native_dropout((x + 1).flatten().narrow(0, 2, 60), 0.5, True),
    "in the middle of an input": lambda x: torch.native_dropout(x.flatten().narrow(0, 4, 60), 0.5, True),
    "no fours": lambda x: torch.native_dropout((x + 1).flatten().narrow(0, 0, 30), 0.5, True),
    "no elements": lambda x: torch.native_dropout((x + 1).narrow(0, 0, 0), 0.5, True),
}


@pytest.mark.parametrize("function", LEFT.values(), ids=LEFT)
def test_what_stays_a_call_of_torch(function):
    operations = lowered(function, torch.empty(4, 16)).operations
    assert not any(isinstance(each, RandomState) for each in operations)
    assert [call.operator for call in map(call_of, operations) if call is not None] == ["aten.native_dropout.default"]


def test_sizes_that_vary(generator):
    """One program for all: how many threads there are decides which of them draws an element."""
    program = lowered(lambda x: torch.native_dropout(x + 1, 0.5, True), torch.empty(6, 128), tracing_mode="symbolic")
    assert program.buffers[0].sizes[0].atoms
    for rows in (2, 7, 40):
        start = generator.offset
        _, mask = meaning(program, torch.randn(rows, 128))
        assert torch.equal(mask.flatten(), mask_of(rows * 128, 4, 0.5, generator.seed, start))
        assert generator.offset == start + growth(rows * 128)


@pytest.mark.parametrize(("dtype", "seen", "multiple"), [
    (torch.float32, 124, 4), (torch.float32, 128, 4), (torch.bfloat16, 128, 8), (torch.bfloat16, 124, 8),
], ids=str)  # fmt: skip
def test_sizes_that_are_multiples_of_what_was_seen(gpus, generator, dtype, seen, multiple):
    """Eager reads as many elements at once as divide their number: each call asks whether that is as before."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    size = mode.from_tensor(torch.empty(seen)).shape[0]
    with mode:
        x = torch.empty(size, dtype=dtype, device="cuda:0")
        graph = make_fx(lambda size, x: torch.native_dropout(x + 1, 0.5, True), tracing_mode="symbolic")(size, x)
    source, run = compiled_graph(graph, gpus, threads)
    (asked,) = [line for line in source.text.splitlines() if "is_recording()" in line]
    assert f") % {multiple}: return in_eager(args)" in asked
    for count in (seen, seen + 2 * multiple, 40 * multiple + seen, seen + multiple // 2, seen + 1):
        x, start = torch.randn(count).to(dtype), generator.offset
        torch.manual_seed(3)
        result, mask = run(count, x)
        if (count - seen) % multiple:
            torch.manual_seed(3)
            assert torch.equal(mask, torch.native_dropout(x + 1, 0.5, True)[1])
            assert generator.offset == start
        else:
            expected = mask_of(count, dtype.itemsize, 0.5, generator.seed, start)
            assert torch.equal(mask, expected)
        assert torch.equal(result, (x + 1) * mask * 2)


def test_sizes_that_were_no_multiples_of_four():
    program = lowered(lambda x: torch.native_dropout(x + 1, 0.5, True), torch.empty(3, 126), tracing_mode="symbolic")
    assert not any(isinstance(each, RandomState) for each in program.operations)


def in_bounds(drawn, dtype, low=0.0, high=1.0):
    value = (drawn * (high - low) + low).to(dtype)
    return torch.where(value == high, low, value)


DISTRIBUTIONS = {
    "rand": (lambda x: torch.rand(x.shape, device=x.device), in_bounds),
    "rand_like": (torch.rand_like, in_bounds),
    "uniform": (lambda x: torch.ops.aten.uniform(x, -1.0, 3.0), functools.partial(in_bounds, low=-1.0, high=3.0)),
    "bernoulli": (lambda x: torch.ops.aten.bernoulli.p(x, 0.7), lambda drawn, dtype: (drawn < 0.7).to(dtype)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(generator, name, dtype):
    function, expected = DISTRIBUTIONS[name]
    x = torch.zeros(12, 20, dtype=dtype)
    program = lowered(lambda x: (function(x) if name != "rand" else function(x).to(dtype), x + 1), x)
    assert parse(str(program)) == program
    assert not any(map(call_of, program.operations))
    for _ in range(2):
        before = generator.offset
        drawn = numbers_of(x.numel(), generator.seed, before).view(x.shape)
        result, _ = meaning(program, x)
        assert torch.equal(
            result, expected(drawn, torch.float32).to(dtype) if name == "rand" else expected(drawn, dtype)
        )
        assert generator.offset == before + growth(x.numel())


def test_distributions_of_sizes_that_vary(generator):
    """One program for all, whether a thread draws one number or several."""
    program = lowered(lambda x: [torch.rand_like(x)], torch.empty(6, 30), tracing_mode="symbolic")
    for rows in (2, 9, 70):
        start = generator.offset
        (result,) = meaning(program, torch.empty(rows, 30))
        assert torch.equal(result.flatten(), in_bounds(numbers_of(rows * 30, generator.seed, start), torch.float32))
        assert generator.offset == start + growth(rows * 30)


def test_a_kernel_draws_a_distribution(gpus, generator):
    """And what is drawn once is read at many points."""
    x, start = torch.randn(5, 40), generator.offset
    source, run = here(lambda x: [x * (torch.rand(5, 1, device=x.device) < 0.5)], ["cuda:0"], [x], gpus)
    assert "op_" not in source.text
    assert torch.equal(run(x)[0], x * (numbers_of(5, generator.seed, start) < 0.5).view(5, 1))


LEFT_DISTRIBUTIONS = {
    "many elements": lambda x: torch.rand(5, 60, device=x.device),
    "in double precision": lambda x: torch.rand(5, device=x.device, dtype=torch.float64),
    "bounds that are rounded to": lambda x: torch.ops.aten.uniform(x, 0.0, 0.3),
    "other strides": lambda x: torch.rand_like(x.t()),
    "in long integers": lambda x: torch.ops.aten.bernoulli.p(x.long(), 0.5),
    "chances of elements": torch.bernoulli,
    "normal": torch.randn_like,
}


@pytest.mark.parametrize("function", LEFT_DISTRIBUTIONS.values(), ids=LEFT_DISTRIBUTIONS)
def test_distributions_that_stay_calls_of_torch(function):
    operations = lowered(lambda x: [function(x + 1)], torch.empty(4, 16)).operations
    assert not any(isinstance(each, RandomState) for each in operations)
    assert sum(call_of(each) is not None for each in operations) == 1


def test_checkpoints_draw_again_from_the_default_generator(monkeypatch):
    """As eager's do; what is drawn outside of one is drawn once, by our kernels."""
    state = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda *device: state)

    def joint(primals, tangents):
        (x,), (gradient,) = primals, tangents
        inside, mask = torch.ops.aten.native_dropout(x.sin(), 0.4, True)
        outside, other = torch.ops.aten.native_dropout(x.cos(), 0.5, True)
        return [inside.exp() + outside, gradient * inside * mask + gradient * other]

    with FakeTensorMode() as mode:
        pictures = [torch.empty(8, 64, device="cuda:0")], [torch.empty(8, 64, device="cuda:0")]
        graph = make_fx(joint)(*pictures)
    first, _ = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.native_dropout.default)
    for node in (*first.args[:1], first, *first.users):
        node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}
    with tracing(TracingContext(mode)):
        parts = torch_api.min_cut_partition(graph, pictures, num_fwd_outputs=1)
    found = []
    for part in parts:
        complete_drawn_again(part)
        operations = verify_program(lower_module(part, kernels_on=["cuda"], random_threads=threads).program).operations
        found.append([call_of(each).operator if call_of(each) else "ours" for each in operations if has_effect(each)])
    assert found == [["higher_order.run_and_save_rng_state", "ours"], ["higher_order.run_with_rng_state"]]


def test_a_checkpoint_draws_from_the_generator_of_its_gpu(monkeypatch):
    """Which need not be the current one; torch's operators ask that one."""
    current, asked = [0], []

    @contextlib.contextmanager
    def device(gpu):
        before, current[0] = current[0], gpu.index
        yield
        current[0] = before

    state = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr("torch.cuda.device", device)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda *gpu: asked.append(*current) or state)
    saving, dropout = torch_operators.higher_order("run_and_save_rng_state"), torch.ops.aten.native_dropout.default
    rand = torch.ops.aten.rand.default
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, y = torch.empty(4, device="cuda:1"), torch.empty(4, device="cuda:0")
        called = torch_runtime.direct_call(saving)
        assert called(dropout, x, 0.5, True)[1][0].device == x.device
        assert called(dropout, y, 0.5, True)[1][0].device == y.device
        assert called(rand, [4], device=x.device)[1].device == x.device
        graph = torch.fx.Graph()
        graph.output((graph.call_function(saving, (dropout, graph.placeholder("x"), 0.5, True)),))
        run_in_eager(torch.fx.GraphModule({}, graph))([x])
    assert asked == [1, 0, 1, 1]
    assert current == [0]
