"""95 % confidence intervals by the percentile bootstrap.

Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def percentile_interval(resampled: np.ndarray) -> dict[str, float]:
    """The 95 % interval of a statistic, ``low`` and ``high``, from its values on bootstrap resamples."""
    low, high = np.percentile(resampled, [2.5, 97.5])
    return {"low": float(low), "high": float(high)}


def median_interval(values: Sequence[float], resamples: int = 2000) -> dict[str, float]:
    """The ``median`` of some values with its 95 % bootstrap interval, ``low`` and ``high``."""
    array = np.asarray(values, float)
    drawn = np.random.default_rng(0).integers(len(array), size=(resamples, len(array)))
    return {"median": float(np.median(array)), **percentile_interval(np.median(array[drawn], axis=1))}
