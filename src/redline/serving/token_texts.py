"""Returns the text and the bytes of single tokens, which are a part of log-probabilities in responses."""

import re
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Looks up the tokens of a `tokenizers.Tokenizer`.

    A token may contain only some of the bytes of a character; its text then contains replacement characters (U+FFFD).
    """

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
    """Returns a dict from the characters of a byte-level vocabulary to the bytes that they represent.

    Printable bytes are represented by their own characters, and the others by the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
