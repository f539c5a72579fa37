"""Pieces of models, one or more for each pass of the pre-grad stage, and for those after it that the option
`kernel_rewrites` is about: for `bench.rewrites`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a model, the pass that is about it, and the options that make the pass run wherever it is right."""

    step: str
    what: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    by_itself: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of the automatic choice
    beside: tuple[str, ...] = ()  # passes that make something of what this one does
    frozen: bool = False  # all but the first input are parameters that become constants

    def inputs(self, training: bool, device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        values = [torch.randn(shape, device=device) / shape[-1] ** 0.5 for shape in self.shapes]
        if self.frozen:
            return [values[0], *(torch.nn.Parameter(value, requires_grad=False) for value in values[1:])]
        return [value.requires_grad_(training) for value in values]

    def kinds(self) -> tuple[bool, ...]:
        """Whether it is trained: in both ways, unless it is frozen."""
        return (False,) if self.frozen else (False, True)


def encoder_layer(x: Any, w: Any, v: Any) -> Any:
    """A feed-forward layer in eval mode, with casts and copies that a framework puts around it."""
    hidden = F.dropout(F.linear(x.to(torch.float32).contiguous(), w).relu(), 0.1, False)
    return F.dropout(F.linear(hidden.clone(), v), 0.1, False) + x


def heads_reshaped(x: Any) -> Any:
    rows = x.transpose(1, 2).reshape(-1, 768).reshape(8, 128, 768)
    return rows.reshape(8, 128, 12, 64).sum(-1)


def packed_and_split(x: Any, w: Any) -> Any:
    q, k, v = torch.cat([F.linear(x, w), x, x * 2], -1).split(256, -1)
    return (q @ k.transpose(1, 2)) @ v


def dense_block(*features: Any) -> Any:
    joined = features[0]
    for more in features[1:]:
        joined = torch.cat([joined, more], 1)
    return joined.relu()


def stacked_features(*features: Any) -> Any:
    return torch.stack(features, 1).flatten(1).relu()


def stacked_beside_dense(dense: Any, *features: Any) -> Any:
    """What a recommendation model lets interact: one row for each table, and one of dense features."""
    return torch.cat([dense.unsqueeze(1), torch.stack(features, 1)], 1).relu()


def joined_for_one_call(*xs: Any) -> Any:
    parts = torch.sigmoid(torch.cat(xs)).split(xs[0].shape[0])
    return [part * 2 for part in parts]


def cleaned(x: Any) -> Any:
    return torch.nan_to_num(torch.relu(torch.nan_to_num(x))) + 1


def heads_as_batch(x: Any) -> Any:
    """Multi-head attention that puts the heads into the batch."""
    heads = torch.cat([part.reshape(-1, 64) for part in x.chunk(8, -1)], 0)
    return heads.reshape(-1, 128, 64).softmax(1)


def heads_as_dimension(x: Any) -> Any:
    return torch.cat([part.reshape(-1, 64).unsqueeze(1) for part in x.chunk(8, -1)], 1).softmax(1)


def embeddings_flat(x: Any) -> Any:
    return torch.cat([part.squeeze(1) for part in x.chunk(26, 1)], -1).relu()


def some_embeddings_flat(x: Any) -> Any:
    return torch.cat([part.squeeze(1) for part in x.split(1, 1)[2:18]], -1).relu()


def grouped_projection(x: Any, *weights: Any) -> Any:
    parts = x.split(x.shape[-1] // len(weights), -1)
    return sum(F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)).relu()


def projections(x: Any, *weights: Any) -> Any:
    return [F.linear(x, weight).relu() for weight in weights]


def one_layer_on_each(w: Any, *xs: Any) -> Any:
    return [F.linear(x, w).relu() for x in xs]


def activations_together(*xs: Any) -> Any:
    return [part * 2 for part in torch.tanh(torch.stack(xs)).unbind(0)]


def branches(x: Any, *weights: Any) -> Any:
    """Convolution branches of an inception block."""
    return torch.cat([F.conv2d(x, weight, padding=1) for weight in weights], 1).relu()


def linear_branches(x: Any, *weights: Any) -> Any:
    return torch.cat([F.linear(x, weight) for weight in weights], -1).relu()


def compressed(x: Any, w: Any, b: Any) -> Any:
    return F.linear(x.transpose(1, 2), w, b).transpose(1, 2).contiguous().relu()


def compressed_parts(w: Any, *parts: Any) -> Any:
    return (w @ torch.cat(parts, 1)).relu()


def compressed_twice(x: Any, w: Any, v: Any) -> Any:
    return (w @ x).relu(), (v @ x).relu()


def interactions(x: Any, w: Any) -> Any:
    return ((x @ x.transpose(1, 2)) @ w).relu()


def gated_sum(x: Any, w: Any) -> Any:
    return torch.einsum("abc,abcd->abd", x, w) + 1


def small_norms(*items: Any) -> Any:
    return [F.layer_norm(x, (32,), w, b).relu() for x, w, b in zip(items[::3], items[1::3], items[2::3], strict=True)]


def experts(*items: Any) -> Any:
    return [F.linear(x, w).relu() for x, w in zip(items[::2], items[1::2], strict=True)]


def gates(*xs: Any) -> Any:
    return [torch.sigmoid(x) * 2 for x in xs]


def heads_transposed(x: Any, w: Any) -> Any:
    return F.linear(x, w).permute(0, 2, 1).contiguous().relu()


def keys_transposed(q: Any, k: Any) -> Any:
    return (q @ k.transpose(1, 2).contiguous()).softmax(-1)


def one_transposed(x: Any, w: Any) -> Any:
    return F.linear(x, w).t().contiguous().relu()


def one_then_layer(x: Any, w: Any) -> Any:
    return F.linear(x.t().contiguous(), w).relu()


def queries_transposed(q: Any, k: Any) -> Any:
    return (q.transpose(1, 2).contiguous() @ k).softmax(-1)


def rows_transposed(x: Any, w: Any) -> Any:
    return F.linear(x.transpose(1, 2).contiguous(), w).relu()


def pieces_reshaped(x: Any) -> Any:
    return torch.stack([part.reshape(64, 8, 8) for part in x.split(64, 1)], 1).relu()


def split_and_joined(x: Any) -> Any:
    a, b, c, d = x.split(64, 1)
    return torch.cat([a, b], 1).relu(), torch.cat([c, d], 1).tanh()


def products_added(a: Any, b: Any, c: Any, d: Any) -> Any:
    return a @ b + c @ d


def products_added_in_front_of_a_kernel(a: Any, b: Any, c: Any, d: Any) -> Any:
    return (a @ b + c @ d).relu()


def feed_forward(x: Any, w: Any, b: Any) -> Any:
    return F.gelu(F.linear(x, w, b))


def residual(x: Any, w: Any, b: Any, o: Any) -> Any:
    return F.linear(x, w, b) + o


def convolution_block(x: Any, w: Any, b: Any, o: Any) -> Any:
    return (F.conv2d(x, w, b, padding=1) + o).relu()


def packed_layer(x: Any, w: Any) -> Any:
    """A layer on integers as quantised models have it, its activation, and rounding to integers again."""
    bits, weight = (x * 40 + 128).to(torch.uint8), (w * 40).to(torch.int8)
    packed = torch.ops.ferrite.pack_int8.default(weight, x.shape[0])
    scales, zero_points = w.sum(1).abs() + 1, torch.zeros(w.shape[0], dtype=torch.int64)
    y = torch.ops.onednn.qlinear_pointwise.default(
        bits, 0.1, 128, packed, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return torch.ops.quantized_decomposed.quantize_per_tensor.default(y.relu(), 30.0, 3, -128, 127, torch.int8)


ALWAYS = {"horizontal": "always"}
FOLD = {"transpose_folding": "always"}
FUSED = {"kernel_rewrites": "always"}
SIMPLE_LCE, PARTS_LCE = "use_triton_lce_replace_simple_LCE", "use_triton_lce_replace_normal_LCE"
MATMUL_LCE, FIRST_LCE = "use_matmul_lce_replace_normal_LCE", "use_matmul_fuse_lce_replace_first_LCE"
DOT = "use_triton_dot_compress"
LARGE_TABLES = ((2, 256, 4096),) * 2
SMALL_TABLES = ((128, 32, 64), (128, 16, 64), (128, 16, 64))
PIECES = (
    Piece("remove_noop_pass", "feed-forward layer in eval mode", encoder_layer, ((8, 64, 256), (512, 256), (256, 512))),
    Piece("remove_reshape_pass", "rows of heads, reshaped twice", heads_reshaped, ((8, 768, 128),)),
    Piece("remove_split_ops_pass", "packed projections split again", packed_and_split, ((8, 64, 256), (256, 256))),
    Piece("merge_concats_pass", "dense block of 6 layers", dense_block, ((8, 32, 28, 28),) * 6),
    Piece(
        "stack_to_unsqueeze_pass",
        "26 tables beside dense features",
        stacked_beside_dense,
        ((128, 64),) * 27,
        beside=("merge_concats_pass",),
    ),
    Piece("stack_to_unsqueeze_pass", "16 features stacked, no more", stacked_features, ((64, 64),) * 16),
    Piece("relu_nan_to_num", "cleaned activations", cleaned, ((256, 1024),)),
    Piece(
        "sink_cat_after_pointwise",
        "4 gates, joined for one call",
        joined_for_one_call,
        ((256, 256),) * 4,
        FUSED,
        beside=("remove_split_ops_pass",),
    ),
    Piece(
        "sink_cat_after_pointwise",
        "32 tiny gates, joined for one call",
        joined_for_one_call,
        ((4, 16),) * 32,
        FUSED,
        beside=("remove_split_ops_pass",),
    ),
    Piece("sink_cat_after_pointwise", "4 linear branches", linear_branches, ((256, 256), *((128, 256),) * 4), FUSED),
    Piece(
        "sink_cat_after_pointwise", "4 convolution branches", branches, ((4, 16, 28, 28), *((16, 16, 3, 3),) * 4), FUSED
    ),
    Piece("sink_cat_after_pointwise", "8 small branches", linear_branches, ((8, 32), *((16, 32),) * 8), FUSED),
    Piece("mutate_cat_pass", "neighbours of a split joined", split_and_joined, ((128, 256),)),
    Piece("move_reshape_out_of_split_stack_pass", "features reshaped and stacked", pieces_reshaped, ((64, 512),)),
    Piece("fuse_chunk_reshape_concat_pass", "8 heads put into the batch", heads_as_batch, ((16, 128, 512),)),
    Piece("fuse_chunk_reshape_unsqueeze_concat_pass", "8 heads as a dimension", heads_as_dimension, ((16, 128, 512),)),
    Piece("fuse_chunk_squeeze_cat_pass", "26 embeddings made flat", embeddings_flat, ((128, 26, 64),)),
    Piece("fuse_split_getitem_squeeze_cat", "16 of 26 embeddings made flat", some_embeddings_flat, ((128, 26, 64),)),
    Piece(
        "merge_stack_tahn_unbind_pass",
        "8 activations, stacked for one call",
        activations_together,
        ((64, 128),) * 8,
        FUSED,
    ),
    Piece(
        "einsum_to_pointwise_pass",
        "gated sum",
        gated_sum,
        ((16, 8, 32), (16, 8, 32, 64)),
        FUSED,
    ),
    Piece("linear_permute_fusion", "layer, then transposed", heads_transposed, ((8, 128, 256), (256, 256)), FOLD),
    Piece("permute_linear_fusion", "transposed, then a layer", rows_transposed, ((8, 256, 128), (256, 256)), FOLD),
    Piece(
        "linear_permute_fusion", "layer on one matrix, then transposed", one_transposed, ((512, 256), (256, 256)), FOLD
    ),
    Piece("permute_linear_fusion", "one matrix, then a layer", one_then_layer, ((256, 512), (256, 256)), FOLD),
    Piece("permute_matmul_fusion", "transposed on the left", queries_transposed, ((32, 64, 128), (32, 64, 128)), FOLD),
    Piece("permute_matmul_fusion", "scores of attention", keys_transposed, ((32, 128, 64), (32, 128, 64)), FOLD),
    Piece("fuse_split_linear_add_pass", "4 groups of a projection", grouped_projection, ((256, 256), *((64, 64),) * 4)),
    Piece(
        "fuse_parallel_linear_pass",
        "q, k, v, frozen",
        projections,
        ((128, 256), *((256, 256),) * 3),
        by_itself={"freeze": True},
        frozen=True,
    ),
    Piece("fuse_parallel_linear_pass", "q, k, v", projections, ((512, 256), *((256, 256),) * 3), ALWAYS),
    Piece(
        "fuse_parallel_linear_pass", "one layer, 4 inputs", one_layer_on_each, ((256, 256), *((128, 256),) * 4), ALWAYS
    ),
    Piece("group_batch_fusion_passes", "64 tiny experts", experts, ((4, 8), (8, 8)) * 64, ALWAYS),
    Piece("group_batch_fusion_passes", "64 tiny layer norms", small_norms, ((4, 32), (32,), (32,)) * 64, ALWAYS),
    Piece("group_batch_fusion_passes", "64 tiny gates", gates, ((4, 32),) * 64, ALWAYS),
    Piece("group_batch_fusion_passes", "8 experts", experts, ((16, 64), (64, 64)) * 8, ALWAYS),
    Piece("group_batch_fusion_passes", "8 layer norms", small_norms, ((16, 32), (32,), (32,)) * 8, ALWAYS),
    Piece("group_batch_fusion_passes", "16 gates", gates, ((16, 32),) * 16, ALWAYS),
    *(
        Piece(step, what, function, shapes, {"compress": (name,)}, {"compress": ("auto",)})
        for step, name, what, function, shapes in (
            (SIMPLE_LCE, "lce-simple", "64 channels of long samples to 8", compressed, ((8, 64, 4096), (8, 64), (8,))),
            (SIMPLE_LCE, "lce-simple", "64 channels of one sample to 8", compressed, ((1, 64, 65536), (8, 64), (8,))),
            (SIMPLE_LCE, "lce-simple", "64 embeddings to 16", compressed, ((128, 64, 64), (16, 64), (16,))),
            (PARTS_LCE, "lce-parts", "2 large tables to 2", compressed_parts, ((2, 512), *LARGE_TABLES)),
            (PARTS_LCE, "lce-parts", "3 small tables to 16", compressed_parts, ((16, 64), *SMALL_TABLES)),
            (MATMUL_LCE, "lce-matmul", "2 large tables to 2", compressed_parts, ((2, 512), *LARGE_TABLES)),
            (MATMUL_LCE, "lce-matmul", "3 small tables to 16", compressed_parts, ((16, 64), *SMALL_TABLES)),
            (FIRST_LCE, "lce-first", "two on one input", compressed_twice, ((128, 64, 64), (16, 64), (16, 64))),
            (DOT, "dot-compress", "interactions of 64 features, to 8", interactions, ((128, 64, 32), (64, 8))),
            (DOT, "dot-compress", "interactions of 16 features, to 8", interactions, ((128, 16, 32), (16, 8))),
        )
    ),
)
FROZEN: dict[str, Any] = {"by_itself": {"freeze": True}, "frozen": True}
AFTER_AUTOGRAD = (
    *(
        Piece("kernel_patterns", f"two products added, {what}", products_added, (*((m, k), (k, n)) * 2,), FUSED)
        for what, m, k, n in (("small", 16, 64, 64), ("of few terms", 512, 16, 512), ("large", 1024, 64, 1024))
    ),
    Piece(
        "kernel_patterns",
        "two products added, large, and relu",
        products_added_in_front_of_a_kernel,
        (*((1024, 64), (64, 1024)) * 2,),
        FUSED,
    ),
    Piece("mkldnn_fusion", "layer and gelu", feed_forward, ((256, 256), (1024, 256), (1024,)), FUSED),
    Piece("mkldnn_fusion", "layer and residual", residual, ((256, 256), (256, 256), (256,), (256, 256)), FUSED),
    Piece(
        "mkldnn_fusion",
        "convolution, residual, relu",
        convolution_block,
        ((4, 32, 28, 28), (32, 32, 3, 3), (32,), (4, 32, 28, 28)),
        FUSED,
    ),
    Piece("quantized_fusion", "packed layer, relu, rounded", packed_layer, ((128, 256), (256, 256)), FUSED, **FROZEN),
)
