"""Tokens give back the text they were made of, and the token that ends a document is found or asked for."""

import random
from pathlib import Path

import pytest

from redline.errors import RedlineError
from redline.training.text.tokenizer import END, load_tokenizer, train_tokenizer

SENTENCE = "the memory of a machine is what it does not forget über alles 東京 🙂"
WORDS = SENTENCE.split()


def texts(count: int = 60) -> list[str]:
    draw = random.Random()
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 30))) + "\n" for _ in range(count)]


def test_trained_tokens_give_the_text_back() -> None:
    written = texts()
    tokenizer = train_tokenizer(iter(written), 300)
    assert 257 < tokenizer.vocabulary <= 300 and tokenizer.inner.id_to_token(tokenizer.end) == END
    for text, ids in zip(written, tokenizer.encode(written), strict=True):
        assert ids[-1] == tokenizer.end and tokenizer.decode(ids) == text
        assert len(ids) <= len(text.encode()) + 1
    # What was never seen is spelled in bytes.
    assert tokenizer.decode(tokenizer.encode(["Ωmega\x00"])[0]) == "Ωmega\x00"
    # The end's own name in a text is text, not the end.
    ids = tokenizer.encode([f"a {END} b"])[0]
    assert (ids == tokenizer.end).sum() == 1 and tokenizer.decode(ids) == f"a {END} b"


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    first = train_tokenizer(texts(), 280)
    (tmp_path / "tokenizer.json").write_text(first.to_text())
    second = load_tokenizer(tmp_path / "tokenizer.json")
    text = texts(1)
    assert list(first.encode(text)[0]) == list(second.encode(text)[0]) and first.digest == second.digest
    assert (second.encode([END])[0] == second.end).sum() == 1
    assert load_tokenizer(tmp_path / "tokenizer.json", "a").end == first.inner.token_to_id("a")


def test_other_libraries_know_its_end(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made = train_tokenizer(texts(), 280)
    (tmp_path / "tokenizer.json").write_text(made.to_text())
    (tmp_path / "tokenizer_config.json").write_text(made.config_text())
    found = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (found.eos_token, found.eos_token_id) == (END, made.end)
    text = texts(1)[0]
    assert found(text)["input_ids"] == made.encode([text])[0][:-1].tolist()


@pytest.mark.parametrize("special_tokens", [False, True])
def test_names_of_special_tokens_mean_the_same_to_other_libraries(tmp_path: Path, special_tokens: bool) -> None:
    transformers = pytest.importorskip("transformers")
    made = train_tokenizer(texts(), 280, special_tokens)
    (tmp_path / "tokenizer.json").write_text(made.to_text())
    (tmp_path / "tokenizer_config.json").write_text(made.config_text())
    loaded = load_tokenizer(tmp_path / "tokenizer.json", special_tokens=special_tokens)
    assert made.special_tokens == loaded.special_tokens == special_tokens
    text = f"a {END} b"
    ids = made.encode([text])[0]
    assert (ids[:-1] == made.end).sum() == special_tokens
    found = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert found(text)["input_ids"] == loaded.encode([text])[0][:-1].tolist() == ids[:-1].tolist()


def test_unusable_tokenizers_raise(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(RedlineError, match="is not a readable tokenizer"):
        load_tokenizer(tmp_path / "x.json")
    with pytest.raises(RedlineError, match="there is no tokenizer"):
        load_tokenizer(tmp_path / "absent.json")
    with pytest.raises(RedlineError, match="must be at least 257"):
        train_tokenizer(texts(), 256)
    named = train_tokenizer(texts(), 280).to_text()
    (tmp_path / "odd.json").write_text(named.replace(END, "<|odd|>"))
    with pytest.raises(RedlineError, match="none of the usual end tokens"):
        load_tokenizer(tmp_path / "odd.json")
    assert load_tokenizer(tmp_path / "odd.json", "<|odd|>").end == 0
    with pytest.raises(RedlineError, match="no token '<|nope|>'"):
        load_tokenizer(tmp_path / "odd.json", "<|nope|>")
