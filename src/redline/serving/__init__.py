"""An OpenAI-compatible inference server in front of the engine."""
