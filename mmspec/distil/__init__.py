"""Training of drafters on what their target says: conversations, the target's features, one run for all kinds."""
