"""Training of state-space drafters on what their target says."""
