"""Benchmarks. ``eval/NAME.py`` is a command, ``python -m mmspec.eval NAME``; the sub-packages are their libraries.

- ``harness``: interleaved timing, bootstrap intervals, acceptance statistics, held-out prompts, tables and results
- ``suite``: ``mmspec eval``, with tasks, scorers and reports
- ``decoding``: acceptance, speed, losslessness, step cost, trees against chains, ablations
- ``kernels``: kernels, Mamba-2 tree operations, the GPU benchmark
- ``scale_up``: small trained models in big shapes
- ``adapters``: lmms-eval and lm-evaluation-harness
"""
