"""A folder as Hugging Face has them: a tiny random decoder and a tokenizer of bytes, all made here."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from redline.models.decoder import Decoder, DecoderConfig, save_decoder


def byte_tokenizer() -> Any:
    """Pairs of bytes, so that most characters outside of ASCII are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the sea is the sea and the land is the land"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def write_model(folder: Path, context: int = 200) -> Decoder:
    tokenizer = byte_tokenizer()
    config = DecoderConfig(tokenizer.get_vocab_size(), 32, 2, 4, 48, key_value_heads=2, context=context)
    model = Decoder(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25 * torch.randn_like(parameter))
    save_decoder(model, folder, stop_tokens=(1,))
    tokenizer.save(str(folder / "tokenizer.json"))
    # A text that does not end by itself is easier to compare.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": []}))
    return model
