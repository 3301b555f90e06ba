"""fp32_attention: computes attention scores and softmax in fp32 while the rest of the model runs in fp16 or bf16.

The product of queries and keys is usually the first to exceed the range of fp16 (65,504), and it is the most sensitive
to the 8 mantissa bits of bf16, because the softmax exponentiates the rounding error. Query, key and value keep their
dtype; only the values computed from them are fp32.
"""

from dataclasses import dataclass

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.rewrites.attention import observe
from redline.ladder.rewrites.attention_rewrite import lift_to_fp32
from redline.ladder.rewrites.attention_switch import Rewriting
from redline.ladder.rung import Rung, Stage
from redline.machine.machine import Machine


@dataclass(frozen=True)
class Fp32Attention(Rung):
    name = "fp32_attention"
    stage = Stage.PRECISION
    summary = "attention scores and softmax in fp32 under fp16 or bf16"

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if job is None:
            return ""
        if job.precision not in ("fp16", "bf16"):
            return f"the model computes in {job.precision}; the rung applies to fp16 and bf16 only"
        if not job.samples:
            return "it needs sample inputs to find attention: pass samples="
        seen = observe(job)
        if not seen.fused and not seen.handwritten:
            return "no attention found: no scaled_dot_product_attention and no softmax between two matrix products"
        return ""

    def apply(self, job: Job) -> Job:
        rewriting = lift_to_fp32(job.model, observe(job), job.training)
        if not rewriting.done:
            raise RungError(f"fp32_attention: no attention module could be rewritten ({rewriting.reasons}).")
        return job.with_evidence(self.name, rewriting)

    def proof(self, job: Job) -> str:
        rewriting: Rewriting = job.evidence[self.name]
        if not rewriting.done:
            return ""
        left = f"; {len(rewriting.left)} unchanged: {rewriting.reasons}" if rewriting.left else ""
        return f"fp32 scores in {len(rewriting.done)} attention modules ({rewriting.examples}){left}"
