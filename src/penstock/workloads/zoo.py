"""Models that people have, as their libraries build them, with small configurations: nothing is downloaded.

Each is a job: a model of transformers or torchvision, random samples of its kind of input, and a loss of its logits.
Dropout, DropPath and stochastic depth keep the rates that the library sets. LayerDrop is 0, since no graph of layers
can skip layers at random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.job import Job
from penstock.workloads.torchvision import import_torchvision
from penstock.workloads.transformers import import_transformers

WORDS, LENGTH, CLASSES = 60, 12, 5
BATCH_SIZE, SAMPLES = 4, 40


@dataclass(frozen=True, kw_only=True)
class ZooModel:
    library: str
    """transformers or torchvision"""
    builder: str
    """the class in transformers, or the function in torchvision.models"""
    inputs: str
    """the kind of its samples, one of INPUTS"""
    config: Mapping[str, Any] = field(default_factory=dict)
    image_size: int = 32

    @property
    def name(self) -> str:
        return f"{self.library}/{self.builder}"

    def job(self) -> Job:
        """The same every time: same weights, same data."""
        torch.manual_seed(0)
        model = self._transformer() if self.library == "transformers" else self._vision()
        samples = [INPUTS[self.inputs](self) for _ in range(SAMPLES)]
        return Job(model=model, data=samples, loss=_loss, optimizer=_sgd, batch_size=BATCH_SIZE)

    def _transformer(self) -> nn.Module:
        made: Any = getattr(import_transformers(), self.builder)
        config = made.config_class(**self.config)
        for key in vars(config):
            if key.endswith("layerdrop"):
                setattr(config, key, 0.0)
        model: nn.Module = made(config)
        return model

    def _vision(self) -> nn.Module:
        model: nn.Module = getattr(import_torchvision().models, self.builder)(num_classes=CLASSES, **self.config)
        return model


def _tokens() -> Tensor:
    return torch.randint(4, WORDS, (LENGTH,))


def _text(_: ZooModel) -> tuple[Any, Tensor]:
    tokens = _tokens()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, tokens


def _unmasked(_: ZooModel) -> tuple[Any, Tensor]:
    tokens = _tokens()
    return {"input_ids": tokens}, tokens


def _translation(_: ZooModel) -> tuple[Any, Tensor]:
    return {"input_ids": _tokens(), "decoder_input_ids": _tokens()}, _tokens()


def _image(model: ZooModel) -> tuple[Any, Tensor]:
    pixels = torch.randn(3, model.image_size, model.image_size)
    return (pixels if model.library == "torchvision" else {"pixel_values": pixels}), torch.randint(CLASSES, ())


def _waveform(_: ZooModel) -> tuple[Any, Tensor]:
    return {"input_values": torch.randn(800)}, torch.randint(CLASSES, ())


def _spectrogram(model: ZooModel) -> tuple[Any, Tensor]:
    frames = 2 * model.config["max_source_positions"]
    return {
        "input_features": torch.randn(model.config["num_mel_bins"], frames),
        "decoder_input_ids": _tokens(),
    }, _tokens()


INPUTS: Mapping[str, Callable[[ZooModel], tuple[Any, Tensor]]] = {
    "text": _text,
    "unmasked text": _unmasked,
    "translation": _translation,
    "image": _image,
    "waveform": _waveform,
    "spectrogram": _spectrogram,
}


def _loss(output: Any, target: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output["logits"] if "logits" in output else output["out"]
    if logits.dim() == 4:  # a class for every pixel: that of the image
        logits = logits.flatten(2).mean(-1)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


_SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}
_DECODER = {**_SMALL, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PAIR = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 40,
}
_IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": CLASSES,
}
_SPEECH = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "num_labels": CLASSES,
    "classifier_proj_size": 16,
}


def _hf(builder: str, inputs: str, base: Mapping[str, Any], **config: Any) -> ZooModel:
    return ZooModel(library="transformers", builder=builder, inputs=inputs, config={**base, **config})


def _tv(builder: str, image_size: int = 64, **config: Any) -> ZooModel:
    return ZooModel(library="torchvision", builder=builder, inputs="image", image_size=image_size, config=config)


_vit = ZooModel(library="torchvision", builder="vit_b_32", inputs="image", config={"image_size": 32})


ZOO: tuple[ZooModel, ...] = (
    # encoders of text
    _hf("BertForMaskedLM", "text", _SMALL),
    _hf("RobertaForMaskedLM", "text", _SMALL),
    _hf("ElectraForMaskedLM", "text", _SMALL, embedding_size=16),
    _hf("AlbertForMaskedLM", "text", _SMALL, embedding_size=16),
    _hf("DistilBertForMaskedLM", "text", {}, vocab_size=WORDS, dim=32, n_layers=2, n_heads=2, hidden_dim=64),
    _hf("MobileBertForMaskedLM", "text", _SMALL, embedding_size=16, intra_bottleneck_size=16,
        num_feedforward_networks=2),
    _hf("DebertaForMaskedLM", "text", _SMALL, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _hf("DebertaV2ForMaskedLM", "text", _SMALL, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _hf("ConvBertForMaskedLM", "text", _SMALL, embedding_size=32, head_ratio=1, conv_kernel_size=3),
    _hf("SqueezeBertForMaskedLM", "text", _SMALL, embedding_size=32, q_groups=2, k_groups=2, v_groups=2),
    _hf("RoFormerForMaskedLM", "text", _SMALL, embedding_size=32),
    _hf("MPNetForMaskedLM", "text", _SMALL),
    _hf("FNetForMaskedLM", "unmasked text", _SMALL),
    _hf("LongformerForMaskedLM", "text", _SMALL, attention_window=4),
    _hf("NystromformerForMaskedLM", "unmasked text", _SMALL, num_landmarks=LENGTH, segment_means_seq_len=LENGTH),
    _hf("ModernBertForMaskedLM", "text", _SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2),
    # decoders of text
    _hf("GPT2LMHeadModel", "text", {}, vocab_size=WORDS, n_embd=32, n_layer=2, n_head=2, n_positions=40,
        bos_token_id=0, eos_token_id=0),
    _hf("GPTNeoForCausalLM", "text", {}, vocab_size=WORDS, hidden_size=32, num_layers=2, num_heads=2,
        attention_types=[[["global", "local"], 1]], window_size=4, max_position_embeddings=40, bos_token_id=0,
        eos_token_id=0),
    _hf("GPTNeoXForCausalLM", "text", _SMALL),
    _hf("GPTJForCausalLM", "text", {}, vocab_size=WORDS, n_embd=32, n_layer=2, n_head=2, n_positions=40, rotary_dim=8,
        bos_token_id=0, eos_token_id=0),
    _hf("CodeGenForCausalLM", "text", {}, vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=40, n_ctx=40,
        rotary_dim=4, bos_token_id=0, eos_token_id=0),
    _hf("BloomForCausalLM", "text", {}, vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=2),
    _hf("OPTForCausalLM", "text", {}, vocab_size=WORDS, hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=2,
        num_attention_heads=2, ffn_dim=64, max_position_embeddings=40),
    _hf("LlamaForCausalLM", "text", _DECODER),
    _hf("MistralForCausalLM", "text", _DECODER),
    _hf("MixtralForCausalLM", "text", _DECODER, num_local_experts=4, num_experts_per_tok=2),
    _hf("Qwen2ForCausalLM", "text", _DECODER),
    _hf("Qwen3ForCausalLM", "text", _DECODER, head_dim=16),
    _hf("GemmaForCausalLM", "text", _DECODER, head_dim=16),
    _hf("PhiForCausalLM", "text", _DECODER),
    _hf("FalconForCausalLM", "text", {}, vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
    _hf("StableLmForCausalLM", "text", _DECODER),
    _hf("OlmoForCausalLM", "text", _DECODER),
    _hf("CohereForCausalLM", "text", _DECODER),
    _hf("Starcoder2ForCausalLM", "text", _DECODER),
    _hf("XGLMForCausalLM", "text", {}, vocab_size=WORDS, d_model=32, num_layers=2, attention_heads=2, ffn_dim=64,
        max_position_embeddings=40),
    _hf("MambaForCausalLM", "text", {}, vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=4),
    # encoders with decoders
    _hf("T5ForConditionalGeneration", "translation", {}, vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=2,
        num_heads=2, decoder_start_token_id=0),
    _hf("BartForConditionalGeneration", "translation", _PAIR),
    _hf("MBartForConditionalGeneration", "translation", _PAIR),
    _hf("PegasusForConditionalGeneration", "translation", _PAIR),
    _hf("MarianMTModel", "translation", _PAIR, pad_token_id=0, decoder_start_token_id=0),
    _hf("BlenderbotForConditionalGeneration", "translation", _PAIR),
    _hf("WhisperForConditionalGeneration", "spectrogram", _PAIR, num_mel_bins=8, max_source_positions=16,
        max_target_positions=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
    # speech
    _hf("Wav2Vec2ForSequenceClassification", "waveform", _SPEECH),
    _hf("HubertForSequenceClassification", "waveform", _SPEECH),
    _hf("WavLMForSequenceClassification", "waveform", _SPEECH),
    # images
    _hf("ViTForImageClassification", "image", _IMAGE),
    _hf("DeiTForImageClassification", "image", _IMAGE),
    _hf("BeitForImageClassification", "image", _IMAGE, use_relative_position_bias=True),
    _hf("Dinov2ForImageClassification", "image", _IMAGE),
    _hf("SwinForImageClassification", "image", {}, image_size=32, patch_size=2, embed_dim=16, depths=[2, 2],
        num_heads=[2, 2], window_size=4, num_labels=CLASSES),
    _hf("Swinv2ForImageClassification", "image", {}, image_size=32, patch_size=2, embed_dim=16, depths=[2, 2],
        num_heads=[2, 2], window_size=4, num_labels=CLASSES),
    _hf("ConvNextForImageClassification", "image", {}, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
        num_labels=CLASSES),
    _hf("SegformerForSemanticSegmentation", "image", {}, hidden_sizes=[8, 16], depths=[1, 1], num_encoder_blocks=2,
        sr_ratios=[2, 1], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
        decoder_hidden_size=16, num_labels=CLASSES),
    _hf("PoolFormerForImageClassification", "image", {}, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1],
        num_labels=CLASSES),
    _hf("RegNetForImageClassification", "image", {}, embedding_size=8, hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1], groups_width=8, num_labels=CLASSES),
    _hf("ResNetForImageClassification", "image", {}, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
        num_labels=CLASSES),
    _hf("MobileViTForImageClassification", "image", {}, image_size=64, num_labels=CLASSES, hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16], num_attention_heads=2),
    _tv("alexnet"),
    _tv("vgg11"),
    _tv("resnet18", image_size=32),
    _tv("resnet50", image_size=32),
    _tv("resnext50_32x4d", image_size=32),
    _tv("densenet121", image_size=32),
    _tv("googlenet", aux_logits=False, init_weights=False),
    _tv("mobilenet_v2"),
    _tv("mobilenet_v3_small", image_size=32),
    _tv("shufflenet_v2_x0_5", image_size=32),
    _tv("squeezenet1_1"),
    _tv("efficientnet_b0", image_size=32),
    _tv("mnasnet0_5", image_size=32),
    _tv("regnet_y_400mf", image_size=32),
    _tv("convnext_tiny", image_size=32),
    _vit,
    _tv("swin_t", image_size=32),
)  # fmt: skip
