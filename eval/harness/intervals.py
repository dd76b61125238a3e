"""95 % confidence intervals: by the percentile bootstrap, and of shares.

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


def wilson_interval(count: int, total: int) -> dict[str, float]:
    """A ``share`` with its 95 % interval, ``low`` and ``high``, by Wilson's score (JASA 22, 1927, 209-212).

    Raises:
        ValueError: there are no trials, or more successes than trials.
    """
    if not 0 <= count <= total or total == 0:
        raise ValueError(f"expected 0 <= count <= total and total > 0, got {count} of {total}")
    z, share = 1.959963984540054, count / total
    middle = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * (share * (1 - share) / total + z**2 / (4 * total**2)) ** 0.5
    return {"share": share, "low": middle - half if count else 0.0, "high": middle + half if count < total else 1.0}
