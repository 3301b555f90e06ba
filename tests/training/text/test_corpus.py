"""A corpus is made once, reused until something changes, and never half there."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redline.errors import RedlineError
from redline.training.text import corpus as module
from redline.training.text.corpus import TokenizerSettings, open_corpus, prepare
from redline.training.text.sources import Sources
from redline.training.text.tokenizer import TextTokenizer

TRAINED = TokenizerSettings(vocabulary=270)


def write(folder: Path, count: int = 20) -> Sources:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": f"document {n} of many " * (1 + n % 5)}) for n in range(count)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return Sources.find((str(folder),))


def pieces(made: module.Corpus, share: float) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The tokens that are trained on and those that are kept, document by document."""
    made = made.with_an_end(share)
    found = [
        tuple(shard.tokens[first:last].tolist())
        for shard in made.shards
        for first, last in zip(shard.starts[:-1], shard.starts[1:], strict=True)
    ]
    train, kept = made.split(share)
    assert sorted([*train, *kept]) == list(range(len(found)))
    return sorted(found[n] for n in train), sorted(found[n] for n in kept)


def test_made_once_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, told = write(tmp_path / "text"), []
    first = prepare(sources, TRAINED, tmp_path / "shards", told.append)
    assert any("20 documents" in said for said in told)
    texts = list(sources.documents())
    shard = first.shards[0]
    for n, text in enumerate(texts):
        ids = shard.tokens[shard.starts[n] : shard.starts[n + 1]]
        assert first.tokenizer.decode(ids) == text and ids[-1] == first.tokenizer.end

    with monkeypatch.context() as patch:
        patch.setattr(module, "_make", lambda *_: pytest.fail("made again"))
        again = prepare(sources, TRAINED, tmp_path / "shards")
    assert again.identity == first.identity
    # In words that can be read where a training is resumed on another text.
    assert first.identity["text"].startswith(f"{len(shard.tokens):,} tokens (")
    other = prepare(sources, TokenizerSettings(vocabulary=265), tmp_path / "shards")
    assert other.identity != first.identity and len(list((tmp_path / "shards").iterdir())) == 2


def test_many_shards_are_one_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = write(tmp_path / "text", 1500)
    monkeypatch.setattr(module, "_SHARD_TOKENS", 900)
    made = prepare(sources, TRAINED, tmp_path / "shards")
    assert len(made.shards) == 3 and len(made.lengths) == 1500
    assert made.lengths.sum() == sum(len(shard.tokens) for shard in made.shards)


def test_a_tokenizer_of_much_text_in_few_documents_fills_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = module.train_tokenizer

    def train(texts: Iterable[str], vocabulary: int, *options: Any) -> TextTokenizer:
        seen[:] = texts
        return real(seen, vocabulary, *options)

    monkeypatch.setattr(module, "train_tokenizer", train)
    monkeypatch.setattr(module, "_TOKENIZER_BYTES", 20_000)
    monkeypatch.setattr(module, "_PIECE", 500)
    for name, numbers in (("a", range(9000)), ("b", range(9000, 9100))):
        (tmp_path / f"{name}.txt").write_text(" ".join(f"word {n}" for n in numbers))
    made = prepare(Sources.find((str(tmp_path),)), TRAINED, tmp_path / "shards")
    assert made.tokenizer.vocabulary == 270 and 10_000 < sum(map(len, seen)) < 30_000
    before = sorted(seen)
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    prepare(Sources.find((str(tmp_path),)), TRAINED, tmp_path / "shards")
    assert sorted(seen) == before
    # Where every piece is a copy of one that is left out, all are taken.
    monkeypatch.setattr(module, "_TOKENIZER_BYTES", 1)
    (tmp_path / "copies.jsonl").write_text('{"text": "one two one two"}\n' * 50)
    prepare(Sources.find((str(tmp_path / "copies.jsonl"),)), TRAINED, tmp_path / "shards")
    assert seen == ["one two one two"] * 50


def test_split_digits_make_another_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1234 1234 1234 " * 20)
    sources = Sources.find((str(tmp_path / "a.txt"),))
    whole, split = (
        prepare(sources, TokenizerSettings(vocabulary=270, split_digits=split), tmp_path / "shards")
        for split in (False, True)
    )
    assert whole.folder != split.folder
    assert (
        split.tokenizer.inner.encode("1234").tokens
        == ["1", "2", "3", "4"]
        != whole.tokenizer.inner.encode("1234").tokens
    )


def test_a_loaded_tokenizer_is_stored_with_the_corpus(tmp_path: Path) -> None:
    sources = write(tmp_path / "text")
    first = prepare(sources, TRAINED, tmp_path / "shards")
    (tmp_path / "t.json").write_text(first.tokenizer.to_text())
    second = prepare(sources, TokenizerSettings(file=str(tmp_path / "t.json")), tmp_path / "shards")
    assert second.identity == first.identity and second.folder != first.folder


def test_the_split_depends_on_the_text_of_documents(tmp_path: Path) -> None:
    made = prepare(write(tmp_path / "text", 40), TRAINED, tmp_path / "shards")
    assert made.with_an_end(0.0) is made and len(made.split(0)[1]) == 0
    lines = (tmp_path / "text" / "a.jsonl").read_text().splitlines()
    (tmp_path / "text" / "a.jsonl").write_text("\n".join(reversed(lines)))
    other = prepare(Sources.find((str(tmp_path / "text"),)), TRAINED, tmp_path / "shards")
    for share in (1e-9, 0.05, 0.1, 0.5, 0.999):
        train, kept = pieces(made, share)
        assert train and kept and not set(train) & set(kept)
        assert sum(map(len, train + kept)) == made.lengths.sum()
        assert (train, kept) == tuple(map(sorted, pieces(other, share)))
        wanted = max(round(share * made.lengths.sum()), 2)
        assert min(wanted, made.lengths.sum() - 1) <= sum(map(len, kept)) <= 2 * wanted


@pytest.mark.parametrize("note", [f"a note of few words, the number {n}" for n in range(6)])
def test_the_share_is_of_tokens_and_not_of_documents(tmp_path: Path, note: str) -> None:
    (tmp_path / "book.txt").write_text(" ".join(f"page {n} of a book" for n in range(3000)))
    (tmp_path / "note.txt").write_text(note)
    made = prepare(Sources.find((str(tmp_path),)), TRAINED, tmp_path / "shards")
    train, kept = pieces(made, 0.005)
    assert 0.0049 < sum(map(len, kept)) / made.lengths.sum() <= 0.01
    # The end of the book, alone or beside the note.
    book = max(train, key=len) + max(kept, key=len)
    assert made.tokenizer.decode(book) == (tmp_path / "book.txt").read_text()
    assert made.identity == made.with_an_end(0.005).identity


def test_the_order_is_the_same_however_much_of_it_is_sorted() -> None:
    draw = np.random.default_rng()
    different = draw.integers(0, 2**64, 5000, dtype=np.uint64)
    prints = draw.choice(different, 9000)
    marks, copies = np.unique(prints, return_counts=True)
    found = list(module._in_order(prints, prints % 97))
    assert found == list(zip(marks.tolist(), (marks % 97).tolist(), copies.tolist(), strict=True))


def test_an_end_is_cut_in_every_shard_that_has_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARD_TOKENS", 1)
    monkeypatch.setattr(module, "_TEXTS_AT_ONCE", 1)
    text = json.dumps({"text": " ".join(map(str, range(400)))})
    (tmp_path / "a.jsonl").write_text("\n".join([text] * 3))
    made = prepare(Sources.find((str(tmp_path / "a.jsonl"),)), TRAINED, tmp_path / "shards")
    train, kept = pieces(made, 0.1)
    assert len(made.shards) == 3 and len(train) == len(kept) == 3
    assert len(set(train)) == len(set(kept)) == 1 and len(train[0] + kept[0]) == made.lengths[0]


def test_copies_of_a_document_stay_together(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"number {n % 5}"}) for n in range(50)))
    made = prepare(Sources.find((str(tmp_path / "a.jsonl"),)), TRAINED, tmp_path / "shards")
    for share in (0.001, 0.05, 0.95):
        train, kept = pieces(made, share)
        assert train and kept and not set(train) & set(kept)
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"text": "a"})] * 50))
    made = prepare(Sources.find((str(tmp_path / "a.jsonl"),)), TRAINED, tmp_path / "shards")
    with pytest.raises(RedlineError, match="too few documents differ"):
        pieces(made, 0.05)


def test_of_one_document_the_end_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a single book, and a long one at that, with an end that is its own")
    made = prepare(Sources.find((str(tmp_path / "a.txt"),)), TRAINED, tmp_path / "shards")
    tokens = int(made.lengths.sum())
    for share in (0.3, 1e-6, 0.999):
        halves = made.with_an_end(share)
        chosen, kept = halves.split(share)
        assert chosen.tolist() == [0] and kept.tolist() == [1] and halves.identity == made.identity
        assert halves.lengths.sum() == tokens and halves.lengths.min() > 0
        assert halves.lengths[1] == min(max(round(share * tokens), 2), tokens - 1)
    assert made.with_an_end(0.0) is made and made.split(0.0)[1].size == 0
    # Of two tokens each half has one: that it is too little is said by whoever makes rows of it.
    (tmp_path / "a.txt").write_text("a")
    made = prepare(Sources.find((str(tmp_path / "a.txt"),)), TRAINED, tmp_path / "shards").with_an_end(0.1)
    assert made.lengths.tolist() == [1, 1] and made.split(0.1)[1].tolist() == [1]


@pytest.mark.parametrize(("content", "said"), [("", "is empty: 'a.txt' holds no text"), (" \n\t", "is empty")])
def test_an_empty_corpus_writes_nothing(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(RedlineError, match=said):
        prepare(Sources.find((str(tmp_path / "a.txt"),)), TRAINED, tmp_path / "shards")
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_shards_that_the_check_refuses_are_deleted(tmp_path: Path) -> None:
    def refuse(made: module.Corpus) -> None:
        raise RedlineError(f"not {len(made.lengths)} documents.")

    sources = write(tmp_path / "text")
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(RedlineError, match="not [1-9]"):
        prepare(sources, TRAINED, tmp_path / "a" / "shards", check=refuse)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_breaking_off_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = write(tmp_path / "text")
    real = module.write_shard

    def full(*args: object) -> None:
        real(*args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_shard", full)
    with pytest.raises(RedlineError, match="No space left"):
        prepare(sources, TRAINED, tmp_path / "shards")
    assert not (tmp_path / "shards").exists()


def test_whoever_makes_the_same_corpus_first_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, others = write(tmp_path / "text"), []

    def meanwhile(made: module.Corpus) -> None:
        others.append(prepare(sources, TRAINED, tmp_path / "shards"))
        (others[0].folder / "mark").touch()

    ours = prepare(sources, TRAINED, tmp_path / "shards", check=meanwhile)
    assert ours.folder == others[0].folder and (ours.folder / "mark").is_file()
    assert list((tmp_path / "shards").iterdir()) == [ours.folder]
    # What has no manifest is nobody's.
    (ours.folder / "manifest.json").unlink()
    again = prepare(sources, TRAINED, tmp_path / "shards")
    assert again.folder == ours.folder and not (again.folder / "mark").exists()

    # Faster still: between the look and the renaming.
    def faster(source: Path, target: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename)
            prepare(sources, TRAINED, tmp_path / "shards")
        rename(source, target)

    rename = os.rename
    shutil.rmtree(again.folder)
    monkeypatch.setattr(os, "rename", faster)
    assert prepare(sources, TRAINED, tmp_path / "shards").identity == again.identity
    assert list((tmp_path / "shards").iterdir()) == [ours.folder]


def test_leftovers_of_a_killed_process_are_deleted(tmp_path: Path) -> None:
    sources = write(tmp_path / "text")
    killed = """
import os, sys
from pathlib import Path
from redline.training.text import corpus
from redline.training.text.sources import Sources
corpus.write_shard = lambda *_: os._exit(9)
corpus.prepare(Sources.find((sys.argv[1],)), corpus.TokenizerSettings(vocabulary=270), Path(sys.argv[2]))
"""
    command = [sys.executable, "-c", killed, str(tmp_path / "text"), str(tmp_path / "shards")]
    assert subprocess.run(command, check=False).returncode == 9
    (left,) = (tmp_path / "shards").iterdir()
    # A process of that number on another machine may be alive.
    foreign = left.with_name(re.sub(r"\.[0-9a-f]{4}([0-9a-f]{8}\.redline-partial)", r".0123\1", left.name))
    foreign.mkdir()
    living: list[Path] = []

    def meanwhile(made: module.Corpus) -> None:
        living.append(made.folder)
        prepare(sources, TokenizerSettings(vocabulary=265), tmp_path / "shards")
        assert living[0].is_dir() and not left.exists()

    made = prepare(sources, TRAINED, tmp_path / "shards", check=meanwhile)
    assert living[0].name.startswith(f".{made.folder.name}.") and foreign.is_dir()
    assert len([path for path in (tmp_path / "shards").iterdir() if path.name[0] != "."]) == 2


def test_mismatched_tokenizer_and_shards_raise(tmp_path: Path) -> None:
    sources = write(tmp_path / "text")
    made = prepare(sources, TRAINED, tmp_path / "shards")
    shard = made.folder / "tokens-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-3])
    with pytest.raises(RedlineError, match="truncated"):
        open_corpus(made.folder)
    shard.unlink()
    module.write_shard(shard, [np.array([1, 2])], [1], 999)
    with pytest.raises(RedlineError, match="vocabularies do not match: the shard .* has 999 tokens"):
        open_corpus(made.folder)
    other = prepare(sources, TokenizerSettings(vocabulary=265), tmp_path / "shards")
    (made.folder / "tokenizer.json").write_text(other.tokenizer.to_text())
    with pytest.raises(RedlineError, match="do not match: its tokenizer has 265 tokens"):
        open_corpus(made.folder)
    (made.folder / "manifest.json").write_text("{")
    with pytest.raises(RedlineError, match="is not a readable manifest of a corpus: it is not JSON"):
        open_corpus(made.folder)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"file": "x", "vocabulary": 300}, "exclude each other"),
        ({}, "set file .a tokenizer.json. or vocabulary"),
        ({"vocabulary": 300, "end": "x"}, "needs file"),
    ],
)
def test_contradictions(values: dict[str, object], said: str) -> None:
    with pytest.raises(RedlineError, match=said):
        TokenizerSettings(**values)


def test_names_of_special_tokens_are_plain_text_by_default(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one <|end|> two <|end|> three")
    sources = Sources.find((str(tmp_path / "text.txt"),))
    for special_tokens, ends in ((False, 1), (True, 3)):
        made = prepare(sources, TokenizerSettings(vocabulary=270, special_tokens=special_tokens), tmp_path / "shards")
        assert (made.shards[0].tokens == made.tokenizer.end).sum() == ends
        assert made.tokenizer.special_tokens == special_tokens
        assert json.loads(made.tokenizer.config_text())["split_special_tokens"] != special_tokens
