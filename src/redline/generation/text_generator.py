"""`redline.TextGenerator` generates text with the model in a folder: in one call, as a stream, or as a chat."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import nn

from redline.errors import RedlineError
from redline.files.atomic import check_can_write, check_can_write_file
from redline.generation.batch_file import Job, JobOptions
from redline.generation.chat_prompt import ChatPrompt
from redline.generation.chat_template import ChatTemplate, Message
from redline.generation.folder import ModelFolder
from redline.generation.inference_engine import InferenceEngine
from redline.generation.offline_batch import OfflineBatch
from redline.generation.planned import choose_load_options
from redline.generation.request import SamplingOptions
from redline.generation.static_batch import StaticBatchEngine
from redline.generation.static_batch.token_stream import TokenStream as BatchStream
from redline.generation.text_stream import TextStream
from redline.generation.token_stream import TokenStream
from redline.ladder.plan import Plan
from redline.machine.machine import Machine, resolve_device
from redline.models import MEMORY_MODEL


class GenerateOptions(TypedDict, total=False):
    """`max_tokens` limits the new tokens (256 by default); the other options are those of `SamplingOptions`."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int


class GeneratedText(str):
    """A generated text without its prompt. `reason` says why it ended: "stop", "length" (`max_tokens`) or "context"."""

    tokens: list[int]
    reason: str | None

    def __new__(cls, text: str, tokens: list[int], reason: str | None) -> "GeneratedText":
        made = super().__new__(cls, text)
        made.tokens, made.reason = tokens, reason
        return made


class TextGenerator:
    """Generates text with the model in a folder, or with a model such as "Qwen/Qwen3-0.6B" in the Hugging Face cache.

    Without `model`, uses the small chat model that comes with Redline.

    `precision` is auto, fp32, bf16, fp16, int8 or fp8. `plan` replaces the precision: a plan of the ladder, as text, as
    the path of a .toml file or as a `Plan`. With `strict`, unknown keys of config.json are errors. The weights are read
    at the first use.

    >>> generator = TextGenerator("my-model", device="cpu")
    >>> text = generator("The sea is", max_tokens=8)
    >>> len(text.tokens), text.reason
    (8, 'length')
    >>> first, second = generator(["The sea is", "The land is"], max_tokens=8, temperature=0.8, seed=7)
    >>> first == generator("The sea is", max_tokens=8, temperature=0.8, seed=7)
    True
    >>> "".join(generator.stream("The sea is", max_tokens=8)) == text
    True
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        precision: str = "auto",
        plan: Plan | str | None = None,
        strict: bool = False,
    ) -> None:
        self.folder = ModelFolder.open(model)
        self.device = torch.device(resolve_device(device))
        self._load_options = choose_load_options(Machine.detect(str(self.device)), precision, plan)
        self._strict = strict

    @cached_property
    def engine(self) -> InferenceEngine:
        """The engine, which generates token ids. The first access reads the weights."""
        options: dict[str, Any] = {"vocabulary": self.folder.tokens, "tokenizer": self.tokenizer}
        return InferenceEngine(self._read_weights(), self._load_options.plan, share=True, **options)

    @cached_property
    def batch_engine(self) -> InferenceEngine | StaticBatchEngine:
        """The engine for prompts that are given together. On a GPU, it is the one whose speed was measured there."""
        if self.device.type != "cuda":
            return self.engine
        plan, vocabulary = self._load_options.plan, self.folder.tokens
        return StaticBatchEngine(self._read_weights(), plan, share=True, vocabulary=vocabulary)

    def load(self) -> None:
        """Reads the weights, so that the first text does not wait for them."""
        _ = self.batch_engine

    def _read_weights(self) -> nn.Module:
        return self.folder.load(self._load_options.dtype, self.device, self._strict)

    @property
    def tokenizer(self) -> Any:
        return self.folder.tokenizer

    @overload
    def __call__(self, prompt: str, **options: Unpack[GenerateOptions]) -> GeneratedText: ...
    @overload
    def __call__(
        self, prompt: list[str] | tuple[str, ...], **options: Unpack[GenerateOptions]
    ) -> list[GeneratedText]: ...
    def __call__(
        self, prompt: str | list[str] | tuple[str, ...], **options: Unpack[GenerateOptions]
    ) -> GeneratedText | list[GeneratedText]:
        """Returns the text that continues a prompt, or a list of texts for a list of prompts, generated as one batch.

        Prompt i gets the text that it would get alone with the seed `seed + i`.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        sampling, max_tokens = _split(options)
        tokens = [self._encode(text) for text in prompts]
        stops = self.folder.stop_tokens
        completions = self.batch_engine.generate(tokens, sampling, max_tokens=max_tokens, stop_tokens=stops)
        texts = []
        for given, completion in zip(tokens, completions, strict=True):
            pieces = TextStream(self.tokenizer, given)
            text = "".join([*map(pieces.push, completion.tokens), pieces.finish()])
            texts.append(GeneratedText(text, completion.tokens, completion.reason))
        return texts[0] if isinstance(prompt, str) else texts

    def stream(
        self, prompt: str, *, memory: str | Path | None = None, **options: Unpack[GenerateOptions]
    ) -> "GeneratedStream":
        """Returns an iterator that yields each piece of the text as soon as it is generated.

        For a model with neural memory, `memory` is a file that stores the model's state. If the file exists, the text
        continues from the stored state. When the text ends, the new state is written to the file.
        """
        memory = None if memory is None else Path(memory)
        if memory is not None:
            self._check_memory(memory)
        continues = memory is not None and memory.exists()
        # A text that continues a state gets no special tokens, such as a begin-of-text token.
        tokens = self._encode(prompt, special_tokens=not continues)
        state = None if memory is None else self.batch_engine.new_state()
        if memory is not None and state is not None and continues:
            state = state.load(memory)
        return self._start(tokens, options, state, memory)

    def _start(
        self, tokens: list[int], options: GenerateOptions, state: Any = None, memory: Path | None = None
    ) -> "GeneratedStream":
        sampling, max_tokens = _split(options)
        stops = self.folder.stop_tokens
        stream = self.batch_engine.stream([tokens], sampling, max_tokens=max_tokens, stop_tokens=stops, state=state)
        return GeneratedStream(stream, TextStream(self.tokenizer, tokens), len(tokens), memory)

    @overload
    def chat(
        self, messages: Sequence[Message], *, stream: Literal[False] = False, **options: Unpack[GenerateOptions]
    ) -> GeneratedText: ...
    @overload
    def chat(
        self, messages: Sequence[Message], *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> "GeneratedStream": ...
    def chat(
        self, messages: Sequence[Message], *, stream: bool = False, **options: Unpack[GenerateOptions]
    ) -> "GeneratedText | GeneratedStream":
        """Returns the assistant's answer to messages such as `[{"role": "user", "content": "Hello"}]`.

        Raises ModelError if the model has no chat template.
        """
        pieces = self._start(self._encode_messages(messages), options)
        if stream:
            return pieces
        for _ in pieces:
            pass
        return pieces.text

    def run_file(
        self,
        prompts: str | Path,
        out: str | Path,
        report: Callable[[int, int], None] = lambda done, of: None,
        **options: Unpack[GenerateOptions],
    ) -> int:
        """Generates the text of every line of a JSONL file, and returns the number of new results.

        A line is a text, an object with `prompt` or `messages` and options, or a request in OpenAI's batch format;
        `options` are the defaults. The results are appended to `out` in the same order. If `out` exists, the run
        continues after its results. `report` is called with the number of completed lines and of all lines.
        """
        check_can_write_file(Path(out))
        sampling, max_tokens = _split(options)
        batch = OfflineBatch(
            self.engine.engine,
            self.tokenizer,
            frozenset(self.folder.stop_tokens),
            self._encode_job,
            JobOptions(max_tokens, sampling),
            self.folder.path.name,
        )
        return batch.run(Path(prompts), Path(out), report)

    def _encode_job(self, job: Job) -> list[int]:
        prompt, messages = job.given.get("prompt"), job.given.get("messages")
        if isinstance(prompt, str):
            return self._encode(prompt)
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return prompt
        if not isinstance(messages, list):
            raise RedlineError("the request needs a prompt (a text or token ids) or a list of messages.")
        return self._encode_messages(messages)

    def _encode_messages(self, messages: Sequence[Message]) -> list[int]:
        return ChatPrompt(self.tokenizer, ChatTemplate.read(self.folder.path)).encode(messages)

    def _encode(self, text: str, special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RedlineError("the prompt is not UTF-8 text.") from error
        tokens = self.tokenizer.encode(text, add_special_tokens=special_tokens).ids
        if not tokens:
            raise RedlineError("the prompt is empty.")
        return tokens

    def _check_memory(self, memory: Path) -> None:
        if self.folder.model_type != MEMORY_MODEL:
            raise RedlineError(f"memory needs a model with neural memory; {str(self.folder.path)!r} has none.")
        check_can_write(memory.parent)
        if not memory.parent.exists():
            # Creating the folder would hide a typing error in the path, and the text would start with an empty memory.
            raise RedlineError(f"memory: there is no folder {str(memory.parent)!r}: correct the path, or create it.")


class GeneratedStream:
    """Pieces of one text as they are generated: an iterator of strings, which may be closed early.

    `text` is the text generated so far; `prefill_s` and `step_s` are the seconds for the prompt and for each later
    token.
    """

    def __init__(
        self, stream: TokenStream | BatchStream, decoder: TextStream, prompt_tokens: int, memory: Path | None
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self._stream, self._decoder, self._memory = stream, decoder, memory
        self._written: list[str] = []
        self._finished = False
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> "GeneratedStream":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    @property
    def text(self) -> GeneratedText:
        (completion,) = self._stream.completions
        return GeneratedText("".join(self._written), completion.tokens, completion.reason)

    @property
    def prefill_s(self) -> float:
        return self._stream.prefill_s

    @property
    def step_s(self) -> list[float]:
        return self._stream.step_s

    def finish(self) -> str:
        """Ends the text: writes the memory file, and returns the text that was held back as an incomplete character."""
        if self._finished:
            return ""
        self._finished = True
        self._stream.close()
        rest = self._decoder.finish()
        self._written.append(rest)
        if self._memory is not None:
            self._stream.state.save(self._memory)
        return rest

    def _run(self) -> Iterator[str]:
        for (token,) in self._stream:
            if token is not None and (piece := self._decoder.push(token)):
                self._written.append(piece)
                yield piece
        if rest := self.finish():
            yield rest


def _split(options: GenerateOptions) -> tuple[SamplingOptions, int]:
    given: dict[str, Any] = dict(options)
    max_tokens = given.pop("max_tokens", 256)
    return SamplingOptions(**given), max_tokens
