"""Benchmarks. ``eval/NAME.py`` is a command, ``python -m mmspec.eval NAME``; the sub-packages are their libraries.

- ``harness``: interleaved timing, other engines, held-out prompts, tables and results, every model class built small
- ``suite``: ``mmspec eval``, with tasks, scorers and reports, and ``mmspec tune``
- ``adapters``: lmms-eval and lm-evaluation-harness
"""
