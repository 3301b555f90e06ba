"""Saves and loads decoder weights in the Hugging Face layout: `config.json` and safetensors, sharded or in one file.

On disk, the query, key and value projections are three tensors, and the gate and up projections are two. `Decoder`
fuses each group into one parameter, so a tensor on disk is a range of rows of a parameter. The names and shapes of all
tensors are checked before any data is read: no tensor may be missing, and no tensor may be left over.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor

from redline.errors import ModelError
from redline.files.atomic import CannotWrite, write_bytes, write_text
from redline.files.untrusted import read_json_object, reading
from redline.files.weights import mismatches, open_safetensors
from redline.machine.meta import allocate, meta_device
from redline.models.decoder.config import DecoderConfig
from redline.models.decoder.hugging_face import read_config, write_config
from redline.models.decoder.model import Decoder

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
# The folder to which a new model is written before it replaces the current one.
_TEMPORARY = ".saving"
_SHARDS = "model-?????-of-?????.safetensors"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
# The name of buffers in files of early transformers versions. Such buffers are ignored: they follow from the config.
_COMPUTED = "rotary_emb.inv_freq"


@dataclass(frozen=True)
class Piece:
    """A tensor on disk and the range of rows of the parameter that it fills."""

    name: str
    parameter: str
    start: int
    shape: tuple[int, ...]

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        return parameters[self.parameter][self.start : self.start + self.shape[0]]


def pieces(config: DecoderConfig) -> Iterator[Piece]:
    """Yields every tensor that a checkpoint of this config contains."""
    width, dim = config.width, config.head_dim
    q_rows, kv_rows = config.heads * dim, config.key_value_heads * dim
    yield Piece("model.embed_tokens.weight", "embedding.weight", 0, (config.vocabulary, width))
    for index in range(config.layers):
        theirs, ours = f"model.layers.{index}", f"blocks.{index}"
        yield Piece(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight", 0, (width,))
        start = 0
        for letter, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            part = f"{theirs}.self_attn.{letter}_proj"
            yield Piece(f"{part}.weight", f"{ours}.attention.qkv.weight", start, (rows, width))
            if config.qkv_bias:
                yield Piece(f"{part}.bias", f"{ours}.attention.qkv.bias", start, (rows,))
            start += rows
        yield Piece(f"{theirs}.self_attn.o_proj.weight", f"{ours}.attention.out.weight", 0, (width, q_rows))
        if config.out_bias:
            yield Piece(f"{theirs}.self_attn.o_proj.bias", f"{ours}.attention.out.bias", 0, (width,))
        for letter in ("q", "k") if config.query_key_norm else ():
            norm = f"{letter}_norm.weight"
            yield Piece(f"{theirs}.self_attn.{norm}", f"{ours}.attention.{norm}", 0, (dim,))
        yield Piece(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm.weight", 0, (width,))
        for half, part in enumerate(("gate", "up")):
            shape = (config.mlp_width, width)
            yield Piece(f"{theirs}.mlp.{part}_proj.weight", f"{ours}.mlp.gate_up.weight", half * shape[0], shape)
        yield Piece(f"{theirs}.mlp.down_proj.weight", f"{ours}.mlp.down.weight", 0, (width, config.mlp_width))
    yield Piece("model.norm.weight", "norm.weight", 0, (width,))
    if not config.tied_embeddings:
        yield Piece("lm_head.weight", "head.weight", 0, (config.vocabulary, width))


def load_decoder(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", strict: bool = False
) -> Decoder:
    """Loads a model for inference, in the dtype of its files unless `dtype` is given.

    With `strict`, every unknown key of config.json raises.
    """
    folder = Path(folder)
    with reading(folder / "config.json", "model config", ModelError):
        config = read_config(read_json(folder / "config.json"), str(folder / "config.json"), strict)
    weights = Weights.of(folder)
    weights.check_layers(config.layers)
    wanted = {piece.name: piece for piece in pieces(config)}
    tied_too = {"lm_head.weight": wanted["model.embed_tokens.weight"].shape} if config.tied_embeddings else {}
    weights.check({name: piece.shape for name, piece in wanted.items()}, tied_too)
    with reading(folder / "config.json", "model config", ModelError, (RuntimeError,)), meta_device():
        model = Decoder(config)
    allocate(model, device, dtype or weights.dtype)
    model.tie()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights.fill({name: piece.of(parameters) for name, piece in wanted.items()})
    for path in weights.files if tied_too else ():
        with open_safetensors(path) as file:
            if "lm_head.weight" in file.keys():  # noqa: SIM118 (safe_open does not return a dict)
                embedding, head = parameters["embedding.weight"], file.get_tensor("lm_head.weight")
                if not torch.equal(head.to(embedding.device, embedding.dtype), embedding):
                    raise ModelError(
                        f"{str(path)!r} has an lm_head.weight that differs from the embedding, "
                        "but config.json ties them."
                    )
    return model.eval().requires_grad_(False)


def read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path, "model file", ModelError)


def find_files(folder: Path) -> list[Path]:
    """Returns the weight files of a folder; raises if the index and its files disagree."""
    check_has_weights(folder)
    if not (folder / INDEX).exists():
        return [folder / SINGLE]
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{str(folder / INDEX)!r} has no 'weight_map'.")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{str(folder / INDEX)!r} names {name!r}, which is not a file name in this folder.")
        with open_safetensors(folder / name) as file:
            strays = {key for key, where in weight_map.items() if where == name} ^ set(file.keys())
        if strays:
            raise ModelError(
                f"{str(folder / INDEX)!r} and {name!r} disagree: only one of them has {sorted(strays)[0]!r}."
            )
    return [folder / name for name in names]


def check_has_weights(folder: Path) -> None:
    """Raises ModelError if a folder has no safetensors; the message names the weights that it has instead."""
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        return
    pickled = sorted(path.name for path in folder.glob("*.bin") if path.name != "training_args.bin")
    if pickled:
        convert = f"M.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        raise ModelError(
            f"{str(folder)!r} has weights only as {pickled[0]}, and pickle files are not loaded: convert it to "
            f'safetensors with `python -c "from transformers import AutoModelForCausalLM as M; {convert}"`.'
        )
    others = sorted(path.name for pattern in ("*.safetensors", "*.gguf", "*.pth") for path in folder.glob(pattern))
    found = f", only {others[0]}" if others else ""
    raise ModelError(f"{str(folder)!r} has neither {SINGLE} nor {INDEX}{found}.")


@dataclass(frozen=True)
class Weights:
    """The headers of a folder's weight files, so that mismatches are found before the model is built."""

    folder: Path
    files: list[Path]
    shapes: dict[str, tuple[int, ...]]
    # Maps each dtype, by its name in the safetensors format (such as BF16), to the number of values stored in it.
    numbers: dict[str, int]

    @classmethod
    def of(cls, folder: Path) -> "Weights":
        files = find_files(folder)
        shapes: dict[str, tuple[int, ...]] = {}
        numbers: dict[str, int] = {}
        for path in files:
            with open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    shapes[name] = tuple(part.get_shape())
                    numbers[part.get_dtype()] = numbers.get(part.get_dtype(), 0) + math.prod(shapes[name])
        return cls(folder, files, shapes, numbers)

    def check_layers(self, layers: int) -> None:
        """Raises if there are more layers than weights; otherwise a damaged config.json could exhaust memory."""
        if layers > len(self.shapes):
            self._fail(f"it has {layers} layers, but there are only {len(self.shapes)} weights")

    def check(
        self, wanted: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Raises unless names and shapes match exactly; `optional` weights may be absent."""
        found = {name: shape for name, shape in self.shapes.items() if not name.endswith(_COMPUTED)}
        if problems := mismatches(wanted, found, optional):
            self._fail(problems)
        unsupported = sorted(set(self.numbers) - set(_DTYPES))
        if unsupported:
            raise ModelError(
                f"the weights in {str(self.folder)!r} are stored as {unsupported[0]}: quantized files are unsupported."
            )

    def _fail(self, why: str) -> None:
        raise ModelError(f"the weights in {str(self.folder)!r} do not fit its config.json: {why}.")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which most values are stored."""
        return _DTYPES[max(self.numbers, key=lambda name: self.numbers[name])]

    @torch.no_grad()
    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copies the stored tensors into the targets of the same names."""
        for path in self.files:
            with open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118
                    if name in targets:
                        tensor = file.get_tensor(name)
                        targets[name].copy_(tensor)
                        check_finite(targets[name], tensor, name, path)


def check_finite(converted: Tensor, stored: Tensor, name: str, path: Path) -> None:
    if torch.isfinite(converted).all():
        return
    if torch.isfinite(stored).all():
        dtype = str(converted.dtype).removeprefix("torch.")
        raise ModelError(f"{name!r} in {str(path)!r} has values that are too large for {dtype}.")
    raise ModelError(f"{str(path)!r} is damaged: {name!r} has values that are not finite.")


def save_decoder(
    model: Decoder, folder: str | Path, *, stop_tokens: tuple[int, ...] = (), shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes the layout that transformers reads; replaces a model in this folder."""
    folder = Path(folder)
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    document = write_config(model.config, dtype, stop_tokens)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shards: list[dict[str, Piece]] = [{}]
    sizes = [0]
    for piece in pieces(model.config):
        size = piece.of(parameters).nbytes
        if sizes[-1] and sizes[-1] + size > shard_bytes:
            shards.append({})
            sizes.append(0)
        shards[-1][piece.name] = piece
        sizes[-1] += size
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]

    def files() -> Iterator[tuple[str, bytes]]:
        for name, shard in zip(names, shards, strict=True):
            tensors = {key: piece.of(parameters).detach().cpu().contiguous() for key, piece in shard.items()}
            yield name, to_safetensors(tensors, metadata={"format": "pt"})
        if count > 1:
            weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
            yield INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()

    write_model(folder, files(), document)


def write_model(folder: Path, files: Iterable[tuple[str, bytes]], config: Mapping[str, Any]) -> None:
    """Writes weight files, an optional index and `config.json`; replaces the model in the folder.

    The current model stays until the new one is completely written to a temporary folder. While the new
    files are moved to the folder, it has no `config.json`, so that an interrupted move never leaves a loadable mixture
    of two models.
    """
    temporary = folder / _TEMPORARY
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed save
    try:
        names = []
        for name, data in files:
            write_bytes(temporary / name, data)
            names.append(name)
        write_text(temporary / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        _move_files(temporary, folder, names)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_files(temporary: Path, folder: Path, names: list[str]) -> None:
    path = folder / "config.json"
    try:
        path.unlink(missing_ok=True)
        for path in (folder / name for name in names):
            os.replace(temporary / path.name, path)
        for path in (folder / SINGLE, folder / INDEX, *folder.glob(_SHARDS)):
            if path.name not in names:
                path.unlink(missing_ok=True)
        path = folder / "config.json"
        os.replace(temporary / path.name, path)
    except OSError as error:
        raise CannotWrite(path, error) from error
