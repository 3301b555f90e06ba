"""Text to tokens: a byte-level BPE that is trained on the corpus, or one that is loaded from a tokenizer.json.

Bytes are its alphabet, so no text is unknown to it and decoding gives back what was encoded. Every document is ended by
one token of its own, from which a model learns where to stop.

The name of a special token in a text means its letters, unless `special_tokens` is asked for: then it is that token.
tokenizer.json cannot say which; tokenizer_config.json does, for whoever reads text with the model afterwards.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redline.errors import RedlineError
from redline.files.untrusted import reading

END = "<|end|>"
NAME, CONFIG_NAME = "tokenizer.json", "tokenizer_config.json"
# What known tokenizers call the token that ends a document.
_ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
# The alphabet of bytes, and the token that ends a document.
SMALLEST = 256 + 1


@dataclass(frozen=True)
class TextTokenizer:
    """`inner` is a `tokenizers.Tokenizer`; it is never changed."""

    inner: Any
    end: int

    @property
    def vocabulary(self) -> int:
        """One more than the largest id it can give."""
        return 1 + max(self.inner.get_vocab(with_added_tokens=True).values())

    @property
    def special_tokens(self) -> bool:
        """Whether the name of a special token in a text is that token."""
        return not self.inner.encode_special_tokens

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.inner.to_str().encode()).hexdigest()[:32]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, with the one that ends it; several threads at work."""
        found = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*each.ids, self.end], dtype=np.uint32) for each in found]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.inner.decode([int(token) for token in tokens], skip_special_tokens=True)

    def to_text(self) -> str:
        return self.inner.to_str(pretty=True)

    def config_text(self) -> str:
        """What is needed beside it: the token that ends a text, and what names of special tokens mean in one."""
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.inner.id_to_token(self.end),
            "split_special_tokens": not self.special_tokens,
        }
        return json.dumps(about, indent=2) + "\n"


def train_tokenizer(texts: Iterable[str], vocabulary: int, special_tokens: bool = False) -> TextTokenizer:
    """Learns the pairs that come most often; a small corpus may give fewer tokens than asked for."""
    if vocabulary < SMALLEST:
        raise RedlineError(f"a vocabulary has {SMALLEST} tokens or more (every byte, and the end), not {vocabulary}.")
    library = _library()
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    inner.encode_special_tokens = not special_tokens
    return TextTokenizer(inner, inner.token_to_id(END))


def byte_tokenizer() -> str:
    """A tokenizer.json whose tokens are the bytes of UTF-8, each by its own number."""
    library = _library()
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    # Bytes that cannot be seen are written as the letters from 256 on.
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + n) for n, byte in enumerate(byte for byte in range(256) if byte not in letters)}
    inner = library.Tokenizer(library.models.BPE({letter: byte for byte, letter in letters.items()}, []))
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = library.decoders.ByteLevel()
    return inner.to_str(pretty=True)


def load_tokenizer(path: str | Path, end: str = "", special_tokens: bool = False) -> TextTokenizer:
    """A tokenizer.json; `end` names the token that ends a document where it has an unusual name."""
    library, path = _library(), Path(path)
    if not path.is_file():
        raise RedlineError(f"there is no tokenizer {str(path)!r}.")
    with reading(path, "tokenizer", also=(Exception,)):  # the library raises nothing more precise
        inner = library.Tokenizer.from_file(str(path))
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = not special_tokens
    for name in (end,) if end else _ENDS:
        if (number := inner.token_to_id(name)) is not None:
            return TextTokenizer(inner, number)
    if end:
        raise RedlineError(f"{str(path)!r} has no token {end!r} to end a document with.")
    raise RedlineError(f"{str(path)!r} has none of the usual tokens that end a document: name it as end = '…'.")


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise RedlineError(
            "text is tokenized with tokenizers, which is not installed: pip install tokenizers."
        ) from error
    import tokenizers.decoders
    import tokenizers.models
    import tokenizers.pre_tokenizers
    import tokenizers.trainers

    return tokenizers
