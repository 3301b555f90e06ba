"""The config for training on text: [model], [data], [tokenizer] and [training].

`recall` under [data] names a recall task, which generates the batches in place of text. The options of the task are
also under [data], and [tokenizer] must be absent.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from redline.errors import RedlineError
from redline.evaluation.recall.task import Recall
from redline.evaluation.recall.tasks import make_task, option_names
from redline.files.config_fields import decode
from redline.files.limits import NonNegativeFloat, NonNegativeInt, PositiveInt, Share, ShareBelowOne
from redline.ladder.plan import Plan
from redline.ladder.rung import Stage
from redline.training.config_file import ConfigSource, override, read_config
from redline.training.settings import LoopSettings
from redline.training.text.architecture import Architecture
from redline.training.text.architectures import ARCHITECTURES
from redline.training.text.corpus import TokenizerSettings

AUTO = "auto"
# Keys of [data] that a recall task does not use.
_TEXT_KEYS = ("sources", "text_field", "separator", "validation", "shards")
_PRECISION_RUNGS = ("bf16", "fp16", "grad_scaler")
_DEFAULT_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class TextData:
    """The text and its batches: a step takes `accumulate` batches of `batch` rows of `length` tokens.

    `validation` is the fraction of tokens held out for validation; of these, `validation_rows` rows are evaluated.
    """

    sources: tuple[str, ...] = ()
    text_field: str = "text"
    separator: str = ""
    validation: ShareBelowOne = 0.005
    validation_rows: PositiveInt = 64
    length: PositiveInt = 1024
    batch: PositiveInt | Literal["auto"] = 16
    accumulate: PositiveInt = 1
    shards: str = "redline-out/tokens"


@dataclass(frozen=True)
class TextLoopSettings(LoopSettings):
    """`plan` is a one-line plan or the path of a plan file. With `rate_scaling`, `learning_rate` is the rate for
    `rate_tokens` tokens per step.

    `deterministic` refuses kernels whose results differ from run to run, so that a resumed run on a GPU matches an
    uninterrupted one bit for bit. A CPU has no such kernels.
    """

    betas: tuple[ShareBelowOne, ShareBelowOne] = _DEFAULT_BETAS
    weight_decay: NonNegativeFloat = 0.1
    final_share: Share = 0.1
    ema_decay: ShareBelowOne = 0.0
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    log_every: PositiveInt = 10
    validate_every: PositiveInt = 500
    z_loss: NonNegativeFloat = 0.0
    rate_scaling: Literal["none", "sqrt", "linear"] = "none"
    rate_tokens: NonNegativeInt = 0
    deterministic: bool = True
    plan: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.rate_scaling == "none") != (self.rate_tokens == 0):
            raise RedlineError(
                "set rate_scaling and rate_tokens under [training] together: learning_rate is then the rate for "
                "rate_tokens tokens per step."
            )
        if self.optimizer == "adafactor" and self.betas != _DEFAULT_BETAS:
            raise RedlineError("adafactor has no betas: remove them from [training], or use another optimizer.")
        asked, planned = self.precision, self._planned_precision()
        if planned and asked not in (AUTO, planned):
            named = "autocast" if "autocast" in self.whole_plan else planned
            raise RedlineError(f'precision = "{asked}" under [training] contradicts {named} in the plan: remove one.')

    @property
    def short_warmup_error(self) -> str:
        """Returns an error message if training ends during the warm-up, otherwise ""."""
        if self.steps is None or self.warmup_steps < self.steps:
            return ""
        return f"warmup_steps = {self.warmup_steps:,} do not end within {self.steps:,} steps: set fewer."

    @property
    def whole_plan(self) -> Plan:
        """The plan as written. Its precision rungs set the training precision; `applied_plan` omits them."""
        plan = Plan.load(self.plan) if self.plan.endswith(".toml") else Plan.parse(self.plan)
        for rung in plan.rungs:
            if not rung.training:
                raise RedlineError(f"{rung.name} in the plan works for inference only.")
            if rung.stage is Stage.LAUNCH:
                raise RedlineError(
                    f"{rung.name} in the plan replaces a whole training step, but the training loop splits steps."
                )
            if rung.name == "autocast" and getattr(rung, "dtype", "") == "fp16":
                raise RedlineError(
                    "write fp16 in the plan instead of autocast(dtype=fp16): it adds a loss scale and fp32 masters."
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
        """Returns the precision under [training], or that of the plan if it is "auto"; "auto" if neither sets one."""
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
    def read(
        cls,
        config: ConfigSource,
        sources: list[str] | None = None,
        steps: int | None = None,
        minutes: float | None = None,
        batch: int | None = None,
        length: int | None = None,
    ) -> "TextTraining":
        """Returns the settings of a config file or dict; arguments that are not None replace its values."""
        with read_config(config, ("model", "data", "tokenizer", "training")) as tables:
            model, data, tokenizer = tables["model"], tables["data"], tables["tokenizer"]
            override(data, sources=sources, batch=batch, length=length)
            override(tables["training"], steps=steps, minutes=minutes)
            recall = _take_recall(data, tokenizer) if "recall" in data else None
            if recall is not None:
                tokenizer = {"vocabulary": recall.vocabulary}
            kind = model.pop("kind", "decoder")
            if kind not in ARCHITECTURES:
                raise RedlineError(f"unknown kind {kind!r} under [model]: use one of {', '.join(ARCHITECTURES)}.")
            loop = decode(TextLoopSettings, tables["training"], "under [training]")
            # If `steps` overrides the config, as in a trial run, training may end during the warm-up.
            if steps is None and loop.short_warmup_error:
                raise RedlineError(loop.short_warmup_error)
            return cls(
                kind,
                decode(ARCHITECTURES[kind], model, "under [model]"),
                decode(TextData, data, "under [data]"),
                decode(TokenizerSettings, tokenizer, "under [tokenizer]"),
                loop,
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
            # A trained tokenizer has at most this many tokens; a loaded one is checked once it has been read.
            self.model.vocabulary_for(self.tokenizer.vocabulary)

    @property
    def tokens_per_step(self) -> int:
        assert isinstance(self.data.batch, int)
        return self.data.batch * self.data.accumulate * self.data.length

    def with_batch(self, batch: int) -> "TextTraining":
        """Returns a copy with this batch size and the learning rate for it."""
        chosen = replace(self, data=replace(self.data, batch=batch))
        rate = chosen.loop.rate_for(chosen.tokens_per_step)
        return replace(chosen, loop=replace(chosen.loop, learning_rate=rate, rate_scaling="none", rate_tokens=0))


def _take_recall(data: dict[str, Any], tokenizer: dict[str, Any]) -> Recall:
    """Removes the recall task and its options from [data] and returns the task."""
    name = data.pop("recall")
    if not isinstance(name, str):
        raise RedlineError(f"recall = {name!r} under [data] must be a string.")
    options = {option: data.pop(option) for option in option_names(name) if option in data}
    if others := [key for key in _TEXT_KEYS if data.get(key)]:
        raise RedlineError(f"recall and {others[0]} under [data] exclude each other: a recall task reads no text.")
    if unknown := [key for key in data if key not in {field.name for field in fields(TextData)}]:
        known = ", ".join(option_names(name))
        raise RedlineError(f"unknown key {unknown[0]!r} under [data]: the recall task {name} has {known}.")
    if tokenizer:
        raise RedlineError("recall under [data] excludes [tokenizer]: a recall task has its own vocabulary.")
    return make_task(name, options)
