"""Web pages on top of mmspec: ``mmspec demo``."""
