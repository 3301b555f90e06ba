"""Where a training stands, on disk: all that the next step depends on, in one file that is never half written.

Weights, their average, the optimizer's moments, the random generators and the step. The step is also the place in the
data: a batch is a function of the seed and the step alone, so nothing else about the data needs keeping.
"""

import json
import os
import pickle
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from redline.errors import RedlineError
from redline.training.ema import Ema

NAME = "checkpoint.pt"
_SCHEMA = 1


@dataclass(frozen=True)
class Position:
    """How far a training has come: steps done, and seconds spent on them, whether in one go or resumed."""

    step: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class State:
    """What is saved and restored together; `identity` is what two trainings must share to be the same one."""

    model: nn.Module
    ema: Ema
    optimizer: Optimizer
    identity: Mapping[str, Any]

    def save(self, path: Path, position: Position) -> None:
        """Writes beside and renames: a reader sees the last checkpoint or this one."""
        content = {
            "schema": _SCHEMA,
            "identity": json.dumps(self.identity, sort_keys=True),
            "step": position.step,
            "elapsed_s": position.elapsed_s,
            "model": self.model.state_dict(),
            "ema": self.ema.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": _random_states(),
        }
        temporary = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            with os.fdopen(handle, "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException as error:
            Path(temporary).unlink(missing_ok=True) if temporary else None
            if isinstance(error, (OSError, RuntimeError)):
                raise RedlineError(f"cannot write the checkpoint {str(path)!r}: {error}.") from error
            raise

    def load(self, path: Path) -> Position:
        """Puts everything back as it was, and says where that is."""
        content = _read(path)
        found = json.loads(content["identity"])
        asked = json.loads(json.dumps(self.identity))
        for name in sorted({*found, *asked}):
            if found.get(name) != asked.get(name):
                raise RedlineError(
                    f"{str(path)!r} is of another training: its {name} is {found.get(name)}, not {asked.get(name)}."
                )
        self.model.load_state_dict(content["model"])
        self.ema.model.load_state_dict(content["ema"])
        self.optimizer.load_state_dict(content["optimizer"])
        _set_random_states(content["random"])
        return Position(content["step"], content["elapsed_s"])


def _read(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise RedlineError(f"there is no checkpoint {str(path)!r} to resume from.") from error
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise RedlineError(f"{str(path)!r} is not a readable checkpoint.") from error
    if not isinstance(content, dict) or content.get("schema") != _SCHEMA:
        raise RedlineError(f"{str(path)!r} is not a checkpoint of this version.")
    return content


def _random_states() -> dict[str, Any]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": devices}


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    # On a machine with fewer GPUs, those that are there get theirs.
    for index, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)
