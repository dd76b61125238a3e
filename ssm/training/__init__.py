"""Training of the embedded hybrid language model from scratch, on generated texts."""
