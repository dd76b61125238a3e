"""Drafters that predict the target's hidden states: their layer, tree levels and caches."""
