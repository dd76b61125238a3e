"""Checks that speculative decoding changes no answer, on a user's own model and machine, or between servers."""
