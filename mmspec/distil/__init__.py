"""Drafter training: conversations, the target's features of them, and the run of a training command."""
