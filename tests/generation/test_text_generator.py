"""`redline.TextGenerator`: texts, batches, streams and chats from a model folder."""

import doctest
import json
from pathlib import Path

import pytest

import redline
from redline.errors import ModelError, RedlineError
from redline.generation import chat_template, memory_evaluation, text_generator
from redline.generation.chat_template import ChatTemplate, read_chat_template
from redline.generation.text_generator import TextGenerator

from .tiny_language_model import write_model

TEMPLATE = """{%- for message in messages %}
{%- if message.role not in ('user', 'assistant', 'system') %}{{ raise_exception('unknown role') }}{% endif %}
<|{{ message['role'] }}|>{% generation %}{{ message.content | trim }}{% endgeneration %}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
MESSAGES = [{"role": "system", "content": " the sea "}, {"role": "user", "content": "is <&> é?"}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "my-model")
    return tmp_path / "my-model"


def add_template(folder: Path, template: object) -> None:
    config = {"chat_template": template, "eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "module", [text_generator, chat_template, memory_evaluation], ids=lambda module: module.__name__
)
def test_docstring_examples(folder: Path, module: object) -> None:
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


def test_a_batch_gives_the_texts_of_single_prompts(folder: Path) -> None:
    generator = redline.TextGenerator(folder, device="cpu")
    prompts = ["the sea", "the land is the", "🙂"]
    texts = generator(prompts, max_tokens=12, temperature=1.0, seed=3)
    for row, prompt in enumerate(prompts):
        alone = generator(prompt, max_tokens=12, temperature=1.0, seed=3 + row)
        assert (alone, alone.tokens, alone.reason) == (texts[row], texts[row].tokens, "length")


def test_a_stream_can_be_closed_early(folder: Path) -> None:
    generator = TextGenerator(str(folder), device="cpu")
    whole = generator("the sea", max_tokens=30)
    with generator.stream("the sea", max_tokens=30) as stream:
        first = next(stream)
    assert whole.startswith(first) and stream.text == first and stream.text.reason is None
    assert (stream.finish(), stream.finish()) == ("", "") or whole.startswith(stream.text[:-1])
    assert generator("the sea", max_tokens=30) == whole


def test_chat_renders_the_template_of_the_model(folder: Path) -> None:
    generator = TextGenerator(folder, device="cpu")
    with pytest.raises(ModelError, match="has no chat template .*: give a prompt instead of messages"):
        generator.chat(MESSAGES)
    add_template(folder, TEMPLATE)
    prompt = ChatTemplate.read(folder).render(MESSAGES)
    assert prompt == "<|system|>the sea</s>\n<|user|>is <&> é?</s>\n<|assistant|>"
    answer = generator.chat(MESSAGES, max_tokens=9)
    tokens = generator.tokenizer.encode(prompt, add_special_tokens=False).ids
    assert answer.tokens == generator.engine.generate([tokens], max_tokens=9)[0].tokens
    assert "".join(generator.chat(MESSAGES, stream=True, max_tokens=9)) == answer


def test_templates_by_name_and_in_a_file(folder: Path) -> None:
    add_template(folder, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}])
    assert read_chat_template(folder) == ("yes", {"eos_token": "</s>", "bos_token": "<s>"})
    (folder / "chat_template.jinja").write_text("from a file")
    assert read_chat_template(folder)[0] == "from a file"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (TEMPLATE, [], "messages must be a list"),
        (TEMPLATE, ["hello"], "messages must be a list"),
        (TEMPLATE, [{"role": "tool", "content": "x"}], "cannot render these messages: unknown role"),
        ("{{ messages[9].content }}", MESSAGES, "cannot render these messages"),
        ("{% for %}", MESSAGES, "cannot render these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", MESSAGES, "cannot render .* unsafe"),
    ],
)
def test_chat_errors(template: str, messages: list[dict[str, str]], message: str) -> None:
    with pytest.raises(RedlineError, match=message):
        ChatTemplate(template, {}).render(messages)


def test_rendering_agrees_with_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = TEMPLATE + "{% for m in messages %}{{ m | tojson }}{% if loop.first %}{% break %}{% endif %}{% endfor %}"
    ((expected, *_), *_) = utils.render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=True, eos_token="</s>"
    )
    assert ChatTemplate(template, {"eos_token": "</s>"}).render(MESSAGES) == expected
