"""Tokenizers: a byte-level BPE trained on the corpus, or one loaded from a tokenizer.json.

The alphabet is bytes, so any text can be encoded and decoding restores it. Every document ends with an end token, from
which a model learns where to stop.

The name of a special token in a text is tokenized as plain characters, unless `special_tokens` is set: then it becomes
that token. This setting is stored in tokenizer_config.json, because tokenizer.json has no field for it.
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
# Names of the end token in known tokenizers.
_ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
# The smallest vocabulary: all bytes and the end token.
MIN_VOCABULARY = 256 + 1


@dataclass(frozen=True)
class TextTokenizer:
    """Encodes text with `inner`, a `tokenizers.Tokenizer`, which is never changed."""

    inner: Any
    end: int

    @property
    def vocabulary(self) -> int:
        """The largest token id plus one."""
        return 1 + max(self.inner.get_vocab(with_added_tokens=True).values())

    @property
    def special_tokens(self) -> bool:
        """Whether a special token's name in a text is encoded as that token."""
        return not self.inner.encode_special_tokens

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.inner.to_str().encode()).hexdigest()[:32]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of each text and the end token; runs on several threads."""
        found = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*each.ids, self.end], dtype=np.uint32) for each in found]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.inner.decode([int(token) for token in tokens], skip_special_tokens=True)

    def to_text(self) -> str:
        return self.inner.to_str(pretty=True)

    def config_text(self, chat_template: str | None = None) -> str:
        """Returns the tokenizer_config.json: the end token, how names of special tokens are treated, the template."""
        about: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.inner.id_to_token(self.end),
            "split_special_tokens": not self.special_tokens,
        }
        if chat_template is not None:
            about["chat_template"] = chat_template
        return json.dumps(about, indent=2) + "\n"


def train_tokenizer(
    texts: Iterable[str],
    vocabulary: int,
    special_tokens: bool = False,
    names: Sequence[str] = (),
    split_digits: bool = False,
) -> TextTokenizer:
    """Trains a byte-level BPE. The vocabulary may be smaller than `vocabulary` if the corpus is small.

    `names` are special tokens beside the end token. With `split_digits`, every digit is a token of its own, so that a
    model sees numbers digit by digit.
    """
    if vocabulary < MIN_VOCABULARY:
        raise RedlineError(
            f"vocabulary = {vocabulary} under [tokenizer] must be at least {MIN_VOCABULARY} (bytes and an end token)."
        )
    library = _library()
    inner = library.Tokenizer(library.models.BPE())
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = library.pre_tokenizers.Digits(individual_digits=True)
    inner.pre_tokenizer = library.pre_tokenizers.Sequence([digits, byte_level]) if split_digits else byte_level
    inner.decoder = library.decoders.ByteLevel()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END, *names], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    inner.encode_special_tokens = not special_tokens
    return TextTokenizer(inner, inner.token_to_id(END))


def parse_tokenizer(text: str, end: int) -> TextTokenizer:
    """Returns the tokenizer of a tokenizer.json's text, in which the names of special tokens become those tokens."""
    inner = _library().Tokenizer.from_str(text)
    inner.encode_special_tokens = False
    return TextTokenizer(inner, end)


def byte_tokenizer() -> str:
    """Returns a tokenizer.json whose tokens are the 256 bytes."""
    library = _library()
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    # Unprintable bytes are represented by characters from U+0100 on.
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + n) for n, byte in enumerate(byte for byte in range(256) if byte not in letters)}
    inner = library.Tokenizer(library.models.BPE({letter: byte for byte, letter in letters.items()}, []))
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = library.decoders.ByteLevel()
    return inner.to_str(pretty=True)


def load_tokenizer(path: str | Path, end: str = "", special_tokens: bool = False) -> TextTokenizer:
    """Loads a tokenizer.json. `end` names the end token if it has an unusual name."""
    library, path = _library(), Path(path)
    if not path.is_file():
        raise RedlineError(f"there is no tokenizer {str(path)!r}.")
    with reading(path, "tokenizer", also=(Exception,)):  # the library raises plain exceptions
        inner = library.Tokenizer.from_file(str(path))
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = not special_tokens
    for name in (end,) if end else _ENDS:
        if (number := inner.token_to_id(name)) is not None:
            return TextTokenizer(inner, number)
    if end:
        raise RedlineError(f"{str(path)!r} has no token {end!r}: correct end under [tokenizer].")
    raise RedlineError(f"{str(path)!r} has none of the usual end tokens: name it as end under [tokenizer].")


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise RedlineError(
            "training on text needs tokenizers, which is not installed: pip install tokenizers."
        ) from error
    return tokenizers
