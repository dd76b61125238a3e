"""Procedural scenes and clips: what they show, how they are drawn, and what can be said and asked about them."""
