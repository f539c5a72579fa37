"""Functions that neither Triton nor CUDA's library has, in kernels for a GPU: as near to exact ones as eager's."""

from __future__ import annotations

import math
from importlib.util import find_spec

import mpmath
import pytest
import torch

from ferrite.schedule.plan import make_plan
from tests.gpu_plans import lowered, run_plan, scheduling

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
INF, NAN = math.inf, math.nan
LINE = [*(x / 8 for x in range(-60, 60)), 1e-6, 30.0, -50.25, 200.0]
ODD = [0.0, INF, NAN]
DEGREES = [-1.0, 0.0, 1.0, 2.0, 3.7, 5.0, 9.0, 12.0, 40.0, NAN]
PLACES = [-3.0, -1.5, -1.0, -0.99, -0.5, 0.0, 0.3, 0.7, 1.0, 1.5, 4.0, NAN]
EXPONENTS = [0.5, 1.0, 1.5, 2.0, 3.0, 4.5, 12.0, 60.0, NAN]
STARTS = [-2.5, -2.0, 0.0, 0.3, 1.0, 1.7, 30.0, 1e5, NAN]
SHAPES = [0.0, 0.01, 0.3, 1.0, 2.5, 30.0, 199.0, 201.0, 1000.0, 1e5, -1.0, NAN, INF]
BOUNDS = [0.0, 1e-3, 0.2, 1.0, 2.2, 33.0, 205.0, 1e3, 1.003e5, -1.0, NAN, INF]
POLYNOMIALS = [
    *(f"{which}chebyshev_polynomial_{kind}" for which in ("", "shifted_") for kind in "tuvw"),
    *("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"),
]
ONE = {
    "airy_ai": torch.special.airy_ai,
    "spherical_bessel_j0": torch.special.spherical_bessel_j0,
    **{
        name: getattr(torch.special, name)
        for name in (f"{which}modified_bessel_k{order}" for which in ("", "scaled_") for order in (0, 1))
    },
    **{f"polygamma {n}": lambda x, n=n: torch.polygamma(n, x) for n in (0, 1, 2, 5, 200)},
}
# Where eager's are not exact to the last digits in double precision either.
EXACT = {"airy_ai": mpmath.airyai, "polygamma 0": mpmath.digamma, "polygamma 1": lambda x: mpmath.polygamma(1, x)}


def pairs(left, right):
    return [each.reshape(-1).clone() for each in torch.meshgrid(torch.tensor(left), torch.tensor(right), indexing="ij")]


def made_by_kernels(function, given):
    made = lowered(function, *given)
    plan = make_plan(made.program, {"cpu": scheduling()}, verify=True)
    assert not plan.not_compiled, plan.not_compiled
    (found,) = run_plan(plan, [each.clone() for each in given], made.objects)
    return found


def exact_of(name, function, given):
    exact = function(*(each.double() for each in given))
    if name in EXACT:
        with mpmath.workdps(40):
            values = [
                float(EXACT[name](x)) if math.isfinite(y) else y
                for x, y in zip(given[0].tolist(), exact.tolist(), strict=True)
            ]
        exact = torch.tensor(values, dtype=torch.float64)
    return exact


def assert_near(name, function, given, least):
    """No number is farther from the exact one than eager's is, or than `least` of it."""
    found, eager, exact = made_by_kernels(function, given), function(*given), exact_of(name, function, given)
    finite = eager.isfinite() & exact.isfinite() & (exact.abs() < torch.finfo(found.dtype).max)
    away, allowed = (each.double().sub(exact).abs()[finite] for each in (found, eager))
    allowed = allowed.maximum(exact.abs()[finite] * least).clamp_min(torch.finfo(found.dtype).tiny)
    assert bool((away <= allowed).all()), [each[finite][away > allowed][:5] for each in (*given, found, eager)]
    ends = ~eager.isfinite() & (eager.double().nan_to_num(7.0) == exact.nan_to_num(7.0))
    torch.testing.assert_close(found[ends], eager[ends], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ONE)
def test_functions_of_one_number(name, dtype):
    given = LINE + ODD
    if "polygamma" in name:  # eager's has no poles below zero
        given = [x for x in LINE if x > 0 or x != int(x)]
    assert_near(name, ONE[name], [torch.tensor(given, dtype=dtype)], 1e-7 if dtype is torch.float32 else 2e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", POLYNOMIALS)
def test_orthogonal_polynomials(name, dtype):
    given = [each.to(dtype) for each in pairs(PLACES, DEGREES)]
    assert_near(name, getattr(torch.special, name), given, 1e-7 if dtype is torch.float32 else 1e-12)


def test_a_polynomial_beside_other_work_is_one_kernel():
    def function(x, n):
        return (torch.special.legendre_polynomial_p(x * 0.5, n) + 1).sum(-1)

    x, n = torch.randn(20, 50), torch.randint(0, 30, (50,)).float()
    plan = make_plan(lowered(function, x, n).program, {"cpu": scheduling()}, verify=True)
    assert len(plan.launches) == 1
    torch.testing.assert_close(made_by_kernels(function, [x, n]), function(x, n), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeta(dtype):
    assert_near("zeta", torch.special.zeta, [each.to(dtype) for each in pairs(EXPONENTS, STARTS)], 1e-7)


@pytest.mark.parametrize("function", [torch.igamma, torch.igammac])
def test_incomplete_gamma(function):
    assert_near("gamma", function, pairs(SHAPES, BOUNDS), 1e-7)


def test_incomplete_gamma_of_doubles_is_a_call():
    made = lowered(torch.igamma, torch.rand(9, dtype=torch.float64), torch.rand(9, dtype=torch.float64))
    plan = make_plan(made.program, {"cpu": scheduling()}, verify=True)
    assert not plan.launches, "not exact enough for 64 bits"
