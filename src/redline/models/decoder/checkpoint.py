"""A decoder's weights in the Hugging Face layout: safetensors in one file or several with an index, and `config.json`.

There queries, keys and values are three weights, and gate and up two; here each group is one, so a weight on disk is a
part of the rows of one in memory. Everything is checked by name and shape before the first byte is read: every tensor
of the files is used, and none is missing.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from redline.errors import ModelError
from redline.files import write_bytes, write_text
from redline.models.decoder.config import DecoderConfig
from redline.models.decoder.hugging_face import read_config, write_config
from redline.models.decoder.model import Decoder

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
# Old files hold these, which follow from the config.
_COMPUTED = "rotary_emb.inv_freq"


@dataclass(frozen=True)
class Piece:
    """A tensor on disk, and the rows of the parameter that it fills."""

    name: str
    parameter: str
    start: int
    shape: tuple[int, ...]

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        return parameters[self.parameter][self.start : self.start + self.shape[0]]


def pieces(config: DecoderConfig) -> Iterator[Piece]:
    """Every tensor that a file of this config holds."""
    width, dim = config.width, config.head_dim
    q_rows, kv_rows = config.heads * dim, config.key_value_heads * dim
    yield Piece("model.embed_tokens.weight", "embedding.weight", 0, (config.vocabulary, width))
    for index in range(config.layers):
        there, here = f"model.layers.{index}", f"blocks.{index}"
        yield Piece(f"{there}.input_layernorm.weight", f"{here}.attention_norm.weight", 0, (width,))
        start = 0
        for letter, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            part = f"{there}.self_attn.{letter}_proj"
            yield Piece(f"{part}.weight", f"{here}.attention.qkv.weight", start, (rows, width))
            if config.qkv_bias:
                yield Piece(f"{part}.bias", f"{here}.attention.qkv.bias", start, (rows,))
            start += rows
        yield Piece(f"{there}.self_attn.o_proj.weight", f"{here}.attention.out.weight", 0, (width, q_rows))
        if config.out_bias:
            yield Piece(f"{there}.self_attn.o_proj.bias", f"{here}.attention.out.bias", 0, (width,))
        for letter in ("q", "k") if config.query_key_norm else ():
            norm = f"{letter}_norm.weight"
            yield Piece(f"{there}.self_attn.{norm}", f"{here}.attention.{norm}", 0, (dim,))
        yield Piece(f"{there}.post_attention_layernorm.weight", f"{here}.mlp_norm.weight", 0, (width,))
        for half, part in enumerate(("gate", "up")):
            shape = (config.mlp_width, width)
            yield Piece(f"{there}.mlp.{part}_proj.weight", f"{here}.mlp.gate_up.weight", half * shape[0], shape)
        yield Piece(f"{there}.mlp.down_proj.weight", f"{here}.mlp.down.weight", 0, (width, config.mlp_width))
    yield Piece("model.norm.weight", "norm.weight", 0, (width,))
    if not config.tied_embeddings:
        yield Piece("lm_head.weight", "head.weight", 0, (config.vocabulary, width))


def load_decoder(folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Decoder:
    """The model of a folder, ready for inference; in the dtype of its files unless another is asked for."""
    folder = Path(folder)
    config = read_config(read_json(folder / "config.json"), str(folder / "config.json"))
    files = find_files(folder)
    wanted = {piece.name: piece for piece in pieces(config)}
    tied_too = {"lm_head.weight": wanted["model.embed_tokens.weight"]} if config.tied_embeddings else {}
    stored = _check(folder, files, wanted, tied_too)
    with torch.device("meta"):
        model = Decoder(config).to(dtype or stored)
    model.to_empty(device=device)
    model.tie()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                if name in wanted:
                    _fill(wanted[name].of(parameters), file.get_tensor(name), name, path)
    for path in files if tied_too else ():
        with safe_open(path, "pt") as file:
            if "lm_head.weight" in file.keys():  # noqa: SIM118
                _check_tied(file.get_tensor("lm_head.weight"), parameters["embedding.weight"], path)
    return model.eval()


def read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {str(path)!r}: {error.strerror or error}.") from error
    except ValueError as error:
        raise ModelError(f"{str(path)!r} is not JSON: {str(error).rstrip('.')}.") from error
    if not isinstance(document, dict):
        raise ModelError(f"{str(path)!r} is not a JSON object.")
    return document


def find_files(folder: Path) -> list[Path]:
    """The weight files of a folder; an index and its files must agree."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise ModelError(f"{str(folder)!r} has neither {SINGLE} nor {INDEX}.")
        return [folder / SINGLE]
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{str(folder / INDEX)!r} has no 'weight_map'.")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{str(folder / INDEX)!r} names {name!r}, which is not a file of the folder.")
        with _opened(folder / name) as file:
            strays = {key for key, where in weight_map.items() if where == name} ^ set(file.keys())
        if strays:
            raise ModelError(f"{str(folder / INDEX)!r} and {name!r} disagree about {sorted(strays)[0]!r}.")
    return [folder / name for name in names]


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except FileNotFoundError as error:
        raise ModelError(f"cannot read {str(path)!r}: No such file or directory.") from error
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{str(path)!r} is damaged, or no safetensors file ({error}).") from error


def _check(folder: Path, files: list[Path], wanted: dict[str, Piece], also: dict[str, Piece]) -> torch.dtype:
    """Refuses what does not fit exactly; gives the dtype that most of the files is in."""
    found: dict[str, tuple[int, ...]] = {}
    stored: dict[str, int] = {}
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = tuple(part.get_shape())
                size = 1
                for side in found[name]:
                    size *= side
                stored[part.get_dtype()] = stored.get(part.get_dtype(), 0) + size
    known = wanted | also
    missing = [name for name in wanted if name not in found]
    foreign = [name for name in found if name not in known and not name.endswith(_COMPUTED)]
    other = [name for name, piece in known.items() if name in found and found[name] != piece.shape]
    said = []
    if missing:
        said.append(f"{len(missing)} weights are missing ({missing[0]} …)")
    if foreign:
        said.append(f"{len(foreign)} are not its own ({foreign[0]} …)")
    if other:
        name = other[0]
        said.append(f"{len(other)} have another shape ({name} is {found[name]}, not {known[name].shape})")
    if said:
        raise ModelError(f"the weights in {str(folder)!r} do not fit its config.json: {', '.join(said)}.")
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
    most = max(stored, key=lambda name: stored[name])
    if set(stored) - set(dtypes):
        odd = sorted(set(stored) - set(dtypes))[0]
        raise ModelError(f"the weights in {str(folder)!r} are stored as {odd}: quantized files are not supported.")
    return dtypes[most]


def _fill(target: Tensor, tensor: Tensor, name: str, path: Path) -> None:
    if not torch.isfinite(tensor).all():
        raise ModelError(f"{str(path)!r} is damaged: {name!r} holds values that are not finite.")
    with torch.no_grad():
        target.copy_(tensor)


def _check_tied(head: Tensor, embedding: Tensor, path: Path) -> None:
    if not torch.equal(head.to(embedding.device, embedding.dtype), embedding):
        raise ModelError(f"{str(path)!r} ties head and embedding by its config.json, but holds two different ones.")


def save_decoder(
    model: Decoder, folder: str | Path, *, stop_tokens: tuple[int, ...] = (), shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes the layout that transformers reads; `config.json` comes last, so that half a folder is no model."""
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
    names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        tensors = {key: piece.of(parameters).detach().cpu().contiguous() for key, piece in shard.items()}
        write_bytes(folder / name, to_safetensors(tensors, metadata={"format": "pt"}))
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        write_text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    else:
        (folder / INDEX).unlink(missing_ok=True)  # of an earlier model in several files
    write_text(folder / "config.json", json.dumps(document, indent=2, sort_keys=True) + "\n")


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
