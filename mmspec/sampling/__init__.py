"""From logits to tokens: sampling parameters and logits processors, exact at every node of a tree."""
