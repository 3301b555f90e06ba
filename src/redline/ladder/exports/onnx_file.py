"""The artifact form `.onnx`: a graph for ONNX Runtime, with the manifest and the session options in its metadata.

A protobuf message may be extended by appending fields, so the manifest is appended to the file as a metadata entry.
Every reader of ONNX finds it in the metadata, and it can be read without parsing the weights.
"""

import hashlib
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import ModelError
from redline.files.untrusted import reading
from redline.ladder.exports.artifact_form import CALL_RUNGS, ArtifactForm, Source, Written, loaded_job
from redline.ladder.exports.call_form import describe, describe_call, restore, tensor_forms, tensors_of_call
from redline.ladder.exports.manifest import Manifest
from redline.ladder.job import Job, entered
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rewrites.onnx_engine import OnnxSession, write_graph
from redline.ladder.rewrites.per_shape import FlatModel, as_call, flat_tensors
from redline.ladder.rungs.onnxruntime import Onnxruntime, provider_list
from redline.ladder.rungs.threads import Threads
from redline.machine.machine import Machine

_KEY = b"redline.export"
_START = b'{"redline_export": '
# Protobuf tags: of the field ModelProto.metadata_props, and of the key and the value in each of its entries.
_ENTRY_TAG, _KEY_TAG, _VALUE_TAG = b"\x72", b"\x0a", b"\x12"


class OnnxFile(ArtifactForm):
    name = "onnx"
    title = "an ONNX file"
    short = "an ONNX file (.onnx)"
    suffix = ".onnx"
    refused = frozenset(
        {"int8", "fp8", "int4", "tf32", "cudnn_benchmark", "compile", "openvino", "tensorrt", "cuda_graph", "streams"}
    )

    def why_not(self, plan: Plan, machine: Machine) -> str:
        return _engine_rung(plan).why_not(machine)

    def write(self, source: Source, path: Path, progress: Callable[[str], None]) -> Written:
        rung, plan = _engine_rung(source.plan), source.plan
        inner = Plan(tuple(r for r in plan.rungs if r.name not in (*CALL_RUNGS, rung.name)))
        resolved, job = source.build(inner)
        if reason := rung.why_not(source.machine, job):
            raise Unavailable(rung, reason)
        kind = rung.kind(source.machine.is_cuda)
        samples = [as_call(batch, job.device) for batch in source.samples]
        args, kwargs = samples[0]
        with entered(job.contexts), torch.no_grad(), tempfile.TemporaryDirectory(prefix="redline-export-") as folder:
            inputs, outputs = describe_call(args, kwargs), describe(job.model(*args, **kwargs), "output")
            flat = FlatModel("onnxruntime", job.model, args, kwargs)
            progress("exporting the model as a graph")
            rewrite = rung.rewriter(job.model, samples[0], kind, samples)
            written = write_graph(flat, flat_tensors(args, kwargs), Path(folder), rewrite)
            path.write_bytes(_without_traces(written))
        threads = rung.threads or next((r.count for r in plan.rungs if isinstance(r, Threads)), 0)
        session = {"provider": kind, "threads": threads}
        others = [r for r in plan.rungs if r.name in CALL_RUNGS or r.name == rung.name]
        return Written(Plan.of([*resolved.rungs, *others]), inputs, outputs, session)

    def seal(self, path: Path, manifest: Manifest, target: Path) -> None:
        target.write_bytes(path.read_bytes() + _metadata(manifest.to_json().encode()))

    def digests(self, path: Path) -> dict[str, str]:
        return {"graph": hashlib.sha256(path.read_bytes()).hexdigest()}

    def read(self, path: Path) -> Manifest | None:
        with reading(path, "ONNX file", ModelError):
            data = path.read_bytes()
        place = data.rfind(_START)
        if place < 0:
            return None
        text = data[place:]
        manifest = Manifest.from_json(text, str(path))
        graph = data[: len(data) - len(_metadata(text))]
        if hashlib.sha256(graph).hexdigest() != manifest.digests.get("graph"):
            raise ModelError(f"{str(path)!r} has changed since it was exported: export it again.")
        return manifest

    def load(self, path: Path, manifest: Manifest, machine: Machine) -> Job:
        if importlib.util.find_spec("onnxruntime") is None:
            extra = "onnx-gpu" if machine.is_cuda else "onnx"
            raise ModelError(f'{str(path)!r} needs onnxruntime: pip install "redline[{extra}]".')
        return loaded_job(GraphModel(path, manifest), manifest, machine)


class GraphModel(nn.Module):
    """Calls the session like the model from which the graph was exported."""

    home: Tensor

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__()
        self._inputs, self._outputs = manifest.inputs, manifest.outputs
        # Rungs read the device from this empty buffer, because the weights are in the session and not in this module.
        self.register_buffer("home", torch.empty(0, device=manifest.device), persistent=False)
        forms = [(tuple(leaf["tensor"]), getattr(torch, leaf["dtype"])) for leaf in tensor_forms(manifest.outputs)]
        providers = provider_list(manifest.session["provider"], self.home.device)
        self._session = OnnxSession(path, self.home.device, forms, providers, manifest.session["threads"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return restore(self._outputs, self._session(tensors_of_call(self._inputs, args, kwargs)))


def _engine_rung(plan: Plan) -> Onnxruntime:
    """Returns the plan's rung `onnxruntime`, or the rung with its defaults."""
    return next((rung for rung in plan.rungs if isinstance(rung, Onnxruntime)), Onnxruntime())


def _without_traces(path: Path) -> bytes:
    """Returns the graph without stack traces, which contain local paths."""
    import onnx

    if len(list(path.parent.glob(f"{path.name}*"))) > 1:
        raise ModelError("the weights are too large for one ONNX file (2 GiB): export to a folder.")
    model: Any = onnx.load(str(path))
    for node in model.graph.node:
        del node.metadata_props[:]
    return model.SerializeToString()


def _metadata(text: bytes) -> bytes:
    """Returns the protobuf fields that add the manifest to the metadata of an ONNX model."""
    entry = _KEY_TAG + _varint(len(_KEY)) + _KEY + _VALUE_TAG + _varint(len(text)) + text
    return _ENTRY_TAG + _varint(len(entry)) + entry


def _varint(number: int) -> bytes:
    """Returns a number in protobuf's encoding: seven bits per byte, the lowest first."""
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])
