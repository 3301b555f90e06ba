"""Which nodes of an ONNX graph are quantized."""

import pytest

from redline.ladder.rewrites.onnx_quantize import is_int8, normalized_linears

onnx = pytest.importorskip("onnx")


def test_operators_that_compute_in_int8() -> None:
    assert is_int8("QLinearConv") and is_int8("MatMulInteger")
    assert not is_int8("QuantizeLinear") and not is_int8("MatMul")


def test_linear_layers_that_read_a_sum_are_left_out() -> None:
    node = onnx.helper.make_node
    nodes = [
        node("LayerNormalization", ["x", "scale"], ["normed"]),
        node("Reshape", ["normed", "shape"], ["moved"]),
        node("MatMul", ["moved", "weight"], ["a"], name="after a norm"),
        node("Gemm", ["normed", "weight"], ["b"], name="a Gemm after a norm"),
        node("Add", ["a", "b"], ["sum"]),
        node("Transpose", ["sum"], ["turned"]),
        node("MatMul", ["turned", "weight"], ["c"], name="after a sum"),
        node("MatMul", ["x", "weight"], ["d"], name="of the graph's input"),
        node("MatMul", ["normed", "moved"], ["e"], name="of two activations"),
        node("Relu", ["normed"], ["f"], name="not linear"),
    ]
    weight = onnx.helper.make_tensor("weight", onnx.TensorProto.FLOAT, [1], [0.0])
    graph = onnx.helper.make_graph(nodes, "graph", [], [], [weight])
    assert normalized_linears(graph) == ["after a norm", "a Gemm after a norm"]
