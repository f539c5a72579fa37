"""Whole models, compiled and eager, judged against float64 runs: outputs, gradients, state, caches."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

import ferrite
from ferrite.debug import CompileRecord
from tests.compare import assert_no_farther, assert_same_tree, compile_strict, compiled_graphs, loss_of, reset
from tests.models.architectures import ARCHITECTURES, BATCH, Architecture, tokens
from tests.models.exact import in_float64

# Runs a model through `call`, the model itself or its compiled form, and returns all that is compared.
Scenario = Callable[[Any, Callable[..., Any]], dict[str, Any]]

# These compile longest, and what they are made of occurs in the others too.
SLOW = {"qwen2-moe", "mobilenet-v2", "bart", "whisper", "detr", "t5", "wav2vec2", "segformer", "clip", "mixtral"}
SLOW |= {"mobilenet-v1", "yolos", "gemma2", "qwen2", "bert", "gpt2", "swin", "efficientnet"}
SLOW_TO_TRAIN = (
    SLOW | {"modernbert"} | {"bert", "gpt2", "qwen2", "gemma2", "mixtral", "mamba", "wav2vec2", "mobilenet-v1"}
)
SLOW_TO_TRAIN |= {"segformer", "yolos", "clip", "swin", "efficientnet", "vit", "distilbert", "resnet"}

CACHE_PARTS = (hf.Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)


def cases(chosen: Iterable[str], slow: Collection[str] = (), quick: Collection[str] = ()) -> list[Any]:
    """One test case per architecture, with its marks."""
    marks = {name: [pytest.mark.slow] for name in slow} | {name: [pytest.mark.quick] for name in quick}
    return [pytest.param(ARCHITECTURES[name], id=name, marks=marks.get(name, [])) for name in chosen]


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, slow=SLOW | {"mamba"}, quick=["distilbert"]))
def test_forward_matches_eager(architecture: Architecture, golden: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the rules that fire are those that fired before: one that silently stops firing is seen."""
    monkeypatch.setenv("FERRITE_PRODUCT_LAYOUTS", "always")  # on any machine
    monkeypatch.setenv("FERRITE_OWN_PRODUCTS", "off")
    monkeypatch.setenv("FERRITE_OWN_CONVOLUTIONS", "off")
    monkeypatch.setenv("FERRITE_OWN_ATTENTION", "off")

    @torch.no_grad()
    def forward(model: Any, call: Callable[..., Any]) -> dict[str, Any]:
        return {"outputs": call(**inputs_for(model, architecture))}

    fired: collections.Counter[str] = collections.Counter()
    for record in compiled_by(lambda: assert_matches_eager(architecture, forward)):
        fired.update(record.rewrites)
    if torch.__version__.startswith("2.13"):  # other versions capture other graphs
        assert golden == "".join(f"{count:>4}  {rule}\n" for rule, count in sorted(fired.items()))


@pytest.mark.parametrize(
    "architecture", cases([a.name for a in ARCHITECTURES.values() if a.trains], slow=SLOW_TO_TRAIN)
)
def test_training_step_matches_eager(architecture: Architecture) -> None:
    def step(model: Any, call: Callable[..., Any]) -> dict[str, Any]:
        # Plain descent: a rule that divides by the gradient would blow up the rounding of vanishing ones.
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
        outputs = call(**inputs_for(model, architecture))
        # a loss of the model's own is one of the outputs
        (outputs.loss if "loss" in outputs else loss_of(outputs)).backward()
        optimizer.step()
        return {
            "outputs": outputs,
            "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
            "state": model.state_dict(),
            "random state": torch.get_rng_state(),
        }

    assert_matches_eager(architecture, step)


@pytest.mark.parametrize("architecture", cases(["gpt2", "llama", "gemma2"], slow={"gpt2", "llama", "gemma2"}))
def test_decoding_with_growing_cache_matches_eager(architecture: Architecture) -> None:
    def decode(model: Any, call: Callable[..., Any]) -> dict[str, Any]:
        return decoded(call, past_key_values=hf.DynamicCache(config=model.config))

    assert_matches_eager(architecture, decode)


@pytest.mark.parametrize("architecture", cases(["llama", "gemma2"], slow={"gemma2"}))
def test_decoding_with_preallocated_cache_matches_eager(architecture: Architecture) -> None:
    def decode(model: Any, call: Callable[..., Any]) -> dict[str, Any]:
        cache = hf.StaticCache(config=model.config, max_cache_len=10)
        # Allocated before the first call, as transformers asks for when reading the prompt is compiled too.
        heads, width = model.config.num_key_value_heads, model.config.head_dim
        cache.early_initialization(BATCH, heads, width, model.dtype, model.device)
        return decoded(call, past_key_values=cache)

    assert_matches_eager(architecture, decode)


@pytest.mark.parametrize("architecture", cases(["mamba"], slow={"mamba"}))
def test_decoding_with_recurrent_state_matches_eager(architecture: Architecture) -> None:
    def decode(model: Any, call: Callable[..., Any]) -> dict[str, Any]:
        return decoded(call, cache_params=hf.DynamicCache(config=model.config))

    assert_matches_eager(architecture, decode)


@pytest.mark.parametrize("architecture", cases(["t5", "bart"], slow={"t5", "bart"}))
def test_decoding_with_cross_attention_cache_matches_eager(architecture: Architecture) -> None:
    def decode(model: Any, call: Callable[..., Any]) -> dict[str, Any]:
        source = {name: architecture.inputs()[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            encoded = model.get_encoder()(**source)
        own, cross = (hf.DynamicCache(config=model.config) for _ in range(2))
        return decoded(
            call,
            ids="decoder_input_ids",
            past_key_values=hf.EncoderDecoderCache(own, cross),
            encoder_outputs=encoded,
            attention_mask=source["attention_mask"],
        )

    assert_matches_eager(architecture, decode)


@pytest.mark.parametrize("architecture", cases(["bert", "llama", "distilbert"], slow={"bert", "llama"}))
def test_one_dynamic_graph_serves_every_length(architecture: Architecture) -> None:
    @torch.no_grad()
    def forward(model: Any, call: Callable[..., Any]) -> dict[str, Any]:
        inputs = inputs_for(model, architecture)
        return {f"outputs at length {length}": call(**shortened(inputs, length)) for length in (12, 7)}

    assert_matches_eager(architecture, forward, dynamic=True)
    assert compiled_graphs() == 1, "the second length was compiled again"


def compiled_by(work: Callable[[], None]) -> list[CompileRecord]:
    """What was compiled meanwhile: a record for each graph, and a model may be several (torch 2.11 leaves off where
    transformers copies a configuration)."""
    earlier = ferrite.recent_compiles()  # kept meanwhile: a new record may be where one was that is dropped
    work()
    return [record for record in ferrite.recent_compiles() if not any(record is old for old in earlier)]


def inputs_for(model: Any, architecture: Architecture) -> dict[str, Any]:
    """The architecture's inputs, with floating-point ones in the model's type."""
    return {
        name: value.to(model.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in architecture.inputs().items()
    }


def shortened(inputs: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """Sequences cut to `length`; one-dimensional inputs are labels of whole sequences.

    Copies, since for a view Dynamo guards on the sizes of its base as well.
    """
    return {name: x[:, :length].clone() if x.dim() == 2 else x for name, x in inputs.items()}


@torch.no_grad()
def decoded(call: Callable[..., Any], ids: str = "input_ids", **given: Any) -> dict[str, Any]:
    """Reads a prompt into the cache and then three single tokens; all logits, and the cache at the end."""
    text = tokens(8)
    pieces = text[:, :5], text[:, 5:6], text[:, 6:7], text[:, 7:8]
    logits = [call(**{ids: piece}, use_cache=True, **given).logits for piece in pieces]
    return {"logits": logits, "cache": given.get("past_key_values", given.get("cache_params"))}


def assert_matches_eager(architecture: Architecture, scenario: Scenario, **compile_options: Any) -> None:
    reset()
    model = architecture.model()
    eager = observed(scenario, model, model)
    model = architecture.model().double()
    with in_float64():
        exact = observed(scenario, model, model)
    model = architecture.model()
    ours = observed(scenario, model, compile_strict(model, **compile_options))
    assert compiled_graphs() > 0, "nothing was compiled"
    assert ours.keys() == eager.keys() == exact.keys()
    for part in eager:
        if part == "gradients":
            assert_same_together(ours[part], eager[part], exact[part], part)
        elif part == "state":
            floats = {name for name, value in eager[part].items() if value.is_floating_point()}
            assert_same_together(*(chosen(run[part], floats) for run in (ours, eager, exact)), what=part)
            counts = eager[part].keys() - floats
            assert_same_tree(*(chosen(run[part], counts) for run in (ours, eager, exact)), what=part)
        else:
            assert_same_tree(ours[part], eager[part], exact[part], part)


def chosen(tensors: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in tensors.items() if name in names}


def observed(scenario: Scenario, model: Any, call: Callable[..., Any]) -> dict[str, Any]:
    torch.manual_seed(2)
    return {part: opened(value) for part, value in scenario(model, call).items()}


def opened(value: Any) -> Any:
    """Plain containers of all that a caller can reach; a cache left whole would be one leaf."""
    if isinstance(value, CACHE_PARTS):
        return {"type": type(value).__name__, **opened(vars(value))}
    if isinstance(value, hf.utils.ModelOutput):
        return {"type": type(value).__name__, **opened(dict(value))}
    if isinstance(value, dict):
        return {key: opened(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(opened(part) for part in value)
    return value


def assert_same_together(
    ours: dict[str, torch.Tensor | None],
    eager: dict[str, torch.Tensor | None],
    exact: dict[str, torch.Tensor | None],
    what: str,
) -> None:
    """All gradients, or all that a step left behind, together, each in units of its largest element.

    Together, because all of them carry the error of the few steps they have in common: one tensor alone says
    little about whose error is larger. Some vanish, such as the gradient of the bias of attention keys; what is
    computed for them is the rounding of larger terms that cancel, so their unit is the model's largest.
    """
    present = [name for name, gradient in eager.items() if gradient is not None]
    assert present == [name for name, gradient in ours.items() if gradient is not None]
    units = {name: exact[name].abs().max() for name in present}
    largest = max(units.values())
    for name in present:
        mine, theirs = ours[name], eager[name]
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride()), name
        if (theirs - exact[name]).abs().max() > units[name]:
            units[name] = largest
    scaled = [torch.cat([run[name].flatten() / units[name] for name in present]) for run in (ours, eager, exact)]
    assert_no_farther(*scaled, where=what)
