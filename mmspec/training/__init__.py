"""The trainer of drafters and embedded models, and what training commands share."""
