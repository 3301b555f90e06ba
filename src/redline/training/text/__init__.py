"""Training of language models: text, tokens, packed rows, and the task that the loop runs."""
