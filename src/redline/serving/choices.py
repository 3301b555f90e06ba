"""Defines values that `--help` shows. They have a separate module, so that `--help` imports no large package."""

SERVER_ENDPOINTS = ("auto", "chat", "completions")
