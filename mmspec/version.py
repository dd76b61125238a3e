"""The version, read from the source: a checkout need not be installed."""

__version__ = "0.2.0"
