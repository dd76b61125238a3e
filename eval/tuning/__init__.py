"""The command ``mmspec tune``."""
