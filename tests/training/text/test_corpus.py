"""A corpus is made once, reused until something changes, and never half there."""

import json
from pathlib import Path

import numpy as np
import pytest

from redline.errors import RedlineError
from redline.training.text import corpus as module
from redline.training.text.corpus import TokenizerSettings, open_corpus, prepare
from redline.training.text.sources import Sources

TRAINED = TokenizerSettings(vocabulary=270)


def write(folder: Path, count: int = 20) -> Sources:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": f"document {n} of many " * (1 + n % 5)}) for n in range(count)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return Sources.find((str(folder),))


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
    other = prepare(sources, TokenizerSettings(vocabulary=265), tmp_path / "shards")
    assert other.identity != first.identity and len(list((tmp_path / "shards").iterdir())) == 2


def test_many_shards_are_one_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = write(tmp_path / "text", 1500)
    monkeypatch.setattr(module, "_SHARD_TOKENS", 900)
    made = prepare(sources, TRAINED, tmp_path / "shards")
    assert len(made.shards) == 3 and len(made.lengths) == 1500
    assert made.lengths.sum() == sum(len(shard.tokens) for shard in made.shards)


def test_a_loaded_tokenizer_is_taken_along(tmp_path: Path) -> None:
    sources = write(tmp_path / "text")
    first = prepare(sources, TRAINED, tmp_path / "shards")
    (tmp_path / "t.json").write_text(first.tokenizer.to_text())
    second = prepare(sources, TokenizerSettings(file=str(tmp_path / "t.json")), tmp_path / "shards")
    assert second.identity == first.identity and second.folder != first.folder


def test_the_split_takes_documents_by_what_they_are(tmp_path: Path) -> None:
    made = prepare(write(tmp_path / "text", 40), TRAINED, tmp_path / "shards")
    train, kept = made.split(0.1)
    assert len(kept) == 4 and sorted([*train, *kept]) == list(range(40))
    assert made.fingerprints[kept].max() < made.fingerprints[train].min()
    assert len(made.split(0)[1]) == 0 and len(made.split(1e-9)[1]) == 1 and len(made.split(0.999)[0]) == 1


def test_copies_of_a_document_stay_together(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"number {n % 5}"}) for n in range(50)))
    made = prepare(Sources.find((str(tmp_path / "a.jsonl"),)), TRAINED, tmp_path / "shards")
    train, kept = made.split(0.05)
    assert len(kept) == 10 and len(train) == 40
    assert not set(made.fingerprints[train]) & set(made.fingerprints[kept])
    with pytest.raises(RedlineError, match="too few documents differ"):
        made.split(0.95)


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


@pytest.mark.parametrize(("content", "said"), [("", "is empty: 'a.txt' holds no text"), (" \n\t", "is empty")])
def test_an_empty_corpus_writes_nothing(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(RedlineError, match=said):
        prepare(Sources.find((str(tmp_path / "a.txt"),)), TRAINED, tmp_path / "shards")
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_what_is_refused_is_not_kept(tmp_path: Path) -> None:
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


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    sources = write(tmp_path / "text")
    made = prepare(sources, TRAINED, tmp_path / "shards")
    shard = made.folder / "tokens-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-3])
    with pytest.raises(RedlineError, match="cut off"):
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
    with pytest.raises(RedlineError, match="is no corpus"):
        open_corpus(made.folder)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"file": "x", "vocabulary": 300}, "contradict"),
        ({}, "name a tokenizer.json"),
        ({"vocabulary": 300, "end": "x"}, "for a tokenizer that is loaded"),
    ],
)
def test_contradictions(values: dict[str, object], said: str) -> None:
    with pytest.raises(RedlineError, match=said):
        TokenizerSettings(**values)
