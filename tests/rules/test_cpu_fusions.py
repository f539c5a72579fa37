"""Layers on the CPU with a post-op: every activation in every spelling, every shape of a second operand, to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ferrite.graph.verify import Snapshot, verify_graph
from ferrite.options import Options
from ferrite.passes.post_grad import cpu_ops, layers, mkldnn_fusion, reinplace_inplaceable_ops
from ferrite.passes.shared.facts import CASTS
from ferrite.pipeline import PassContext
from tests.compare import as_bits, since
from tests.graphs import target_names

aten = torch.ops.aten
packed = pytest.mark.skipif(cpu_ops.PACKED_LINEAR is None, reason="this torch has no packed layers")

PARTS = {
    "swish": cpu_ops.swish_parts,
    "gelu": cpu_ops.gelu_parts,
    "gelu by tanh": cpu_ops.gelu_tanh_parts,
    "gelu by tanh and pow": layers.gelu_tanh_by_pow,
    "hardswish": cpu_ops.hardswish_parts,
    "hardswish in steps": layers.hardswish_in_steps,
    "hardswish by hardtanh": layers.hardswish_by_hardtanh,
    "hardsigmoid": cpu_ops.hardsigmoid_parts,
    "hardsigmoid in steps": layers.hardsigmoid_in_steps,
    "hardsigmoid by hardtanh": layers.hardsigmoid_by_hardtanh,
    "leaky_relu": lambda y: cpu_ops.leaky_relu_parts(y, 0.3),
}
WHOLE = {
    "relu": aten.relu.default,
    "sigmoid": aten.sigmoid.default,
    "tanh": aten.tanh.default,
    "swish": aten.silu.default,
    "gelu": aten.gelu.default,
    "gelu by tanh": lambda y: aten.gelu.default(y, approximate="tanh"),
    "hardswish": aten.hardswish.default,
    "hardsigmoid": aten.hardsigmoid.default,
    "leaky_relu": lambda y: aten.leaky_relu.default(y, 0.3),
    "hardtanh": lambda y: aten.hardtanh.default(y, -0.5, 2),
    "relu6": lambda y: aten.hardtanh.default(y, 0, 6),
    "clamp": lambda y: aten.clamp.default(y, -1, 0.5),
}


def addmm(x, w, b):
    return aten.addmm.default(b, x, w.t())


def mm(x, w, b):
    return aten.mm.default(x, w.t())


def conv(x, w, b, transposed=False, padding=1):
    return aten.convolution.default(x, w, b, [1, 1], [padding] * 2, [1, 1], transposed, [0, 0], 1)


def packed_linear(x, w, b, attr="none"):
    return torch.ops.mkldnn._linear_pointwise(x, w, b, attr, [], "")


def packed_conv(x, w, b, attr="none"):
    return torch.ops.mkldnn._convolution_pointwise(x, w, b, [1, 1], [1, 1], [1, 1], 1, attr, [], "")


def packed_transposed(x, w, b, attr="none"):
    return torch.ops.mkldnn._convolution_transpose_pointwise(x, w, b, [1, 1], [0, 0], [1, 1], [1, 1], 1, attr, [], "")


def rows(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The first row of the result is what the bias is, the second is infinite, the third is nan."""
    torch.manual_seed(0)
    x, w, b = torch.randn(6, 4), torch.randn(5, 4), torch.randn(5)
    x[0], x[1, 2], x[2, 1], x[3] = 0, torch.inf, torch.nan, 1e38
    return [each.to(dtype) for each in (x, w, b)]


def images() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, 5, 6), torch.randn(4, 3, 3, 3), torch.randn(4)]


def turned(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same for a transposed convolution: its weight is [in, out, ...]."""
    x, w, b = inputs
    return [x, w.transpose(0, 1).contiguous(), b]


LAYERS: dict[str, tuple[Any, Any]] = {
    "addmm": (addmm, rows),
    "mm": (mm, rows),
    "conv": (conv, images),
    "transposed": (lambda x, w, b: conv(x, w, b, True), lambda: turned(images())),
}
PACKED: dict[str, tuple[Any, Any]] = {
    "linear": (packed_linear, rows),
    "conv": (packed_conv, images),
    "transposed": (packed_transposed, lambda: turned(images())),
}


def context(**more: Any) -> PassContext:
    return PassContext(Options(strict=True, kernel_rewrites="always", **more))


def assert_fused(function: Any, inputs: list[Any], count: int, mode: str = "fake", pre_dispatch: bool = False) -> Any:
    """Trace, run the pass, compare to the bit, run it again."""
    before = make_fx(function, tracing_mode=mode, pre_dispatch=pre_dispatch)(*inputs)
    after = copy.deepcopy(before)
    snapshot, own = Snapshot.of(after), context()
    assert mkldnn_fusion.function(after, own) == count, target_names(after)
    verify_graph(after, snapshot, deep=True)
    assert_same(after, before, inputs)
    assert mkldnn_fusion.function(after, context()) == 0
    return after


def assert_same(ours: Any, theirs: Any, inputs: list[Any]) -> None:
    mine, expected = (pytree.tree_leaves(each(*copy.deepcopy(inputs))) for each in (ours, theirs))
    for left, right in zip(mine, expected, strict=True):
        assert (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
        assert torch.equal(as_bits(left), as_bits(right))


# --- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", WHOLE)
def test_an_activation_is_taken_along(layer, name):
    function, make = LAYERS[layer]
    gm = assert_fused(lambda *inputs: WHOLE[name](function(*inputs)), make(), 1)
    kind = "linear" if make is rows else "convolution"
    assert [each for each in target_names(gm) if "aten" not in each] == [f"ferrite.{kind}_pointwise.default"]
    assert "aten.addmm.default" not in target_names(gm)
    assert "aten.convolution.default" not in target_names(gm)


@pytest.mark.parametrize("layer", ["addmm", "conv"])
@pytest.mark.parametrize("name", PARTS)
def test_an_activation_by_its_parts_is_taken_along(layer, name):
    function, make = LAYERS[layer]
    gm = assert_fused(lambda *inputs: PARTS[name](function(*inputs)), make(), 1)
    assert sum("ferrite" in each for each in target_names(gm)) == 1
    assert not {"aten.mul.Tensor", "aten.where.self", "aten.div.Tensor"} & set(target_names(gm))


@packed
@pytest.mark.parametrize("layer", PACKED)
@pytest.mark.parametrize("name", WHOLE)
def test_packed_layers_keep_the_numbers_of_eager(layer, name):
    """The kernel of oneDNN would make nan of relu(-inf) and 0 of sigmoid(nan)."""
    function, make = PACKED[layer]
    assert_fused(lambda *inputs: WHOLE[name](function(*inputs)), make(), 1)


@packed
@pytest.mark.parametrize("layer", PACKED)
def test_a_packed_layer_that_goes_on_already_is_left(layer):
    function, make = PACKED[layer]
    assert_fused(lambda *inputs: aten.sigmoid.default(function(*inputs, "relu")), make(), 0)
    assert_fused(lambda *inputs: aten.add.Tensor(y := function(*inputs, "relu"), aten.neg.default(y)), make(), 0)


@pytest.mark.quick
def test_a_linear_layer_that_was_not_taken_apart():
    gm = assert_fused(
        lambda x, w, b: torch.nn.functional.linear(x, w, b).relu(), [torch.randn(2, 3, 4), *rows()[1:]], 1
    )
    assert "ferrite.linear_pointwise.default" in target_names(gm)
    gm = assert_fused(
        lambda x, w, b: torch.relu(aten.linear.default(x, w, b)),
        [torch.randn(2, 3, 4), *rows()[1:]],
        1,
        pre_dispatch=True,
    )
    assert target_names(gm) == ["ferrite.linear_pointwise.default"]


@pytest.mark.parametrize("name", ["swish", "gelu", "hardswish"])
def test_through_the_view_behind_a_product(name):
    def function(x, w, b):
        return PARTS[name](aten.view.default(addmm(aten.view.default(x, [6, 4]), w, b), [2, 3, 5]))

    gm = assert_fused(function, [torch.randn(2, 3, 4), *rows()[1:]], 1)
    assert target_names(gm) == ["aten.view.default", "ferrite.linear_pointwise.default", "aten.view.default"]


@pytest.mark.quick
def test_a_product_behind_a_view_that_is_read_again_is_left():
    def function(x, w, b):
        y = addmm(x, w, b)
        return aten.relu.default(aten.view.default(y, [30])), y

    assert_fused(function, rows(), 0)


@since(2, 13)
def test_parameters_that_are_tensors_or_out_of_order_are_left():
    slope = torch.rand(())
    assert_fused(lambda x, w, b, s: aten.where.self((y := addmm(x, w, b)) > 0, y, y * s), [*rows(), slope], 0)
    assert_fused(lambda x, w, b, s: aten.clamp.Tensor(addmm(x, w, b), s, s + 1), [*rows(), slope], 0)
    assert_fused(lambda x, w, b: aten.hardtanh.default(addmm(x, w, b), 1.0, 0.5), rows(), 0)
    assert_fused(lambda x, w, b: aten.hardtanh.default(addmm(x, w, b), 0.5, torch.nan), rows(), 0)
    assert_fused(lambda x, w, b: aten.hardtanh.default(addmm(x, w, b), 0.5, 0.5), rows(), 1)


@pytest.mark.quick
def test_constants_of_either_type_count_but_not_others():
    assert_fused(lambda x, w, b: cpu_ops.hardswish_parts(addmm(x, w, b), 3.0, 0.0, 6.0), rows(), 1)
    assert_fused(lambda x, w, b: cpu_ops.hardswish_parts(addmm(x, w, b), 3, 0, 6.5), rows(), 0)
    assert_fused(lambda x, w, b: cpu_ops.gelu_parts(addmm(x, w, b), root=0.7), rows(), 0)


@pytest.mark.parametrize("name", ["swish", "gelu", "gelu by tanh", "hardswish in steps"])
def test_a_reader_beside_the_parts_blocks(name):
    def function(x, w, b):
        y = addmm(x, w, b)
        return PARTS[name](y), y.neg()

    assert_fused(function, rows(), 0)


@pytest.mark.quick
def test_scaled_products_and_matrices_for_a_bias_are_left():
    assert_fused(lambda x, w, b: aten.addmm.default(b, x, w.t(), alpha=2).relu(), rows(), 0)
    assert_fused(lambda x, w, b: aten.addmm.default(b, x, w.t(), beta=0).relu(), rows(), 0)
    assert_fused(lambda x, w, b: aten.addmm.default(b, x, w.t()).relu(), [*rows()[:2], torch.randn(6, 5)], 0)


@pytest.mark.quick
def test_other_devices_and_dtypes_are_left():
    def on_meta(x, w, b):
        return addmm(*(aten._to_copy.default(each, device=torch.device("meta")) for each in (x, w, b))).relu()

    gm = make_fx(on_meta, tracing_mode="fake")(*rows())
    assert mkldnn_fusion.function(gm, context()) == 0
    assert_fused(
        lambda x, w, b: addmm(x, w, b).sigmoid(), [torch.randn(s).to(torch.complex64) for s in ((3, 4), (5, 4), 5)], 0
    )
    assert_fused(lambda x, w, b: addmm(x, w, b).relu(), rows(torch.float64), 1)


# --- half precision ---------------------------------------------------------------------------------------------------


def between_casts(u: Any, to: torch.dtype, wide: torch.dtype = torch.float32) -> Any:
    return lambda x, w, b: aten._to_copy.default(u(aten._to_copy.default(addmm(x, w, b), dtype=wide)), dtype=to)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["swish", "gelu", "gelu by tanh", "hardswish in steps", "hardsigmoid"])
def test_parts_in_half_precision_need_the_casts(dtype, name):
    assert_fused(between_casts(PARTS[name], dtype), rows(dtype), 1)
    assert_fused(lambda x, w, b: PARTS[name](addmm(x, w, b)), rows(dtype), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_that_are_no_sandwich_are_left(dtype):
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    swish = cpu_ops.swish_parts
    assert_fused(between_casts(swish, other), rows(dtype), 0)
    assert_fused(between_casts(swish, dtype, torch.float64), rows(dtype), 0)
    assert_fused(between_casts(lambda y: (z := swish(y)) + z.neg(), dtype), rows(dtype), 0)
    assert_fused(lambda x, w, b: swish(addmm(x, w, b).float()), rows(dtype), 0)
    assert_fused(between_casts(lambda y: aten.tanh.default(y), dtype), rows(dtype), 0)
    assert_fused(lambda x, w, b: addmm(x, w, b).tanh(), rows(dtype), 0)


@pytest.mark.parametrize("name", sorted(set(WHOLE) - {"tanh", "clamp"}))
def test_one_operator_in_half_precision_is_its_own_sandwich(name):
    assert_fused(lambda x, w, b: WHOLE[name](addmm(x, w, b)), rows(torch.bfloat16), 1)
    assert_fused(between_casts(WHOLE[name], torch.bfloat16), rows(torch.bfloat16), 1)


# --- a second operand -------------------------------------------------------------------------------------------------

SECOND: dict[str, list[tuple[int, ...]]] = {
    "addmm": [(6, 5), (1, 5)],
    "mm": [(6, 5), (1, 5)],
    "conv": [(2, 4, 5, 6), (2, 4, 1, 1), (1, 4, 1, 1), (1, 1, 1, 1)],
    "transposed": [(2, 4, 5, 6), (1, 4, 1, 1)],
}


@pytest.mark.parametrize("binary", [aten.add.Tensor, aten.sub.Tensor])
@pytest.mark.parametrize(("layer", "shape"), [(layer, shape) for layer, shapes in SECOND.items() for shape in shapes])
def test_a_second_operand_is_taken_along(layer, shape, binary):
    function, make = LAYERS[layer]
    inputs = [*make(), torch.randn(shape)]
    gm = assert_fused(lambda *given: binary(function(*given[:3]), given[3]), inputs, 1)
    assert sum("pointwise_binary" in each for each in target_names(gm)) == 1
    assert_fused(lambda *given: binary(function(*given[:3]), given[3], alpha=2), inputs, 0)
    assert_fused(lambda *given: binary(given[3], function(*given[:3])), inputs, 1 if binary is aten.add.Tensor else 0)


@pytest.mark.parametrize("binary", [aten.add.Tensor, aten.sub.Tensor])
@pytest.mark.parametrize("shape", SECOND["conv"])
def test_a_relu_behind_the_sum_goes_along_for_convolutions(shape, binary):
    inputs = [*images(), torch.randn(shape)]
    gm = assert_fused(lambda x, w, b, o: aten.relu.default(binary(conv(x, w, b), o)), inputs, 1)
    assert target_names(gm) == ["ferrite.convolution_pointwise_binary.default"]
    gm = assert_fused(lambda x, w, b, o: aten.relu.default(binary(addmm(x, w, b), o)), [*rows(), torch.randn(6, 5)], 1)
    assert target_names(gm)[-1] == "aten.relu.default"


@pytest.mark.quick
def test_the_sum_of_two_layers_takes_one_of_them():
    def function(x, w, b, v):
        return addmm(x, w, b) + addmm(x, v, b)

    assert target_names(assert_fused(function, [*rows(), torch.randn(5, 4)], 1)).count("aten.addmm.default") == 1


@packed
@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_packed_layers_take_a_second_operand(layer):
    function, make = PACKED[layer]
    shape = (6, 5) if layer == "linear" else (2, 4, 5, 6)
    assert_fused(lambda *given: function(*given[:3]) + given[3], [*make(), torch.randn(shape)], 1)


@packed
def test_an_operand_that_would_decide_the_layout_is_left():
    """A packed convolution gives its result channels last; a sum takes the layout of its first operand."""
    assert_fused(lambda x, w, b, o: o + packed_conv(x, w, b), [*images(), torch.randn(2, 4, 5, 6)], 0)


# --- in place ---------------------------------------------------------------------------------------------------------


def in_place(function: Any, inputs: list[Any]) -> bool:
    """Whether a second operand comes to be overwritten, having checked what the graph computes."""
    before = make_fx(function, tracing_mode="fake")(*inputs)
    after = copy.deepcopy(before)
    snapshot = Snapshot.of(after)
    assert mkldnn_fusion.function(after, context()) == 1
    reinplace_inplaceable_ops.function(after, context())
    after.recompile()
    verify_graph(after, snapshot, deep=True)
    own = copy.deepcopy(inputs)
    after(*own)
    assert all(torch.equal(as_bits(mine), as_bits(given)) for mine, given in zip(own, inputs, strict=True))
    assert_same(after, before, inputs)
    return any("pointwise_binary_." in each for each in target_names(after))


FULL = {"addmm": (6, 5), "conv": (2, 4, 5, 6)}


@pytest.mark.parametrize("layer", FULL)
@pytest.mark.parametrize("then", [lambda y: y, aten.relu.default])
def test_an_operand_that_nobody_needs_any_more_is_overwritten(layer, then):
    function, make = LAYERS[layer]
    inputs = [*make(), torch.randn(FULL[layer])]
    assert in_place(lambda *given: then(function(*given[:3]) + given[3].neg()), inputs)

    def also_read_before(x, w, b, o):
        fresh = o.neg()
        return then(function(x + fresh.sum(), w, b) + fresh)

    assert in_place(also_read_before, inputs)


@pytest.mark.parametrize("layer", FULL)
def test_an_operand_that_somebody_needs_is_not_overwritten(layer):
    function, make = LAYERS[layer]
    inputs = [*make(), torch.randn(FULL[layer])]

    def read_later(x, w, b, o):
        fresh = o.neg()
        total = function(x, w, b) + fresh
        return total, fresh.sum()

    def returned(x, w, b, o):
        fresh = o.neg()
        return function(x, w, b) + fresh, fresh

    def a_view_is_read_later(x, w, b, o):
        fresh = o.neg()
        view = fresh.view(-1)
        return function(x, w, b) + fresh, view.sum()

    assert not in_place(read_later, inputs)
    assert not in_place(returned, inputs)
    assert not in_place(a_view_is_read_later, inputs)
    assert not in_place(lambda x, w, b, o: function(x, w, b) + o, inputs), "it belongs to the caller"


@pytest.mark.quick
def test_an_operand_that_spreads_is_not_overwritten():
    assert not in_place(lambda x, w, b, o: addmm(x, w, b) + o.neg(), [*rows(), torch.randn(1, 5)])
    assert not in_place(lambda x, w, b, o: addmm(x, w, b) + o.neg().expand(6, 5), [*rows(), torch.randn(1, 5)])


# --- the option ------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_it_waits_for_kernels():
    gm = make_fx(lambda x, w, b: addmm(x, w, b).relu(), tracing_mode="fake")(*rows())
    assert mkldnn_fusion.function(gm, PassContext(Options(strict=True))) == 0


@pytest.mark.quick
def test_the_operators_that_end_a_post_op_are_those_of_the_formulas():
    assert set(layers.POST_OP_TARGETS) == {*layers.by_target(), *CASTS}
