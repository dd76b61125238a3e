"""GGUF files: reading, their index in the cache, decoding; every format: its weights, and what holds them."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import logging

import mmspec
from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.core.verify import accept_path
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.small import Small
from mmspec.loading import load_processor
from mmspec.quantisation.blocks import BlockLinear, Int4Blocks, Int8Blocks
from mmspec.quantisation.formats import FORMATS, StoredEmbedding
from mmspec.targets import gguf, gguf_file, gguf_models, packing, sources, templates
from mmspec.targets.gguf_keys import Rows, minus_one
from mmspec.targets.gguf_models import Weight
from mmspec.targets.infill import Infill
from mmspec.targets.packing import drafter_kind, pack_drafter, pack_model, weights_kind
from mmspec.targets.support import fingerprint
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.workers import WorkerError
from tests.compiled import needs_kernels
from tests.gguf_rows import random_rows
from tests.model_folders import gguf_matrix, save_gguf, save_text_model, write_gguf
from tests.targets import prefilled
from tests.tiny import Script

package = pytest.importorskip("gguf", reason="the package gguf is not installed")

OTHERS = ("TQ1_0", "TQ2_0", "NVFP4")  # of other families: held in float32
WIDTH = 256  # a block of the K formats
READ = ("attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")  # queries and keys are reordered
SIZES = {"embedding_length": WIDTH, "feed_forward_length": WIDTH, "rope.dimension_count": WIDTH // 4}
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


def load(file: Path, dtype: str = "auto", drafter: Any = None) -> mmspec.Pipeline:
    return mmspec.load(str(file), drafter, dtype=dtype)


def model_in(file: Path, dtype: str = "auto") -> Any:
    return load(file, dtype).target.model


def source_of(file: Path) -> Any:
    found = sources.find(str(file))
    assert isinstance(found, sources.GGUFSource)
    return found


def random_matrix(kind: str, shape: tuple[int, int], seed: int = 0) -> tuple[np.ndarray, Any]:
    """A matrix of random bytes in a format, without infinite scales, and its type."""
    one = package.GGMLQuantizationType[kind]
    count, size = package.GGML_QUANT_SIZES[one]
    data = np.random.default_rng(seed).integers(0, 64, (shape[0], shape[1] // count * size), dtype=np.uint8)
    plain = {"F32": np.float32, "F16": np.float16}.get(kind)
    return (data.view(plain) if plain else data), one


def of_format(kind: str) -> Callable[..., tuple[np.ndarray, Any]]:
    """For ``save_gguf``: matrices of the layers in a format."""
    return lambda name, block, shape: gguf_matrix(name, block, shape) if block < 0 else random_matrix(kind, shape)


def test_weights_and_tokens_are_those_that_transformers_reads(file: Path, cache: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    for name in (file, file.parent):  # a folder with one file
        pipe = load(name, "float32")
        expected, found = plain.state_dict(), pipe.target.model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        ids = torch.arange(20)[None]
        assert torch.equal(pipe.target.model(ids).logits, plain(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = "Two words, 3 digits: 123</s>"
    assert pipe.processor.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    index = Path(pipe.target.model.config.name_or_path)
    assert index.parent.parent == cache / "gguf"
    assert not list(cache.rglob("*.safetensors"))


@needs_kernels
@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "F32"])
@pytest.mark.parametrize(
    ("damaged", "dtype"), [("blk.0.attn_q", "auto"), ("token_embd", "auto"), ("blk.1.ffn_down", "int4")]
)
def test_weights_that_are_not_finite_are_refused(form, damaged, dtype, cache: Path, tmp_path: Path) -> None:
    """The last scale of a tensor; also where an embedding stays in its file, whose rows are also the head's."""

    def matrix(name: str, block: int, shape: tuple[int, int]) -> tuple[np.ndarray, Any]:
        rows, kind = random_matrix(form, shape, block + 1)
        if damaged == (name if block < 0 else f"blk.{block}.{name}"):
            numbers = rows.view(np.float32 if form == "F32" else np.float16)
            place = -1 if form in ("F16", "F32", "Q6_K") else -package.GGML_QUANT_SIZES[kind][1] // 2
            numbers[-1, place] = np.nan
        return rows, kind

    path = save_gguf(tmp_path / "damaged.gguf", matrix, **SIZES)
    dense = {"blk.0.attn_q": "layers.0.self_attn.q_proj", "blk.1.ffn_down": "layers.1.mlp.down_proj"}
    name = rf"({damaged}|{dense.get(damaged, 'embed_tokens')})"
    with pytest.raises(mmspec.UserError, match=rf"weights must be finite: .*{name}.* contains NaN or infinite numbers"):
        load(path, dtype)


def test_texts_of_sentencepiece_files(cache: Path, tmp_path: Path) -> None:
    """Answers keep the blank before their first word; bytes of a character are one text."""
    path = save_gguf(tmp_path / "pieces.gguf", pieces=["▁", *"theai", "th", "the", "▁the", "▁a"])
    pipe = load(path, "float32")
    tokenizer = pipe.processor.tokenizer
    prompt = tokenizer("hi").input_ids
    said = {"▁the ▁a": " the a", "the ▁a": "the a", "▁ <0xE2> <0x82> <0xAC> a": " €a", "a ▁the </s>": "a the"}
    for pieces, expected in said.items():
        tokens = tokenizer.convert_tokens_to_ids(pieces.split())
        options = {"logits_processor": [Script(tokens, len(prompt))], "max_new_tokens": len(tokens)}
        answer = pipe.generate("hi", **options)
        assert (answer.token_ids, answer.text) == (tokens, expected)
        assert tokenizer.decode([*prompt, *tokens], skip_special_tokens=True) == "hi" + expected
        assert "".join(part.text for part in pipe.stream("hi", **options)) == expected


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
    """End tokens of the file within the vocabulary, and the end of text."""
    pipe = load(save_gguf(tmp_path / "chat.gguf", ends=ends), "float32")
    assert pipe.target.eos_token_ids == expected
    for end in expected:
        answer = pipe.generate([258, 5], max_new_tokens=4, logit_bias={end: 100.0})
        assert (answer.token_ids, answer.finish_reason) == ([end], "stop")


def test_ids_of_fill_in_the_middle(cache: Path, tmp_path: Path) -> None:
    """Under llama.cpp's present and earlier keys; ids beyond the vocabulary are as if left out."""
    ends = {"prefix": 7, "fim_suf": 8, "middle": 6, "fim_mid": 9, "fim_pad": 260}
    processor = load(save_gguf(tmp_path / "code.gguf", ends=ends), "float32").processor
    assert processor.tokenizer.init_kwargs["fim_token_ids"] == {"pre": 7, "suf": 8, "mid": 9}
    infill = Infill(processor)
    assert (infill.encode([5], ""), infill.ends[:3]) == ([7, 5, 8, 9], [7, 8, 9])


def test_the_index_is_that_of_a_header_and_nothing_else_stays(file: Path, cache: Path, tmp_path: Path) -> None:
    copied = tmp_path / "tiny.gguf"
    copied.write_bytes(file.read_bytes())
    for path in (file, copied):
        load_processor(str(path))
    (index,) = cache.glob("gguf/*/*")
    stamp = index.stat().st_mtime_ns
    save_gguf(copied, ends={"eot": 7})
    load_processor(str(copied))
    assert len(list(cache.glob("gguf/*/*"))) == 2
    assert index.stat().st_mtime_ns == stamp
    for found in (3, 4):  # equal metadata and numbers of tensors
        load_processor(str(save_gguf(copied, factors={"rope_freqs": [1.0] * found})))
        assert len(list(cache.glob("gguf/*/*"))) == found
    names = ["config.json", "generation_config.json", "sums.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in index.iterdir()) == names


def test_a_file_that_was_cut_short_is_named_so(file: Path, cache: Path, tmp_path: Path) -> None:
    """At every byte of the start, then in metadata, tensor infos and data."""
    whole, part = file.read_bytes(), tmp_path / "part.gguf"
    data = package.GGUFReader(str(file)).data_offset
    sizes = [*range(40), *range(40, data, 97), data - 1, data, data + 1, (data + len(whole)) // 2]
    for size in sizes:
        part.write_bytes(whole[:size])
        with pytest.raises(mmspec.UserError) as caught:
            gguf_file.GGUFFile(part)
        message = str(caught.value)
        assert message.startswith(f"{part} is incomplete, as after an interrupted download: expected "), size
        assert message.endswith(f" bytes, found {size}")
    end = max(one.data_offset + one.n_bytes for one in package.GGUFReader(str(file)).tensors)
    part.write_bytes(whole[: end - 1])
    with pytest.raises(mmspec.UserError, match=f"expected {end} bytes, found {end - 1}$"):
        load(part)
    part.write_bytes(whole[:end])
    gguf_file.GGUFFile(part)
    assert not list((cache / "gguf").glob("*/*"))


def test_headers_longer_than_the_first_read_are_read_whole(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of files without tensors, which end with their header, too."""

    def facts(path: Path) -> tuple[Any, ...]:
        found = gguf_file.GGUFFile(path)
        return found.metadata, found.digest, {name: (one.place, one.size) for name, one in found.tensors.items()}

    alone = tmp_path / "alone.gguf"
    write_gguf(alone, {"general.architecture": "llama", "general.name": "x"}, {})
    alone.write_bytes(alone.read_bytes().rstrip(b"\0"))  # padding
    whole = {path: facts(path) for path in (file, alone)}
    for path, expected in whole.items():
        for first in (1, 4, 20, 1000, path.stat().st_size - 1):
            monkeypatch.setattr(gguf_file, "_FIRST", first)
            assert facts(path) == expected


def test_metadata_and_tensors_are_those_of_the_package(mixed: Path) -> None:
    reader, found = package.GGUFReader(str(mixed)), gguf_file.GGUFFile(mixed)
    assert reader.alignment == 512
    given = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert found.metadata == given
    assert list(found.tensors) == [one.name for one in reader.tensors]
    for one in reader.tensors:
        tensor = found.tensors[one.name]
        assert (tensor.format, tensor.shape) == (one.tensor_type.name, tuple(reversed(one.shape.tolist())))
        expected = torch.tensor(package.dequantize(one.data, one.tensor_type))
        assert torch.equal(tensor[...], expected), one.name


@pytest.mark.parametrize("dtype", ["auto", "float32", "int8"])
def test_matrices_of_other_shapes_are_refused(dtype: str, cache: Path, tmp_path: Path) -> None:
    def matrix(name: str, block: int, shape: tuple[int, int]) -> tuple[np.ndarray, Any]:
        return gguf_matrix(name, block, (shape[0] - 32, shape[1]) if name == "ffn_up" else shape)

    message = r"a\.gguf.*expected exactly the weights of .*up_proj\.weight has shape"
    with pytest.raises(mmspec.UserError, match=message):
        load(save_gguf(tmp_path / "a.gguf", matrix), dtype)


@needs_kernels
def test_layers_with_rows_of_the_kernels_formats_and_others(cache: Path, tmp_path: Path) -> None:
    """Keys that the file does not quantise stay so, in the same layers."""

    def matrix(name: str, block: int, shape: tuple[int, int]) -> tuple[np.ndarray, Any]:
        if name != "attn_k":
            return gguf_matrix(name, block, shape)
        weight = np.random.default_rng(3).standard_normal(shape) * 0.2
        return weight.astype(np.float16), package.GGMLQuantizationType.F16

    file = save_gguf(tmp_path / "a.gguf", matrix)
    exact, pipe = model_in(file, "float32"), load(file)
    for layer, plain in zip(pipe.model.model.layers, exact.model.layers, strict=True):
        assert torch.equal(layer.self_attn.k_proj.weight, plain.self_attn.k_proj.weight.bfloat16())
        assert type(layer.self_attn.q_proj) is Int4Blocks
    assert pipe.target.decoder._sublayers is not None


@needs_kernels
def test_draft_models_keep_the_formats_of_their_file(
    file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they draft for; without the kernels they are dense."""
    drafter = Small(str(file))
    assert weights_kind(drafter.model) == "Int4Blocks"
    exact = load(file, "float32").target
    expected = model_in(file).state_dict()
    for target in (exact, load(file).target):
        drafter.attach(target)
        assert weights_kind(drafter.model) == "Int4Blocks"
        assert all(torch.equal(drafter.model.state_dict()[name], value) for name, value in expected.items())
    monkeypatch.setenv("MMSPEC_KERNELS", "reference")
    dense = Small(str(file)).model
    assert (weights_kind(dense), dense.dtype) == (None, torch.float32)


def patched(file: Path, old: bytes, new: bytes, skip: int | None = None) -> Path:
    """The file with ``old``, or the bytes at ``skip`` after it, replaced."""
    whole = file.read_bytes()
    at = whole.index(old) + (0 if skip is None else len(old) + skip)
    file.write_bytes(whole[:at] + new + whole[at + len(new) :])
    return file


def little(number: int, size: int) -> bytes:
    return number.to_bytes(size, "little")


def misaligned(file: Path) -> Path:
    """The offset of the last tensor is one byte later."""
    tensors = package.GGUFReader(str(file)).tensors
    last = max(tensors, key=lambda one: one.data_offset)
    offset = last.data_offset - min(one.data_offset for one in tensors)
    return patched(file, last.name.encode(), little(offset + 1, 8), 8 + 8 * len(last.shape))


def entered(**entries: Any) -> Callable[[Path], Path]:
    """Write the file with other metadata of the architecture."""
    return lambda file: save_gguf(file, entries={f"llama.{name}": value for name, value in entries.items()})


MATRIX = b"token_embd.weight"
ERRORS: dict[str, Callable[[Path], Any]] = {
    "expected a GGUF file, found one that begins with b'PK": lambda file: patched(file, b"GGUF", b"PK\3\4"),
    "of version 2 or 3, found version 4$": lambda file: patched(file, b"GGUF\3", b"GGUF\4"),
    "found version 3 of a big-endian machine$": lambda file: patched(file, b"GGUF\3\0\0\0", b"GGUF\0\0\0\3"),
    "expected an architecture out of bloom, .*, found 'lemma'": lambda file: patched(file, b"llama", b"lemma"),
    r"the tensor output_norm\.weight of type 77: expected a type up to": lambda file: patched(
        file, b"output_norm.weight", (77).to_bytes(4, "little"), skip=12
    ),
    "expected one GGUF file, found 2": lambda file: shutil.copy(file, file.with_name("second.gguf")).parent,
    "each key and tensor once, found tokenizer.ggml.eos_token_id twice": lambda file: patched(file, b"bos_", b"eos_"),
    "each key and tensor once, found blk.0.ffn_up.weight twice": lambda file: patched(
        file, b"blk.1.ffn_up", b"blk.0.ffn_up"
    ),
    r"names of keys and tensors in UTF-8, found b'llama.block_c\\xff": lambda file: patched(
        file, b"block_count", b"block_c\xff"
    ),
    r"names of keys and tensors in UTF-8, found b'blk.0.attn\\n": lambda file: patched(
        file, b"blk.0.attn_q", b"blk.0.attn\n"
    ),
    "expected numbers, texts or a list of them in llama.block_count, found type 77": lambda file: patched(
        file, b"llama.block_count", little(77, 4), 0
    ),
    "expected numbers, texts or a list of them in tokenizer.ggml.tokens, found type 9": lambda file: patched(
        file, b"ggml.tokens", little(9, 4), 4
    ),
    "expected 1 to 4 axes of the tensor token_embd.weight, found 5$": lambda file: patched(
        file, MATRIX, little(5, 4), 0
    ),
    "expected 1 to 4 axes of the tensor token_embd.weight, found 0$": lambda file: patched(
        file, MATRIX, little(0, 4), 0
    ),
    r"token_embd.weight of shape \(0, 64\): expected no axis of zero$": lambda file: patched(
        file, MATRIX, little(0, 8), 12
    ),
    "blk.0.ffn_up.weight with rows of 33: expected multiples of 32$": lambda file: patched(
        file, b"blk.0.ffn_up.weight", little(33, 8), 4
    ),
    r"found output_norm.weight and token_embd.weight overlapping$": lambda file: patched(
        file, MATRIX, little(64, 8), 24
    ),
    "expected tensors at multiples of 32 bytes, found blk.1.* between them$": misaligned,
    "expected a power of two in general.alignment, found 48$": lambda file: patched(
        save_gguf(file, alignment=64), b"general.alignment", little(48, 4), 4
    ),
    "whole number from 1 to 1000 in llama.block_count, found 1000000000$": entered(block_count=10**9),
    "whole number from 1 to 1000 in llama.block_count, found 0$": entered(block_count=0),
    r"whole number from 1 to 1000 in llama.block_count, found \[2, 2\]$": entered(block_count=[2, 2]),
    "whole number from 1 to 1000 in llama.block_count, found 2.0$": entered(block_count=2.0),
    "whole numbers from 1 to 1048576 in llama.embedding_length, found '64'$": entered(embedding_length="64"),
    r"whole numbers from 0 to 1048576 in llama.attention.head_count_kv, found \[-1, 2\]$": entered(
        **{"attention.head_count_kv": [-1, 2]}
    ),
    "whole number from 0 to 4294967295 in tokenizer.ggml.eos_token_id, found 'end'$": lambda file: save_gguf(
        file, entries={"tokenizer.ggml.eos_token_id": "end"}
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_mistakes_are_named(message: str, file: Path, cache: Path, tmp_path: Path) -> None:
    changed = ERRORS[message](Path(shutil.copy(file, tmp_path / "a.gguf")))
    with pytest.raises(mmspec.UserError, match=message) as caught:
        load(changed)
    assert "\n" not in str(caught.value)


def test_values_of_keys_have_the_type_asked_for(tmp_path: Path) -> None:
    found = gguf_file.GGUFFile(save_gguf(tmp_path / "a.gguf", entries={"llama.kv": [1, 2]}))
    assert (found.count("block_count"), found.count("missing", 5), found.count("llama.block_count")) == (2, 5, 2)
    assert (found.counts("kv", 2), found.counts("block_count", 3), found.counts("no", 2, [7])) == ([1, 2], [2] * 3, [7])
    assert (found.number("rope.freq_base"), found.number("block_count"), found.number("no", 0.5)) == (1e4, 2.0, 0.5)
    assert (found.text("general.name"), found.text("no", "x")) == ("stand-in", "x")
    wrong: dict[str, Callable[[], Any]] = {
        "a whole number from 1 to 134217728 in llama.no, found none": lambda: found.count("no"),
        "a whole number from 1 to 1 in llama.block_count, found 2": lambda: found.count("block_count", most=1),
        r"whole numbers from 2 to 134217728 in llama.kv, found \[1, 2\]": lambda: found.counts("kv", least=2),
        "a number in general.name, found 'stand-in'": lambda: found.number("general.name"),
        "a text in llama.block_count, found 2": lambda: found.text("block_count"),
    }
    for message, read in wrong.items():
        with pytest.raises(mmspec.UserError, match=rf"^cannot load model '.*a\.gguf': expected {message}$"):
            read()


def in_parts(file: Path, folder: Path, count: int = 3) -> list[Path]:
    """The parts of a file, as llama-gguf-split writes them."""
    whole = gguf_file.GGUFFile(file)
    stored = package.GGUFReader(str(file)).tensors
    paths = [folder / f"m-{number + 1:05}-of-{count:05}.gguf" for number in range(count)]
    for number, path in enumerate(paths):
        metadata = whole.metadata if number == 0 else {"general.architecture": "llama"}
        metadata = {**metadata, "split.no": number, "split.count": count, "split.tensors.count": len(stored)}
        write_gguf(path, metadata, {one.name: (one.data, one.tensor_type) for one in stored[number::count]})
    return paths


def test_any_part_of_a_model_opens_all(file: Path, cache: Path, tmp_path: Path) -> None:
    paths, expected = in_parts(file, tmp_path), model_in(file, "float32").state_dict()
    assert gguf_file.file_in(tmp_path) == paths[0]
    for path in (*paths, tmp_path):
        found = model_in(path, "float32").state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    ids = torch.arange(20)[None]
    assert torch.equal(model_in(paths[1])(ids).logits, model_in(file)(ids).logits)
    assert len(list(cache.glob("gguf/*/m-00001-of-00003"))) == 1


WRONG_PARTS: dict[str, Callable[[list[Path], Path], Any]] = {
    r"m-00002-of-00003\.gguf.*No such file": lambda paths, other: paths[1].unlink(),
    r"m-00003-of-00003\.gguf is not a part of .*: expected part 3$": lambda paths, other: shutil.copy(
        paths[1], paths[2]
    ),
    r"m-00002-of-00003\.gguf is not a part of .*: expected part 2$": lambda paths, other: shutil.copy(
        in_parts(save_gguf(other / "a.gguf", block_count=1), other)[1], paths[1]
    ),
    r"m-00002-of-00003\.gguf is incomplete": lambda paths, other: os.truncate(paths[1], 4000),
    r"expected a name that ends with -00001-of-00003\.gguf$": lambda paths, other: paths[0].rename(other / "m.gguf"),
}


@pytest.mark.parametrize("message", WRONG_PARTS)
def test_wrong_parts_are_named(message: str, file: Path, cache: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    paths = in_parts(file, tmp_path)
    WRONG_PARTS[message](paths, other)
    with pytest.raises(mmspec.UserError, match=message):
        load(paths[0] if paths[0].exists() else other / "m.gguf")


def test_blobs_of_a_folder_are_told_apart_by_their_content(file: Path, cache: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "sha256-1")
    write_gguf(tmp_path / "sha256-2", {"general.architecture": "clip"}, {"v.weight": np.ones(32, np.float32)})
    (tmp_path / "sha256-3").write_text("a template")
    os.mkfifo(tmp_path / "sha256-4")
    assert gguf_file.file_in(tmp_path) == tmp_path / "sha256-1"
    assert gguf_file.projector_in(tmp_path) == tmp_path / "sha256-2"
    found = model_in(Path(shutil.copy(file, tmp_path / "A.GGUF")))
    assert torch.equal(found.lm_head.weight, model_in(tmp_path / "sha256-1").lm_head.weight)


@pytest.mark.parametrize("kind", ["a folder", "a pipe or a device"])
def test_only_files_are_opened(kind: str, file: Path, tmp_path: Path) -> None:
    """A pipe without a writer would block."""
    path = tmp_path / "mmproj"
    os.mkdir(path) if kind == "a folder" else os.mkfifo(path)
    for wrong in [path] if kind == "a folder" else [path, Path("/dev/zero")]:
        with pytest.raises(mmspec.UserError, match=rf"'{wrong}': expected a GGUF file, found {kind}$"):
            mmspec.load(str(file), None, mmproj=wrong)


TEMPLATES = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "got one that takes more time",
    "{{ 'x' * 10**10 }}": "got one that takes more memory",
    "{{ 'x'.ljust(10**10) }}": "got one that takes more memory",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}": "takes more memory",
    "{{ 'x' * 30000000 }}": "to at most 16777216 characters: got one that renders 30000000",
    "{{ raise_exception('only pictures') }}": "does not accept the messages: only pictures",
    "{% for %}": "does not accept the messages: Expected an expression",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_are_rendered_within_limits(
    template: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next messages are rendered."""
    monkeypatch.setattr(templates, "_SECONDS", 5.0)
    usual = load_processor(str(save_gguf(tmp_path / "b.gguf", entries={"tokenizer.chat_template": "{{ messages }}"})))
    wrong = load_processor(str(save_gguf(tmp_path / "a.gguf", entries={"tokenizer.chat_template": template})))
    with pytest.raises(mmspec.UserError, match=TEMPLATES[template]) as caught:
        wrong.encode([{"prompt": "hello"}])
    assert "\n" not in str(caught.value)
    assert usual.encode([{"prompt": "hello"}]).input_ids.shape[1] > 0


def test_a_prepared_worker_renders_the_first_template(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or, where none can be started, the first template reports it."""
    file = save_gguf(tmp_path / "a.gguf", entries={"tokenizer.chat_template": "{{ messages }}"})
    processor, pool = load_processor(str(file)), templates._workers(os.getpid())
    for worker in [*pool._workers]:
        worker.stop()
    templates.prepare()
    next(one for one in threading.enumerate() if one.daemon and "start" in one.name).join(60)
    before = [worker for worker in pool._workers if worker.process.poll() is None]
    processor.encode([{"prompt": "hello"}])
    assert len(before) == 1
    assert [worker for worker in pool._workers if worker.process.poll() is None] == before
    for error in (WorkerError("crash"), RuntimeError("can't start new thread")):

        def fails(*given: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(pool, "run", fails)
        templates.prepare()
        for one in threading.enumerate():
            if one.daemon and "start" in one.name:
                one.join(60)  # its error would be a warning


@pytest.mark.parametrize("at", [0, 5, 8, 16, 24, 33, 60, 200])
def test_damaged_headers_are_errors_of_the_file(at: int, file: Path, cache: Path, tmp_path: Path) -> None:
    damaged = bytearray(file.read_bytes())
    damaged[at] ^= 0xFF
    (tmp_path / "damaged.gguf").write_bytes(damaged)
    with pytest.raises(mmspec.UserError, match=r"^((?!folder).)*damaged\.gguf((?!folder).)*$"):
        load(tmp_path / "damaged.gguf")


@needs_kernels
def test_a_file_may_be_replaced_while_it_is_read_and_later(mixed: Path, cache: Path, tmp_path: Path) -> None:
    """An opened file stays readable."""
    moved, ids = Path(shutil.copy(mixed, tmp_path / "moved.gguf")), [70, 71, 72, 70, 71]
    expected = load(mixed).generate(ids, max_new_tokens=8, ignore_eos=True).token_ids
    source = source_of(moved)
    save_gguf(tmp_path / "new.gguf").replace(moved)
    model, kind = source.model(AutoModelForCausalLM, source.config(), "auto", True)
    pack_model(model, kind)
    save_gguf(tmp_path / "new.gguf").replace(moved)
    pipe = mmspec.load(model.eval(), drafter="ngram", processor=load_processor(str(mixed)).plain)
    assert pipe.generate(ids, max_new_tokens=8, ignore_eos=True).token_ids == expected
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # the latter has its embeddings in memory
        assert torch.equal(twin(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)


CHANGES: dict[str, Callable[[Path], Any]] = {
    r"used\.gguf was cut while it was read": lambda file: os.truncate(file, 64),
    r"used\.gguf was changed while it was in use: expected it as it was opened": lambda file: file.write_bytes(
        bytes(byte ^ 1 for byte in file.read_bytes())
    ),
    r"used\.gguf was changed while it was in use": os.utime,
}


@needs_kernels
@pytest.mark.parametrize("message", CHANGES)
def test_a_file_that_changes_in_use_fails_requests_and_not_the_process(
    message: str, mixed: Path, cache: Path, tmp_path: Path
) -> None:
    """None is answered from other weights: files of the same content as before are not told apart from others."""
    copied = Path(shutil.copy(mixed, tmp_path / "used.gguf"))
    pipe = load(copied, drafter="ngram")
    pipe.generate([70, 71, 72], max_new_tokens=8, ignore_eos=True)
    CHANGES[message](copied)
    for _ in range(2):
        with pytest.raises(mmspec.UserError, match=message):
            pipe.generate([70, 71, 72], max_new_tokens=8)
    copied.write_bytes(mixed.read_bytes())
    with pytest.raises(mmspec.UserError, match=r"used\.gguf was changed while it was in use"):
        pipe.generate([70, 71, 72], max_new_tokens=8)


@needs_kernels
@pytest.mark.parametrize("dtype", ["auto", "float32", "int8"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: os.truncate(file, file.stat().st_size - 5000), r"cut while it was read: expected all of its"),
        (lambda file: file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes())), "changed while it was in use"),
    ],
)
def test_a_file_that_changes_while_it_is_read_is_an_error(
    change: Callable[[Path], Any], message: str, dtype: str, cache: Path, mixed: Path, tmp_path: Path
) -> None:
    copied = Path(shutil.copy(mixed, tmp_path / "read.gguf"))
    source = source_of(copied)
    change(copied)
    with pytest.raises(mmspec.UserError, match=rf"read\.gguf was {message}"):
        pack_model(*source.model(AutoModelForCausalLM, source.config(), dtype, True))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "sums.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "zeros"])
def test_damaged_files_of_the_cache_are_made_again(name: str, damage: str, file: Path, cache: Path) -> None:
    expected = load_processor(str(file)).tokenizer("some text").input_ids
    (index,) = cache.glob("gguf/*/*")
    whole = {path.name: path.read_bytes() for path in index.iterdir()}
    damages = {"cut": whole[name][: len(whole[name]) // 2], "zeros": bytes(len(whole[name]))}
    (index / name).unlink()
    if damage in damages:
        (index / name).write_bytes(damages[damage])
    assert load_processor(str(file)).tokenizer("some text").input_ids == expected
    assert {path.name: path.read_bytes() for path in index.iterdir()} == whole


@needs_kernels
def test_progress_is_shown_on_a_terminal_only(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that are read in parts, with a progress bar, are the same."""
    monkeypatch.setattr(logging, "_tqdm_active", True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    plain = model_in(file).state_dict()
    assert not capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for count in (1, 3, packing._AT_ONCE):
        monkeypatch.setattr(packing, "_AT_ONCE", count)
        found = model_in(file).state_dict()
        assert all(torch.equal(found[name], value) for name, value in plain.items()), count
        assert "Reading weights" in capsys.readouterr().err
    assert logging.is_progress_bar_enabled()


def test_files_of_a_folder_are_told_apart_by_their_names(tmp_path: Path) -> None:
    for name in ("a.gguf", "a-MMPROJ-f16.gguf"):
        (tmp_path / name).touch()
    assert gguf_file.file_in(tmp_path) == tmp_path / "a.gguf"
    assert gguf_file.projector_in(tmp_path) == tmp_path / "a-MMPROJ-f16.gguf"
    save_text_model(tmp_path)  # a folder with a configuration is read by transformers
    assert type(sources.find(str(tmp_path))) is sources.Source


def test_large_models_keep_their_dtype_on_a_cpu(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To save memory; small models are exact."""
    assert sources._LARGE == 10**9
    files = [save_gguf(tmp_path / f"{kind}.gguf", of_format(kind)) for kind in ("F16", "BF16")]
    files.append(save_text_model(tmp_path / "text"))
    AutoModelForCausalLM.from_pretrained(files[2]).half().save_pretrained(files[2])
    assert [model_in(file).dtype for file in files] == [torch.float32] * 3
    monkeypatch.setattr(sources, "_LARGE", 1)
    assert [model_in(file).dtype for file in files] == [torch.float16, torch.bfloat16, torch.float16]


def test_frequencies_of_llama_3_are_those_of_its_configuration(cache: Path, tmp_path: Path) -> None:
    """The file has factors in place of the parameters that they are of."""
    parameters = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    made = [LlamaConfig(head_dim=16, rope_parameters=one, max_position_embeddings=64) for one in (plain, parameters)]
    frequencies = [LlamaRotaryEmbedding(one).inv_freq for one in made]
    factors = (frequencies[0] / frequencies[1]).numpy()
    assert factors.max() > 4
    file = save_gguf(tmp_path / "a.gguf", factors={"rope_freqs": factors})
    model = model_in(file, "float32")
    config = copy.deepcopy(model.config)
    config.rope_parameters = parameters
    expected = AutoModelForCausalLM.from_config(config).eval()
    expected.load_state_dict(model.state_dict())
    ids = torch.arange(60)[None]
    torch.testing.assert_close(model(ids).logits, expected(ids).logits, atol=1e-5, rtol=1e-5)


FACTORS = {"rope_factors_long": np.arange(1, 9), "rope_factors_short": np.ones(8)}


@pytest.mark.parametrize(
    ("scaling", "factors", "expected"),
    [
        ("linear", {}, {"rope_type": "linear", "factor": 4.0}),
        ("yarn", {}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
        ("none", {}, {"rope_type": "default"}),
        (
            "none",
            FACTORS,
            {"rope_type": "longrope", "long_factor": [*range(1, 9)], "short_factor": [1.0] * 8}
            | {"original_max_position_embeddings": 16},
        ),
    ],
)
def test_scaled_positions_are_those_of_the_file(scaling, factors, expected, cache: Path, tmp_path: Path) -> None:
    entries = {"scaling.type": scaling, "scaling.factor": 4.0, "scaling.original_context_length": 16}
    entries = {f"llama.rope.{name}": value for name, value in entries.items()} | {"split.count": 1}
    file = save_gguf(tmp_path / "a.gguf", entries=entries, factors=factors, base=1e6)
    assert source_of(file).config().rope_parameters == {**expected, "rope_theta": 1e6, "partial_rotary_factor": 1.0}


def tensor(name: str, kind: str, *shape: int) -> SimpleNamespace:
    return SimpleNamespace(name=name, shape=shape, format=kind)


def form_of(*tensors: SimpleNamespace) -> Any:
    return gguf.dtype_of(SimpleNamespace(tensors={one.name: one for one in tensors}))  # type: ignore[arg-type]


def test_the_form_is_that_of_most_weights_of_the_layers() -> None:
    other = [tensor("token_embd.weight", "F16", 99, 99), tensor("blk.0.attn_norm.weight", "F32", 999)]
    small, large = tensor("blk.0.attn_v.weight", "Q6_K", 8, 8), tensor("blk.0.ffn_up.weight", "Q4_K", 8, 9)
    assert form_of(*other, small, large) == "int4"
    assert form_of(*other, small, large, tensor("blk.1.attn_v.weight", "Q8_0", 8, 2)) == "int8"
    assert form_of(*other, small, tensor("blk.1.ffn_up.weight", "F16", 9, 9)) is torch.float16
    assert form_of(*other) is None


def test_every_format_of_the_package_has_a_form() -> None:
    """At most 5 bits per weight, scales included, are held in 4 bits; numbers as they are."""
    for kind, (block, size) in package.GGML_QUANT_SIZES.items():
        quantised = block > 1 and kind.name not in OTHERS
        plain = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind.name, torch.float32)
        expected = ("int4" if 8 * size / block <= 5 else "int8") if quantised else plain
        found = form_of(tensor("blk.0.ffn_up.weight", kind.name, 8, 8))
        assert found == expected, f"{kind.name}: if it is new, decide which dtype holds its weights"


def formats() -> list[Any]:
    """The formats that the package can read."""
    found = []
    for kind, (block, size) in package.GGML_QUANT_SIZES.items():
        try:
            package.dequantize(np.zeros((1, WIDTH // block * size), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return found


def test_the_weights_of_every_format_are_those_of_the_package(tmp_path: Path, cache: Path) -> None:
    """One file, a matrix of its layers for each format."""
    kinds, written = formats(), {}

    def matrix(name: str, block: int, shape: tuple[int, int]) -> tuple[np.ndarray, Any]:
        if name not in READ:
            return random_matrix("F32", shape)
        place = block * len(READ) + READ.index(name)
        data, kind = random_matrix(kinds[place % len(kinds)].name, shape, place)
        weight = torch.tensor(package.dequantize(data.view(np.uint8), kind))
        written[f"model.layers.{block}.{PLACES[name]}.weight"] = kind.name, weight
        return data, kind

    file = save_gguf(tmp_path / "all.gguf", matrix, block_count=-(-len(kinds) // len(READ)), **SIZES)
    found = model_in(file, "float32").state_dict()
    assert {kind for kind, _ in written.values()} == {kind.name for kind in kinds}
    for name, (kind, weight) in written.items():
        assert torch.equal(found[name], weight), kind


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "expected"),
    [("Q8_0", "Int8Blocks"), ("Q5_1", "Q5Blocks"), ("IQ4_NL", "Int4Blocks"), ("Q4_K", "Q4KBlocks"), ("F16", None)],
)
def test_the_default_dtype_is_that_of_the_file(kind: str, expected: str | None, tmp_path: Path, cache: Path) -> None:
    """Drafters of packed weights are int8: a draft model loaded by name, and a trained drafter's network."""
    target = load(save_gguf(tmp_path / "one.gguf", of_format(kind), **SIZES)).target
    assert weights_kind(target.model) == expected
    assert target.model.dtype == (torch.float32 if expected is None else torch.bfloat16)
    if expected is None:
        return
    drafter = Small(str(save_text_model(tmp_path / "draft", vocab=260)))
    drafter.attach(target)
    network, like = torch.nn.Sequential(torch.nn.Linear(32, 32)), torch.zeros(1, dtype=torch.bfloat16)
    pack_drafter(network, like, drafter_kind(target, like))
    assert weights_kind(drafter.model) == weights_kind(network) == "Int8Blocks"


MIXED = [
    {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q4_K", "ffn_down": "Q6_K"},  # as in Q4_K_M
    {"attn_q": "Q5_0", "attn_k": "Q5_1", "attn_v": "Q8_0", "attn_output": "Q5_K", "ffn_down": "Q4_1"},
]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with every format that the kernels run, several of them in the projections of one layer."""

    def matrix(name: str, block: int, shape: tuple[int, int]) -> tuple[np.ndarray, Any]:
        form = "Q8_0" if block < 0 else MIXED[block].get(name, "Q4_K")
        scale = 2e-4 if form.endswith("K") else 2e-3
        return random_rows(form, shape, block + 1, scale=scale), package.GGMLQuantizationType[form]

    sizes = {**SIZES, "feed_forward_length": 2 * WIDTH, "alignment": 512}
    return save_gguf(tmp_path_factory.mktemp("mixed") / "mixed.gguf", matrix, **sizes)


@needs_kernels
def test_layers_have_the_formats_and_weights_of_the_file(mixed: Path, cache: Path) -> None:
    exact, pipe = model_in(mixed, "float32"), load(mixed)
    model = pipe.model
    assert pipe.target.decoder._sublayers is not None
    for name, layer in model.model.layers.named_modules():
        if isinstance(layer, BlockLinear):
            block, _, part = name.split(".")
            stored = {"o_proj": "attn_output", "down_proj": "ffn_down"}.get(part, f"attn_{part[0]}")
            form = "Q4_K" if part in ("gate_proj", "up_proj") else MIXED[int(block)][stored]
            assert type(layer) is FORMATS[form], name
            assert torch.equal(layer.weight, exact.model.layers.get_submodule(name).weight.bfloat16())
    assert type(model.lm_head) is Int8Blocks
    assert torch.equal(model.lm_head.weight, exact.lm_head.weight.bfloat16())
    chosen = model_in(mixed, "int8")  # by the user
    assert {type(part) for part in chosen.modules() if isinstance(part, BlockLinear)} == {Int8Blocks}


@needs_kernels
def test_layers_that_the_file_keeps_unquantised_are_not_quantised(tmp_path: Path, cache: Path) -> None:
    def matrix(name: str, block: int, shape: tuple[int, int]) -> tuple[np.ndarray, Any]:
        form = "F32" if name == "ffn_down" else "Q4_0"
        weight = np.random.default_rng(block + 1).standard_normal(shape, np.float32) if form == "F32" else None
        return random_rows(form, shape, block + 1) if weight is None else weight, package.GGMLQuantizationType[form]

    file = save_gguf(tmp_path / "a.gguf", matrix, **SIZES)
    exact, model = model_in(file, "float32"), model_in(file)
    for layer, plain in zip(model.model.layers, exact.model.layers, strict=True):
        assert torch.equal(layer.mlp.down_proj.weight, plain.mlp.down_proj.weight.bfloat16())
        assert type(layer.self_attn.o_proj) is Int4Blocks
    chosen = model_in(file, "int4")  # by the user
    assert {type(layer.mlp.down_proj) for layer in chosen.model.layers} == {Int4Blocks}


@needs_kernels
def test_embeddings_stay_in_the_file_and_count_as_weights(mixed: Path, cache: Path) -> None:
    """transformers finds a model's dtype by its first parameter, in every pass."""
    exact = model_in(mixed, "float32")
    model = model_in(mixed)
    table, weight = model.get_input_embeddings(), exact.get_input_embeddings().weight.bfloat16()
    assert isinstance(table, StoredEmbedding)
    assert table.stored.in_file
    assert next(model.parameters()) is table.weight
    assert table.weight.isnan().all()
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cpu")
    ids = torch.tensor([[3, 250, 3], [0, 259, 17]])
    assert torch.equal(table(ids), weight[ids])
    assert torch.equal(model.state_dict()["model.embed_tokens.weight"], weight)
    assert model.num_parameters() >= weight.numel()
    for wrong in (260, -261):
        with pytest.raises(IndexError):
            table(torch.tensor([wrong]))
    before = fingerprint(model)
    table.stored = table.stored.ordered(torch.arange(260).flip(0))
    assert fingerprint(model) != before == fingerprint(model_in(mixed))


@needs_kernels
def test_mixed_formats_decode_as_generate_does(mixed: Path, cache: Path) -> None:
    """Nodes of a chain have the bits of single steps, which the layers compute in one call."""
    pipe = load(mixed, drafter="ngram")
    ids = torch.tensor([[70, 71, 72, 70, 71, 72, 70, 71]])
    mask = torch.ones_like(ids)
    expected = pipe.model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=None)
    found = mmspec.generate(pipe.model, drafter=Ngram(), input_ids=ids, max_new_tokens=24, eos_token_id=None)
    assert found.tolist() == expected.tolist()
    target = TransformersTarget(pipe.model)
    prefilled(target, Prompt(ids), 8)
    tokens = torch.tensor([[9, 80, 5, 6, 7]])
    together = target.verify(TokenTree(tokens, torch.arange(5)[None] - 1)).logits[0].clone()
    for token, logits in zip(tokens[0], together, strict=True):
        tree = TokenTree.root(token[None])
        output = target.verify(tree)
        assert torch.equal(output.logits[0, 0], logits)
        target.commit(accept_path(tree, output.logits.argmax(-1)))


def test_rows_that_cannot_be_put_in_order_are_left_out(mixed: Path) -> None:
    """They are quantised again."""

    def reversed_rows(config: Any, rows: int) -> torch.Tensor:
        return torch.arange(rows).flip(0)

    changes = {"attn_q": Rows(reversed_rows), "attn_v": lambda config, weight: weight.T, "ffn_down": minus_one}
    for name, tensor in gguf_file.GGUFFile(mixed).tensors.items():
        weight, kind = (
            Weight([tensor], changes.get(name.split(".")[-2]), None, torch.Size(tensor.shape)),
            name.split(".")[-2],
        )
        parts = tensor.split([1, tensor.shape[0] - 1])
        assert torch.equal(torch.cat([part[...] for part in parts]), tensor[...])
        found = weight.rows()
        assert (found is None) == (kind in ("attn_v", "ffn_down") or tensor.format == "F32"), name
        if kind == "attn_q":
            assert torch.equal(found.dense(), tensor[...].flip(0))
            assert torch.equal(weight[...], tensor[...].flip(0))


def test_reordered_columns_keep_eight_bits(mixed: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights in 4 bits whose rows cannot stay as they are stored."""
    row = gguf_models.ARCHITECTURES["llama"]
    names = {**row.names, "ffn_down": ("mlp.down_proj", lambda config, weight: weight.flip(1))}
    monkeypatch.setitem(gguf_models.ARCHITECTURES, "llama", dataclasses.replace(row, names=names))
    source = source_of(mixed)
    model, _ = source.model(AutoModelForCausalLM, source.config(), "auto", True)
    for number, layer in enumerate(model.model.layers):
        expected = gguf_file.GGUFFile(mixed).tensors[f"blk.{number}.ffn_down.weight"][...].flip(1)
        (rows,) = layer.mlp.down_proj.stored
        assert rows.format == "Q8_0"
        assert (rows.dense() - expected).abs().max() < expected.abs().max() / 200


@pytest.mark.parametrize("fails", [False, True])
def test_the_package_reads_by_itself_again(
    fails: bool, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the configuration is refused; its reader, slow for vocabularies, is not called."""
    reader = package.GGUFReader

    class Reader(reader):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            raise AssertionError

    monkeypatch.setattr(package, "GGUFReader", Reader)
    found = gguf_file.GGUFFile(file)
    if fails:
        del found.metadata["llama.block_count"]
        found.metadata["general.architecture"] = "lemma"
        with pytest.raises(mmspec.UserError, match="lemma"):
            gguf.config(found)
    else:
        assert gguf.config(found).num_hidden_layers == 2
    assert package.GGUFReader is Reader
