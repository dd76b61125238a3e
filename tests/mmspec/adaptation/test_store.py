"""Generations of a checkpoint: one that could not be written leaves the one before."""

import pytest

from mmspec.adaptation.heads import Store


def test_a_generation_replaces_the_one_before_or_leaves_it(tmp_path):
    store = Store(tmp_path / "a" / "store")
    assert store.newest() is None
    store.write(lambda folder: (folder / "x").write_text("first") and None)
    first = store.newest()

    def fail(folder):
        (folder / "x").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write(fail)
    assert (store.newest(), (first / "x").read_text()) == (first, "first")
    store.write(lambda folder: (folder / "x").write_text("second") and None)
    (newest,) = store.folder.iterdir()
    assert newest == store.newest() != first
    assert (newest / "x").read_text() == "second"
