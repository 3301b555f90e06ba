"""Builds a tokenized corpus in shards, and reuses it as long as its sources and settings do not change.

The corpus is written to a temporary folder, which is renamed when it is complete. The name of the folder is a digest of
the sources (paths, sizes, modification times), how they are read, and the tokenizer.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.files.limits import NonNegativeInt
from redline.files.partial import hidden_path, remove_abandoned
from redline.files.untrusted import check_types, read_json_object, reading
from redline.training.text.shards import Shard, open_shard, write_shard
from redline.training.text.sources import Sources
from redline.training.text.tokenizer import NAME, TextTokenizer, load_tokenizer, train_tokenizer

_MANIFEST = "manifest.json"
_SCHEMA = 2
_MANIFEST_TYPES: dict[str, Any] = {
    "shards": tuple[str, ...],
    "vocabulary": int,
    "end": str,
    "special_tokens": bool,
}
_SHARD_TOKENS = 2**26
_TEXTS_AT_ONCE = 512
# Training a tokenizer on more text takes longer without improving it.
_TOKENIZER_BYTES = 400_000_000
# The tokenizer is trained on a random sample of pieces of this many characters.
_PIECE = 2**16
# The largest fingerprint. Documents are held out in ascending order of fingerprints, so that a document with this
# fingerprint is held out last.
_LAST = 2**64 - 1
Status = Callable[[str], None]


@dataclass(frozen=True)
class TokenizerSettings:
    """A tokenizer file to load, or the vocabulary size to train. `end` names the end-of-document token of the file.

    With `special_tokens`, the name of a special token in the text becomes that token, as in chat templates; otherwise
    it is tokenized as plain characters. With `split_digits`, a trained tokenizer makes every digit a token.
    """

    file: str = ""
    vocabulary: NonNegativeInt = 0
    end: str = ""
    special_tokens: bool = False
    split_digits: bool = False

    def __post_init__(self) -> None:
        if self.file and self.vocabulary:
            raise RedlineError(
                "file and vocabulary under [tokenizer] exclude each other: load a tokenizer or train one."
            )
        if not self.file and not self.vocabulary:
            raise RedlineError("set file (a tokenizer.json) or vocabulary (the size to train) under [tokenizer].")
        if self.end and not self.file:
            raise RedlineError("end under [tokenizer] needs file: a trained tokenizer has its own end token.")
        if self.split_digits and self.file:
            raise RedlineError("split_digits under [tokenizer] is for a tokenizer to train: remove it, or file.")

    def load(self) -> TextTokenizer:
        return load_tokenizer(self.file, self.end, self.special_tokens)


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
        """Returns an identity of the corpus that does not depend on its location."""
        checksums = ",".join(f"{shard.checksum:08x}" for shard in self.shards)
        digest = hashlib.sha256(checksums.encode()).hexdigest()[:16]
        return {
            # The text comes first, because errors name the first entry that differs: another text usually means
            # another tokenizer too, and the text is the better explanation.
            "text": f"{int(self.lengths.sum()):,} tokens ({digest})",
            "tokenizer": self.tokenizer.digest,
            # The rule of the validation split is part of the identity, because another rule holds out other documents.
            "split": "by tokens",
        }

    def with_an_end(self, share: float) -> "Corpus":
        """Returns a corpus whose `split` can hold out the end of a document that is too long to be held out whole."""
        _, cut, tokens = self._walk(share) if share else ([], None, 0)
        if cut is None:
            return self
        return replace(self, shards=tuple(_with_ends(shard, cut, tokens) for shard in self.shards))

    def split(self, share: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices of the training documents and of the held-out documents.

        The choice does not depend on the order of the documents. Call `with_an_end` with the same share first, so that
        there is always something to hold out.
        """
        prints = self.fingerprints
        if not share:
            return np.arange(len(prints)), np.arange(0)
        whole, _, _ = self._walk(share)
        if not whole:
            raise RedlineError(
                "too few documents differ from each other to hold out some for validation: set validation = 0."
            )
        # Fingerprints above the largest held-out one cannot match; skipping them saves most of the slower `isin`.
        kept = prints <= np.uint64(whole[-1])
        kept[kept] = np.isin(prints[kept], np.array(whole, dtype=np.uint64))
        return np.flatnonzero(~kept), np.flatnonzero(kept)

    def _walk(self, share: float) -> tuple[list[int], int | None, int]:
        """Returns what to hold out: the fingerprints of whole documents, the fingerprint (or None) of a document of
        which only the end is held out, and the number of tokens of that end.

        Holds out documents in the order of their fingerprints until the fraction `share` of all tokens is reached. A
        document that would exceed twice that fraction is not held out whole, but its end is, which completes the
        fraction. All copies of a document are held out together.
        """
        total = int(self.lengths.sum())
        # At least two tokens, because the first token of a document is never predicted.
        wanted = max(round(share * total), 2)
        whole: list[int] = []
        held, least = 0, (total, 0)
        for mark, length, copies in _in_order(self.fingerprints, self.lengths):
            if held >= wanted:
                break
            size = length * copies
            least = min(least, (size, mark))
            if held + size <= 2 * wanted and held + size < total:
                whole.append(mark)
                held += size
                continue
            end = min(max(-(-(wanted - held) // copies), 2), length - 1)
            # A single token has no target, so an end of one token is held out only if there is no other document.
            if end > (length < total) and held + end * copies <= 2 * wanted:
                return whole, mark, end
        if not whole and least[0] < total:
            # Every document has so many copies that even their ends are too long: holds out the smallest document.
            whole.append(least[1])
        return whole, None, 0


def _in_order(prints: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yields fingerprint, tokens and copies of each document in order; sorts lazily, because few are needed."""
    while len(prints):
        few = min(len(prints), max(len(prints) // 8, 1000))
        near = prints <= np.partition(prints, few - 1)[few - 1]
        marks, first, copies = np.unique(prints[near], return_index=True, return_counts=True)
        yield from zip(marks.tolist(), lengths[near][first].tolist(), copies.tolist(), strict=True)
        prints, lengths = prints[~near], lengths[~near]


def _with_ends(shard: Shard, cut: int, tokens: int) -> Shard:
    """Splits off the last `tokens` tokens of every copy of the document with the fingerprint `cut`."""
    numbers = np.flatnonzero(shard.fingerprints == np.uint64(cut))
    starts = np.insert(shard.starts, numbers + 1, shard.starts[numbers + 1] - tokens)
    prints = shard.fingerprints.copy()
    prints[numbers] = _LAST
    return replace(shard, starts=starts, fingerprints=np.insert(prints, numbers + 1, np.uint64(cut)))


def prepare(
    sources: Sources,
    settings: TokenizerSettings,
    folder: Path,
    status: Status = lambda line: None,
    check: Callable[[Corpus], object] = lambda corpus: None,
) -> Corpus:
    """Returns the corpus of these sources from existing or new shards. If `check` raises, new shards are deleted."""
    loaded = settings.load() if settings.file else None
    wanted = [loaded.digest, loaded.end] if loaded else settings.vocabulary
    content = json.dumps(
        [
            _SCHEMA,
            sources.identity,
            wanted,
            *["special tokens"] * settings.special_tokens,
            *["split digits"] * settings.split_digits,
        ]
    )
    home = folder / hashlib.sha256(content.encode()).hexdigest()[:16]
    if not (home / _MANIFEST).is_file():
        _make(sources, loaded, settings, home, status, check)
    return open_corpus(home)


def open_corpus(home: Path) -> Corpus:
    manifest = read_json_object(home / _MANIFEST, "manifest of a corpus")
    check_types(manifest, _MANIFEST_TYPES, repr(str(home / _MANIFEST)))
    with reading(home / _MANIFEST, "manifest of a corpus"):
        names, vocabulary, end = manifest["shards"], manifest["vocabulary"], manifest["end"]
    special_tokens = manifest.get("special_tokens", False)
    tokenizer = load_tokenizer(home / NAME, end, special_tokens)
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
    settings: TokenizerSettings,
    home: Path,
    status: Status,
    check: Callable[[Corpus], object],
) -> None:
    if next(sources.documents(), None) is None:
        raise RedlineError(f"the corpus is empty: {_named(sources)} no text.")
    tokenizer = loaded or _train(sources, settings, status)
    new = [folder for folder in home.parents if not folder.exists()]
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(home.parent)
        beside = hidden_path(home)
        beside.mkdir()
    except OSError as error:
        raise RedlineError(f"cannot write {str(home)!r}: {error.strerror or error}.") from error
    try:
        names = _write_shards(sources, tokenizer, beside, status)
        write_text(beside / NAME, tokenizer.to_text())
        end = tokenizer.inner.id_to_token(tokenizer.end)
        about = {"schema": _SCHEMA, "vocabulary": tokenizer.vocabulary, "end": end, "shards": names}
        about |= {"special_tokens": tokenizer.special_tokens}
        write_text(beside / _MANIFEST, json.dumps(about, indent=2) + "\n")
        check(open_corpus(beside))
        _put(beside, home)
    except OSError as error:
        raise RedlineError(f"cannot write {str(home)!r}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        for folder in new:
            # Removes a new folder only if it is still empty, which means that no corpus was made.
            with suppress(OSError):
                folder.rmdir()


def _put(beside: Path, home: Path) -> None:
    """Renames a complete corpus, unless another process has made the same one in the meantime."""
    if (home / _MANIFEST).is_file():
        return
    if home.exists():
        # Without a manifest it is not a complete corpus.
        shutil.rmtree(home)
    try:
        os.rename(beside, home)
    except OSError as error:
        faster = error.errno in (errno.ENOTEMPTY, errno.EEXIST) and (home / _MANIFEST).is_file()
        if not faster:
            raise


def _train(sources: Sources, settings: TokenizerSettings, status: Status) -> TextTokenizer:
    share = min(1.0, _TOKENIZER_BYTES / max(sources.size_bytes, 1))
    status(f"training a tokenizer of {settings.vocabulary:,} tokens on {share:.0%} of the text …")
    texts = sources.documents() if share == 1 else _sample(sources.documents(), share)
    if (first := next(texts, None)) is None:
        # The sample can be empty if all documents are copies of a document that was not sampled.
        return train_tokenizer(
            sources.documents(), settings.vocabulary, settings.special_tokens, (), settings.split_digits
        )
    return train_tokenizer(
        chain([first], texts), settings.vocabulary, settings.special_tokens, (), settings.split_digits
    )


def _sample(texts: Iterator[str], share: float) -> Iterator[str]:
    """Yields pieces of documents, about `share` of the text; the choice does not depend on the order of the files."""
    for text in texts:
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            if fingerprint(f"{start} {piece}") < share * 2**64:
                yield piece


def _write_shards(sources: Sources, tokenizer: TextTokenizer, folder: Path, status: Status) -> list[str]:
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

    read = sources.documents()
    while texts := list(islice(read, _TEXTS_AT_ONCE)):
        for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
            documents.append(ids)
            fingerprints.append(fingerprint(text))
            held += len(ids)
        tokens, count = tokens + sum(len(ids) for ids in documents[-len(texts) :]), count + len(texts)
        status(f"tokenizing: {count:,} documents, {tokens:,} tokens …")
        if held >= _SHARD_TOKENS:
            write()
    if documents:
        write()
    return names


def fingerprint(text: str) -> int:
    """Returns a 64-bit hash of a document's text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _named(sources: Sources) -> str:
    first, others = sources.files[0].name, len(sources.files) - 1
    return f"{first!r} holds" if not others else f"{first!r} and {others} other file{'s' * (others > 1)} hold"
