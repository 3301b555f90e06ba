"""Names and limits that `--help` shows, apart from the modules that use them, because help imports no large package."""

SERVER_ENDPOINTS = ("auto", "chat", "completions")
