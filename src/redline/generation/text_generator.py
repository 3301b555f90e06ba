"""`redline.TextGenerator` generates text with the model in a folder: in one call, as a stream, or as a chat."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import torch

from redline.errors import RedlineError
from redline.files.atomic import check_can_write
from redline.generation.chat_template import Message, read_chat_template, render_chat
from redline.generation.engine import InferenceEngine
from redline.generation.folder import ModelFolder
from redline.generation.planned import choose_load_options
from redline.generation.sampling import Sampling
from redline.generation.text_stream import TextStream
from redline.generation.token_stream import Reason, TokenStream
from redline.ladder.plan import Plan, read_plan
from redline.machine.machine import Machine, resolve_device
from redline.models import MEMORY_MODEL


class GenerateOptions(TypedDict, total=False):
    """Options: `max_tokens` limits the new tokens (256 by default); the other options are those of `Sampling`."""

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
    reason: Reason | None

    def __new__(cls, text: str, tokens: list[int], reason: Reason | None) -> "GeneratedText":
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
        given = None if plan is None else read_plan(plan)
        self._load_options = choose_load_options(Machine.detect(str(self.device)), precision, given)
        self._strict = strict

    @cached_property
    def engine(self) -> InferenceEngine:
        """The engine, which generates token ids. The first access reads the weights."""
        model = self.folder.load(self._load_options.dtype, self.device, self._strict)
        return InferenceEngine(model, self._load_options.plan, share=True, vocabulary=self.folder.tokens)

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
        completions = self.engine.generate(tokens, sampling, max_tokens=max_tokens, stop_tokens=stops)
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
        state = None if memory is None else self.engine.new_state()
        if memory is not None and state is not None and continues:
            state = state.load(memory)
        return self._start(tokens, options, state, memory)

    def _start(
        self, tokens: list[int], options: GenerateOptions, state: Any = None, memory: Path | None = None
    ) -> "GeneratedStream":
        sampling, max_tokens = _split(options)
        stops = self.folder.stop_tokens
        stream = self.engine.stream([tokens], sampling, max_tokens=max_tokens, stop_tokens=stops, state=state)
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
        template, special = read_chat_template(self.folder.path)
        # The template writes the special tokens itself.
        tokens = self._encode(render_chat(template, messages, special), special_tokens=False)
        pieces = self._start(tokens, options)
        if stream:
            return pieces
        for _ in pieces:
            pass
        return pieces.text

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

    def __init__(self, stream: TokenStream, decoder: TextStream, prompt_tokens: int, memory: Path | None) -> None:
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
        """Ends the text here: writes the memory file, and returns the rest that was held back as incomplete."""
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


def _split(options: GenerateOptions) -> tuple[Sampling, int]:
    given: dict[str, Any] = dict(options)
    max_tokens = given.pop("max_tokens", 256)
    return Sampling(**given), max_tokens
