"""An ONNX Runtime session that is called like the PyTorch model from which it was exported.

The first run of the session is profiled to find the nodes of the optimized graph, their operators and their providers.
"""

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.rewrites.per_shape import FlatModel, flat_tensors
from redline.machine.quiet import quiet

# A function that rewrites the exported model: it gets the exported file, the file to write, and the input names.
Rewrite = Callable[[Path, Path, Sequence[str]], None]


@dataclass(frozen=True)
class Node:
    """A node of the optimized graph that ran, with its operator and its provider."""

    name: str
    operator: str
    provider: str


class OnnxSession:
    """An ONNX Runtime session that maps tensors to tensors on one device; `output_forms` are their shapes and dtypes.

    With `profile`, the beginning of a file name, the runs are profiled until `end_profiling`.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        output_forms: Sequence[tuple[Sequence[int], torch.dtype]],
        providers: Sequence[tuple[str, dict[str, Any]]],
        threads: int = 0,
        profile: Path | None = None,
    ) -> None:
        self._device, self._output_forms = device, output_forms
        self._session = _session(path, providers, threads, profile)
        self.inputs = [item.name for item in self._session.get_inputs()]
        self.outputs = [item.name for item in self._session.get_outputs()]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._run_on_cpu(tensors) if self._device.type == "cpu" else self._run_on_cuda(tensors)

    def end_profiling(self) -> Path:
        return Path(self._session.end_profiling())

    def _run_on_cpu(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        feeds = {n: t.detach().contiguous().numpy() for n, t in zip(self.inputs, tensors, strict=True)}
        results = self._session.run(self.outputs, feeds)
        # ONNX Runtime returns a 0-d result as a scalar and not as an array.
        return [torch.from_numpy(r) if isinstance(r, np.ndarray) else torch.as_tensor(r) for r in results]

    def _run_on_cuda(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        index = self._device.index or 0
        inputs = [t.detach().contiguous() for t in tensors]
        results = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._output_forms]
        binding = self._session.io_binding()
        for name, t in zip(self.inputs, inputs, strict=True):
            binding.bind_input(name, "cuda", index, _onnx_type(t.dtype), tuple(t.shape), t.data_ptr())
        for name, t in zip(self.outputs, results, strict=True):
            binding.bind_output(name, "cuda", index, _onnx_type(t.dtype), tuple(t.shape), t.data_ptr())
        # The session uses its own stream, so torch's kernels must finish first. `run` waits for the session's kernels.
        torch.cuda.current_stream(self._device).synchronize()
        self._session.run_with_iobinding(binding)
        return results


class OnnxEngine:
    """A session for one combination of input shapes; `args` and `kwargs` are used for the export and the first run."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        providers: Sequence[tuple[str, dict[str, Any]]],
        threads: int = 0,
        rewrite: Rewrite | None = None,
    ) -> None:
        self._flat = FlatModel("onnxruntime", model, args, kwargs)
        tensors = flat_tensors(args, kwargs)
        # The folder can be deleted once the session has opened the file, because mapped files stay readable.
        with tempfile.TemporaryDirectory(prefix="redline-onnx-") as folder:
            path = write_graph(self._flat, tensors, Path(folder), rewrite)
            self.weight_bytes = weight_bytes(path)
            profile = path.with_name("profile")
            self._run = OnnxSession(path, tensors[0].device, self._flat.output_forms, providers, threads, profile)
            if len(self._run.inputs) != len(tensors) or len(self._run.outputs) != len(self._flat.output_forms):
                raise RungError("onnxruntime: the exported graph lacks an input or an output of the model.")
            self(args, kwargs)
            self.nodes = _profiled_nodes(self._run.end_profiling())

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._flat.restore(self._run(flat_tensors(args, kwargs)))


def write_graph(model: nn.Module, tensors: Sequence[Tensor], folder: Path, rewrite: Rewrite | None = None) -> Path:
    """Exports a function of tensors into the folder, rewrites it if asked to, and returns the file."""
    path = folder / "model.onnx"
    _export(model, tensors, path)
    if rewrite is None:
        return path
    rewritten = folder / "rewritten.onnx"
    rewrite(path, rewritten, _input_names(path))
    return rewritten


def _export(model: nn.Module, tensors: Sequence[Tensor], path: Path) -> None:
    try:
        with quiet(), torch.no_grad():
            # Calls torch.export itself, because torch.onnx falls back to tracing if control flow depends on data.
            graph = torch.export.export(model, tuple(tensors), strict=False)
            program = torch.onnx.export(graph, dynamo=True, verbose=False)
            assert program is not None
            program.save(path)  # weights of more than 2 GiB are saved to a separate file
    except Exception as error:
        raise RungError(f"onnxruntime: exporting the model to ONNX failed: {_innermost(error)}.") from error


def _innermost(error: BaseException) -> str:
    """Returns the message of the innermost cause; the exporter's own message contains only general advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no message'}"


def _session(
    path: Path, providers: Sequence[tuple[str, dict[str, Any]]], threads: int, profile: Path | None = None
) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 3  # errors only; warnings would be printed to the terminal
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:
        raise RungError(f"onnxruntime: creating the session failed: {_innermost(error)}.") from error


def _profiled_nodes(path: Path) -> tuple[Node, ...]:
    nodes = {}
    for event in json.loads(path.read_text(encoding="utf-8")):
        details = event.get("args", {})
        if event.get("cat") == "Node" and "provider" in details:
            name = event["name"].removesuffix("_kernel_time")
            nodes[name, details.get("node_index")] = Node(name, details["op_name"], details["provider"])
    return tuple(nodes.values())


def _input_names(path: Path) -> list[str]:
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    return [item.name for item in graph.input if item.name not in weights]


def weight_bytes(path: Path) -> int:
    """Returns the bytes of the constants in a model file, computed from their types and shapes."""
    import onnx

    total = 0
    for tensor in onnx.load(str(path), load_external_data=False).graph.initializer:
        total += onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize * math.prod(tensor.dims)
    return total


def _onnx_type(dtype: torch.dtype) -> int:
    import onnx

    name = {torch.float32: "FLOAT", torch.float64: "DOUBLE"}.get(dtype, str(dtype).removeprefix("torch.").upper())
    return onnx.TensorProto.DataType.Value(name)
