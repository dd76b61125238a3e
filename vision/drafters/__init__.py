"""Drafters for vision-language models."""
