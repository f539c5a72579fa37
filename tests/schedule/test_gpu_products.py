"""Matrix products on a GPU as kernels of our own: blocks of factors, what follows inside, sums in pieces."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ferrite.passes  # noqa: F401  # registers torch.ops.ferrite
from ferrite.codegen.triton import kernel_source, unsupported_operation
from ferrite.ir.kernel.nodes import Kernel
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.machines import GpuMachine
from ferrite.schedule.gpu import GpuScheduling
from ferrite.schedule.gpu.products import config_for, likely_config
from ferrite.schedule.plan import make_plan
from ferrite.tune import CANDIDATES, ProductConfig, ProductProblem
from tests.gpu_plans import lowered, run_plan

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

quick = pytest.mark.quick
product = torch.ops.ferrite.product.default
wide_product = torch.ops.ferrite.wide_product.default
SMALL = ProductConfig(16, 32, 16, warps=4, stages=3, in_column=4)


class Always(dict[ProductProblem, ProductConfig]):
    """One configuration for all problems."""

    def __init__(self, config: ProductConfig) -> None:
        self.config = config

    def get(self, problem: ProductProblem, otherwise: Any = None) -> ProductConfig:
        return self.config


def random(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(sizes).to(dtype)


def checked(fn: Any, *inputs: torch.Tensor, kernels: int = 1, triton: bool = True) -> list[Kernel]:
    """The kernels of a function, whose results are as near to those in double precision as eager's."""
    scheduling = GpuScheduling(GpuMachine(), unsupported_operation, "cpu", Always(SMALL))
    made = lowered(fn, *inputs)
    plan = make_plan(made.program, {"cpu": scheduling}, verify=True)
    assert not plan.not_compiled, plan.not_compiled
    found = [launch.kernel for launch in plan.launches]
    assert len(found) == kernels, [str(kernel) for kernel in found]
    exact = as_list(fn(*(each.double() if each.is_floating_point() else each for each in inputs)))
    results = run_plan(plan, [each.clone() for each in inputs], made.objects, triton)
    for result, eager, right in zip(results, as_list(fn(*inputs)), exact, strict=True):
        assert (result.dtype, result.shape) == (eager.dtype, eager.shape)
        torch.testing.assert_close(result.isfinite(), right.isfinite())
        torch.testing.assert_close(result.isnan(), right.isnan())
        finite = right.isfinite()
        far, allowed = ((each.double() - right)[finite].abs().max() for each in (result, eager))
        unit = torch.finfo(result.dtype).eps * right[finite].abs().max()
        assert far <= allowed + unit, (far, allowed, unit)
    return found


def as_list(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return product(a, b) if a.dtype is not torch.float64 else a @ b


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """As the pass writes it in 16 bits: rounded once."""
    return (
        (wide_product(x, weight.t()) + bias).to(x.dtype) if x.dtype is not torch.float64 else F.linear(x, weight, bias)
    )


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "columns", "summed"), [(32, 64, 48), (70, 45, 37), (2, 200, 16), (17, 16, 130)])
def test_products_of_all_sizes(rows, columns, summed, dtype):
    (kernel,) = checked(mm, random(rows, summed, dtype=dtype), random(summed, columns, dtype=dtype))
    source = kernel_source(kernel, "product")
    assert source.count(" = multiply_add(") + source.count(" = add_product(") == 1
    assert ("mask" in source) == ((rows, columns, summed) != (32, 64, 48)), "masks only where blocks are not whole"
    assert parse_kernel(str(kernel)) == kernel


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_factors_that_lie_otherwise(left, right):
    a, b = random(20, 33), random(33, 40)
    checked(mm, a.t().contiguous().t() if left else a, b.t().contiguous().t() if right else b)


def test_the_meaning_of_the_loops():
    checked(mm, random(17, 16), random(16, 18), triton=False)


def test_batches():
    checked(mm, random(3, 18, 20), random(3, 20, 34))
    checked(mm, random(3, 18, 20), random(3, 34, 20).transpose(1, 2))


def test_neighbours_in_columns():
    """Seven blocks of rows, four of which are gone through for each block of columns."""
    (kernel,) = checked(mm, random(100, 16), random(16, 70))
    assert "some = tl.minimum(7 - first, 4)" in kernel_source(kernel, "product")


def test_infinity_stays_where_it_is():
    """The last block goes beyond what is summed: zero times infinity would be no number."""
    a, b = random(20, 37), random(37, 40)
    a[3, 36], b[36, 5], b[2, 7] = torch.inf, -torch.inf, torch.nan
    checked(mm, a, b)


# --- what follows -----------------------------------------------------------------------------------------------------


def test_a_layer_is_one_kernel():
    def layer(x, weight, bias, residual):
        y = linear(x, weight, bias)
        return F.gelu(y) + residual, y.float(), torch.relu(y)

    checked(layer, random(20, 33), random(40, 33), random(40), random(20, 40))


def test_a_layer_on_rows_of_a_batch_is_one_kernel():
    def layer(x, weight, bias, residual):
        y = linear(x.view(-1, 33), weight, bias).view(3, 7, 40)
        return torch.relu(y) + residual

    checked(layer, random(3, 7, 33), random(40, 33), random(40), random(3, 7, 40))


def test_what_is_at_other_points_is_another_kernel():
    def rows(a, b):
        return mm(a, b).float().softmax(-1)

    checked(rows, random(20, 33), random(33, 40), kernels=2)
    checked(lambda a, b, c: mm(mm(a, b), c), random(20, 33), random(33, 40), random(40, 17), kernels=2)


def test_why_something_is_not_inside():
    def fn(a, b, c):
        y = mm(a, b)
        return y.float().softmax(-1), mm(y, c)

    inputs = random(20, 33), random(33, 40), random(40, 17)
    made = lowered(fn, *inputs)
    plan = make_plan(made.program, {"cpu": GpuScheduling(GpuMachine(), unsupported_operation, "cpu")})
    reasons = {each.refusal.reason for each in plan.not_fused}
    assert reasons >= {
        "a matrix product begins a kernel of its own",
        "it is not at the points of the matrix product before it",
    }


# --- pieces -----------------------------------------------------------------------------------------------------------


def test_sums_in_pieces():
    """Another kernel adds the pieces up, with what follows inside."""
    problem = ProductProblem("bf16", 1, 16, 32, 128, "summed", "summed")
    tuned = {problem: ProductConfig(16, 32, 16, 4, 3, pieces=4)}
    scheduling = GpuScheduling(GpuMachine(), unsupported_operation, "cpu", tuned)
    x, weight, bias = random(16, 128), random(32, 128), random(32)
    made = lowered(linear, x, weight, bias)
    plan = make_plan(made.program, {"cpu": scheduling}, verify=True)
    assert len(plan.launches) == 2
    assert "multiply_add" in kernel_source(plan.launches[0].kernel, "product")
    (result,) = run_plan(plan, [x, weight, bias], made.objects)
    torch.testing.assert_close(result, F.linear(x.double(), weight.double(), bias.double()).bfloat16())


# --- what is no product -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs",
    [
        (random(3, 32), random(32, 4)),  # so few elements that most lanes would be idle
        (random(20, 8), random(8, 40)),  # short sums
        (random(20, 32, dtype=torch.float64), random(32, 40, dtype=torch.float64)),
    ],
)
def test_ordinary_sums(inputs):
    a, b = inputs
    for kernel in checked(lambda a, b: product(a, b), a, b):
        source = kernel_source(kernel, "product")
        assert "multiply_add" not in source
        assert "add_product" not in source


# --- configurations ---------------------------------------------------------------------------------------------------


@quick
def test_configurations_fit_a_multiprocessor():
    machine, small = GpuMachine(), GpuMachine(shared_bytes=100 << 10)
    for config in CANDIDATES:
        assert config.shared_bytes(2) <= machine.shared_bytes
        assert config.rows * config.columns // (32 * config.warps) <= 128, "sums that one thread has in registers"
        assert ProductConfig.parsed(str(config)) == config
    for rows in (1, 2, 16, 48, 64, 100, 512, 4096):
        for columns in (16, 96, 1000, 4096):
            for dtype, size in (("bf16", 2), ("f32", 4)):
                problem = ProductProblem(dtype, 1, rows, columns, 4096)
                config = config_for(problem, machine, {})
                assert config.shared_bytes(size) < machine.shared_bytes
                assert config_for(problem, small, {}).shared_bytes(size) < small.shared_bytes
                assert config_for(problem.in_pieces(config.pieces), machine, {}).pieces == 1
                assert ProductProblem.parsed(str(problem)) == problem


@quick
def test_large_products_have_large_blocks_and_thin_ones_pieces():
    machine = GpuMachine()
    large = likely_config(ProductProblem("bf16", 1, 4096, 4096, 4096), machine)
    thin = likely_config(ProductProblem("bf16", 1, 16, 1024, 4096), machine)
    assert (large.rows, large.columns, large.pieces, large.resident) == (128, 256, 1, True)
    older = likely_config(ProductProblem("bf16", 1, 4096, 4096, 4096), replace(machine, has_descriptors=False))
    assert (older.rows, older.columns, older.resident) == (128, 256, False)
    assert (thin.rows, thin.pieces) == (16, 4)
