"""Training of the embedded hybrid language model."""
