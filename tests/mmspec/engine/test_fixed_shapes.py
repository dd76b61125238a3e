"""Steps of fixed shapes and addresses, as they run on CUDA, on a CPU: the output is that of steps that may vary."""

import pytest
import torch

from eval.decoding.tiny_models import mamba_network, text_inputs, vision_inputs
from mmspec import TokenTree, plugins, verify_greedy
from mmspec.cache.tree_cache import TreeCache
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.small import Small
from mmspec.engine.stopping import Stopper
from mmspec.ops import kernels
from mmspec.sampling.sampler import Sampler
from mmspec.speculation.budget import Budget
from mmspec.targets.transformers_target import TransformersTarget, bucket
from ssm.drafters.mamba import Mamba
from tests.decoding import decode
from tests.drafting import network_for
from tests.targets import assert_trees_equal_paths, prompt_of
from tests.tiny import random_tree, root_path, shared_model
from vision.drafters.msd import MSD, Flash


@pytest.fixture(autouse=True)
def _fixed(monkeypatch):
    monkeypatch.setattr(kernels, "fixed_shapes", lambda device: True)


# ---------------------------------------------------------------------- the cache


@pytest.mark.parametrize("batch", [1, 3])
def test_a_cache_that_stays_in_place(batch):
    """Keys number their tokens; rows keep random paths, one now and then nothing, after padding of their own."""
    g = torch.Generator().manual_seed(batch)
    cache = TreeCache(2, reserve=300, in_place=True)

    def write(ids):
        for layer in range(2):
            keys = ids[:, None, :, None].expand(-1, 2, -1, 4).float() + 1000 * layer
            seen = cache.layers[layer].update(keys, -keys)
        return seen

    ids = torch.arange(1, 6 * batch + 1).view(batch, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    write(ids)
    cache.commit_prompt(6, mask if batch > 1 else None, batch, ids.device)
    rows = [row[2 * (b == 0 and batch > 1) :] for b, row in enumerate(ids.tolist())]
    version = cache.version
    for step in range(20):
        tree = random_tree(g, batch, 8, 50, ragged=False)
        ids = torch.arange(100 + step * 8 * batch, 100 + (step + 1) * 8 * batch).view(batch, 8)
        cache.enter(8)
        keys, values = write(ids)
        assert keys.shape[2] == cache.capacity == 512
        paths = [root_path(tree, b, int(torch.randint(8, (1,), generator=g))) for b in range(batch)]
        if step % 4 == 1:
            paths[-1] = []
        width = max(1, max(map(len, paths)))
        cache.commit(torch.tensor([path + [-1] * (width - len(path)) for path in paths]), paths)
        for b in range(batch):
            rows[b] += ids[b, paths[b]].tolist()
            begin, end = int(cache.ends.begin[b]), int(cache.ends.end[b])
            assert end == cache.lengths[b]
            assert keys[b, 1, begin:end, 3].tolist() == [1000 + token for token in rows[b]]
            assert torch.equal(values[b, :, begin:end], -keys[b, :, begin:end])
        assert int(cache.ends.start) == cache.length == max(cache.lengths)
    assert cache.version is version
    ends = cache.ends
    assert cache.serves(batch, 400, keys)
    assert not cache.serves(batch + 1, 400, keys)
    assert not cache.serves(batch, 600, keys)
    cache.reset()
    write(torch.ones(batch, 3))
    cache.commit_prompt(3, None, batch, ids.device)
    assert (cache.ends, cache.version) == (ends, version)
    assert (int(ends.begin[0]), int(ends.end[0]), int(ends.start)) == (0, 3, 3)


def test_a_cache_that_must_grow_says_so():
    cache = TreeCache(1, reserve=8, in_place=True)
    keys = torch.randn(1, 2, 5, 4)
    cache.layers[0].update(keys, keys)
    cache.commit_prompt(5, None, 1, keys.device)
    before, capacity = cache.version, cache.capacity
    cache.make_room(100)
    assert (cache.version, cache.capacity) == (before, capacity)
    cache.make_room(1000)
    assert cache.version is not before
    assert cache.capacity > 1005
    cache.enter(1)
    assert torch.equal(cache.layers[0].update(keys[:, :, :1], keys[:, :, :1])[0][:, :, :5], keys)


# ---------------------------------------------------------------------- targets


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 9, 33, 64, 65, 200])
def test_widths_are_few(nodes):
    assert nodes <= bucket(nodes) < 2 * nodes + 1
    assert bucket(bucket(nodes)) == bucket(nodes)


TARGETS = ["llama", "mistral-window", "qwen2-window", "gemma3", "mamba2", "bamba", "falcon_h1", "zamba2"]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("batch", [1, 3])
def test_every_node_equals_its_path(name, batch):
    model = shared_model(name)
    target = assert_trees_equal_paths(model, text_inputs(batch, 9), steps=3, nodes=9)
    assert target._cache.in_place


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window", "gemma3"])
def test_trees_deeper_than_a_window(name, fixed, monkeypatch):
    """Within the tree, too, a node attends to no more than its window: chains of 16 against windows of 5 and 6."""
    monkeypatch.setattr(kernels, "fixed_shapes", lambda device: fixed)
    model = shared_model(name)
    assert model.config.sliding_window < 8
    target = assert_trees_equal_paths(model, text_inputs(2, 9), steps=1, nodes=16, shape="chain")
    assert target._cache.in_place == fixed


@pytest.mark.parametrize("name", ["llava", "llava_bamba", "qwen2_5_vl"])
def test_every_node_equals_its_path_behind_an_image(name):
    target = assert_trees_equal_paths(shared_model(name), vision_inputs(name, 2), steps=3)
    assert target._cache.in_place


def test_padding_elsewhere_is_served_as_it_was():
    target = TransformersTarget(shared_model("llama"))
    inputs = text_inputs(1, 6)
    inputs["attention_mask"][0, -1] = 0
    target.prefill(prompt_of(inputs), 8)
    assert not target._cache.in_place


def test_further_prompts_find_everything_where_it_was():
    target = TransformersTarget(shared_model("bamba"))
    kept = []
    for length in (20, 2, 9):
        prompt = prompt_of(text_inputs(2, length, seed=length))
        first = target.prefill(prompt, 30)
        tree = random_tree(torch.Generator().manual_seed(length), 2, 6, 90)
        verdict = verify_greedy(tree, tree.tokens)
        step = target.forward_tree(tree)
        target.commit(verdict)
        after = target.forward_tree(TokenTree.root(verdict.bonus))
        fresh = TransformersTarget(shared_model("bamba"))
        torch.testing.assert_close(fresh.prefill(prompt, 30).logits, first.logits)
        torch.testing.assert_close(fresh.forward_tree(tree).logits, step.logits)
        fresh.commit(verdict)
        torch.testing.assert_close(fresh.forward_tree(TokenTree.root(verdict.bonus)).logits, after.logits)
        kept.append((target._cache.version, target._cache.ends, target._position))
    assert kept[0] == kept[1] == kept[2]


# ---------------------------------------------------------------------- whole answers


def answers(target, drafter, inputs, new, budget, sampler=None):
    *_, rows = decode(target, drafter, prompt_of(inputs), sampler or Sampler(), Stopper(new), budget)
    return [row.token_ids for row in rows]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "ngram", "msd", "flash", "flash-small", "small", "mamba", "recycle"])
def test_tokens_are_those_of_generate(kind, batch, monkeypatch):
    """Two answers in a row, the second from the same buffers."""
    model = shared_model("llava")
    target = plugins.target_class(model.config)(model)
    drafter = {
        "plain": lambda: None,
        "ngram": Ngram,
        "msd": lambda: MSD(network_for(model), top_k=3, depth=4, total_tokens=12),
        "flash": lambda: Flash(network_for(model, latents=3, span=16, slots=2), top_k=3, depth=4, total_tokens=12),
        "flash-small": lambda: Flash(network_for(model, slots=3), torch.arange(40), top_k=4, depth=5, total_tokens=9),
        "small": lambda: Small(shared_model("llama"), top_k=3),
        "mamba": lambda: Mamba(mamba_network(), top_k=3, depth=4, total_tokens=9),
        "recycle": Recycle,
    }[kind]()
    if drafter is not None:
        drafter.attach(target)
    for seed in (0, 1):
        inputs = vision_inputs("llava", batch, seed=seed)
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=14, do_sample=False, eos_token_id=None, pad_token_id=0)
        got = answers(target, drafter, inputs, 14, Budget(12 if drafter else 0, 4))
        assert got == ids[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["msd", "flash", "small", "mamba"])
def test_drafts_are_those_of_varying_shapes(kind, monkeypatch):
    """The same trees, rows of different length, some steps without a draft; so the same number of steps, too."""
    model = shared_model("llava")
    inputs = vision_inputs("llava", 3)
    make = {
        "msd": lambda: MSD(network_for(model), top_k=3, depth=4, total_tokens=12),
        "flash": lambda: Flash(network_for(model, latents=3, span=16, slots=2), top_k=3, depth=4, total_tokens=12),
        "small": lambda: Small(shared_model("llama"), top_k=3),
        "mamba": lambda: Mamba(mamba_network(seed=1), top_k=3, depth=4, total_tokens=12),
    }[kind]
    drafted = []

    class Now(Budget):
        asked = 0

        def drafts(self):
            self.asked += 1
            return self.asked not in (2, 5, 6) and super().drafts()

    for fixed in (True, False):
        monkeypatch.setattr(kernels, "fixed_shapes", lambda device, fixed=fixed: fixed)
        target = plugins.target_class(model.config)(model)
        drafter = make()
        drafter.attach(target)
        trees = []
        propose = drafter.propose

        def noted(token, budget, propose=propose, trees=trees):
            tree = propose(token, budget)
            if budget.remaining >= budget.depth:  # trees that may vary are shallower at the end of an answer
                trees.append([tree.tokens.tolist(), tree.parents.tolist()])
            return tree

        drafter.propose = noted
        budget = Now(12, 4)
        budget.asked = 0
        answers(target, drafter, inputs, 20, budget)
        drafted.append(trees)
    assert len(drafted[0]) > 5
    assert drafted[0] == drafted[1]
