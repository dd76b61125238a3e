"""Linear layers with packed or quantised weights, which replace layers of transformers models."""
