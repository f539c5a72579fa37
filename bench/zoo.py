"""Real architectures in sizes that take a forward pass of 5 to 300 milliseconds on two cores; random weights.

Nothing is downloaded. Dropout stays as the architectures have it; what draws from other generators than torch's, such
as layer dropping and masking of speech, is off. So is the dropout in front of segformer's classifier: with one image,
torch traces the tensor in front of it in another memory format than eager has (a batch of one, reshaped, has another
stride there), and so, under every backend, the numbers fall on other elements.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the import, which reads it once

import torch
import transformers as hf

Inputs = dict[str, Any]
VOCABULARY, CLASSES = 8192, 100


@dataclass(frozen=True)
class Model:
    """An architecture: how to build it, and the inputs of a batch, with labels for training."""

    name: str
    family: str
    build: Callable[[], torch.nn.Module]
    make: Callable[[int], Inputs]
    labels: Callable[[int], Inputs] = lambda batch: {}
    larger: int = 8  # the second batch that is measured
    smaller: int = 1  # the first

    def ready(self, dtype: torch.dtype, training: bool) -> torch.nn.Module:
        torch.manual_seed(0)
        return self.build().to(dtype).train(training)

    def inputs(self, batch: int, dtype: torch.dtype, training: bool) -> Inputs:
        torch.manual_seed(1)
        given = {**self.make(batch), **(self.labels(batch) if training else {})}
        return {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in given.items()
        }


def loss_of(outputs: Any) -> torch.Tensor:
    """The model's own loss, or the mean square of all it gives out."""
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        return loss  # type: ignore[no-any-return]
    parts = [value.float().square().mean() for value in floats_of(outputs) if value.requires_grad]
    return torch.stack(parts).sum()


def floats_of(outputs: Any) -> Iterator[torch.Tensor]:
    for value in outputs.values() if isinstance(outputs, dict) else outputs:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield value


def image(size: int) -> Callable[[int], Inputs]:
    return lambda batch: {"pixel_values": torch.randn(batch, 3, size, size)}


def text(length: int, name: str = "input_ids") -> Callable[[int], Inputs]:
    return lambda batch: {name: torch.randint(4, VOCABULARY, (batch, length))}


def padded_text(length: int) -> Callable[[int], Inputs]:
    def make(batch: int) -> Inputs:
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[-1, length - length // 8 :] = 0
        return {**text(length)(batch), "attention_mask": mask}

    return make


def two_texts(length: int, answer: int) -> Callable[[int], Inputs]:
    return lambda batch: {**text(length)(batch), **text(answer, "decoder_input_ids")(batch)}


def speech(samples: int) -> Callable[[int], Inputs]:
    return lambda batch: {"input_values": torch.randn(batch, samples)}


def spectrogram(bins: int, frames: int, answer: int) -> Callable[[int], Inputs]:
    features = "input_features"
    return lambda batch: {features: torch.randn(batch, bins, frames), **text(answer, "decoder_input_ids")(batch)}


def image_and_text(batch: int) -> Inputs:
    return {**image(128)(batch), **padded_text(32)(batch)}


def one_label(batch: int) -> Inputs:
    return {"labels": torch.randint(0, CLASSES, (batch,))}


def label_per_token(length: int) -> Callable[[int], Inputs]:
    return text(length, "labels")


def contrast(batch: int) -> Inputs:
    return {"return_loss": True}


LABELS: Inputs = {"num_labels": CLASSES, "problem_type": "single_label_classification"}
TEXT: Inputs = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER: Inputs = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 512,
}
DECODER: Inputs = {**TEXT, **ENCODER, "num_key_value_heads": 2, "use_cache": False}
VIT: Inputs = {
    "hidden_size": 192,
    "num_hidden_layers": 12,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "image_size": 224,
    "patch_size": 16,
    **LABELS,
}
TWO_STACKS: Inputs = {
    "d_model": 256,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 1024,
    "decoder_ffn_dim": 1024,
}
RESNET_18: Inputs = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"}


def resnet() -> torch.nn.Module:
    return hf.ResNetForImageClassification(hf.ResNetConfig(**RESNET_18, **LABELS))


def resnet_50() -> torch.nn.Module:
    return hf.ResNetForImageClassification(hf.ResNetConfig(**LABELS))


def resnet_bottleneck() -> torch.nn.Module:
    return hf.ResNetForImageClassification(hf.ResNetConfig(hidden_sizes=[128, 256, 512, 1024], **LABELS))


def regnet() -> torch.nn.Module:
    sizes = {"hidden_sizes": [24, 56, 152, 368], "depths": [1, 1, 4, 7], "groups_width": 8}
    return hf.RegNetForImageClassification(hf.RegNetConfig(**sizes, layer_type="y", **LABELS))


def convnext() -> torch.nn.Module:
    config = hf.ConvNextConfig(hidden_sizes=[40, 80, 160, 320], depths=[2, 2, 6, 2], **LABELS)
    return hf.ConvNextForImageClassification(config)


def mobilenet_v1() -> torch.nn.Module:
    return hf.MobileNetV1ForImageClassification(hf.MobileNetV1Config(**LABELS))


def mobilenet_v2() -> torch.nn.Module:
    return hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config(**LABELS))


def efficientnet() -> torch.nn.Module:
    config = hf.EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, **LABELS)
    return hf.EfficientNetForImageClassification(config)


def vit() -> torch.nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**VIT))


def deit() -> torch.nn.Module:
    return hf.DeiTForImageClassification(hf.DeiTConfig(**VIT))


def swin() -> torch.nn.Module:
    config = hf.SwinConfig(embed_dim=48, depths=[2, 2, 4, 2], num_heads=[2, 4, 8, 16], window_size=7, **LABELS)
    return hf.SwinForImageClassification(config)


def segformer() -> torch.nn.Module:
    return hf.SegformerForSemanticSegmentation(hf.SegformerConfig(num_labels=CLASSES, classifier_dropout_prob=0.0))


def detr() -> torch.nn.Module:
    backbone = hf.ResNetConfig(**RESNET_18, out_features=["stage4"])
    config = hf.DetrConfig(**TWO_STACKS, backbone_config=backbone, num_queries=50, num_labels=CLASSES)
    return hf.DetrForObjectDetection(config)


def bert(layers: int = 4) -> torch.nn.Module:
    size = {**ENCODER, "num_hidden_layers": layers}
    return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=VOCABULARY, **size, **LABELS))


def roberta() -> torch.nn.Module:
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(**TEXT, **ENCODER, **LABELS))


def distilbert() -> torch.nn.Module:
    config = hf.DistilBertConfig(vocab_size=VOCABULARY, dim=384, n_layers=6, n_heads=6, hidden_dim=1536, **LABELS)
    return hf.DistilBertForSequenceClassification(config)


def gpt2() -> torch.nn.Module:
    size = {"n_embd": 384, "n_layer": 6, "n_head": 6, "vocab_size": VOCABULARY}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**size, bos_token_id=1, eos_token_id=2, use_cache=False))


def llama() -> torch.nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER))


def qwen2() -> torch.nn.Module:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER))


def t5() -> torch.nn.Module:
    size = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4}
    config = hf.T5Config(vocab_size=VOCABULARY, **size, decoder_start_token_id=0, use_cache=False)
    return hf.T5ForConditionalGeneration(config)


def whisper() -> torch.nn.Module:
    size = {"num_mel_bins": 80, "max_source_positions": 150, "max_target_positions": 64}
    config = hf.WhisperConfig(**TEXT, **TWO_STACKS, **size, decoder_start_token_id=1, use_cache=False)
    return hf.WhisperForConditionalGeneration(config)


def wav2vec2() -> torch.nn.Module:
    front = {"conv_dim": [128] * 7, "num_conv_pos_embeddings": 32, "num_conv_pos_embedding_groups": 8}
    steady = {"apply_spec_augment": False, "layerdrop": 0.0}
    size = {name: value for name, value in ENCODER.items() if name != "max_position_embeddings"}
    return hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(**front, **steady, **size, **LABELS))


def clip() -> torch.nn.Module:
    words = {**TEXT, **ENCODER, "max_position_embeddings": 64}
    vision = {**VIT, "num_hidden_layers": 4, "image_size": 128}
    del vision["problem_type"], vision["num_labels"]
    return hf.CLIPModel(hf.CLIPConfig(text_config=words, vision_config=vision, projection_dim=128))


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("resnet", "convolution", resnet, image(160), one_label),
        Model("resnet-bottleneck", "convolution", resnet_bottleneck, image(128), one_label, 4),
        Model("regnet", "convolution", regnet, image(160), one_label),
        Model("convnext", "convolution", convnext, image(160), one_label),
        Model("mobilenet-v1", "mobile", mobilenet_v1, image(160), one_label),
        Model("mobilenet-v2", "mobile", mobilenet_v2, image(160), one_label),
        Model("efficientnet", "mobile", efficientnet, image(128), one_label),
        Model("vit", "vision transformer", vit, image(224), one_label, 4),
        Model("deit", "vision transformer", deit, image(224), one_label, 4),
        Model("swin", "vision transformer", swin, image(224), one_label, 4),
        Model("segformer", "segmentation", segformer, image(128), larger=4),
        Model("detr", "detection", detr, image(128), larger=4),
        Model("bert", "encoder", bert, padded_text(128), one_label),
        Model("roberta", "encoder", roberta, padded_text(128), one_label),
        Model("distilbert", "encoder", distilbert, padded_text(64), one_label),
        Model("gpt2", "decoder", gpt2, text(64), label_per_token(64), 4),
        Model("llama", "decoder", llama, text(128), label_per_token(128), 4),
        Model("qwen2", "decoder", qwen2, text(128), label_per_token(128), 4),
        Model("t5", "encoder-decoder", t5, two_texts(64, 32), label_per_token(32), 4),
        Model("whisper", "speech", whisper, spectrogram(80, 300, 24), label_per_token(24), 4),
        Model("wav2vec2", "speech", wav2vec2, speech(16_000), one_label, 4),
        # its outputs compare each image with each text: of one alone there is one number, too few to judge
        Model("clip", "image and text", clip, image_and_text, contrast, 8, 4),
    )
}


def find(name: str) -> Model:
    """A model by name; `bert-N-layers` is a BERT of N layers, `resnet-50` one of full size."""
    if name == "resnet-50":
        return Model(name, "convolution", resnet_50, image(224), one_label)
    layers = re.fullmatch(r"bert-(\d+)-layers", name)
    if layers is not None:
        count = int(layers[1])
        return Model(name, "encoder", lambda: bert(count), padded_text(32), one_label)
    return MODELS[name]
