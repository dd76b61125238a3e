"""Models with recurrent layers as targets, against transformers' own passes, in one go and token by token."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, InklingTextConfig, Mamba2Config
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import mmspec
from mmspec import TokenTree, UserError
from mmspec.cache.tree_cache import cache_argument
from mmspec.core.target import Prompt
from mmspec.eval.harness.small_configs import random_model, small_config
from mmspec.targets.transformers_target import TransformersTarget
from tests.decoding import assert_threads_share
from tests.targets import assert_trees_equal_paths, prefilled
from tests.tiny import byte_tokenizer, random_tree, root_path, shared_model
from tests.tiny.configs import CONVOLUTION_CONFIGS, HYBRID_CONFIGS, MIXER_CONFIGS
from tests.tiny.models import text_inputs, text_model

pytestmark = pytest.mark.long

CLOSE = dict(atol=2e-4, rtol=2e-4)
UNLIMITED = [name for name in HYBRID_CONFIGS if name != "bamba-limits"]


@torch.no_grad()
def decoded(model, ids, tokens):
    """transformers' own decoding behind a prompt (1, length): (tokens, vocab) logits after each, and its cache."""
    cache = MiniMaxCache() if model.config.model_type == "minimax" else DynamicCache(config=model.config)
    if hasattr(model, "_setup_cache"):  # the modules of RecurrentGemma keep the states of the last call
        model._setup_cache(model.config, 1, model.device, model.dtype)
    options = {cache_argument(model.get_decoder()): cache, "use_cache": True}
    model(ids, position_ids=torch.arange(ids.shape[1])[None], **options)
    logits = []
    for token in tokens:
        position = torch.tensor([[ids.shape[1] + len(logits)]])
        logits.append(model(torch.tensor([[token]]), position_ids=position, **options).logits[0, -1])
    blocks = [module for module in model.modules() if hasattr(module, "conv1d_state")]
    cache.of_modules = [(block.conv1d_state, block.rg_lru.recurrent_states) for block in blocks]
    return torch.stack(logits), cache


def states(cache):
    """In transformers' cache: the last inputs of the convolutions, and the recurrent states."""
    if isinstance(cache, MiniMaxCache):
        return [], [state[0].mT for state in cache.linear_cache if len(state)]
    if cache.of_modules:
        return [[part[0] for part in parts] for parts in zip(*cache.of_modules, strict=True)]
    layers = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    return (
        [conv[0] for layer in layers for conv in layer.conv_states.values() if conv is not None],
        [state[0] for layer in layers for state in layer.recurrent_states.values() if state is not None],
    )


def states_of(target):
    """The tensors with the convolutions' last inputs and the recurrent states, (rows, ...) each."""
    return [part.data for part in (target.runner.cache._conv.state, target.runner.cache._scans.state)]


@torch.inference_mode()
def assert_same_states(target, row, cache):
    """The states of a row are transformers', whose convolutions may keep one input more than needed."""
    (convolved, recurrent), (inputs, ours) = states(cache), states_of(target)
    inputs = inputs[row]
    if target.config.model_type == "zaya":  # inputs of the projections; transformers keeps their outputs
        for x, theirs, layer in zip(inputs.chunk(len(convolved)), convolved, target.model.model.layers, strict=True):
            projection = layer.self_attn.qkv_proj
            projected = torch.cat([projection.q_proj(x.T), projection.k_proj(x.T)], dim=-1)
            torch.testing.assert_close(projected.T, theirs, **CLOSE)
        return
    entries = inputs.shape[1]
    expected = torch.cat([conv[:, -entries:] for conv in convolved]) if convolved else inputs.new_zeros(0, 0)
    torch.testing.assert_close(inputs, expected, **CLOSE)
    if recurrent:
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours[row].flatten(), torch.cat(recurrent).flatten(), **CLOSE)


@torch.inference_mode()
def commit(target, paths):
    width = max(1, max(map(len, paths)))
    target.runner.commit_nodes(torch.tensor([path + [-1] * (width - len(path)) for path in paths]), lambda: paths)


# ---------------------------------------------------------------------- logits at nodes


@pytest.mark.parametrize("name", UNLIMITED)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 12), (3, 4), (3, 20)])
def test_every_node_equals_its_path_in_one_go(name, batch, length):
    assert_trees_equal_paths(shared_model(name), text_inputs(batch, length), steps=3, seed=length)


@pytest.mark.parametrize("name", UNLIMITED)
def test_eager_attention(name):
    model = text_model(name)
    model.set_attn_implementation("eager")
    assert_trees_equal_paths(model, text_inputs(3, 9), steps=2)


@pytest.mark.parametrize("name", CONVOLUTION_CONFIGS)
def test_padding_is_in_no_window(name):
    """Prompts shorter than a convolution, padded with tokens whose embeddings are not 0."""
    model, target = shared_model(name), TransformersTarget(shared_model(name))
    ids, mask = torch.tensor([[7, 8, 9, 5], [5, 6, 8, 9]]), torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1]])
    prefilled(target, Prompt(ids, mask), 16)
    tree = random_tree(torch.Generator().manual_seed(0), 2, 6, 90, ragged=False)
    logits = target.verify(tree).logits[0]
    for node in range(6):
        path = root_path(tree, 0, node)
        torch.testing.assert_close(logits[path], decoded(model, ids[:1, 3:], tree.tokens[0, path].tolist())[0], **CLOSE)


def test_no_attention_at_all_in_a_model_that_may_have_some():
    torch.manual_seed(0)
    config = HYBRID_CONFIGS["bamba"]()
    config.attn_layer_indices = []
    assert_trees_equal_paths(AutoModelForCausalLM.from_config(config).eval(), text_inputs(2, 5))


# ---------------------------------------------------------------------- tokens


@pytest.mark.parametrize("name", ["bamba", "mamba2", *MIXER_CONFIGS])
def test_a_filled_cache_is_refused(name):
    model, ids = shared_model(name), torch.tensor([[5, 6, 7]])
    _, cache = decoded(model, ids, [8])
    given = {cache_argument(model.get_decoder()): cache}
    with pytest.raises(UserError, match="the cache given must be empty: it holds"):
        model.generate(
            torch.tensor([[5, 6, 7, 8]]), **given, max_new_tokens=3, custom_generate=mmspec.decode, drafter=None
        )


# ---------------------------------------------------------------------- states: the bugs that other engines had


@pytest.mark.parametrize("name", HYBRID_CONFIGS)
def test_commit_at_every_node_is_the_sequential_state(name):
    model, ids = shared_model(name), torch.tensor([[5, 6, 7, 8]])
    tree = random_tree(torch.Generator().manual_seed(3), 1, 9, 90, ragged=False)
    target = TransformersTarget(model)
    for node in range(9):
        path = root_path(tree, 0, node)
        prefilled(target, Prompt(ids), 32)
        target.verify(tree)
        commit(target, [path])
        tokens = tree.tokens[0, path].tolist()
        expected, cache = decoded(model, ids, [*tokens, 11, 12])
        # Attention and states must go on together from there, without drafts after several were accepted.
        for token, logits in zip((11, 12), expected[-2:], strict=True):
            found = target.verify(TokenTree.root(torch.tensor([token]))).logits[0, 0]
            torch.testing.assert_close(found, logits, **CLOSE)
            commit(target, [[0]])
        assert_same_states(target, 0, cache)
        target.keep([])


@pytest.mark.parametrize(
    "name", ["bamba", "qwen3_5_text", "kimi_linear", "mamba", "zamba", "lfm2", "inkling_text", "zaya", *MIXER_CONFIGS]
)
def test_layers_are_committed_alike_one_by_one_and_together(name, monkeypatch):
    target, kept = TransformersTarget(shared_model(name)), []
    for entries in (1, 1 << 10, 1 << 30):
        monkeypatch.setattr("mmspec.ssm.cache._COMMIT_ELEMENTS", entries)
        prefilled(target, Prompt(torch.tensor([[5, 6, 7]])), 32)
        tree = random_tree(torch.Generator().manual_seed(2), 1, 8, 90, ragged=False)
        target.verify(tree)
        commit(target, [root_path(tree, 0, 7)])
        kept.append([tensor.clone() for tensor in states_of(target)])
        target.keep([])
    for other in kept[1:]:
        for a, b in zip(kept[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@torch.inference_mode()
def test_nodes_behind_uncommitted_ones_are_refused():
    target = TransformersTarget(shared_model("bamba"))
    prefilled(target, Prompt(torch.tensor([[5, 6]])), 8)
    one = torch.tensor([[7]])
    target.runner.forward_nodes(one, None, torch.ones(1, 1, 1, dtype=torch.bool))
    target.runner.keep_nodes(torch.zeros_like(one))
    with pytest.raises(UserError, match="in one pass: got 1 nodes after 1 uncommitted ones"):
        target.runner.forward_nodes(one, torch.ones_like(one), torch.ones(1, 1, 2, dtype=torch.bool))


# ---------------------------------------------------------------------- heads


def test_padding_of_an_output_layer_is_cut_off():
    """The rows of Inkling's head beyond its vocabulary would have the highest logits."""
    model = random_model(small_config(InklingTextConfig, unpadded_vocab_size=100))
    model.lm_head.weight.data[100:] *= 100
    inputs, options = text_inputs(2, 9), dict(max_new_tokens=12, do_sample=False)
    expected = model.generate(**inputs, **options)
    assert torch.equal(mmspec.generate(model, drafter="recycle", nodes=8, **inputs, **options), expected)
    assert int(expected.max()) < 100


# ---------------------------------------------------------------------- folders


def test_a_pure_mamba_folder(tmp_path):
    """As transformers saves Mamba-2: no context limit, and a bare Infinity in config.json."""
    byte_tokenizer().save_pretrained(tmp_path)
    random_model(small_config(Mamba2Config, vocab_size=259, num_heads=8)).save_pretrained(tmp_path)
    assert "Infinity" in (tmp_path / "config.json").read_text()
    pipe = mmspec.load(str(tmp_path), "recycle")
    assert pipe.target.context_limit is None
    ids = pipe.hf_processor("Describe", return_tensors="pt")["input_ids"]
    expected = pipe.model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=2)[0, ids.shape[1] :]
    assert pipe.generate("Describe", max_new_tokens=20).token_ids == expected.tolist()


# ---------------------------------------------------------------------- side by side


@pytest.mark.parametrize("name", ["bamba", "jamba", "zamba", "inkling_text", "zaya", *MIXER_CONFIGS])
def test_threads_do_not_meet(name):
    assert_threads_share(shared_model(name))
