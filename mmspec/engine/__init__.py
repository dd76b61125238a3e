"""Decoding engine: continuous batching, requests, stopping criteria and statistics."""
