"""Benchmarks. ``eval/NAME.py`` is a command, ``python -m mmspec.eval NAME``; the sub-packages are their libraries.

- ``harness``: interleaved timing, other engines, acceptance statistics, held-out prompts, tables and results
- ``suite``: ``mmspec eval``, with tasks, scorers and reports, and ``mmspec tune``
- ``decoding``: random drafts, every model class built small
- ``kernels``: kernels and random models of the GPU benchmark
- ``adapters``: lmms-eval and lm-evaluation-harness
"""
