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
    choose = core.BatchSampler.choose

    def choosing(self: Any, rows: Any, tree: TokenTree, logits: torch.Tensor) -> Any:
        choices = choose(self, rows, tree, logits)
        if tree.nodes > 1 and rows[0].sampler.do_sample:
            choices.tokens[:, 0] = tree.tokens[:, 1]
        return choices

    patch.setattr(core.BatchSampler, "choose", choosing)


def keep_first_nodes(patch: Patch) -> None:
    """A commit keeps the states of the first nodes, whichever were accepted."""
    commit = TransformersTarget.commit

    def committing(self: Any, verdict: Verdict) -> None:
        packed = verdict.packed.clone()
        for row in packed:
            row[2 : 2 + row[0]] = torch.arange(int(row[0]))
        commit(self, Verdict(packed))

    patch.setattr(TransformersTarget, "commit", committing)


def forget_accepted_drafts_in_plain_steps(patch: Patch) -> None:
    """A plain step after accepted drafts reads the second to last token."""
    forward, commit = TransformersTarget.verify, TransformersTarget.commit
    accepted = [0]

    def committing(self: Any, verdict: Verdict) -> None:
        accepted[0] = int(verdict.length.max()) - 1
        committing.token = verdict.tokens[:, :1]  # type: ignore[attr-defined]
        commit(self, verdict)

    def reading(self: Any, tree: TokenTree, *rest: Any) -> Any:
        if tree.nodes == 1 and accepted[0] > 0 and len(tree.tokens) == len(committing.token):  # type: ignore[attr-defined]
            tree = TokenTree.root(committing.token[:, 0])  # type: ignore[attr-defined]
        return forward(self, tree, *rest)

    patch.setattr(TransformersTarget, "commit", committing)
    patch.setattr(TransformersTarget, "verify", reading)


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
    append = Stopper.append

    def appending(self: Stopper, history: list[int], prompt_length: int, tokens: list[int], readers: Any) -> Any:
        emitted, reason = append(self, history, prompt_length, tokens)
        for reader in readers:
            for token in emitted:
                reader.append(token)
        return emitted, reason or ("stop" if any(reader.answer.stopped for reader in readers) else None)

    patch.setattr(Stopper, "append", appending)


def mix_rows(patch: Patch) -> None:
    """When a sequence leaves a batch, the last sequence does not move to its row."""
    keep = TransformersTarget.keep
    patch.setattr(TransformersTarget, "keep", lambda self, rows: keep(self, sorted(rows)))


def use_other_prefixes(patch: Patch) -> None:
    """A prompt continues the state of another conversation of at least its length."""
    find = PrefixCache.find

    def finding(self: Any, *args: Any) -> Any:
        found = find(self, *args)
        if found is None:
            return None
        others = (one for one in self._entries if one is not found[0] and len(one.tokens) > found[1])
        return next(others, found[0]), found[1]

    patch.setattr(PrefixCache, "find", finding)


def ignore_least_length(patch: Patch) -> None:
    """``min_new_tokens`` is dropped."""
    processors = ModelDefaults.processors
    patch.setattr(
        ModelDefaults,
        "processors",
        lambda self, params, *rest: processors(self, replace(params, min_new_tokens=0), *rest),
    )


def record_logprobs_of_roots(patch: Patch) -> None:
    """All log probabilities are taken at the root."""
    found = sequence.token_logprobs
    patch.setattr(sequence, "token_logprobs", lambda logits, *rest: found(logits[:1].expand_as(logits), *rest))


def keep_states_of_aborted_requests(patch: Patch) -> None:
    """An abort removes the last row in place of the aborted row."""
    remove = EngineCore.remove_finished

    def removing(self: EngineCore) -> None:
        if not (len(self.running) > 1 and any(one.cancelled for one in self.running)):
            remove(self)
            return
        keep = self.target.keep
        self.target.keep = lambda rows: keep(list(range(len(rows))))  # type: ignore[method-assign]
        try:
            remove(self)
        finally:
            del self.target.keep

    patch.setattr(EngineCore, "remove_finished", removing)


def ignore_seeds(patch: Patch) -> None:
    """All choices have one seed."""
    sampler = defaults.sampler

    def seeded(params: Any, *rest: Any) -> Any:
        return sampler(params if params.seed is None else replace(params, seed=0), *rest)

    patch.setattr(defaults, "sampler", seeded)


def sample_at_another_temperature(patch: Patch) -> None:
    """0.9 times the temperature that was asked for."""
    choose = core.BatchSampler.choose

    def choosing(self: Any, rows: Any, tree: TokenTree, logits: torch.Tensor) -> torch.Tensor:
        return choose(self, rows, tree, logits / 0.9)

    patch.setattr(core.BatchSampler, "choose", choosing)


def ignore_adapters(patch: Patch) -> None:
    """All requests use the model without an adapter."""
    prefill = TransformersTarget.prefill
    patch.setattr(
        TransformersTarget,
        "prefill",
        lambda self, prompts, *rest: prefill(self, [replace(one, adapter=None) for one in prompts], *rest),
    )


def exceed_the_context(patch: Patch) -> None:
    """The context limit is off by one."""
    limit = Stopper.limit

    def limiting(self: Stopper, prompt_length: int) -> int:
        most = limit(self, prompt_length)
        return min(most + 1, self.max_new_tokens)

    patch.setattr(Stopper, "limit", limiting)


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
