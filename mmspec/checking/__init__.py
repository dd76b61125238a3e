"""Checks that speculative decoding does not change answers, on the user's model and machine or between servers."""
