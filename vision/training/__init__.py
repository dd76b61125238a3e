"""Trains the embedded vision-language model from nothing, on scenes that it draws."""
