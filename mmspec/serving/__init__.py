"""OpenAI-compatible HTTP server over one engine: ``mmspec serve``."""
