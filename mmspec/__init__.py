"""Lossless speculative decoding of vision-language and state-space models.

A drafter proposes a tree of tokens, the target checks it in one pass, and the longest path that the target itself would
have produced is kept.
"""

from mmspec.errors import UserError
from mmspec.hook import decode, generate
from mmspec.pipeline import Generation, Piece, Pipeline, load
from mmspec.sampling import SamplingParams
from mmspec.stats import Stats
from mmspec.tree import TokenTree
from mmspec.verify import Verdict, verify, verify_greedy

__version__ = "0.1.0"
__all__ = [
    "Generation",
    "Piece",
    "Pipeline",
    "SamplingParams",
    "Stats",
    "TokenTree",
    "UserError",
    "Verdict",
    "decode",
    "generate",
    "load",
    "verify",
    "verify_greedy",
]
