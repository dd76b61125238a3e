"""The decoding loop: sequences, their requests, stopping rules and statistics."""
