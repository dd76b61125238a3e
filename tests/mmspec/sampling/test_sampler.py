"""Processors on trees: each node must get what plain decoding would give the token after its own path."""

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as hf

from mmspec import SamplingParams, TokenTree, UserError, accept_path, ops, verify
from mmspec.sampling import defaults
from mmspec.sampling.batch_sampler import BatchSampler
from mmspec.sampling.processors import AdditiveTerms
from mmspec.sampling.sampler import Sampler, SamplingState
from tests.tiny import random_tree, root_path, shared_model, valid_nodes

pytestmark = pytest.mark.usefixtures("at_every_node")

VOCAB = 23
HISTORIES = [[3, 4, 5, 3, 4], [9, 8, 9], [11]]


def histories_and_tree(seed, nodes=11):
    """Rows of different length whose last token is the tree's root."""
    tree = random_tree(torch.Generator().manual_seed(seed), 3, nodes, 8)
    roots = torch.tensor([row[-1] for row in HISTORIES])
    tokens = torch.cat([roots[:, None], tree.tokens[:, 1:]], dim=1)
    return [list(row) for row in HISTORIES], TokenTree(tokens, tree.parents, tree.valid)


def unrolled(history, tree, row, node):
    return history[row] + [int(tree.tokens[row, i]) for i in root_path(tree, row, node)[1:]]


def rows_of(sampler, history=HISTORIES):
    return [SamplingState(list(tokens), sampler, index) for index, tokens in enumerate(history)]


def verdict_of(sampler, history, tree, logits):
    return accept_path(tree, BatchSampler().choose(rows_of(sampler, history), tree, logits).tokens)


def processed(monkeypatch, processors, history, tree, logits):
    """By row and node, the distributions that a sampler chooses with."""
    sampler, rows = Sampler(processors, do_sample=True), range(tree.batch)
    nodes = [(b, i) for b in rows for i in valid_nodes(tree, b)]
    if not sampler.by_path:
        seen = recorded(monkeypatch, iter([torch.zeros_like(tree.tokens)]))
        BatchSampler().choose(rows_of(sampler, history), tree, logits)
        return {(b, i): seen[0][b, i] for b, i in nodes}
    found = {}
    for b, i in nodes:  # the walk is led to each node
        led = [int(tree.tokens[b, node]) for node in root_path(tree, b, i)[1:]] + [VOCAB - 1]
        seen = recorded(monkeypatch, (torch.tensor([[token]]) for token in led))
        row = SamplingState(list(history[b]), sampler, b)
        assert BatchSampler().choose([row], tree.select([b]), logits[b : b + 1]).failures == [{}]
        found[b, i] = seen[-1][0, 0]
    return found


def recorded(monkeypatch, choices):
    """Draws are replaced by ``choices``; the distributions that they would have been made from."""
    seen = []
    monkeypatch.setattr(ops, "sample", lambda scores, uniform: seen.append(scores.softmax(-1)) or next(choices))
    return seen


class LateBan(hf.TemperatureLogitsWarper):
    """Inherits from a processor that ignores the history, and does not ignore it."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids, -50.0)


class LatePenalty(hf.RepetitionPenaltyLogitsProcessor):
    """As its base, which knows how long each row's padding is."""


def allowed(row, ids):
    return [(row + ids.shape[0] + k) % VOCAB for k in range(4)]


ENDING_ALIKE = [*((token, 9) for token in range(8)), (3, 4, 9), (9,)]

PROCESSORS = {
    "repetition": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.7)],
    "repetition, padding ignored": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.7, torch.tensor([0, 2, 1]))],
    "subclass, padding ignored": lambda: [LatePenalty(1.7, torch.tensor([0, 2, 1]))],
    "no repeated bigram": lambda: [hf.NoRepeatNGramLogitsProcessor(2)],
    "min length": lambda: [hf.MinLengthLogitsProcessor(7, 5)],
    "min new tokens": lambda: [hf.MinNewTokensLengthLogitsProcessor(3, 3, 5)],
    "bad words": lambda: [hf.NoBadWordsLogitsProcessor([[4], [3, 4], [5, 6, 7]], eos_token_id=2)],
    "sequence bias": lambda: [hf.SequenceBiasLogitsProcessor([[[3, 4], 5.0], [[1], -4.0]])],
    # Whichever of those that end alike is looked at last: it has not begun where another has.
    "sequences that end alike": lambda: [hf.SequenceBiasLogitsProcessor(dict.fromkeys(ENDING_ALIKE, 5.0))],
    "bad words that end alike": lambda: [hf.NoBadWordsLogitsProcessor(list(map(list, ENDING_ALIKE[:-1])))],
    "length decay": lambda: [hf.ExponentialDecayLengthPenalty((1, 1.3), 5, 3)],
    "forced end": lambda: [hf.ForcedEOSTokenLogitsProcessor(8, 5)],
    "begin": lambda: [hf.ForcedBOSTokenLogitsProcessor(4)],
    "suppressed at the begin": lambda: [hf.SuppressTokensAtBeginLogitsProcessor([4, 5], 5)],
    "watermark": lambda: [hf.WatermarkLogitsProcessor(VOCAB, "cpu", bias=5.0)],
    "prefix": lambda: [hf.PrefixConstrainedLogitsProcessor(allowed, 1)],
    "subclass": lambda: [LateBan(1.0)],
    "temperature": lambda: [hf.TemperatureLogitsWarper(0.6)],
    "top-k": lambda: [hf.TopKLogitsWarper(3)],
    "top-p": lambda: [hf.TopPLogitsWarper(0.7)],
    "min-p": lambda: [hf.MinPLogitsWarper(0.2)],
    "typical": lambda: [hf.TypicalLogitsWarper(0.5)],
    "epsilon": lambda: [hf.EpsilonLogitsWarper(0.03)],
    "eta": lambda: [hf.EtaLogitsWarper(0.03)],
    "top-h": lambda: [hf.TopHLogitsWarper(0.5)],
    "biased": lambda: [AdditiveTerms([(4, 3.0), (7, -100.0)], 0.0, 0.0, 9)],
    "penalised": lambda: [AdditiveTerms([(4, 3.0)], 0.7, -0.4, 2)],
    "suppressed": lambda: [hf.SuppressTokensLogitsProcessor([4, 9])],
    "without infinities": lambda: [hf.InfNanRemoveLogitsProcessor()],
    "normalised": lambda: [hf.LogitNormalization()],
    "several": lambda: [
        hf.RepetitionPenaltyLogitsProcessor(1.3),
        hf.NoRepeatNGramLogitsProcessor(3),
        hf.TemperatureLogitsWarper(0.8),
        hf.TopKLogitsWarper(9),
        hf.TopPLogitsWarper(0.9),
    ],
}
try:
    PROCESSORS["repetition, padding ignored"]()
except ValueError:  # the oldest release of transformers takes one number for all rows
    del PROCESSORS["repetition, padding ignored"], PROCESSORS["subclass, padding ignored"]


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("seed", range(2))
def test_processors_equal_the_unrolled_path(monkeypatch, name, seed):
    history, tree = histories_and_tree(seed)
    logits = torch.randn(3, tree.nodes, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    ours = processed(monkeypatch, PROCESSORS[name](), history, tree, logits)
    assert torch.equal(logits, before)
    assert history == HISTORIES  # the histories of the engine are unchanged
    assert len(ours) == sum(len(valid_nodes(tree, b)) for b in range(3))
    for b in range(3):
        for i in valid_nodes(tree, b):
            ids = torch.tensor([unrolled(history, tree, b, i)])
            scores = logits[b, i][None].clone()
            for processor in PROCESSORS[name]():
                if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
                    processor.prompt_ignore_length = processor.prompt_ignore_length[b : b + 1]
                if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
                    processor = hf.PrefixConstrainedLogitsProcessor(lambda _, ids, row=b: allowed(row, ids), 1)
                scores = processor(ids, scores)
            torch.testing.assert_close(ours[b, i], scores[0].softmax(-1))


def test_a_history_as_long_as_an_ngram_is_one(monkeypatch):
    """Of the tokens 5, 5 the second may not be followed by another 5 where no pair may come twice."""
    tree, logits = TokenTree.root(torch.tensor([5])), torch.zeros(1, 1, VOCAB)
    banned = processed(monkeypatch, [hf.NoRepeatNGramLogitsProcessor(2)], [[5, 5]], tree, logits)[0, 0]
    assert (banned == 0).nonzero().flatten().tolist() == [5]
    free = processed(monkeypatch, [hf.NoRepeatNGramLogitsProcessor(3)], [[5, 5]], tree, logits)[0, 0]
    assert (free > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_equals(dtype):
    torch.manual_seed(0)
    logits = torch.randn(1, 9, 1000).round().to(dtype)
    tree = random_tree(torch.Generator().manual_seed(0), 1, 9, 90, ragged=False)
    chosen = BatchSampler().choose([SamplingState([5], Sampler())], tree, logits).tokens
    assert chosen.tolist() == [[int((row == row.max()).nonzero()[0]) for row in logits[0]]]


def test_half_precision_is_sampled_in_float32():
    """Near uniform over 3000 tokens: sums of bfloat16 probabilities would shift most draws."""
    logits = torch.randn(1, 60, 3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    tree = random_tree(torch.Generator().manual_seed(0), 1, 60, 90, ragged=False)
    half, full = (
        BatchSampler()
        .choose([SamplingState([5], defaults.sampler(SamplingParams(temperature=1.0, seed=7)))], tree, scores)
        .tokens
        for scores in (logits, logits.float())
    )
    assert torch.equal(half, full)


@pytest.fixture(params=["at once", "host", "device"])
def nodes_drawn_at(request, monkeypatch):
    """Tokens are chosen at all nodes at once, or by level at reached nodes, on the host or on the device."""
    return choose_nodes(monkeypatch, request.param)


def choose_nodes(patch, kind):
    patch.setattr("mmspec.sampling.batch_sampler.kernels.static_shapes", lambda _: kind != "host")
    patch.setattr(
        "mmspec.sampling.batch_sampler._ROUND", dict.fromkeys((True, False), -1e9 if kind == "device" else 1e9)
    )
    return kind


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.3, "repetition_penalty": 1.4}]
)
def test_reached_nodes_get_the_tokens_that_all_nodes_at_once_get(monkeypatch, params, seed):
    history, tree = histories_and_tree(seed, nodes=30)
    logits = torch.randn(3, tree.nodes, VOCAB, generator=torch.Generator().manual_seed(seed))
    for node, token in zip((tree.parents * (tree.parents > 0)).T, tree.tokens.T, strict=True):
        logits[range(3), node, token] += 3  # long paths
    found, counted = [], []
    for kind in ("at once", "host", "device"):
        counts = []
        choose_nodes(monkeypatch, kind)
        for name in ("sample", "greedy"):
            op = getattr(ops, name)
            count = lambda x, *rest, op=op, counts=counts: counts.append(x.shape[:-1].numel()) or op(x, *rest)  # noqa: E731
            monkeypatch.setattr(ops, name, count)
        rows = [SamplingState(list(row), defaults.sampler(SamplingParams(**params, seed=seed))) for row in history]
        found.append(accept_path(tree, BatchSampler().choose(rows, tree, logits).tokens))
        counted.append(sum(counts))
        monkeypatch.undo()
    assert found[0].host == found[1].host == found[2].host
    drawn = (int(found[0].length.sum()), 3 * (tree.max_depth + 1))  # greedy tokens are chosen at all nodes at once
    assert counted == [tree.tokens.numel(), *(drawn if params else 2 * (tree.tokens.numel(),))]


def test_params_build_what_generate_builds():
    params = SamplingParams(0.7, 0.9, 5, 0.05, 1.2)
    config = GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.9, top_k=5, min_p=0.05, repetition_penalty=1.2, eos_token_id=2
    )
    own = hf.InfNanRemoveLogitsProcessor()
    theirs = shared_model("llama")._get_logits_processor(config, input_ids_seq_length=3, logits_processor=[own])
    ours = defaults.processors(params, [own])
    assert [type(p) for p in ours] == [type(p) for p in theirs]
    ids, scores = torch.tensor([[3, 4, 5]]), torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours(ids, scores.clone()), theirs(ids, scores.clone()))
    assert (
        list(defaults.processors(SamplingParams())) == list(defaults.processors(SamplingParams(temperature=1.0))) == []
    )
    assert list(defaults.processors(SamplingParams(top_k=5, top_p=0.5))) == []  # greedy needs no filters


@pytest.mark.parametrize(
    "processor",
    [
        lambda: hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, shared_model("llama")),
        lambda: hf.EncoderRepetitionPenaltyLogitsProcessor(1.2, torch.tensor([[1, 2]])),
        lambda: hf.EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([[1, 2, 3]])),
        lambda: hf.ClassifierFreeGuidanceLogitsProcessor(1.5),
    ],
)
def test_refuses_processors_that_are_not_exact_on_trees(processor):
    made = processor()
    with pytest.raises(UserError, match=f"{type(made).__name__} does not, use model.generate for it"):
        Sampler([made])


@pytest.mark.parametrize("seed", range(4))
def test_drawn_trees_are_verified_with_each_nodes_processed_distribution(seed, nodes_drawn_at):
    history, tree = histories_and_tree(seed)
    g = torch.Generator().manual_seed(seed)
    logits, q = torch.randn(2, 3, tree.nodes, VOCAB, generator=g)
    drawn = TokenTree(tree.tokens, tree.parents, tree.valid, q.softmax(-1))
    processors = [hf.TemperatureLogitsWarper(0.5), hf.TopKLogitsWarper(9)]
    scores = logits / 0.5
    kept = scores >= scores.topk(9).values[..., -1:]
    probs, numbers = scores.where(kept, -torch.inf).softmax(-1), torch.Generator().manual_seed(seed)
    sampler = Sampler(processors, do_sample=True, generator=torch.Generator().manual_seed(seed))
    ours = verdict_of(sampler, history, drawn, logits)
    for b in range(3):
        assert ours.host[b] == verify(drawn.select([b]), probs[b : b + 1], generator=numbers).host[0]


@pytest.mark.parametrize("nodes", [2, 40])
@pytest.mark.parametrize("seed", range(6))
def test_a_tree_samples_what_single_tokens_would(seed, nodes, nodes_drawn_at):
    """Walking down the tree with the n-th number for the n-th new token, one node at a time, by a plain loop."""
    history, tree = histories_and_tree(seed, nodes=nodes)
    # Few tokens are likely, so that walks go deep.
    logits = 4.0 * torch.randn(3, tree.nodes, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits.scatter_(2, tree.tokens[:, None, :].expand(-1, tree.nodes, -1), 3.0, reduce="add")
    sampler = Sampler(do_sample=True, generator=torch.Generator().manual_seed(seed))
    verdict, numbers = verdict_of(sampler, history, tree, logits), torch.Generator().manual_seed(seed)
    numbers = torch.stack([torch.rand(64, generator=numbers) for _ in range(3)])
    for b, (path, tokens) in enumerate(verdict.host):
        walked, said = [0], []
        while True:
            probs = logits[b, walked[-1]].softmax(-1).double()
            said.append(int((probs.cumsum(0) <= numbers[b, len(said)].double() * probs.sum()).sum()))
            below = [
                i for i in valid_nodes(tree, b) if tree.parents[b, i] == walked[-1] and tree.tokens[b, i] == said[-1]
            ]
            if not below:
                break
            walked += below
        assert (path, tokens) == (walked, said)
