"""How claims.py computes and formats the figures of rows that other benchmarks wrote."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import linear_regression, median
from typing import Any

from redline.ladder.statistics import Interval, ratio_interval

Row = Mapping[str, Any]

FIGURES: dict[str, Callable[[Any], str]] = {
    "tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
    "prefill_tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
    "peak_bytes": lambda value: f"{value / 2**30:.2f} GiB",
    "state_bytes": lambda value: f"{value / 2**20:,.1f} MiB",
    "linear_bytes": lambda value: f"{value / 2**20:,.2f} MiB",
    "median_ms": lambda value: f"{value:.3g} ms",
    "turn_ms": lambda values: f"{median(values):.3g} ms",
    "ms_per_token": lambda value: f"{value:.3g} ms a token",
    "frames_per_s": lambda value: f"{value:,.1f} frames/s",
    "frame_ms": lambda value: f"{value:.3g} ms",
    "p99_ms": lambda value: f"{value:.3g} ms",
    "busy_share": lambda value: f"{value:.0%} of the time",
    "least_psnr_db": lambda value: f"{value:.1f} dB",
    "largest_step": lambda value: f"at most {value} of 255 levels",
    "waste": lambda value: f"{value:.0%} waste",
    "sequences": lambda value: f"{value:,.0f} sequences",
    "outside_4": lambda value: f"{value:.4%} outside of it",
    "largest_value": lambda value: f"at most {value:.4g}",
    "different_share": lambda value: f"different in {value:.1%} of the cases",
    "overflow_share": lambda value: f"{value:.0%} of the losses overflow",
    "zero_share": lambda value: f"{value:.2%} of the gradients are zero",
    "skipped": lambda value: f"{value} steps skipped",
    "held_out_loss": lambda value: f"a loss of {value:.3f}",
    "kernel": lambda value: f"`{value}`",
}
# Figures of which higher is better; their ratio is inverted.
RATES = ("tokens_per_s", "prefill_tokens_per_s", "frames_per_s")
# The fields that say at which size an operation was measured.
_SIZES = ("case", "rows", "outputs", "depth", "length", "width", "dtype")


def times(ratio: Interval) -> str:
    return f"{ratio.middle:.2f}× ({ratio.low:.2f}–{ratio.high:.2f})"


def compared(figure: str, new: Any, old: Any) -> str:
    """Returns how many times better the new figure is; for a loss, its change."""
    if figure == "turn_ms":
        return times(ratio_interval([(old, new)]))
    if figure == "held_out_loss":
        return f"{new / old - 1:+.2%} loss"
    ratio = old / new
    return f"{1 / ratio if figure in RATES else ratio:.2f}×"


def same_sizes(one: Row, other: Row) -> bool:
    return all(one.get(name) == other.get(name) for name in _SIZES)


def growth(rows: Sequence[Row], _: Sequence[tuple[Row, Row]]) -> str:
    """Returns the fitted powers with which a value grows, such as "batch^1.00 × length^1.98"."""
    powers = []
    for row in rows:
        xs, ys = ([math.log(value) for value in values] for values in zip(*row["points"], strict=True))
        powers.append(f"{row['by']}^{linear_regression(xs, ys).slope:.2f}")
    return "grows with " + " × ".join(powers)


def wins(_: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> str:
    """Returns in how many sizes the rows are faster than those that they are compared with, and by how much."""
    ratios = [old["median_ms"] / new["median_ms"] for new, old in pairs]
    won = sum(ratio > 1 for ratio in ratios)
    return f"faster in {won} of {len(ratios)} sizes ({min(ratios):.2f}× to {max(ratios):.2f}×)"


# Figures that need all rows that match, and the pairs with the rows that they are compared with.
SUMMARIES: dict[str, Callable[[Sequence[Row], Sequence[tuple[Row, Row]]], str]] = {"growth": growth, "wins": wins}
