"""Decoders in packed weights: trees, batches and prompts have the bits of plain decoding."""

import copy
import pickle
from itertools import pairwise, product

import pytest
import torch
import transformers
from torch import nn

import mmspec
from mmspec import TokenTree, accept_path
from mmspec.core.target import Prompt, output_of
from mmspec.eval.harness.small_configs import random_model, small_config
from mmspec.quantisation.blocks import BLOCKS
from mmspec.ssm.layers import RecurrentLayers
from mmspec.targets.packing import pack_model
from mmspec.targets.sublayers import SublayerStack
from mmspec.targets.transformers_target import TransformersTarget
from tests.compiled import needs_kernels
from tests.targets import prefilled
from tests.tiny import byte_tokenizer, random_tree, root_path, valid_nodes

VOCAB = 300
MAMBA = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2)
RECURRENT, ATTENDING, SLIDING = "linear_attention", "full_attention", "sliding_attention"
WINDOWS = dict(sliding_window=8, num_hidden_layers=2, layer_types=[SLIDING, ATTENDING])
FAMILIES = {
    "llama": dict(attention_bias=True, head_dim=32),
    "mistral": dict(sliding_window=8),
    "qwen2": dict(use_sliding_window=True, max_window_layers=0, **WINDOWS),
    "qwen3": dict(num_key_value_heads=1),
    # Two sets of frequencies, and a scale that is not derived from the size of heads.
    "gemma3_text": dict(query_pre_attn_scalar=12, **WINDOWS),
    "gemma": {},
    "granite": dict(residual_multiplier=0.3, embedding_multiplier=5.0, attention_multiplier=0.1),
    "smollm3": dict(num_hidden_layers=2, no_rope_layers=[1, 0], layer_types=[ATTENDING] * 2),
    "exaone4": WINDOWS,  # no norms before sublayers, and no rotation without a window
    "gpt_oss": WINDOWS,
    # Values in more heads than keys, and heads of keys and values that differ in size.
    "qwen3_5_text": dict(linear_num_key_heads=2, linear_value_head_dim=48),
    "qwen3_next": dict(
        linear_num_key_heads=2,
        linear_num_value_heads=8,
        linear_value_head_dim=48,
        num_hidden_layers=2,
        layer_types=[RECURRENT, ATTENDING],
    ),
    "granitemoehybrid": dict(
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
        attention_bias=True,
        residual_multiplier=0.3,
        embedding_multiplier=5.0,
        attention_multiplier=0.1,
        mamba_n_groups=2,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        mamba_d_state=16,
    ),
    "bamba": dict(mamba_n_groups=1),
    "nemotron_h": dict(layers_block_type=[RECURRENT, "mlp", ATTENDING, "mlp"], n_groups=2, mlp_bias=True),
    "lfm2": dict(conv_bias=True, num_hidden_layers=2, layer_types=["conv", ATTENDING]),
    "mamba2": dict(n_groups=2),
    "falcon_h1": dict(
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_n_groups=2,
        key_multiplier=0.7,
        attention_in_multiplier=1.3,
        attention_out_multiplier=0.8,
        ssm_in_multiplier=1.2,
        ssm_out_multiplier=0.6,
        ssm_multipliers=[0.9, 1.1, 0.8, 1.3, 0.7],
        mlp_multipliers=[1.4, 0.6],
        embedding_multiplier=3.0,
        lm_head_multiplier=0.5,
    ),
    "falcon_h1 without norm": dict(mamba_rms_norm=False),
}


def model_of(family, kind="int4"):
    """A packed model in bfloat16; in float32 and not packed if ``kind`` is None."""
    config = small_config(transformers.CONFIG_MAPPING[family.split()[0]], vocab_size=VOCAB, **FAMILIES[family])
    model = random_model(config)
    for module in model.modules():  # defaults are 0 and 1
        for name in ("bias", "D", "dt_bias", "sinks"):
            if isinstance(value := getattr(module, name, None), torch.Tensor):
                value.data.normal_(std=0.5)
        if "Norm" in type(module).__name__:
            module.weight.data += torch.randn_like(module.weight) / 4
    model.bfloat16()
    if kind is None:
        return model.float()
    pack_model(model, kind)
    return model


@pytest.fixture(params=[1, 2])
def threads(request):
    torch.set_num_threads(request.param)
    return request.param


def target_of(model, keys="auto"):
    target = TransformersTarget(model, kv_cache_dtype=keys)
    assert target.decoder._sublayers is not None
    return target


ATTENDING_FAMILIES = [family for family in FAMILIES if family != "mamba2"]
keys_of_both = pytest.mark.parametrize("keys", ["auto", "int8"])


def in_python(model):
    """A target that runs the decoder's own forward."""
    target = TransformersTarget(model)
    target.decoder.__dict__["_sublayers"] = None
    return target


def root(tokens):
    return TokenTree.root(torch.tensor(tokens))


def step(target, tokens):
    """Logits after one more token of each row."""
    tree = root(tokens)
    logits = target.verify(tree).logits
    target.commit(accept_path(tree, torch.full((len(tokens), 1), -1)))
    return logits[:, 0].clone()


@needs_kernels
@pytest.mark.parametrize(
    ("family", "kind", "keys"),
    [
        *product(FAMILIES, ["int4", "bfloat16"], ["auto"]),
        *product(ATTENDING_FAMILIES, ["int4"], ["int8"]),
    ],
)
@torch.inference_mode()
def test_trees_batches_and_prompts_have_the_bits_of_plain_decoding(family, kind, keys, threads):
    """One prompt is shorter than a convolution."""
    model = model_of(family, kind)
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(VOCAB, (1, length), generator=g) for length in (23, 1)]
    both = target_of(model, keys)
    ids = torch.zeros(2, 23, dtype=torch.long)
    mask = torch.zeros(2, 23, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 23 - prompt.shape[1] :], mask[row, 23 - prompt.shape[1] :] = prompt[0], 1
    together = prefilled(both, Prompt(ids, mask), 60).logits[:, 0].clone()
    alone = [target_of(model, keys) for _ in prompts]
    for row, (target, prompt) in enumerate(zip(alone, prompts, strict=True)):
        first = prefilled(target, Prompt(prompt[:, :5]), 60).logits[0, 0]
        for token in prompt[0, 5:].tolist():
            first = step(target, [token])[0]
        assert torch.equal(first, together[row])
    for seed, shape in enumerate(("random", "chain", "star")):
        tree = random_tree(torch.Generator().manual_seed(seed), 2, 9, VOCAB, shape=shape)
        logits = both.verify(tree).logits.clone()
        choices = torch.full_like(tree.tokens, -1)
        for row, target in enumerate(alone):
            kept = root_path(tree, row, valid_nodes(tree, row)[-1])
            for parent, child in pairwise(kept):
                choices[row, parent] = tree.tokens[row, child]
            for node in kept:
                assert torch.equal(step(target, [int(tree.tokens[row, node])])[0], logits[row, node]), (shape, node)
        both.commit(accept_path(tree, choices))


@needs_kernels
@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_kernels_are_as_close_to_float32_as_the_decoder_is(family, kind):
    """Logits and features of a prompt in chunks, of a tree, and of a prompt of embeddings."""
    model = model_of(family, kind)
    native, python, exact = target_of(model), in_python(model), TransformersTarget(model_of(family, None))
    last = model.config.num_hidden_layers - 1
    names = (0, 1, output_of(0), output_of(last), "last")
    tree = random_tree(torch.Generator().manual_seed(1), 1, 12, VOCAB)
    ids = torch.arange(40)[None] % VOCAB
    outputs = []
    for target in (native, python, exact):
        found = prefilled(target, Prompt(ids), 9, names, 16), target.verify(tree, names)
        target.keep([])
        embeds = target.embed(ids).flip(1)  # not those of the token ids
        outputs.append((*found, prefilled(target, Prompt(ids, inputs={"inputs_embeds": embeds}), 9, names)))
    for mine, theirs, expected in zip(*outputs, strict=True):
        for name in (*names, "logits"):
            one, other, reference = (
                (part.logits if name == "logits" else part.features[name]).float() for part in (mine, theirs, expected)
            )
            allowed = 1.5 * (other - reference).norm() + 1e-3 * reference.norm()
            assert (one - reference).norm() <= allowed, name


@needs_kernels
@pytest.mark.parametrize(
    ("family", "keys"), [*product(FAMILIES, ["auto"]), *product(["llama", "qwen3_5_text"], ["int8"])]
)
def test_answers_are_equal_with_drafts_in_later_turns_and_processes(family, keys, tmp_path):
    """Plain, drafted, batched, and continued from the prefix cache and its files, to the bits of the logits."""
    model = model_of(family)
    prompts = ["hello hello hello hello", "abc abc abd " * 50, "x"]
    answers = []
    for drafter in (None, "recycle", "early-exit:1"):
        kept = dict(prefix_cache=1 << 26, prefix_cache_dir=tmp_path / str(drafter), kv_cache_dtype=keys)
        pipeline = mmspec.load(model, drafter=drafter, processor=byte_tokenizer(), **kept)
        options = dict(max_new_tokens=24, ignore_eos=True, logprobs=1)
        batch = pipeline.generate_batch([{"prompt": prompt} for prompt in prompts], **options)
        single = [pipeline.generate(prompt, **options) for prompt in prompts]
        assert [one.token_ids for one in batch] == [one.token_ids for one in single]
        again = pipeline.generate(prompts[1], **options)
        assert again.stats.num_cached_tokens >= 500
        assert (again.token_ids, again.logprobs) == (single[1].token_ids, single[1].logprobs)
        edited = prompts[1][:560] + "x" + prompts[1][561:]
        own = dict(processor=byte_tokenizer(), kv_cache_dtype=keys)
        expected = mmspec.load(model, drafter=drafter, **own).generate(edited, **options)
        pipeline.engine.close()
        later = mmspec.load(copy.deepcopy(model), drafter=drafter, processor=byte_tokenizer(), **kept)
        again = later.generate(prompts[1], **options)
        assert again.stats.num_cached_tokens == again.stats.num_prompt_tokens
        assert (again.token_ids, again.logprobs) == (single[1].token_ids, single[1].logprobs)
        found = later.generate(edited, **options)
        assert found.stats.num_cached_tokens == (560 if later.target.decoder.layers is None else 512)
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
        assert drafter is None or (single[0].stats.num_draft_tokens and not single[0].stats.drafter_error)
        answers.append([one.token_ids for one in single])
    assert answers[0] == answers[1] == answers[2]


def doubled(model):
    model.get_decoder().embed_tokens.register_forward_hook(lambda *given: 2 * given[2])
    model.get_decoder().embedding_multiplier = 1.5


def dense(model):
    attention = model.get_decoder().layers[-1].self_attn
    attention.o_proj = nn.Linear(attention.o_proj.in_features, attention.o_proj.out_features).bfloat16()


def other_norm(model):
    model.get_decoder().layers[0].input_layernorm = nn.LayerNorm(64).bfloat16()


def weighted(model):
    model.get_decoder().layers[-1].self_attn.A = nn.Parameter(torch.ones(1))


def another_norm(model):
    layer = model.get_decoder().layers[0]
    layer.another = copy.deepcopy(layer.input_layernorm)


def partly_quantised(model):
    mlp = model.get_decoder().layers[0].mlp
    mlp.gate_proj = BLOCKS["bfloat16"](mlp.gate_proj.weight)


def chunked(model):
    model.config.layer_types, model.config.attention_chunk_size = ["chunked_attention"] * len(model.model.layers), 8


def scaled_later(model):
    """A last MLP with somewhat greater outputs for most tokens."""
    mlp = model.get_decoder().layers[-1].mlp
    kind, factors = type(mlp), torch.tensor([1.0, 1.0, 1.2, 1.2, 1.2])[:, None]
    mlp.__class__ = type("Scaled", (kind,), {"forward": lambda self, x: factors * kind.forward(self, x)})


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dense, "expected a packed linear layer: got Linear"),
        (other_norm, "expected norms and known parts"),
        (doubled, "computes more than its layers and norm"),
        (lambda model: setattr(model.get_decoder().layers[-1].self_attn, "attn_logit_softcapping", 9), "no cap"),
        (weighted, "no weights of its own"),
        (another_norm, "one or two norms for each of 2 parts of a layer: got 3"),
        (partly_quantised, "weights of which only some are quantised"),
        (chunked, "a window or none: got chunks"),
        (scaled_later, "the kernels do not reproduce Qwen3_5DecoderLayer"),
        (lambda model: setattr(model.get_decoder().layers[0], "linear_attn", nn.Linear(64, 64)), "expected norms"),
        (lambda model: delattr(model.get_decoder(), "norm"), "must end with a norm"),
    ],
)
def test_other_layers_are_refused(change, message):
    model = model_of("llama" if change is chunked else "qwen3_5_text")
    change(model)
    with pytest.raises(ValueError, match=message):
        SublayerStack(model.get_decoder(), RecurrentLayers.mixers)
    assert TransformersTarget(model).decoder._sublayers is None


@needs_kernels
@torch.inference_mode()
@keys_of_both
@pytest.mark.parametrize("family", ["bamba", "llama"])
def test_layers_with_hooks_run_in_the_decoder(family, keys):
    model = model_of(family)
    target, hooked = target_of(model, keys), target_of(copy.deepcopy(model), keys)
    calls = []
    hooked.model.get_decoder().layers[1].register_forward_hook(lambda *_: calls.append(1))
    ids = torch.arange(9)[None]
    found, expected = [(prefilled(one, Prompt(ids)), step(one, [3])) for one in (hooked, target)]
    assert len(calls) == 2 + (keys == "int8")  # for the mean of keys
    assert (found[1] - expected[1]).norm() < 0.1 * expected[1].norm()


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen2", "gpt_oss", "granitemoehybrid"])
def test_keys_in_int8_are_near_those_in_bfloat16(family):
    """Large biases of keys in features that rotate slowly, as in Qwen2.5, cost no precision, with sinks (gpt-oss)
    neither."""
    torch.manual_seed(0)
    plain = model_of(family, None)
    for attention in (part for part in plain.modules() if hasattr(part, "k_proj")):
        size = attention.head_dim
        attention.k_proj.bias.data.view(2, size)[:, [size // 2 - 1, -1]] += torch.tensor([[50.0], [-50.0]])
    model = copy.deepcopy(plain).bfloat16()
    pack_model(model, "bfloat16")
    targets = [TransformersTarget(plain), target_of(model), target_of(model, "int8")]
    states = []
    assert len({target.identity() for target in targets}) == 3
    for target in targets:
        prefilled(target, Prompt(torch.arange(60)[None]), 9)
        known = target.keys_values(target.runner.cache.attending[-1], 1)
        states.append([known.keys.float(), known.values.float()])
    exact, *found = states
    # A token may use other experts.
    error = lambda x, y: (x - y).norm(dim=-1).flatten().quantile(0.6)  # noqa: E731
    usual, coded = ([error(*pair) for pair in zip(one, exact, strict=True)] for one in found)
    assert all(mine < 1.5 * theirs for mine, theirs in zip(coded, usual, strict=True))
    (whole,), (half,) = (target.runner.cache.kv.tensors for target in targets[1:])
    assert half.dtype == torch.uint8
    assert half[..., 0].numel() * 2 * (half.shape[-1] - 4) == whole.nbytes


@pytest.mark.parametrize(("family", "kind"), [("llama", None), ("mamba2", "int4")])
def test_keys_in_int8_are_refused_where_the_kernels_do_not_attend(family, kind):
    with pytest.raises(mmspec.UserError, match=r"int8 needs packed weights .* got \w+ForCausalLM in"):
        mmspec.load(model_of(family, kind), processor=byte_tokenizer(), kv_cache_dtype="int8")
    with pytest.raises(mmspec.UserError, match="kv_cache_dtype"):
        mmspec.load("tiny-llava", kv_cache_dtype="q8_0")


@needs_kernels
@torch.inference_mode()
@keys_of_both
def test_sequences_join_and_leave(keys):
    """A second sequence joins after the first has decoded; then the first leaves."""
    model = model_of("qwen3_5_text")
    target = target_of(model, keys)
    first, second = target.fork(), copy.deepcopy(pickle.loads(pickle.dumps(target)))
    a, b = torch.arange(9)[None], torch.arange(20, 33)[None]
    for one in (target, first):
        prefilled(one, Prompt(a), 40)
        step(one, [7])
    for one in (target, second):
        prefilled(one, Prompt(b), 40)
    both = step(target, [1, 2])
    assert torch.equal(both[0], step(first, [1])[0])
    assert torch.equal(both[1], step(second, [2])[0])
    target.keep([1])
    assert torch.equal(step(target, [5])[0], step(second, [5])[0])
