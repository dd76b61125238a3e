"""Random drafts, and models of every class built small: for the sweep over all classes and for tests."""
