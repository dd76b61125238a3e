"""Training of Mamba drafters."""
