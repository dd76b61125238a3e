"""The loop, on a target that is a table, whose answers are known without a model."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from mmspec import TokenTree
from mmspec.checking.oracle import Oracle
from mmspec.core.drafter import Drafter
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, TargetOutput
from mmspec.core.tree import build_tree
from mmspec.drafters.ngram import Ngram
from mmspec.engine.policy import AdaptivePolicy, DraftPolicy
from mmspec.engine.stopping import Stopper
from mmspec.sampling import defaults
from mmspec.sampling.params import SamplingParams
from mmspec.sampling.sampler import Sampler
from tests.decoding import SteppedEngine, decode
from tests.mmspec.sampling.plain import chi_square
from tests.tiny import table_model

VOCAB = 7


class TableTarget:
    """A language model whose next token depends on the last two by a table, (vocab, vocab, vocab) logits."""

    device = torch.device("cpu")

    def __init__(self, table):
        self.table = table
        self.rows = []  # tokens that each row has cached
        self.passes = []  # (rows, nodes) of every verify pass

    def batch_key(self, prompt):
        return None

    def prefill(self, prompts, max_new_tokens, reads=(), chunk=None):
        new = [list(row) for prompt in prompts for row in prompt.unpadded()]
        for _ in range(chunk or len(new[0]), len(new[0]), chunk or 1):
            yield None
        self.rows += new
        yield self._step(torch.tensor([[row[-2:]] for row in new]))

    def keep(self, rows):
        self.rows = [self.rows[row] for row in rows]

    def verify(self, tree, reads=()):
        self.tree = tree
        self.passes.append(tuple(tree.tokens.shape))
        up = tree.tokens.gather(1, tree.parents.clamp(min=0))
        up[:, 0] = torch.tensor([row[-1] for row in self.rows])
        return self._step(torch.stack([up, tree.tokens], dim=-1))

    def commit(self, verdict):
        for b, (path, _) in enumerate(verdict.host):
            self.rows[b] += [int(self.tree.tokens[b, node]) for node in path]

    def embed(self, token_ids):
        return torch.nn.functional.one_hot(token_ids, VOCAB).float()

    def head(self, hidden):
        return hidden

    def _step(self, pairs):
        logits = self.table[pairs[..., 0], pairs[..., 1]]
        return TargetOutput(logits, {"last": torch.zeros(*logits.shape[:2], 4)})


def prompt_of(rows):
    return Prompt(torch.tensor(rows))


def said_plainly(table, row, count, eos=()):
    tokens = list(row)
    while len(tokens) < len(row) + count:
        tokens.append(int(table[tokens[-2], tokens[-1]].argmax()))
        if tokens[-1] in eos:
            break
    return tokens[len(row) :]


def run(table, rows, drafter, stopper, sampler=None, policy=None):
    """All steps: the rows at the end, and what each step emitted for each row."""
    target, steps, result = TableTarget(table), [], []
    for result in decode(target, drafter, prompt_of(rows), sampler or Sampler(), stopper, policy or StepPlan(10, 6)):
        steps.append([list(row.emitted) for row in result])
        alive = [row for row in result if not row.done]
        # The target has cached everything but the last token of each row, and holds no other rows after a step.
        assert len(steps) == 1 or sorted(row.history[:-1] for row in alive) == sorted(target.rows)
    assert target.rows == []
    return result, steps


def assert_consistent(row, steps):
    s = row.stats
    assert s.num_generated_tokens == len(row.token_ids) == 1 + sum(s.accept_lengths)
    assert s.num_spec_steps == len(s.accept_lengths) == sum(s.acceptance_histogram)
    assert s.num_accepted_draft_tokens == sum(i * n for i, n in enumerate(s.acceptance_histogram))
    assert s.num_accepted_draft_tokens <= min(s.num_draft_tokens, len(row.token_ids) - 1)
    assert list(itertools.chain(*steps)) == row.token_ids
    assert all(accepted <= emitted for accepted, emitted in zip([0], s.accept_lengths, strict=False))
    if s.num_spec_steps:
        assert 1 <= s.mean_acceptance_length <= s.num_spec_tokens + 1
    assert s.draft_seconds + s.verify_seconds + s.commit_seconds + s.prefill_seconds <= s.wall_seconds + 1e-6


def oracle(table, rows, count, seed):
    return Oracle([said_plainly(table, row, count) for row in rows], vocab=VOCAB, seed=seed)


@pytest.mark.parametrize("limit", range(1, 14))
def test_every_limit_is_met_inside_paths(limit):
    table, rows = table_model(VOCAB), [[1, 2], [5, 4]]
    for seed in range(3):
        result, steps = run(table, rows, oracle(table, rows, 30, seed), Stopper(limit))
        for b, row in enumerate(result):
            assert row.token_ids == said_plainly(table, rows[b], limit)
            assert_consistent(row, [step[b] for step in steps])


@pytest.mark.parametrize("eos", range(VOCAB))
def test_rows_end_at_their_own_time(eos):
    table, rows = table_model(VOCAB, 3), [[1, 2], [5, 4], [6, 6], [0, 3]]
    lengths = set()
    for seed in range(3):
        result, steps = run(table, rows, oracle(table, rows, 30, seed), Stopper(25, eos_token_ids=[eos]))
        for b, row in enumerate(result):
            expected = said_plainly(table, rows[b], 25, eos=[eos])
            assert row.token_ids == expected
            assert row.finish_reason == ("stop" if expected[-1] == eos else "length")
            assert_consistent(row, [step[b] for step in steps])
            lengths.add(len(expected))
            # A row that has ended emits nothing and costs no more steps.
            ended = next(
                i for i, step in enumerate(itertools.accumulate(len(s[b]) for s in steps)) if step == len(expected)
            )
            assert row.stats.num_spec_steps == ended
    assert len(lengths) > 1 or eos not in set(itertools.chain(*(said_plainly(table, row, 25) for row in rows)))


def test_drafts_behind_a_stop_are_not_counted():
    table = table_model(VOCAB)
    reference = said_plainly(table, [1, 2], 10)
    exact = Oracle([reference], vocab=VOCAB, spoil=0.0)
    exact._random.randint = lambda low, high: high if low == 0 and high == 6 else 0  # the whole truth, no decoys
    (row,), _ = run(table, [[1, 2]], exact, Stopper(50, criteria=[lambda ids, _: ids.shape[1] >= 2 + 4]))
    assert row.token_ids == reference[:4]
    assert row.stats.accept_lengths == [3]
    assert row.stats.num_accepted_draft_tokens == 3
    assert row.stats.num_draft_tokens == 6


class Fixed(Drafter):
    """Proposes given trees: per step, per row (tokens, parents)."""

    def __init__(self, *trees):
        self.trees, self.history, self.observed = list(trees), [], []

    def begin(self, prompt, output, history):
        self.history = [*self.history, *history]

    def select(self, rows):
        self.history = [self.history[row] for row in rows]

    def propose(self, token, plan):
        assert token.tolist() == [row[-1] for row in self.history]
        return build_tree(token, self.trees.pop(0)) if self.trees else TokenTree.root(token)

    def observe(self, tree, verdict, output):
        self.observed.append(
            ([len(row) for row in self.history], verdict.length.tolist(), tree.nodes, output.logits.shape[1])
        )


def test_padding_is_not_counted_as_drafts():
    table, rows = table_model(VOCAB), [[1, 2], [5, 4]]
    right = said_plainly(table, rows[0], 3)
    drafter = Fixed([([right[1], 0 if right[1] else 1, right[2]], [0, 0, 1]), ([], [])])
    result, _ = run(table, rows, drafter, Stopper(4))
    assert [row.stats.num_draft_tokens for row in result] == [3, 0]
    assert [row.stats.num_accepted_draft_tokens for row in result] == [2, 0]
    assert drafter.observed[0] == ([2 + 4, 2 + 2], [3, 1], 4, 4)
    assert [row.token_ids for row in result] == [said_plainly(table, row, 4) for row in rows]


class Foreign(Ngram):
    """Drafts ids beyond the vocabulary, and below it."""

    def propose(self, token, plan):
        return build_tree(token, [([VOCAB, -1, 1 << 40, 3], [0, 0, 1, 1])] * len(token))


def test_drafts_beyond_the_vocabulary_never_reach_the_target():
    table, rows = table_model(VOCAB, 0), [[1, 2, 3], [4, 5, 6]]
    ended, _ = run(table, rows, Foreign(), Stopper(12))
    assert [row.token_ids for row in ended] == [said_plainly(table, row, 12) for row in rows]


def sampled(table, rows, drafter, seed=5):
    """150 tokens per row, more than one block of random numbers has."""
    sampler = Sampler(do_sample=True, generator=torch.Generator().manual_seed(seed))
    result, steps = run(table, rows, drafter, Stopper(150), sampler, StepPlan(20, 8))
    return [row.token_ids for row in result], steps


@pytest.mark.parametrize("batch", [1, 3])
def test_random_numbers_come_from_the_seed_alone(batch):
    table, rows = table_model(VOCAB), [[1, 2], [3, 4], [5, 6]][:batch]
    plain, _ = sampled(table, rows, None)
    assert [len(row) for row in plain] == [150] * batch
    for seed in range(3):
        torch.manual_seed(seed)
        drafted, steps = sampled(table, rows, Oracle(plain, vocab=VOCAB, seed=seed, nodes=20))
        assert drafted == plain
        assert len(steps) < 140
    assert sampled(table, rows, None, seed=6)[0] != plain


def test_no_random_number_is_used_twice():
    """Where all tokens are equally likely, equal tokens mean equal numbers."""
    tokens, _ = sampled(torch.zeros(VOCAB, VOCAB, VOCAB), [[1, 2], [1, 2]], None)
    first, second = (torch.tensor(row) for row in tokens)
    assert float((first == second).float().mean()) < 0.3
    for shift in range(1, 75):
        assert float((first[shift:] == first[:-shift]).float().mean()) < 0.35


class Silent(Drafter):
    """Keeps no state."""

    def begin(self, prompt, output, history): ...

    def select(self, rows): ...

    def observe(self, tree, verdict, output): ...


class Drawn(Silent):
    """Draws children from its own distribution after each token, in draw order: root -> (a, b), a -> c."""

    def __init__(self, q, seed):
        self.q, self.g = q, torch.Generator().manual_seed(seed)

    def propose(self, token, plan):
        first = torch.multinomial(self.q[token], 2, generator=self.g)
        below = torch.multinomial(self.q[first[:, 0]], 1, generator=self.g)
        tokens = torch.cat([token[:, None], first, below], dim=1)
        return TokenTree(tokens, torch.tensor([[-1, 0, 0, 1]]).expand_as(tokens), draft_probs=self.q[tokens])


def test_samples_of_drawn_trees_are_distributed_as_plain_ones():
    """Four tokens of a vocabulary of four, 6,000 rows: chi-square against the chain rule, processors included."""
    vocab, batch, new = 4, 6000, 4
    table = table_model(vocab, 5, spread=1.0)
    drafter = Drawn(torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(9)).softmax(-1), 3)
    processors = defaults.processors(SamplingParams(temperature=0.8, top_k=3))
    sampler = Sampler(processors, do_sample=True, generator=torch.Generator().manual_seed(11))
    result, _ = run(table, [[1, 2]] * batch, drafter, Stopper(new), sampler, StepPlan(5, 3))

    probs = (table / 0.8).masked_fill(table < table.topk(3).values[..., -1:], -torch.inf).softmax(-1).double()
    expected = {}
    for tokens in itertools.product(range(vocab), repeat=new):
        pairs = zip((1, 2, *tokens), (2, *tokens), tokens, strict=False)
        expected[tokens] = math.prod(float(probs[pair]) for pair in pairs)
    found, limit = chi_square(Counter(tuple(row.token_ids) for row in result), expected, batch)
    assert found < limit


@pytest.mark.parametrize("lengths", [[3, 30, 5, 7, 40, 1], [9, 9, 9, 9], [17], [2, 15, 2, 15]])
def test_joining_prompts_delay_a_step_by_one_chunk_at_most(lengths):
    target, engine = stacking(chunk=16)
    (first,) = scheduled(engine, [[1, 2]], 60)
    assert engine.core.step() == 0
    prompts = [[1, *(token % VOCAB for token in range(length))] for length in lengths]
    joined = scheduled(engine, prompts)
    while not first.done:
        target.prefilled, before = 0, len(first.token_ids)
        rows = len(engine.core.running)
        tokens = engine.core.step()
        assert target.prefilled <= 16
        assert len(first.token_ids) == before + 1
        assert tokens == (0 if target.prefilled else rows)
    finished(engine, joined, prompts)


class Stacking(TableTarget):
    """Writes down the prompts of each prefill, the room that their answers have, and the number of prefilled tokens."""

    kinds = None

    def __init__(self, table):
        super().__init__(table)
        self.prefills, self.prefilled = [], 0

    def batch_key(self, prompt):
        return None if self.kinds is None else self.kinds.pop(0)

    def prefill(self, prompts, max_new_tokens, reads=(), chunk=None):
        self.prefills.append((Prompt.stack(prompts).input_ids.shape, list(max_new_tokens), chunk))
        left = sum(prompt.input_ids.numel() for prompt in prompts)
        for step in super().prefill(prompts, max_new_tokens, reads, chunk):
            self.prefilled += min(left, chunk or left)
            left -= min(left, chunk or left)
            yield step


def scheduled(engine, prompts, counts=4, nodes=None, **more):
    """Sequences of prompts, with their numbers of new tokens, or stoppers, and of draft tokens per step."""
    counts = counts if isinstance(counts, Sequence) else [counts] * len(prompts)
    stoppers = [one if isinstance(one, Stopper) else Stopper(one) for one in counts]
    return [
        engine.add(Prompt(torch.tensor([prompt]), **more), Sampler(), stopper, asked)[0]
        for prompt, stopper, asked in zip(prompts, stoppers, nodes or [None] * len(prompts), strict=True)
    ]


def stacking(slots=8, chunk=8, drafter=None, policy=StepPlan(0)):  # noqa: B008
    target = Stacking(table_model(VOCAB))
    return target, SteppedEngine(target, drafter, policy, max_num_seqs=slots, chunk=chunk)


def finished(engine, rows, prompts, counts=4):
    engine.wait(lambda: all(row.done for row in rows))
    counts = counts if isinstance(counts, Sequence) else [counts] * len(prompts)
    table = engine.target.table
    assert [(row.error, row.token_ids) for row in rows] == [
        (None, said_plainly(table, *asked)) for asked in zip(prompts, counts, strict=True)
    ]


def order_of_starts(engine, rows):
    """The numbers of the rows in the order of their first tokens, with at most three rows at a time."""
    started = []
    while not all(row.done for row in rows):
        engine.core.step()
        assert len(engine.core.running) <= 3
        started += [n for n, row in enumerate(rows) if row.token_ids and n not in started]
    return started


def test_an_idle_engine_stacks_four_chunks_with_padding_and_no_more():
    target, engine = stacking(slots=8, chunk=8)
    prompts = [[1, 2], [3] * 8, [4, 5, 6], [6] * 8, [2, 4], [1, 1, 1]]
    finished(engine, scheduled(engine, prompts), prompts)
    # 4 prompts of 8 tokens, padding included, are 4 chunks; the rest follows, as nothing decodes yet.
    assert [tuple(shape) for shape, *_ in target.prefills] == [(4, 8), (2, 3)]
    assert [chunk for *_, chunk in target.prefills] == [None, None]


def test_no_more_rows_than_slots_in_the_order_of_asking():
    target, engine = stacking(slots=3)
    prompts = [[n, 6 - n] for n in range(7)]
    rows = scheduled(engine, prompts)
    assert order_of_starts(engine, rows) == list(range(7))
    assert [shape[0] for shape, *_ in target.prefills] == [3, 3, 1]
    finished(engine, rows, prompts)


@pytest.mark.parametrize("by", ["nodes", "kind"])
def test_sequences_that_differ_wait_for_each_other(by):
    target, engine = stacking()
    values = [1, 1, 2, 1, 2]
    prompts = [[n, 6 - n] for n in range(5)]
    if by == "kind":
        target.kinds = list(values)
    rows, batches = scheduled(engine, prompts, nodes=values if by == "nodes" else None), []
    while not all(row.done for row in rows):
        engine.core.step()
        batches.append({values[rows.index(row)] for row in engine.core.running})
    assert all(len(batch) <= 1 for batch in batches)
    assert [shape[0] for shape, *_ in target.prefills] == [2, 1, 1, 1]  # nobody is overtaken
    finished(engine, rows, prompts)


@pytest.mark.parametrize("drawn", [False, True])
def test_plain_sequences_decode_beside_drafted_ones(drawn):
    """In one batch, also where they join later; policies learn from all steps with drafted sequences, and no others."""
    seen, table = [], table_model(VOCAB)

    class Watching(DraftPolicy):
        def observe(self, plan, tree, paths, times):
            seen.append(tree.nodes)

    prompts, asked, counts = [[1, 2], [3, 3], [4, 5], [6, 6]], [None, 0, None, 0], [6, 14, 9, 20]
    truth = [said_plainly(table, one, 40) for one in prompts]
    probs = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(9)).softmax(-1)
    drafter = Drawn(probs, 3) if drawn else Oracle(truth, vocab=VOCAB, spoil=0.2)
    target, engine = stacking(chunk=512, drafter=drafter, policy=Watching(StepPlan(5)))
    rows = scheduled(engine, prompts[:2], counts[:2], asked[:2])
    engine.core.step()
    engine.core.step()
    drafting = 1
    rows += scheduled(engine, prompts[2:], counts[2:], asked[2:])
    while not all(row.done for row in rows):
        drafting += any(row.drafts for row in engine.core.running)
        engine.core.step()
    finished(engine, rows, prompts, counts)
    assert [shape[0] for shape, *_ in target.prefills] == [2, 2]
    drafted = [row.stats.num_draft_tokens for row in rows]
    assert [bool(one) for one in drafted] == [True, False, True, False]
    assert [row.stats.num_spec_tokens > 0 for row in rows] == [True, False, True, False]
    assert [row.stats.num_spec_steps for row in rows][1::2] == [13, 19]
    alone = [nodes for batch, nodes in target.passes if batch <= 2][-6:]
    assert alone == [1] * 6  # nothing is drafted for plain sequences alone
    assert max(nodes for _, nodes in target.passes) > 1
    assert max(seen) > 1
    assert drafting <= len(seen) < len(target.passes)


class FirstAlone(Silent):
    """Drafts for the first row, and nothing for others."""

    def propose(self, token, plan):
        none = len(token) - 1
        return build_tree(token, [([3, 4, 5], [0, 0, 2]), *[([], [])] * none], [[0.5, 0.4, 0.3], *[[]] * none])


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("adaptive", [False, True])
def test_drafts_for_plain_sequences_alone_are_dropped(adaptive, chain):
    plan, prompts = StepPlan(3, 3, chain, adaptive=adaptive), [[1, 2], [3, 4], [5, 6]]
    _, engine = stacking(drafter=FirstAlone(), policy=AdaptivePolicy(plans=[plan]) if adaptive else DraftPolicy(plan))
    finished(engine, scheduled(engine, prompts, (12, 9, 15), [0, None, None]), prompts, (12, 9, 15))


def test_prompts_that_cannot_be_stacked_are_prefilled_in_their_order():
    target, engine = stacking()
    rows = [scheduled(engine, [[n, 6 - n]], inputs={"pixels": torch.zeros(1, n)})[0] for n in range(4)]
    engine.remove([rows[2]])
    assert order_of_starts(engine, rows) == [0, 1, 3]
    assert [shape[0] for shape, *_ in target.prefills] == [1, 1, 1]


def test_policies_are_given_the_batch_and_the_share_of_new_rows():
    shares, sizes = [], []

    class Told(DraftPolicy):
        def begin(self, share):
            shares.append(share)

        def plan(self, rows, remaining):
            sizes.append(rows)
            return StepPlan(0)

    _, engine = stacking(drafter=Ngram(), policy=Told())
    rows, prompts = scheduled(engine, [[1, 2], [3, 4]], 6), [[1, 2], [3, 4], [5, 6]]
    engine.wait(lambda: len(rows[0].token_ids) == 3)
    finished(engine, [*rows, *scheduled(engine, prompts[2:], 6)], prompts, 6)
    assert shares == [1.0, pytest.approx(1 / 3)]
    assert sizes == [2, 2, 3, 3, 3, 1, 1]


def test_a_prompt_that_fails_does_not_end_those_stacked_with_it():
    class Refuses(TableTarget):
        def prefill(self, prompts, max_new_tokens, reads=(), chunk=None):
            if any(bool((prompt.input_ids == 6).any()) for prompt in prompts):
                raise ValueError("six")
            yield from super().prefill(prompts, max_new_tokens, reads, chunk)

    engine = SteppedEngine(Refuses(table_model(VOCAB)), None, StepPlan(0))
    prompts = [[1, 2], [6, 2], [3, 4]]
    rows = scheduled(engine, prompts)
    finished(engine, rows[::2], prompts[::2])
    engine.wait(lambda: rows[1].done)
    assert str(rows[1].error) == "six"


def test_each_answer_has_its_own_room():
    target, engine = stacking()
    prompts, limits = [[1, 2, 3], [4, 5]], [Stopper(9), Stopper(30, context_limit=14)]
    scheduled(engine, prompts, limits)
    engine.core.step()
    assert target.prefills[0][1] == [9, 12]
    remaining = []

    class Spy(Ngram):
        def propose(self, token, plan):
            remaining.append(plan.depth)
            return super().propose(token, plan)

    _, engine = stacking(drafter=Spy(), policy=StepPlan(6, 99))
    rows = scheduled(engine, prompts, limits)
    engine.core.step()
    while engine.core.running:
        left = max(row.remaining for row in rows if not row.done) - 1
        engine.core.step()
        assert left == 0 or remaining[-1] == left  # a short answer does not cut the drafts of a long answer


class Ahead(Fixed):
    """Proposes roots, before the tokens of a step are in the histories."""

    drafts_ahead = True

    def __init__(self):
        super().__init__()
        self.proposed, self.early = [], []

    def propose(self, token, plan):
        self.proposed.append(token.tolist())
        self.early.append(token.tolist() != [row[-1] for row in self.history])
        return TokenTree.root(token)


def test_drafts_that_come_ahead_are_those_of_the_rows_that_run():
    """Rows end while others wait, so that the next step has the same number of rows, but other rows."""
    prompts, counts, drafter, passes = [[1, 2], [5, 4], [3, 3], [2, 5]], (4, 9, 6, 5), Ahead(), []
    target, engine = stacking(2, drafter=drafter, policy=StepPlan(3, 2))
    forward = target.verify
    target.verify = lambda tree, *rest: (
        passes.append((tree.tokens[:, 0].tolist(), drafter.proposed[-1])) or forward(tree, *rest)
    )
    finished(engine, scheduled(engine, prompts, counts), prompts, counts)
    assert all(roots == proposed for roots, proposed in passes)
    assert len({len(roots) for roots, _ in passes}) == 2
    assert len(passes) < len(drafter.proposed) < 2 * len(passes)  # few again
    assert any(drafter.early)
