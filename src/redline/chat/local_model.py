"""A model of this machine, through `redline.TextGenerator`."""

import secrets
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from redline.chat.conversation import Message
from redline.chat.model import AnswerOptions, Ending
from redline.errors import ModelError
from redline.generation.chat_template import read_chat_template
from redline.generation.text_generator import TextGenerator

_MAX_TOKENS = 1024


class LocalModel:
    """`settings` are the arguments of `TextGenerator`. Raises ModelError if the model has no chat template."""

    def __init__(self, model: str, options: AnswerOptions, **settings: Any) -> None:
        self._generator = TextGenerator(model, **settings)
        folder = self._generator.folder.path
        try:
            read_chat_template(folder)
        except ModelError as error:
            if "has no chat template" not in str(error):
                raise
            raise ModelError(
                f"{str(folder)!r} has no chat template, so it cannot chat: use an instruction-tuned model, write "
                "its template to chat_template.jinja in this folder, or continue a text with `redline generate`."
            ) from error
        self._options: AnswerOptions = {"max_tokens": _MAX_TOKENS, **options}
        self.name = Path(model).name

    def load(self) -> None:
        """Reads the weights, so that the first answer does not wait for them."""
        self._generator.load()

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, Ending]:
        # Without a seed of the user's, a retry gives another answer (if the temperature is above 0).
        options: AnswerOptions = {"seed": secrets.randbelow(2**63), **self._options}
        with self._generator.chat(messages, stream=True, **options) as stream:
            yield from stream
            text = stream.text
            return Ending(len(text.tokens), text.reason or "")
