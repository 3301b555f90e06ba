"""Builds the engine of a model folder. The server calls this in the engine process, because it imports torch."""

from collections.abc import Callable
from typing import Any

import torch

from redline.generation.engine import Engine
from redline.generation.folder import ModelFolder
from redline.generation.planned import choose_load_options
from redline.machine.machine import Machine, resolve_device
from redline.serving.engine_messages import EngineInfo


def load_engine(
    model: str,
    progress: Callable[[str], object] = lambda text: None,
    *,
    device: str = "auto",
    precision: str = "auto",
    plan: str | None = None,
    strict: bool = False,
    **options: Any,
) -> tuple[Engine, EngineInfo]:
    """Returns the engine of a model folder, and a description of the engine for the server.

    `options` are those of `Engine`, such as max_rows.
    """
    folder = ModelFolder.open(model)
    place = torch.device(resolve_device(device))
    chosen = choose_load_options(Machine.detect(str(place)), precision, plan)
    progress("reading the weights …")
    weights = folder.load(chosen.dtype, place, strict)
    progress("preparing the engine …")
    engine = Engine(weights, chosen.plan, share=True, vocabulary=folder.tokens, tokenizer=folder.tokenizer, **options)
    progress("preparing the first steps …")
    engine.warm_up()
    return engine, EngineInfo(_context(engine), engine.vocabulary, str(engine.plan), str(place), engine.setup_s)


def _context(engine: Engine) -> int | None:
    """Returns the largest number of tokens of a text: the model's limit, or the size of a paged KV cache if smaller."""
    if not engine.model.is_paged:
        return engine.model.context
    blocks = engine.scheduler.blocks
    return min(engine.model.context or blocks.count * blocks.size, blocks.count * blocks.size)
