"""Quantizes an ONNX model to int8: weights per channel, inputs at each call (dynamic) or calibrated (static).

Unlike torchao, this quantizes convolutions, which account for most of the gain of int8 on a CPU.
"""

import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.errors import RungError
from redline.machine.cpu_features import cpu_flags
from redline.machine.quiet import quiet

# "entropy" is left out, because in ONNX Runtime its histogram has only as many bins as int8 levels, so it never clips.
METHODS = ("minmax", "percentile")
# Convolutions are omitted: ONNX Runtime has no kernel for dynamic int8 convolutions with signed weights.
_DYNAMIC_OPERATORS = ["MatMul", "Gemm", "Attention", "LSTM"]
_INT8_OPERATORS = {
    "ConvInteger", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat",
    "QAttention", "QGemm",
}  # fmt: skip
# Operators that move elements without changing them. torch.roll is exported as two slices and a concatenation.
_MOVES = {"Reshape", "Transpose", "Slice", "Concat", "Squeeze", "Unsqueeze", "Flatten"}


def is_int8(operator: str) -> bool:
    """Returns whether an operator computes in int8; operators that only convert do not count."""
    return operator.startswith("QLinear") or operator in _INT8_OPERATORS


def quantize_dynamic(source: Path, target: Path, external: bool) -> None:
    with quiet():
        from onnxruntime import quantization

        quantization.quantize_dynamic(
            _prepared(source, external),
            target,
            op_types_to_quantize=_DYNAMIC_OPERATORS,
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
            use_external_data_format=external,
        )


def quantize_static(
    source: Path,
    target: Path,
    batches: Iterable[dict[str, Any]],
    method: str,
    percentile: float,
    symmetric: bool,
    external: bool,
    choose: Callable[[Any], list[str]] | None = None,
) -> None:
    """Quantizes the fp32 model `source` to `target`, with ranges calibrated on `batches` (arrays by input name).

    `symmetric` also quantizes inputs symmetrically, as TensorRT requires. `external` stores weights in a separate file.
    `choose` returns the names of the nodes to quantize, given the graph; by default all supported nodes are quantized.
    """
    # ONNX Runtime has int8 convolution kernels for signed inputs on Arm only; elsewhere they would run in float.
    signed = symmetric or platform.machine() in ("aarch64", "arm64")
    with quiet():
        import onnx
        from onnxruntime import quantization

        prepared = _prepared(source, external)
        chosen = choose(onnx.load(str(prepared), load_external_data=False).graph) if choose is not None else None

        class Reader(quantization.CalibrationDataReader):
            def __init__(self) -> None:
                self.rest = iter(batches)

            def get_next(self) -> dict[str, Any] | None:  # pyrefly: ignore[bad-override]
                return next(self.rest, None)

        methods = quantization.CalibrationMethod
        quantization.quantize_static(
            prepared,
            target,
            Reader(),
            nodes_to_quantize=chosen,
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QInt8 if signed else quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            # Without VNNI two products are added in 16 bits, which overflows with 8-bit weights.
            reduce_range=not signed and not cpu_flags() & {"avx512_vnni", "avx_vnni"},
            calibrate_method=methods.MinMax if method == "minmax" else methods.Percentile,
            use_external_data_format=external,
            extra_options={
                "ActivationSymmetric": symmetric,
                "CalibTensorRangeSymmetric": symmetric,
                "CalibPercentile": percentile,
            },
        )


def normalized_linears(graph: Any) -> list[str]:
    """Returns the linear layers whose input is not a sum, such as that of a residual connection.

    In such a sum a few values are so much larger than the rest that 256 levels cannot represent both.
    """
    weights = {weight.name for weight in graph.initializer}
    made_by = {output: node for node in graph.node for output in node.output}
    found = []
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gemm") or not weights & set(node.input):
            continue
        source = made_by.get(node.input[0])
        while source is not None and source.op_type in _MOVES:
            source = made_by.get(source.input[0])
        if source is not None and source.op_type != "Add":
            found.append(node.name)
    return found


def _prepared(source: Path, external: bool) -> Path:
    """Infers shapes and folds batch norms; otherwise much of the graph would stay in float."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = source.with_name("prepared.onnx")
    quant_pre_process(source, prepared, save_as_external_data=external)
    return prepared


def calibration_batches(samples: Iterable[Sequence[Tensor]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns each sample as arrays by input name; raises if a value is not finite."""
    batches = []
    for tensors in samples:
        for tensor in tensors:
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise RungError("onnxruntime: calibration failed: a sample contains NaN or infinity.")
        batches.append({n: t.detach().cpu().contiguous().numpy() for n, t in zip(names, tensors, strict=True)})
    return batches
