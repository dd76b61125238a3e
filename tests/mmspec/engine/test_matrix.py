"""Whatever drafts, however requests are scheduled and steps run: the tokens of plain decoding."""

import pytest

from tests import matrix


@pytest.mark.parametrize("cell", matrix.parameters())
def test_tokens(cell, monkeypatch):
    matrix.check(cell, monkeypatch)
