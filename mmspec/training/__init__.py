"""Drafter training: conversations, target features, objectives and the trainer."""
