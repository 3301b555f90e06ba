"""Writes and reads checkpoints: all data that the next training step depends on, in files that are never incomplete.

A checkpoint holds the weights, their average, the optimizer state, the state of the arithmetic (a loss scale), the
random generators and the step. The step is also the position in the data: a batch depends on seed and step alone.

A checkpoint is written under a temporary name and renamed once it is on disk; only then are older checkpoints deleted.
A checkpoint starts with a checksum, and resuming uses the newest checkpoint whose checksum matches.

A compact checkpoint, for transfer to another machine, has 10 bytes per parameter instead of 16. Weights stay
fp32. The optimizer's moments are stored in bf16. Averaged weights are stored as their difference from the weights, in
bf16: the difference is small, so its rounding error is far below that of the average itself in bf16. Training continues
in fp32, so that rounding happens once per transfer and not in every step.
"""

import hashlib
import json
import os
import pickle
import struct
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from redline.errors import RedlineError, first_line
from redline.files.untrusted import check_types, field_types, parse_json, reader, reading
from redline.training.arithmetic import Arithmetic
from redline.training.ema import Ema

FOLDER = "checkpoints"
# Settings that may change on resume, with a warning: users lower them if losses or gradients are no longer finite.
CHANGED_WITH_WARNING = frozenset({"learning_rate", "warmup_steps", "clip_norm", "precision"})
_MAGIC = b"RLCKPT02"
_DIGEST_BYTES = 32
_COMPACT = "compact"
# The exceptions that torch.load raises for a damaged file.
_TORCH = (RuntimeError, pickle.UnpicklingError, AssertionError, struct.error)


@dataclass(frozen=True)
class Position:
    """The progress of a training run: `step` steps in `elapsed_s` seconds; `skipped` of the steps changed no weight.

    All three count from the first start of the run, not from a resume.
    """

    step: int = 0
    elapsed_s: float = 0.0
    skipped: int = 0
    skipped_in_a_row: int = 0
    overflowed_in_a_row: int = 0  # steps skipped because the fp16 loss scale was too large
    # The steps since the last log line, the sums of their losses and gradient norms, and how many were finite.
    unlogged_steps: int = 0
    unlogged_sums: tuple[float, float, float] = (0.0, 0.0, 0.0)


_CONTENT: dict[str, Any] = {
    "identity": str,
    **field_types(Position),
    **dict.fromkeys(("model", "optimizer", "arithmetic", "random"), dict),
    "ema": dict | None,
}


@dataclass(frozen=True)
class State:
    """The objects that are saved and restored together.

    A checkpoint can be resumed only by a training run with the same `identity`.
    """

    model: nn.Module
    ema: Ema | None
    optimizer: Optimizer
    arithmetic: Arithmetic
    identity: Mapping[str, Any]

    def content(self, position: Position) -> dict[str, Any]:
        return {
            "identity": json.dumps(self.identity, sort_keys=True),
            **asdict(position),
            "model": self.model.state_dict(),
            "ema": self.ema.model.state_dict() if self.ema else None,
            "optimizer": self.optimizer.state_dict(),
            "arithmetic": self.arithmetic.state_dict(),
            "random": _random_states(),
        }

    def restore(self, content: Mapping[str, Any], origin: Path) -> Position:
        """Restores everything from a checkpoint and returns the progress that the run had made."""
        found, asked = _identity(content, origin), json.loads(json.dumps(self.identity))
        changed = _changed(found, asked, [*asked, *sorted(found.keys() - asked.keys())], origin)
        try:
            self.model.load_state_dict(content["model"])
            if self.ema:
                self.ema.model.load_state_dict(content["ema"])
            _load_optimizer(self.optimizer, content["optimizer"])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RedlineError(f"{str(origin)!r} belongs to another model or optimizer.") from error
        with reading(origin, "checkpoint", also=_TORCH):
            self.arithmetic.load_state_dict(content["arithmetic"])
            _set_random_states(content["random"])
        for name in sorted(changed):
            was = f"it was {found.get(name)} up to step {content['step']:,}"
            warnings.warn(f"resuming with {name} = {asked.get(name)}; {was}.", stacklevel=2)
        return Position(**{field.name: content[field.name] for field in fields(Position)})


def _changed(found: Mapping[str, Any], asked: Mapping[str, Any], names: Iterable[str], origin: Path) -> list[str]:
    """Returns the names of changed settings. Raises for the first setting that must not change on resume."""
    changed = [name for name in names if found.get(name) != asked.get(name)]
    for name in changed:
        if name not in CHANGED_WITH_WARNING:
            raise RedlineError(
                f"{str(origin)!r} belongs to another training run: its {name} is {found.get(name)}, not "
                f"{asked.get(name)}."
            )
    return changed


@dataclass(frozen=True)
class SavedTraining:
    """The training run to which a checkpoint belongs."""

    path: Path
    identity: Mapping[str, Any]

    def check_matches(self, known: Mapping[str, Any]) -> None:
        """Raises if the checkpoint differs in an entry of `known`: settings that must not change on resume."""
        _changed(self.identity, json.loads(json.dumps(known)), known, self.path)


@dataclass(frozen=True)
class Checkpoints:
    """The newest `keep` checkpoints of one training run."""

    folder: Path
    keep: int = 2

    def files(self) -> list[Path]:
        """Returns the files, the newest last."""
        return sorted(self.folder.glob("step-*.pt"))

    def check_start(self, resume: bool) -> None:
        """Raises if there is no checkpoint to resume from, or if a new training run would overwrite one."""
        if resume and not self.files():
            raise RedlineError(f"there is no checkpoint in {str(self.folder)!r} to resume from.")
        if self.files() and not resume:
            out = str(self.folder.parent)
            raise RedlineError(f"{out!r} already holds a training run: resume it, or choose another folder.")

    def saved_training(self) -> SavedTraining:
        """Returns the training run to which the newest complete checkpoint belongs."""
        path, content = self.read(warn=False)
        return SavedTraining(path, _identity(content, path))

    def save(self, state: State, position: Position, keep_all: bool = False) -> Path:
        path, files = self._path(position.step), self.files()
        # First deletes the incomplete files that a killed process left, to free disk space.
        with suppress(OSError):
            for left in self.folder.glob(".step-*"):
                left.unlink(missing_ok=True)
        kept = f"{files[-1].name!r} is untouched" if files else "there is no earlier checkpoint"
        write_checkpoint(path, state.content(position), f"; {kept}")
        for old in () if keep_all else self.files()[: -self.keep]:
            old.unlink(missing_ok=True)
        return path

    def go_back_before(self, step: int) -> int | None:
        """Deletes the checkpoints from `step` on if an earlier one exists. Returns the step of the last earlier one."""
        earlier = [file for file in self.files() if file < self._path(step)]
        for late in self.files()[len(earlier) :] if earlier else ():
            late.unlink(missing_ok=True)
        return int(earlier[-1].stem.removeprefix("step-")) if earlier else None

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:09}.pt"

    def load(self, state: State) -> Position:
        """Restores the newest complete checkpoint."""
        path, content = self.read()
        return state.restore(content, path)

    def read(self, warn: bool = True) -> tuple[Path, dict[str, Any]]:
        """Returns the newest complete checkpoint. Skips damaged checkpoints, with a warning if `warn`."""
        self.check_start(resume=True)
        files = self.files()
        for path in reversed(files):
            try:
                return path, expanded(read_checkpoint(path))
            except RedlineError as error:
                if path == files[0] and len(files) > 1:
                    raise RedlineError(f"all {len(files)} checkpoints are damaged; the oldest: {error}") from error
                if path == files[0]:
                    raise
                if warn:
                    warnings.warn(f"{error} Using the previous checkpoint.", stacklevel=2)
        raise AssertionError


def write_checkpoint(path: Path, content: dict[str, Any], kept: str = "") -> None:
    """Writes a checkpoint's content with its checksum; the file appears once it is complete and on disk."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            _write(file, content)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, (OSError, RuntimeError)):
            reason = getattr(error, "strerror", None) or first_line(error)
            raise RedlineError(f"cannot write the checkpoint {str(path)!r}: {reason}{kept}.") from error
        raise


@reader("checkpoint", also=_TORCH)
def read_checkpoint(path: Path) -> dict[str, Any]:
    """Returns the content of a checkpoint after checking its checksum."""
    with open(path, "rb") as file:
        magic, digest = file.read(len(_MAGIC)), file.read(_DIGEST_BYTES)
        begin = file.tell()
        if len(digest) < _DIGEST_BYTES:
            raise RedlineError(f"the checkpoint {str(path)!r} is damaged: it is truncated.")
        if magic != _MAGIC:
            raise RedlineError(f"{str(path)!r} is not a checkpoint of this version.")
        if hashlib.file_digest(file, "sha256").digest() != digest:
            raise RedlineError(f"the checkpoint {str(path)!r} is damaged: its checksum does not match.")
        file.seek(begin)
        content = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise RedlineError(f"the checkpoint {str(path)!r} is damaged: it does not hold a dict.")
    check_types(content, _CONTENT, f"the checkpoint {str(path)!r}")
    if missing := sorted(_CONTENT.keys() - content.keys()):
        raise RedlineError(f"the checkpoint {str(path)!r} is damaged: it has no {missing[0]!r}.")
    return content


def _identity(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    found = parse_json(content["identity"], f"the identity in the checkpoint {str(path)!r}")
    if not isinstance(found, dict):
        raise RedlineError(f"the checkpoint {str(path)!r} is damaged: its identity is not a JSON object.")
    return found


class _Hashing:
    """Writes to a file; keeps a checksum of the data, and the first error."""

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
        # After a failed write, torch.save closes its archive, which raises a RuntimeError that hides the OSError.
        if hashing.error is not None:
            raise hashing.error from None
        raise
    file.seek(len(_MAGIC))
    file.write(hashing.hash.digest())
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Flushes the folder to disk, so that the renamed file survives a power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _load_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Loads the optimizer state, but keeps the `fused` and `foreach` flags chosen for this machine."""
    own = [{flag: group[flag] for flag in ("fused", "foreach") if flag in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, flags in zip(optimizer.param_groups, own, strict=True):
        group.update(flags)


def _random_states() -> dict[str, Any]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": devices}


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    # This machine may have fewer GPUs than the machine that wrote the checkpoint.
    for index, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)


def compacted(content: dict[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint's content in its compact form."""
    if content.get(_COMPACT):
        return content
    model, ema = content["model"], content["ema"]
    difference = ema and {name: _halved(tensor - model[name]) for name, tensor in ema.items()}
    return {**content, "ema": difference, "optimizer": _converted(content["optimizer"], _halved), _COMPACT: True}


def expanded(content: dict[str, Any]) -> dict[str, Any]:
    """Undoes `compacted`, up to rounding. Content that is not compact is returned unchanged."""
    if not content.get(_COMPACT):
        return content
    model, difference = content["model"], content["ema"]
    ema = difference and {name: model[name] + tensor.to(model[name].dtype) for name, tensor in difference.items()}
    optimizer = _converted(content["optimizer"], lambda one: one.float() if one.dtype == torch.bfloat16 else one)
    return {**content, "ema": ema, "optimizer": optimizer, _COMPACT: False}


def _converted(value: Any, convert: Any) -> Any:
    """Converts every tensor of nested dicts and lists."""
    if isinstance(value, dict):
        return {key: _converted(inner, convert) for key, inner in value.items()}
    if isinstance(value, list):
        return [_converted(inner, convert) for inner in value]
    return convert(value) if isinstance(value, Tensor) else value


def _halved(tensor: Tensor) -> Tensor:
    # Scalars, such as step counts, keep their dtype.
    return tensor.bfloat16() if tensor.dtype == torch.float32 and tensor.ndim else tensor
