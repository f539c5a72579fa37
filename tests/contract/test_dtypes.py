"""Every dtype, with the operators eager has for it."""

from __future__ import annotations

import pytest
import torch

from tests.compare import assert_same_as_eager, since

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
COMPLEX = [torch.complex64, torch.complex128]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
SPECIAL = [0.0, -0.0, 1.0, -1.5, float("inf"), float("-inf"), float("nan"), 1e-30, -65000.0, 448.0, 3e38]


@pytest.mark.quick
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float_arithmetic(dtype: torch.dtype, dynamic: bool) -> None:
    def compute(x: torch.Tensor, y: torch.Tensor) -> object:
        return x * y + 1, x / (y.abs() + 1), x - 2 * y, torch.maximum(x, y), (x > y).to(dtype), x.remainder(y)

    assert_same_as_eager(compute, lambda: [torch.randn(5, 37).to(dtype), torch.randn(37).to(dtype)], dynamic=dynamic)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float_functions_and_reductions_in_training(dtype: torch.dtype, rarely_dynamic: bool) -> None:
    def compute(x: torch.Tensor, w: torch.Tensor) -> object:
        y = torch.nn.functional.gelu(x @ w).tanh()
        return y.softmax(-1), y.exp().mean(0), y.var(1), torch.sigmoid(y).amax(1), y.cumsum(0)

    assert_same_as_eager(
        compute,
        lambda: [
            torch.randn(5, 8).to(dtype).requires_grad_(),
            torch.randn(8, 19).to(dtype).requires_grad_(),
        ],
        backward=True,
        dynamic=rarely_dynamic,
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_functions_of_one_element(dtype: torch.dtype) -> None:
    """Scalars, not vectors, compute these. On x86-64 LLVM made the conversion of a power to half precision a call of a
    function that no process has."""

    def compute(x: torch.Tensor, y: torch.Tensor) -> object:
        powers = x**y, y**x, x**2.5, 2.5**x, torch.copysign(x, y)
        return *powers, x.exp(), x.log1p(), x.sin(), x.tanh(), x.erf(), x.lgamma(), torch.atan2(x, y), x.fmod(y)

    assert_same_as_eager(compute, lambda: [torch.rand(()).to(dtype), torch.rand(1).to(dtype)])
    assert_same_as_eager(lambda x, y: x**y, lambda: [torch.rand(5, 1).to(dtype), torch.rand(5).to(dtype)])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values_to_the_bit(dtype: torch.dtype) -> None:
    """Signed zeros, infinities, NaN and rounding on conversion: operators whose result IEEE fixes."""

    def compute(x: torch.Tensor, y: torch.Tensor) -> object:
        rounded = x.round(), x.trunc(), x.floor(), x.ceil(), x.sign(), x.abs(), -x
        compared = x < y, x == y, x != y, x.isnan(), x.isinf(), x.signbit()
        # which of two zeros is the smaller eager leaves to the kernel that runs: adding zero makes both positive
        chosen = torch.where(x < y, x, y), torch.minimum(x, y) + 0.0, torch.maximum(x, y) + 0.0
        return (
            rounded,
            compared,
            chosen,
            x.clamp(-1, 1),
            x.relu() + 0.0,
            x + y,
            x * y,
            x / y,
            x.sqrt(),
            x.nan_to_num(),
            torch.copysign(x, y),
        )

    def inputs() -> list[torch.Tensor]:
        values = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
        return [values[:, None].expand(-1, len(SPECIAL)).contiguous(), values]

    assert_same_as_eager(compute, inputs, exact=False, dynamic=False)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_conversions_and_copies(dtype: torch.dtype, dynamic: bool) -> None:
    def compute(x: torch.Tensor, y: torch.Tensor) -> object:
        back = x.to(torch.float32), x.to(torch.bfloat16) * 2, x.to(torch.float16)
        return back, (y * 3).to(dtype), x.clone(), x.t().contiguous(), x[1:], x.view(torch.uint8) + 1

    def inputs() -> list[torch.Tensor]:
        return [torch.randn(4, 5).mul(20).to(dtype), torch.tensor(SPECIAL[:6] + SPECIAL[8:10])]

    assert_same_as_eager(compute, inputs, exact=False, dynamic=dynamic)


@pytest.mark.quick
def test_float8_scaled_and_cast_in_training(dynamic: bool) -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        scale = 448.0 / x.detach().abs().amax()
        return (x * scale).to(torch.float8_e4m3fn).to(torch.float32) / scale

    assert_same_as_eager(
        compute,
        lambda: [torch.randn(8, 8, requires_grad=True)],
        exact=False,
        backward=True,
        dynamic=dynamic,
    )


@pytest.mark.parametrize("dtype", [*SIGNED, torch.uint8], ids=str)
def test_integer_arithmetic_wraps_as_in_eager(dtype: torch.dtype, rarely_dynamic: bool) -> None:
    def compute(x: torch.Tensor, y: torch.Tensor) -> object:
        linear = x + y, x - y, x * y, x * 3 + 1, -x, x.abs()
        divided = x // y, x % y, torch.div(x, y, rounding_mode="trunc"), torch.fmod(x, y), x / y
        bits = x & y, x | y, x ^ y, ~x, x << 2, x >> 1
        compared = x < y, x == y, torch.minimum(x, y), torch.where(x > y, x, y), x.clamp(2, 50)
        return linear, divided, bits, compared

    def inputs() -> list[torch.Tensor]:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        y = torch.randint(1, 9, (64,)).to(dtype)
        y[::5] = high
        x = torch.randint(max(low, -1000), min(high, 1000), (64,)).to(dtype)
        x[:4] = torch.tensor([low, high, 0, 1], dtype=dtype)
        return [x, y]

    # to the bit: next to the largest integer, a bound relative to it would let any error pass
    assert_same_as_eager(compute, inputs, exact=False, dynamic=rarely_dynamic)


@pytest.mark.parametrize("dtype", [*SIGNED, torch.uint8, torch.bool], ids=str)
def test_integer_reductions(dtype: torch.dtype, rarely_dynamic: bool) -> None:
    def compute(x: torch.Tensor) -> object:
        whole = x.sum(), x.prod(), x.any(), x.all(), x.float().mean()
        return whole, x.sum(0), x.amax(1), x.int().argmax(1), x.cumsum(0), torch.count_nonzero(x, 1)

    def with_dtype() -> list[torch.Tensor]:
        return [torch.randint(0, 2, (5, 7)).to(dtype)]

    assert_same_as_eager(compute, with_dtype, dynamic=rarely_dynamic)


@since(2, 12)  # where
@pytest.mark.parametrize("dtype", UNSIGNED[1:], ids=str)
def test_wide_unsigned_integers(dtype: torch.dtype, rarely_dynamic: bool) -> None:
    """Eager has only some operators for these."""

    def compute(x: torch.Tensor, y: torch.Tensor) -> object:
        bits = x & y, x | y, x ^ y, x == y, x != y, x * y
        moved = x.clone(), x.reshape(4, -1).t().contiguous(), torch.cat([x, y]), x[:5], torch.zeros_like(x)
        converted = x.to(torch.int64), x.to(torch.float64), x.to(torch.uint8).to(dtype), x / 2
        return bits, moved, converted, torch.where(x == y, x, y), x.sum(), torch.full_like(x, 3)

    def inputs() -> list[torch.Tensor]:
        x = torch.arange(16).to(dtype)
        x[3:4].view(torch.uint8).fill_(255)
        return [x, torch.arange(16).flip(0).to(dtype)]

    # to the bit: next to the largest integer, a bound relative to it would let any error pass
    assert_same_as_eager(compute, inputs, exact=False, dynamic=rarely_dynamic)


def test_bool_logic(dynamic: bool) -> None:
    def compute(x: torch.Tensor, y: torch.Tensor) -> object:
        logic = x & y, x | y, x ^ y, ~x, x.logical_not(), torch.logical_xor(x, y)
        return logic, x + y, x * y, x == y, x.to(torch.float32) * 2, x.sum(1), x.masked_fill(y, True), x < y

    assert_same_as_eager(compute, lambda: [torch.rand(5, 9) > 0.5, torch.rand(5, 9) > 0.3], dynamic=dynamic)


ALL = [*FLOATS, *SIGNED, torch.uint8, torch.bool, *COMPLEX]


@pytest.mark.parametrize("source", ALL, ids=str)
def test_conversion_to_every_dtype(source: torch.dtype) -> None:
    def convert(x: torch.Tensor) -> list[torch.Tensor]:
        targets = ALL if source.is_complex else [*ALL, *FLOAT8, *UNSIGNED[1:]]
        return [x.to(target) for target in targets]

    def inputs() -> list[torch.Tensor]:
        # within the range of every dtype: what a conversion out of range gives, eager leaves to the machine
        return [torch.tensor([0, 1, 2, 3, 100, 5, 77, 64]).to(source)]

    assert_same_as_eager(convert, inputs, exact=False, dynamic=False)


@pytest.mark.parametrize("left", [torch.float16, torch.float32, torch.int32, torch.uint8, torch.bool], ids=str)
def test_type_promotion(left: torch.dtype) -> None:
    def compute(x: torch.Tensor, others: list[torch.Tensor], scalar: torch.Tensor) -> object:
        return [x + y for y in others], [x * y for y in others], x + scalar, x + 1, x * 0.5, x / 2, x + True

    others = [torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64]
    assert_same_as_eager(
        compute,
        lambda: [
            torch.arange(6).to(left),
            [torch.arange(6).to(t) for t in others],
            torch.tensor(2.5, dtype=torch.float64),
        ],
        exact=False,
        dynamic=False,
    )


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_complex_arithmetic(dtype: torch.dtype, training: bool, rarely_dynamic: bool) -> None:
    def compute(x: torch.Tensor, y: torch.Tensor) -> object:
        parts = x.real, x.imag, x.abs(), x.conj() * y, torch.view_as_real(x * 2)
        return x + y, x * y, x / (y + 3), parts, (x * 1j).exp(), x.sum(0), x.t() @ y, x.mean()

    assert_same_as_eager(
        compute,
        lambda: [torch.randn(3, 3, dtype=dtype, requires_grad=training) for _ in range(2)],
        backward=training,
        dynamic=rarely_dynamic,
    )


@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: [x.conj()],
        lambda x: [x.conj().imag],
        lambda x: [torch._neg_view(x)],
        lambda x: [x.conj().t()],
    ],
    ids=["conj", "neg", "neg_view", "conj_transpose"],
)
def test_inputs_with_conjugate_and_negative_bits(prepare, rarely_dynamic: bool) -> None:
    assert_same_as_eager(
        lambda x: (x * 2, x + 1, x.sum(0), x.clone(), x),
        lambda: [torch.randn(3, 4, dtype=torch.complex64)],
        prepare=prepare,
        dynamic=rarely_dynamic,
    )


def test_fourier_transform(dynamic: bool) -> None:
    def smooth(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * 0.5, n=x.shape[-1])

    assert_same_as_eager(smooth, lambda: [torch.randn(3, 16, requires_grad=True)], backward=True, dynamic=dynamic)
