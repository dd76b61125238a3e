"""Trials of a check, for tests."""

from mmspec.checking.sides import GenerateSide, LocalSide
from mmspec.checking.trial import BOUNDS, SIZE, Trial
from mmspec.pipeline import Pipeline


def trial_of(pipe: Pipeline) -> Trial:
    """Of a pipeline in float32, against plain decoding and ``generate``."""
    plain = LocalSide("plain decoding", Pipeline(pipe.target, pipe.processor))
    sides = [plain, GenerateSide(plain.pipe)]
    return Trial(LocalSide("drafted", pipe, size=SIZE), sides, BOUNDS["float32"], pipe.drafter)
