"""The manifest of an exported artifact: its origin, the inputs that it takes, and what was measured."""

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from redline.errors import MachineError, ModelError
from redline.files.untrusted import check_types, field_types, parse_json
from redline.ladder.gate import Score
from redline.machine.machine import Machine
from redline.machine.version import VERSION

SCHEMA = 1
_LIBRARIES = ("torch", "triton", "torchao", "onnxruntime", "openvino", "torch-tensorrt")


@dataclass(frozen=True)
class Manifest:
    """The facts about one artifact, stored in it as JSON.

    `plan` is TOML, `weights` the fingerprint of the untouched model's weights. `inputs` and `outputs` hold the shapes
    and dtypes (see call_form). `scores` are the gates on the loaded artifact, against the untouched model in fp32.
    `load_s` is the time from the start of a fresh process to the end of the first call. `digests` has the SHA-256 of
    each file, and `session` the options of an ONNX Runtime session.
    """

    form: str
    plan: str
    workload: str
    options: Mapping[str, Any]
    weights: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    device: str
    host_inputs: bool
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    session: Mapping[str, Any] = field(default_factory=dict)
    scores: tuple[Score, ...] = ()
    load_s: float = 0.0
    digests: Mapping[str, str] = field(default_factory=dict)
    redline_export: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        # The schema comes first, because `OnnxFile` finds the manifest in a file by these first characters.
        return {"redline_export": self.redline_export, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes, origin: str) -> "Manifest":
        where = f"the manifest of {origin!r}"
        data = parse_json(text, where, ModelError)
        if not isinstance(data, dict) or not isinstance(data.get("redline_export"), int):
            raise ModelError(f"{where} is damaged: it is not an object with an integer `redline_export`.")
        if data["redline_export"] > SCHEMA:
            raise ModelError(f"{origin!r} was exported by a newer Redline: upgrade Redline.")
        known = field_types(cls)
        missing = [name for name in known if name not in data]
        if missing:
            raise ModelError(f"{where} is damaged: {missing[0]!r} is missing.")
        check_types(data, known, where, ModelError)
        values: dict[str, Any] = {name: data[name] for name in known}
        values["scores"] = tuple(Score(**score) for score in data["scores"])
        return cls(**values)


def machine_facts(machine: Machine) -> dict[str, Any]:
    return {
        "name": machine.name,
        "system": machine.system,
        "cores": machine.cores,
        "features": list(machine.features),
        "capability": list(machine.capability),
    }


def version_facts(machine: Machine) -> dict[str, str]:
    held = {name: machine.versions[name] for name in _LIBRARIES if name in machine.versions}
    return {"redline": VERSION, "python": machine.python, **held}


def weights_fingerprint(model: nn.Module) -> str:
    """Returns a SHA-256 of the names, dtypes, shapes and values of all weights and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_machine(manifest: Manifest, machine: Machine, origin: str, compiled: bool) -> None:
    """Raises MachineError if the artifact cannot run here; warns if it was made on another kind of machine.

    `compiled` tells whether the artifact contains machine code, which only runs where its instructions exist.
    """
    if compiled and (reason := why_code_cannot_run(manifest, machine)):
        raise MachineError(f"{origin!r} {reason}.")
    there = manifest.machine
    now = version_facts(machine)
    changes = [
        f"{name} {version} (here {now.get(name, 'not installed')})"
        for name, version in manifest.versions.items()
        if now.get(name) != version and name in _relevant(manifest)
    ]
    changes += [f"{there.get('name')} (here {machine.name})"] if there.get("name") != machine.name else []
    if changes:
        warnings.warn(
            f"{origin!r} was exported with {', '.join(changes)}: its load time, speed and error were measured there.",
            stacklevel=3,
        )


def why_code_cannot_run(manifest: Manifest, machine: Machine) -> str:
    """Returns why the machine code in the artifact cannot run here, and what to do; empty if it can."""
    here, there = machine_facts(machine), manifest.machine
    if there.get("system") != here["system"]:
        return f"contains code for {there.get('system')}, and this is {here['system']}: export it again"
    lacking = [name for name in there.get("features", ()) if name not in here["features"]]
    if lacking:
        return (
            f"was compiled for a machine with {', '.join(lacking)} ({there.get('name')}), which {machine.name} lacks: "
            "export it again on this machine"
        )
    if list(there.get("capability", ())) != here["capability"]:
        return f"was compiled for {there.get('name')}, and this is {machine.name}: export it again here"
    theirs, ours = _release(manifest.versions.get("torch", "")), _release(machine.versions["torch"])
    if theirs != ours:
        return f"was compiled with torch {theirs}, and this is torch {ours}: export it again, or install torch {theirs}"
    return ""


def _relevant(manifest: Manifest) -> tuple[str, ...]:
    engines = {"onnx": ("onnxruntime",), "aot": ("torch",), "folder": ("python", *_LIBRARIES)}[manifest.form]
    return ("redline", *engines)


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])
