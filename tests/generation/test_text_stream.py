"""Pieces of text that make up the whole, and never hold half a character."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from redline.generation.text_stream import TextStream

from .tiny_language_model import byte_tokenizer

TEXTS = ["the sea", "héllo wörld", "漢字 and 🙂👩‍👩‍👧", "a\n\n  b\t", "€" * 20, "Ω≈ç√∫˜µ≤≥÷"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_are_the_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > 1


def test_a_text_continues_its_prompt() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode("the land is the sea and 🙂", add_special_tokens=False).ids
    for split in range(1, len(tokens)):
        stream = TextStream(tokenizer, tokens[:split])
        rest = "".join(stream.push(token) for token in tokens[split:]) + stream.finish()
        # A prompt that ends in half a character shows it broken, and what follows makes it whole.
        assert tokenizer.decode(tokens[:split]).rstrip("\ufffd") + rest == "the land is the sea and 🙂"


def test_spaces_that_belong_to_words_are_kept() -> None:
    """As SentencePiece has it: a space at the very beginning is dropped, so a lone word has none."""
    vocabulary = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "!": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    stream = TextStream(tokenizer, [1])
    assert [stream.push(token) for token in (2, 2, 3)] == [" world", " world", "!"]


def test_bytes_that_are_no_text_come_out_as_such_and_do_not_stop_the_rest() -> None:
    tokenizer = byte_tokenizer()
    half = tokenizer.encode("🙂", add_special_tokens=False).ids[:2]
    for count in (1, 3, 20):
        stream = TextStream(tokenizer)
        tokens = half * count + tokenizer.encode("ok", add_special_tokens=False).ids
        text = "".join(stream.push(token) for token in tokens) + stream.finish()
        assert text.endswith("ok") and set(text[:-2]) == {"\ufffd"}
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in half] == ["", ""] and stream.finish() == "\ufffd"


def test_a_character_after_broken_bytes_is_decoded() -> None:
    tokenizer = byte_tokenizer()
    half = tokenizer.encode("🙂", add_special_tokens=False).ids[:1]
    whole = tokenizer.encode("ݚ漢🙂", add_special_tokens=False).ids
    for count in range(150):
        stream = TextStream(tokenizer)
        text = "".join(stream.push(token) for token in half * count + whole) + stream.finish()
        assert text == "\ufffd" * count + "ݚ漢🙂"


@pytest.mark.parametrize("first", [2, 130])
def test_streamed_text_equals_decoding_all_tokens(first: int) -> None:
    """From anywhere, and from bytes that are mostly parts of characters."""
    tokenizer = byte_tokenizer()
    for _ in range(50):
        tokens = [random.randrange(first, tokenizer.get_vocab_size()) for _ in range(200)]
        stream = TextStream(tokenizer)
        text = "".join(stream.push(token) for token in tokens) + stream.finish()
        whole = tokenizer.decode(tokens)
        # Where bytes are no text, how many signs stand for them may differ.
        assert text.replace("\ufffd", "") == whole.replace("\ufffd", "")
