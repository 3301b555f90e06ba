"""Defines names that `--help` shows. They have their own module, so that `--help` need not import torch."""

GENERATION_PRECISIONS = ("auto", "fp32", "bf16", "fp16", "int8", "fp8")
