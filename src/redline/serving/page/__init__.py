"""The chat page: static files without dependencies, which work under the policy `default-src 'self'`."""
