"""Shared by all tests."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_measurements(tmp_path_factory):
    """Calibrations are measured and kept apart from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMSPEC_CACHE", str(tmp_path_factory.mktemp("measurements")))
        yield
