"""Measurements as a climb would write them, made from a seed: H200-like, CPU-like and a training climb."""

from dataclasses import replace

import numpy as np

from redline.ladder.gate import Score
from redline.ladder.measurement import Measurement

H200 = {
    "device": "cuda:0",
    "name": "NVIDIA H200",
    "cores": 16,
    "host_bytes": 128 * 2**30,
    "device_bytes": 139 * 2**30,
    "features": ["tensor cores"],
    "hardware_dtypes": ["fp32", "fp16", "int8", "tf32", "bf16", "fp8"],
    "attention_kernels": ["math", "efficient", "flash", "cudnn"],
    "versions": {"torch": "2.11.0+cu128", "triton": "3.6.0", "torchao": "0.16.0", "numpy": "2.3.1"},
    "driver": "570.86.15",
    "cuda": "12.8",
    "capability": [9, 0],
    "python": "3.12.3",
    "system": "Linux x86_64",
    "device_count": 1,
    "ceilings": {
        "bytes_per_s": 4.1e12,
        "matmul_flops_per_s": {
            "fp32": 5.1e13,
            "tf32": 3.9e14,
            "bf16": 7.4e14,
            "fp16": 7.3e14,
            "int8": 1.4e15,
            "fp8": 1.36e15,
        },
        "convolution_flops_per_s": {"fp32": 4.7e13, "bf16": 5.9e14, "fp16": 5.8e14},
    },
    "fingerprint": "5d1c0f2b9a77",
}
CPU = {
    "device": "cpu",
    "name": "Neoverse-N1",
    "cores": 2,
    "host_bytes": 24 * 2**30,
    "device_bytes": 24 * 2**30,
    "features": ["asimd", "asimddp", "asimdhp"],
    "hardware_dtypes": ["fp32", "fp16", "int8"],
    "attention_kernels": ["flash", "math"],
    "versions": {"torch": "2.13.0+cpu", "onnxruntime": "1.31.1", "numpy": "2.4.6"},
    "driver": "",
    "cuda": "",
    "capability": [0, 0],
    "python": "3.11.7",
    "system": "Linux aarch64",
    "device_count": 1,
    "ceilings": {
        "bytes_per_s": 6.1e10,
        "matmul_flops_per_s": {"fp32": 7.3e10, "bf16": 2.5e8, "fp16": 2.2e8, "int8": 4.8e9},
        "convolution_flops_per_s": {"fp32": 5.6e10, "bf16": 2.6e8, "fp16": 9.3e10},
    },
    "fingerprint": "2ad664aad0b0",
}


class Climber:
    """Writes down a climb step by step: every time is what was asked for, with noise and a slow drift."""

    def __init__(self, machine, workload, base_s, flops, least_bytes, gates, shapes=("",), **common):
        self.rng = np.random.default_rng(7)
        self.common = {"machine": machine, "workload": workload, "redline": "0.1.0", **common}
        self.base_s, self.shapes, self.gates = base_s, shapes, gates
        self.flops = {s: flops * (1 + 3 * i) for i, s in enumerate(shapes)}
        self.least_bytes = {s: least_bytes * (1 + 2 * i) for i, s in enumerate(shapes)}
        self.found: list[Measurement] = []
        self.clock = 1_785_000_000.0
        self.speeds = {"eager": 1.0}

    def _samples(self, speed, role="", count=40):
        # One race is one moment; trials are minutes apart.
        drift = 1.0 if role == "final" else 1 + 0.01 * np.sin(len(self.found))
        values = {}
        for index, shape in enumerate(self.shapes):
            base = self.base_s * (1 + 2.6 * index) / speed * drift
            noise = self.rng.lognormal(0, 0.012, count) * (1 + 0.15 * (self.rng.random(count) > 0.95))
            values[shape] = tuple(map(float, base * noise))
        return values

    def add(
        self,
        role,
        verdict,
        reason,
        plan,
        rung="",
        speed=None,
        against="eager",
        scores=(),
        gib=0.0,
        setup=0.0,
        **extra,
    ):
        self.clock += 20
        if speed is not None:
            self.speeds.setdefault(plan, speed)
            extra = {
                "samples": self._samples(speed, role),
                "against": against if role != "baseline" else "",
                "against_samples": self._samples(self.speeds[against], role) if role != "baseline" else {},
                "setup_s": {s: setup * (1 + 0.4 * i) for i, s in enumerate(self.shapes)},
                "peak_bytes": int(gib * 2**30),
                "weight_bytes": int(gib * 2**30 * 0.6),
                "flops": self.flops,
                "least_bytes": {
                    s: b / (2 if extra.get("precision", "fp32") in ("bf16", "fp16") else 1)
                    for s, b in self.least_bytes.items()
                },
                "warmups": 5,
                "items": dict.fromkeys(self.shapes, self.common.get("_items", 1.0)),
                **extra,
            }
        judged = tuple(
            Score(metric, value, limit, better, bool(value <= limit if better == "lower" else value >= limit))
            for value, (metric, limit, better) in zip(scores, self.gates, strict=False)
        )
        common = {key: value for key, value in self.common.items() if not key.startswith("_")}
        self.found.append(
            Measurement(
                plan=plan,
                rung=rung,
                role=role,
                verdict=verdict,
                reason=reason,
                scores=judged,
                created=self.clock,
                **common,
                **extra,
            )
        )


# The calls below read as a table: one measurement each.
# fmt: off
INFERENCE = (("relative_error", 0.02, "lower"), ("cosine", 0.999, "higher"))


def h200_climb(shapes: tuple[str, ...] = ("",), run: str = "8f2c1e") -> list[Measurement]:
    """A U-Net on an H200: 30 measurements, 4.9× at the end."""
    c = Climber(
        H200,
        "unet-880m",
        14.2e-3,
        4.1e11,
        3.6e9,
        INFERENCE,
        shapes,
        run=run,
        unit="frame",
        command="redline climb unet-880m --objective latency --budget 10m",
    )
    same = (1.2e-7, 0.9999999)
    half = (3.1e-3, 0.999995)
    c.add("baseline", "baseline", "the model as built", "eager", speed=1.0, scores=same, gib=4.1, setup=0.9)
    for mode, speed, setup, reason in (
        ("default", 1.37, 38.0, "1.37× over eager"),
        ("reduce-overhead", 1.52, 41.0, "1.52× over eager"),
        ("max-autotune", 1.66, 171.0, "1.66× over eager: the best mode of torch.compile"),
    ):
        plan = "compile" if mode == "default" else f"compile(mode={mode})"
        c.add("compile", "baseline", reason, plan, "compile", speed, scores=(4.0e-7, 0.9999999), gib=4.4,
              setup=setup)
    c.add("trial", "unavailable", "the model has no BatchNorm that follows a convolution", "fold_batchnorm",
          "fold_batchnorm")
    c.add("trial", "kept", "1.08× over eager, interval 1.07–1.09", "sdpa", "sdpa", 1.08, "eager",
          (3e-7, 0.9999999), 3.6, 1.2, proof={"sdpa": "16 attention blocks replaced; flash ran in 16 of 16"})
    c.add("trial", "kept", "2.31× over sdpa, interval 2.28–2.34", "sdpa + bf16", "bf16", 2.5, "sdpa", half,
          2.1, 1.6, precision="bf16",
          proof={"bf16": "879,412,484 weights converted to bf16, 0 left in fp32"})
    c.add("trial", "dropped", "1.01× over sdpa + bf16, interval 0.99–1.02: no difference beyond the noise",
          "sdpa + fp16", "fp16", 2.52, "sdpa + bf16", (9e-4, 0.9999993), 2.1, 1.6, precision="fp16")
    c.add("trial", "refused", "relative_error 0.083 is outside ≤ 0.02",
          "sdpa + bf16 + int8(scheme=dynamic)", "int8(scheme=dynamic)", scores=(8.3e-2, 0.9964),
          precision="int8")
    c.add("trial", "refused", "the output is not finite", "sdpa + bf16 + fp8", "fp8",
          scores=(float("nan"), float("nan")), precision="fp8")
    c.add("trial", "kept", "1.13× over sdpa + bf16, interval 1.11–1.14", "sdpa + bf16 + channels_last",
          "channels_last", 2.83, "sdpa + bf16", (3.2e-3, 0.999995), 2.1, 1.9, precision="bf16",
          proof={"channels_last": "142 convolutions run in channels_last"})
    c.add("trial", "unavailable", "every channel count is already a multiple of 8",
          "sdpa + bf16 + channels_last + align", "align")
    c.add("trial", "dropped",
          "1.00× over the last plan, interval 0.99–1.01: no difference beyond the noise",
          "sdpa + bf16 + channels_last + tf32", "tf32", 2.83, "sdpa + bf16 + channels_last",
          (3.2e-3, 0.999995), 2.1, 1.9, precision="bf16")
    c.add("trial", "kept", "1.04× over the last plan, interval 1.02–1.05",
          "sdpa + bf16 + channels_last + cudnn_benchmark", "cudnn_benchmark", 2.94,
          "sdpa + bf16 + channels_last", (3.2e-3, 0.999995), 2.2, 4.8, precision="bf16",
          proof={"cudnn_benchmark": "38 shapes autotuned"})
    full = "sdpa + bf16 + channels_last + cudnn_benchmark + compile(mode=max-autotune)"
    c.add("trial", "kept", "1.49× over the last plan, interval 1.47–1.51", full,
          "compile(mode=max-autotune)", 4.38, "sdpa + bf16 + channels_last + cudnn_benchmark",
          (3.6e-3, 0.999993), 2.3, 184.0, precision="bf16",
          proof={"compile": "1 graph, 0 breaks, 212 Triton kernels"})
    c.add("trial", "unavailable", 'onnxruntime is not installed: pip install "redline[onnx-gpu]"',
          "sdpa + bf16 + channels_last + onnxruntime", "onnxruntime")
    c.add("trial", "unavailable", 'torch-tensorrt is not installed: pip install "redline[tensorrt]"',
          "sdpa + bf16 + channels_last + tensorrt", "tensorrt")
    with_graph = full + " + cuda_graph"
    c.add("trial", "kept", "1.13× over the last plan, interval 1.12–1.15", with_graph, "cuda_graph", 4.95,
          full, (3.6e-3, 0.999993), 2.4, 185.0, precision="bf16", setup_cached=True,
          proof={"cuda_graph": "1 graph of 312 kernels, replayed 45 times"})
    c.add("trial", "unmeasured", "the budget was spent", with_graph + " + int8", "int8")
    c.add("trial", "failed", "ran out of memory: 142 GiB were asked for, 139 GiB are there",
          with_graph + " + streams", "streams")
    c.add("second look", "dropped", "0.97× over the final plan, interval 0.96–0.98",
          with_graph.replace("bf16", "bf16 + tf32"), "tf32", 4.8, with_graph, (3.6e-3, 0.999993), 2.4,
          186.0, precision="bf16")
    for rung, speed, verdict in (
        ("sdpa", 4.5, "kept"),
        ("bf16", 2.3, "kept"),
        ("channels_last", 4.2, "kept"),
        ("cudnn_benchmark", 4.94, "dropped"),
        ("compile", 3.1, "kept"),
        ("cuda_graph", 4.38, "kept"),
    ):
        reason = "still worth it" if verdict == "kept" else "makes no difference in the final plan"
        c.add("ablation", verdict, reason, f"{with_graph} without {rung}", rung, speed, with_graph, half,
              2.4, 100.0, precision="bf16")
    final = "sdpa + bf16 + channels_last + compile(mode=max-autotune) + cuda_graph"
    proof = {}
    for m in c.found:
        proof |= {k: v for k, v in m.proof.items() if k in final}
    c.add("final", "baseline", "raced against the final plan", "eager", "", 1.0, "eager", same, 4.1, 0.9,
          against_samples={})
    race = {"against_samples": c.found[-1].samples, "setup_cached": True}
    c.found[-1] = replace(c.found[-1], against="")
    c.add("final", "baseline", "raced against the final plan", "compile(mode=max-autotune)", "", 1.66,
          "eager", (4.0e-7, 0.9999999), 4.4, 12.0, **race)
    c.add("final", "kept", "4.94× over eager", final, "", 4.94, "eager", (3.6e-3, 0.999993), 2.35, 185.0,
          precision="bf16", proof=proof, notes=("the GPU's clocks were not locked",), **race)
    return c.found


def cpu_climb(run: str = "c0ffee") -> list[Measurement]:
    """A small CNN on two ARM cores: 15 measurements, 2.6× at the end."""
    c = Climber(
        CPU,
        "cnn",
        0.212,
        3.6e9,
        9.5e7,
        INFERENCE,
        run=run,
        unit="image",
        command="redline climb cnn",
        _items=8.0,
    )
    same = (2e-7, 0.9999999)
    c.add("baseline", "baseline", "the model as built", "eager", speed=1.0, scores=same, gib=0.41,
          setup=0.31)
    c.add("compile", "baseline", "1.21× over eager: the best mode of torch.compile", "compile", "compile",
          1.21, scores=same, gib=0.45, setup=24.0)
    c.add("compile", "failed", "mode=reduce-overhead needs a GPU", "compile(mode=reduce-overhead)",
          "compile")
    c.add("trial", "kept", "1.18× over eager", "fold_batchnorm", "fold_batchnorm", 1.18, "eager", same,
          0.40, 0.4, proof={"fold_batchnorm": "20 of 20 BatchNorms folded"})
    c.add("trial", "unavailable", "the model has no attention", "fold_batchnorm + sdpa", "sdpa")
    c.add("trial", "unavailable", "Neoverse-N1 emulates bf16: measured at 0.3% of the fp32 rate",
          "fold_batchnorm + bf16", "bf16")
    c.add("trial", "kept", "1.31× over fold_batchnorm", "fold_batchnorm + fp16", "fp16", 1.55,
          "fold_batchnorm", (6e-4, 0.9999998), 0.24, 0.5, precision="fp16",
          proof={"fp16": "11,173,962 weights converted to fp16, no overflow"})
    c.add("trial", "refused", "nothing happened: the proof is empty", "fold_batchnorm + fp16 + align",
          "align", scores=(6e-4, 0.9999998))
    c.add("trial", "kept", "1.22× over the last plan", "fold_batchnorm + fp16 + channels_last",
          "channels_last", 1.9, "fold_batchnorm + fp16", (6e-4, 0.9999998), 0.24, 0.6, precision="fp16",
          proof={"channels_last": "20 convolutions run in channels_last"})
    plan = "fold_batchnorm + fp16 + channels_last + compile"
    c.add("trial", "kept", "1.36× over the last plan", plan, "compile", 2.58,
          "fold_batchnorm + fp16 + channels_last", (7e-4, 0.9999998), 0.26, 31.0, precision="fp16",
          proof={"compile": "1 graph, 0 breaks"})
    c.add("trial", "failed", "ran past its time limit of 120 s", "fold_batchnorm + onnxruntime",
          "onnxruntime")
    for rung, speed in (("fold_batchnorm", 2.5), ("fp16", 1.6), ("channels_last", 2.1), ("compile", 1.9)):
        c.add("ablation", "kept", "still worth it", f"{plan} without {rung}", rung, speed, plan,
              (6e-4, 0.9999998), 0.25, 20.0, precision="fp16")
    c.add("final", "kept", "2.58× over eager", plan, "", 2.58, "eager", (7e-4, 0.9999998), 0.26, 31.0,
          precision="fp16",
          proof={"fold_batchnorm": "20 of 20 BatchNorms folded", "compile": "1 graph, 0 breaks"})
    return c.found


def training_climb() -> list[Measurement]:
    """A training step of a small GPT, for memory: tokens are the unit, loss and gradients the gates."""
    gates = (("loss_difference", 0.01, "lower"), ("gradient_difference", 0.05, "lower"))
    c = Climber(
        H200,
        "gpt-train",
        0.184,
        6.2e12,
        4.4e10,
        gates,
        run="7ea1",
        unit="token",
        _items=65_536.0,
        training=True,
        objective="memory",
        command="redline climb gpt-train --objective memory",
    )
    c.add("baseline", "baseline", "the model as built", "eager", speed=1.0, scores=(0.0, 0.0), gib=61.0,
          setup=2.0)
    c.add("compile", "baseline", "the best mode of torch.compile", "compile", "compile", 1.4,
          scores=(1e-5, 1e-4), gib=48.0, setup=60.0)
    c.add("trial", "kept", "41% less memory", "checkpoint", "checkpoint", 0.78, "eager", (0.0, 2e-6), 36.0,
          2.1, proof={"checkpoint": "12 blocks recomputed in the backward pass"})
    c.add("trial", "kept", "48% less memory", "checkpoint + bf16", "bf16", 1.9, "checkpoint",
          (1.2e-3, 1.4e-2), 18.6, 2.4, precision="bf16", proof={"bf16": "124,439,808 weights converted"})
    c.add("trial", "dropped", "memory unchanged", "checkpoint + bf16 + compile", "compile", 2.6,
          "checkpoint + bf16", (1.3e-3, 1.4e-2), 18.7, 71.0, precision="bf16")
    c.add("final", "kept", "70% less memory", "checkpoint + bf16", "", 1.9, "eager", (1.2e-3, 1.4e-2), 18.6,
          2.4, precision="bf16",
          proof={"checkpoint": "12 blocks recomputed", "bf16": "124,439,808 weights converted"})
    return c.found


def without_ceilings(measurements: list[Measurement]) -> list[Measurement]:
    return [replace(m, machine={**m.machine, "ceilings": None}) for m in measurements]
