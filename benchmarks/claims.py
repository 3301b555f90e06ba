"""Writes docs/claims.md: every figure that the guides claim, its meaning, and what Redline measured.

    python benchmarks/claims.py            writes the page
    python benchmarks/claims.py --check    exits with 1 if the page is stale

The claims are in claims.toml. A claim with a measurement names a result file, the kind of figure and its source: either
`plan` (a one-line plan, or baseline, compile, final) and `against`, or `rung` (the effect of that rung on the plan it
was tried on). For result files of other benchmarks it names the fields of the row (`row`), the `figure`, and optionally
a row to divide by (`over`). All figures are computed from the files. A claim that a test checks names it (`test`), and
one that cannot be measured has the reason (`blocked`). A result file that does not exist yet reads "not measured yet".
"""

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from claim_figures import FIGURES, SUMMARIES, compared, same_sizes, times

from redline import RedlineError
from redline.files.atomic import write_text
from redline.ladder.measurement import Measurement, latest_run, load_measurements
from redline.ladder.plan import Plan, brief, parse_rung
from redline.ladder.statistics import median, ratio_interval

ROOT = Path(__file__).resolve().parents[1]
CLAIMS = Path("benchmarks/claims.toml")
PAGE = Path("docs/claims.md")
NOT_YET = "not measured yet"
BLOCKED = "cannot be measured here"
ROLES = ("baseline", "compile", "final")
# The verdicts of rows that have figures.
MEASURED = ("baseline", "kept", "dropped")


@dataclass(frozen=True)
class Claim:
    guide: int
    topic: str
    quote: str
    meaning: str
    result: str = ""
    # The workload, if the file contains several.
    workload: str = ""
    kind: str = ""
    plan: str = ""
    against: str = ""
    rung: str = ""
    dtype: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)
    over: Mapping[str, Any] = field(default_factory=dict)
    figure: str = ""
    # A remark on the comparison of the measured with the claimed figure.
    note: str = ""
    # A test that checks the claim, as FILE::FUNCTION, in place of a result.
    test: str = ""
    # Why it cannot be measured.
    blocked: str = ""


@dataclass(frozen=True)
class Source:
    """The measurement that answers a claim, and the measurement that it is compared with."""

    claim: Claim
    new: Measurement
    old: Measurement | None

    @property
    def baseline(self) -> Measurement:
        if self.old is None:
            raise RedlineError(f"claim {self.claim.quote!r}: kind {self.claim.kind!r} needs `against` or `rung`.")
        return self.old

    def arms(self) -> tuple[Sequence[float], Sequence[float]]:
        """Returns the old and new samples of the first shape."""
        shape = self.new.shapes[0]
        if self.paired:
            return self.new.against_samples[shape], self.new.samples[shape]
        return self.baseline.samples[shape], self.new.samples[shape]

    @property
    def paired(self) -> bool:
        """Whether the new row contains interleaved samples of the old plan."""
        return self.old is not None and self.new.against == self.old.plan and bool(self.new.against_samples)

    @property
    def interleaved(self) -> bool:
        """Whether both plans were timed in turns; a bench interleaves all of its plans."""
        together = (self.new.role, self.new.command) == ("bench", self.baseline.command)
        return self.paired or together


def _speedup(source: Source) -> str:
    if source.interleaved:
        return times(ratio_interval([source.arms()]))
    old, new = source.arms()
    return f"{median(old) / median(new):.2f}× (separate runs)"


def _saved_ms(source: Source) -> str:
    old, new = source.arms()
    saved = (median(old) - median(new)) * 1e3
    return f"{abs(saved):.3g} ms {'less' if saved >= 0 else 'more'}"


def _memory_saving(source: Source) -> str:
    old, new = source.baseline.peak_bytes, source.new.peak_bytes
    if not old or not new:
        return NOT_YET
    direction = "less" if new <= old else "more"
    return f"{abs(1 - new / old):.1%} {direction} ({old / 2**30:.2f} → {new / 2**30:.2f} GiB)"


def _peak_gib(source: Source) -> str:
    return f"{source.new.peak_bytes / 2**30:.2f} GiB" if source.new.peak_bytes else NOT_YET


def _weights_mib(source: Source) -> str:
    return f"{source.new.weight_bytes / 2**20:,.0f} MiB of weights"


def _beside_weights_mib(source: Source) -> str:
    if not source.new.peak_bytes:
        return NOT_YET
    return f"{(source.new.peak_bytes - source.new.weight_bytes) / 2**20:,.0f} MiB beside the weights"


def _median_ms(source: Source) -> str:
    return f"{source.new.median_s() * 1e3:.3g} ms"


def _throughput(source: Source) -> str:
    rate = source.new.throughput()
    return f"{rate:,.0f} {source.new.unit}s/s" if rate >= 1000 else f"{rate:.4g} {source.new.unit}s/s"


def _ceilings(source: Source) -> Mapping[str, Any]:
    found = source.new.machine.get("ceilings")
    if not found:
        raise RedlineError(f"{source.claim.result}: the machine was recorded without its ceilings.")
    return found


def _matmul_tflops(source: Source) -> str:
    return f"{_ceilings(source)['matmul_flops_per_s'][source.claim.dtype] / 1e12:.0f} TFLOP/s"


def _copy_tb_per_s(source: Source) -> str:
    return f"{_ceilings(source)['bytes_per_s'] / 1e12:.2f} TB/s"


KINDS: dict[str, Callable[[Source], str]] = {
    "speedup": _speedup,
    "saved_ms": _saved_ms,
    "median_ms": _median_ms,
    "fps": _throughput,
    "throughput": _throughput,
    "peak_gib": _peak_gib,
    "memory_saving": _memory_saving,
    "weights_mib": _weights_mib,
    "beside_weights_mib": _beside_weights_mib,
    "matmul_tflops": _matmul_tflops,
    "copy_tb_per_s": _copy_tb_per_s,
}


def _measured_row(claim: Claim, root: Path, link: str) -> str:
    lines = (root / claim.result).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line]
    found = [row for row in rows if _matches(row, claim.row)]
    if not found:
        return f"{NOT_YET} ({link} has no such row)"
    new = found[0]
    note = f"; {claim.note}" if claim.note else ""
    if claim.figure in SUMMARIES:
        pairs = [(row, old) for row in found for old in rows if _matches(old, claim.over) and same_sizes(row, old)]
        return f"**{SUMMARIES[claim.figure](found, pairs)}** on {new['gpu']}{note} ({link})"
    if claim.figure == "busy_share" and new.get("frame_ms"):
        # The device time of a frame, divided by the time between frames.
        new = {**new, "busy_share": new["model_ms"] / new["frame_ms"]}
    if claim.figure not in new:
        return f"failed: {new.get('failure', 'no figure')} ({link})"
    said = FIGURES[claim.figure](new[claim.figure])
    if claim.over:
        old = next((row for row in rows if _matches(row, claim.over)), None)
        if old is None or claim.figure not in old:
            return f"{NOT_YET} ({link} has nothing to compare with)"
        said = compared(claim.figure, new[claim.figure], old[claim.figure])
    return f"**{said}** on {new['gpu']}{note} ({link})"


def _matches(row: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(_field(row, name) == value for name, value in wanted.items())


def _field(row: Mapping[str, Any], name: str) -> Any:
    """Returns a field of a row; `arm.name` is the field `name` of the field `arm`."""
    outer, _, inner = name.partition(".")
    return row.get(outer, {}).get(inner) if inner else row.get(outer)


def load_claims(path: Path) -> tuple[dict[int, Mapping[str, Any]], list[Claim]]:
    """Returns the guides by number and the claims in the file's order; raises for unknown fields."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    guides = {guide["number"]: guide for guide in document["guide"]}
    known = {item.name for item in fields(Claim)}
    claims = []
    for entry in document["claim"]:
        unknown = [key for key in entry if key not in known]
        if unknown:
            raise RedlineError(f"claim {entry.get('quote')!r} has an unknown field {unknown[0]!r}.")
        claim = Claim(**entry)
        _check(claim, guides)
        claims.append(claim)
    return guides, claims


def _check(claim: Claim, guides: Mapping[int, Any]) -> None:
    problem = ""
    if claim.guide not in guides:
        problem = f"there is no guide {claim.guide}"
    elif claim.blocked or claim.test:
        if claim.result or (claim.blocked and claim.test):
            problem = "name one of result, test and blocked"
    elif claim.row:
        if not claim.result or claim.kind or claim.figure not in (*FIGURES, *SUMMARIES):
            names = ", ".join((*FIGURES, *SUMMARIES))
            problem = f"a row needs a result, no kind, and a figure from {names}"
    elif bool(claim.result) != bool(claim.kind):
        problem = "result and kind belong together"
    elif claim.kind and claim.kind not in KINDS:
        problem = f"unknown kind {claim.kind!r} (choose from {', '.join(KINDS)})"
    elif claim.kind and bool(claim.plan) == bool(claim.rung):
        problem = "name either the plan or the rung that was measured"
    if problem:
        raise RedlineError(f"claim {claim.quote!r}: {problem}.")
    for plan in (claim.plan, claim.against):
        if plan and plan not in ROLES:
            Plan.parse(plan)
    if claim.rung:
        parse_rung(claim.rung)


def measured(claim: Claim, root: Path) -> str:
    """Returns the figure with its machine and result file, or the reason why there is none."""
    if claim.blocked:
        return f"{BLOCKED}: {claim.blocked}"
    if claim.test:
        return _tested(claim, root)
    if not claim.result or not (root / claim.result).is_file():
        return NOT_YET
    link = f"[{Path(claim.result).name}]({os.path.relpath(claim.result, PAGE.parent)})"
    if claim.row:
        return _measured_row(claim, root, link)
    rows = _rows(claim, root)
    new = _find_rung(rows, claim.rung) if claim.rung else _find_plan(rows, claim.plan)
    if new is None:
        return f"{NOT_YET} ({link} has no `{claim.rung or claim.plan}`)"
    if new.verdict == "unmeasured":
        return f"{NOT_YET} ({link} had no time for `{claim.rung or claim.plan}`)"
    if new.verdict not in MEASURED or not new.samples or (new.scores and not new.passed):
        return f"{new.verdict}: {new.reason or 'outside its gate'} ({link})"
    against = new.against if claim.rung else claim.against
    # The plan that a rung was tried against is in a row before it; a later row of the same plan is of the final race.
    earlier = rows[: rows.index(new)] if claim.rung else rows
    old = (_find_plan(earlier, against) or _find_plan(rows, against)) if against else None
    if against and old is None:
        return f"{NOT_YET} ({link} has no `{against}`)"
    figure = KINDS[claim.kind](Source(claim, new, old))
    if figure == NOT_YET:
        return f"{NOT_YET} ({link} has no peak of memory)"
    note = f"; {claim.note}" if claim.note else ""
    return f"**{figure}** with `{brief(new.plan)}` on {new.machine.get('name', 'an unnamed machine')}{note} ({link})"


def _tested(claim: Claim, root: Path) -> str:
    file, _, name = claim.test.partition("::")
    link = f"[{name}]({os.path.relpath(file, PAGE.parent)})"
    if not (root / file).is_file() or f"def {name}(" not in (root / file).read_text(encoding="utf-8"):
        return f"{NOT_YET} (there is no test {claim.test})"
    note = f"; {claim.note}" if claim.note else ""
    return f"**true**, checked by the test {link}{note}"


def _rows(claim: Claim, root: Path) -> list[Measurement]:
    """Returns the newest run of the claim's workload."""
    rows = load_measurements(root / claim.result)
    names = list(dict.fromkeys(row.workload for row in rows))
    if claim.workload not in names and (claim.workload or len(names) > 1):
        raise RedlineError(f"claim {claim.quote!r}: {claim.result} contains {', '.join(names)}: set `workload`.")
    return latest_run([row for row in rows if claim.workload in ("", row.workload)])


def _find_plan(rows: Sequence[Measurement], plan: str) -> Measurement | None:
    """Returns the last row of a plan with samples; for a role the kept row, for compile the fastest mode."""
    if plan not in ROLES:
        text = str(Plan.parse(plan))
        found = [row for row in rows if text in (row.plan, brief(row.plan))]
        return ([row for row in found if row.samples] or found or [None])[-1]
    found = [row for row in rows if row.role == plan]
    timed = [row for row in found if row.samples]
    if plan == "compile" and timed:
        return min(timed, key=lambda row: row.median_s())
    kept = [row for row in timed if row.verdict == "kept"]
    return (kept or timed or found or [None])[-1]


def _find_rung(rows: Sequence[Measurement], rung: str) -> Measurement | None:
    """Returns the trial of a rung, preferably a kept one; a name without options matches any configuration."""
    found = [row for row in rows if row.role in ("trial", "second look")]
    found = [row for row in found if rung in (row.rung, row.rung.partition("(")[0])]
    kept = [row for row in found if row.verdict == "kept"]
    return (kept or [row for row in found if row.samples] or found or [None])[-1]


def render(guides: Mapping[int, Mapping[str, Any]], claims: Sequence[Claim], root: Path) -> str:
    answers = [measured(claim, root) for claim in claims]
    known = sum(answer.startswith("**") for answer in answers)
    blocked = sum(answer.startswith(BLOCKED) for answer in answers)
    lines = [
        "# The guides, answered",
        "",
        "<!-- Written by benchmarks/claims.py from claims.toml and the result files: edit those. -->",
        "",
        "Redline began with five guides to fast models. "
        f"Here is every figure they claim ({len(claims)} rows), "
        "what it really meant as far as their text or code tells, and what Redline measured for it "
        f"({known} so far; {blocked} cannot be measured here). "
        "A figure is computed from the samples in the result file beside it; a range in brackets is "
        "its 99% interval. The guides speak of other GPUs and models of their own, so a measured "
        "figure answers whether the technique delivers, not whether their machine did.",
    ]
    for number, guide in guides.items():
        lines += ["", f"## Guide {number}: {guide['title']}", "", guide["about"].strip(), ""]
        lines += ["| topic | claimed | what it really meant | measured |", "| --- | --- | --- | --- |"]
        for claim, answer in zip(claims, answers, strict=True):
            if claim.guide == number:
                cells = (claim.topic, f"“{claim.quote}”", claim.meaning, answer)
                lines.append("| " + " | ".join(cell.strip().replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Writes docs/claims.md from claims.toml and the result files.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is stale")
    check = parser.parse_args(arguments).check
    try:
        page = render(*load_claims(root / CLAIMS), root)
    except RedlineError as error:
        print(f"claims: {error}", file=sys.stderr)
        return 2
    target = root / PAGE
    if not check:
        write_text(target, page)
        return 0
    if not target.is_file() or target.read_text(encoding="utf-8") != page:
        print(f"{PAGE} is stale: run `python benchmarks/claims.py`.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
