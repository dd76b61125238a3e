"""Decoding that is broken on purpose: each mistake is found, by the case that is made for it."""

from dataclasses import replace

import pytest
import torch

import mmspec
from mmspec.cache import prefix_cache
from mmspec.cache.prefix_cache import PrefixCache
from mmspec.checking import cases
from mmspec.checking.cases import run_case
from mmspec.core.tree import TokenTree
from mmspec.core.verify import Verdict, accept_path
from mmspec.engine import core, sequence
from mmspec.engine.core import EngineCore
from mmspec.engine.stopping import Stopper
from mmspec.sampling import defaults
from mmspec.sampling.defaults import ModelDefaults
from mmspec.targets.transformers_target import TransformersTarget
from tests.checking import trial_of

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def pipe():
    return mmspec.load("tiny-llava", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def hybrid():
    return mmspec.load("tiny-hybrid", device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def _fewer_draws(monkeypatch):
    monkeypatch.setattr(cases, "_DRAWS", 512)


def around(patch, owner, name, changed):
    """Replace a function by ``changed``, which gets the function before its arguments."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args: changed(original, *args))


def trust_first_children(patch):
    """Drafts are accepted without verification."""

    def trusting(tree, choices):
        choices = choices.clone()
        for row, nodes in enumerate(tree.children):
            for node, children in enumerate(nodes):
                choices[row, node] = next(iter(children), choices[row, node])
        return accept_path(tree, choices)

    patch.setattr(core, "accept_path", trusting)


def trust_first_drafts_of_samples(patch):
    """Sampling takes the first draft at the root, greedy decoding verifies."""

    def choosing(choose, self, rows, tree, logits):
        choices = choose(self, rows, tree, logits)
        if tree.nodes > 1 and rows[0].sampler.do_sample:
            choices.tokens[:, 0] = tree.tokens[:, 1]
        return choices

    around(patch, core.BatchSampler, "choose", choosing)


def keep_first_nodes(patch):
    """A commit keeps the states of the first nodes, whichever were accepted."""

    def committing(commit, self, verdict):
        packed = verdict.packed.clone()
        for row in packed:
            row[2 : 2 + row[0]] = torch.arange(int(row[0]))
        commit(self, Verdict(packed))

    around(patch, TransformersTarget, "commit", committing)


def forget_accepted_drafts_in_plain_steps(patch):
    """A plain step after accepted drafts reads the second to last token."""
    last = []

    def committing(commit, self, verdict):
        last[:] = [verdict]
        commit(self, verdict)

    def reading(verify, self, tree, *rest):
        if tree.nodes == 1 and last and int(last[0].length.max()) > 1 and len(tree.tokens) == len(last[0].tokens):
            tree = TokenTree.root(last[0].tokens[:, 0])
        return verify(self, tree, *rest)

    around(patch, TransformersTarget, "commit", committing)
    around(patch, TransformersTarget, "verify", reading)


def drop_deep_drafts_of_large_trees(patch):
    """Trees of more than 24 nodes: choices are shifted by a node."""

    def shifting(tree, choices):
        return accept_path(tree, choices.roll(1, dims=1) if tree.nodes > 24 else choices)

    patch.setattr(core, "accept_path", shifting)


def ignore_images_in_prefixes(patch):
    """Prefixes with other images and equal words are reused: the image of the second turn is dropped."""
    patch.setattr(prefix_cache, "media_key", lambda prompt: "")


def stop_at_ends_of_steps(patch):
    """A stop string is looked for after the last token of a step."""

    def appending(append, self, history, prompt_length, tokens, readers):
        emitted, reason = append(self, history, prompt_length, tokens)
        for reader in readers:
            for token in emitted:
                reader.append(token)
        return emitted, reason or ("stop" if any(reader.answer.stopped for reader in readers) else None)

    around(patch, Stopper, "append", appending)


def mix_rows(patch):
    """When a sequence leaves a batch, the last sequence does not move to its row."""
    around(patch, TransformersTarget, "keep", lambda keep, self, rows: keep(self, sorted(rows)))


def use_other_prefixes(patch):
    """A prompt continues the state of another conversation of at least its length."""

    def finding(find, self, *args):
        found = find(self, *args)
        if found is None:
            return None
        others = (one for one in self._entries if one is not found[0] and len(one.tokens) > found[1])
        return next(others, found[0]), found[1]

    around(patch, PrefixCache, "find", finding)


def ignore_least_length(patch):
    def processors(original, self, params, *rest):
        return original(self, replace(params, min_new_tokens=0), *rest)

    around(patch, ModelDefaults, "processors", processors)


def record_logprobs_of_roots(patch):
    """All log probabilities are taken at the root."""
    around(patch, sequence, "token_logprobs", lambda found, logits, *rest: found(logits[:1].expand_as(logits), *rest))


def keep_states_of_aborted_requests(patch):
    """An abort removes the last row in place of the aborted row."""

    def removing(remove, self):
        if not (len(self.running) > 1 and any(one.cancelled for one in self.running)):
            remove(self)
            return
        keep = self.target.keep
        self.target.keep = lambda rows: keep(list(range(len(rows))))
        try:
            remove(self)
        finally:
            del self.target.keep

    around(patch, EngineCore, "remove_finished", removing)


def ignore_seeds(patch):
    def seeded(sampler, params, *rest):
        return sampler(params if params.seed is None else replace(params, seed=0), *rest)

    around(patch, defaults, "sampler", seeded)


def sample_at_another_temperature(patch):
    """0.9 times the temperature that was asked for."""
    around(patch, core.BatchSampler, "choose", lambda choose, *args: choose(*args[:-1], args[-1] / 0.9))


def ignore_adapters(patch):
    """All requests use the model without an adapter."""

    def prefilling(prefill, self, prompts, *rest):
        return prefill(self, [replace(one, adapter=None) for one in prompts], *rest)

    around(patch, TransformersTarget, "prefill", prefilling)


def exceed_the_context(patch):
    around(patch, Stopper, "limit", lambda limit, self, length: min(limit(self, length) + 1, self.max_new_tokens))


BREAKS = [
    (trust_first_children, "prose"),
    (trust_first_children, "copy"),
    (trust_first_drafts_of_samples, "sampling"),
    (keep_first_nodes, "rehearsed"),
    (forget_accepted_drafts_in_plain_steps, "now-and-then"),
    (drop_deep_drafts_of_large_trees, "tree-sizes"),
    (ignore_images_in_prefixes, "image-turns"),
    (stop_at_ends_of_steps, "stop-string"),
    (mix_rows, "batch"),
    (use_other_prefixes, "sessions"),
    (ignore_least_length, "min-tokens"),
    (record_logprobs_of_roots, "logprobs"),
    (keep_states_of_aborted_requests, "abort"),
    (ignore_seeds, "choices"),
    (sample_at_another_temperature, "temperature"),
    (exceed_the_context, "context-limit"),
]


@pytest.mark.parametrize(("broken", "name"), BREAKS, ids=[f"{broken.__name__}-{name}" for broken, name in BREAKS])
def test_a_mistake_is_found(broken, name, pipe, monkeypatch):
    broken(monkeypatch)
    found = run_case(trial_of(pipe), name)
    assert found["outcome"] == "different", found
    assert found["differences"]


@pytest.mark.parametrize("name", ["rehearsed", "tree-sizes"])
def test_a_stale_state_of_recurrent_layers_is_found(name, hybrid, monkeypatch):
    keep_first_nodes(monkeypatch)
    assert run_case(trial_of(hybrid), name)["outcome"] == "different"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # which peft asks for
def test_an_adapter_that_is_ignored_is_found(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    from tests.mmspec.targets.test_lora import saved

    folder = saved(tmp_path, "tiny-llava", 2, lora_alpha=1, target_modules=["v_proj"])  # changes one answer of eight
    pipe = mmspec.load("tiny-llava", adapters={"one": folder}, device="cpu", dtype="float32")
    assert run_case(trial_of(pipe), "adapters")["outcome"] == "equal"
    ignore_adapters(monkeypatch)
    assert run_case(trial_of(pipe), "adapters")["outcome"] == "different"
