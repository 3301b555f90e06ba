"""Live video: sources, a frame slot, the pipeline, its latency, and sinks; which model runs is not known here."""
