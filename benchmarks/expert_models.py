"""The workloads of `climb_against_expert.py`: models that Redline was not tuned for, built from configs or by timm.

Nothing is downloaded. A model whose library is not installed raises ImportError.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from redline import Workload


class Output(nn.Module):
    """Calls a transformers model and returns one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        found = self.model(*args, **kwargs)
        return next(found[key] for key in ("logits", "last_hidden_state") if key in found)


def _of_config(make: Callable[[], nn.Module], inputs: Callable[[int], Any], name: str) -> Workload:
    return Workload(build=lambda: Output(make()).eval(), inputs=inputs, name=name)


def _images(batch: int, size: int = 224) -> Callable[[int], Tensor]:
    return lambda seed: torch.randn(batch, 3, size, size)


def _tokens(vocabulary: int, batch: int, length: int, padded: bool = False) -> Callable[[int], dict[str, Tensor]]:
    def inputs(seed: int) -> dict[str, Tensor]:
        found = {"input_ids": torch.randint(vocabulary, (batch, length))}
        if padded:
            lengths = torch.randint(length // 2, length + 1, (batch, 1))
            found["attention_mask"] = (torch.arange(length) < lengths).long()
        return found

    return inputs


def bert(batch: int = 16, length: int = 384) -> Workload:
    config = transformers.BertConfig()
    return _of_config(lambda: transformers.BertModel(config), _tokens(30522, batch, length, padded=True), "bert")


def distilbert(batch: int = 1, length: int = 128) -> Workload:
    config = transformers.DistilBertConfig()
    return _of_config(lambda: transformers.DistilBertModel(config), _tokens(30522, batch, length, True), "distilbert")


def t5_encoder(batch: int = 1, length: int = 128) -> Workload:
    config = transformers.T5Config(d_model=512, d_ff=2048, num_layers=6, num_heads=8)
    return _of_config(lambda: transformers.T5EncoderModel(config), _tokens(32128, batch, length), "t5_encoder")


def llama_prefill(batch: int = 4, length: int = 2048) -> Workload:
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=1280, intermediate_size=3456, num_hidden_layers=24, num_attention_heads=20,
        num_key_value_heads=10, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    return _of_config(lambda: transformers.LlamaModel(config), _tokens(32000, batch, length), "llama_prefill")


def whisper_encoder(batch: int = 8) -> Workload:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(
        d_model=768, encoder_layers=12, encoder_attention_heads=12, encoder_ffn_dim=3072
    )
    return _of_config(lambda: WhisperEncoder(config), lambda seed: torch.randn(batch, 80, 3000), "whisper_encoder")


def vit_large(batch: int = 8) -> Workload:
    config = transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return _of_config(lambda: transformers.ViTModel(config, add_pooling_layer=False), _images(batch), "vit_large")


def vit_tiny(batch: int = 1) -> Workload:
    config = transformers.ViTConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768)
    return _of_config(lambda: transformers.ViTModel(config, add_pooling_layer=False), _images(batch), "vit_tiny")


def convnext_base(batch: int = 16) -> Workload:
    config = transformers.ConvNextConfig(hidden_sizes=[128, 256, 512, 1024], depths=[3, 3, 27, 3])
    return _of_config(lambda: transformers.ConvNextForImageClassification(config), _images(batch), "convnext_base")


def convnext_tiny(batch: int = 1) -> Workload:
    config = transformers.ConvNextConfig()
    return _of_config(lambda: transformers.ConvNextForImageClassification(config), _images(batch), "convnext_tiny")


def swin_base(batch: int = 8) -> Workload:
    config = transformers.SwinConfig(embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32])
    return _of_config(lambda: transformers.SwinModel(config, add_pooling_layer=False), _images(batch), "swin_base")


def resnet50(batch: int = 32) -> Workload:
    config = transformers.ResNetConfig()
    return _of_config(lambda: transformers.ResNetForImageClassification(config), _images(batch), "resnet50")


def mobilenet_v3(batch: int = 1) -> Workload:
    import timm

    return Workload(lambda: timm.create_model("mobilenetv3_large_100").eval(), _images(batch), name="mobilenet_v3")


def sd_unet(batch: int = 1) -> Workload:
    """A U-Net with the shape of Stable Diffusion 1.5: latents of 64², cross-attention to 77 text tokens."""
    import diffusers

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768)

        def forward(self, latents: Tensor, time: Tensor, text: Tensor) -> Tensor:
            return self.unet(latents, time, text, return_dict=False)[0]  # pyrefly: ignore[not-callable]

    def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.randn(batch, 4, 64, 64), torch.full((batch,), 500 + seed % 7), torch.randn(batch, 77, 768)

    return Workload(lambda: Denoiser().eval(), inputs, name="sd_unet")


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def lstm(batch: int = 4, length: int = 64) -> Workload:
    return Workload(lambda: Lstm().eval(), lambda seed: torch.randn(batch, length, 128), name="lstm")


def encoder(batch: int = 8, length: int = 128) -> Workload:
    """README's encoder."""

    def build() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, batch_first=True), 4).eval()

    return Workload(build, lambda seed: torch.randn(batch, length, 256), name="encoder")


def gpt2_training(batch: int = 8, length: int = 1024) -> Workload:
    """A training step of GPT-2 with 124M parameters."""
    config = transformers.GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)

    def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["input_ids"]
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    return Workload(
        build=lambda: Output(transformers.GPT2LMHeadModel(config)),
        inputs=_tokens(50257, batch, length),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        name="gpt2_training",
    )
