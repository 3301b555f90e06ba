"""Names and limits that `--help` shows. They have their own module, so that help imports no large package."""

# The default number of concurrent callers of the objective `requests`.
CALLERS = 4
BENCH_PRECISIONS = ("eager", "tf32", "autocast", "bf16", "fp16")
