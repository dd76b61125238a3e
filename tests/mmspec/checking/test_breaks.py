"""Decoding that is broken on purpose: each mistake is found, by the case that is made for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from mmspec.pipeline import Pipeline
from mmspec.sampling import defaults
from mmspec.sampling.defaults import ModelDefaults
from mmspec.targets.transformers_target import TransformersTarget
from tests.checking import trial_of

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return mmspec.load("tiny-llava", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def hybrid() -> Pipeline:
    return mmspec.load("tiny-hybrid", device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def _fewer_draws(monkeypatch: Patch) -> None:
    monkeypatch.setattr(cases, "_DRAWS", 512)


def around(patch: Patch, owner: Any, name: str, changed: Callable[..., Any]) -> None:
    """Replace a function by ``changed``, which gets the function before its arguments."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args: changed(original, *args))


def trust_first_children(patch: Patch) -> None:
    """Drafts are accepted without verification."""

    def trusting(tree: TokenTree, choices: torch.Tensor) -> Verdict:
        choices = choices.clone()
        for row, nodes in enumerate(tree.children):
            for node, children in enumerate(nodes):
                choices[row, node] = next(iter(children), choices[row, node])
        return accept_path(tree, choices)

    patch.setattr(core, "accept_path", trusting)


def trust_first_drafts_of_samples(patch: Patch) -> None:
    """Sampling takes the first draft at the root, greedy decoding verifies."""

    def choosing(choose: Any, self: Any, rows: Any, tree: TokenTree, logits: torch.Tensor) -> Any:
        choices = choose(self, rows, tree, logits)
        if tree.nodes > 1 and rows[0].sampler.do_sample:
            choices.tokens[:, 0] = tree.tokens[:, 1]
        return choices

    around(patch, core.BatchSampler, "choose", choosing)


def keep_first_nodes(patch: Patch) -> None:
    """A commit keeps the states of the first nodes, whichever were accepted."""

    def committing(commit: Any, self: Any, verdict: Verdict) -> None:
        packed = verdict.packed.clone()
        for row in packed:
            row[2 : 2 + row[0]] = torch.arange(int(row[0]))
        commit(self, Verdict(packed))

    around(patch, TransformersTarget, "commit", committing)


def forget_accepted_drafts_in_plain_steps(patch: Patch) -> None:
    """A plain step after accepted drafts reads the second to last token."""
    last: list[Verdict] = []

    def committing(commit: Any, self: Any, verdict: Verdict) -> None:
        last[:] = [verdict]
        commit(self, verdict)

    def reading(verify: Any, self: Any, tree: TokenTree, *rest: Any) -> Any:
        if tree.nodes == 1 and last and int(last[0].length.max()) > 1 and len(tree.tokens) == len(last[0].tokens):
            tree = TokenTree.root(last[0].tokens[:, 0])
        return verify(self, tree, *rest)

    around(patch, TransformersTarget, "commit", committing)
    around(patch, TransformersTarget, "verify", reading)


def drop_deep_drafts_of_large_trees(patch: Patch) -> None:
    """Trees of more than 24 nodes: choices are shifted by a node."""

    def shifting(tree: TokenTree, choices: torch.Tensor) -> Verdict:
        return accept_path(tree, choices.roll(1, dims=1) if tree.nodes > 24 else choices)

    patch.setattr(core, "accept_path", shifting)


def ignore_images_in_prefixes(patch: Patch) -> None:
    """Prefixes with other images and equal words are reused: the image of the second turn is dropped."""
    patch.setattr(prefix_cache, "media_key", lambda prompt: "")


def stop_at_ends_of_steps(patch: Patch) -> None:
    """A stop string is looked for after the last token of a step."""

    def appending(append: Any, self: Any, history: list[int], prompt_length: int, tokens: Any, readers: Any) -> Any:
        emitted, reason = append(self, history, prompt_length, tokens)
        for reader in readers:
            for token in emitted:
                reader.append(token)
        return emitted, reason or ("stop" if any(reader.answer.stopped for reader in readers) else None)

    around(patch, Stopper, "append", appending)


def mix_rows(patch: Patch) -> None:
    """When a sequence leaves a batch, the last sequence does not move to its row."""
    around(patch, TransformersTarget, "keep", lambda keep, self, rows: keep(self, sorted(rows)))


def use_other_prefixes(patch: Patch) -> None:
    """A prompt continues the state of another conversation of at least its length."""

    def finding(find: Any, self: Any, *args: Any) -> Any:
        found = find(self, *args)
        if found is None:
            return None
        others = (one for one in self._entries if one is not found[0] and len(one.tokens) > found[1])
        return next(others, found[0]), found[1]

    around(patch, PrefixCache, "find", finding)


def ignore_least_length(patch: Patch) -> None:
    """``min_new_tokens`` is dropped."""

    def processors(original: Any, self: Any, params: Any, *rest: Any) -> Any:
        return original(self, replace(params, min_new_tokens=0), *rest)

    around(patch, ModelDefaults, "processors", processors)


def record_logprobs_of_roots(patch: Patch) -> None:
    """All log probabilities are taken at the root."""
    around(patch, sequence, "token_logprobs", lambda found, logits, *rest: found(logits[:1].expand_as(logits), *rest))


def keep_states_of_aborted_requests(patch: Patch) -> None:
    """An abort removes the last row in place of the aborted row."""

    def removing(remove: Any, self: EngineCore) -> None:
        if not (len(self.running) > 1 and any(one.cancelled for one in self.running)):
            remove(self)
            return
        keep = self.target.keep
        self.target.keep = lambda rows: keep(list(range(len(rows))))  # type: ignore[method-assign]
        try:
            remove(self)
        finally:
            del self.target.keep

    around(patch, EngineCore, "remove_finished", removing)


def ignore_seeds(patch: Patch) -> None:
    """All choices have one seed."""

    def seeded(sampler: Any, params: Any, *rest: Any) -> Any:
        return sampler(params if params.seed is None else replace(params, seed=0), *rest)

    around(patch, defaults, "sampler", seeded)


def sample_at_another_temperature(patch: Patch) -> None:
    """0.9 times the temperature that was asked for."""
    around(patch, core.BatchSampler, "choose", lambda choose, *args: choose(*args[:-1], args[-1] / 0.9))


def ignore_adapters(patch: Patch) -> None:
    """All requests use the model without an adapter."""

    def prefilling(prefill: Any, self: Any, prompts: Any, *rest: Any) -> Any:
        return prefill(self, [replace(one, adapter=None) for one in prompts], *rest)

    around(patch, TransformersTarget, "prefill", prefilling)


def exceed_the_context(patch: Patch) -> None:
    """The context limit is off by one."""
    around(patch, Stopper, "limit", lambda limit, self, length: min(limit(self, length) + 1, self.max_new_tokens))


BREAKS: list[tuple[Callable[[Patch], None], str]] = [
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
def test_a_mistake_is_found(broken: Callable[[Patch], None], name: str, pipe: Pipeline, monkeypatch: Patch) -> None:
    broken(monkeypatch)
    found = run_case(trial_of(pipe), name)
    assert found["outcome"] == "different", found
    assert found["differences"]


@pytest.mark.parametrize("name", ["rehearsed", "tree-sizes"])
def test_a_stale_state_of_recurrent_layers_is_found(name: str, hybrid: Pipeline, monkeypatch: Patch) -> None:
    keep_first_nodes(monkeypatch)
    assert run_case(trial_of(hybrid), name)["outcome"] == "different"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # which peft asks for
def test_an_adapter_that_is_ignored_is_found(tmp_path: Path, monkeypatch: Patch) -> None:
    pytest.importorskip("peft")
    from tests.mmspec.targets.test_lora import saved

    folder = saved(tmp_path, "tiny-llava", 2, lora_alpha=1, target_modules=["v_proj"])  # changes one answer of eight
    pipe = mmspec.load("tiny-llava", adapters={"one": folder}, device="cpu", dtype="float32")
    assert run_case(trial_of(pipe), "adapters")["outcome"] == "equal"
    ignore_adapters(monkeypatch)
    assert run_case(trial_of(pipe), "adapters")["outcome"] == "different"
