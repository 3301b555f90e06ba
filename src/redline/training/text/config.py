"""A whole settings file of a training on text: [model], [data], [tokenizer] and [training].

`recall` under [data] names a recall task that makes the batches instead of text; its options stand beside it, and
there is no tokenizer then.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from redline.errors import RedlineError
from redline.evaluation.recall.task import Recall
from redline.evaluation.recall.tasks import make_task, option_names
from redline.files.untrusted import read_toml, reader
from redline.ladder.plan import Plan
from redline.ladder.rung import Stage
from redline.training.settings import LoopSettings, choices, fill, sections
from redline.training.text.architectures import ARCHITECTURES, Architecture
from redline.training.text.corpus import TokenizerSettings

AUTO = "auto"
# What is said of text, and means nothing where a recall task makes the batches.
_OF_TEXT = ("sources", "text_field", "separator", "validation", "shards")
_PRECISION_RUNGS = ("bf16", "fp16", "grad_scaler")


@dataclass(frozen=True)
class TextData:
    """Where the text is and how it is cut into batches: `accumulate` batches of `batch` rows of `length` tokens a step.

    `validation` is the share of tokens that are kept to judge by, `validation_rows` how many rows of them are read.
    """

    sources: tuple[str, ...] = ()
    text_field: str = "text"
    separator: str = ""
    validation: float = 0.005
    validation_rows: int = 64
    length: int = 1024
    batch: int | str = 16
    accumulate: int = 1
    shards: str = "redline-out/tokens"

    def __post_init__(self) -> None:
        if isinstance(self.batch, str) and self.batch != AUTO:
            raise RedlineError(f'batch = {self.batch!r} is neither a whole number nor "{AUTO}".')
        for name in ("validation_rows", "length", "batch", "accumulate"):
            value = getattr(self, name)
            if not isinstance(value, str) and value < 1:
                raise RedlineError(f"{name} must be above zero, not {value}.")
        if not 0 <= self.validation < 1:
            raise RedlineError(f"validation is a share from 0 to less than 1, not {self.validation}.")


@dataclass(frozen=True)
class TextLoopSettings(LoopSettings):
    """`plan` is a one-line plan or a plan's file; with `rate_scaling`, `learning_rate` is for `rate_tokens` a step.

    `deterministic` refuses kernels whose results differ from run to run, so that resumed is uninterrupted to the bit on
    a GPU too; on a CPU there are none.
    """

    optimizers: ClassVar[tuple[str, ...]] = ("adamw", "adam", "adamw8bit", "adafactor", "muon")
    precisions: ClassVar[tuple[str, ...]] = (AUTO, "fp32", "bf16", "fp16", "fp8")

    betas: tuple[float, ...] = (0.9, 0.95)
    weight_decay: float = 0.1
    final_share: float = 0.1
    ema_decay: float = 0.0
    precision: str = AUTO
    log_every: int = 10
    validate_every: int = 500
    z_loss: float = 0.0
    rate_scaling: str = "none"
    rate_tokens: int = 0
    deterministic: bool = True
    plan: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        choices("rate_scaling", self.rate_scaling, ("none", "sqrt", "linear"))
        if (self.rate_scaling == "none") != (self.rate_tokens == 0) or self.rate_tokens < 0:
            raise RedlineError(
                "rate_scaling and rate_tokens go together: learning_rate is then for rate_tokens a step."
            )
        if self.optimizer == "adafactor" and self.betas != TextLoopSettings.betas:
            raise RedlineError("adafactor has no betas: leave them out, or take another optimizer.")
        if self.z_loss < 0:
            raise RedlineError(f"z_loss must not be negative, as {self.z_loss} is.")
        asked, planned = self.precision, self._planned_precision()
        if planned and asked not in (AUTO, planned):
            named = "autocast" if "autocast" in self.whole_plan else planned
            raise RedlineError(f'precision = "{asked}" and the plan\'s {named} contradict each other: keep one.')

    @property
    def never_warm(self) -> str:
        """A sentence where the training ends before its learning rate is reached."""
        if self.steps is None or self.warmup_steps < self.steps:
            return ""
        return f"warmup_steps = {self.warmup_steps:,} are not over after {self.steps:,} steps: write fewer."

    @property
    def whole_plan(self) -> Plan:
        """As written; the precision in it is this training's, and not applied as a rung."""
        plan = Plan.load(self.plan) if self.plan.endswith(".toml") else Plan.parse(self.plan)
        for rung in plan.rungs:
            if not rung.training:
                raise RedlineError(f"the plan's {rung.name} is for inference only.")
            if rung.stage is Stage.LAUNCH:
                raise RedlineError(f"the plan's {rung.name} takes a whole step over, which this loop does in parts.")
            if rung.name == "autocast" and getattr(rung, "dtype", "") == "fp16":
                raise RedlineError(
                    "write fp16 in the plan instead of autocast(dtype=fp16): it has a scale and masters."
                )
        return plan

    @property
    def applied_plan(self) -> Plan:
        return Plan(tuple(rung for rung in self.whole_plan.rungs if rung.name not in _PRECISION_RUNGS))

    def _planned_precision(self) -> str:
        plan = self.whole_plan
        named = [name for name in ("bf16", "fp16") if name in plan]
        return named[0] if named else "fp32" if "autocast" in plan else ""

    @property
    def asked_precision(self) -> str:
        """What the plan says where this does not; "auto" when neither does."""
        return self.precision if self.precision != AUTO else self._planned_precision() or AUTO

    def rate_for(self, tokens_per_step: int) -> float:
        power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.rate_scaling]
        return self.learning_rate * (tokens_per_step / (self.rate_tokens or tokens_per_step)) ** power


@dataclass(frozen=True)
class TextTraining:
    kind: str
    model: Architecture
    data: TextData
    tokenizer: TokenizerSettings
    loop: TextLoopSettings
    recall: Recall | None = None

    @classmethod
    @reader("settings file")
    def read(cls, path: str | Path, **instead: Any) -> "TextTraining":
        """The file's settings, with those of `instead` that are not None in place of its own."""
        document = read_toml(path, "settings file")
        model, data, tokenizer, loop = sections(document, ("model", "data", "tokenizer", "training"))
        given = {name: value for name, value in instead.items() if value is not None}
        if "steps" in given or "minutes" in given:
            loop = {name: value for name, value in loop.items() if name not in ("steps", "minutes")}
        data |= {name: value for name, value in given.items() if name in ("sources", "batch", "length")}
        loop |= {name: value for name, value in given.items() if name in ("steps", "minutes")}
        recall = _take_recall(data, tokenizer) if "recall" in data else None
        if recall is not None:
            tokenizer = {"vocabulary": recall.vocabulary}
        kind = model.pop("kind", "decoder")
        if kind not in ARCHITECTURES:
            raise RedlineError(f"unknown kind {kind!r} under [model]: it is one of {', '.join(ARCHITECTURES)}.")
        training = fill(TextLoopSettings, loop, "training")
        # A few steps that the command line asks for are a trial, and may end early.
        if "steps" not in given and training.never_warm:
            raise RedlineError(training.never_warm)
        return cls(
            kind,
            fill(ARCHITECTURES[kind], model, "model"),
            fill(TextData, data, "data"),
            fill(TokenizerSettings, tokenizer, "tokenizer"),
            training,
            recall,
        )

    def __post_init__(self) -> None:
        limit = self.model.limit
        if limit is not None and self.data.length > limit:
            raise RedlineError(
                f"rows of {self.data.length:,} tokens are longer than the model's limit of {limit:,}: "
                "lower length under [data], or raise context under [model]."
            )
        if self.tokenizer.vocabulary:
            # A trained one has at most as many; what a loaded one has is asked once it is there.
            self.model.vocabulary_for(self.tokenizer.vocabulary)

    @property
    def tokens_per_step(self) -> int:
        assert isinstance(self.data.batch, int)
        return self.data.batch * self.data.accumulate * self.data.length

    def with_batch(self, batch: int) -> "TextTraining":
        """With the batch that was found, and the learning rate that belongs to it."""
        chosen = replace(self, data=replace(self.data, batch=batch))
        rate = chosen.loop.rate_for(chosen.tokens_per_step)
        return replace(chosen, loop=replace(chosen.loop, learning_rate=rate, rate_scaling="none", rate_tokens=0))


def _take_recall(data: dict[str, Any], tokenizer: dict[str, Any]) -> Recall:
    """The recall task of [data], which is left without it."""
    name = data.pop("recall")
    if not isinstance(name, str):
        raise RedlineError(f"recall = {name!r} is not a text.")
    options = {option: data.pop(option) for option in option_names(name) if option in data}
    if others := [key for key in _OF_TEXT if data.get(key)]:
        raise RedlineError(f"recall and {others[0]} under [data] contradict each other: a recall task reads no text.")
    if unknown := [key for key in data if key not in {field.name for field in fields(TextData)}]:
        known = ", ".join(option_names(name))
        raise RedlineError(f"unknown setting {unknown[0]!r} under [data]: the recall task {name} has {known}.")
    if tokenizer:
        raise RedlineError("recall under [data] and [tokenizer] contradict each other: a task has its own vocabulary.")
    return make_task(name, options)
