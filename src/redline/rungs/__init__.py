"""The explicit, ordered list of rungs. The order here is the order in a plan."""

from redline.errors import RungError
from redline.rung import Rung
from redline.rungs.align import Align
from redline.rungs.autocast import Autocast
from redline.rungs.bf16 import Bf16
from redline.rungs.channels_last import ChannelsLast
from redline.rungs.checkpoint import Checkpoint
from redline.rungs.compile import Compile
from redline.rungs.compress_activations import CompressActivations
from redline.rungs.cuda_graph import CudaGraph
from redline.rungs.cudnn_benchmark import CudnnBenchmark
from redline.rungs.fold_batchnorm import FoldBatchnorm
from redline.rungs.fp8 import Fp8
from redline.rungs.fp16 import Fp16
from redline.rungs.fp32_attention import Fp32Attention
from redline.rungs.fused_ops import FusedOps
from redline.rungs.fused_optimizer import FusedOptimizer
from redline.rungs.grad_scaler import GradScaler
from redline.rungs.int8 import Int8
from redline.rungs.keep_memory import KeepMemory
from redline.rungs.onnxruntime import Onnxruntime
from redline.rungs.sdpa import Sdpa
from redline.rungs.streams import Streams
from redline.rungs.tensorrt import Tensorrt
from redline.rungs.tf32 import Tf32

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
    ChannelsLast,
    Align,
    Tf32,
    CudnnBenchmark,
    KeepMemory,
    Compile,
    Onnxruntime,
    Tensorrt,
    CudaGraph,
    Streams,
)

RUNGS: dict[str, type[Rung]] = {rung.name: rung for rung in _ALL}


def find_rung(name: str) -> type[Rung]:
    if name not in RUNGS:
        raise RungError(f"unknown rung {name!r}: choose from {', '.join(RUNGS)}.")
    return RUNGS[name]
