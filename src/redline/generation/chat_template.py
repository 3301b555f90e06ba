"""Renders chat messages to a prompt with the model's own Jinja template, as transformers does."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from redline.errors import ModelError, RedlineError
from redline.files.untrusted import read_text, reading
from redline.models.decoder.checkpoint import read_json

Message = Mapping[str, Any]
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_chat_template(folder: Path) -> tuple[str, dict[str, str]]:
    """Returns the template of a model folder, and the texts of the special tokens by the names that templates use.

    The template is in chat_template.jinja, or under `chat_template` in tokenizer_config.json.
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


def render_chat(template: str, messages: Sequence[Message], tokens: Mapping[str, str]) -> str:
    """Returns the prompt that asks for the assistant's next message.

    Templates come with downloaded models, so they run in Jinja's sandbox.

    >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}<assistant>"
    >>> render_chat(template, [{"role": "user", "content": "Hello"}], {"eos_token": "</s>"})
    '<user>Hello</s><assistant>'
    """
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

    if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise RedlineError('messages must be a list such as [{"role": "user", "content": "Hello"}].')
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": fail, "strftime_now": lambda form: datetime.now().strftime(form)}  # pyrefly: ignore[bad-assignment]
    variables = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
    try:
        return environment.from_string(template).render(**variables, **tokens)
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise ModelError(f"the model's chat template cannot render these messages: {error}.") from error
