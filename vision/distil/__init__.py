"""Training of drafters on what their target says."""
