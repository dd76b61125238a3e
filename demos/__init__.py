"""Web demonstration: not part of this release yet."""
