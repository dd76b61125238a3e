"""Tree verification for Mamba-2 and hybrid targets: not part of this release yet."""
