"""Names and limits that `--help` shows, in a module of their own, because help imports no large package."""

SERVER_ENDPOINTS = ("auto", "chat", "completions")
