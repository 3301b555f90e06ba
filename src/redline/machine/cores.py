"""The number of CPU cores that this process may use, which its affinity may limit."""

import os


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
