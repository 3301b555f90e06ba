"""Finds a model of the Hugging Face Hub in the local cache, where `hf download` and transformers store it."""

import os
import re
from pathlib import Path

from redline.errors import ModelError

# OWNER/NAME (old models such as gpt2 have no owner), then an optional @ with a branch, tag or commit.
_REPOSITORY = re.compile(r"(?P<name>([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*)(@(?P<revision>[A-Za-z0-9][\w./-]*))?")
_SHORTEST_COMMIT = 7
# The parts of a complete copy; the loader decides which of the files it can read.
_PARTS = {
    "config.json": ("config.json",),
    "weights": ("*.safetensors", "*.bin"),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.*"),
}


def cache_folder() -> Path:
    """Returns the folder that huggingface_hub uses: HF_HUB_CACHE, else `hub` in HF_HOME, else the user's cache."""
    if named := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser() / "hub"


def find_model(given: str | Path) -> Path:
    """Returns `given` if it is a folder, otherwise the cached snapshot of a model such as Qwen/Qwen3-0.6B.

    If there is neither, raises a ModelError with the command that downloads the model.
    """
    path = Path(given)
    if path.is_dir():
        return path
    needed = "config.json, model.safetensors and tokenizer.json"
    if path.exists():
        raise ModelError(f"{str(given)!r} is a file: give the folder of a model, with {needed}.")
    named = _REPOSITORY.fullmatch(str(given).rstrip("/"))
    if named is None:
        raise ModelError(
            f"there is no folder {str(given)!r}: give a folder with {needed}, or the name of a model in the Hugging "
            "Face cache, such as Qwen/Qwen3-0.6B."
        )
    name, revision = named["name"], named["revision"]
    cache = cache_folder()
    folder = cache / f"models--{name.replace('/', '--')}"
    download = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    snapshot = _snapshot(folder, revision)
    if snapshot is None:
        raise ModelError(
            f"there is no folder {str(given)!r}, and no such model in the Hugging Face cache {str(cache)!r}: download "
            f"it with `{download}`, or give a folder with {needed}."
        )
    for part, patterns in _PARTS.items():
        # The cache holds symbolic links, whose targets may be missing.
        if not any(path.exists() for pattern in patterns for path in snapshot.glob(pattern)):
            raise ModelError(
                f"the copy of {name} in the Hugging Face cache has no {part}: download all of it with `{download}` "
                f"({str(snapshot)!r})."
            )
    return snapshot


def _snapshot(folder: Path, revision: str | None) -> Path | None:
    """Returns the snapshot of a branch, tag or commit prefix; by default that of main, or the only one."""
    snapshots = folder / "snapshots"
    reference = folder / "refs" / (revision or "main")
    if ".." not in reference.parts and reference.is_file():
        commit = reference.read_text(encoding="utf-8", errors="replace").strip()
        return snapshots / commit if re.fullmatch(r"\w{1,64}", commit) and (snapshots / commit).is_dir() else None
    there = [one for one in sorted(snapshots.glob("*")) if one.is_dir()]
    if revision is None:
        return there[0] if len(there) == 1 else None
    if len(revision) < _SHORTEST_COMMIT:
        return None
    matching = [one for one in there if one.name.startswith(revision)]
    return matching[0] if len(matching) == 1 else None
