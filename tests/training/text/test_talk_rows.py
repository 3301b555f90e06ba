"""Rows of conversations: the chat format, the assistant's tokens, and rows that depend on seed and number alone."""

import doctest
from types import ModuleType

import numpy as np
import pytest

from redline.datasets.conversations import Draw, conversation
from redline.errors import ModelError
from redline.generation.chat_template import ChatTemplate
from redline.training.text import assistant_tokens as assistant_tokens_module
from redline.training.text import chat_format
from redline.training.text.assistant_tokens import assistant_tokens
from redline.training.text.chat_format import TEMPLATE, render
from redline.training.text.packing import NO_TARGET
from redline.training.text.talk_rows import RowWriter, write_rows
from redline.training.text.talk_task import identity_of_talk, talk_batch
from redline.training.text.tokenizer import END, TextTokenizer, parse_tokenizer
from talk_tokenizer import small_talk_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return small_talk_tokenizer(330)


def test_the_template_writes_what_was_trained_on() -> None:
    for row in range(8):
        messages = conversation(Draw(0, "template", row))
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt, whole = ChatTemplate(TEMPLATE, {}).render(messages[:place]), render(messages[: place + 1])
                begin, end = whole.spans[-1]
                assert whole.text[:begin] == prompt
                assert whole.text[begin:end] == message["content"] + END
    with pytest.raises(ModelError, match="unknown role tool"):
        ChatTemplate(TEMPLATE, {}).render([{"role": "tool", "content": "x"}])


def test_the_tokens_of_the_assistant_are_found(tokenizer: TextTokenizer) -> None:
    for row in range(50):
        messages = conversation(Draw(1, "labels", row))
        written = render(messages)
        encoded = tokenizer.inner.encode(written.text, add_special_tokens=False)
        chosen = assistant_tokens(encoded.offsets, written.spans)
        found = tokenizer.inner.decode(np.array(encoded.ids)[chosen].tolist(), skip_special_tokens=False)
        assert found == "".join(m["content"] + END for m in messages if m["role"] == "assistant")
        # The definition, token by token.
        slow = [any(begin < e and end > b for b, e in written.spans) for begin, end in encoded.offsets]
        assert chosen.tolist() == slow
    assert not assistant_tokens([], [(0, 4)]).size and not assistant_tokens([(0, 2)], []).any()


def test_special_tokens_and_digits_are_single_tokens(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.inner.encode("<|user|>1234 5<|end|>", add_special_tokens=False).tokens
    assert tokens == ["<|user|>", "1", "2", "3", "4", "Ġ", "5", "<|end|>"]
    again = parse_tokenizer(tokenizer.to_text(), tokenizer.end)
    assert again.digest == tokenizer.digest and again.vocabulary == 330
    assert small_talk_tokenizer(330).digest == tokenizer.digest


def test_a_row_depends_on_seed_and_number_alone(tokenizer: TextTokenizer) -> None:
    whole = write_rows(tokenizer, 0, 0, 6, 100)
    parts = [write_rows(tokenizer, 0, first, 3, 100) for first in (0, 3)]
    for name, values in vars(whole).items():
        assert values.shape == (6, 101)
        np.testing.assert_array_equal(values, np.concatenate([getattr(part, name) for part in parts]))
    assert (write_rows(tokenizer, 1, 0, 1, 100).tokens_RS != whole.tokens_RS[:1]).any()
    assert whole.answers_RS.any(1).all() and not whole.answers_RS.all(1).any()
    assert (np.diff(whole.documents_RS) >= 0).all() and (whole.documents_RS[:, 0] == 0).all()
    assert identity_of_talk(tokenizer) == identity_of_talk(tokenizer)


def test_targets_are_answers_only(tokenizer: TextTokenizer) -> None:
    rows = write_rows(tokenizer, 0, 10, 4, 150)
    batch = talk_batch(rows)
    assert batch.tokens_BS.shape == batch.targets_BS.shape == (4, 150)
    for row in range(4):
        wanted = batch.targets_BS[row] != NO_TARGET
        assert 0 < int(wanted.sum()) < 150
        assert (batch.targets_BS[row][wanted] == batch.tokens_BS[row].roll(-1)[wanted])[:-1].all()
        text = tokenizer.inner.decode(batch.targets_BS[row][wanted].tolist(), skip_special_tokens=False)
        assert "<|user|>" not in text and "<|assistant|>" not in text
        # The first token of an answer is predicted from the special token before it.
        begins = np.flatnonzero((batch.tokens_BS[row] == tokenizer.inner.token_to_id("<|assistant|>")).numpy())
        assert wanted[begins].all()
    starts = batch.packing.positions_BS == 0
    assert int(starts.sum()) == sum(len(set(row)) for row in rows.documents_RS[:, :-1].tolist())


def test_worker_processes_write_the_same_rows(tokenizer: TextTokenizer) -> None:
    alone, together = RowWriter(tokenizer, 3, 40), RowWriter(tokenizer, 3, 40, workers=1)
    try:
        # A resumed run begins anywhere, and a validation may go back.
        for first in (20, 30, 0):
            for name, values in vars(together.rows(first, 10)).items():
                np.testing.assert_array_equal(values, getattr(alone.rows(first, 10), name))
    finally:
        together.close()
        together.close()


@pytest.mark.parametrize("module", [assistant_tokens_module, chat_format])
def test_the_examples_run(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed
