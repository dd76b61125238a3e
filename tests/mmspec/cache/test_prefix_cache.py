"""Prompts with a cached prefix compute only the rest, with equal answers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

import mmspec
from mmspec import SamplingParams
from mmspec.cache.prefix import Prefix
from mmspec.cache.prefix_cache import PrefixCache, PrefixReuse, media_key
from mmspec.checking.oracle import Oracle
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, State, Stop
from mmspec.drafters.ngram import Ngram
from mmspec.engine.engine import Engine
from mmspec.engine.stopping import Stopper
from mmspec.errors import UserError
from mmspec.ops import kernels
from mmspec.sampling import defaults
from tests.conversations import Reader, answered, followed, new_target, prompts_of
from tests.decoding import SteppedEngine, decode
from tests.targets import prompt_of
from tests.tiny import shared_model
from tests.tiny.configs import VIDEO, VOCAB
from tests.tiny.models import text_inputs, video_inputs, vision_inputs

BYTES = 1 << 24


def prefix(tokens, key="", cuts=True, logits=True, least=0, names=("last",)):
    stops = {len(tokens): Stop((), torch.zeros(1, 1, 4) if logits else None)}
    state = State(None, len(tokens), 64 * len(tokens), cuts, stops)
    return Prefix(list(tokens), key, state, {name: torch.zeros(1, len(tokens), 16) for name in names}, least=least)


def cache_of(*prefixes, limit=BYTES):
    cache = PrefixCache(limit)
    for one in prefixes:
        cache.add(one)
    return cache


def known(cache, tokens, key="", names=("last",)):
    """Tokens of the prefix found, and the number of tokens in common."""
    found = cache.find(list(tokens), key, names)
    return found and (found[0].tokens, found[1])


def test_the_prefix_with_most_tokens_in_common_is_found():
    several = (range(20), range(10, 40), [*range(15), 99, *range(30)])
    cache = cache_of(*map(prefix, several))
    assert known(cache, [*range(18), 7, 7]) == (list(range(20)), 18)
    assert known(cache, range(7)) is None  # too short to pay
    assert known(cache, range(25), "another image") is None
    assert known(cache, range(25), "", ["last", 2]) is None
    cache = cache_of(*(prefix(one, cuts=False) for one in several))
    assert known(cache, [*range(18), 7, 7]) is None
    assert known(cache, range(25)) == (list(range(20)), 20)
    # Where images end before the last common token.
    assert known(cache_of(prefix(range(20), least=18)), [*range(18), 7, 7]) == (list(range(20)), 18)
    assert known(cache_of(prefix(range(20), least=19)), [*range(18), 7, 7]) is None


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17])  # around the shortest prefix and twice that
def test_prefixes_count_from_8_tokens_on(length, cuts):
    """Of a longer prompt, of one that differs later, and of the same prompt with and without known logits."""
    cache, same = cache_of(prefix(range(length), cuts=cuts)), list(range(length))
    for more in ([50], [50, 51, 52], []):
        assert known(cache, [*same, *more]) == ((same, length) if length >= 8 else None)
    cache = cache_of(prefix(range(length), cuts=cuts, logits=False))
    assert known(cache, same) == ((same, length - 1) if length >= 9 and cuts else None)
    cache = cache_of(prefix(range(40), cuts=cuts))
    assert known(cache, [*same, 50, 51]) == ((list(range(40)), length) if length >= 8 and cuts else None)


def test_a_prefix_replaces_what_can_be_cut_from_it():
    for cuts, count in ((True, 2), (False, 3)):
        several = (range(10), range(30), range(30), range(40, 60))
        cache = cache_of(*(prefix(tokens, cuts=cuts) for tokens in several))
        assert len(cache) == count
        cache.add(prefix(range(50), "another", cuts))
        assert len(cache) == count + 1
    # Features that a longer prefix lacks are kept.
    cache = cache_of(prefix(range(30), names=("last", 2)), prefix(range(40)))
    assert known(cache, range(50), "", ["last", 2]) == (list(range(30)), 30)


def test_the_least_recently_used_prefixes_leave_first():
    size = prefix(range(20)).nbytes
    assert size == 20 * 64 + 4 * 4 + 20 * 16 * 4
    inputs = {"embeds": torch.zeros(1, 20, 3), "positions": torch.zeros(3, 1, 20, dtype=torch.long)}
    assert replace(prefix(range(20)), **inputs).nbytes == size + 20 * 3 * 4 + 3 * 20 * 8
    cache = cache_of(*(prefix(range(first, first + 20)) for first in (0, 100, 200)), limit=3 * size)
    assert cache.nbytes == 3 * size
    assert known(cache, range(20)) is not None
    cache.add(prefix(range(300, 320)))
    assert known(cache, range(100, 120)) is None
    assert known(cache, range(20)) is not None
    cache.add(prefix(range(400, 500)))  # larger than the limit: nothing leaves for it
    assert (len(cache), cache.nbytes) == (3, 3 * size)
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)


def test_keys_tell_media_apart():
    ids = torch.arange(12)[None]
    image = torch.rand(1, 3, 8, 8)
    prompts = [
        Prompt(ids),
        Prompt(ids, inputs={"pixel_values": image}),
        Prompt(ids, inputs={"pixel_values": image + torch.tensor([1e-3, 0, 0]).view(3, 1, 1)}),
        Prompt(ids, inputs={"pixel_values": image.bfloat16()}),
        Prompt(ids, inputs={"pixel_values": image.view(3, 1, 8, 8)}),
        Prompt(ids, inputs={"pixel_values_videos": image}),
    ]
    assert len({media_key(prompt) for prompt in prompts}) == len(prompts)
    # Inputs with a value per token follow from the tokens; a longer prompt has more tokens.
    typed = Prompt(ids, inputs={"pixel_values": image, "mm_token_type_ids": torch.zeros_like(ids)})
    assert media_key(typed) == media_key(prompts[1])


ATTENTION = ["llama", "gemma2", "mistral-window", "qwen2", "doge", "llava", "llava_next", "qwen2_vl", "qwen3_vl"]
RECURRENT = ["bamba", "mamba2", "qwen3_next", "llava_bamba", "qwen3_5"]


@pytest.mark.parametrize("name", [*ATTENTION, *RECURRENT])
def test_conversations_go_on_from_known_states(name):
    """What is new is computed in chunks."""
    model, turns = prompts_of(name)
    target, prefixes, before = new_target(model), PrefixCache(BYTES), 0
    for prompt, expected in turns:
        answer, known = answered(target, prefixes, prompt, chunk=3)
        assert (answer, known) == (expected, before)
        before = prompt.input_ids.shape[1] + len(answer) - 1  # the last token has not been in a pass
    for prompt, expected in turns:  # the same prompts again need no pass
        assert answered(target, prefixes, prompt) == (expected, prompt.input_ids.shape[1])
    assert len(prefixes) == 1


@pytest.mark.parametrize(
    ("name", "fixed"),
    [("llama", True), *((name, False) for name in ("llama", "bamba", "llava", "qwen2_vl", "qwen3_vl", "qwen3_5"))],
)
def test_drafters_read_what_they_read_of_a_whole_prompt(name, fixed, monkeypatch):
    """Of a follow-up, which reads the states of the answer's steps, and of the same prompt again."""
    if fixed:
        monkeypatch.setattr(kernels, "static_shapes", lambda device: True)
    model, turns = prompts_of(name, 2)
    target, prefixes = new_target(model), PrefixCache(BYTES)
    found, expected = Reader(), Reader()
    prompts = [turns[0][0], turns[1][0], turns[1][0]]
    for prompt in prompts:
        given = answered(target, prefixes, prompt, found)
        assert given[0] == answered(new_target(model), None, prompt, expected)[0]
        assert (given[1] > 0) == (len(found.read) > 1)
    for theirs, ours in zip(chain(*expected.read), chain(*found.read), strict=True):
        assert (theirs is None) == (ours is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_prompts_that_share_a_video_of_many_frames(name):
    """The prefix ends on text after the video, at positions below the last frames, or on the last video token."""
    model = shared_model(name)
    target, prefixes = new_target(model), PrefixCache(BYTES)
    prompt = prompt_of(video_inputs(name))
    length, end = prompt.input_ids.shape[1], int((prompt.input_ids[0] == VIDEO).nonzero().max()) + 1
    for keep, known in ((length, 0), (length - 1, length - 1), (end, 0)):
        ids = prompt.input_ids.clone()
        ids[:, keep:] = 50
        one = Prompt(ids, None, prompt.inputs)
        assert answered(target, prefixes, one) == (answered(target, None, one)[0], known)


@pytest.mark.parametrize("name", ["llama", "llava", "qwen3_vl", "bamba"])
def test_answers_that_stop_inside_a_draft_are_kept_up_to_the_stop(name):
    model, turns = prompts_of(name, 1)
    (prompt, answer), length = turns[0], turns[0][0].input_ids.shape[1]
    target = new_target(model)
    for stop in range(2, 6):
        prefixes = PrefixCache(BYTES)
        exact = Oracle([answer], vocab=VOCAB, spoil=0.0)
        exact._with_decoys = lambda truth, *_, answer=answer: [(token, at) for at, token in enumerate(answer[1:7])]
        stopper = Stopper(30, criteria=[lambda ids, *_, end=length + stop: torch.tensor([ids.shape[1] >= end])])
        greedy = defaults.sampler(SamplingParams())
        *_, (row,) = decode(target, exact, prompt, greedy, stopper, StepPlan(6, 6), prefixes=prefixes)
        assert (row.token_ids, row.stats.accept_lengths) == (answer[:stop], [stop - 1])
        again = followed(prompt, row.token_ids)
        expected, _ = answered(target, None, again)
        # A recurrent state after the stop contains the draft.
        assert answered(target, prefixes, again) == (expected, length + (0 if name in RECURRENT else stop))


def test_another_image_computes_everything(monkeypatch):
    model = shared_model("llava")
    target, prefixes = new_target(model), PrefixCache(BYTES)
    first, second = (prompt_of(vision_inputs("llava", 1, 1)) for _ in range(2))
    first.attention_mask = second.attention_mask = None
    second.inputs = {"pixel_values": -first.inputs["pixel_values"]}
    answer, _ = answered(target, prefixes, first)
    assert answered(target, prefixes, second) == (answered(target, None, second)[0], 0)
    # The tower does not see a known image again.
    tower = model.base_model.vision_tower
    monkeypatch.setattr(tower, "forward", lambda *args, **options: pytest.fail("the image is known"))
    assert answered(target, prefixes, followed(first, answer))[1] == first.input_ids.shape[1] + len(answer) - 1


@pytest.mark.parametrize(("name", "places"), [("llava", [38]), ("qwen3_vl", [38, 40 + 11])])
def test_text_before_or_between_media_alone_is_not_reused(name, places):
    """Of the second prompt of a batch; the first one's media end earlier."""
    model, turns = prompts_of(name, 1)
    media, words = turns[0][0], range(20, 60)
    text = torch.tensor([[*words]])
    grown = {
        key: torch.nn.functional.pad(value, (40, 0)) if value.shape == media.input_ids.shape else value
        for key, value in media.inputs.items()
    }
    later = Prompt(torch.cat([text, media.input_ids], dim=1), None, grown)
    target, prefixes = new_target(model), PrefixCache(BYTES)
    engine = SteppedEngine(target, None, StepPlan(0), prefixes, max_num_seqs=8)
    sampler, stopper = defaults.sampler(SamplingParams()), Stopper(4, criteria=[])
    rows = [row for one in (followed(media, words), later) for row in engine.add(one, sampler, stopper)]
    engine.wait(lambda: all(row.done for row in rows))
    for token in (9, 8):  # before and after the next turn
        for place in places:
            ids = later.input_ids.clone()
            ids[0, place] = token
            edited = replace(later, input_ids=ids)
            assert answered(target, prefixes, edited) == (answered(target, None, edited)[0], 0)
        answered(target, prefixes, followed(later, rows[1].token_ids))
    assert answered(target, prefixes, later)[1] == later.input_ids.shape[1] - 1


@pytest.mark.parametrize("name", ["llama", "bamba", "qwen3_vl", "qwen3_5"])
def test_answers_of_a_batch_are_kept_of_cancelled_rows_too(name):
    """Rows of several lengths leave at different times, with draft tokens after their limits."""
    model, turns = prompts_of(name, 1)
    target, prefixes = new_target(model), PrefixCache(BYTES)
    engine = SteppedEngine(target, Ngram(), StepPlan(6, 3), prefixes, max_num_seqs=8)
    prompts = [turns[0][0], *(followed(turns[0][0], [], (n, 5, n, 5, n)) for n in (3, 9))]
    sampler = defaults.sampler(SamplingParams())
    rows = [
        engine.add(one, sampler, Stopper(new, criteria=[]))[0] for one, new in zip(prompts, (5, 9, 40), strict=True)
    ]
    engine.wait(lambda: all(row.done for row in rows[:2]) and len(rows[2].token_ids) > 9)
    engine.remove(rows)
    for prompt, row in zip(prompts, rows, strict=True):
        again = followed(prompt, row.token_ids)
        expected, _ = answered(target, None, again)
        found, known = answered(target, prefixes, again)
        assert found == expected
        least = prompt.input_ids.shape[1]
        assert known >= least + (0 if name in RECURRENT else len(row.token_ids) - 1)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bamba", "llava", "qwen3_vl", "qwen3_5"])
def test_prompts_without_a_prefix_are_prefilled_together(name, monkeypatch):
    """Different prompts are stacked, a copy of one is not; follow-ups go on from the answers."""
    model, turns = prompts_of(name, 1)
    target, prefixes, batches = new_target(model), PrefixCache(BYTES), []
    prefill, restore = target.prefill, target.restore

    def counted(call):
        return lambda first, *rest: batches.append(1 if call is restore else len(first)) or call(first, *rest)

    monkeypatch.setattr(target, "prefill", counted(prefill))
    monkeypatch.setattr(target, "restore", counted(restore))
    prompts = [turns[0][0], *(Prompt(text_inputs(1, length, length)["input_ids"]) for length in (12, 17))]
    if hasattr(model.config, "vision_config"):
        prompts = [turns[0][0], replace(prompt_of(vision_inputs(name, 1, 2)), attention_mask=None)]
        prompts[1].inputs["pixel_values"] = prompts[1].inputs["pixel_values"] * 0.5
    prompts.append(prompts[0])
    engine = SteppedEngine(target, None, StepPlan(0), prefixes, max_num_seqs=8)
    sampler, stopper = defaults.sampler(SamplingParams()), Stopper(9, criteria=[])
    rows = [row for prompt in prompts for row in engine.add(prompt, sampler, stopper)]
    engine.wait(lambda: all(row.done for row in rows))
    assert batches == [len(prompts) - 1, 1]
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.token_ids == answered(target, None, prompt, new=9)[0]
        again = followed(prompt, row.token_ids)
        found, known = answered(target, prefixes, again)
        assert found == answered(target, None, again)[0]
        assert known >= again.input_ids.shape[1] - 5  # the last token of the answer and the question are new


def test_prompts_wait_for_others_that_compute_half_of_them():
    prompt = Prompt(torch.arange(20)[None])
    reuse = PrefixReuse(new_target(shared_model("llama")), PrefixCache(BYTES))
    same = lambda count, **more: Prompt(torch.where(torch.arange(20) < count, prompt.input_ids, 50), **more)  # noqa: E731
    assert reuse.resumes(prompt, [same(3), same(10)])
    assert not reuse.resumes(prompt, [same(9), same(9)])
    assert not reuse.resumes(prompt, [same(20, inputs={"image_sizes": torch.ones(1, 2)})])
    assert not reuse.resumes(replace(prompt, attention_mask=torch.arange(20)[None] > 0), [same(20)])
    for length in (9, 10):
        reuse.prefixes.add(prefix(range(length), reuse._key(prompt)))
        assert reuse.resumes(prompt, []) == (length == 10)


def test_states_of_another_precision_are_not_used():
    target, prefixes = new_target(deepcopy(shared_model("llama"))), PrefixCache(BYTES)
    prompt = Prompt(text_inputs(1, 20)["input_ids"])
    assert [answered(target, prefixes, prompt)[1] for _ in range(2)] == [0, 20]
    target.model.double()
    assert answered(target, prefixes, prompt)[1] == 0


def test_pipelines_check_the_option():
    target = new_target(shared_model("llama"))
    with pytest.raises(UserError, match="prefix_cache must be >= 0: got -1"):
        mmspec.Pipeline(target, prefix_cache=-1)
    assert mmspec.Pipeline(target).engine.prefixes is None
    with pytest.raises(UserError, match="prefix_cache needs a target that keeps states: SimpleNamespace does not"):
        Engine(SimpleNamespace(device=torch.device("cpu"))).use_prefixes(PrefixCache(1))
    engine = Engine(target)
    for cache in (PrefixCache(1), PrefixCache(2), None):
        engine.use_prefixes(cache)
        assert (engine.prefixes, [*engine.idle]) == (cache, [] if cache is None else [cache])
