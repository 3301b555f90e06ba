"""Names and limits that `--help` shows, in a module of their own, because help imports no large package."""

GENERATION_PRECISIONS = ("auto", "fp32", "bf16", "fp16", "int8", "fp8")
