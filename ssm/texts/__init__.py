"""Texts that the package generates to train and to measure its own language model: worked solutions, stories, programs.

An example follows from its split and index alone; held-out ones are never trained on.
"""

from ssm.texts.checking import correct
from ssm.texts.examples import KINDS, SPLITS, Example, example

__all__ = ["KINDS", "SPLITS", "Example", "correct", "example"]
