"""The model zoo: one small instance of each architecture, with random weights; nothing is downloaded.

    for architecture in ARCHITECTURES.values():
        model, inputs = architecture.model(), architecture.inputs()
        model(**inputs)

Every call builds the same weights and the same inputs. Sizes are tiny (two layers, hidden size 32) but keep
what makes each architecture hard to compile: grouped heads, shifted windows, padding masks, batch-norm
statistics, dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

VOCABULARY = 99
CLASSES = 5
BATCH = 2


@dataclass(frozen=True)
class Architecture:
    name: str
    family: str
    build: Callable[[], torch.nn.Module]
    make_inputs: Callable[[], dict[str, Any]]
    trains: bool = True

    def model(self) -> torch.nn.Module:
        """A new copy of the model in eval mode, the same on every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build()
            shake(model)
        return model.eval()

    def inputs(self) -> dict[str, Any]:
        """New keyword arguments for the model's forward, the same on every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.make_inputs()


def shake(model: torch.nn.Module) -> None:
    """Move every weight and statistic off its initial value.

    Fresh models have zero biases, unit scales and near-uniform attention, under which a dropped bias or a
    wrong mask leaves the outputs as they were.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(torch.randn_like(buffer), alpha=0.1)
            elif name.endswith("running_var"):
                buffer.mul_(torch.rand_like(buffer) + 0.5)


def tokens(length: int = 12) -> torch.Tensor:
    """Token ids clear of the special ones (padding, begin, end), which sit below 4."""
    return torch.randint(4, VOCABULARY, (BATCH, length))


def padding(length: int = 12) -> torch.Tensor:
    """An attention mask whose last row is one third padding."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[-1, length - length // 3 :] = 0
    return mask


def labelled_text() -> dict[str, Any]:
    return {
        "input_ids": tokens(),
        "attention_mask": padding(),
        "labels": torch.randint(0, CLASSES, (BATCH,)),
    }


def causal_text() -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": padding(), "labels": ids.clone()}


def unpadded_text() -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def text_to_text() -> dict[str, Any]:
    return {"input_ids": tokens(), "attention_mask": padding(), "labels": tokens(7)}


def labelled_waveform() -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 400), "labels": torch.randint(0, CLASSES, (BATCH,))}


def spectrogram_to_text() -> dict[str, Any]:
    return {"input_features": torch.randn(BATCH, 16, 40), "labels": tokens(7)}


def image(size: int = 32) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size)}


def labelled_image(size: int = 32) -> dict[str, Any]:
    return {**image(size), "labels": torch.randint(0, CLASSES, (BATCH,))}


def larger_labelled_image() -> dict[str, Any]:
    # Large enough that the last batch norms see more than one pixel of each image: of two numbers, normalising leaves
    # little but which one is larger, and all rounding before is blown up.
    return labelled_image(64)


def labelled_pixels() -> dict[str, Any]:
    # Four uniform blocks per image: labels drawn per pixel would make nearly all gradients cancel.
    blocks = torch.randint(0, CLASSES, (BATCH, 2, 2))
    return {**image(64), "labels": blocks.repeat_interleave(32, 1).repeat_interleave(32, 2)}


def image_and_text() -> dict[str, Any]:
    return {**image(), "input_ids": tokens(), "attention_mask": padding(), "return_loss": True}


TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "num_labels": CLASSES,
    # Otherwise the first call writes it into the configuration, and Dynamo compiles again for the second.
    "problem_type": "single_label_classification",
}
TRANSFORMER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
GROUPED_HEADS: dict[str, Any] = {
    **TEXT,
    **TRANSFORMER,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ENCODER_DECODER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
SPECIAL_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
VISION_TRANSFORMER: dict[str, Any] = {**TRANSFORMER, "image_size": 32, "patch_size": 8, "num_labels": CLASSES}
RESNET: dict[str, Any] = {
    "embedding_size": 16,
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "num_labels": CLASSES,
}


def bert() -> torch.nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**TEXT, **TRANSFORMER, max_position_embeddings=64))


def distilbert() -> torch.nn.Module:
    config = hf.DistilBertConfig(**TEXT, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64)
    return hf.DistilBertForSequenceClassification(config)


def modernbert() -> torch.nn.Module:
    # One layer sees all positions, the other a window of 4.
    kinds = ["full_attention", "sliding_attention"]
    special = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = hf.ModernBertConfig(**TEXT, **TRANSFORMER, **special, layer_types=kinds, local_attention=4)
    return hf.ModernBertForSequenceClassification(config)


def gpt2() -> torch.nn.Module:
    size = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**size, bos_token_id=1, eos_token_id=2))


def llama() -> torch.nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED_HEADS))


def qwen2() -> torch.nn.Module:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED_HEADS))


def gemma2() -> torch.nn.Module:
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED_HEADS, head_dim=8, sliding_window=4))


def t5() -> torch.nn.Module:
    config = hf.T5Config(**TEXT, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(config)


def bart() -> torch.nn.Module:
    config = hf.BartConfig(**TEXT, **ENCODER_DECODER, **SPECIAL_TOKENS, max_position_embeddings=64)
    return hf.BartForConditionalGeneration(config)


def mixtral() -> torch.nn.Module:
    config = hf.MixtralConfig(**GROUPED_HEADS, num_local_experts=4, output_router_logits=True)
    # One product per token and chosen expert. The default groups tokens by expert; AOTAutograd cannot trace
    # its group sizes, which are data.
    config._experts_implementation = "batched_mm"
    return hf.MixtralForCausalLM(config)


def qwen2_moe() -> torch.nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = hf.Qwen2MoeConfig(**GROUPED_HEADS, **experts, shared_expert_intermediate_size=32)
    # A loop over the experts that got tokens, which breaks the graph.
    config._experts_implementation = "eager"
    return hf.Qwen2MoeForCausalLM(config)


def mamba() -> torch.nn.Module:
    return hf.MambaForCausalLM(hf.MambaConfig(**TEXT, hidden_size=32, num_hidden_layers=2, state_size=8))


def wav2vec2() -> torch.nn.Module:
    front = {"conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2]}
    position = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
    # Masking and layer dropping draw from numpy and from Python, which a torch seed does not fix.
    steady = {"apply_spec_augment": False, "layerdrop": 0.0}
    config = hf.Wav2Vec2Config(**TEXT, **TRANSFORMER, **front, **position, **steady, classifier_proj_size=16)
    return hf.Wav2Vec2ForSequenceClassification(config)


def whisper() -> torch.nn.Module:
    size = {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 20}
    config = hf.WhisperConfig(**TEXT, **ENCODER_DECODER, **SPECIAL_TOKENS, **size)
    return hf.WhisperForConditionalGeneration(config)


def vit() -> torch.nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**VISION_TRANSFORMER, hidden_dropout_prob=0.1))


def swin() -> torch.nn.Module:
    # 8x8 patches in 4x4 windows: the second block of the first stage shifts them.
    stages = {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}
    config = hf.SwinConfig(**stages, image_size=32, patch_size=4, num_labels=CLASSES)
    return hf.SwinForImageClassification(config)


def resnet() -> torch.nn.Module:
    return hf.ResNetForImageClassification(hf.ResNetConfig(**RESNET))


def convnext() -> torch.nn.Module:
    stages = {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1], "drop_path_rate": 0.1}
    return hf.ConvNextForImageClassification(hf.ConvNextConfig(**stages, image_size=32, num_labels=CLASSES))


def mobilenet_v1() -> torch.nn.Module:
    config = hf.MobileNetV1Config(image_size=64, depth_multiplier=0.25, num_labels=CLASSES)
    return hf.MobileNetV1ForImageClassification(config)


def mobilenet_v2() -> torch.nn.Module:
    config = hf.MobileNetV2Config(image_size=64, depth_multiplier=0.35, num_labels=CLASSES)
    return hf.MobileNetV2ForImageClassification(config)


def efficientnet() -> torch.nn.Module:
    blocks = {
        "in_channels": [32, 16, 24],
        "out_channels": [16, 24, 24],
        "kernel_sizes": [3, 5, 3],
        "strides": [1, 2, 1],
        "num_block_repeats": [1, 1, 2],
        "expand_ratios": [1, 4, 4],
    }
    scale = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
    config = hf.EfficientNetConfig(**blocks, **scale, image_size=32, num_labels=CLASSES)
    return hf.EfficientNetForImageClassification(config)


def segformer() -> torch.nn.Module:
    stages = {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "hidden_sizes": [16, 32],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "decoder_hidden_size": 32,
    }
    return hf.SegformerForSemanticSegmentation(hf.SegformerConfig(**stages, num_labels=CLASSES))


def yolos() -> torch.nn.Module:
    size = {"image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 6, "num_labels": CLASSES}
    return hf.YolosForObjectDetection(hf.YolosConfig(**TRANSFORMER, **size))


def detr() -> torch.nn.Module:
    backbone = hf.ResNetConfig(**RESNET, out_features=["stage2"])
    config = hf.DetrConfig(**ENCODER_DECODER, backbone_config=backbone, num_queries=6, num_labels=CLASSES)
    return hf.DetrForObjectDetection(config)


def clip() -> torch.nn.Module:
    text = {**TEXT, **TRANSFORMER, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=VISION_TRANSFORMER, projection_dim=16))


ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture("bert", "encoder", bert, labelled_text),
        Architecture("distilbert", "encoder", distilbert, labelled_text),
        Architecture("modernbert", "encoder", modernbert, labelled_text),
        Architecture("gpt2", "decoder", gpt2, causal_text),
        Architecture("llama", "decoder", llama, causal_text),
        Architecture("qwen2", "decoder", qwen2, causal_text),
        Architecture("gemma2", "decoder", gemma2, causal_text),
        Architecture("t5", "encoder-decoder", t5, text_to_text),
        Architecture("bart", "encoder-decoder", bart, text_to_text),
        Architecture("mixtral", "mixture of experts", mixtral, causal_text),
        Architecture("qwen2-moe", "mixture of experts", qwen2_moe, causal_text),
        Architecture("mamba", "state space", mamba, unpadded_text),
        Architecture("wav2vec2", "speech", wav2vec2, labelled_waveform),
        Architecture("whisper", "speech", whisper, spectrogram_to_text),
        Architecture("vit", "vision transformer", vit, labelled_image),
        Architecture("swin", "vision transformer", swin, labelled_image),
        Architecture("resnet", "convolution", resnet, labelled_image),
        Architecture("convnext", "convolution", convnext, labelled_image),
        Architecture("mobilenet-v1", "convolution", mobilenet_v1, larger_labelled_image),
        Architecture("mobilenet-v2", "convolution", mobilenet_v2, larger_labelled_image),
        Architecture("efficientnet", "convolution", efficientnet, labelled_image),
        Architecture("segformer", "segmentation", segformer, labelled_pixels),
        Architecture("yolos", "detection", yolos, image),
        Architecture("detr", "detection", detr, image),
        Architecture("clip", "image and text", clip, image_and_text),
    )
}
