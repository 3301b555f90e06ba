"""The state of a Titans model between calls, as an immutable value that can be saved, loaded, batched and split.

The size of a state depends on the model and the batch, not on the length of the text.
"""

import json
import math
from collections.abc import Callable, ItemsView, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import Parameter

from redline.errors import ModelError, RedlineError
from redline.files.atomic import write_bytes
from redline.files.untrusted import MALFORMED, parse_json
from redline.files.weights import open_safetensors
from redline.models.decoder.checkpoint import check_finite
from redline.models.memory.config import TitanConfig
from redline.models.memory.neural_memory import NeuralState
from redline.models.memory.slot_attention import WindowState

LayerState = NeuralState | WindowState
# To identify a model, `_FINGERPRINT_VALUES` values of each of its weights are compared. If the dtypes differ, relative
# differences up to `_ROUNDING` are taken for rounding errors.
_FINGERPRINT_VALUES = 64
_ROUNDING = 0.01


@dataclass(frozen=True, eq=False)
class Origin:
    """Identifies the model that a state belongs to: its settings, and a few values of each weight.

    `weights` maps each weight's name to dtype and shape; `numbers_N` are the values of all weights, concatenated.
    """

    config: TitanConfig
    weights: dict[str, tuple[str, tuple[int, ...]]]
    numbers_N: Tensor

    @classmethod
    def of(cls, config: TitanConfig, weights: Iterable[tuple[str, Tensor]]) -> "Origin":
        """Describes a model; skips weights that are not plain tensors, such as quantized ones."""
        plain = {name: weight for name, weight in weights if type(weight) in (Tensor, Parameter)}
        described = {name: (str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in plain.items()}
        return cls(config, described, torch.cat([_sampled(weight.detach()) for weight in plain.values()]).float())

    def difference(self, config: TitanConfig) -> str:
        """Returns the first setting that differs, as part of a sentence, or an empty string."""
        for field in fields(config):
            ours, others = getattr(self.config, field.name), getattr(config, field.name)
            if ours != others:
                return f"its {field.name} is {ours}, not {others}"
        return ""

    def has_weights_of(self, other: "Origin") -> bool:
        """Returns whether the weights agree: exactly for equal dtypes, else up to rounding.

        Compares the weights that both have as plain tensors of the same shape; returns False if there are none.
        """
        ours, theirs = self._numbers(), other._numbers()
        compared = [name for name in ours.keys() & theirs.keys() if self.weights[name][1] == other.weights[name][1]]
        return bool(compared) and all(
            torch.allclose(
                ours[name],
                theirs[name],
                *((0, 0) if self.weights[name][0] == other.weights[name][0] else (_ROUNDING, 1e-6)),
            )
            for name in compared
        )

    def _numbers(self) -> dict[str, Tensor]:
        counts = [min(_FINGERPRINT_VALUES, math.prod(shape)) for _, shape in self.weights.values()]
        return dict(zip(self.weights, self.numbers_N.cpu().split(counts), strict=True))

    def to_metadata(self) -> dict[str, str]:
        found = {"config": asdict(self.config), "weights": self.weights, "numbers": self.numbers_N.tolist()}
        return {name: json.dumps(one) for name, one in found.items()}

    def check_metadata(self, found: dict[str, str], path: Path) -> None:
        """Raises if the file was saved from another model."""
        if not {"config", "weights", "numbers"} <= found.keys():
            raise ModelError(f"{str(path)!r} does not say which model its state belongs to: create the state again.")
        try:
            about = {name: parse_json(found[name], name) for name in ("weights", "config", "numbers")}
            weights = {name: (dtype, tuple(shape)) for name, (dtype, shape) in about["weights"].items()}
            config = TitanConfig.from_dict(about["config"])
            saved = Origin(config, weights, torch.tensor(about["numbers"]))
            difference = saved.difference(self.config) or ("" if self.has_weights_of(saved) else "its weights differ")
        except (*MALFORMED, RuntimeError, RedlineError) as error:
            raise ModelError(f"{str(path)!r} is damaged: its description of the model cannot be read.") from error
        if difference:
            raise ModelError(f"{str(path)!r} is the state of another model: {difference}.")


def _sampled(weight: Tensor) -> Tensor:
    """Returns values from all parts of the weight.

    The values of only a few rows may not identify a model, because some rows, such as the embeddings of unused tokens,
    can be equal in two models.
    """
    numbers = weight.reshape(-1)
    return numbers[:: max(1, len(numbers) // _FINGERPRINT_VALUES)][:_FINGERPRINT_VALUES]


@dataclass(frozen=True)
class MemoryState:
    """The state of all layers. `position_B` is the position of each sequence's next token in its document."""

    position_B: Tensor
    layers: tuple[LayerState, ...]
    origin: Origin

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.named_tensors())

    def named_tensors(self) -> ItemsView[str, Tensor]:
        found: dict[str, Tensor] = {}
        self.map(found.setdefault)
        return found.items()

    def map(self, change: Callable[[str, Tensor], Tensor]) -> "MemoryState":
        """Returns a state with `change(name, tensor)` applied to every tensor."""
        return _mapped("", self, change)

    def row(self, index: int) -> "MemoryState":
        """Returns the state of one sequence of the batch."""
        return self.rows([index])

    def rows(self, indices: Sequence[int]) -> "MemoryState":
        """Returns the state of some sequences of the batch, in the given order."""
        for index in indices:
            if not 0 <= index < len(self.position_B):
                raise ModelError(f"there is no row {index}: the state has {len(self.position_B)} rows, counted from 0.")
        return self.map(lambda _, tensor: tensor[list(indices)])

    @staticmethod
    def stack(states: "Sequence[MemoryState]") -> "MemoryState":
        """Concatenates states into one batch; their positions may differ."""
        if not states:
            raise ModelError("there are no states to stack.")
        tensors = [dict(state.named_tensors()) for state in states]
        for state, one in zip(states[1:], tensors[1:], strict=True):
            _check_alike(tensors[0], one)
            if difference := states[0].origin.difference(state.origin.config):
                raise ModelError(
                    f"states of different models cannot be stacked: the first differs from another ({difference})."
                )
        return states[0].map(lambda name, _: torch.cat([one[name] for one in tensors]))

    def save(self, path: str | Path) -> None:
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.named_tensors()}
        write_bytes(Path(path), save(tensors, self.origin.to_metadata()))

    def load(self, path: str | Path) -> "MemoryState":
        """Loads a state of the same model, with any number of sequences.

        The slot banks in the file may have been reduced to fewer slots.
        """
        path = Path(path)
        with open_safetensors(path, "saved state") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = file.metadata() or {}
        expected = dict(self.named_tensors())
        for name in sorted(expected.keys() ^ found.keys()):
            raise ModelError(f"{str(path)!r} is the state of another model: only one of the models has {name!r}.")
        for name, tensor in expected.items():
            if not _fits(name, found[name].shape[1:], tensor.shape[1:]):
                shapes = f"{tuple(found[name].shape[1:])}, not {tuple(tensor.shape[1:])}"
                raise ModelError(f"{str(path)!r} is the state of another model: {name!r} has the shape {shapes}.")
        if len({tuple(tensor.shape[:1]) for tensor in found.values()}) > 1:
            raise ModelError(f"{str(path)!r} is damaged: its tensors have different numbers of sequences.")
        slots = sorted({tensor.shape[1] for name, tensor in found.items() if _has_slots(name)})
        if len(slots) > 1:
            raise ModelError(f"{str(path)!r} is damaged: its slot banks have {slots[0]} and {slots[-1]} slots.")

        def restored(name: str, tensor: Tensor) -> Tensor:
            converted = found[name].to(tensor.device, tensor.dtype)
            check_finite(converted, found[name], name, path)
            return converted

        state = self.map(restored)
        self.origin.check_metadata(about, path)
        return state


class MemoryCache:
    """A state in static buffers, as replaying a captured CUDA graph requires.

    `positions` is a copy of each row's position on the host, so that reading it needs no synchronization.
    """

    def __init__(self, state: MemoryState, segment: int) -> None:
        self.state, self.segment = state, segment
        self.positions = [0] * len(state.position_B)

    @property
    def bytes(self) -> int:
        return self.state.bytes

    def reset(self) -> None:
        for _, buffer in self.state.named_tensors():
            buffer.zero_()
        self.positions = [0] * len(self.positions)

    @property
    def begins_segment(self) -> bool:
        """Returns whether the next token of any row is the first of a segment."""
        return any(position % self.segment == 0 for position in self.positions)

    def store(self, state: MemoryState, rows: Sequence[int] | None = None) -> None:
        """Copies a state into the buffers: all rows, or only `rows`."""
        for (_, buffer), (_, value) in zip(self.state.named_tensors(), state.named_tensors(), strict=True):
            if rows is None:
                buffer.copy_(value)
            else:
                buffer[list(rows)] = value.to(buffer.dtype)

    def gather(self, rows: Sequence[int]) -> "MemoryCache":
        """Returns a new cache with a copy of these rows. A row may be given more than once."""
        part = MemoryCache(self.state.rows(rows), self.segment)
        part.positions = [self.positions[row] for row in rows]
        return part

    def scatter(self, rows: Sequence[int], part: "MemoryCache") -> None:
        """Copies the first rows of `part` into these rows."""
        first = range(len(rows))
        whole = len(part.positions) == len(rows)
        self.store(part.state if whole else part.state.rows(first), rows)
        for row, position in zip(rows, part.positions, strict=False):
            self.positions[row] = position

    def restore(self, state: MemoryState) -> None:
        """Continues from a saved state of any dtype and device.

        A slot bank that was reduced gets the model's number of slots again; the added slots are empty.
        """
        if not isinstance(state, MemoryState):
            raise ModelError(f"the state must be a MemoryState, not a {type(state).__name__}.")
        given, wanted = len(state.position_B), len(self.positions)
        if given != wanted:
            raise ModelError(f"the state holds {given} sequences, but {wanted} were given.")
        if difference := state.origin.difference(self.state.origin.config):
            raise ModelError(f"the state belongs to another model: {difference}.")
        self.reset()
        for (_, buffer), (_, value) in zip(self.state.named_tensors(), state.named_tensors(), strict=True):
            buffer[tuple(slice(size) for size in value.shape)] = value
        self.positions = state.position_B.tolist()

    def snapshot(self) -> MemoryState:
        """Returns a copy of the current state."""
        return self.state.map(lambda _, buffer: buffer.clone())

    def advance_positions(self, counts: list[int]) -> None:
        """Adds the number of processed tokens to the host's copy of the positions."""
        self.positions = [before + new for before, new in zip(self.positions, counts, strict=True)]


def _check_alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Raises if tensors differ in anything but the number of sequences."""
    for name in sorted(one.keys() ^ other.keys()):
        raise ModelError(f"states of different models cannot be stacked: only one of them has {name!r}.")
    for name, tensor in one.items():
        first, second = tuple(tensor.shape[1:]), tuple(other[name].shape[1:])
        if first != second:
            raise ModelError(f"these states cannot be stacked: {name!r} is {first} in one and {second} in another.")


def _has_slots(name: str) -> bool:
    """Returns whether the second dimension of a tensor is the slots of a bank."""
    return ".bank." in name and "_BM" in name


def _fits(name: str, found: Sequence[int], expected: Sequence[int]) -> bool:
    if _has_slots(name) and len(found) == len(expected):
        return 1 <= found[0] <= expected[0] and found[1:] == expected[1:]
    return found == expected


def _mapped(prefix: str, value: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(prefix, value)
    if is_dataclass(value) and not isinstance(value, Origin):
        parts = {
            f.name: _mapped(f"{prefix}.{f.name}".lstrip("."), getattr(value, f.name), change) for f in fields(value)
        }
        return type(value)(**parts)
    if isinstance(value, tuple):
        parts = [_mapped(f"{prefix}.{index}", one, change) for index, one in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
