"""Names and limits that `--help` shows, in a module of their own, because help imports no large package."""

# The default number of concurrent callers of the objective `requests`.
CALLERS = 4
BENCH_PRECISIONS = ("eager", "tf32", "autocast", "bf16", "fp16")
