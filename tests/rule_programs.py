"""A program that a user could write for every rule and every pass, through `torch.compile(..., backend="ferrite")`.

`PROGRAMS` is the table: what is to fire (a rule by its name, a pass as `stage/name`), and the program it fires in.
Where a rule's own example fires through the front door it serves as one, under the options in `ASKED`; the others are
written out, those that need a GPU among them. Passes over collectives have theirs in `tests.distributed.rule_programs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops import InvokeQuant, scan
from torch.nn import functional as F

from ferrite.passes import PIPELINES, all_rules

aten = torch.ops.aten
Inputs = Callable[[], list[Any]]


@dataclass(frozen=True)
class Program:
    """`fires`: rules and passes that must be in the record afterwards; `not_here`: those that must not be."""

    function: Any  # a function, or what makes a module: its class, or that with arguments
    make_inputs: Inputs
    fires: tuple[str, ...] = ()
    not_here: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    inference: bool = False  # no gradients: what a module has for parameters is not trained
    backward: bool = False
    dynamic: bool = False
    exact: bool = True
    redrawn: bool = False  # it draws other random numbers than eager: only looks can be compared
    terms: float = 0.0
    config: Mapping[str, Any] = field(default_factory=dict)  # of Dynamo
    slow: bool = False  # left to the long sweeps
    traced: bool = False  # by FX: modules are called as such
    on_gpu: bool = False


# --- rules by their own examples --------------------------------------------------------------------------------------

KERNELS = {"kernel_rewrites": "always"}
NOT_BEFORE = {"pre_grad": False}  # what users write in one way only is seen before autograd already


def only(name: str) -> dict[str, Any]:
    """The passes of this family alone."""
    return {"split_cat": (name,), "skip": ("sink_cat_after_pointwise", "remove_split_ops_pass")}


def fusing(*names: str) -> dict[str, Any]:
    return {"post_grad_fusions": names, **NOT_BEFORE}


# The options under which a rule fires on its own example, where it needs any beside those of the example.
ASKED: dict[str, dict[str, Any]] = {
    "convolution_channels_last": {"own_convolutions": "off"},  # on Arm it would be ours
    **dict.fromkeys(("repeat_noop", "int_noop", "cat_noop"), NOT_BEFORE),
    **dict.fromkeys(("splitwithsizes_cat_replace", "cat_splitwithsizes_replace"), NOT_BEFORE),
    **dict.fromkeys(
        ("merge_stack_tahn_unbind_pass", "merge_stack_relu_unbind_pass"), only("merge_stack_tahn_unbind_pass")
    ),
    **{
        name: only(name)
        for name in (
            "merge_getitem_cat_pass",
            "split_cat_to_slices_pass",
            "unbind_cat_to_view_pass",
            "split_stack_to_cats_pass",
            "unbind_stack_to_slices_pass",
            "fuse_chunk_squeeze_cat_pass",
            "fuse_split_getitem_squeeze_cat",
        )
    },
    "batch_linear_lhs": {"horizontal": ("batch_linear_lhs",)},
    "lce_on_one_input": {"compress": ("lce-first",)},
    "lce_parts": {"compress": ("lce-parts",)},
    "lce_matmul": {"compress": ("lce-matmul",)},
    "lce_simple": {"compress": ("lce-simple",)},
    "dot_compress": {"compress": ("dot-compress",)},
    "gumbel_argmax": KERNELS,
    "scatter_upon_const_tensor": KERNELS,
    "randperm_index": KERNELS,
    "randperm_index_add": KERNELS,
    "mul_softmax_pattern": KERNELS,
    "div_softmax_pattern": KERNELS,
    "prepare_softmax_online": KERNELS,
    "fused_int_mm_mul": KERNELS,
    "binary_relu_post_op": KERNELS,
    "unary_post_op": KERNELS,
    "binary_post_op": KERNELS,
    "quantized_post_op": KERNELS,
    "quantized_binary": KERNELS,
    "quantized_output": KERNELS,
    "b2b_gemm": KERNELS,
    "batch_linear_post_grad": fusing("batch_linear_post_grad"),
    **{
        f"batch_aten_{name}": fusing(f"batch_aten_{name}")
        for name in ("tanh", "sigmoid", "relu", "add", "sub", "mul", "div")
    },
    **{
        f"normalize_{name}_aten": fusing("normalization_aten_pass")
        for name in ("split_default", "split_with_size_default", "cat_default")
    },
    **{
        f"{name}_aten": fusing(f"{name}_aten_pass")
        for name in ("split_cat", "select_cat", "unbind_stack", "move_view_after_cat")
    },
    **{f"decompose_{name}": fusing("decompose_mm_pass") for name in ("mm", "addmm", "bmm")},
}
# The example to take, where it is not the first.
LABELS = {
    "slice_noop": "start counted from the end",
    "true_noop": "alias",
    "replace_random": "randint from",
    "partitioned_scatter": "as few writes as was asked for",
    "remove_split_with_size_one_pass": "returned, as a view",
    "fuse_chunk_reshape_unsqueeze_concat_pass": "another dimension",
    "lce_matmul": "a stack",
}
# Examples that know their dtypes: no run in double precision can judge them, eager's very bits do.
BITS = {
    "view_dtype_noop",
    "weight_only_int8",
    "lift_quantize",
    "quantized_post_op",
    "quantized_binary",
    "quantized_output",
}
# Rules that draw other random numbers: what comes out has eager's look.
REDRAWN = {"sfdp_dropout", "batch_dropout", "replace_random"}


# --- programs written out ---------------------------------------------------------------------------------------------


def randn(*shapes: tuple[int, ...], grad: bool = False) -> Inputs:
    return lambda: [torch.randn(shape, requires_grad=grad) for shape in shapes]


def int8(*shape: int) -> Inputs:
    return lambda: [torch.randint(-128, 128, shape, dtype=torch.int8)]


def attention(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v


def causal_attention(q: Any, k: Any, v: Any) -> Any:
    seen = torch.tril(torch.ones(q.shape[-2], q.shape[-2]))
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill(seen == 0, float("-inf")), -1) @ v


def stored(x: Any) -> Any:
    y = torch.empty_like(x)
    y[:] = x.sin()
    return y * 2


def repeated(x: Any) -> Any:
    return torch.cat([x, x]).sin()[: 2 * x.shape[0] - 1].cos() * torch.arange(x.shape[0] * 2 - 1)


class Normed(nn.Module):
    """A convolution and a batch norm that has seen data."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(channels, channels, 3), nn.BatchNorm2d(channels)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)
        self.eval()

    def forward(self, x: Any) -> Any:
        return self.norm(self.layer(x)).relu().sum((2, 3))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 8), nn.Parameter(torch.rand(8))

    def forward(self, x: Any) -> Any:
        return self.layer(x) * self.scale + 0.5


class Projections(nn.Module):
    """What attention computes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 8) for _ in range(3))

    def forward(self, x: Any) -> Any:
        return self.q(x).relu() + self.k(x).sin() * self.v(x)


class ReadTwice(Scaled):
    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return y * self.scale + y


class Apart(Normed):
    """Something stands between the layer and its norm."""

    def forward(self, x: Any) -> Any:
        return self.norm(self.layer(x).relu())


class Copied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Any) -> Any:
        return x @ self.weight.to(x.dtype, copy=True).t()


class Equal(nn.Module):
    """Two values that are one, once a copy is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Any) -> Any:
        return x @ self.weight.exp() + x.sin() @ self.weight.to(x.dtype, copy=True).exp()


class ByteLinear(nn.Module):
    """Bytes times a constant matrix of bytes."""

    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", (torch.arange(18 * 32) % 255 - 127).view(18, 32).to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._int_mm(x, self.weight.t())


class Int8Projections(nn.Module):
    """Weights of 8 bits with a scale for each row."""

    def __init__(self) -> None:
        super().__init__()
        for name in "qkv":
            self.register_buffer(name, torch.randint(-128, 128, (32, 64), dtype=torch.int8))
            self.register_buffer(f"{name}_scale", torch.rand(32, dtype=torch.bfloat16))

    def forward(self, x: Any) -> Any:
        layers = [(self.q, self.q_scale), (self.k, self.k_scale), (self.v, self.v_scale)]
        return sum(F.linear(x, weight.to(x.dtype)) * scale for weight, scale in layers)


class Int4Pair(nn.Module):
    """Two layers with packed weights of 4 bits, on one input."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "second"):
            numbers = torch.randint(0, 16, (32, 64), dtype=torch.int32)
            self.register_buffer(name, aten._convert_weight_to_int4pack_for_cpu(numbers, 2))
            self.register_buffer(f"{name}_scales", torch.rand(2, 32, 2))

    def forward(self, x: Any) -> Any:
        first = aten._weight_int4pack_mm_for_cpu(x, self.first, 32, self.first_scales)
        return first * 2, aten._weight_int4pack_mm_for_cpu(x, self.second, 32, self.second_scales)


class QuantizedPool(nn.Module):
    """A pool on integers, whose scale and zero point are state of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.1))
        self.register_buffer("zero_point", torch.tensor(3))

    def forward(self, x: Any) -> Any:
        limits = -128, 127, torch.int8
        floats = torch.ops.quantized_decomposed.dequantize_per_tensor.tensor(x, self.scale, self.zero_point, *limits)
        pooled = F.max_pool2d(floats, 2)
        return torch.ops.quantized_decomposed.quantize_per_tensor.tensor(pooled, self.scale, self.zero_point, *limits)


class Cat(nn.Module):
    """Layers on one input, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return torch.cat([self.first(x), self.second(x)], -1) * 2


@torch.library.custom_op("rule_programs::increment", mutates_args={"x"})
def increment(x: torch.Tensor) -> None:
    x.add_(1)


def incremented(x: Any) -> Any:
    y = x.sin()
    increment(y)
    return y * 2


def in_a_range(x: Any) -> Any:
    with torch.profiler.record_function("range"):
        return x.sin() + 1


def of_a_known_type(x: Any) -> Any:
    y = x.sin()
    aten._assert_tensor_metadata.default(y, None, None, y.dtype)
    return y.cos()


def two_draws(x: Any) -> Any:
    return torch.rand(3) - torch.rand(3) * x


def equal_draws(graph: torch.fx.Graph) -> None:
    """A careless hook: the second draw goes before the first."""
    first, second = graph.find_nodes(op="call_function", target=aten.rand.default)
    first.prepend(second)


def written_late(x: Any, w: Any) -> Any:
    y = (x.sin() * w).sum()
    x.mul_(2)
    return y


def copying(graph: torch.fx.Graph) -> None:
    """A callable as other compilers take it: what relu gives is copied. It says nothing of what it did."""
    for node in list(graph.nodes):
        if "relu" in str(node.target):
            copy = aten.clone.default if isinstance(node.target, torch._ops.OpOverload) else torch.clone
            with graph.inserting_after(node):
                twin = graph.call_function(copy, (node,))
            node.replace_all_uses_with(twin, delete_user_cb=lambda user, twin=twin: user is not twin)


def chunks_anew(graph: torch.fx.Graph) -> None:
    """Splits in equal parts, as hooks for other compilers write them."""
    for node in graph.find_nodes(op="call_function", target=aten.split_with_sizes.default):
        node.target, node.args = aten.split.Tensor, (node.args[0], 2)


def halves(x: Any) -> Any:
    first, second = x.sin().split(2)
    return first * 2 + second


class Identities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Identity(), nn.ReLU(), nn.Identity())

    def forward(self, x: Any) -> Any:
        return (self.layers(x) * 2,)


class Images(nn.Module):
    """Convolutions with batch norm and something that another layout changes: a view of all that an image has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 8, 3)
        self.to("cuda", torch.bfloat16)

    def forward(self, x: Any) -> Any:
        return self.last(self.norm(self.first(x)).relu()).flatten(1).float()


def on_gpu(make_inputs: Inputs) -> Inputs:
    return lambda: [each.cuda().detach().requires_grad_(each.requires_grad) for each in make_inputs()]


def by_a_kernel_of_the_users(x: Any) -> Any:
    from tests.targets.test_user_kernels import doubled_in_place

    y = x.sin()
    doubled_in_place[(2,)](y, y.numel(), BLOCK=32)
    return y + x


def quantized_region(a: Any, b: Any) -> Any:
    return InvokeQuant()(lambda a, b: (a * 2).sin() @ b, a, b, scheme="nf4") + 1


FROZEN: dict[str, Any] = {"options": {"freeze": True}, "inference": True}


def frozen(**options: Any) -> dict[str, Any]:
    return {"options": {"freeze": True, **options}, "inference": True}


WRITTEN_OUT: tuple[Program, ...] = (
    # pre_grad
    Program(Identities, randn((5,)), ("pre_grad/remove_identity",), traced=True),
    Program(lambda x: x.sum(axis=1, keepdims=True) * 2, randn((3, 4)), ("pre_grad/numpy_compat_normalization",)),
    Program(
        lambda x: torch.sin(input=x), randn((3, 4)), ("pre_grad/normalize_node_kwargs_pass", "pre_grad/torch_spelling")
    ),
    Program(lambda x: x.flatten() * 2, randn((3, 4)), ("pre_grad/normalization_pass", "post_grad/view_to_reshape")),
    Program(
        lambda x: x.relu() + 1,
        randn((3,)),
        ("pre_grad/pre_grad_custom_pass", "pre_grad/remove_noop_again_pass"),
        options={"pre_grad_custom_pass": copying},
    ),
    Program(
        Cat,
        randn((5, 4)),
        ("parallel_linear", "pre_grad/split_cat_again_pass"),
        options={"horizontal": "always"},
        backward=True,
    ),
    Program(causal_attention, randn(*[(2, 4, 6, 8)] * 3), ("sfdp", "post_grad/reorder_for_locality")),
    Program(lambda x: (x.sin(), x.cos())[1], randn((3,)), ("pre_grad/remove_dead_calls",)),
    # joint
    Program(quantized_region, randn((4, 4), (4, 4)), ("joint/canonicalize_quant_mapping",)),
    Program(
        lambda x: x.relu() + 1,
        randn((3,)),
        ("joint/joint_custom_pre_pass",),
        options={"joint_custom_pre_pass": copying},
    ),
    Program(
        lambda x: x.relu() + 1,
        randn((3,)),
        ("joint/joint_custom_post_pass",),
        options={"joint_custom_post_pass": copying},
    ),
    Program(lambda x: x.sin() * x.sin(), randn((3,)), ("joint/merge_equal_calls",)),
    Program(
        written_late,
        lambda: [torch.randn(4), torch.randn(4, requires_grad=True)],
        ("joint/save_reads_of_written_inputs",),
        backward=True,
    ),
    Program(torch.matmul, randn((2, 3, 4), (2, 4, 5)), ("view_default_noop",)),
    Program(
        partial(nn.Sequential, nn.Linear(4, 8), nn.Linear(8, 4)),
        randn((2, 3, 4)),
        ("pointless_view_pair",),
        inference=True,
    ),
    Program(repeated, randn((5,), grad=True), ("dedupe_symint_uses",), dynamic=True, backward=True),
    Program(torch.vmap(attention), randn(*[(2, 4, 6, 8)] * 3), ("sfdp_inference",)),
    Program(lambda x: torch.hstack([x * 2]) + 1, randn((4,)), ("cat_noop",)),
    Program(
        lambda i: torch.zeros(4, 6).scatter(1, i, 1.0),
        lambda: [torch.randint(6, (4, 1))],
        ("scatter_upon_const_tensor",),
        options=KERNELS,
    ),
    Program(lambda x: x[torch.randperm(6)[:3]], randn((6, 2)), ("randperm_index",), options=KERNELS),
    Program(
        lambda x, y: x.index_add(0, torch.randperm(6)[:3], y),
        randn((6, 2), (3, 2)),
        ("randperm_index_add",),
        options=KERNELS,
    ),
    Program(
        lambda x: torch.softmax(x * 0.3, -1),
        randn((4, 6), grad=True),
        ("mul_softmax_pattern",),
        options=KERNELS,
        backward=True,
    ),
    Program(
        lambda x: torch.log_softmax(x / 8, 1),
        randn((4, 6), grad=True),
        ("div_softmax_pattern",),
        options=KERNELS,
        backward=True,
    ),
    # freeze
    Program(Copied, randn((4, 4)), ("to_copy_noop", "freeze/remove_same_casts"), **FROZEN, exact=False),
    Program(
        Equal,
        randn((4, 4)),
        ("freeze/merge_equal_calls", "freeze/constant_fold", "freeze/note_parameters"),
        **FROZEN,
    ),
    Program(
        Scaled,
        randn((4, 16)),
        ("fold_arithmetic", "weights_by_rows", "freeze/drop_unused_constants"),
        **frozen(weight_layouts="always"),
    ),
    Program(Normed, randn((2, 4, 6, 6)), ("fold_conv_bn",), **FROZEN),
    Program(Normed, randn((2, 4, 6, 6)), ("fold_batch_norm",), **frozen(skip=("fuse_conv_bn",))),
    Program(
        partial(Normed, 16),
        randn((2, 16, 32, 32)),
        ("weights_channels_last",),
        **frozen(weight_layouts="always", own_convolutions="off"),
        terms=16.0,
    ),
    Program(
        partial(nn.Linear, 32, 18), randn((5, 32)), ("weights_in_panels",), **frozen(own_products="always"), terms=32.0
    ),
    Program(
        ByteLinear,
        lambda: [torch.randint(-128, 128, (20, 32), dtype=torch.int8)],
        ("bytes_in_panels",),
        **frozen(own_products="always"),
    ),
    Program(
        partial(nn.Conv2d, 4, 18, 3),
        randn((2, 4, 6, 5)),
        ("channels_in_panels",),
        **frozen(own_convolutions="always"),
        terms=36.0,
    ),
    Program(Projections, randn((4, 16)), ("merge_sibling_products",), **frozen(horizontal=("merge_sibling_products",))),
    Program(
        Int8Projections,
        lambda: [torch.randn(4, 64, dtype=torch.bfloat16)],
        ("merge_sibling_integer_products", "weight_only_int8"),
        **FROZEN,
    ),
    # post_grad
    Program(lambda x: torch.hstack([x * 2]) + 1, randn((4,)), ("post_grad/remove_noop_ops",), options={"joint": False}),
    Program(
        two_draws,
        randn((3,)),
        ("post_grad/note_random_order", "post_grad/chain_random_ops"),
        options={"post_grad_custom_pre_pass": equal_draws},
        exact=False,
    ),
    Program(
        lambda x: x.relu() + 1,
        randn((3,)),
        ("post_grad/post_grad_custom_pre_pass",),
        options={"post_grad_custom_pre_pass": copying},
    ),
    Program(
        lambda x: x.relu() + 1,
        randn((3,)),
        ("post_grad/post_grad_custom_post_pass",),
        options={"post_grad_custom_post_pass": copying},
    ),
    Program(stored, randn((3,)), ("copy_noop", "post_grad/eliminate_dead_code")),
    Program(
        in_a_range, randn((3,)), ("post_grad/remove_profiler_ops",), config={"capture_profiler_record_function": True}
    ),
    Program(of_a_known_type, randn((3,)), ("post_grad/remove_assert_ops",)),
    Program(
        incremented, randn((3,)), ("post_grad/reinplace_inplaceable_ops", "post_grad/decompose_auto_functionalized")
    ),
    Program(
        lambda c, x: scan(lambda c, x: (c + x, c * x), c, x),
        randn((3,), (4, 3)),
        ("post_grad/decompose_scan_to_while_loop",),
    ),
    Program(
        lambda x: torch._higher_order_ops.map(lambda row: row * 2, x),
        randn((4, 3)),
        ("post_grad/decompose_map_to_while_loop",),
    ),
    Program(lambda x: torch.ones(4, 3).cumsum(0) + x, randn((4, 3)), ("pointless_cumsum_replacement",)),
    Program(QuantizedPool, int8(2, 3, 8, 8), ("qmaxpool2d",), **FROZEN, exact=False),
    Program(
        Int4Pair, randn((4, 64)), ("post_grad/concat_linear_woq_int4",), **frozen(cpu_concat_linear=True), exact=False
    ),
    Program(
        Projections,
        randn((4, 16)),
        ("post_grad/grouped_gemm_pass",),
        **frozen(cpu_grouped_gemm=True, max_autotune=True, horizontal="off"),
    ),
    Program(
        halves,
        randn((4, 3)),
        ("normalize_split_default_aten",),
        options={"post_grad_fusions": ("normalization_aten_pass",), "post_grad_custom_pre_pass": chunks_anew},
    ),
)
# Whose kernels only a GPU has. Without one, tests of these passes look at graphs that say "cuda".
ON_A_GPU: tuple[Program, ...] = (
    Program(lambda x: x[torch.arange(4)] * 2, on_gpu(randn((6, 3))), ("joint/fix_iota_device",), on_gpu=True),
    Program(
        lambda x: x * 2 + torch.linspace(0, 1, 5).to(x.device),
        on_gpu(randn((4, 5))),
        ("post_grad/move_constructors_to_gpu",),
        on_gpu=True,
    ),
    Program(
        Images,
        on_gpu(lambda: [torch.randn(2, 3, 8, 8, dtype=torch.bfloat16)]),
        ("training_channels_last_on_gpu",),
        on_gpu=True,
        backward=True,
    ),
    Program(
        by_a_kernel_of_the_users,
        on_gpu(randn((50,))),
        ("post_grad/decompose_triton_kernel_wrapper_functional",),
        on_gpu=True,
        exact=False,  # such a kernel has one type, and is not run in double precision
    ),
)
# Programs that look alike, in which something must not fire.
NEARLY: tuple[Program, ...] = (
    Program(
        lambda i: torch.zeros(4, 6).scatter(1, i, 1.0),
        lambda: [torch.randint(6, (4, 2))],
        not_here=("scatter_upon_const_tensor",),
        options=KERNELS,
    ),
    Program(lambda x: torch.zeros(4, 3).add(x).cumsum(0), randn((4, 3)), not_here=("pointless_cumsum_replacement",)),
    Program(
        lambda x: torch.softmax(x * 0.3, -1),
        randn((4, 0)),
        not_here=("mul_softmax_pattern",),
        options=KERNELS,
    ),
    Program(lambda x: torch.softmax(x * x, -1), randn((4, 6)), not_here=("mul_softmax_pattern",), options=KERNELS),
    Program(lambda x: torch.softmax(x / 8, -1), randn((4, 6)), not_here=("div_softmax_pattern",)),
    Program(
        Projections,
        randn((4, 16)),
        not_here=("post_grad/grouped_gemm_pass",),
        **frozen(cpu_grouped_gemm=True, max_autotune=True),
    ),
    Program(
        Scaled,
        randn((4, 16)),
        not_here=("post_grad/grouped_gemm_pass",),
        **frozen(cpu_grouped_gemm=True, max_autotune=True),
    ),
    Program(
        Int4Pair,
        randn((4, 64)),
        not_here=("post_grad/concat_linear_woq_int4",),
        inference=True,
        options={"cpu_concat_linear": True},
        exact=False,
    ),
    Program(QuantizedPool, int8(2, 3, 8, 8), not_here=("qmaxpool2d",), inference=True, exact=False),
    Program(
        lambda x: x.sin() * x.cos(), randn((3,)), not_here=("joint/merge_equal_calls", "post_grad/eliminate_dead_code")
    ),
    Program(
        Copied, randn((4, 4)), not_here=("freeze/constant_fold", "freeze/note_parameters"), inference=True, exact=False
    ),
)
FROZEN_MISSES: tuple[Program, ...] = (
    Program(ReadTwice, randn((4, 16)), not_here=("fold_arithmetic",), **FROZEN),
    Program(Scaled, randn((4, 16)), not_here=("weights_by_rows",), **frozen(weight_layouts="off")),
    Program(Apart, randn((2, 4, 6, 6)), not_here=("fold_conv_bn", "fold_batch_norm"), **FROZEN),
    Program(partial(Normed, 16), randn((2, 16, 32, 32)), not_here=("weights_channels_last",), **FROZEN, terms=16.0),
    Program(partial(nn.Linear, 32, 18), randn((5, 32)), not_here=("weights_in_panels",), **FROZEN, terms=32.0),
    Program(partial(nn.Conv2d, 4, 18, 3), randn((2, 4, 6, 5)), not_here=("channels_in_panels",), **FROZEN, terms=36.0),
    Program(
        ByteLinear,
        lambda: [torch.randint(-128, 128, (20, 32), dtype=torch.int8)],
        not_here=("bytes_in_panels",),
        **frozen(own_products="always", weight_layouts="off"),
    ),
    Program(Projections, randn((4, 16)), not_here=("merge_sibling_products",), **frozen(horizontal="off")),
    Program(
        Copied, lambda: [torch.randn(4, 4, dtype=torch.float64)], not_here=("to_copy_noop",), **FROZEN, exact=False
    ),
)
WRITTEN = frozenset(name for program in (*WRITTEN_OUT, *ON_A_GPU) for name in program.fires)


def by_examples() -> Iterator[Program]:
    """The rules whose own example fires."""
    done = set(WRITTEN)
    for rule in all_rules():
        if rule.name in done:
            continue
        done.add(rule.name)
        label = LABELS.get(rule.name)
        case = next(each for each in rule.examples if label in (None, each.label))
        options = {**case.options, **ASKED.get(rule.name, {})}
        yield Program(
            case.function,
            case.make_inputs,
            fires=(rule.name,),
            slow=PASS_OF[rule.name].startswith("pre_grad"),
            options=options,
            exact=rule.name not in BITS,
            redrawn=rule.name in REDRAWN,
        )


def near_misses() -> Iterator[Program]:
    """The first near miss of every rule, under the options that it fires with."""
    written = {name for program in FROZEN_MISSES for name in program.not_here}
    for rule in {rule.name: rule for rule in all_rules()}.values():
        if rule.name in written:
            continue
        case = rule.near_misses[0]
        yield Program(
            case.function,
            case.make_inputs,
            not_here=(rule.name,),
            slow=True,
            options={**ASKED.get(rule.name, {}), **case.options},
            exact=rule.name not in BITS | {"dedupe_view_dtype"},
            redrawn=rule.name in REDRAWN,
        )


# The first pass that has a rule: where a rule fires, that pass does.
PASS_OF: dict[str, str] = {}
for pipeline in PIPELINES:
    for step in pipeline.passes:
        for rule in step.rules:
            PASS_OF.setdefault(rule.name, f"{pipeline.name}/{step.name}")
PROGRAMS = (*WRITTEN_OUT, *ON_A_GPU, *by_examples())
NEAR_MISSES = (*NEARLY, *FROZEN_MISSES, *near_misses())
