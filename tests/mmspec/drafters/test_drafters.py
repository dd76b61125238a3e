"""Drafters propose sensible trees; that the output stays the target's is for other tests."""

import copy
import json
import math
import os
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import mmspec
from mmspec import TokenTree, UserError, plugins
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, TargetOutput
from mmspec.core.tree import build_tree
from mmspec.core.verify import accept_path
from mmspec.drafters import recycle as recycled
from mmspec.drafters.checkpoint import _load_tensors, load_weights
from mmspec.drafters.growth import Reach, best_first, grow_tree
from mmspec.drafters.ngram import Ngram
from mmspec.drafters.recycle import Rankings, Recycle
from mmspec.drafters.registry import DEFAULT, drafters_for, make_drafter, registered_name
from mmspec.drafters.small import Small
from mmspec.ops import kernels
from mmspec.targets.transformers_target import TransformersTarget
from tests.draft_checks import check_drafts
from tests.targets import row_of
from tests.tiny import root_path, shared_model, valid_nodes
from tests.tiny.configs import TINY_SIZES
from tests.tiny.models import text_inputs

OPTIONS = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
TABLE = {"contexts": [[-1, 4], [100, 3]], "tokens": [[5, 0], [100, 7]], "probs": [[0.5, 0.0], [1.0, 0.25]]}
VOCAB = 60
PATHS = ([0], [0, 1, 3], [0, 2], [0, 1, 3, 5], [0, 1])


def target_of(model):
    """Target of a model, or of a tiny model by its name."""
    model = shared_model(model) if isinstance(model, str) else model
    return plugins.target_class(model.config)(model)


def assert_equal(model, drafter, inputs, **options):
    """The drafter changes no token of the model's ``generate``; returns each answer's statistics."""
    out = mmspec.generate(model, drafter=drafter, return_dict_in_generate=True, **inputs, **OPTIONS, **options)
    assert torch.equal(out.sequences, model.generate(**inputs, **OPTIONS))
    return out.stats


def check_paths(model, inputs, drafter, gain, **options):
    """``check_drafts`` with a ``gain`` of a row's tokens and a node's path."""
    rows = [row_of(inputs, number)["input_ids"][0].tolist() for number in range(len(inputs["input_ids"]))]

    def gains(target, row, said, paths):
        return [gain(rows[row] + said, path) for path in paths]

    check_drafts(model, inputs, drafter, gains, **options)


def begun(drafter, rows, vocab=30):
    prompt = Prompt(torch.tensor(rows))
    logits = torch.randn(len(rows), 1, vocab, generator=torch.Generator().manual_seed(0))
    drafter.begin(prompt, TargetOutput(logits, {}), rows)
    return logits


def paths(tree, row=0):
    """Token paths of all nodes below the root."""
    return [[int(tree.tokens[row, i]) for i in root_path(tree, row, n)[1:]] for n in valid_nodes(tree, row)[1:]]


def assert_well_formed(tree):
    TokenTree(tree.tokens, tree.parents, tree.valid, tree.draft_probs)  # validates
    assert tree.max_depth == int(TokenTree(tree.tokens, tree.parents, check=False).depth.max())
    assert tree.drafted == [len(valid_nodes(tree, b)) - 1 for b in range(tree.batch)]


def test_ragged_rows_are_padded():
    tree = build_tree(torch.tensor([1, 2, 3]), [([5, 6, 7], [0, 1, 0]), ([], []), ([8], [0])])
    assert_well_formed(tree)
    assert tree.tokens.tolist() == [[1, 5, 6, 7], [2, 0, 0, 0], [3, 8, 0, 0]]
    assert tree.valid.tolist() == [[True] * 4, [True, False, False, False], [True, True, False, False]]
    assert (tree.max_depth, tree.drafted) == (2, [3, 0, 1])


@pytest.mark.parametrize("nodes", [0, 1, 5, 60])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 2, None])
def test_best_first_lists_the_likeliest_nodes(nodes, depth, width):
    """Against all paths of a small language, sorted."""
    p = torch.rand(3, 3, generator=torch.Generator().manual_seed(nodes)).double()
    p /= p.sum(-1, keepdim=True) * 1.2
    floor = 0.01
    every = []

    def extend(last, chance, path):
        if len(path) == depth:
            return
        for token in p[last].argsort(descending=True).tolist()[:width]:
            below = chance * float(p[last, token])
            every.append((below, (*path, token)))
            extend(token, below, (*path, token))

    extend(0, 1.0, ())
    expected = sorted((c for c, _ in every if c >= floor), reverse=True)[:nodes]
    tokens, parents, gains = best_first(
        0, lambda last: [(t, float(p[last, t]), t) for t in range(3)], depth, nodes, floor, width
    )
    assert gains == pytest.approx(expected)
    tree = build_tree(torch.tensor([0]), [(tokens, parents)], [gains])
    assert_well_formed(tree)
    chances = {path: c for c, path in every}
    assert [chances[tuple(path)] for path in paths(tree)] == pytest.approx(gains)


@pytest.mark.parametrize("nodes", [1, 4, 11, 60])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("top_k", [1, 3])
def test_grown_trees_hold_the_likeliest_of_what_was_seen(nodes, depth, top_k):
    """A bigram drafter, two rows; a wide beam sees everything, so that the result is the best overall."""
    log_p = torch.randn(6, 6, generator=torch.Generator().manual_seed(depth)).log_softmax(-1)
    plan = StepPlan(nodes, depth)
    token = torch.tensor([0, 3])
    scores, ids = log_p.topk(top_k, dim=-1)
    tree = grow_tree(token, (ids[token], scores[token]), lambda beam, origin: (ids[beam], scores[beam]), plan, top_k)
    assert_well_formed(tree)
    assert tree.max_depth <= depth
    for b in range(2):
        found = []
        for path in paths(tree, b):
            chance, last = 0.0, int(token[b])
            for token_id in path:
                chance, last = chance + float(log_p[last, token_id]), token_id
            found.append(chance)
        assert found == sorted(found, reverse=True)
        assert torch.tensor(found).exp().tolist() == pytest.approx(tree.path_probs[b], rel=1e-4)
    expected = min(nodes, sum(top_k if level == 0 else top_k * top_k for level in range(depth)))
    assert tree.nodes == 1 + expected


@pytest.mark.parametrize(("nodes", "levels"), [(1, 1), (2, 2), (4, 3), (9, 4), (40, 6)])
def test_levels_and_beams_that_cannot_be_kept_are_left_out(nodes, levels):
    """The tree is what the same beams of a tree without a limit hold; the more probable token has a chance of 0.6."""
    log_p = torch.tensor([[0.6, 0.4]]).log()
    widths = []

    def extend(beam, origin):
        widths.append(beam.shape[1])
        return torch.arange(2).expand(1, beam.shape[1], 2), log_p.expand(1, beam.shape[1], 2)

    grow = lambda plan: grow_tree(torch.tensor([0]), (torch.arange(2)[None], log_p), extend, plan, 8)  # noqa: E731
    whole = grow(StepPlan(1000, 6)).first(1 + nodes)
    widths.clear()
    tree = grow(StepPlan(nodes, 6))
    assert torch.equal(tree.tokens, whole.tokens)
    assert torch.equal(tree.parents, whole.parents)
    assert tree.levels == 1 + len(widths) == levels
    assert max(widths, default=0) <= nodes


def test_an_empty_grant_is_plain_decoding():
    plan = StepPlan(0, depth=1)
    tree = grow_tree(torch.tensor([1]), (torch.tensor([[2]]), torch.tensor([[-0.1]])), lambda *_: None, plan, 1)
    assert tree.nodes == 1


@pytest.mark.parametrize("batch", [2, 5])
def test_a_level_is_judged_by_what_it_adds_to_each_row(batch):
    chance = 1 / torch.arange(1.0, batch + 1)[:, None]
    token = torch.zeros(batch, dtype=torch.long)
    first = token[:, None], chance.log()
    for level in (1, 2, 3):
        for factor in (0.999, 1.001):
            plan = StepPlan(64, 5, least_gain=float((chance**level).mean()) * factor)
            tree = grow_tree(token, first, lambda beam, _: (beam[:, :, None], chance.log()[:, None]), plan, 1)
            assert tree.levels == level + (factor < 1)


@pytest.mark.parametrize("stride", [1, 3])
def test_fed_nodes_reach_their_ancestors_and_no_one_else(stride):
    g = torch.Generator().manual_seed(stride)
    reach, above, entries = Reach(stride), [[set()], [set()]], 0
    for width in (3, 2, 4):
        origin = torch.randint(len(above[0]), (2, width), generator=g)
        got = reach(origin)
        assert got.shape == (2, width * stride, entries + width * stride)
        here = [[], []]
        for row in range(2):
            for node in range(width):
                seen = set(above[row][int(origin[row, node])])
                for place in range(stride):
                    seen.add(entries + node * stride + place)
                    assert set(got[row, node * stride + place].nonzero().flatten().tolist()) == seen
                here[row].append(seen)
        above, entries = here, entries + width * stride


def test_ngram_continues_the_longest_known_suffix():
    drafter = Ngram()
    begun(drafter, [[1, 2, 3, 4, 9, 8, 2, 3, 7, 1, 2, 3]])
    tree = drafter.propose(torch.tensor([3]), StepPlan(8, 3))
    assert_well_formed(tree)
    assert paths(tree)[0] == [4]  # after 1 2 3, which is longer than 2 3
    assert [4, 9, 8] in paths(tree)
    assert [7] in paths(tree)
    assert tree.max_depth <= 3
    chained = Ngram(width=1)
    begun(chained, [[1, 2, 3, 4, 9, 8, 2, 3, 7, 1, 2, 3]])
    assert chained.propose(torch.tensor([3]), StepPlan(8, 3)).tokens.tolist() == [[3, 4, 9, 8]]


def test_ngram_goes_by_the_latest_occurrences():
    old, new = [1, 2, 3] * 20, [1, 2, 4] * 12
    drafter = Ngram(longest=2)
    begun(drafter, [[*old, *new, 1, 2]])
    assert {path[0] for path in paths(drafter.propose(torch.tensor([2]), StepPlan(30, 2)))} == {4}
    drafter = Ngram(longest=2, memory=1000)
    begun(drafter, [old])
    drafter.select([])
    begun(drafter, [[*new, 1, 2]])
    assert {path[0] for path in paths(drafter.propose(torch.tensor([2]), StepPlan(30, 2)))} == {4}


def test_ngram_follows_the_history_that_the_engine_keeps():
    drafter, history = Ngram(), [[5, 6, 7]]
    begun(drafter, history)
    assert drafter.propose(torch.tensor([7]), StepPlan(4)).nodes == 1
    history[0] += [8, 5, 6]
    assert paths(drafter.propose(torch.tensor([6]), StepPlan(4)))[0] == [7]


def test_ngram_remembers_as_much_as_it_is_told_to():
    """At least; and at most twice as many tokens."""
    for memory, kept in ((100, 4), (0, 0), (2, 4), (1, 1)):
        drafter = Ngram(memory=memory)
        begun(drafter, [[5, 6, 7, 8]])
        drafter.select([])
        begun(drafter, [[1, 5, 6]])
        assert (drafter.propose(torch.tensor([6]), StepPlan(4)).nodes > 1) == (kept == 4)
        assert drafter._past.text == [5, 6, 7, 8][4 - kept :]


def test_recycle_learns_from_every_node():
    drafter = Recycle(top_k=1, pairs=False)
    paired = Recycle(top_k=1)
    tree = build_tree(torch.tensor([2]), [([4, 6, 3], [0, 0, 1])])
    logits = torch.full((1, 4, 9), -20.0)
    for node, successor in enumerate((5, 7, 8, 1)):
        logits[0, node, successor] = 20.0
    for one in (drafter, paired):
        begun(one, [[1, 2]], vocab=9)
        one.rows = [(1, 2)]
        one.observe(tree, accept_path(tree, torch.tensor([[5, 7, 8, 1]])), TargetOutput(logits, {}))
    found = [[*paired._table[context]] for context in ((2, 4), (2, 6), (4, 3))]
    assert found == [[7], [8], [1]]
    for token, successor in ((2, 5), (4, 7), (6, 8)):
        drafter.rows = [(0, token)]
        assert paths(drafter.propose(torch.tensor([token]), StepPlan(1, 1))) == [[successor]]
    drafter.reset()
    assert drafter.propose(torch.tensor([2]), StepPlan(4)).nodes == 1


@pytest.mark.parametrize(
    ("cost", "drafts", "others", "least", "most"),
    [
        (0.1, 0, 0, 30, 75),
        (0.01, 0, 0, 200, 200),
        (0.1, 200, 0, 200, 200),
        (0.1, 100, 0, 120, 150),
        (0.1, 0, 200, 400, 400),
    ],
)
def test_plain_steps_spend_little_time_on_learning(cost, drafts, others, least, most, monkeypatch):
    """Learning takes a part of a step. Of 200 steps over new tokens, the first take the initial credit of two steps.
    Of so many steps, it drafts the first, or another drafter does, a token that the target never says."""
    now, drafter = {"time": 10.0}, Recycle(top_k=1, pairs=False)
    begun(drafter, [[0, 1]], vocab=300)
    monkeypatch.setattr(recycled, "clock", lambda: now["time"])
    learn = drafter._learn

    def timed(*given):
        now["time"] += cost
        learn(*given)

    monkeypatch.setattr(drafter, "_learn", timed)
    for token in range(1, 201):
        learned = drafter.entries
        if token <= drafts:
            drafter.propose(torch.tensor([token]), StepPlan(1))
        tree = build_tree(torch.tensor([token]), [([500 + token], [0]) if token <= others else ([], [])])
        logits = torch.zeros(1, tree.nodes, 300).index_fill_(2, torch.tensor(token + 1), 20.0)
        now["time"] += 1.0 - cost * (drafter.entries > learned)
        drafter.observe(tree, accept_path(tree, torch.full_like(tree.tokens, token + 1)), TargetOutput(logits, {}))
        assert drafter.rows == [(token, token + 1)]
    assert least <= drafter.entries <= most


def test_recycle_averages_what_the_target_ranked():
    drafter = Recycle(top_k=4)
    rankings = [torch.tensor([0.6, 0.3, 0.1, 0.0]), torch.tensor([0.0, 0.5, 0.1, 0.4])]
    for ranking in rankings:
        prompt = Prompt(torch.tensor([[1, 2]]))
        drafter.begin(prompt, TargetOutput(ranking.log().view(1, 1, 4), {}), [[1, 2, 3]])
    expected = dict(enumerate((0.7 * rankings[0] + 0.3 * rankings[1]).tolist()))
    for context in ((1, 2), (-1, 2)):
        assert {token: p for token, p, _ in drafter._successors(context)} == pytest.approx(expected)
    assert {token: p for token, p, _ in drafter._successors((9, 2))} == pytest.approx(expected)  # falls back


def test_recycle_forgets_the_oldest_contexts(monkeypatch):
    monkeypatch.setattr(recycled, "_ENTRIES", 3)
    drafter = Recycle(top_k=1, pairs=False)
    drafter._learn([(0, token) for token in range(5)], 20.0 * torch.eye(9)[:5])
    assert [token for _, token in drafter._table] == [2, 3, 4]


def test_copies_of_a_table_learn_apart():
    drafter, target = Recycle(top_k=4), target_of("llama")
    drafter.attach(target)
    begun(drafter, [[1, 2, 3]], vocab=4)
    before = copy.deepcopy(drafter._table)
    first, second = (drafter.fork(target) for _ in range(2))
    for one, row in ((first, [1, 2, 3]), (second, [2, 1, 0])):
        one.begin(Prompt(torch.tensor([row])), TargetOutput(torch.tensor([[[9.0, 0, 0, 0]]]), {}), [[*row, 0]])
    assert drafter._table == before
    assert first._table[2, 3] != before[2, 3]
    assert second._table == {**before, (-1, 0): second._table[1, 0], (1, 0): second._table[1, 0]}
    assert second._table[2, 3] is drafter._table[2, 3]  # rankings are many: those that nobody changed are shared
    drafter._learn([(2, 3)], torch.tensor([[0.0, 9.0, 0, 0]]))
    assert second._table[2, 3] == before[2, 3] != drafter._table[2, 3]


def test_recycle_checkpoints(tmp_path):
    model = shared_model("llama")
    target = TransformersTarget(model)
    drafter = Recycle(top_k=3)
    assert_equal(model, drafter, text_inputs(1, 9), nodes=6)
    drafter.save(tmp_path, target, smallest=0.0)
    again = make_drafter(str(tmp_path))
    again.attach(target)
    assert again.entries == drafter.entries > 10
    for context, ranking in drafter._table.items():
        best = sorted(ranking.values(), reverse=True)[:3]
        assert sorted(again._table[context].values(), reverse=True) == pytest.approx(best, abs=1e-3)
    home = tmp_path / "model"
    (tmp_path / "model").mkdir()
    empty = make_drafter("auto", str(home))  # the default of all models
    assert registered_name(empty) == DEFAULT == "recycle+ngram"
    assert empty.drafters[0].entries == 0
    drafter.save(home / "drafter", target)
    assert make_drafter("auto", str(home)).entries == drafter.entries
    assert drafters_for(home)[:3] == ["recycle", "ngram", "suffix"]
    assert drafters_for(tmp_path / "other")[:1] == ["auto"]
    (tmp_path / "other").mkdir()
    assert drafters_for(tmp_path / "other")[:3] == [DEFAULT, "ngram", "recycle"]


@pytest.mark.parametrize(("vocab", "dtype"), [(65_536, torch.uint16), (65_537, torch.int32)])
def test_a_table_is_stored_in_the_smallest_type_of_its_tokens(tmp_path, vocab, dtype):
    drafter, target = Recycle(top_k=2), target_of("llama")
    logits = torch.zeros(1, vocab)
    logits[0, vocab - 1] = 20.0
    drafter.fit([([vocab - 1], logits)])
    drafter.save(tmp_path, target)
    assert load_file(tmp_path / "model.safetensors")["tokens"].dtype == dtype
    config = json.loads((tmp_path / "config.json").read_text())
    config["verifier"]["vocab_size"] = vocab
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert next(iter(Recycle.from_checkpoint(tmp_path)._table.values())) == {vocab - 1: pytest.approx(1.0)}


def test_damaged_drafter_checkpoints_are_named(tmp_path):
    (tmp_path / "config.json").write_text('{"mmspec_drafter": "recycle", "top_k": 2}')
    with pytest.raises(UserError, match="expected a verifier, received none"):
        make_drafter(str(tmp_path))
    Recycle(top_k=3, pairs=False).save(tmp_path, target_of("llama"))
    found = Recycle.from_checkpoint(tmp_path)
    assert (found.top_k, found.pairs) == (3, False)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"expected a drafter.s config\.json and model\.safetensors"):
        make_drafter(str(tmp_path))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"mmspec_drafter, received an adapter of the target, as UNO and LoRA have$"):
        make_drafter(str(adapter))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        *(
            ({"contexts": [[-1, 4], pair]}, "be tokens below 101: got ")
            for pair in ([-2, 3], [101, 3], [5, -1], [5, 101])
        ),
        *(({"tokens": [[5, 0], [token, 7]]}, "be tokens below 101: got ") for token in (-1, 101)),
        *(({"probs": [[0.5, 0.0], [p, 0.25]]}, r"probs must be in \[0, 1\]$") for p in (-0.1, 1.1, math.nan)),
        *(
            ({name: [[5.0, 6.0]] * 2}, "must be integers, probs floating point: got ")
            for name in ("contexts", "tokens")
        ),
        ({"probs": [[0, 1]] * 2}, "must be integers, probs floating point: got torch.int64, torch.int64, torch.int64$"),
        *(({name: [[0, 1, 2]] * 2}, "expected the tensors .*, received .*3") for name in TABLE),
        *(({name: [[0, 1]]}, "expected the tensors .*, received .*1, 2") for name in (*TABLE, "more")),
    ],
    ids=str,
)
def test_a_table_has_tokens_and_probabilities_of_its_shape(changes, message, tmp_path):
    Recycle(top_k=2).save(tmp_path, target_of("llama"))
    tensors = {name: torch.tensor(value) for name, value in (TABLE | changes).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message) if message else nullcontext():
        make_drafter(str(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_do_not_change_with_their_file(tmp_path, name):
    """Mapped to memory, weights of a file that is cut end the process."""
    tensors = {"a": torch.arange(100_000)}
    write = save_file if name.endswith("safetensors") else torch.save
    write(tensors, tmp_path / name)
    loaded = [load_weights(tmp_path / name)]
    loaded += [_load_tensors(tmp_path)] if name == "model.safetensors" else []
    os.truncate(tmp_path / name, 1000)
    assert all(int(each["a"].sum()) == int(tensors["a"].sum()) for each in loaded)


def test_recycle_forgets_another_vocabulary():
    drafter = Recycle()
    begun(drafter, [[1, 2]], vocab=30)
    begun(drafter, [[1, 2]], vocab=4)
    drafter.rows = [(1, 2)]
    assert int(drafter.propose(torch.tensor([2]), StepPlan(50)).tokens.max()) < 4


def test_a_drafter_of_fewer_tokens_serves_and_of_more_is_refused():
    torch.manual_seed(0)
    fewer, more = (LlamaForCausalLM(LlamaConfig(**{**TINY_SIZES, "vocab_size": size})).eval() for size in (50, 120))
    model, inputs = shared_model("llama"), text_inputs(3, 9)
    assert int(model.generate(**inputs, **OPTIONS).max()) >= 50  # the target says what the drafter cannot read
    assert Small(fewer)._readable(torch.tensor([0, 48, 49, 50, 100])).tolist() == [0, 48, 49, 49, 49]
    assert_equal(model, Small(fewer), inputs, nodes=8)
    with pytest.raises(UserError, match="have tokenizers in their folders: the drafter has 120 tokens, the target 101"):
        assert_equal(model, Small(more), inputs, nodes=8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ngram(longest=2, shortest=3), "1 <= shortest <= longest: got 3 and 2"),
        (lambda: Ngram(shortest=0), "1 <= shortest <= longest: got 0 and 4"),
        (lambda: Recycle(top_k=0), "top_k must be >= 1: got 0"),
        (lambda: make_drafter("small"), "the small drafter needs an argument: expected small:MODEL"),
        (lambda: make_drafter("small:/nowhere/at/all"), "cannot load drafter '/nowhere/at/all'"),
        (lambda: make_drafter("ngram:x"), "drafter 'ngram' does not take the argument 'x'"),
        (lambda: make_drafter("recycle:8"), "8: expected the folder of a drafter checkpoint, there is none"),
        (lambda: make_drafter("eagle:/nowhere"), "/nowhere: expected the folder of a drafter checkpoint"),
        (lambda: make_drafter("/nowhere/at/all"), "/nowhere/at/all: expected the folder of a drafter"),
        (lambda: make_drafter("tests"), "tests: expected a drafter's config.json with mmspec_drafter, received none"),
        (lambda: make_drafter("nobody"), "unknown drafter: expected one of .*ngram.*, got 'nobody'"),
        (lambda: make_drafter(object()), "drafter must be a name, a folder, None or .*mmspec.Drafter: got object"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(UserError, match=message):
        make()
    assert make_drafter(None) is make_drafter("none") is None


def pair(monkeypatch, **settings):
    """A drafter that looks up on the host, and one on the device; each takes its own turn."""

    def turns():
        for fixed, drafter in zip((False, True), drafters, strict=True):
            monkeypatch.setattr(kernels, "static_shapes", lambda device, fixed=fixed: fixed)
            yield drafter

    drafters = Recycle(**settings), Recycle(**settings)
    return turns


def same_rankings(host, device):
    expected = {
        context: {token: p for token, p in ranking.items() if p > 0} for context, ranking in host._rankings().items()
    }
    found = device._rankings()
    assert found.keys() == expected.keys()
    for context, ranking in expected.items():
        assert found[context] == pytest.approx(ranking, rel=1e-4)


def steps(batch, g):
    """A prompt and trees in which no token stands twice, so that a step has no context twice."""
    ids = torch.randint(VOCAB, (batch, 3), generator=g)
    yield ids, torch.randn(batch, 1, VOCAB, generator=g) * 2
    roots, parents = torch.arange(40, 40 + batch), torch.tensor([[-1, 0, 0, 1, 1, 3]]).expand(batch, -1)
    for number in range(12):
        tokens = torch.cat([roots[:, None], torch.randperm(40, generator=g)[: 5 * batch].view(batch, 5)], dim=1)
        said = roots[:, None].expand(-1, 6).clone()
        for above, below in pairwise(PATHS[number % len(PATHS)]):
            said[:, above] = tokens[:, below]
        yield TokenTree(tokens, parents, check=False), said, torch.randn(batch, 6, VOCAB, generator=g) * 2


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("pairs", [True, False])
def test_it_learns_what_the_table_of_the_host_learns(batch, pairs, monkeypatch):
    turns = pair(monkeypatch, top_k=4, pairs=pairs)
    # Far more room than four successors take, so that none has to go.
    monkeypatch.setattr(recycled, "Rankings", lambda slots, width, device: Rankings(slots, VOCAB, device))
    monkeypatch.setattr(Recycle, "_average", unlimited)
    (ids, logits), *trees = steps(batch, torch.Generator().manual_seed(batch))
    roots = torch.arange(40, 40 + batch)
    history = [[*row, int(root)] for row, root in zip(ids.tolist(), roots, strict=True)]
    for drafter in turns():
        drafter.begin(Prompt(ids), TargetOutput(logits, {}), history)
    for number, (tree, said, logits) in enumerate(trees):
        if number == 8:
            kept = list(range(batch))[::-2]
            for drafter in turns():
                drafter.select(kept)
        if number >= 8:
            tree, said, logits = TokenTree(tree.tokens[kept], tree.parents[kept], check=False), said[kept], logits[kept]
        verdict = accept_path(tree, said)
        for drafter in turns():
            if drafter._on_device is not None:
                drafter.propose(tree.tokens[:, 0], StepPlan(5, 3))  # updates with the step before
            drafter.observe(tree, verdict, TargetOutput(logits, {}))
    host, device = turns()
    device.propose(tree.tokens[:, 0], StepPlan(5, 3))
    same_rankings(host, device)
    last = device._on_device.last
    assert last.data[: last.rows].tolist() == [list(last) for last in host.rows]


def unlimited(self, context, latest):
    """As ``Recycle._average``, without forgetting."""
    ranking = self._table.setdefault(context, {})
    known = bool(ranking)
    for token in ranking:
        ranking[token] *= 0.7
    for token, p in latest:
        ranking[token] = ranking.get(token, 0.0) + (0.3 if known else 1.0) * p


@pytest.mark.parametrize("width", [None, 1, 2])
def test_it_drafts_the_likeliest_paths(width, monkeypatch):
    """Those of the host, which goes on with any node, not only with those of a beam; so the beam is wide."""
    turns = pair(monkeypatch, top_k=9, width=width)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (2, 3), generator=g)
    logits = torch.randn(2, 1, VOCAB, generator=g) * 4
    history = [[*row, 5] for row in ids.tolist()]
    trees = []
    for drafter in turns():
        drafter._table = {
            (-1, t): {(3 * t + k * k) % VOCAB: 0.5**k * (1 - t / 97) for k in range(1, 4)} for t in range(VOCAB)
        }
        drafter._table[int(ids[0, -1]), 5] = {11: 0.7, 12: 0.2}
        drafter._vocab = VOCAB
        drafter.begin(Prompt(ids), TargetOutput(logits, {}), history)
        trees.append(drafter.propose(torch.tensor([5, 5]), StepPlan(9, 4)))
    for b in range(2):
        paths = [
            {tuple(int(tree.tokens[b, i]) for i in root_path(tree, b, node)) for node in range(tree.nodes)}
            for tree in trees
        ]
        assert paths[0] == paths[1]


def test_of_contexts_that_share_a_slot_the_later_one_stays(monkeypatch):
    monkeypatch.setattr(recycled, "_SLOTS", 1)
    turns = pair(monkeypatch)
    _, drafter = turns()
    for token in (3, 4):
        logits = torch.full((1, 1, VOCAB), -20.0)
        logits[..., token + 10] = 20.0
        drafter.begin(Prompt(torch.tensor([[1, token]])), TargetOutput(logits, {}), [[1, token, 9]])
        drafter.select([])
    found = drafter._rankings()
    assert found.keys() == {(-1, 3), (-1, 4), (1, 4)}
    assert found[1, 4] == pytest.approx({14: 1.0})


def test_a_table_comes_from_the_host_and_goes_back(monkeypatch, tmp_path):
    table = {(-1, 3): {5: 0.5, 6: 0.25}, (2, 3): {7: 0.75}, (2, 4): {9: 0.125}}
    turns = pair(monkeypatch, top_k=2)
    logits = torch.zeros(1, 1, VOCAB)  # nothing is likely: nothing is learnt but the context
    for drafter in turns():
        drafter._table = {context: dict(ranking) for context, ranking in table.items()}
        drafter._vocab = VOCAB
        drafter.begin(Prompt(torch.tensor([[8, 9]])), TargetOutput(logits, {}), [[8, 9, 1]])
        found = drafter._rankings()
        assert {context: found[context] for context in table} == table
    device = drafter
    assert device._on_device is not None
    device.select([])
    monkeypatch.setattr(kernels, "static_shapes", lambda device: False)
    device.begin(Prompt(torch.tensor([[8, 9]])), TargetOutput(logits, {}), [[8, 9, 1]])
    assert device._on_device is None
    assert {context: device._table[context] for context in table} == table
    for drafter in turns():
        drafter.reset()
        assert drafter.entries == 0


def test_steps_without_a_request_for_drafts_teach_new_tokens_only():
    drafter, logits = Recycle(top_k=2), torch.randn(5, 1, 1, VOCAB, generator=torch.Generator().manual_seed(0))

    def step(number, token, after):
        tree = TokenTree.root(torch.tensor([token]))
        drafter.observe(tree, accept_path(tree, torch.tensor([[after]])), TargetOutput(logits[number], {}))
        return {context: dict(ranking) for context, ranking in drafter._rankings().items()}

    drafter.begin(Prompt(torch.tensor([[3, 4]])), TargetOutput(logits[0], {}), [[3, 4, 5]])
    first = step(1, 5, 4)
    assert (4, 5) in first
    assert step(2, 4, 4) == first  # 4 is known since the prompt
    drafter.propose(torch.tensor([4]), StepPlan())
    asked = step(3, 4, 5)
    assert asked != first
    assert step(4, 5, 6) == asked
