"""What each pass of the pre-grad stage gains, on a piece of a model where it should: `python -m bench.passes rewrites`.

Each case is a graph as Dynamo captures it, spelled as the stage spells it. It runs as it is, and after the one pass,
both in eager, turn by turn in one process. Below 1 the rewritten graph is faster. "Fires" is whether the pass did
anything by itself: under the default options, or with `compress="auto"` for compressions. Where it did not, the figures
are with the option that asks for it, and should not be below 1. So each pass has a case in which it pays, and one that
is left where there is a choice. Weights of a frozen case are constants, joined once. "Others" is the share of the
machine that other processes had meanwhile.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.measure import ratio, undisturbed
from ferrite.options import Options
from ferrite.passes import PRE_GRAD, pre_grad_passes


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


def rows_transposed(x: Any, w: Any) -> Any:
    return F.linear(x.transpose(1, 2).contiguous(), w).relu()


def pieces_reshaped(x: Any) -> Any:
    return torch.stack([part.reshape(64, 8, 8) for part in x.split(64, 1)], 1).relu()


def split_and_joined(x: Any) -> Any:
    a, b, c, d = x.split(64, 1)
    return torch.cat([a, b], 1).relu(), torch.cat([c, d], 1).tanh()


ALWAYS = {"horizontal": "always"}
FOLD = {"transpose_folding": "always"}
FUSED = {"kernel_rewrites": True}
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
            (SIMPLE_LCE, "lce-simple", "64 embeddings to 16", compressed, ((128, 64, 64), (16, 64), (16,))),
            (PARTS_LCE, "lce-parts", "2 large tables to 1", compressed_parts, ((1, 512), *LARGE_TABLES)),
            (PARTS_LCE, "lce-parts", "3 small tables to 16", compressed_parts, ((16, 64), *SMALL_TABLES)),
            (MATMUL_LCE, "lce-matmul", "2 large tables to 1", compressed_parts, ((1, 512), *LARGE_TABLES)),
            (MATMUL_LCE, "lce-matmul", "3 small tables to 16", compressed_parts, ((16, 64), *SMALL_TABLES)),
            (FIRST_LCE, "lce-first", "two on one input", compressed_twice, ((128, 64, 64), (16, 64), (16, 64))),
            (DOT, "dot-compress", "interactions of 64 features, to 8", interactions, ((128, 64, 32), (64, 8))),
            (DOT, "dot-compress", "interactions of 16 features, to 8", interactions, ((128, 16, 32), (16, 8))),
        )
    ),
)


def captured(piece: Piece, inputs: list[torch.Tensor]) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """The graph of a piece, and its inputs in the order in which the graph takes them."""
    torch.compiler.reset()
    found: list[tuple[torch.fx.GraphModule, list[torch.Tensor]]] = []

    def keep(gm: torch.fx.GraphModule, given: list[Any]) -> Any:
        found.append((gm, list(given)))
        return gm.forward

    torch.compile(piece.function, backend=keep, fullgraph=True, dynamic=False)(*inputs)
    ((gm, order),) = found
    return gm, order


def staged(piece: Piece, gm: torch.fx.GraphModule, inputs: list[torch.Tensor], *skip: str, **options: Any) -> Any:
    """The graph after the stage without any pass that is not needed to read it, but for the one that is measured."""
    kept = {*NEEDED, *piece.beside, piece.step}
    others = [step.name for step in PRE_GRAD.passes if step.name not in kept]
    return pre_grad_passes(copy.deepcopy(gm), inputs, Options(strict=True, skip=(*others, *skip), **options))


def before_and_after(piece: Piece, gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> tuple[Any, Any, str]:
    """The graph without the pass and with it, and whether it fires by itself, only if asked, or not."""
    before = staged(piece, gm, inputs, piece.step, **piece.by_itself)
    for how, options in (("yes", piece.by_itself), ("asked", {**piece.by_itself, **piece.options})):
        after = staged(piece, gm, inputs, **options)
        if str(after.graph) != str(before.graph):
            return before, after, how
    return before, after, "no"


def with_constants(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
    """A graph in which all that depends on parameters alone is computed once, as freezing does."""
    places = zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)
    known: dict[torch.fx.Node, Any] = {node: value for node, value in places if isinstance(value, torch.nn.Parameter)}
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.all_input_nodes and known.keys() >= set(node.all_input_nodes):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
            setattr(gm, f"constant_{node.name}", known[node])
            with gm.graph.inserting_before(node):
                node.replace_all_uses_with(gm.graph.get_attr(f"constant_{node.name}"))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


# The form in which passes read a graph, and the closing ones; they change how calls are spelled, not which there are.
NEEDED = frozenset(
    {"numpy_compat_normalization", "normalize_node_kwargs_pass", "normalization_pass", "torch_spelling"}
    | {"stack_to_unsqueeze_pass", "unsqueeze_to_stack_pass"}
)


def one_call(gm: torch.fx.GraphModule, inputs: list[torch.Tensor], training: bool) -> Callable[[], object]:
    forward = gm.forward

    def call() -> None:
        results = forward(*inputs)
        if training:
            torch.autograd.grad(sum(result.sum() for result in results), inputs)
        if inputs[0].is_cuda:
            torch.cuda.synchronize()

    return call


def rows(rounds: int, device: str, only: str = "") -> Iterator[str]:
    yield "| pass | piece of a model | fires | kind | as captured, µs | rewritten to captured | others |"
    yield "|---|---|---|---|---|---|---|"
    for piece in PIECES:
        for training in piece.kinds() if only in piece.step else ():
            with torch.set_grad_enabled(training):
                gm, inputs = captured(piece, piece.inputs(training, device))
                before, after, how = before_and_after(piece, gm, inputs)
                if piece.frozen:
                    before, after = with_constants(before, inputs), with_constants(after, inputs)
                calls = {"before": one_call(before, inputs, training), "after": one_call(after, inputs, training)}
                seconds, others = undisturbed(calls, rounds)
            middle, low, high = ratio(seconds["after"], seconds["before"])
            kind = "training" if training else "inference"
            micros = statistics.median(seconds["before"]) * 1e6
            yield (
                f"| {piece.step} | {piece.what} | {how} | {kind} | {micros:.0f} | "
                f"{middle:.2f} ({low:.2f} to {high:.2f}) | {others:.0%} |"
            )
