"""Decoder layers in one call, or in few launches with static shapes, equal the model's own layers."""

import copy
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import mmspec
from mmspec.core.target import Prompt
from mmspec.core.tree import TokenTree
from mmspec.core.verify import accept_path
from mmspec.drafters.ngram import Ngram
from mmspec.ops import cpu
from mmspec.progress import PART
from mmspec.quantisation.blocks import BLOCKS, BlockLinear
from mmspec.quantisation.linear import HalfLinear
from mmspec.targets import packing, recognise, static_forward
from mmspec.targets.sublayers import MAX_ROWS
from mmspec.targets.transformers_target import TransformersTarget
from tests.compiled import needs_kernels
from tests.targets import prefilled
from tests.tiny import random_tree, shared_model

VOCAB = 120
SIZES = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=32, max_position_embeddings=128)

GEMMA3 = partial(
    transformers.Gemma3TextConfig,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    sliding_window=8,
    query_pre_attn_scalar=12,
)
"""Windows that tests exceed, two sets of rotary frequencies, and a scale that is not that of the head's size."""

NO_ROTATION = partial(transformers.SmolLM3Config, no_rope_layer_interval=2, pad_token_id=0)  # in every second layer
ROWS = [127, 128, 129, 255, 256, 257]  # the kernels compute 128 rows at a time
FUSED = ["llama", "mistral-window", "qwen2-window", "qwen3", "gemma3", "llava", "qwen2_vl", "qwen3_vl"]
"""One of each kind: windows, biases, norms of heads and of outputs, positions with several axes."""


def model_of(config_class: Any, **changes: Any) -> Any:
    """A random model whose norms and biases differ from their defaults."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**{**SIZES, **changes})).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


FAMILIES = [
    transformers.LlamaConfig,
    transformers.MistralConfig,
    transformers.Qwen2Config,
    transformers.Qwen3Config,
    GEMMA3,
]
PACKED = ["bfloat16", *packing.QUANTISED]
kinds = pytest.mark.parametrize("kind", PACKED)

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


def in_python(model):
    """A target that runs the decoder's own forward."""
    target = TransformersTarget(model)
    target.decoder.__dict__["_sublayers"] = None
    return target


def logits_of(model, ids, trees, hook=None, target_of=TransformersTarget):
    """Logits of verify passes of chains of 3 after a prompt, and how often the decoder's forward ran in them."""
    calls = []
    target = target_of(model)
    with model.get_decoder().register_forward_hook(lambda *args: calls.append(1) or (hook(args[2]) if hook else None)):
        prefilled(target, Prompt(ids), 3 * trees)
        calls.clear()
        tree = TokenTree(torch.tensor([[3, 4, 5]]), torch.tensor([[-1, 0, 1]]))
        found = []
        for _ in range(trees):
            found.append(target.verify(tree).logits)
            target.commit(accept_path(tree, torch.tensor([[4, 5, 7]])))
    return torch.cat(found), len(calls)


def dequantised(model):
    """A usual float32 model with the weights of a packed one, whose layers compute their own outputs."""
    plain = copy.deepcopy(model)
    for parent in list(plain.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, BlockLinear):
                usual = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
                usual.weight.data.copy_(layer.weight)
                if layer.bias is not None:
                    usual.bias.data.copy_(layer.bias)
                setattr(parent, name, usual)
    return plain.float()


@pytest.mark.usefixtures("fixed_shapes")
@pytest.mark.parametrize("config_class", [transformers.Gemma2Config, transformers.Olmo2Config, NO_ROTATION])
def test_layers_with_other_parts_stay(config_class):
    model = model_of(config_class)
    targets = TransformersTarget(model), by_the_decoder(TransformersTarget(model))
    torch.testing.assert_close(*map(static_logits, targets))


def test_only_hooks_of_transformers_and_no_others_leave_a_layer_plain():
    capture = lambda *args: None  # noqa: E731
    capture.__module__ = "transformers.utils.output_capturing"
    for kind, (hook, hooked) in product(("forward", "forward_pre"), ((capture, False), (print, True))):
        layer = nn.Linear(2, 2)
        assert not recognise.is_hooked(layer)
        getattr(layer, f"register_{kind}_hook")(hook)
        assert recognise.is_hooked(layer) == hooked
    layer = nn.Linear(2, 2)
    layer.forward = layer.forward  # accelerate's
    assert recognise.is_hooked(layer)


def test_switches_of_a_module_are_its_numbers_and_texts():
    given = {"layer_idx": 1, "window": 3, "turns": True, "weight": torch.ones(1)}
    assert recognise.switches(SimpleNamespace(**given)) == [("turns", True), ("window", 3)]


@pytest.mark.parametrize(("kind", "more"), [(LlamaRMSNorm, 0.0), (Gemma3RMSNorm, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gains_that_bfloat16_does_not_tell_from_one_more(kind, more, dtype):
    """From 256 on, bfloat16 has no neighbouring whole numbers."""
    weights = torch.tensor([0.5, 3.0, 700.0, 788.0], dtype=dtype)
    norm = kind(4).to(dtype)
    norm.weight.data = weights
    assert torch.equal(recognise.gain_of(norm), weights.float() + more)
    assert norm.weight.dtype == dtype


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("config_class", [transformers.LlamaConfig, GEMMA3])
@kinds
def test_speculative_decoding_of_a_packed_model_equals_plain_decoding(config_class, kind, kernels, monkeypatch):
    monkeypatch.setenv("MMSPEC_KERNELS", kernels)
    model = model_of(config_class, tie_word_embeddings=True)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8)  # logits apart
    packing.pack_model(model, kind)
    assert packing.weights_kind(model).lower().startswith(kind)
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    options = dict(max_new_tokens=24, do_sample=False, eos_token_id=None)
    plain, drafted = (mmspec.generate(model, drafter=one, input_ids=ids, **options) for one in (None, Ngram()))
    assert torch.equal(drafted, plain)


@needs_kernels
@pytest.mark.parametrize("length", [ORIGINAL - 12, ORIGINAL + 1])
@pytest.mark.parametrize("kind", ["default", *ROPE_INIT_FUNCTIONS])
def test_rotations_of_every_kind(kind, length):
    """Before and after the length at which some kinds change."""
    parameters = dict(rope_type=kind, **ROTATIONS[kind])
    model = model_of(transformers.LlamaConfig, rope_parameters=parameters)
    exact = copy.deepcopy(model)
    packing.pack_model(model, "bfloat16")
    ids = torch.arange(length)[None]
    found, ran = logits_of(model, ids, trees=4)
    assert not ran
    torch.testing.assert_close(found, logits_of(model, ids, 4, target_of=in_python)[0], atol=0.05, rtol=0.02)
    torch.testing.assert_close(found, logits_of(exact, ids, trees=4)[0], atol=0.1, rtol=0.05)


@needs_kernels
@pytest.mark.parametrize("first", [1, 2, 9])
def test_passes_at_every_position_around_the_doublings_of_the_table(first):
    model = model_of(transformers.LlamaConfig)
    packing.pack_model(model, "int8")
    targets = [TransformersTarget(model) for _ in range(2)]
    usual, other = (target.decoder._sublayers for target in targets)
    other._fixed = False  # rotations of the pass alone
    for target in targets:
        prefilled(target, Prompt(torch.arange(first)[None]), 60)
    for position in range(first, 4 * first + 6):
        tree = TokenTree.root(torch.tensor([position]))
        mine, theirs = (target.verify(tree).logits for target in targets)
        assert torch.equal(mine, theirs), f"position {position}"
        for target in targets:
            target.commit(accept_path(tree, torch.tensor([[position + 1]])))
    assert usual._rotations.shape[1] > 4 * first
    assert other._rotations.shape[1] == 1


@needs_kernels
@kinds
@pytest.mark.parametrize(
    "layers",
    [["sliding_attention"] * 3, ["full_attention"] * 3, ["sliding_attention", "full_attention", "sliding_attention"]],
    ids=["windowed", "full", "both"],
)
def test_windowed_and_full_layers_have_their_own_masks(layers, kind):
    changes = dict(use_sliding_window=True, sliding_window=8, max_window_layers=0, layer_types=layers)
    model = model_of(transformers.Qwen2Config, **changes)
    exact = copy.deepcopy(model)
    packing.pack_model(model, kind)
    ids = torch.randint(VOCAB, (1, 21))
    found, ran = logits_of(model, ids, trees=2)
    assert not ran
    error = (found - logits_of(exact, ids, trees=2)[0]).abs().max()
    assert error < {"bfloat16": 0.05, "int8": 0.1, "int4": 0.5}[kind], error


@needs_kernels
@pytest.mark.parametrize(
    ("config_class", "rows"),
    [
        *((transformers.LlamaConfig, rows) for rows in (*ROWS, 1023, 1024, 1025)),
        (transformers.Qwen2Config, 129),
        (transformers.Qwen3Config, 129),
    ],
)
@kinds
def test_prompts_of_any_number_of_rows(kind, config_class, rows):
    """Prefill, and a verify pass after it, against the same weights in a usual float32 model."""
    assert MAX_ROWS == 1024
    model = model_of(config_class, max_position_embeddings=1200)
    packing.pack_model(model, kind)
    ids, models = torch.randint(VOCAB, (1, rows)), (model, dequantised(model))
    for run in (
        lambda one: logits_of(one, ids, trees=1)[0],
        lambda one: prefilled(TransformersTarget(one), Prompt(ids), 4).logits[:, -1].float(),
    ):
        torch.testing.assert_close(*map(run, models), atol=0.1, rtol=0.05)


@needs_kernels
def test_a_long_prompt_is_read_in_parts(caplog):
    """Each part is a pass, after which the prefill may be dropped; the first prompt of a model, too."""
    model = model_of(transformers.LlamaConfig, max_position_embeddings=3000)
    packing.pack_model(model, "int4")
    target, ids, logits = TransformersTarget(model), torch.randint(VOCAB, (1, 2050)), []
    with caplog.at_level(PART, "mmspec"):
        passes = list(target.prefill([Prompt(ids)], [4], (0, "last")))
    assert caplog.messages == [f"reading the prompt: {count} of 2050 tokens" for count in (1024, 2048)]
    assert passes[:-1] == [None, None]
    assert [passes[-1].features[name].shape[1] for name in (0, "last")] == [2050, 2050]
    for one in (model, dequantised(model)):
        logits.append(prefilled(TransformersTarget(one), Prompt(ids), 4).logits[:, -1].float())
    torch.testing.assert_close(passes[-1].logits[:, -1].float(), logits[0], atol=0, rtol=0)
    torch.testing.assert_close(*logits, atol=0.1, rtol=0.05)


@needs_kernels
@pytest.mark.parametrize(
    ("changes", "compiled"),
    [
        *(({"head_dim": size}, True) for size in cpu.HEAD_DIMS),
        ({"head_dim": 48, "num_key_value_heads": 4}, True),  # a head's outputs are half of a group of 32
        ({"head_dim": 24}, False),
        ({"head_dim": 512}, False),
        ({"hidden_size": 80}, False),
        ({"intermediate_size": 72}, False),
        ({"hidden_act": "gelu"}, False),
    ],
    ids=str,
)
def test_shapes_that_the_kernels_compute_and_others(changes, compiled):
    model = model_of(transformers.LlamaConfig, **changes)
    packing.pack_model(model, "int8")
    assert (TransformersTarget(model).decoder._sublayers is not None) is compiled
    ids = torch.randint(VOCAB, (1, 9))
    found, expected = (logits_of(one, ids, trees=1)[0] for one in (model, dequantised(model)))
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)


@needs_kernels
@pytest.mark.parametrize("length", [50, 200])
@kinds
def test_a_batch_of_more_rows_than_a_chunk(kind, length):
    """Prompts, two of which fit in a chunk, or of more than a chunk each."""
    model = model_of(transformers.LlamaConfig, max_position_embeddings=300)
    packing.pack_model(model, kind)
    ids = torch.randint(VOCAB, (3, length))
    together = prefilled(TransformersTarget(model), Prompt(ids), 4).logits[:, -1]
    for row, expected in zip(ids, together, strict=True):
        alone = prefilled(TransformersTarget(model), Prompt(row[None]), 4).logits[0, -1]
        assert torch.equal(alone, expected)


@needs_kernels
@kinds
def test_weights_that_several_threads_read(kind):
    """Layers so large that each product is computed in parts."""
    sizes = dict(hidden_size=512, intermediate_size=1024, head_dim=64, num_hidden_layers=2)
    model, ids, found = model_of(transformers.LlamaConfig, **sizes), torch.randint(VOCAB, (1, 100)), []
    packing.pack_model(model, kind)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(logits_of(model, ids, trees=1)[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@kinds
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_not_quantised_to_fewer_bits_than_eight(kind, kernels, tied, monkeypatch):
    """By the kernels of C++ as int8 with a scale per 32 weights, by torch's as float16; behind bfloat16 as that."""
    monkeypatch.setenv("MMSPEC_KERNELS", kernels)
    model = model_of(transformers.LlamaConfig, tie_word_embeddings=tied)
    exact = model.get_output_embeddings().weight.detach().clone()
    compiled = packing.packed(nn.Linear(32, 32), "int8").__class__ is BLOCKS["int8"]
    packing.pack_model(model, kind)
    head = model.get_output_embeddings()
    if kind in packing.QUANTISED:
        assert type(head) is (BLOCKS["int8"] if compiled else HalfLinear)
    else:
        assert type(head) is (BLOCKS if compiled else packing.KINDS)[kind]
    assert (head.weight.float() - exact).abs().max() < 0.01 * exact.abs().max()
    if compiled:
        assert head.takes == torch.float32


@needs_kernels
def test_hooks_take_effect_between_passes():
    """Layers are computed by one call, but with hooks in the decoder's forward."""
    model = model_of(transformers.LlamaConfig)
    packing.pack_model(model, "bfloat16")
    targets = [one(model) for one in (TransformersTarget, in_python)]
    for target in targets:
        prefilled(target, Prompt(torch.arange(9)[None]), 9)

    def logits(target, factor):
        with model.get_decoder().layers[1].register_forward_hook(lambda *args: factor * args[2]):
            return target.verify(TokenTree(torch.tensor([[3, 4]]), torch.tensor([[-1, 0]]))).logits

    whole, halved = logits(targets[0], 1.0), logits(targets[0], 0.5)
    assert not torch.allclose(whole, halved, atol=0.01)
    torch.testing.assert_close(halved, logits(targets[1], 0.5), atol=0.02, rtol=0.02)
    unhooked = targets[0].verify(TokenTree(torch.tensor([[3, 4]]), torch.tensor([[-1, 0]]))).logits
    torch.testing.assert_close(unhooked, whole, atol=0.02, rtol=0.02)


@needs_kernels
def test_a_decoder_that_does_more_than_its_layers_runs_in_every_pass():
    model = model_of(transformers.LlamaConfig)
    packing.pack_model(model, "int8")

    def doubled(out):
        out.last_hidden_state = 2 * out.last_hidden_state
        return out

    ids = torch.arange(9)[None]
    plain, _ = logits_of(model, ids, 3)
    found, calls = logits_of(model, ids, 3, doubled)
    assert calls == 3
    assert not torch.allclose(found, plain, atol=0.1)


@pytest.fixture
def ran(monkeypatch, fixed_shapes):
    """Passes that ran the layers in few launches."""
    calls, states = [], static_forward.FusedDecoder.states
    monkeypatch.setattr(
        static_forward.FusedDecoder, "states", lambda self, *given: calls.append(self) or states(self, *given)
    )
    return calls


def static_logits(target, batch=2):
    """Of a prompt of 12 tokens and a tree after it, where the rows have the same tokens."""
    ids = (torch.arange(12) * 7 % 90)[None].expand(batch, -1)
    prefilled(target, Prompt(ids.contiguous()), 20)
    tree = random_tree(torch.Generator().manual_seed(1), 1, 9, 90)
    tree = TokenTree(tree.tokens.expand(batch, -1), tree.parents.expand(batch, -1), check=False)
    found = target.verify(tree).logits
    target.keep([])
    return found


def by_the_decoder(target):
    """The same target, whose layers are not recognised."""
    target.decoder._fused = None
    return target


@pytest.mark.parametrize("name", FUSED)
def test_float32_is_that_of_the_decoder(name, ran):
    model = shared_model(name)
    target = TransformersTarget(model)
    found = static_logits(target)
    assert target.decoder._fuses  # as the first pass agrees
    assert ran
    ran.clear()
    torch.testing.assert_close(found, static_logits(by_the_decoder(TransformersTarget(model))), atol=2e-5, rtol=1e-4)
    assert not ran


@pytest.mark.parametrize("name", FUSED)
def test_bfloat16_is_near_the_decoder(name, ran):
    """Relative error against float32, compared with the decoder's own forward in bfloat16."""
    model = copy.deepcopy(shared_model(name))
    for module in model.modules():
        if "norm" in type(module).__name__.lower() and hasattr(module, "weight"):
            module.weight.data += 0.1 * torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(0))
    model = model.bfloat16()
    exact = static_logits(by_the_decoder(TransformersTarget(copy.deepcopy(model).float())))
    target = TransformersTarget(model)
    found, usual = static_logits(target), static_logits(by_the_decoder(TransformersTarget(model)))
    assert target.decoder._fuses
    ours, theirs = ((x.float() - exact).norm() / exact.norm() for x in (found, usual))
    assert ours < 1.2 * theirs < 0.05


@pytest.mark.parametrize("name", ["gemma2", "doge", "bamba"])
def test_other_layers_run_in_the_decoder(name, ran):
    static_logits(TransformersTarget(shared_model(name)), 1)
    assert not ran


def test_caps_of_scores_and_rotations_by_other_arguments_are_not_reproduced():
    model = copy.deepcopy(shared_model("llama"))
    decoder = model.get_decoder()
    assert static_forward.FusedDecoder.of(decoder, model.config)
    decoder.layers[1].self_attn.attn_logit_softcapping = 50.0  # small scores do not reveal it
    assert static_forward.FusedDecoder.of(decoder, model.config) is None
    del decoder.layers[1].self_attn.attn_logit_softcapping
    decoder.rotary_emb.forward = lambda x, seq_len: x
    assert static_forward.FusedDecoder.of(decoder, model.config) is None


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama", "qwen2-window"])
def test_nodes_that_stay_are_attended_to(name, ran):
    found = []
    for change in (lambda target: target, by_the_decoder):
        target = change(TransformersTarget(shared_model(name)))
        prefilled(target, Prompt((torch.arange(12) * 7 % 90)[None]), 20)
        first, depth = torch.tensor([[3, 4]]), torch.zeros(1, 2, dtype=torch.long)
        target.runner.forward_nodes(first, depth, torch.eye(2, dtype=torch.bool)[None])
        target.runner.keep_nodes(depth)
        reach = torch.tensor([[[True, False, True, False], [False, True, False, True]]])
        found.append(target.runner.forward_nodes(torch.tensor([[7, 8]]), depth + 1, reach)["last"])
    assert ran
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-4)


def wrapped(layer):
    forward = layer.forward
    layer.forward = lambda *args, **given: 2 * forward(*args, **given)


def replaced(layer):
    layer.self_attn.v_proj = copy.deepcopy(layer.self_attn.v_proj)
    written(layer)


def written(layer):
    layer.self_attn.v_proj.weight.data.mul_(2)


def moved(layer):
    layer.mlp.up_proj.weight.data = 2 * layer.mlp.up_proj.weight.data
    layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.clone()


CHANGES = {
    "hooked": (lambda model: model.model.layers[1].mlp.register_forward_hook(lambda _, args, out: 2 * out), False),
    "wrapped": (lambda model: wrapped(model.model.layers[0]), False),
    "replaced": (lambda model: replaced(model.model.layers[1]), False),
    "written": (lambda model: written(model.model.layers[1]), True),
    "moved": (lambda model: [moved(layer) for layer in model.model.layers], True),
    "scaled": (lambda model: model.model.norm.weight.data.mul_(3), True),
}
"""A change, and whether the layers still run in few launches."""


@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_passes_take_effect(name, ran):
    (change, fused), model = CHANGES[name], copy.deepcopy(shared_model("llama"))
    target = TransformersTarget(model)
    before = static_logits(target)
    if name == "written":
        model(torch.arange(4)[None], output_hidden_states=True)  # transformers' own hooks stay, and do nothing later on
    change(model)
    ran.clear()
    found = static_logits(target)
    assert bool(ran) == fused
    assert not torch.allclose(found, before, atol=1e-3)
    torch.testing.assert_close(found, static_logits(by_the_decoder(TransformersTarget(model))), atol=2e-5, rtol=1e-4)


def test_a_decoder_that_does_more_is_noticed_once(ran):
    model = copy.deepcopy(shared_model("llama"))
    forward = model.model.forward

    def doubled(*args, **given):
        out = forward(*args, **given)
        out.last_hidden_state = 2 * out.last_hidden_state
        return out

    target, other = TransformersTarget(model), by_the_decoder(TransformersTarget(model))
    model.model.forward = doubled
    found = static_logits(target)
    assert len(ran) == 1
    torch.testing.assert_close(static_logits(target), found)
    assert len(ran) == 1
    torch.testing.assert_close(found, static_logits(other))


@pytest.mark.usefixtures("fixed_shapes")
def test_joined_weights_stay_those_of_the_model():
    model = copy.deepcopy(shared_model("qwen2"))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    parameters = list(model.parameters())
    static_logits(TransformersTarget(model))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    after = model.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    attention = model.model.layers[0].self_attn
    places = {
        part.weight.untyped_storage().data_ptr() for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    }
    assert len(places) == 1
    static_logits(TransformersTarget(model))
    assert {attention.q_proj.weight.untyped_storage().data_ptr()} == places  # joined once
    model(torch.arange(9)[None]).logits.sum().backward()
    assert attention.k_proj.weight.grad.any()


def test_a_model_that_was_made_in_inference_mode(ran):
    with torch.inference_mode():
        model = copy.deepcopy(shared_model("qwen2"))
        for weight in model.parameters():
            weight.data = weight.data.clone()
    target = TransformersTarget(model)
    found = static_logits(target)
    torch.testing.assert_close(static_logits(target), found)
    assert ran
    torch.testing.assert_close(found, static_logits(TransformersTarget(shared_model("qwen2"))))
