"""The explicit, ordered list of all rungs. The order here is the order of rungs in a plan."""

from redline.errors import RungError
from redline.ladder.rung import Rung
from redline.ladder.rungs.align import Align
from redline.ladder.rungs.autocast import Autocast
from redline.ladder.rungs.bf16 import Bf16
from redline.ladder.rungs.channels_last import ChannelsLast
from redline.ladder.rungs.checkpoint import Checkpoint
from redline.ladder.rungs.compile import Compile
from redline.ladder.rungs.compress_activations import CompressActivations
from redline.ladder.rungs.cuda_graph import CudaGraph
from redline.ladder.rungs.cudnn_benchmark import CudnnBenchmark
from redline.ladder.rungs.fold_batchnorm import FoldBatchnorm
from redline.ladder.rungs.fp8 import Fp8
from redline.ladder.rungs.fp16 import Fp16
from redline.ladder.rungs.fp32_attention import Fp32Attention
from redline.ladder.rungs.fused_ops import FusedOps
from redline.ladder.rungs.fused_optimizer import FusedOptimizer
from redline.ladder.rungs.grad_scaler import GradScaler
from redline.ladder.rungs.int4 import Int4
from redline.ladder.rungs.int8 import Int8
from redline.ladder.rungs.keep_memory import KeepMemory
from redline.ladder.rungs.onnxruntime import Onnxruntime
from redline.ladder.rungs.openvino import Openvino
from redline.ladder.rungs.sdpa import Sdpa
from redline.ladder.rungs.streams import Streams
from redline.ladder.rungs.tensorrt import Tensorrt
from redline.ladder.rungs.tf32 import Tf32
from redline.ladder.rungs.threads import Threads

_ALL: tuple[type[Rung], ...] = (
    FoldBatchnorm,
    FusedOps,
    Sdpa,
    FusedOptimizer,
    Checkpoint,
    CompressActivations,
    Bf16,
    Fp16,
    Autocast,
    Fp32Attention,
    GradScaler,
    Int8,
    Fp8,
    Int4,
    ChannelsLast,
    Align,
    Tf32,
    CudnnBenchmark,
    KeepMemory,
    Threads,
    Compile,
    Onnxruntime,
    Openvino,
    Tensorrt,
    CudaGraph,
    Streams,
)

RUNGS: dict[str, type[Rung]] = {rung.name: rung for rung in _ALL}


def find_rung(name: str) -> type[Rung]:
    """Returns the rung with this name; raises `RungError` if there is none."""
    if name not in RUNGS:
        raise RungError(f"unknown rung {name!r}: choose from {', '.join(RUNGS)}.")
    return RUNGS[name]
