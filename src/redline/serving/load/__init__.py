"""A load generator for OpenAI-compatible servers: it sends streaming requests and measures what a client sees."""
