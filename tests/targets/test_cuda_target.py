"""Graphs go through the whole compiler to a GPU that is simulated: machine code is made, and Triton's interpreter runs
the same source with the arguments that a launch would have."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.machines import GpuMachine

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None):
    from tests.targets.simulated_cuda import SimulatedTarget

    target = SimulatedTarget()
    monkeypatch.setattr("ferrite.backend.targets_for", lambda options, devices: {"cpu": target})
    return target


def compiled(function, **more):
    return torch.compile(function, backend="ferrite", options={"strict": True}, fullgraph=True, **more)


def assert_same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5, equal_nan=True)
    for one, other in zip(found, wanted, strict=True):
        assert one.stride() == other.stride()


def chain(x, w):
    return F.silu(x) * w + x.tanh(), (x > 0).sum(-1)


def softmax_of_product(x, w):
    y = torch.softmax(x @ w.t(), -1)
    return torch.relu(y + 1).sum(0), y * 2


def norms(x, w):
    return F.layer_norm(x, x.shape[-1:], w[0], w[1]), x.bfloat16().mean(0)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [chain, softmax_of_product, norms])
def test_kernels_for_a_gpu_compute_what_eager_does(gpu, function, dynamic):
    x, w = torch.randn(6, 20), torch.randn(6, 20)
    f = compiled(function, dynamic=dynamic)
    for _ in range(2):  # the first call goes another way than all others
        assert_same(f(x, w), function(x, w))
    ways = {each.way for each in gpu.driver.launched}
    assert len(ways) == 2
    assert "python" in ways
    assert ferrite.last_compile().kernels
    if dynamic:
        x, w = torch.randn(9, 70), torch.randn(9, 70)
        assert_same(f(x, w), function(x, w))


def test_short_and_long_rows_are_one_program(gpu):
    def attention(scores, values):
        return torch.softmax(scores, -1) * 2, F.layer_norm(values, values.shape[-1:])

    f = compiled(attention, dynamic=True)
    records = []
    for sizes in ((6, 20), (6, 32), (3, 33), (2, 90)):  # blocks hold 32: as many as cover what came first
        given = torch.randn(sizes), torch.randn(sizes)
        assert_same(f(*given), attention(*given))
        records.append(ferrite.last_compile())
    assert all(record is records[0] for record in records), "nothing is compiled again"


def test_special_functions_are_kernels(gpu):
    def function(x, n):
        y = torch.special.legendre_polynomial_p(x, n) + torch.igamma(x.abs() + 1, x.abs() * 2)
        return y * torch.special.zeta(x.abs() + 1.5, x.abs() + 0.5), torch.special.modified_bessel_k0(x.abs() + 0.1)

    x, n = torch.randn(6, 20), torch.arange(20.0)
    found, wanted = compiled(function)(x, n), function(x.double(), n.double())
    torch.testing.assert_close(found, tuple(each.float() for each in wanted), rtol=1e-5, atol=1e-5)
    assert not ferrite.last_compile().eager_calls


def test_without_llvm_python_launches(gpu, monkeypatch):
    monkeypatch.setattr("ferrite.runtime.cuda.kernels.find_spec", lambda name: None)
    f, x, w = compiled(chain), torch.randn(3, 8), torch.randn(8)
    for _ in range(2):
        assert_same(f(x, w), chain(x, w))
    assert {each.way for each in gpu.driver.launched} == {"python"}


def test_gradients(gpu):
    x = torch.randn(3, 4, requires_grad=True)
    compiled(lambda x: (x.tanh() * x).sum())(x).backward()
    y = x.detach().clone().requires_grad_()
    (y.tanh() * y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert len(gpu.driver.launched) >= 2


def many(a, b, c):
    return a * 2, b.softmax(-1), c.sum(0)


def test_many_launches_are_a_graph_whose_arguments_are_renewed(gpu, monkeypatch):
    monkeypatch.setattr("ferrite.runtime.cuda.runs.gpu_machine", lambda: GpuMachine(min_graph_launches=2))
    f = compiled(many)
    for place in range(4):
        given = torch.randn(5, 7), torch.randn(11, 3), torch.randn(2, 3, 4)  # at other addresses each time
        assert_same(f(*given), many(*given))
        assert gpu.driver.launched[-1].way == ("graph" if place else "python")
    count = len(gpu.driver.nodes)
    assert count >= 2
    gpu.driver.capturing = 1  # a graph cannot be launched into another: its kernels can
    assert_same(f(*given), many(*given))
    assert [each.way for each in gpu.driver.launched[-count:]] == ["python"] * count


def test_memory_that_is_not_aligned_has_code_of_its_own(gpu):
    f, memory = compiled(lambda x: x * 2 + 1), torch.randn(80)
    for offset in (0, 4, 1, 3, 0):
        x = memory[offset : offset + 64]
        torch.testing.assert_close(f(x), x * 2 + 1)
        assert gpu.driver.launched[-1].aligned == (offset % 4 == 0)
    assert [each.way for each in gpu.driver.launched] == ["python", "native", "python", "native", "native"]


def test_only_kernels_of_memory_that_is_not_aligned_have_other_code(gpu, monkeypatch):
    monkeypatch.setattr("ferrite.runtime.cuda.runs.MAX_VARIANTS", 2)
    f, memory = compiled(many), torch.randn(200)
    offsets = [(0, 0, 0), (1, 0, 0), (3, 0, 0), (0, 2, 0), (0, 1, 5), (1, 1, 1), (0, 0, 0), (2, 0, 0)]
    for place, (a, b, c) in enumerate(offsets * 2):
        given = memory[a : a + 35].view(5, 7), memory[b : b + 33].view(11, 3), memory[c : c + 24].view(2, 3, 4)
        before = len(gpu.driver.launched)
        assert_same(f(*given), many(*given))
        launched = gpu.driver.launched[before:]
        if place == len(offsets) + 1:
            assert sorted(each.aligned for each in launched) == [False, True, True]
            assert {each.way for each in launched} == {"graph"}


def written(a, b, c):
    a.add_(1)
    b.copy_(b.softmax(-1))
    c.mul_(2)


def test_only_arguments_that_changed_are_renewed(gpu):
    f, given = compiled(written), [torch.randn(5, 7), torch.randn(11, 3), torch.randn(2, 3, 4)]

    def renewed():
        wanted = [each.clone() for each in given]
        written(*wanted)
        before = len(gpu.driver.renewed)
        f(*given)
        assert_same(given, wanted)
        return len(gpu.driver.renewed) - before

    renewed()
    count = renewed()
    assert count >= 3
    assert renewed() == 0
    given[0] = torch.randn(5, 7)
    assert renewed() == 1
    assert renewed() == 0
    given[1], given[2] = torch.randn(11, 3), torch.randn(2, 3, 4)
    gpu.driver.refuses_to_renew = True  # then Python launches, and the next call renews what was not
    renewed()
    assert gpu.driver.launched[-1].way == "python"
    gpu.driver.refuses_to_renew = False
    assert renewed() >= 1
    assert gpu.driver.launched[-1].way == "graph"
    assert renewed() == 0


def momentum(parameters, gradients, buffers):
    torch._foreach_mul_(buffers, 0.9)
    torch._foreach_add_(buffers, gradients)
    torch._foreach_add_(parameters, buffers, alpha=-0.1)


def test_a_step_over_lists_is_one_launch_and_one_that_writes_its_table(gpu):
    f, memory = compiled(momentum), torch.randn(100)
    lists = [[torch.randn(size) for size in (15, 7, 0, 40, 18)] for _ in range(3)]
    for place in range(5):
        lists[1] = [torch.randn(len(each)) for each in lists[1]]  # at other addresses each time
        if place == 3:
            lists[1][0] = memory[1:16]  # at one that is not aligned
        wanted = [[each.clone() for each in some] for some in lists]
        before = len(gpu.driver.launched)
        f(*lists)
        momentum(*wanted)
        for found, right in zip(lists, wanted, strict=True):
            assert_same(found, right)
        table, group = gpu.driver.launched[before:]
        assert table.entry == "write_64_words"
        assert group.words[0] == table.words[0]
        assert (table.aligned, group.aligned) == (True, place != 3)
        assert group.way == ("python" if place in (0, 3) else "native")


def test_the_step_of_an_optimizer_is_one_launch_and_one_that_writes_its_table(gpu):
    ours, eagers = ([torch.nn.Parameter(torch.arange(size) / 9) for size in (7, 16, 3, 5)] for _ in range(2))
    optimizers = [torch.optim.Adam(parameters, 0.01, foreach=False) for parameters in (ours, eagers)]
    step = torch.compile(lambda: optimizers[0].step(), backend="ferrite", options={"strict": True})
    for _ in range(2):
        for one, other in zip(ours, eagers, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        step()
        optimizers[1].step()
        assert_same(ours, eagers)
    assert len(gpu.driver.launched) == 4


def two_lists(*tensors):
    return [*(x.sin() for x in tensors[:4]), *(x * x for x in tensors[4:])]


def test_tables_are_written_before_all_else_and_come_from_the_cache(gpu, artifact_cache):
    given = [torch.randn(size) for size in (3, 5, 7, 9, 4, 6, 8, 10)]
    for expected in ("miss", "hit"):
        f = compiled(two_lists)
        for _ in range(2):
            assert_same(f(*given), two_lists(*given))
        assert [outcome.result for outcome in ferrite.last_compile().cache] == [expected]
        assert [each.way for each in gpu.driver.launched[-4:]] == ["graph"] * 4
        assert gpu.driver.free == [True, True, False, False]
        assert [each.entry.startswith("write") for each in gpu.driver.launched[-4:]] == gpu.driver.free
        torch.compiler.reset()


def test_tensors_of_a_list_that_overlap_are_written_one_after_the_other(gpu):
    def function(*tensors):
        for x in tensors:
            x.mul_(2).add_(1)

    base = [torch.randn(80), torch.randn(80)]
    given = [[each[start : start + 32] for start in (0, 16, 32, 40)] for each in base]
    base[1].copy_(base[0])
    compiled(function)(*given[0])
    function(*given[1])
    assert_same(base[:1], base[1:])


def test_another_context_is_seen_to(gpu):
    f, x = compiled(lambda x: x * 2 + 1), torch.randn(8)
    f(x)
    gpu.driver.current = 5
    torch.testing.assert_close(f(x), x * 2 + 1)
    assert gpu.driver.launched[-1].way == "native"
    assert gpu.driver.current == 5


def test_nothing_is_launched_for_nothing(gpu):
    def function(x):
        return x[x > 0] * 2 + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        f = compiled(function)
        for x in (torch.randn(9), -torch.rand(9), torch.rand(4), -torch.rand(5)):
            torch.testing.assert_close(f(x), function(x))


def test_a_kernel_that_triton_has_no_source_for_is_no_failure(gpu, monkeypatch):
    from ferrite.errors import NotGenerated
    from ferrite.runtime.cuda import kernels

    kept = kernels.unit_of

    def unit_of(kernel, processor):
        if "= exp(" in str(kernel):
            raise NotGenerated("no exponentials today")
        return kept(kernel, processor)

    monkeypatch.setattr(kernels, "unit_of", unit_of)

    def function(x):
        return (x.exp() + 1).relu(), x * 3

    x = torch.randn(5, 6)
    assert_same(compiled(function)(x), function(x))
    record = ferrite.last_compile()
    assert {call.reason for call in record.eager_calls} == {"no exponentials today"}
    assert record.kernels


def test_a_kernel_that_would_share_more_than_there_is_is_no_failure(gpu, monkeypatch):
    from ferrite.runtime.cuda import kernels

    kept = kernels.answers

    def answers(requests):
        return kept([{**request, "shared": -1 if "exp" in request["source"] else 1 << 17} for request in requests])

    monkeypatch.setattr(kernels, "answers", answers)
    monkeypatch.setattr(kernels.KNOWN, "code", {})

    def function(x):
        return x.softmax(-1), x * 3

    x = torch.randn(6, 5)
    assert_same(compiled(function)(x), function(x))
    reasons = {call.reason for call in ferrite.last_compile().eager_calls}
    assert len(reasons) == 1
    assert "bytes; this GPU has -1" in reasons.pop()


@pytest.mark.parametrize("backward", [False, True])
def test_operators_without_kernels_are_one_call_of_eager_each(gpu, backward):
    """Not loops that are interpreted: each operation of these would be a kernel on a GPU."""

    def function(x, y):
        return (x * y.t()).abs(), (x + 2).exp().real, torch.softmax(y.imag, -1)

    x, y = (torch.randn(4, 4, dtype=torch.complex64, requires_grad=backward) for _ in range(2))
    f = compiled(function)
    for _ in range(2):
        found, wanted = f(x, y), function(x, y)
        assert_same(found, wanted)
    if backward:
        grads = [torch.autograd.grad(sum(each.sum() for each in result), (x, y)) for result in (f(x, y), wanted)]
        assert_same(*grads)
    record = ferrite.last_compile()
    assert "interpret_" not in record.graphs[0].source
    assert "aten.exp.default" in {call.operator for call in record.eager_calls if "c64" in call.reason}
    assert record.kernels  # of what has parts


def test_sizes_that_rows_lie_apart_by_are_promised_until_another_comes(gpu):
    """Code for rows that begin where a vector can be loaded; once a size is no multiple of 16, other code."""

    def function(x, w):
        return (x * w).softmax(-1)

    f = compiled(function, dynamic=True)
    promises = []
    for rows, columns in ((6, 32), (7, 48), (5, 33), (5, 20), (3, 64), (9, 33)):
        x, w = torch.randn(rows, columns), torch.randn(columns)
        assert_same([f(x, w)], [function(x, w)])
        kernel = list(gpu.driver.functions.values())[-1]
        promises.append(max(kernel.request["aligned"]) >= kernel.pointers)
        assert gpu.driver.launched[-1].aligned
    assert promises[:3] == [True, True, False]
    assert [each.way for each in gpu.driver.launched] == ["python", "native", "python", "native", "native", "native"]


def test_sizes_that_are_no_multiples_are_not_promised(gpu):
    f = compiled(lambda x: x.softmax(-1), dynamic=True)
    for rows, columns in ((6, 33), (7, 48)):
        x = torch.randn(rows, columns)
        assert_same([f(x)], [x.softmax(-1)])
    assert {tuple(each.request["aligned"]) for each in gpu.driver.functions.values()} == {(0, 1)}


def test_indices_have_32_bits_until_sizes_come_that_need_more(gpu, monkeypatch):
    """One source; code for 64 bits is made when it is needed."""
    from ferrite.codegen.triton import emit, indices

    def function(x):
        return x.sum(0), (x * 2).softmax(-1), torch.arange(x.shape[0]) * 3

    monkeypatch.setattr(indices, "INDEX_LIMIT_IN_32_BITS", 1 << 12)
    emit.fixed_launch.cache_clear()
    f = compiled(function, dynamic=True)
    narrow = []
    for rows, columns in ((6, 20), (7, 24), (90, 70), (100, 70), (8, 20)):
        x = torch.randn(rows, columns)
        assert_same(f(x), function(x))
        narrow.append([each.request["constants"].get("NARROW") for each in gpu.driver.functions.values()])
    emit.fixed_launch.cache_clear()
    assert set(narrow[0]) == {1}
    assert narrow[1] == narrow[0]
    assert 0 in narrow[2]
    assert narrow[4] == narrow[3] == narrow[2], "nothing is made twice"


def test_products_of_sizes_are_promised_to_be_even_until_others_come(gpu):
    """Of 24 x 24 images, rows of 576 begin where a vector can be loaded, though 24 is no multiple of 16."""

    def function(x):
        return x.sum((2, 3))

    f = compiled(function, dynamic=True)
    even = []
    for side in (24, 28, 26, 24, 12):
        x = torch.randn(2, 3, side, side)
        assert_same([f(x)], [function(x)])
        even.append({each.request["constants"]["EVEN_0"] for each in gpu.driver.functions.values()})
    assert even == [{1}, {1}, {0, 1}, {0, 1}, {0, 1}]
