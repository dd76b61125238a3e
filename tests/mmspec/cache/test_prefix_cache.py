"""Prompts that begin like earlier ones compute only the rest, and are answered as if they computed everything."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import mmspec
from mmspec import SamplingParams, plugins
from mmspec.cache.prefix_cache import Prefix, PrefixCache, media_key
from mmspec.cache.tree_cache import TreeCache
from mmspec.core.budget import Budget
from mmspec.core.target import Prompt
from mmspec.drafters.ngram import Ngram
from mmspec.engine.stopping import Stopper
from mmspec.errors import UserError
from mmspec.eval.decoding.oracle import Oracle
from mmspec.ops import kernels
from mmspec.sampling import defaults
from tests.decoding import SteppedEngine, decode
from tests.targets import prefilled, prompt_of
from tests.tiny import shared_model
from tests.tiny.configs import VIDEO, VOCAB
from tests.tiny.drafters import tiny_drafter
from tests.tiny.models import text_inputs, video_inputs, vision_inputs

BYTES = 1 << 24


def prefix(tokens, key="", size=16, **changes):
    cache = TreeCache(1, reserve=1)
    states = torch.zeros(1, 1, len(tokens), size)
    cache.update(states, states, 0)
    cache.commit_prompt(len(tokens), None, 1)
    values = {"logits": torch.zeros(1, 1, 4), "features": {"last": torch.zeros(1, len(tokens), size)}}
    return Prefix(list(tokens), key, cache, **{**values, "embeds": None, "positions": None, **changes})


# ---------------------------------------------------------------------- the cache


def test_the_prefix_with_most_tokens_in_common_is_found():
    cache = PrefixCache(BYTES)
    for tokens in (range(20), range(10, 40), [*range(15), 99, *range(30)]):
        cache.add(prefix(tokens), whole=False)
    found, common = cache.find([*range(18), 7, 7], "", ["last"], 0, whole=False)
    assert (found.tokens, common) == (list(range(20)), 18)
    assert cache.find([*range(18), 7, 7], "", ["last"], 0, whole=True) is None
    assert cache.find(range(25), "", ["last"], 0, whole=True)[1] == 20
    assert cache.find(range(25), "", ["last"], 21, whole=False) is None  # an image ends later
    assert cache.find(range(7), "", ["last"], 0, whole=False) is None  # too short to pay
    assert cache.find(range(25), "another image", ["last"], 0, whole=False) is None
    assert cache.find(range(25), "", ["last", 2], 0, whole=False) is None


SIZES = [7, 8, 9, 15, 16, 17]  # around the shortest prefix and twice that


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("length", SIZES)
def test_prefixes_count_from_8_tokens_on(length, whole):
    """Of a longer prompt, of one that differs later, and of the same prompt with and without known logits."""
    cache = PrefixCache(BYTES)
    cache.add(prefix(range(length)), whole)
    for more in ([50], [50, 51, 52], []):
        found = cache.find([*range(length), *more], "", ["last"], 0, whole)
        assert (found and found[1]) == (length if length >= 8 else None)
    cache = PrefixCache(BYTES)
    cache.add(prefix(range(length), logits=None), whole)
    found = cache.find(range(length), "", ["last"], 0, whole)
    assert (found and found[1]) == (length - 1 if length >= 9 and not whole else None)
    cache = PrefixCache(BYTES)
    cache.add(prefix(range(40)), whole)
    found = cache.find([*range(length), 50, 51], "", ["last"], 0, whole)
    assert (found and found[1]) == (length if length >= 8 and not whole else None)


@pytest.mark.parametrize("whole", [False, True])
def test_a_prefix_replaces_what_can_be_cut_from_it(whole):
    cache = PrefixCache(BYTES)
    for tokens in (range(10), range(30), range(30), range(40, 60)):
        cache.add(prefix(tokens), whole)
    assert len(cache) == (3 if whole else 2)
    cache.add(prefix(range(50), "another"), whole)
    assert len(cache) == (4 if whole else 3)


def test_a_prefix_with_features_that_a_longer_one_lacks_is_kept():
    cache, states = PrefixCache(BYTES), torch.zeros(1, 30, 16)
    cache.add(prefix(range(30), features={"last": states, 2: states}), whole=False)
    cache.add(prefix(range(40)), whole=False)
    assert len(cache) == 2
    assert cache.find(range(50), "", ["last", 2], 0, whole=False)[1] == 30


def test_the_least_recently_used_prefixes_leave_first():
    size = prefix(range(20)).nbytes
    cache = PrefixCache(3 * size)
    for first in (0, 100, 200):
        cache.add(prefix(range(first, first + 20)), whole=False)
    assert cache.nbytes == 3 * size
    assert cache.find(range(20), "", ["last"], 0, whole=False) is not None
    cache.add(prefix(range(300, 320)), whole=False)
    assert cache.find(range(100, 120), "", ["last"], 0, whole=False) is None
    assert cache.find(range(20), "", ["last"], 0, whole=False) is not None
    cache.add(prefix(range(400, 500)), whole=False)  # larger than the limit: nothing leaves for it
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
    # What has a value per token follows from the tokens; a longer prompt has more of them.
    typed = Prompt(ids, inputs={"pixel_values": image, "mm_token_type_ids": torch.zeros_like(ids)})
    assert media_key(typed) == media_key(prompts[1])


# ---------------------------------------------------------------------- answers


def targets_of(model):
    """A target that computes every prompt, and one that keeps their states."""
    plain, target = (plugins.target_class(model.config)(model) for _ in range(2))
    target.prefix_cache = PrefixCache(BYTES)
    return plain, target


def answered(target, drafter, prompt, sampling=None, nodes=6, new=8):
    """Tokens of a prompt's answer, and how many of the prompt's states were known."""
    sampler = defaults.sampler(SamplingParams(seed=3, **(sampling or {})))
    *_, (row,) = decode(target, drafter, prompt, sampler, Stopper(new, criteria=[]), Budget(nodes, 3))
    return row.token_ids, row.stats.num_cached_tokens


def followed(prompt, answer, question=(5, 6, 7, 8)):
    """The prompt of the next turn."""
    ids = torch.cat([prompt.input_ids, torch.tensor([[*answer, *question]])], dim=1)
    more = ids.shape[1] - prompt.input_ids.shape[1]
    grown = {
        name: torch.nn.functional.pad(value, (0, more)) if value.shape == prompt.input_ids.shape else value
        for name, value in prompt.inputs.items()
    }
    return Prompt(ids, None, grown)


def prompts_of(name, turns=3):
    """A conversation's prompts, its answers as a pipeline without cached prefixes gives them."""
    model = shared_model(name)
    vision = hasattr(model.config, "vision_config")
    prompt = prompt_of(vision_inputs(name, 1, 2) if vision else text_inputs(1, 20))
    prompt.attention_mask = None
    target, found = plugins.target_class(model.config)(model), []
    for _ in range(turns):
        answer, known = answered(target, None, prompt)
        assert known == 0
        found.append((prompt, answer))
        prompt = followed(prompt, answer)
    return model, found


ATTENTION = ["llama", "gemma2", "mistral-window", "qwen2", "doge", "llava", "llava_next", "qwen2_vl", "qwen3_vl"]
RECURRENT = ["bamba", "mamba2", "qwen3_next", "llava_bamba", "qwen3_5"]


@pytest.mark.parametrize("name", [*ATTENTION, *RECURRENT])
def test_conversations_go_on_from_known_states(name):
    model, turns = prompts_of(name)
    _, target = targets_of(model)
    before = 0
    for prompt, expected in turns:
        answer, known = answered(target, None, prompt)
        assert (answer, known) == (expected, before)
        before = prompt.input_ids.shape[1] + len(answer) - 1  # the last token has not been in a pass
    # The same prompt again needs no pass, or one over its last token, if its state is cut from that after the answer.
    length = turns[-1][0].input_ids.shape[1]
    assert answered(target, None, turns[-1][0]) == (turns[-1][1], length - (name not in RECURRENT))


@pytest.mark.parametrize("name", ["llama", "bamba", "llava", "qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_prefill_steps_are_those_of_a_whole_prompt(name):
    """Everything that a drafter may read, of a follow-up and of the same prompt again."""
    model, turns = prompts_of(name, 2)
    plain, target = targets_of(model)
    plain.features = target.features = ["last", 1]
    prompts = [prompt for prompt, _ in turns]
    for prompt, known in zip((*prompts, prompts[1]), (0, *(one.input_ids.shape[1] for one in prompts)), strict=True):
        expected, found = prefilled(plain, prompt, 8), prefilled(target, prompt, 8)
        assert (expected.cached_tokens, found.cached_tokens) == (0, known)
        pairs = [
            (getattr(expected, part), getattr(found, part)) for part in ("logits", "visual", "embeds", "positions")
        ]
        pairs += [(expected.features[feature], found.features[feature]) for feature in target.features]
        for theirs, ours in pairs:
            assert (theirs is None) == (ours is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_prompts_that_share_a_video_of_many_frames(name):
    """Up to text after it, whose positions may be below those of its last frames, or up to its own last token."""
    model = shared_model(name)
    plain, target = targets_of(model)
    prompt = prompt_of(video_inputs(name))
    length, end = prompt.input_ids.shape[1], int((prompt.input_ids[0] == VIDEO).nonzero().max()) + 1
    for keep, known in ((length, 0), (length - 1, length - 1), (end, 0)):
        ids = prompt.input_ids.clone()
        ids[:, keep:] = 50
        one = Prompt(ids, None, prompt.inputs)
        assert answered(target, None, one) == (answered(plain, None, one)[0], known)


@pytest.mark.parametrize("name", ["llama", "llava", "qwen3_vl", "bamba"])
def test_answers_that_stop_inside_a_draft_are_kept_up_to_the_stop(name):
    model, turns = prompts_of(name, 1)
    (prompt, answer), length = turns[0], turns[0][0].input_ids.shape[1]
    plain, target = (plugins.target_class(model.config)(model) for _ in range(2))
    for stop in range(2, 6):
        target.prefix_cache = PrefixCache(BYTES)
        exact = Oracle([answer], vocab=VOCAB, spoil=0.0)
        exact._with_decoys = lambda truth, *_, answer=answer: [(token, at) for at, token in enumerate(answer[1:7])]
        stopper = Stopper(30, criteria=[lambda ids, *_, end=length + stop: torch.tensor([ids.shape[1] >= end])])
        *_, (row,) = decode(target, exact, prompt, defaults.sampler(SamplingParams()), stopper, Budget(6, 6))
        assert (row.token_ids, row.stats.accept_lengths) == (answer[:stop], [stop - 1])
        again = followed(prompt, row.token_ids)
        expected, _ = answered(plain, None, again)
        # A recurrent state after the stop contains the draft.
        assert answered(target, None, again) == (expected, length + (0 if name in RECURRENT else stop))


@pytest.mark.parametrize("fixed", [False, True])
def test_a_drafter_reads_the_states_of_an_answer(fixed, monkeypatch):
    """Of its last step, too, whose accepted tokens the host reads late."""
    monkeypatch.setattr(kernels, "static_shapes", lambda device: fixed)
    model, ((prompt, answer),) = prompts_of("llama", 1)
    plain, target = targets_of(model)
    drafter = copy.deepcopy(tiny_drafter("eagle3", model))
    drafter.attach(target)
    sampler = defaults.sampler(SamplingParams())
    *_, (row,) = decode(target, drafter, prompt, sampler, Stopper(6, criteria=[]), Budget(3, 2))
    assert row.token_ids == answer[:6]
    plain.features = target.features = drafter.features
    again = followed(prompt, row.token_ids)
    expected, found = prefilled(plain, again, 8), prefilled(target, again, 8)
    assert found.cached_tokens > prompt.input_ids.shape[1]
    assert expected.features
    for name, states in expected.features.items():
        torch.testing.assert_close(found.features[name], states, atol=1e-4, rtol=1e-4)


def test_another_image_computes_everything(monkeypatch):
    model = shared_model("llava")
    plain, target = targets_of(model)
    first, second = (prompt_of(vision_inputs("llava", 1, 1)) for _ in range(2))
    first.attention_mask = second.attention_mask = None
    second.inputs = {"pixel_values": -first.inputs["pixel_values"]}
    answer, _ = answered(target, None, first)
    assert answered(target, None, second) == (answered(plain, None, second)[0], 0)
    # The tower does not see a known image again.
    tower = model.base_model.vision_tower
    monkeypatch.setattr(tower, "forward", lambda *args, **options: pytest.fail("the image is known"))
    assert answered(target, None, followed(first, answer))[1] == first.input_ids.shape[1] + len(answer) - 1


def test_long_rest_in_chunks_beside_other_sequences():
    """A follow-up joins while another sequence decodes, its new tokens in several chunks."""
    model = shared_model("llama")
    plain, target = targets_of(model)
    prompts = [Prompt(text_inputs(1, 20, seed)["input_ids"]) for seed in range(3)]
    prompts.append(followed(prompts[0], [], tuple(text_inputs(1, 40, 9)["input_ids"][0].tolist())))
    expected = [answered(plain, None, prompt, new=30)[0] for prompt in prompts]
    answered(target, None, prompts[0])
    engine = SteppedEngine(target, None, lambda batch, nodes: Budget(0), max_num_seqs=8, chunk=7)
    sampler, stopper = defaults.sampler(SamplingParams()), Stopper(30, criteria=[])
    rows = [row for prompt in prompts for row in engine.add(prompt, sampler, stopper)]
    engine.wait(lambda: all(row.done for row in rows))
    assert [row.token_ids for row in rows] == expected
    assert [row.stats.num_cached_tokens for row in rows] == [19, 0, 0, 20]


@pytest.mark.parametrize("name", ["llama", "bamba", "qwen3_vl", "qwen3_5"])
def test_answers_of_a_batch_are_kept_of_cancelled_rows_too(name):
    """Rows of several lengths leave at different times, with draft tokens after their limits."""
    model, turns = prompts_of(name, 1)
    plain, target = targets_of(model)
    engine = SteppedEngine(target, Ngram(), lambda batch, nodes: Budget(6, 3), max_num_seqs=8)
    prompts = [turns[0][0], *(followed(turns[0][0], [], (n, 5, n, 5, n)) for n in (3, 9))]
    sampler = defaults.sampler(SamplingParams())
    rows = [
        engine.add(one, sampler, Stopper(new, criteria=[]))[0] for one, new in zip(prompts, (5, 9, 40), strict=True)
    ]
    engine.wait(lambda: all(row.done for row in rows[:2]) and len(rows[2].token_ids) > 9)
    engine.remove(rows)
    for prompt, row in zip(prompts, rows, strict=True):
        again = followed(prompt, row.token_ids)
        expected, _ = answered(plain, None, again)
        found, known = answered(target, None, again)
        assert found == expected
        least = prompt.input_ids.shape[1]
        assert known >= least + (0 if name in RECURRENT else len(row.token_ids) - 1)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bamba", "llava", "qwen3_vl", "qwen3_5"])
def test_prompts_without_a_prefix_are_prefilled_together(name, monkeypatch):
    """Different prompts are stacked, a copy of one is not; follow-ups go on from the answers."""
    model, turns = prompts_of(name, 1)
    plain, target = targets_of(model)
    prefill, batches = target.prefill_chunks, []

    def counted(prompt, *args):
        batches.append(len(prompt.input_ids))
        return prefill(prompt, *args)

    monkeypatch.setattr(target, "prefill_chunks", counted)
    prompts = [turns[0][0], *(Prompt(text_inputs(1, length, length)["input_ids"]) for length in (12, 17))]
    if hasattr(model.config, "vision_config"):
        prompts = [turns[0][0], replace(prompt_of(vision_inputs(name, 1, 2)), attention_mask=None)]
        prompts[1].inputs["pixel_values"] = prompts[1].inputs["pixel_values"] * 0.5
    prompts.append(prompts[0])
    engine = SteppedEngine(target, None, lambda batch, nodes: Budget(0), max_num_seqs=8)
    sampler, stopper = defaults.sampler(SamplingParams()), Stopper(9, criteria=[])
    rows = [row for prompt in prompts for row in engine.add(prompt, sampler, stopper)]
    engine.wait(lambda: all(row.done for row in rows))
    assert batches == [len(prompts) - 1, 1]
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.token_ids == answered(plain, None, prompt, new=9)[0]
        again = followed(prompt, row.token_ids)
        found, known = answered(target, None, again)
        assert found == answered(plain, None, again)[0]
        assert known >= again.input_ids.shape[1] - 5  # the last token of the answer and the question are new


def test_pipelines_check_the_option():
    model = shared_model("llama")
    target = plugins.target_class(model.config)(model)
    with pytest.raises(UserError, match="prefix_cache must be a whole number >= 0: got -1"):
        mmspec.Pipeline(target, prefix_cache=-1)
    assert mmspec.Pipeline(target).target.prefix_cache is None

    class Other:
        """Keeps no states."""

        context_limit = None

    with pytest.raises(UserError, match="prefix_cache needs a target that keeps states: Other does not"):
        mmspec.Pipeline(Other(), prefix_cache=1)
