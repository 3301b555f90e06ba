"""Where a training stands, on disk: all that the next step depends on, in files that are whole or not there.

Weights, their average, the optimizer's moments, the arithmetic's own state (a loss scale), the random generators and
the step. The step is also the place in the data: a batch is a function of the seed and the step alone.

A checkpoint is written beside and renamed once it is safely on disk, with a checksum in front; older ones are let go of
only then. Resuming takes the newest one whose checksum is right.
"""

import hashlib
import json
import os
import pickle
import struct
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.optim import Optimizer

from redline.errors import RedlineError
from redline.files.untrusted import check_types, parse_json, reader, reading
from redline.training.arithmetic import Arithmetic
from redline.training.compact import expanded
from redline.training.ema import Ema

FOLDER = "checkpoints"
# How a training goes on, not what it has learnt: what to change when its steps are no longer finite.
CHANGED_ALOUD = frozenset({"learning_rate", "warmup_steps", "clip_norm", "precision"})
_MAGIC = b"RLCKPT02"
_DIGEST_BYTES = 32
# What torch.load raises for a damaged file, beside what every reader does.
_TORCH = (RuntimeError, pickle.UnpicklingError, AssertionError, struct.error)
_CONTENT: dict[str, Any] = {
    "identity": str,
    "step": int,
    "elapsed_s": float,
    "skipped": int,
    "skipped_in_a_row": int,
    "overflowed_in_a_row": int,
    "unlogged_steps": int,
    "unlogged_sums": tuple[float, float, float],
    "model": dict,
    "ema": dict | None,
    "optimizer": dict,
    "arithmetic": dict,
    "random": dict,
}
# Files of earlier versions do not have these.
_LATER = {"skipped_in_a_row", "overflowed_in_a_row", "unlogged_steps", "unlogged_sums"}


@dataclass(frozen=True)
class Position:
    """How far a training has come: steps done (some of them skipped), and seconds spent, in one go or resumed."""

    step: int = 0
    elapsed_s: float = 0.0
    skipped: int = 0
    skipped_in_a_row: int = 0  # up to here
    overflowed_in_a_row: int = 0  # beside those: steps lost to a scale that was too large, which adapts
    # Steps since the journal's last line; their losses and gradient norms added up, and how many of them were finite.
    unlogged_steps: int = 0
    unlogged_sums: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class State:
    """What is saved and restored together; `identity` is what two trainings must share to be the same one."""

    model: nn.Module
    ema: Ema | None
    optimizer: Optimizer
    arithmetic: Arithmetic
    identity: Mapping[str, Any]

    def content(self, position: Position) -> dict[str, Any]:
        return {
            "identity": json.dumps(self.identity, sort_keys=True),
            "step": position.step,
            "elapsed_s": position.elapsed_s,
            "skipped": position.skipped,
            "skipped_in_a_row": position.skipped_in_a_row,
            "overflowed_in_a_row": position.overflowed_in_a_row,
            "unlogged_steps": position.unlogged_steps,
            "unlogged_sums": position.unlogged_sums,
            "model": self.model.state_dict(),
            "ema": self.ema.model.state_dict() if self.ema else None,
            "optimizer": self.optimizer.state_dict(),
            "arithmetic": self.arithmetic.state_dict(),
            "random": _random_states(),
        }

    def restore(self, content: Mapping[str, Any], origin: Path) -> Position:
        """Puts everything back as it was, and says where that is."""
        found, asked = _identity(content, origin), json.loads(json.dumps(self.identity))
        changed = _changed(found, asked, [*asked, *sorted(found.keys() - asked.keys())], origin)
        try:
            self.model.load_state_dict(content["model"])
            if self.ema:
                self.ema.model.load_state_dict(content["ema"])
            _load_optimizer(self.optimizer, content["optimizer"])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RedlineError(f"{str(origin)!r} is of another model or optimizer.") from error
        with reading(origin, "checkpoint", also=_TORCH):
            self.arithmetic.load_state_dict(content["arithmetic"])
            _set_random_states(content["random"])
        for name in sorted(changed):
            was = f"up to step {content['step']:,} it was {found.get(name)}"
            warnings.warn(f"going on with {name} = {asked.get(name)}; {was}.", stacklevel=2)
        known = {name: content[name] for name in sorted(_LATER) if name in content}
        return Position(content["step"], content["elapsed_s"], content["skipped"], **known)


def _changed(found: Mapping[str, Any], asked: Mapping[str, Any], names: Iterable[str], origin: Path) -> list[str]:
    """Those of the names that have other values now, where they may; of others, the first is said."""
    changed = [name for name in names if found.get(name) != asked.get(name)]
    for name in changed:
        if name not in CHANGED_ALOUD:
            raise RedlineError(
                f"{str(origin)!r} is of another training: its {name} is {found.get(name)}, not {asked.get(name)}."
            )
    return changed


@dataclass(frozen=True)
class Held:
    """The training that a checkpoint is of."""

    path: Path
    identity: Mapping[str, Any]

    def check_is_of(self, known: Mapping[str, Any]) -> None:
        """Refuses to go on where what is known already of a training's identity is another one's, the first of it."""
        _changed(self.identity, json.loads(json.dumps(known)), known, self.path)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one training, the newest `keep` of them."""

    folder: Path
    keep: int = 2

    def files(self) -> list[Path]:
        """The newest last."""
        return sorted(self.folder.glob("step-*.pt"))

    def held(self) -> "Held":
        """Which training they are of, by the newest that is whole."""
        path, content = self.read(aloud=False)
        return Held(path, _identity(content, path))

    def save(self, state: State, position: Position, keep_all: bool = False) -> Path:
        path = self._path(position.step)
        temporary = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Before anything is written: what a killed process left may be the room that is missing.
            for left in self.folder.glob(".step-*"):
                left.unlink(missing_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".step-")
            with os.fdopen(handle, "wb") as file:
                _write(file, state.content(position))
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
            _sync_folder(self.folder)
        except BaseException as error:
            Path(temporary).unlink(missing_ok=True) if temporary else None
            if isinstance(error, (OSError, RuntimeError)):
                last = self.files()
                kept = f"{last[-1].name!r} is untouched" if last else "there is none yet"
                reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
                raise RedlineError(f"cannot write the checkpoint {str(path)!r}: {reason}; {kept}.") from error
            raise
        for old in () if keep_all else self.files()[: -self.keep]:
            old.unlink(missing_ok=True)
        return path

    def go_back_before(self, step: int) -> int | None:
        """Lets go of those from `step` on, unless there are no others; the step of the newest from before."""
        earlier = [file for file in self.files() if file < self._path(step)]
        for late in self.files()[len(earlier) :] if earlier else ():
            late.unlink(missing_ok=True)
        return int(earlier[-1].stem.removeprefix("step-")) if earlier else None

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:09}.pt"

    def load(self, state: State) -> Position:
        """Goes back to the newest checkpoint that is whole."""
        path, content = self.read()
        return state.restore(content, path)

    def read(self, aloud: bool = True) -> tuple[Path, dict[str, Any]]:
        """The newest checkpoint that is whole; damaged ones are passed over, aloud unless somebody else will say so."""
        files = self.files()
        if not files:
            raise RedlineError(f"there is no checkpoint in {str(self.folder)!r} to resume from.")
        for path in reversed(files):
            try:
                return path, expanded(read_checkpoint(path))
            except RedlineError as error:
                if path == files[0] and len(files) > 1:
                    raise RedlineError(f"no checkpoint of the {len(files)} is whole; of the oldest: {error}") from error
                if path == files[0]:
                    raise
                if aloud:
                    warnings.warn(f"{error} The one before it is taken.", stacklevel=2)
        raise AssertionError


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Writes a checkpoint's content with its checksum; the file appears once it is complete."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with open(temporary, "wb") as file:
            _write(file, content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RedlineError(f"cannot write the checkpoint {str(path)!r}: {error.strerror or error}.") from error


@reader("checkpoint", also=_TORCH)
def read_checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, once its checksum was found right."""
    with open(path, "rb") as file:
        magic, digest = file.read(len(_MAGIC)), file.read(_DIGEST_BYTES)
        begin = file.tell()
        if len(digest) < _DIGEST_BYTES:
            raise RedlineError(f"the checkpoint {str(path)!r} is damaged: it is cut off.")
        if magic != _MAGIC:
            raise RedlineError(f"{str(path)!r} is not a checkpoint of this version.")
        if hashlib.file_digest(file, "sha256").digest() != digest:
            raise RedlineError(f"the checkpoint {str(path)!r} is damaged: its checksum is another one.")
        file.seek(begin)
        content = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise RedlineError(f"the checkpoint {str(path)!r} is damaged: it holds no table of names.")
    check_types(content, _CONTENT, f"the checkpoint {str(path)!r}")
    if missing := sorted(_CONTENT.keys() - content.keys() - _LATER):
        raise RedlineError(f"the checkpoint {str(path)!r} is damaged: it has no {missing[0]!r}.")
    return content


def _identity(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    found = parse_json(content["identity"], f"the identity in the checkpoint {str(path)!r}")
    if not isinstance(found, dict):
        raise RedlineError(f"the checkpoint {str(path)!r} is damaged: its identity is not a JSON object.")
    return found


class _Hashing:
    """Writes through to a file, and knows the checksum of what went by, and what kept it from being written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hash = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self.file.flush()


def _write(file: BinaryIO, content: dict[str, Any]) -> None:
    file.write(_MAGIC + bytes(_DIGEST_BYTES))
    hashing: Any = _Hashing(file)
    try:
        torch.save(content, hashing)
    except RuntimeError:
        # Torch ends its archive even so, and what it then raises hides what the system said.
        if hashing.error is not None:
            raise hashing.error from None
        raise
    file.seek(len(_MAGIC))
    file.write(hashing.hash.digest())
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """So that the new name, too, outlives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _load_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """The moments come from the checkpoint; who steps them is chosen for this machine."""
    own = [{flag: group[flag] for flag in ("fused", "foreach") if flag in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, flags in zip(optimizer.param_groups, own, strict=True):
        group.update(flags)


def _random_states() -> dict[str, Any]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": devices}


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    # On a machine with fewer GPUs, those that are there get theirs.
    for index, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)
