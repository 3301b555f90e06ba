"""How long `redline train` trains: --steps or --time, not both."""

from redline.errors import RedlineError
from redline.notation import parse_seconds


def parse_minutes(time_limit: str | None, steps: int | None) -> float | None:
    if time_limit is not None and steps is not None:
        raise RedlineError("--steps and --time both say how long to train: give one of them.")
    return None if time_limit is None else parse_seconds(time_limit) / 60
