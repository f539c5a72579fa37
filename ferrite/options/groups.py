"""The settings themselves, in groups: one frozen dataclass per stage, which `ferrite.options.Options` joins.

`option` says of each what it means, the environment variable that sets it, and whether it can change the code that is
generated.
"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any, Literal

from ferrite.options.values import Choices, Rounds

# The stages of one compilation, in order. They name times in the record, and failures.
Stage = Literal[
    "pre_grad", "capture", "joint", "partition", "freeze", "post_grad", "lower", "schedule", "codegen", "load", "cache"
]
STAGES: tuple[str, ...] = typing.get_args(Stage)
FuelStage = Literal["pre_grad", "joint", "freeze", "post_grad", "lower", "schedule"]
Compression = Literal["auto", "lce-first", "lce-parts", "lce-matmul", "lce-simple", "dot-compress"]


def option(
    default: Any, *, env: str, doc: str, changes_code: bool = True, least: int | None = None, most: int | None = None
) -> Any:
    """`least` and `most`: the numbers that a setting can be, both included."""
    metadata = {"env": env, "changes_code": changes_code, "doc": doc, "least": least, "most": most}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Whole:
    """What is compiled, and how exactly it keeps to eager."""

    strict: bool = option(
        False,
        env="FERRITE_STRICT",
        changes_code=False,
        doc="Raise a CompilerBug when a stage fails, instead of running that graph in eager with a warning.",
    )
    check_bounds: bool = option(
        False,
        env="FERRITE_CHECK_BOUNDS",
        doc="Kernels compare every address with the bounds of its memory, and report what lies outside instead of "
        "touching it: kernel, buffer, element and line of the model. Slower; for tests, and for looking into a crash.",
    )
    decompose: Literal["spelling", "core"] = option(
        "spelling",
        env="FERRITE_DECOMPOSE",
        doc="How far operators are taken apart while capturing. `spelling`: only into another spelling that runs the "
        "same kernels, so that eager calls stay whole. `core`: down to the core ATen operators.",
    )
    executor: Literal["native", "calls", "interpreter"] = option(
        "native",
        env="FERRITE_EXECUTOR",
        doc="What runs a graph. `native`: kernels compiled for this processor; graphs on other devices as with "
        "`calls`. `calls`: one call of torch per operator. `interpreter`: the loop program that the "
        "graph is lowered to, run element by element in the obvious way: slow, to check the lowering.",
    )
    partition: Literal["min-cut", "save-all"] = option(
        "min-cut",
        env="FERRITE_PARTITION",
        doc="What the forward graph saves for the backward graph. `min-cut`: the fewest bytes, recomputing cheap "
        "operators. `save-all`: everything the backward graph reads, recomputing nothing.",
    )
    max_autotune: bool = option(
        False,
        env="FERRITE_MAX_AUTOTUNE",
        doc="What the mode `max-autotune` asks for: matrix products on a GPU are measured while compiling, as torch's "
        "calls and as kernels of our own (see `tuning`); `cpu_grouped_gemm` needs it.",
    )
    cuda_graphs: bool = option(
        False,
        env="FERRITE_CUDA_GRAPHS",
        doc="Record GPU work once and replay it as CUDA graphs, to save launch overhead. No effect on CPU.",
    )
    recorded_gradients: Literal["copied", "lent"] = option(
        "copied",
        env="FERRITE_RECORDED_GRADIENTS",
        doc="With `cuda_graphs`: `copied` gives gradients memory of their own. `lent` leaves them in the memory of the "
        "recording, which saves a copy of the model's size and the time for it; the next backward waits for all that "
        "any stream was given before, since it may read them.",
    )
    numerics: Literal["relaxed", "strict"] = option(
        "relaxed",
        env="FERRITE_NUMERICS",
        doc="`strict` leaves out every rewrite that may round differently from eager, or draw other random numbers.",
    )
    rng: Literal["eager", "counter"] = option(
        "eager",
        env="FERRITE_RNG",
        doc="`eager`: random numbers are eager's, bit for bit. `counter`: our counter-based generator, which fuses; "
        "the same distribution, another stream.",
    )
    kernel_rewrites: Literal["off", "auto", "always"] = option(
        "auto",
        env="FERRITE_KERNEL_REWRITES",
        doc="Rewrites to forms that pay only as kernels: never, on the devices whose kernels they were made for, or "
        "wherever they are right, also where torch computes the form and its parts are faster.",
    )
    eager_random_order: bool = option(
        True,
        env="FERRITE_EAGER_RANDOM_ORDER",
        doc="Random numbers are drawn in the order of the program, even if a hook moves the calls that draw them. "
        "Costs nothing per call.",
    )


@dataclasses.dataclass(frozen=True)
class Passes:
    """Which passes run, in every stage."""

    skip: tuple[str, ...] = option(
        (),
        env="FERRITE_SKIP",
        doc="Names of passes that are not run (in the environment: separated by commas).",
    )
    extra: tuple[str, ...] = option(
        (),
        env="FERRITE_EXTRA",
        doc="Names of pre-grad passes that run once more after all others, in the order of the stage; also of passes "
        "in `skip`, which then run there alone.",
    )
    rounds: tuple[Rounds, ...] = option(
        (),
        env="FERRITE_ROUNDS",
        doc="How often a pre-grad pass runs in its place, by its name: until it finds nothing, at most so often. Once "
        "without. In the environment and on the command line: `name:2,name:3`.",
    )
    passes: tuple[Any, ...] = option(
        (),
        env="FERRITE_PASSES",
        doc="Passes of your own, made with `ferrite.graph_pass`; in the environment `module:name`, with commas.",
    )
    fuel: int | None = option(
        None,
        env="FERRITE_FUEL",
        least=0,
        doc="Stop rewriting after so many rewrites: a wrong one is found by halving.",
    )
    fuel_stage: FuelStage | None = option(
        None,
        env="FERRITE_FUEL_STAGE",
        doc="The one stage that `fuel` is about, counted over the forward and the backward graph together: rewrites of "
        "a stage of passes; operators that are lowered, while others are calls (`lower`); fusions, reuses of memory "
        "and the like (`schedule`). Without: every stage, each for itself.",
    )
    graphs: str | None = option(
        None,
        env="FERRITE_GRAPHS",
        changes_code=False,
        doc="Compile only these graphs, by the order in which this process captures them: `0`, `2-5`, `0,3`; the "
        "others run in eager. `none`: all of them.",
    )


@dataclasses.dataclass(frozen=True)
class PreGrad:
    """Before autograd has seen the graph."""

    pre_grad: bool = option(True, env="FERRITE_PRE_GRAD", doc="Run the pre-grad passes.")
    pre_grad_level: Literal["torch", "aten"] = option(
        "torch",
        env="FERRITE_PRE_GRAD_LEVEL",
        doc="How the pre-grad stage spells the graph it hands on: torch functions, or ATen operators.",
    )
    horizontal: Literal["off", "auto", "always"] | Choices = option(
        "auto",
        env="FERRITE_HORIZONTAL",
        doc="Join independent calls of one kind into one: never, where the cost model shows a win, or wherever it is "
        "right. Or the rules that may do so wherever it is right, and no others: names, or limits by name.",
    )
    transpose_folding: Literal["off", "auto", "always"] = option(
        "auto",
        env="FERRITE_TRANSPOSE_FOLDING",
        doc="Let matrix products read their operands transposed: never, where a copy is saved, or wherever it is "
        "right.",
    )
    split_cat: Literal["off", "on"] | Choices = option(
        "on",
        env="FERRITE_SPLIT_CAT",
        doc="Cancel splits against concats before differentiation; True and False do as well. Or the passes that may "
        'do so, and no others: names, or settings by name, as in `{"mutate_cat_pass": {"min_run": 3}}`.',
    )
    split_cat_min_run: int = option(
        2,
        env="FERRITE_SPLIT_CAT_MIN_RUN",
        least=2,
        doc="How many neighbouring pieces a concat must hold for them to be taken together.",
    )
    compress: tuple[Compression, ...] = option(
        (),
        env="FERRITE_COMPRESS",
        doc="Rewrites of embedding compression to run wherever they are right; `auto`: all, where the cost model shows "
        "a win.",
    )
    eval_conv_bn: bool = option(
        False,
        env="FERRITE_EVAL_CONV_BN",
        doc="A batch norm in eval mode behind a convolution becomes part of its weights, also while training.",
    )
    gumbel_argmax: bool = option(
        True,
        env="FERRITE_GUMBEL_ARGMAX",
        doc="Sampling by argmax(softmax / noise) needs no softmax, where kernels are compiled.",
    )
    pre_grad_custom_pass: Any = option(
        (),
        env="FERRITE_PRE_GRAD_CUSTOM_PASS",
        doc="A callable on the graph, or a list of them, run on the graph of torch calls after the pre-grad rewrites; "
        "in the environment `module:name`.",
    )
    check_numerics: Choices = option(
        (),
        env="FERRITE_CHECK_NUMERICS",
        changes_code=False,
        doc="Run the graph before and after the pre-grad passes on copies of its inputs and compare. The name says "
        "what a difference does: `raise`, `warn`, or `bisect`, which also finds the pass. Settings: inputs, steps, "
        "rtol, atol, gradients.",
    )


@dataclasses.dataclass(frozen=True)
class Joint:
    """Forward and backward in one graph."""

    joint: bool = option(
        True,
        env="FERRITE_JOINT",
        doc="Run the joint passes: on forward and backward together, before they are partitioned, and on inference "
        "graphs.",
    )
    attention: Literal["off", "auto", "always"] = option(
        "auto",
        env="FERRITE_ATTENTION",
        doc="Attention that is written out becomes one call: never, where it pays, or wherever it is right.",
    )
    pad_mm: Literal["off", "auto", "always"] = option(
        "auto",
        env="FERRITE_PAD_MM",
        doc="Pad matrix products to sides that matrix units like: never, where the cost model shows a win (never on a "
        "CPU), or wherever it is right.",
    )
    joint_custom_pre_pass: Any = option(
        (),
        env="FERRITE_JOINT_CUSTOM_PRE_PASS",
        doc="The same on the joint graph, before the joint rewrites.",
    )
    joint_custom_post_pass: Any = option(
        (),
        env="FERRITE_JOINT_CUSTOM_POST_PASS",
        doc="The same on the joint graph, after the joint rewrites.",
    )


@dataclasses.dataclass(frozen=True)
class Freezing:
    """Inference with parameters as constants."""

    freeze: bool = option(
        False,
        env="FERRITE_FREEZE",
        doc="Inference with gradients off: parameters become constants, and what depends on them alone is computed "
        "once.",
    )
    freeze_discard_parameters: bool = option(
        False,
        env="FERRITE_FREEZE_DISCARD_PARAMETERS",
        doc="With freeze: the model's own parameters lose their contents once they are constants, so that nothing is "
        "kept twice. Using one raises an error.",
    )
    weight_layouts: Literal["off", "auto", "always"] = option(
        "auto",
        env="FERRITE_WEIGHT_LAYOUTS",
        doc="With freeze: weights that are stored anew anyway are stored as torch's kernels on a CPU like them best: "
        "never, where that was measured to gain much, or wherever it is right.",
    )


@dataclasses.dataclass(frozen=True)
class PostGrad:
    """One graph per direction."""

    post_grad: bool = option(True, env="FERRITE_POST_GRAD", doc="Run the post-grad passes.")
    post_grad_fusions: Choices = option(
        (),
        env="FERRITE_POST_GRAD_FUSIONS",
        doc="Optional groups of rewrites to run, in this order: names, or settings by name. In the environment and on "
        "the command line: `name,name:setting=value:setting=value`.",
    )
    post_grad_custom_pre_pass: Any = option(
        (),
        env="FERRITE_POST_GRAD_CUSTOM_PRE_PASS",
        doc="A callable on the graph, or a list of them, run before the post-grad rewrites; in the environment "
        "`module:name`.",
    )
    post_grad_custom_post_pass: Any = option(
        (),
        env="FERRITE_POST_GRAD_CUSTOM_POST_PASS",
        doc="The same, run after the post-grad rewrites.",
    )
    cpu_grouped_gemm: bool = option(
        False,
        env="FERRITE_CPU_GROUPED_GEMM",
        doc="Linear layers on one input become one grouped call (with max_autotune).",
    )
    cpu_concat_linear: bool = option(
        False,
        env="FERRITE_CPU_CONCAT_LINEAR",
        doc="Linear layers with constant int4 weights on one input become one layer.",
    )
    keep_half_addmm: bool = option(
        True,
        env="FERRITE_KEEP_HALF_ADDMM",
        doc="In half precision a bias stays inside its matrix product: behind it the product would be rounded once "
        "more.",
    )
    own_products: Literal["off", "auto", "always"] = option(
        "auto",
        env="FERRITE_OWN_PRODUCTS",
        doc="Matrix products as kernels of our own, which hold what follows them as well, and not as calls of torch's: "
        "never, where that was measured to be as fast or faster (on Arm, beside MKL for single rows and for a few rows "
        "of frozen weights, with weights of 8 bits on any CPU, on an H200 for a few rows; and see `tuning`), or "
        "wherever they can be.",
    )
    tuning: Path | None = option(
        None,
        env="FERRITE_TUNING",
        doc="A record of measurements, a text file: matrix products on a GPU that it says are faster so are kernels of "
        "our own, arranged as it says. With `max_autotune` what it lacks is measured and added to it. One of another "
        "GPU, or of other versions of torch and Triton, is not used, and a warning says why.",
    )
    distributed: Literal["off", "auto"] | Choices = option(
        "auto",
        env="FERRITE_DISTRIBUTED",
        doc="Collectives in a graph: left as they are; merged and moved where the cost model of the network shows a "
        "gain; or the passes that may do so, and no others: names, or settings by name, as in "
        '`{"bucket_ag": {"cap_mb": 100}, "overlap": {}}`. Graphs without collectives are not looked at.',
    )
    network: Path | None = option(
        None,
        env="FERRITE_NETWORK",
        doc="What communication costs, a text file of `python -m ferrite comm-bench`, the same for every rank. "
        "Without, figures of usual links are assumed.",
    )
    own_attention: Literal["off", "auto", "always"] = option(
        "auto",
        env="FERRITE_OWN_ATTENTION",
        doc="Torch's attention on a CPU as a kernel of our own: never, where that was measured to be faster, or "
        "wherever it can be. Flex attention is one in any case.",
    )
    own_convolutions: Literal["off", "auto", "always"] = option(
        "auto",
        env="FERRITE_OWN_CONVOLUTIONS",
        doc="Convolutions as kernels of our own, which hold what follows them as well, and not as calls of torch's: "
        "never, where that was measured to be faster (on Arm), or wherever they can be.",
    )
    product_layouts: Literal["off", "auto", "always"] = option(
        "auto",
        env="FERRITE_PRODUCT_LAYOUTS",
        doc="Matrix products whose operands both have their rows along what is added up, as in linear layers: one "
        "operand is laid out anew never, where that was measured to gain (on Arm), or wherever it is right.",
    )
    online_softmax: bool = option(
        True,
        env="FERRITE_ONLINE_SOFTMAX",
        doc="The maximum and the sum of a softmax are found in one pass, on GPUs.",
    )
    const_scatter: bool = option(
        True,
        env="FERRITE_CONST_SCATTER",
        doc="One write per row into a constant becomes a selection by coordinate, on GPUs.",
    )
    fuse_int_mm_scale: bool = option(
        False,
        env="FERRITE_FUSE_INT_MM_SCALE",
        doc="The product of int8 matrices and the scale behind it become one operator, where `kernel_rewrites` says "
        "`always`.",
    )


@dataclasses.dataclass(frozen=True)
class Files:
    """What is written where, and what happens on failures."""

    dump_dir: Path | None = option(
        None,
        env="FERRITE_DUMP",
        changes_code=False,
        doc="Write every stage here: the graph before and after each pass that changed it, as Python that runs by "
        "itself, the loop program, each step of scheduling, the kernels, the host program.",
    )
    report: Path | None = option(
        None,
        env="FERRITE_REPORT",
        changes_code=False,
        doc="Write a page about all that was compiled when the process ends: one file of HTML, or the record alone if "
        "it is called `.json`. What the cache has is looked up, but compiled again, so that there is something to see.",
    )
    measure: bool = option(
        False,
        env="FERRITE_MEASURE",
        changes_code=False,
        doc="With `report`: kernels and calls of torch run one by one, and the page has the time of each. Slower.",
    )
    cache: bool = option(
        True,
        env="FERRITE_CACHE",
        changes_code=False,
        doc="Keep compiled code on disk, and use it again where everything that it depends on is the same.",
    )
    cache_size: int = option(
        2048,
        env="FERRITE_CACHE_SIZE",
        changes_code=False,
        least=0,
        most=1 << 40,  # an exbibyte: beyond it nobody counts bytes
        doc="How many mebibytes of compiled code are kept; what has not been used for longest goes first.",
    )
    cache_dir: Path | None = option(
        None,
        env="FERRITE_CACHE_DIR",
        changes_code=False,
        doc="Where ferrite keeps files. Default: `ferrite` in the user's cache folder (`XDG_CACHE_HOME`, or `.cache` "
        "in the home folder).",
    )
    repro_dir: Path | None = option(
        None,
        env="FERRITE_REPRO_DIR",
        changes_code=False,
        doc="Where a failing stage keeps its repro folder. Default: `repro` in the cache folder.",
    )
    keep_repro: bool = option(
        True,
        env="FERRITE_KEEP_REPRO",
        changes_code=False,
        doc="Keep a repro folder when a stage fails.",
    )
    progress: Literal["auto", "on", "off"] = option(
        "auto",
        env="FERRITE_PROGRESS",
        changes_code=False,
        doc="A line that says what a compile of more than two seconds is doing: in a terminal, always, or never.",
    )
    progress_callback: Any = option(
        (),
        env="FERRITE_PROGRESS_CALLBACK",
        changes_code=False,
        doc="A callable, or a list of them, that is told of every stage and kernel: stage, seconds, kernels done and "
        "of how many, line of the model.",
    )
    fail_at: Stage | None = option(
        None,
        env="FERRITE_FAIL_AT",
        changes_code=False,
        doc="Pretend that this stage fails, to see what a failure looks like and to try code that handles one.",
    )
