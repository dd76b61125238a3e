"""Static shapes, as on CUDA, on a CPU: the logits of targets, and the batches of drafters."""

import pytest
import torch

from mmspec import TokenTree, accept_path, plugins
from mmspec.cache.rows import batch_bucket
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt
from mmspec.ops import kernels
from mmspec.targets.decoder import node_bucket
from mmspec.targets.transformers_target import TransformersTarget
from tests.targets import assert_trees_equal_paths, prefilled, prompt_of
from tests.tiny import random_tree, shared_model
from tests.tiny.drafters import tiny_drafter
from tests.tiny.models import text_inputs, vision_inputs

pytestmark = pytest.mark.usefixtures("fixed_shapes")
TARGETS = ["llama", "mistral-window", "qwen2-window", "gemma3", "mamba2", "bamba", "falcon_h1", "zamba2"]
TARGETS += ["qwen3_5_text", "olmo_hybrid", "kimi_linear", "mamba", "jamba", "zamba", "lfm2", "zaya", "minimax"]
TARGETS += ["recurrent_gemma"]


IMAGES = ["llava", "llava_bamba", "qwen2_5_vl"]


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 9, 33, 64, 65, 200])
def test_widths_are_few(nodes):
    assert nodes <= node_bucket(nodes) < 2 * nodes + 1
    assert node_bucket(node_bucket(nodes)) == node_bucket(nodes)


@pytest.mark.parametrize(("name", "batch"), [*((name, 3) for name in TARGETS + IMAGES), ("llama", 1), ("bamba", 1)])
def test_every_node_equals_its_path(name, batch):
    inputs = vision_inputs(name, batch) if name in IMAGES else text_inputs(batch, 9)
    target = assert_trees_equal_paths(shared_model(name), inputs, steps=3, nodes=9)
    assert target.runner.static_shapes


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window", "gemma3", "recurrent_gemma", "zaya"])
def test_trees_deeper_than_a_window(name, fixed, monkeypatch):
    """Within the tree, too, a node attends to no more than its window: chains of 16 against windows of 5 and 6."""
    monkeypatch.setattr(kernels, "static_shapes", lambda device: fixed)
    model = shared_model(name)
    assert model.config.sliding_window < 8
    target = assert_trees_equal_paths(model, text_inputs(2, 9), steps=1, nodes=16, shape="chain")
    assert target.runner.static_shapes == fixed


def test_padding_within_a_prompt_is_dropped():
    target, fresh = (TransformersTarget(shared_model("llama")) for _ in range(2))
    inputs = text_inputs(1, 9)
    inputs["attention_mask"][0, 2:5] = 0
    ids = inputs["input_ids"][:, [0, 1, 5, 6, 7, 8]]
    steps = prefilled(target, prompt_of(inputs), 8), prefilled(fresh, Prompt(ids), 8)
    torch.testing.assert_close(steps[0].logits, steps[1].logits)
    assert target.runner.static_shapes
    assert target.runner.cache.lengths == [6]
    tree = random_tree(torch.Generator().manual_seed(1), 1, 6, 90)
    torch.testing.assert_close(target.verify(tree).logits, fresh.verify(tree).logits)


def test_further_prompts_find_everything_where_it_was():
    target, kept = TransformersTarget(shared_model("bamba")), []
    for length in (20, 2, 9):
        prompt = prompt_of(text_inputs(2, length, seed=length))
        first = prefilled(target, prompt, 30)
        tree = random_tree(torch.Generator().manual_seed(length), 2, 6, 90)
        verdict = accept_path(tree, tree.tokens)
        output = target.verify(tree)
        target.commit(verdict)
        after = target.verify(TokenTree.root(verdict.bonus))
        fresh = TransformersTarget(shared_model("bamba"))
        torch.testing.assert_close(prefilled(fresh, prompt, 30).logits, first.logits)
        torch.testing.assert_close(fresh.verify(tree).logits, output.logits)
        fresh.commit(verdict)
        torch.testing.assert_close(fresh.verify(TokenTree.root(verdict.bonus)).logits, after.logits)
        kept.append((target.runner.version, target.runner.cache.bounds))
        target.keep([])
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize("kind", ["msd", "small", "mamba", "recycle"])
def test_drafts_of_a_batch_are_grown_in_powers_of_two(kind):
    """Whoever joins and leaves; buffers move only where they must grow, as the captured graphs are lost then."""
    model = shared_model("llava")
    target, drafter = plugins.target_class(model.config)(model), tiny_drafter(kind, model)
    drafter.attach(target)
    sizes, versions, rows, expected = [], [], [], []
    for joining, kept in ((1, [0]), (2, [2, 1]), (3, [4, 0, 1]), (2, [0, 1, 2, 3, 4]), (0, []), (2, [1, 0])):
        if joining:
            prompt = Prompt(torch.randint(3, 90, (joining, 6), generator=torch.Generator().manual_seed(joining)))
            histories = [[*ids, 7] for ids in prompt.input_ids.tolist()]
            drafter.begin(prompt, prefilled(target, prompt, 40), histories)
            rows += histories
        if rows:
            steps = drafter._on_device if kind == "recycle" else drafter
            if not sizes:
                steps.grow = lambda token, plan, grow=steps.grow: sizes.append(len(token)) or grow(token, plan)
            tree = drafter.propose(torch.tensor([row[-1] for row in rows]), StepPlan(5, 2))
            assert tree.tokens[:, 0].tolist() == [row[-1] for row in rows]
            expected.append(batch_bucket(len(rows)))
            versions.append(steps._version)
        target.keep(kept)
        drafter.select(kept)
        rows = [rows[row] for row in kept]
    assert sizes == expected == [1, 4, 8, 8, 8, 2]
    assert len(set(versions)) == 3
