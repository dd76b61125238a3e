"""Generated texts to train and evaluate the embedded language model: worked solutions, stories, programs.

An example is determined by its split and index. Held-out examples are never trained on.
"""

from mmspec.ssm.texts.checking import correct
from mmspec.ssm.texts.examples import KINDS, SPLITS, TextExample, example

__all__ = ["KINDS", "SPLITS", "TextExample", "correct", "example"]
