"""The address `model.onnx`: the graph is converted to a PyTorch module for the shapes of its inputs.

Products with constant weights become `nn.Linear` and convolutions `nn.Conv2d`, so every rung finds its layers. Axes of
variable size are options of the workload, such as `batch`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from redline.errors import WorkloadError
from redline.ladder.workload import Inputs, Workload
from redline.ladder.workload_prefixes import WorkloadPrefix, register_prefix
from redline.ladder.workloads.images import random_images
from redline.ladder.workloads.onnx_operators import OPERATORS
from redline.ladder.workloads.optional import import_for

# Attributes that are ignored, because they concern an output that is not computed, or the precision of a sum.
_UNUSED = ("storage_order", "stash_type", "training_mode", "momentum")
# The default sizes of variable axes, by position: batch, channels or sequence length, height, width.
_SIZES = (1, 64, 224, 224)


class _Apply(nn.Module):
    """A module that runs an ONNX operator for which torch has no layer."""

    def __init__(self, function: Callable[..., Any], attributes: Mapping[str, Any]) -> None:
        super().__init__()
        self.function, self.attributes = function, attributes

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs, **self.attributes)


class Conversion:
    """Builds a `torch.fx` graph node by node, and runs each node on an example input to determine all shapes."""

    def __init__(self, model: Any, example: dict[str, Tensor]) -> None:
        import onnx.reference

        self.onnx, self.opset = onnx, model.opset_import
        self.root, self.graph = nn.Module(), fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        # What each name in the ONNX graph stands for: a node of the new graph, or a constant.
        self.names: dict[str, Any] = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
        for name, tensor in example.items():
            self.names[name] = self.graph.placeholder(_identifier(name))
            self.values[self.names[name]] = tensor
        for node in model.graph.node:
            self._convert(node)
        outputs = [self._operand(self.names[item.name]) for item in model.graph.output]
        self.graph.output(tuple(outputs) if len(outputs) > 1 else outputs[0])

    def module(self) -> nn.Module:
        return fx.GraphModule(self.root, self.graph)

    def _convert(self, node: Any) -> None:
        inputs: list[Any] = [self.names[name] if name else None for name in node.input]
        attributes = {a.name: self._attribute(a) for a in node.attribute if a.name not in _UNUSED}
        if node.op_type == "Shape":
            first = self.values[inputs[0]] if isinstance(inputs[0], fx.Node) else inputs[0]
            size = np.array(first.shape, np.int64)
            self.names[node.output[0]] = size[slice(attributes.get("start"), attributes.get("end"))]
            return
        if not any(isinstance(value, fx.Node) for value in inputs):
            # ONNX's reference implementation does not support every case of some operators, such as GatherElements.
            with suppress(ValueError, NotImplementedError, RuntimeError):
                evaluator = self.onnx.reference.ReferenceEvaluator(self._alone(node))
                results = evaluator.run(None, dict(zip(node.input, inputs, strict=True)))
                self.names.update(zip(node.output, map(np.asarray, results), strict=False))
                return
        operator = OPERATORS.get(node.op_type)
        if operator is None or node.domain not in ("", "ai.onnx"):
            raise WorkloadError(f"the ONNX operator {node.op_type!r} is not supported (node {node.name!r}).")
        if attributes.pop("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            raise WorkloadError(f"auto_pad of the ONNX node {node.name!r} is not supported: export it with pads.")
        made = self._layer(node, inputs, attributes)
        if made is None:
            args = [self._static(v) if i in operator.static else self._operand(v) for i, v in enumerate(inputs)]
            made = self._call(node, _Apply(operator.function, attributes), args)
        if len([name for name in node.output if name]) == 1:
            self.names[node.output[0]] = made
            return
        for index, name in enumerate(node.output):
            self.names[name] = self._emit(self.graph.call_function(getitem, (made, index)))

    def _layer(self, node: Any, inputs: list[Any], attributes: dict[str, Any]) -> fx.Node | None:
        """Returns a call of a layer of `torch.nn`, or None if there is none for this node."""
        weights = [None if value is None else _tensor(value) for value in inputs[1:] if not isinstance(value, fx.Node)]
        if len(weights) < len(inputs) - 1 or not weights or weights[0] is None:
            return None
        weight, bias = weights[0], weights[1] if len(weights) > 1 else None
        layer: Any = None
        if node.op_type in ("MatMul", "Gemm") and weight.ndim == 2:
            plain = attributes.get("alpha", 1) == attributes.get("beta", 1) == 1 and not attributes.get("transA")
            if plain and (bias is None or bias.ndim == 1):
                weight = weight if attributes.get("transB") else weight.T
                layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
        elif node.op_type == "Conv":
            rank, pads = weight.ndim - 2, list(attributes.get("pads", ()))
            if pads[:rank] == pads[rank:]:
                kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
                group = attributes.get("group", 1)
                options: dict[str, Any] = {"stride": attributes.get("strides"), "dilation": attributes.get("dilations")}
                options = {name: tuple(value) for name, value in options.items() if value}
                sizes: tuple[Any, ...] = (weight.shape[1] * group, weight.shape[0], tuple(weight.shape[2:]))
                padding = tuple(pads[:rank]) or 0
                layer = kind(*sizes, padding=padding, groups=group, bias=bias is not None, **options)
        elif node.op_type == "BatchNormalization" and len(weights) == 4:
            kind = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[self.values[inputs[0]].ndim]
            layer = kind(len(weight), eps=attributes.get("epsilon", 1e-5))
            layer.running_mean, layer.running_var = weights[2], weights[3]
        if layer is None:
            return None
        layer.weight = nn.Parameter(weight.contiguous())
        layer.bias = nn.Parameter(bias) if bias is not None else None
        return self._call(node, layer.eval(), inputs[:1])

    def _call(self, node: Any, module: nn.Module, args: Sequence[Any]) -> fx.Node:
        name = _identifier(node.name or node.op_type)
        name = name if not hasattr(self.root, name) else f"{name}_{len(self.values)}"
        self.root.add_module(name, module)
        return self._emit(self.graph.call_module(name, tuple(args)))

    def _emit(self, node: fx.Node) -> fx.Node:
        args, kwargs = map_arg((node.args, node.kwargs), lambda one: self.values[one])
        target: Any = self.root.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        with torch.no_grad():
            self.values[node] = target(*args, **kwargs)
        return node

    def _operand(self, value: Any) -> Any:
        """Returns the graph node of a value; a constant is registered as a buffer."""
        if value is None or isinstance(value, fx.Node):
            return value
        tensor = _tensor(value)
        name = f"constant_{len(self.values)}"
        self.root.register_buffer(name, tensor)
        node = self.graph.get_attr(name)
        self.values[node] = tensor
        return node

    def _static(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            raise WorkloadError("a shape in the ONNX graph depends on values of the input, which is not supported.")
        return None if value is None or not np.size(value) else value.tolist()

    def _attribute(self, attribute: Any) -> Any:
        value = self.onnx.helper.get_attribute_value(attribute)
        if attribute.name == "to":
            return _tensor(np.zeros(0, self.onnx.helper.tensor_dtype_to_np_dtype(value))).dtype
        return (
            value.decode() if isinstance(value, bytes) else list(value) if isinstance(value, (list, tuple)) else value
        )

    def _alone(self, node: Any) -> Any:
        make = self.onnx.helper.make_empty_tensor_value_info
        graph = self.onnx.helper.make_graph(
            [node], "one", [make(n) for n in node.input], [make(n) for n in node.output]
        )
        return self.onnx.helper.make_model(graph, opset_imports=self.opset)


def _identifier(name: str) -> str:
    cleaned = "".join(letter if letter.isalnum() else "_" for letter in name).strip("_")
    return cleaned if cleaned.isidentifier() else f"n_{cleaned}"


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array)).to(torch.get_default_device())


def _find_function(path: str) -> Callable[..., Workload]:
    onnx: Any = import_for(path, "onnx")
    if not Path(path).is_file():
        raise WorkloadError(f"there is no file {path!r}.")
    try:
        head = onnx.load(path, load_external_data=False)
    except Exception as error:
        raise WorkloadError(f"{path!r} is not an ONNX file ({type(error).__name__}).") from error
    weights = {tensor.name for tensor in head.graph.initializer}
    axes: dict[str, list[int | str]] = {}
    dtypes: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for item in head.graph.input:
        if item.name in weights:
            continue
        kind = item.type.tensor_type
        dtypes[item.name] = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        axes[item.name] = [_axis(item.name, place, dim) for place, dim in enumerate(kind.shape.dim)]
        for place, axis in enumerate(axes[item.name]):
            if isinstance(axis, str):
                sizes.setdefault(axis, _SIZES[min(place, 3)])
    rows = {tensor.name: tensor.dims[0] for tensor in head.graph.initializer if len(tensor.dims) == 2}
    # For each input that indexes an embedding table: the number of embeddings in the table.
    counts = {n.input[1]: rows[n.input[0]] for n in head.graph.node if n.op_type == "Gather" and n.input[0] in rows}

    def model(**options: int) -> Workload:
        chosen = {**sizes, **options}

        def inputs(seed: int) -> Inputs:
            made = {}
            for name, shape in axes.items():
                size = tuple(chosen[axis] if isinstance(axis, str) else axis for axis in shape)
                made[_identifier(name)] = _random(
                    name, size, _tensor(np.zeros(0, dtypes[name])).dtype, counts.get(name, 2)
                )
            return made

        def build() -> nn.Module:
            example = dict(zip(axes, inputs(0).values(), strict=True))
            return Conversion(onnx.load(path), example).module()

        batch = next((size for shape in axes.values() for size in [chosen.get(str(shape[0]), shape[0])] if shape), 1)
        return Workload(build, inputs, items=int(batch), unit="sample", name=Path(path).name)

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=size) for name, size in sizes.items()]
    model.__signature__ = inspect.Signature(parameters)  # pyrefly: ignore[missing-attribute]
    return model


def _axis(name: str, place: int, dim: Any) -> int | str:
    """Returns the size of an axis, or its name if the size is variable."""
    if dim.HasField("dim_value"):
        return dim.dim_value
    return _identifier(dim.dim_param or ("batch" if place == 0 else f"{name}_{place}"))


def _random(name: str, size: tuple[int, ...], dtype: torch.dtype, embeddings: int) -> Tensor:
    if "mask" in name or dtype is torch.bool:
        return torch.ones(size, dtype=dtype)
    if not dtype.is_floating_point:
        return torch.randint(embeddings, size, dtype=dtype)
    if len(size) == 4 and size[1] in (1, 3):
        return random_images(size[0], (size[2], size[3]), size[1]).to(dtype)
    return torch.randn(size, dtype=dtype)


register_prefix(WorkloadPrefix(".onnx", _find_function, ("model.onnx",)))
