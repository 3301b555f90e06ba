"""Renders chat messages to a prompt with the model's own Jinja template, as transformers does."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from redline.errors import ModelError, RedlineError
from redline.files.untrusted import read_text, reading
from redline.models.decoder.checkpoint import read_json

Message = Mapping[str, Any]
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_chat_template(folder: Path) -> tuple[str, dict[str, str]]:
    """Returns the template of a model folder, and a dict from names such as `eos_token` to the texts of these tokens.

    Reads the template from chat_template.jinja if it exists, otherwise from `chat_template` in tokenizer_config.json.
    """
    path, config_path = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    if path.exists():
        with reading(path, "chat template", ModelError):
            template = read_text(path)
    if not isinstance(template, str):
        raise ModelError(
            f"{str(folder)!r} has no chat template (chat_template in tokenizer_config.json): give a prompt instead of "
            "messages, or use an instruction-tuned model."
        )
    tokens = {name: config.get(name) for name in _TOKENS}
    texts = {name: found.get("content") if isinstance(found, Mapping) else found for name, found in tokens.items()}
    return template, {name: text for name, text in texts.items() if isinstance(text, str)}


class ChatTemplate:
    """Renders messages with a Jinja template, which is compiled at its first use.

    `tokens` are the texts of the special tokens that the template writes. Templates come with downloaded models, so
    they run in Jinja's sandbox.

    >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}<assistant>"
    >>> ChatTemplate(template, {"eos_token": "</s>"}).render([{"role": "user", "content": "Hello"}])
    '<user>Hello</s><assistant>'
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source, self._tokens = source, dict(tokens)

    @classmethod
    def read(cls, folder: Path) -> "ChatTemplate":
        """Reads the template of a model folder. Raises ModelError if it has none."""
        return cls(*read_chat_template(folder))

    @cached_property
    def variables(self) -> set[str]:
        """The names of the variables that the template reads, such as `tools`. Empty if it cannot be parsed."""
        from jinja2 import TemplateError, meta

        with suppress(TemplateError, RecursionError):
            return meta.find_undeclared_variables(self._environment.parse(self.source))
        return set()

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> str:
        """Returns the prompt that asks for the assistant's next message; `variables` are further template variables."""
        import jinja2

        if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise RedlineError('messages must be a list such as [{"role": "user", "content": "Hello"}].')
        given: dict[str, Any] = {"documents": None, "add_generation_prompt": True} | variables | self._tokens
        try:
            return self._template.render(messages=list(messages), tools=tools, **given)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise ModelError(f"the model's chat template cannot render these messages: {error}.") from error

    @cached_property
    def _template(self) -> Any:
        return self._environment.from_string(self.source)

    @cached_property
    def _environment(self) -> Any:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """A Jinja extension that ignores `{% generation %}`, which marks the assistant's tokens for training."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def fail(message: str) -> None:
            raise jinja2.TemplateError(message)

        def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
            return json.dumps(value, ensure_ascii=False, indent=indent)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = to_json
        environment.globals |= {"raise_exception": fail, "strftime_now": lambda form: datetime.now().strftime(form)}  # pyrefly: ignore[bad-assignment]
        return environment
