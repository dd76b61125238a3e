"""Web demo: the server and page of ``mmspec demo``."""
