"""The terminal chat: a conversation with a model of this machine or of an OpenAI-compatible server."""
