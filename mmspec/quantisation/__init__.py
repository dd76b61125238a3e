"""Linear layers with packed or quantised weights, swapped into models of transformers from outside."""
