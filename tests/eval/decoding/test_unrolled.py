"""Unrolled verification: the same logits and commits as the tree scan."""

import pytest
import torch

from mmspec import TokenTree, accept_path
from mmspec.core.target import Prompt
from mmspec.eval.decoding.oracle import Oracle
from mmspec.eval.decoding.unrolled import UnrolledTarget, unroll
from mmspec.pipeline import Pipeline
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import random_tree, root_path, shared_model
from tests.tiny.models import text_inputs

CLOSE = dict(atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("shape", ["random", "chain", "star"])
@pytest.mark.parametrize("nodes", [1, 2, 9])
def test_every_leaf_has_its_own_chain(shape, nodes):
    tree = random_tree(torch.Generator().manual_seed(nodes), 3, nodes, 90, shape=shape)
    chains, copy = unroll(tree)
    for row in range(3):
        parents = tree.parents[row].tolist()
        leaves = [i for i in range(1, nodes) if i not in parents]
        paths = [root_path(tree, row, leaf) for leaf in leaves]
        used = 1 + sum(len(path) - 1 for path in paths)
        unrolled = chains.parents[row, :used].tolist()
        # After the root, every entry follows the previous one or starts a chain.
        assert all(above in (0, place - 1) for place, above in enumerate(unrolled[1:], start=1))
        ends = [place for place in range(1, used) if place not in unrolled]
        found = [chains.tokens[row, root_path(chains, row, end)].tolist() for end in ends]
        assert found == [tree.tokens[row, path].tolist() for path in paths]
        for node in range(nodes):
            path = chains.tokens[row, root_path(chains, row, int(copy[row, node]))]
            assert torch.equal(path, tree.tokens[row, root_path(tree, row, node)])


def test_shared_nodes_are_computed_once_per_path():
    fork = TokenTree(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-1, 0, 1, 1]]))
    chains, copy = unroll(fork)
    assert chains.tokens.tolist() == [[5, 6, 7, 6, 8]]
    assert chains.parents.tolist() == [[-1, 0, 1, 0, 3]]
    assert copy.tolist() == [[0, 1, 2, 4]]


@pytest.mark.parametrize("name", ["bamba", "mamba2", "llama"])
@pytest.mark.parametrize("batch", [1, 3])
def test_logits_and_commits_equal_those_of_trees(name, batch):
    targets = [TransformersTarget(shared_model(name)) for _ in range(2)]
    targets[1] = UnrolledTarget(targets[1])
    inputs, g = text_inputs(batch, 7), torch.Generator().manual_seed(1)
    for target in targets:
        target.prefill(Prompt(inputs["input_ids"], inputs["attention_mask"] if batch > 1 else None), 64)
    accepted = 0
    for _ in range(3):
        tree = random_tree(g, batch, 9, 90)
        steps = [target.forward_tree(tree) for target in targets]
        torch.testing.assert_close(steps[1].logits, steps[0].logits, **CLOSE)
        torch.testing.assert_close(steps[1].features, steps[0].features, **CLOSE)
        # Choices that accept the deepest node of each row.
        choices = torch.full_like(tree.tokens, 95)
        for row in range(batch):
            path = root_path(tree, row, int(torch.where(tree.valid[row], tree.depth[row], -1).argmax()))
            accepted += len(path) - 1
            choices[row, path[:-1]] = tree.tokens[row, path[1:]]
        verdict = accept_path(tree, choices)
        for target in targets:
            target.commit(verdict)
    assert accepted > 3


@pytest.mark.parametrize("batch", [1, 3])
def test_output_equals_generate(batch):
    model = shared_model("bamba")
    inputs = text_inputs(batch, 9)
    reference = model.generate(**inputs, max_new_tokens=20, do_sample=False)[:, 9:].tolist()
    requests = [" ".join(map(str, inputs["input_ids"][row, row:].tolist())) for row in range(batch)]
    target = UnrolledTarget(TransformersTarget(model))
    processor = Processor(type("Reader", (), {"decode": staticmethod(lambda ids, **options: "")}))
    processor._token_ids = lambda prompt, *options: [int(token) for token in prompt.split()]
    pipe = Pipeline(target, processor, Oracle(reference, vocab=90, spoil=0.1))
    answers = pipe.generate_batch([{"prompt": request} for request in requests], max_new_tokens=20, nodes=12)
    assert [answer.token_ids for answer in answers] == reference
    assert max(answer.stats.mean_acceptance_length for answer in answers) > 1.5
