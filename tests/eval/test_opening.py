"""The study of loading: its rows, and files of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import mmspec
from mmspec.eval import opening
from mmspec.targets import gguf, gguf_model
from tests.compiled import needs_kernels
from tests.model_folders import save_gguf

SIZES = {"embedding_length": 512, "feed_forward_length": 768, "block_count": 8}
SIZES |= {"attention.head_count": 8, "attention.head_count_kv": 2}


@needs_kernels
def test_random_files_have_the_sizes_and_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of Q4_K_M: more bits for the output layer, and in half of the layers for values and the MLP's output."""
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    assert opening.SIZES["embedding_length"] == 3584
    monkeypatch.setattr(opening, "SIZES", SIZES)
    like = save_gguf(tmp_path / "a.gguf", **{"rope.dimension_count": 64})
    size = opening.write_random(like, tmp_path / "b.gguf")
    file = gguf.GGUFFile(tmp_path / "b.gguf")
    assert size == (tmp_path / "b.gguf").stat().st_size
    found = {name: tensor.format for name, tensor in file.tensors.items()}
    assert (found["output.weight"], found["token_embd.weight"]) == ("Q6_K", "Q4_K")
    assert [found[f"blk.{block}.ffn_down.weight"] for block in range(8)].count("Q6_K") == 4
    assert {found[f"blk.{block}.ffn_up.weight"] for block in range(8)} == {"Q4_K"}
    assert gguf_model.dtype_of(file) == "int4"
    config = gguf_model.config(file)
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (512, 8, 2)
    reader: Any = pytest.importorskip("gguf").GGUFReader(str(tmp_path / "b.gguf"))
    assert len(reader.tensors) == len(file.tensors)


@pytest.mark.long
@needs_kernels
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    file = save_gguf(tmp_path / "a.gguf")
    mmspec.load(str(file), drafter=None)  # compiles the kernels
    done = CliRunner().invoke(opening.main, ["--model", str(file), "--rounds", "1", "--threads", "1"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(row["model"], row["by"]) for row in rows] == [("a.gguf", opening.FIRST), ("a.gguf", opening.LATER)]
    for row in rows:
        assert 0 < row["seconds"] < row["imports"] + 60
        assert 1e8 < row["resident"] <= row["peak"]
        assert 1000 < row["written"] < 1e6
