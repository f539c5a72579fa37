"""On a GPU: what compiled functions compute, forward and backward, at several sizes and types, held against a float64
run; and what else eager promises: inputs that are written, random numbers, errors, copies between devices."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import ferrite
from tests.triton_kernels import ON_A_GPU

pytestmark = ON_A_GPU
DEVICE = "cuda"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
# of numbers about 1: exponentials of numbers in the hundreds, which a softmax takes, are as far off as their argument
EPSILON = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float64: 1e-13}


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    torch.manual_seed(0)


def compiled(function, **more):
    return torch.compile(function, backend="ferrite", options={"strict": True}, **more)


def random(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, device=DEVICE, dtype=dtype)


def leaves(tree):
    return [tree] if isinstance(tree, torch.Tensor) else [leaf for item in tree for leaf in leaves(item)]


def error(found, exact):
    """The largest difference, relative to the largest number, or to 1: sums of both signs may be of any size."""
    scale = exact.abs().max().clamp(min=1) if exact.numel() else 1
    return float((found.double() - exact).abs().max() / scale) if exact.numel() else 0.0


def assert_as_accurate(found, eager, exact):
    """No farther from a float64 run than twice eager's distance, or a few units."""
    for ours, theirs, right in zip(leaves(found), leaves(eager), leaves(exact), strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert ours.device == theirs.device
        if not ours.is_floating_point():
            assert torch.equal(ours, theirs)
        else:
            limit = 2 * error(theirs, right) + EPSILON[ours.dtype]
            assert error(ours, right) <= limit, (error(ours, right), error(theirs, right))


def rms(x, w):
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(x.dtype) * w


FUNCTIONS = {
    "chain": lambda x, w: F.silu(x) * w + x.tanh(),
    "gelu": lambda x, w: F.gelu(x) * F.gelu(w, approximate="tanh"),
    "softmax": lambda x, w: (x * w).softmax(-1),
    "log softmax over rows": lambda x, w: (x * w).log_softmax(0),
    "layer norm": lambda x, w: F.layer_norm(x, x.shape[-1:], w, w),
    "rms norm": rms,
    "sums": lambda x, w: (x.sum(0), x.sum(1), (x * w).sum(), x.mean(), x.var(0)),
    "extremes": lambda x, w: (x.amax(1), x.argmax(0), (x * w).min(), x.topk(3)[0]),
    "transposed": lambda x, w: (x.t() * 2).contiguous() + w[:, None],
    "cat": lambda x, w: torch.cat([x + 1, x * w, x[:1]], 0),
    "cumsum": lambda x, w: (x * w).cumsum(-1),
    "products": lambda x, w: F.gelu(x @ (x * w).t()).softmax(-1),
    "gather": lambda x, w: (x[torch.arange(0, x.shape[0], 2, device=x.device)] * w).sum(1),
    "masked": lambda x, w: torch.where(x > 0, x, w).masked_fill(x > 1, 0.5),
    "clamped power": lambda x, w: x.abs().clamp(0.1, 2).pow(1.5) / (w.abs() + 1),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name, dtype):
    function = FUNCTIONS[name]
    f = compiled(function, fullgraph=True, dynamic=False)
    for sizes in ((5, 7), (33, 200), (64, 1000)):
        x, w = random(*sizes, dtype=dtype), random(sizes[1], dtype=dtype)
        runs = []
        for run, cast in ((f, lambda t: t), (function, lambda t: t), (function, torch.Tensor.double)):
            given = [cast(t.clone()).requires_grad_() for t in (x, w)]
            results = leaves(run(*given))
            loss = sum(each.double().square().sum() for each in results if each.is_floating_point())
            (loss / 64).backward()  # so that sums of a thousand gradients fit into float16
            runs.append([*(each.detach() for each in results), *(t.grad for t in given if t.grad is not None)])
        exact = [each.double() if each.is_floating_point() else each for each in runs[2]]
        if dtype is not torch.float32:  # ties and roundings decide which
            exact = [right if right.is_floating_point() else eager for right, eager in zip(exact, runs[1], strict=True)]
        assert_as_accurate(runs[0], runs[1], exact)
    assert ferrite.last_compile().kernels


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_of_positions_that_are_added_to_every_image(dtype):
    """Rows and columns of one tensor in one kernel, whose columns are reduced to the end there."""

    def function(x, positions, w):
        return F.layer_norm(x + positions, x.shape[-1:], w, w)

    f, sizes = compiled(function, fullgraph=True, dynamic=False), ((32, 197, 768), (1, 197, 768), (768,))
    inputs = [random(*each, dtype=dtype) for each in sizes]
    runs = []
    for run, cast in ((f, lambda t: t), (function, lambda t: t), (function, torch.Tensor.double)):
        given = [cast(t.clone()).requires_grad_() for t in inputs]
        result = run(*given)
        (result.double().square().sum() / 4096).backward()
        runs.append([result.detach(), *(t.grad for t in given)])
    assert_as_accurate(runs[0], runs[1], runs[2])


class Block(torch.nn.Module):
    """Convolutions with and without bias, statistics that are learnt, a residual, pooling."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 32, 7, 2, 3)
        self.norm = torch.nn.BatchNorm2d(32)
        self.second = torch.nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.alone = torch.nn.Conv2d(32, 32, 3, padding=1, groups=32)

    def forward(self, x):
        x = F.max_pool2d(self.norm(self.first(x)).relu(), 3, 2, 1)
        x = x + self.norm(self.second(x)).relu()
        return self.alone(x).mean((2, 3)), x


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_convolutions_lie_as_the_library_likes_them_and_results_as_in_eager(dtype, training):
    model = Block().to(DEVICE).eval()
    x, runs = random(4, 3, 64, 64, dtype=dtype), []
    for kind in (dtype, dtype, torch.float64):
        each = Block().to(DEVICE).eval()
        each.load_state_dict(model.state_dict())
        run = compiled(each.to(kind), fullgraph=True, dynamic=False) if not runs else each.to(kind)
        with torch.set_grad_enabled(training):
            results = run(x.to(kind))
        found = [result.detach() for result in results]
        if training:
            (sum(result.double().square().sum() for result in results) / 4096).backward()
            found += [parameter.grad for parameter in each.parameters()]
        runs.append(found)
    assert_as_accurate(*runs)


@pytest.mark.parametrize("name", ["chain", "softmax", "layer norm", "sums", "transposed", "products", "cumsum"])
def test_sizes_that_vary(name):
    function = FUNCTIONS[name]
    f = compiled(function, fullgraph=True, dynamic=True)
    for rows, columns in ((5, 7), (33, 200), (1, 64), (129, 1), (70, 3000), (2000, 17)):
        x, w = random(rows, columns), random(columns)
        if rows == 1 and name == "sums":
            continue
        assert_as_accurate(f(x, w), function(x, w), function(x.double(), w.double()))
    assert ferrite.last_compile().kernels


EXTREMES = {
    "short rows": lambda x: x.amax(-1),
    "short planes": lambda x: (x.amax((-1, -2)), x.amin((-1, -2))),
    "windows": lambda x: (x.unfold(1, 3, 2).unfold(2, 3, 2).amax((-1, -2)), x.unfold(1, 3, 2).amin(-1)),
    "large windows": lambda x: F.max_pool2d(F.pad(x, (8, 8, 8, 8)), 9, 2),
    "softmax": lambda x: (x.softmax(-1), x.log_softmax(-2)),
    "masked": lambda x: x.masked_fill(x < 0, -torch.inf).amax((-1, -2)),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [(4096, 5, 3), (512, 3, 7), (64, 56, 56), (33, 6, 6)], ids=str)
@pytest.mark.parametrize("name", EXTREMES)
def test_nothing_is_an_extreme_beyond_the_end(name, sizes, dtype):
    """Lanes that have no element all have the same number, which some assembler may take for another one."""
    function, x = EXTREMES[name], random(*sizes, dtype=dtype)
    if name == "windows" and min(sizes[1:]) < 4:
        pytest.skip("no windows in it")
    assert_as_accurate(compiled(function)(x), function(x), function(x.double()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64])
def test_other_types(dtype):
    def function(x, y):
        both = (x == y), x.sum(0), (x.long() + y.long()) * 2
        return both if dtype is torch.bool else (*both, torch.maximum(x, y), x * y)

    x, y = (torch.randint(0, 5, (40, 30), device=DEVICE).to(dtype) for _ in range(2))
    for found, wanted in zip(compiled(function)(x, y), function(x, y), strict=True):
        torch.testing.assert_close(found, wanted)


def test_functions_without_kernels_are_eagers():
    def function(x, y):
        return (x * y).exp(), torch.igamma(y.real.double().abs() + 1, x.imag.double().abs())

    x, y = (random(40, 30, dtype=torch.complex64) for _ in range(2))
    for found, wanted in zip(compiled(function)(x, y), function(x, y), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


# --- rarer operators and types ----------------------------------------------------------------------------------------

RARE = {
    "digamma": lambda x: torch.digamma(x * 3),
    "Bessel functions": lambda x: (torch.special.i0e(x * 9), torch.special.i1e(x * 9)),
    "Bessel functions of the second kind": lambda x: torch.special.modified_bessel_k0(x.abs() * 3 + 0.1),
    "polynomials": lambda x: torch.special.chebyshev_polynomial_u(x / 2, torch.full_like(x, 20.0)),
    "gamma functions": lambda x: torch.igamma(x.abs() * 30, x.abs() * 30 + x.abs()),
    "zeta": lambda x: torch.special.zeta(x.abs() + 1.5, x.abs() + 0.1),
    "parts of floats": lambda x: torch.frexp(x * 1e-30).mantissa + torch.frexp(x).exponent,
    "angles": lambda x: x.angle() + x.signbit(),
    "running products": lambda x: (x / 4 + 1).cumprod(-1),
    "running extremes": lambda x: (*x.cummax(-1), *x.cummin(0)),
    "running logarithms": lambda x: (x.logcumsumexp(-1), x.logcumsumexp(0)),
    "sorted": lambda x: (*x.sort(dim=-1, stable=True), *x.sort(dim=0, descending=True, stable=True)),
    "the greatest": lambda x: (x.softmax(-1).topk(3), x.topk(2, dim=0, largest=False), x.median(1)),
}


@pytest.mark.parametrize("name", RARE)
def test_rarer_operators(name):
    function = RARE[name]
    f = compiled(function, fullgraph=True, dynamic=False)
    for sizes in ((5, 7), (33, 200), (64, 1000)):
        x = random(*sizes)
        assert_as_accurate(f(x), function(x), [each.double() for each in leaves(function(x.double()))])
    assert ferrite.last_compile().kernels


def test_integers():
    def function(x, y):
        return torch.gcd(x, y), torch.lcm(x, y), x**y, x.abs() ** 3, x.sort(dim=1, stable=True)

    for dtype in (torch.int64, torch.int32, torch.int16):
        x, y = (torch.randint(-9, 9, (40, 30), device=DEVICE, dtype=dtype) for _ in range(2))
        for found, wanted in zip(leaves(compiled(function)(x, y)), leaves(function(x, y)), strict=True):
            assert torch.equal(found, wanted)


LONG = {
    "sums": lambda x: x.cumsum(-1),
    "extremes": lambda x: x.cummax(-1),
    "logarithms": lambda x: x.logcumsumexp(-1),
    "down": lambda x: x.t().contiguous().cumsum(0),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LONG)
def test_long_scans(name, dynamic):
    function = LONG[name]
    f = compiled(function, fullgraph=True, dynamic=dynamic)
    for sizes in ((2, 200_000), (1, 1 << 20), (3, 99_999)):
        x = random(*sizes)
        assert_as_accurate(f(x), function(x), [each.double() for each in leaves(function(x.double()))])
        assert torch.equal(leaves(f(x))[0], leaves(f(x))[0]), "the same every time"
    assert ferrite.last_compile().kernels


def test_experts_are_chosen_by_kernels():
    def function(x, w):
        weights, experts = (x @ w).softmax(-1, dtype=torch.float32).topk(4)
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts

    x, w = random(512, 64), random(64, 32)
    found, wanted = compiled(function, fullgraph=True)(x, w), function(x, w)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


TINY = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", TINY)
def test_floats_of_8_bits_are_eagers_bit_for_bit(dtype):
    def function(x, codes):
        return (x * 1).to(dtype), codes.view(dtype).float() + 0

    every = torch.arange(-(1 << 15), 1 << 15, device=DEVICE, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    codes = torch.arange(256, device=DEVICE, dtype=torch.uint8)
    f = compiled(function, fullgraph=True)
    for x in (every, every.float() * 1.01, random(4000).half() * 300, random(4000).double() * 400):
        found, wanted = f(x, codes), function(x, codes)
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            none = one.float().isnan() & other.float().isnan()
            bits = [each.view(torch.uint8).view(*one.shape, -1)[~none] for each in (one, other)]
            assert torch.equal(*bits)
    assert ferrite.last_compile().kernels


def test_scaled_floats_of_8_bits():
    def function(x):
        scale = 448 / x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
        return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale

    x = random(64, 1000, dtype=torch.bfloat16)
    torch.testing.assert_close(compiled(function, fullgraph=True)(x), function(x), rtol=0.07, atol=1e-3)
    assert ferrite.last_compile().kernels


def rotated(q, angles):
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(q.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotations_by_complex_numbers(dtype):
    q, angles = random(2, 8, 50, 64, dtype=dtype), random(50, 32)
    found, wanted = compiled(rotated, fullgraph=True)(q, angles), rotated(q, angles)
    torch.testing.assert_close(found, wanted, rtol=EPSILON[dtype], atol=EPSILON[dtype])
    assert ferrite.last_compile().kernels


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers(dtype):
    def function(x, y):
        return (x * y + 1).abs(), (x.conj() * y).sum(0), x / y, (x + 2j).angle(), (x.real * y).cumsum(1), x == y

    x, y = random(40, 30, dtype=dtype), random(40, 30, dtype=dtype)
    for found, wanted in zip(compiled(function, fullgraph=True)(x, y), function(x, y), strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    assert ferrite.last_compile().kernels


def test_gradients_of_complex_numbers():
    grads = []
    for run in (compiled(rotated), rotated):
        torch.manual_seed(0)
        q, angles = random(2, 3, 5, 8).requires_grad_(), random(5, 4).requires_grad_()
        run(q, angles).square().sum().backward()
        grads.append((q.grad, angles.grad))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_scatters_are_deterministic_where_torch_is_to_be():
    def function(x, i, s):
        return x.index_add(0, i, s), x.index_put((i,), s, accumulate=True), x.scatter_add(0, i[:, None].expand_as(s), s)

    x, s = random(16, 64), random(20000, 64)
    i = torch.randint(0, 16, (20000,), device=DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        f = compiled(function, fullgraph=True)
        first, second, wanted = f(x, i, s), f(x, i, s), function(x, i, s)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other, eager in zip(first, second, wanted, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, eager, rtol=1e-4, atol=1e-3)


def test_inputs_are_written_as_in_eager():
    def function(x, state):
        state.mul_(0.9).add_(x, alpha=0.1)
        x[1:3] = 0
        return state.softmax(-1), x.view(-1)[5:]

    f, runs = compiled(function, fullgraph=True), []
    for run in (f, function):
        torch.manual_seed(1)
        x, state = random(8, 16), random(8, 16)
        kept = [run(x, state) for _ in range(3)]
        runs.append((leaves(kept), x, state))
        assert kept[-1][1].data_ptr() == x.data_ptr() + 20
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)


def test_random_numbers_and_the_state_of_the_generator():
    def function(x):
        return F.dropout(x, 0.3) + torch.rand_like(x), torch.randint(0, 9, (5,), device=x.device)

    f, x = compiled(function, fullgraph=True), random(70, 30)
    runs = []
    for run in (f, function):
        torch.cuda.manual_seed(3)
        runs.append([*(leaves([run(x) for _ in range(3)])), torch.cuda.get_rng_state()])
    torch.testing.assert_close(*runs)


def test_copies_between_devices():
    def function(x, host, number):
        y = (x * number).relu()
        back = y.sum(1).cpu() + host
        return y + back.to(DEVICE)[:, None] * 2, back.cos(), x.to("cpu", torch.float64).mean()

    f = compiled(function)
    for _ in range(3):
        given = random(16, 8), torch.randn(16), torch.tensor(0.3)
        found, wanted = f(*given), function(*given)
        for one, other in zip(found, wanted, strict=True):
            assert one.device == other.device
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_side_stream_and_results_used_elsewhere():
    f, side = compiled(FUNCTIONS["softmax"]), torch.cuda.Stream()
    for _ in range(20):
        x, w = random(512, 512), random(512)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = f(x, w)
            x.record_stream(side)
        torch.cuda.current_stream().wait_stream(side)
        found.record_stream(torch.cuda.current_stream())
        torch.testing.assert_close(found + 1, FUNCTIONS["softmax"](x, w) + 1)


def test_too_little_memory_is_torchs_error():
    """And the process goes on."""
    f = compiled(lambda x: (x.unsqueeze(1) * x.unsqueeze(0)).tanh())
    small = random(300)
    f(small)
    free, _total = torch.cuda.mem_get_info()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        f(random(int((free / 4) ** 0.5 * 1.6)))
    torch.testing.assert_close(f(small), (small.unsqueeze(1) * small.unsqueeze(0)).tanh())


def child(source, **environment):
    made = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, **environment},
    )
    return made.stdout.strip(), made.stderr[-2000:]


OUTSIDE = """
import torch
def function(w, i):
    return w[i] * 2
run = torch.compile(function, backend="ferrite", options={"strict": True}) if COMPILED else function
w = torch.randn(10, 4, device="cuda")
run(w, torch.tensor([1, 2], device="cuda"))
got = run(w, torch.tensor([1, 12], device="cuda"))
print("returned")
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print(type(error).__name__, str(error).splitlines()[0])
try:
    print(torch.ones(2, device="cuda").sum().item())
except RuntimeError as error:
    print(type(error).__name__)
print(torch.ones(2).sum().item())
"""


def test_an_index_that_points_outside():
    """Eager's error, where eager waits; what goes on afterwards, goes on."""
    eager, _ = child(OUTSIDE.replace("COMPILED", "False"))
    ours, problems = child(OUTSIDE.replace("COMPILED", "True"))
    assert ours == eager, problems


OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, torch.tensor(0.01, device=DEVICE), capturable=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_optimizers(name):
    """Of many parameters, few launches; of a parameter that is not aligned, too."""
    sizes = [(768, 300), (300,), (7,), (0,), (33, 5), (), (1,), (4096, 64), (12,), (2, 8), (5000,), (64, 64)] * 3
    memory = random(100_000)

    def trained(compiled_step, dtype):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(random(size).to(dtype)) for size in sizes]
        optimizer = OPTIMIZERS[name](parameters)
        step = compiled(lambda: optimizer.step()) if compiled_step else optimizer.step
        for place in range(4):
            for parameter in parameters:
                parameter.grad = random(parameter.shape).to(dtype)
            if place == 2:
                parameters[1].grad = memory[1:301].to(dtype) if dtype == torch.float64 else memory[1:301]
            step()
        torch.cuda.synchronize()
        return [parameter.detach() for parameter in parameters]

    eager, exact = trained(False, torch.float32), trained(False, torch.float64)
    assert_as_accurate(trained(True, torch.float32), eager, exact)
    assert len(ferrite.last_compile().kernels) <= 16


TWICE = """
import torch, ferrite
from ferrite.runtime.cuda import kernels
asked = []
kept = kernels.answers
kernels.answers = lambda requests: (asked.extend(requests), kept(requests))[1]
def function(x, w):
    return (x * w).softmax(-1).sum(0), (x @ w.diag()).relu() + 1
x, w = torch.randn(64, 32, device="cuda", requires_grad=True), torch.randn(32, device="cuda")
a, b = torch.compile(function, backend="ferrite", options={"strict": True})(x, w)
(a.sum() + b.sum()).backward()
torch.testing.assert_close(a, function(x, w)[0], rtol=1e-5, atol=1e-5)
print(len(asked) > 0, [outcome.result for outcome in ferrite.last_compile().cache])
"""


def test_a_second_process_compiles_nothing(tmp_path):
    settings = {"FERRITE_CACHE": "1", "FERRITE_CACHE_DIR": str(tmp_path)}
    first, problems = child(TWICE, **settings)
    assert first == "True ['miss', 'miss']", problems
    second, problems = child(TWICE, **settings)
    assert second == "False ['hit', 'hit']", problems


WITHOUT = """
import sys, warnings
sys.modules["triton"] = None
import torch, ferrite
x = torch.randn(50, device="cuda")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for function in (lambda x: x.sin() + 1, lambda x: x.cos() + 1):
        assert torch.equal(torch.compile(function, backend="ferrite")(x), function(x))
print(sum("nothing is compiled to kernels for the GPU" in str(each.message) for each in caught))
print(len(ferrite.last_compile().kernels))
"""


def test_without_triton_it_is_eager_and_says_so_once():
    found, problems = child(WITHOUT)
    assert found.split() == ["1", "0"], problems
