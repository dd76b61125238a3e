"""Tensors with one entry per sequence, against a list of entries."""

import random

import pytest
import torch

from mmspec.cache.rows import RowTensor, batch_bucket, pad_rows


def test_batches_run_at_powers_of_two():
    assert [batch_bucket(rows) for rows in (0, 1, 2, 3, 4, 5, 8, 9, 33)] == [0, 1, 2, 4, 4, 8, 8, 16, 64]


@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 0, 4)])
def test_idle_rows_are_appended(shape):
    x = torch.rand(shape)
    padded = pad_rows(x, 5)
    assert padded.shape == (5, *shape[1:])
    assert torch.equal(padded[:2], x)
    assert not padded[2:].any()
    assert pad_rows(x, 2) is x


@pytest.mark.parametrize("static_shapes", [False, True])
@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("seed", range(5))
def test_rows_join_leave_and_are_written(static_shapes, shape, seed):
    """The tensor moves, in place, only where it must grow; idle rows are 0."""
    rnd, rows = random.Random(seed), RowTensor(static_shapes)
    expected: list[torch.Tensor] = []
    version, address, capacity = rows.version, 0, 0
    for _ in range(60):
        action = rnd.choice(["append", "select", "write"])
        if action == "append":
            new = torch.rand(rnd.randint(1, 3), *shape)
            rows.append(new)
            expected += list(new.clone())
            new += 1  # which is nobody else's any more
        elif action == "select" and expected:
            order = rnd.sample(range(len(expected)), rnd.randint(0, len(expected)))
            rows.select(order)
            expected = [expected[row] for row in order]
        elif action == "write" and expected:
            new = torch.rand(len(expected), *shape)
            rows.write(pad_rows(new, batch_bucket(len(new))) if static_shapes else new)
            expected = list(new)
        assert rows.rows == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(rows.data[: rows.rows], expected, strict=True))
        if static_shapes:
            assert len(rows.data) == batch_bucket(len(rows.data)) >= rows.rows
            assert not rows.data[rows.rows :].any()
            assert (rows.version is version) == (len(rows.data) == capacity)
            assert rows.data.data_ptr() == address or len(rows.data) > capacity
            version, address, capacity = rows.version, rows.data.data_ptr(), len(rows.data)
        else:
            assert len(rows.data) == rows.rows


def test_entries_of_another_kind_begin_anew():
    rows = RowTensor(static_shapes=True)
    rows.append(torch.rand(3, 2))
    rows.select([])
    version = rows.version
    rows.append(torch.rand(2, 5, dtype=torch.float64))
    assert rows.version is not version
    assert (rows.data.shape, rows.data.dtype) == ((2, 5), torch.float64)
