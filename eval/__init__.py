"""Benchmarks. ``eval/NAME.py`` is a command, ``python -m mmspec.eval NAME``; the sub-packages are their libraries.

- ``harness``: interleaved timing, other engines, held-out prompts, tables and results
- ``suite``: ``mmspec eval``, with tasks, scorers and reports, and ``mmspec tune``
- ``decoding``: random drafts, every model class built small
- ``adapters``: lmms-eval and lm-evaluation-harness
"""
