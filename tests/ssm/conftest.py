"""Fixtures of the recurrent layers' tests."""

import pytest


@pytest.fixture
def plain_torch(monkeypatch):
    """Operations run in torch, without kernels."""
    monkeypatch.setenv("MMSPEC_KERNELS", "reference")
