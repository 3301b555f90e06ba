"""fp32_attention: scores and softmax in fp32 while the rest of the model runs in fp16 or bf16.

The product of queries and keys is where fp16 overflows first (it ends at 65,504) and where bf16's eight bits
hurt most, because the softmax exponentiates the error. The inputs of the product stay as they are: only what
is computed from them is wider.
"""

from dataclasses import dataclass
from typing import ClassVar

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.rewrites.attention import observe
from redline.ladder.rewrites.attention_rewrite import Rewriting, lift_to_fp32
from redline.ladder.rung import Rung, Stage
from redline.machine.machine import Machine


@dataclass(frozen=True)
class Fp32Attention(Rung):
    name: ClassVar[str] = "fp32_attention"
    stage: ClassVar[Stage] = Stage.PRECISION
    summary: ClassVar[str] = "attention scores and softmax in fp32 under fp16 or bf16"

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if job is None:
            return ""
        if job.precision not in ("fp16", "bf16"):
            return f"the arithmetic is {job.precision}, so the scores are as wide already"
        if not job.samples:
            return "it finds attention by running a sample, and none was given (samples=)"
        seen = observe(job)
        if not seen.fused and not seen.handwritten:
            return "no attention was seen: no scaled_dot_product_attention, no softmax between two products"
        return ""

    def apply(self, job: Job) -> Job:
        rewriting = lift_to_fp32(job.model, observe(job), job.training)
        if not rewriting.done:
            raise RungError(f"fp32_attention: no attention could be rewritten ({rewriting.reasons}).")
        return job.with_evidence(self.name, rewriting)

    def proof(self, job: Job) -> str:
        rewriting: Rewriting = job.evidence[self.name]
        if not rewriting.done:
            return ""
        done = f"scores in fp32 in {len(rewriting.done)} attention modules ({', '.join(rewriting.done[:4])}"
        more = f" and {len(rewriting.done) - 4} more" if len(rewriting.done) > 4 else ""
        left = f"; {len(rewriting.left)} left: {rewriting.reasons}" if rewriting.left else ""
        return done + more + ")" + left
