"""The version, read from the source so that a checkout works without installation."""

__version__ = "0.2.0"
