"""State of the sequences that decode: keys and values, and tensors with one entry per sequence."""
