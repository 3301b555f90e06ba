"""A corpus as shards of tokens: made once, with progress, and reused while sources and settings are what they were.

Everything is written into a folder beside the final one, which is then renamed: a corpus is there whole or not at all.
The digest in its name holds the sources (paths, sizes, times), how they are read, and the tokenizer.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from redline.errors import RedlineError
from redline.files import write_text
from redline.training.text.shards import Shard, open_shard, write_shard
from redline.training.text.sources import Sources
from redline.training.text.tokenizer import NAME, TextTokenizer, load_tokenizer, train_tokenizer

_MANIFEST = "manifest.json"
_SCHEMA = 1
_SHARD_TOKENS = 2**26
_TEXTS_AT_ONCE = 512
# More text than this makes a tokenizer no better, only later.
_TOKENIZER_BYTES = 400_000_000
Tell = Callable[[str], None]


@dataclass(frozen=True)
class TokenizerSettings:
    """A file to load, or the size of a vocabulary to train; `end` is the loaded one's token for a document's end."""

    file: str = ""
    vocabulary: int = 0
    end: str = ""

    def __post_init__(self) -> None:
        if self.file and self.vocabulary:
            raise RedlineError("file and vocabulary under [tokenizer] contradict each other: load one, or train one.")
        if not self.file and not self.vocabulary:
            raise RedlineError("name a tokenizer.json as file under [tokenizer], or the size of a vocabulary to train.")
        if self.end and not self.file:
            raise RedlineError("end under [tokenizer] is for a tokenizer that is loaded from a file.")


@dataclass(frozen=True)
class Corpus:
    tokenizer: TextTokenizer
    shards: tuple[Shard, ...]
    folder: Path

    @property
    def lengths(self) -> np.ndarray:
        return np.concatenate([np.diff(shard.starts) for shard in self.shards])

    @property
    def fingerprints(self) -> np.ndarray:
        return np.concatenate([shard.fingerprints for shard in self.shards])

    @property
    def identity(self) -> dict[str, Any]:
        """What it is, wherever it lies."""
        checksums = ",".join(f"{shard.checksum:08x}" for shard in self.shards)
        return {
            "tokenizer": self.tokenizer.digest,
            "tokens": int(self.lengths.sum()),
            "shards": hashlib.sha256(checksums.encode()).hexdigest()[:16],
        }

    def with_an_end(self, share: float) -> "Corpus":
        """Where there is one document alone, its last `share` counts as another, which `split` keeps for validation."""
        if not share or len(self.fingerprints) > 1:
            return self
        (shard,) = self.shards
        tokens = len(shard.tokens)
        # Two tokens at least: what comes after the first is what there is to judge.
        cut = max(tokens - max(round(share * tokens), 2), 1)
        halves = replace(shard, starts=np.array([0, cut, tokens]), fingerprints=np.array([1, 0], dtype=np.uint64))
        return replace(self, shards=(halves,))

    def split(self, share: float) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the documents to train on, and of those kept for validation: the same ones in any order."""
        count = len(self.fingerprints)
        if not share:
            return np.arange(count), np.arange(0)
        prints = self.fingerprints
        wanted = min(max(1, round(share * count)), count - 1)
        # Copies of a document have its fingerprint, and go where it goes.
        kept = prints <= np.partition(prints, wanted - 1)[wanted - 1]
        if kept.all():
            raise RedlineError(
                "too few documents differ from each other to keep some for validation: write validation = 0."
            )
        return np.flatnonzero(~kept), np.flatnonzero(kept)


def prepare(
    sources: Sources,
    settings: TokenizerSettings,
    folder: Path,
    tell: Tell = lambda said: None,
    check: Callable[[Corpus], object] = lambda corpus: None,
) -> Corpus:
    """The corpus of these sources, from its shards where those are there already; what `check` refuses is not kept."""
    loaded = load_tokenizer(settings.file, settings.end) if settings.file else None
    wanted = [loaded.digest, loaded.end] if loaded else settings.vocabulary
    content = json.dumps([_SCHEMA, sources.identity, wanted])
    home = folder / hashlib.sha256(content.encode()).hexdigest()[:16]
    if not (home / _MANIFEST).is_file():
        _make(sources, loaded, settings.vocabulary, home, tell, check)
    return open_corpus(home)


def open_corpus(home: Path) -> Corpus:
    try:
        manifest = json.loads((home / _MANIFEST).read_text(encoding="utf-8"))
        names, vocabulary, end = manifest["shards"], manifest["vocabulary"], manifest["end"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RedlineError(f"{str(home)!r} is no corpus: its {_MANIFEST} cannot be read.") from error
    tokenizer = load_tokenizer(home / NAME, end)
    if tokenizer.vocabulary != vocabulary:
        raise RedlineError(
            f"the vocabularies of {str(home)!r} do not match: its tokenizer has {tokenizer.vocabulary:,} tokens, "
            f"its shards were made with {vocabulary:,}."
        )
    shards = tuple(open_shard(home / name) for name in names)
    for name, shard in zip(names, shards, strict=True):
        if shard.vocabulary != vocabulary:
            raise RedlineError(
                f"the vocabularies do not match: the shard {str(home / name)!r} has {shard.vocabulary:,} tokens, "
                f"its tokenizer {vocabulary:,}."
            )
    return Corpus(tokenizer, shards, home)


def _make(
    sources: Sources,
    loaded: TextTokenizer | None,
    vocabulary: int,
    home: Path,
    tell: Tell,
    check: Callable[[Corpus], object],
) -> None:
    if next(sources.documents(), None) is None:
        raise RedlineError(f"the corpus is empty: {_named(sources)} no text.")
    tokenizer = loaded or _train(sources, vocabulary, tell)
    new = [folder for folder in home.parents if not folder.exists()]
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=home.parent, prefix=f".{home.name}."))
    except OSError as error:
        raise RedlineError(f"cannot write {str(home)!r}: {error.strerror or error}.") from error
    try:
        names = _write_shards(sources, tokenizer, beside, tell)
        write_text(beside / NAME, tokenizer.to_text())
        end = tokenizer.inner.id_to_token(tokenizer.end)
        about = {"schema": _SCHEMA, "vocabulary": tokenizer.vocabulary, "end": end, "shards": names}
        write_text(beside / _MANIFEST, json.dumps(about, indent=2) + "\n")
        os.chmod(beside, 0o755)
        check(open_corpus(beside))
        if home.exists():
            # Left by hand without its manifest: a whole one never looks so.
            shutil.rmtree(home)
        os.rename(beside, home)
    except OSError as error:
        raise RedlineError(f"cannot write {str(home)!r}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        for folder in new:
            # None that holds anything: only where nothing came of it is it empty.
            with suppress(OSError):
                folder.rmdir()


def _train(sources: Sources, vocabulary: int, tell: Tell) -> TextTokenizer:
    share = min(1.0, _TOKENIZER_BYTES / max(sources.size_bytes, 1))
    tell(f"training a tokenizer of {vocabulary:,} tokens on {share:.0%} of the text …")
    texts = (text for text in sources.documents() if share == 1 or fingerprint(text) < share * 2**64)
    return train_tokenizer(texts, vocabulary)


def _write_shards(sources: Sources, tokenizer: TextTokenizer, folder: Path, tell: Tell) -> list[str]:
    names: list[str] = []
    documents: list[np.ndarray] = []
    fingerprints: list[int] = []
    held = tokens = count = 0

    def write() -> None:
        nonlocal held
        names.append(f"tokens-{len(names):05}.bin")
        write_shard(folder / names[-1], documents, fingerprints, tokenizer.vocabulary)
        documents.clear()
        fingerprints.clear()
        held = 0

    for texts in _several(sources.documents()):
        for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
            documents.append(ids)
            fingerprints.append(fingerprint(text))
            held += len(ids)
        tokens, count = tokens + sum(len(ids) for ids in documents[-len(texts) :]), count + len(texts)
        tell(f"tokenizing: {count:,} documents, {tokens:,} tokens …")
        if held >= _SHARD_TOKENS:
            write()
    if documents:
        write()
    return names


def fingerprint(text: str) -> int:
    """64 bits of a document's text: equal texts are equal, and the bits look random."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _several(texts: Iterator[str]) -> Iterator[list[str]]:
    while several := list(islice(texts, _TEXTS_AT_ONCE)):
        yield several


def _named(sources: Sources) -> str:
    first, others = sources.files[0].name, len(sources.files) - 1
    return f"{first!r} holds" if not others else f"{first!r} and {others} other file{'s' * (others > 1)} hold"
