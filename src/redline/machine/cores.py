"""How many cores this process may use: fewer than the machine has, where it was told so."""

import os


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
