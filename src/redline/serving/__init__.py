"""The inference server, and the load generator that measures it or any other OpenAI-compatible server."""
