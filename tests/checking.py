"""Trials of a check, for tests."""

from mmspec.checking.sides import GenerateSide, LocalSide
from mmspec.checking.trial import BOUNDS, SIZE, Trial
from mmspec.pipeline import Pipeline


def trial_of(pipe: Pipeline) -> Trial:
    """Of a pipeline in float32, against plain decoding and ``generate``."""
    plain = Pipeline(pipe.target, pipe.processor)
    return Trial(LocalSide(pipe, size=SIZE), [LocalSide(plain), GenerateSide(plain)], BOUNDS["float32"])
