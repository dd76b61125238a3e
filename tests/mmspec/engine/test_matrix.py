"""Whatever drafts, however requests are scheduled and steps run, by any default dtype: the tokens of plain decoding."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import mmspec
from tests import matrix
from tests.model_folders import save_gguf, save_text_model

DTYPES = [torch.float16, torch.bfloat16, torch.float64]


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("cell", matrix.parameters())
def test_tokens(cell, monkeypatch):
    matrix.check(cell, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_with_another_default_dtype(dtype):
    """A share of the cells with every drafter, and every sampling of every target of ``MAIN``."""
    cells = [cell for cell in matrix.cells(matrix.MODES) if cell.target in matrix.MAIN and "limit" not in cell.schedule]
    covering = matrix.covering(cells, ("drafter",), ("target", "sampling"))
    for cell in covering[DTYPES.index(dtype) :: len(DTYPES)]:
        for number in matrix.SCHEDULES[cell.schedule]:
            matrix.asked(cell.target, cell.sampling, number)
        with default(dtype), pytest.MonkeyPatch.context() as patch:
            matrix.check(cell, patch)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "gguf"])
def test_packed_weights_with_another_default_dtype(kind, tmp_path):
    def answers() -> list[int]:
        path = tmp_path / "tiny.gguf" if kind == "gguf" else tmp_path
        pipe = mmspec.load(str(path), dtype="auto" if kind == "gguf" else kind)
        return [
            *pipe.generate("One, two", max_new_tokens=12, temperature=0).token_ids,
            *pipe.generate("One, two", max_new_tokens=12, temperature=1.5, seed=3).token_ids,
        ]

    save_gguf(tmp_path / "tiny.gguf") if kind == "gguf" else save_text_model(tmp_path)
    expected = answers()
    assert len(set(expected)) > 2
    for dtype in DTYPES:
        with default(dtype):
            assert answers() == expected
