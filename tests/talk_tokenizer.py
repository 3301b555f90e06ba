"""A tokenizer for conversations, trained on few of them so that a test takes no second."""

from collections.abc import Iterator

import pytest

from redline.training.text import talk_rows
from redline.training.text.tokenizer import TextTokenizer


def small_talk_tokenizer(vocabulary: int = 320) -> TextTokenizer:
    whole = talk_rows.texts_for_tokenizer

    def few(_: int) -> Iterator[str]:
        return whole(20)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(talk_rows, "texts_for_tokenizer", few)
        return talk_rows.train_talk_tokenizer(vocabulary, split_digits=True)
