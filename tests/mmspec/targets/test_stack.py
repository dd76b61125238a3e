"""All layers of a packed decoder in one call: kinds of rotations and layers, table sizes, numbers of rows."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.core.verify import accept_path
from mmspec.ops import cpu
from mmspec.quantisation.blocks import BLOCKS, BlockLinear
from mmspec.quantisation.linear import HalfLinear
from mmspec.targets import merged_layers
from mmspec.targets.merged_layers import MergedLayer, merge_layers
from mmspec.targets.packing import KINDS, QUANTISED, pack_model, packed
from tests.compiled import needs_kernels
from tests.mmspec.targets.packed import GEMMA3, VOCAB, layer_by_layer, model_of, target_of

ONE_OF_GEMMA3 = partial(GEMMA3, layer_types=["sliding_attention"])
LAYERS = [(kind, family) for kind in BLOCKS for family in (LlamaConfig, Qwen2Config, Qwen3Config)]
LAYERS += [("float32", ONE_OF_GEMMA3)]  # whose norms enlarge the rounding errors of small outputs
ROWS = [1, 127, 128, 129, 255, 256, 257]  # the kernels compute 128 rows at a time
PACKED = ["bfloat16", *QUANTISED]

ORIGINAL = 16  # positions before rotations that depend on the length change
ROPE = dict(rope_theta=10000.0, factor=4.0)
LONGER = dict(original_max_position_embeddings=ORIGINAL, **ROPE)
ROTATIONS = {
    "default": dict(rope_theta=10000.0),
    "linear": ROPE,
    "dynamic": LONGER,
    "yarn": LONGER,
    "longrope": dict(short_factor=[1.0] * 16, long_factor=[3.0 + i for i in range(16)], **LONGER),
    "llama3": dict(low_freq_factor=1.0, high_freq_factor=4.0, **LONGER),
    "proportional": dict(partial_rotary_factor=1.0, **ROPE),
}
CHANGING = ("dynamic", "longrope")  # with the greatest position of a pass


def logits_of(model, ids, trees):
    """Logits of verify passes of chains of 3 after a prompt, and how often the decoder's forward ran in them."""
    calls = []
    target = target_of(model)
    with model.get_decoder().register_forward_hook(lambda *_: calls.append(1)):
        target.prefill(Prompt(ids), max_new_tokens=3 * trees)
        calls.clear()
        tree = TokenTree(torch.tensor([[3, 4, 5]]), torch.tensor([[-1, 0, 1]]))
        found = []
        for _ in range(trees):
            found.append(target.forward_tree(tree).logits)
            target.commit(accept_path(tree, torch.tensor([[4, 5, 7]])))
    return torch.cat(found), len(calls)


@needs_kernels
@pytest.mark.parametrize("length", [ORIGINAL - 12, ORIGINAL + 1])
@pytest.mark.parametrize("kind", ["default", *ROPE_INIT_FUNCTIONS])
def test_rotations_of_every_kind(kind, length):
    """Up to the position at which some kinds change, and after it; the forward of such a decoder runs in every pass."""
    parameters = dict(rope_type=kind, **ROTATIONS[kind])
    model = model_of(LlamaConfig, rope_parameters=parameters)
    exact = copy.deepcopy(model)
    pack_model(model, "bfloat16")
    assert type(model.get_decoder().layers[0]) is MergedLayer
    ids = torch.arange(length)[None]
    found, ran = logits_of(model, ids, trees=4)
    assert ran == (4 if kind in CHANGING else 1)
    expected, _ = logits_of(layer_by_layer(model), ids, trees=4)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    theirs, _ = logits_of(exact, ids, trees=4)
    torch.testing.assert_close(found, theirs, atol=0.1, rtol=0.05)


@needs_kernels
@pytest.mark.parametrize("first", [1, 2, 9])
def test_passes_at_every_position_around_the_doublings_of_the_table(first):
    """One token at a time, the first of them at ``first``: the table of rotations grows twice."""
    model = model_of(LlamaConfig)
    pack_model(model, "int8")
    ids = torch.arange(first)[None]
    apart = layer_by_layer(copy.deepcopy(model))
    targets = [target_of(one) for one in (model, apart)]
    for target in targets:
        target.prefill(Prompt(ids), max_new_tokens=60)
    for position in range(first, 4 * first + 6):
        tree = TokenTree.root(torch.tensor([position]))
        mine, theirs = (target.forward_tree(tree).logits for target in targets)
        assert torch.equal(mine, theirs), f"position {position}"
        for target in targets:
            target.commit(accept_path(tree, torch.tensor([[position + 1]])))
    assert len(model.get_decoder().layers[0].stack._rotations) > 4 * first


@needs_kernels
@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(
    "layers",
    [["sliding_attention"] * 3, ["full_attention"] * 3, ["sliding_attention", "full_attention", "sliding_attention"]],
    ids=["windowed", "full", "both"],
)
def test_windowed_and_full_layers_have_their_own_masks(layers, kind):
    """A window of 8 tokens, passes after 21."""
    changes = dict(use_sliding_window=True, sliding_window=8, max_window_layers=0, layer_types=layers)
    model = model_of(Qwen2Config, **changes)
    exact = copy.deepcopy(model)
    pack_model(model, kind)
    assert all(layer.native is not None for layer in model.get_decoder().layers)
    ids = torch.randint(VOCAB, (1, 21))
    found, _ = logits_of(model, ids, trees=2)
    expected, _ = logits_of(layer_by_layer(model), ids, trees=2)
    assert torch.equal(found, expected)
    theirs, _ = logits_of(exact, ids, trees=2)
    error = (found - theirs).abs().max()
    assert error < {"bfloat16": 0.05, "int8": 0.1, "int4": 0.5}[kind], error


def dequantised(model):
    """A usual float32 model with the weights of a packed one, whose merged layers it keeps."""
    plain = copy.deepcopy(model)
    for parent in list(plain.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, BlockLinear):
                usual = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
                usual.weight.data.copy_(layer.weight)
                if layer.bias is not None:
                    usual.bias.data.copy_(layer.bias)
                setattr(parent, name, usual)
    return plain


def rounding_attention(layer):
    """The layer, with queries, keys and values rounded as the kernels round them."""
    attend = layer._attend
    layer._attend = lambda *states, **rest: attend(*(x.bfloat16().float() for x in states[:3]), *states[3:], **rest)
    return layer


@needs_kernels
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("kind", "config_class"), LAYERS)
def test_a_layer_of_any_number_of_rows_is_that_of_torch(kind, rows, config_class):
    """The same weights with torch's operations in float32, which round no inputs."""
    model = model_of(config_class, num_hidden_layers=1)
    for name in ("q_proj", "k_proj"):  # scores that depend on positions
        getattr(model.get_decoder().layers[0].self_attn, name).weight.data.mul_(10)
    merge_layers(decoder := model.get_decoder())
    layer = layer_by_layer(model).get_decoder().layers[0]
    for name in ("qkv", "gate_up", "out", "down"):
        linear = getattr(layer, name)
        setattr(layer, name, BLOCKS[kind](linear.weight, linear.bias))
    layer.last = False  # its output is not rounded
    plain = dequantised(layer)
    assert layer.native is not None
    assert plain.native is None
    x = torch.randn(1, rows, 64)
    windows = {"layer_type": "sliding_attention"} if config_class is ONE_OF_GEMMA3 else {}
    given = dict(position_embeddings=decoder.rotary_emb(x, position_ids=torch.arange(rows)[None], **windows))
    found, expected = layer(x, **given), rounding_attention(plain)(x, **given)
    tolerance = {"float32": 0.005, "bfloat16": 0.05, "int8": 0.1, "int4": 0.1}[kind]
    if config_class is ONE_OF_GEMMA3 and rows > 1:  # softmax weights are rounded too
        tolerance = 0.1
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0.01)


@needs_kernels
@pytest.mark.parametrize("rows", [*ROWS[1:], 1023, 1024, 1025])
@pytest.mark.parametrize("kind", PACKED)
def test_prompts_of_any_number_of_rows(kind, rows):
    """Prefill, and a verify pass after it, against the same weights in a usual float32 model."""
    assert merged_layers._MAX_ROWS == 1024
    model = model_of(LlamaConfig, max_position_embeddings=1200)
    pack_model(model, kind)
    plain = layer_by_layer(dequantised(model)).float()
    ids = torch.randint(VOCAB, (1, rows))
    found, _ = logits_of(model, ids, trees=1)
    expected, _ = logits_of(plain, ids, trees=1)
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)
    last = [target_of(one).prefill(Prompt(ids), max_new_tokens=4).logits[:, -1] for one in (model, plain)]
    torch.testing.assert_close(last[0], last[1].float(), atol=0.1, rtol=0.05)


@needs_kernels
@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(
    ("changes", "compiled"),
    [
        *(({"head_dim": size}, True) for size in cpu.HEAD_DIMS),
        ({"head_dim": 24}, False),
        ({"head_dim": 512}, False),
        ({"hidden_size": 80}, False),
        ({"intermediate_size": 72}, False),
        ({"hidden_act": "gelu"}, False),
    ],
    ids=str,
)
def test_shapes_that_the_kernels_compute_and_others(changes, compiled, kind):
    model = model_of(LlamaConfig, **changes)
    pack_model(model, kind)
    assert all((layer.native is not None) is compiled for layer in model.get_decoder().layers)
    ids = torch.randint(VOCAB, (1, 9))
    found, _ = logits_of(model, ids, trees=1)
    expected, _ = logits_of(layer_by_layer(dequantised(model)).float(), ids, trees=1)
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)


@needs_kernels
@pytest.mark.parametrize("kind", PACKED)
def test_a_batch_of_more_rows_than_a_chunk(kind):
    """Three prompts of 50 tokens: a chunk ends within the third."""
    model = model_of(LlamaConfig)
    pack_model(model, kind)
    ids = torch.randint(VOCAB, (3, 50))
    together = target_of(model).prefill(Prompt(ids), max_new_tokens=4).logits[:, -1]
    for row, expected in zip(ids, together, strict=True):
        alone = target_of(model).prefill(Prompt(row[None]), max_new_tokens=4).logits[0, -1]
        assert torch.equal(alone, expected)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_not_quantised_to_fewer_bits_than_eight(kind, kernels, tied, monkeypatch):
    """By the kernels of C++ as int8 with a scale per 32 weights, by torch's as float16; behind bfloat16 as that."""
    monkeypatch.setenv("MMSPEC_KERNELS", kernels)
    model = model_of(LlamaConfig, tie_word_embeddings=tied)
    exact = model.get_output_embeddings().weight.detach().clone()
    compiled = packed(nn.Linear(32, 32), "int8").__class__ is BLOCKS["int8"]
    pack_model(model, kind)
    head = model.get_output_embeddings()
    expected = BLOCKS["int8"] if compiled else HalfLinear
    if kind not in QUANTISED:
        expected = (BLOCKS if compiled else KINDS)[kind]
    assert type(head) is expected
    assert (head.weight.float() - exact).abs().max() < 0.01 * exact.abs().max()
    if compiled:
        assert head.takes == torch.float32
