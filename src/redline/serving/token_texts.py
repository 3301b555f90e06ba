"""The text and the bytes of single tokens, for log-probabilities."""

import re
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Looks up tokens of a `tokenizers.Tokenizer`. A token may hold only some bytes of a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        self._byte_of = _byte_alphabet() if "ByteLevel" in repr(tokenizer.decoder) else {}
        self.bytes_of = lru_cache(maxsize=65_536)(self._bytes_of)

    def text_of(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", "replace")

    def _bytes_of(self, token: int) -> bytes:
        if (added := self._added.get(token)) is not None:
            return added.encode()
        written = self._tokenizer.id_to_token(token) or ""
        if self._byte_of:
            return bytes(self._byte_of.get(letter, 0x3F) for letter in written)
        if (byte := _BYTE.fullmatch(written)) is not None:
            return bytes([int(byte[1], 16)])
        return written.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Returns the bytes that the letters of a byte-level vocabulary stand for: printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
