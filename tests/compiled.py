"""Tests of the C++ kernels are skipped, with the reason, where these cannot run: no AVX2 or no compiler."""

from __future__ import annotations

import pytest

from mmspec.ops import cpu_library

needs_kernels = pytest.mark.skipif(not cpu_library.available(), reason=f"C++ kernels: {cpu_library.problem()}")
