"""An engine without a model, which does what its prompts say, and a model folder for the server in front of it.

The prompt says what the engine does: [[say TEXT]], [[crash]], [[hang]], [[fail]]; without such a command it says
REPLY. If the text ends without a stop token, it begins again.
"""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from redline.errors import RedlineError
from redline.generation.request import EngineStats, Finish, Grammar, Output, Request, TokenLogprobs
from redline.serving.engine_messages import EngineInfo

REPLY = "Hello! ☃ The sea is the sea."
CONTEXT = 512
_COMMAND = re.compile(r"\[\[(\w+) ?(.*?)\]\]", re.DOTALL)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{# <tool_call> #}{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}{% for message in messages %}<|im_start|>"
    "{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def write_folder(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Writes everything but readable weights: one token for each byte, so that most characters are several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": len(vocabulary), "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3], "temperature": 0.7}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


class FakeEngine:
    """Gives each request one token per step. `step_s` is how long a step takes."""

    def __init__(self, folder: str, step_s: float) -> None:
        self._tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        self._step_s = step_s
        self._left: dict[str, list[int]] = {}
        self._requests: dict[str, Request] = {}
        self._made: dict[str, int] = {}
        self._failed: list[Output] = []
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._generated = self._prompted = self._cached = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._failed)

    def submit(self, request: Request) -> None:
        if request.session is not None:
            raise RedlineError("session needs a model with neural memory; this model has none.")
        prompt = self._tokenizer.decode(request.prompt, skip_special_tokens=False)
        found = list(_COMMAND.finditer(prompt))
        command, text = (found[-1][1], found[-1][2]) if found else ("say", REPLY)
        if command == "crash":
            os._exit(7)
        if command == "hang":
            time.sleep(3600)
        if command == "refuse":
            raise RedlineError(text)
        if command == "fail":
            self._failed.append(Output(request.id, [], finish=Finish.ERROR, error=text))
            return
        if request.grammar is not None:
            text = matching(request.grammar)
        self._requests[request.id] = request
        self._left[request.id] = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._made[request.id] = 0
        self._prompted += len(request.prompt)

    def abort(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def step(self) -> list[Output]:
        if self._step_s:
            time.sleep(self._step_s)
        failed, self._failed = self._failed, []
        return failed + [self._advance(request) for request in list(self._requests.values())]

    def _advance(self, request: Request) -> Output:
        made = self._made[request.id]
        left = self._left[request.id]
        if not left[made:] and request.stop_tokens and made >= request.min_tokens:
            del self._requests[request.id]
            return Output(request.id, [], [] if request.logprobs is not None else None, Finish.STOP)
        token = left[made % len(left)]
        self._made[request.id] += 1
        self._generated += 1
        finish = Finish.LENGTH if made + 1 >= request.max_tokens else None
        if finish is not None:
            del self._requests[request.id]
        logprobs = None
        if request.logprobs is not None:
            top = [((token + place) % 260, -0.5 - place) for place in range(request.logprobs)]
            logprobs = [TokenLogprobs(token, -0.5, top)]
        return Output(request.id, [token], logprobs, finish, self._cached_of(request) if not made else 0)

    def _cached_of(self, request: Request) -> int:
        key = (request.salt, tuple(request.prompt))
        cached = len(request.prompt) - 1 if key in self._seen else 0
        self._seen.add(key)
        self._cached += cached
        return cached

    def stats(self) -> EngineStats:
        running = len(self._requests)
        return EngineStats(running, 0, 100, running, self._prompted, self._generated, self._cached, 0, 0)

    def embed(self, prompts: list[list[int]], pooling: str) -> list[list[float]]:
        return [[float(sum(prompt) % 97), float(len(prompt)), 1.0 if pooling == "mean" else 0.5] for prompt in prompts]

    def score(self, prompts: list[list[int]], top: int) -> list[list[TokenLogprobs]]:
        return [[TokenLogprobs(token, -2.0, [(token, -2.0)][:top]) for token in prompt[1:]] for prompt in prompts]

    def delete_session(self, salt: str, session: str) -> bool:
        return session == "known"

    def close(self) -> None:
        pass


def matching(grammar: Grammar) -> str:
    """Returns a text that matches a JSON schema (as far as the tests use it); other grammars are repeated."""
    if grammar.kind == "json":
        return '{"any": true}'
    if grammar.kind != "json_schema":
        return f"{grammar.kind}:{grammar.text}"
    try:
        return json.dumps(_instance(json.loads(grammar.text)))
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise RedlineError("the schema is not one that the fake engine knows.") from error


def _instance(schema: dict[str, Any]) -> Any:
    if "anyOf" in schema:
        return _instance(schema["anyOf"][0])
    if "const" in schema:
        return schema["const"]
    if schema.get("type") == "object":
        return {name: _instance(part) for name, part in schema.get("properties", {}).items()}
    return {"string": "Ada", "integer": 36, "number": 1.5, "boolean": True, "array": []}.get(schema["type"])


def load(
    folder: str, progress: Callable[[str], object], step_s: float = 0.0, error: str = ""
) -> tuple[FakeEngine, EngineInfo]:
    progress("loading the fake model")
    if error:
        raise RedlineError(error)
    return FakeEngine(folder, step_s), EngineInfo(CONTEXT, plan="fake")


def load_model(model: str, progress: Callable[[str], object], precision: str = "auto") -> tuple[FakeEngine, EngineInfo]:
    """Takes the options of the command line."""
    return load(model, progress, error="no fp8 here" if precision == "fp8" else "")
