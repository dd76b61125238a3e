"""Draft trees: their verification, and how large they should be."""
