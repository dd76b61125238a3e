"""The trainer, and the training of drafters: conversations, the target's features of them, objectives."""
