"""Names and limits that `--help` shows, apart from the modules that use them, because help imports no large package."""

GENERATION_PRECISIONS = ("auto", "fp32", "bf16", "fp16", "int8", "fp8")
