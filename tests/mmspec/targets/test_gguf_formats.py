"""Every format of GGUF: its weights as they are read, and the dtype that holds them; gguf itself stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mmspec
from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.core.verify import accept_path
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.small import Small
from mmspec.errors import UserError
from mmspec.quantisation.blocks import BlockLinear, Int8Blocks
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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
