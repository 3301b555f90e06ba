"""The chat format of models that are trained on conversations: special tokens, template, and the spans of the answers.

A conversation of three messages is rendered as follows:

    <|system|>Answer in one word.<|end|><|user|>Hello<|end|><|assistant|>Hi.<|end|>

The template is saved in tokenizer_config.json, so that any program that reads Hugging Face folders writes the same
prompts. `render` implements the same format in Python, and also returns the spans of the text that the assistant wrote.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redline.training.text.tokenizer import END

ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = tuple(f"<|{role}|>" for role in ROLES)
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' ~ message.role ~ ': use system, user or assistant') }}"
    "{% endif %}"
    "{% if message.role == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message.content | trim }}" + END + "{% endgeneration %}"
    "{% else %}"
    "<|{{ message.role }}|>{{ message.content | trim }}" + END + "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class ChatText:
    """A rendered conversation. A span is the range of characters of an answer, including its end token."""

    text: str
    spans: tuple[tuple[int, int], ...]


def render(messages: Sequence[Mapping[str, str]]) -> ChatText:
    """Renders a conversation as `TEMPLATE` does.

    >>> render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
    ChatText(text='<|user|>Hi<|end|><|assistant|>Hello<|end|>', spans=((30, 42),))
    """
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    for message in messages:
        role = message["role"]
        head, body = f"<|{role}|>", message["content"].strip() + END
        parts += (head, body)
        begin, length = length + len(head), length + len(head) + len(body)
        if role == "assistant":
            spans.append((begin, length))
    return ChatText("".join(parts), tuple(spans))
