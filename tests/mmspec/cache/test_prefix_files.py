"""Prefixes in files: a later process computes no prompt again, and its answers are those without a cache."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import transformers
from safetensors.torch import save

import mmspec
from mmspec import SamplingParams
from mmspec.cache import prefix as files_module
from mmspec.cache.prefix import Prefix, PrefixFiles
from mmspec.cache.prefix_cache import PrefixCache, PrefixReuse
from mmspec.core import target as core_target
from mmspec.core.plan import StepPlan
from mmspec.core.target import Prompt, State, Stop, spaced
from mmspec.drafters.ngram import Ngram
from mmspec.engine.stopping import Stopper
from mmspec.errors import UserError
from mmspec.ops import cpu_library
from mmspec.sampling import defaults
from mmspec.targets import transformers_target
from mmspec.targets.packing import pack_model
from mmspec.targets.support import fingerprint
from tests.conversations import Reader, answered, followed, new_target, prompts_of
from tests.decoding import SteppedEngine
from tests.targets import prompt_of
from tests.tiny import shared_model
from tests.tiny.configs import VIDEO
from tests.tiny.models import text_inputs, video_inputs

MEMORY = 1 << 24
ATTENTION = ["llama", "gemma2", "doge", "llava", "qwen3_vl"]
RECURRENT = ["bamba", "mamba2", "qwen3_next", "llava_bamba", "qwen3_5"]


@pytest.fixture(autouse=True)
def block(monkeypatch: pytest.MonkeyPatch) -> int:
    """Few tokens per file, and between recurrent states."""
    for module in (files_module, transformers_target):
        monkeypatch.setattr(module, "BLOCK", 8)
    return 8


def restarted(folder, limit=1 << 30, memory=MEMORY):
    """The cache of a new process."""
    return PrefixCache(memory, PrefixFiles(folder, limit))


def saved(folder, model, prompts, **options):
    """Answer prompts in one process, which then ends."""
    cache, target = restarted(folder), new_target(model)
    answers = [answered(target, cache, prompt, **options)[0] for prompt in prompts]
    cache.close()
    return answers


def changed(prompt, place):
    """The prompt with another token at a place."""
    ids = prompt.input_ids.clone()
    ids[0, place] = 7 if ids[0, place] != 7 else 9
    return replace(prompt, input_ids=ids)


@pytest.mark.parametrize("name", [*ATTENTION, *RECURRENT])
def test_answers_after_a_restart_are_those_without_a_cache(name, tmp_path):
    model, turns = prompts_of(name)
    assert saved(tmp_path, model, [prompt for prompt, _ in turns]) == [answer for _, answer in turns]
    same = copy.deepcopy(model)
    for prompt, answer in turns:
        assert answered(new_target(same), restarted(tmp_path), prompt) == (answer, prompt.input_ids.shape[1])
    last, answer = turns[-1]
    again, length = followed(last, answer), last.input_ids.shape[1]
    expected, _ = answered(new_target(same), None, again)
    assert answered(new_target(same), restarted(tmp_path), again) == (expected, length + len(answer) - 1)
    for place in (length - 3, length - 12):  # an edited history
        edited = changed(last, place)
        expected, _ = answered(new_target(same), None, edited)
        found, known = answered(new_target(same), restarted(tmp_path), edited)
        assert found == expected
        assert known == place if name in ATTENTION else place - 8 < known <= place


@pytest.mark.parametrize("name", RECURRENT)
def test_edited_histories_use_recurrent_states_within_prompts(name):
    """In memory: from states at multiples of a block, whatever the larger chunks."""
    model, turns = prompts_of(name, 1)
    media = turns[0][0]
    prompt = followed(media, turns[0][1], tuple(range(20, 60)))
    least, length = media.input_ids.shape[1], prompt.input_ids.shape[1]
    for chunk in (8, 20, 512):
        target, cache = new_target(model), PrefixCache(MEMORY)
        expected, _ = answered(new_target(model), None, prompt)
        assert answered(target, cache, prompt, chunk=chunk) == (expected, 0)
        for place in (length - 1, length - 9, length - 30, (length - 30) ^ 7):  # twice in a block
            edited = changed(prompt, place)
            expected, _ = answered(new_target(model), None, edited)
            assert answered(target, cache, edited, chunk=chunk) == (expected, place // 8 * 8)
    assert least < (length - 30) // 8 * 8


@pytest.mark.parametrize("name", ["llama", "llava", "qwen3_vl", "bamba", "qwen3_5"])
def test_drafters_read_after_a_restart_what_they_read_of_a_whole_prompt(name, tmp_path):
    model, turns = prompts_of(name, 2)
    prompts = [prompt for prompt, _ in turns]
    saved(tmp_path, model, prompts, drafter=Reader())
    for prompt, answer in turns:
        found, expected = Reader(), Reader()
        given, known = answered(new_target(model), restarted(tmp_path), prompt, found)
        assert (given, known) == (answer, prompt.input_ids.shape[1])
        assert answered(new_target(model), None, prompt, expected)[0] == answer
        for ours, theirs in zip(*found.read, *expected.read, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    # Hidden states that were not saved are computed.
    saved(tmp_path / "plain", model, prompts)
    assert answered(new_target(model), restarted(tmp_path / "plain"), prompts[0], Reader()) == (turns[0][1], 0)


@pytest.mark.parametrize("name", ["llama", "bamba", "qwen3_vl"])
def test_rows_of_a_batch_are_saved_and_found(name, tmp_path):
    model, turns = prompts_of(name, 1)
    prompts = [turns[0][0], *(followed(turns[0][0], [], (n, 5, n, 5, n)) for n in (3, 9))]
    cache = restarted(tmp_path)

    def together(prefixes):
        engine = SteppedEngine(new_target(model), Ngram(), StepPlan(6, 3), prefixes, max_num_seqs=8)
        sampler, stopper = defaults.sampler(SamplingParams()), Stopper(9, criteria=[])
        rows = [engine.add(one, sampler, stopper)[0] for one in prompts]
        engine.wait(lambda: all(row.done for row in rows))
        return rows

    expected = [answered(new_target(model), None, prompt, new=9)[0] for prompt in prompts]
    assert [row.token_ids for row in together(cache)] == expected
    cache.close()
    rows = together(restarted(tmp_path))
    assert [row.token_ids for row in rows] == expected
    least = turns[0][0].input_ids.shape[1]
    assert all(row.stats.num_cached_tokens >= least // 8 * 8 for row in rows)


def test_prompts_that_are_never_read_in_parts_are_not_kept():
    model = copy.deepcopy(shared_model("mamba2"))
    model.config.time_step_limit = (0.0, 0.1)
    target, cache, prompt = new_target(model), PrefixCache(MEMORY), Prompt(text_inputs(1, 20)["input_ids"])
    expected = answered(new_target(model), None, prompt)
    assert [answered(target, cache, prompt) for _ in range(2)] == [expected] * 2


def test_a_prefix_ends_after_its_media(tmp_path):
    model = shared_model("qwen3_vl")
    prompt = prompt_of(video_inputs("qwen3_vl"))
    end = int((prompt.input_ids[0] == VIDEO).nonzero().max()) + 1
    saved(tmp_path, model, [prompt])
    for place, known in ((end, 0), (end + 1, end + 1)):
        edited = changed(prompt, place)
        assert answered(new_target(model), restarted(tmp_path), edited)[1] == known
    other = replace(prompt, inputs={**prompt.inputs, "pixel_values_videos": -prompt.inputs["pixel_values_videos"]})
    assert answered(new_target(model), restarted(tmp_path), other)[1] == 0


def test_states_of_another_model_dtype_or_version_are_not_used(tmp_path, monkeypatch):
    model = copy.deepcopy(shared_model("llama"))
    prompt = Prompt(text_inputs(1, 20)["input_ids"])
    saved(tmp_path, model, [prompt])
    known = fingerprint(model)
    assert fingerprint(copy.deepcopy(model)) == known

    def found(other):
        answer, shared = answered(new_target(other), restarted(tmp_path), prompt)
        assert answer == answered(new_target(other), None, prompt)[0]
        return shared

    assert found(copy.deepcopy(model)) == 20
    for place in (0, -1):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.model.layers[1].mlp.down_proj.weight.view(-1)[place] += 0.5
        assert found(other) == 0
    swapped = copy.deepcopy(model)
    one, two = swapped.model.layers[:2]
    one.mlp.load_state_dict(model.model.layers[1].mlp.state_dict())
    two.mlp.load_state_dict(model.model.layers[0].mlp.state_dict())
    assert found(swapped) == 0
    configured = copy.deepcopy(model)
    configured.config.rms_norm_eps *= 2
    assert fingerprint(configured) != known
    assert fingerprint(copy.deepcopy(model).double()) != known
    other = copy.deepcopy(model)
    other.model.rotary_emb.inv_freq *= 2
    found, projection = {known, fingerprint(other)}, other.model.layers[1].self_attn.q_proj
    same_bytes = [torch.Tensor.t, lambda x: x.reshape(2, -1), lambda x: x.view(torch.int32)]
    for change in same_bytes:
        projection.weight = torch.nn.Parameter(change(model.model.layers[1].self_attn.q_proj.weight.data), False)
        found.add(fingerprint(other))
    for place, name, value in (
        *((package, "__version__", "0.1") for package in (torch, transformers)),
        (torch.backends.cpu, "get_cpu_capability", lambda: "Z80"),
        *((cpu_library, "build", lambda: "other"), (os, "environ", {**os.environ, "MMSPEC_KERNELS": "reference"})),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, value)
            found.add(fingerprint(model))
    assert len(found) == 10
    monkeypatch.setenv("MMSPEC_KERNELS", "reference")
    for one in (model, configured):
        pack_model(one, "bfloat16")  # torch's kernels keep weights that are no tensors of the module
    configured.config.rms_norm_eps /= 2
    configured.lm_head._weight = configured.lm_head.rows(torch.arange(89, -1, -1))._weight
    assert fingerprint(configured) != fingerprint(model)
    with torch.device("meta"), pytest.raises(UserError, match="needs weights in memory: model"):
        fingerprint(type(model)(model.config))


def test_weights_that_change_are_other_weights_after_a_clear(tmp_path):
    pipe = mmspec.load("tiny-hybrid", None, prefix_cache=MEMORY, prefix_cache_dir=tmp_path)
    model = pipe.model

    def answer(one):
        found = one.generate("Work out: 37 + 48", max_new_tokens=8, temperature=0.0, ignore_eos=True)
        one.engine.drain()
        return found.token_ids, found.stats.num_cached_tokens

    before, _ = answer(pipe)
    pipe.engine.prefixes.close()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(-1)
    pipe.engine.prefixes.clear()
    after, known = answer(pipe)
    assert (after, known) == (answer(mmspec.Pipeline(new_target(model), pipe.processor))[0], 0)
    assert after != before
    pipe.engine.prefixes.close()
    later = mmspec.Pipeline(new_target(model), pipe.processor, prefix_cache=MEMORY, prefix_cache_dir=tmp_path)
    assert answer(later)[0] == after
    assert answer(later)[1] > 8


def test_a_clear_while_the_weights_are_hashed_counts(tmp_path, monkeypatch):
    cache, target = restarted(tmp_path), new_target(shared_model("llama"))
    monkeypatch.setattr(target, "identity", lambda: cache.clear() or str(cache.cleared))
    reuse = PrefixReuse(target, cache)
    assert reuse._key(Prompt(text_inputs(1, 20)["input_ids"]))[-1] == "2"  # hashed again


def test_damaged_and_foreign_files_are_ignored(tmp_path):
    model, turns = prompts_of("llama")
    prompt, answer = turns[-1]
    saved(tmp_path, model, [prompt])
    own = sorted(tmp_path.iterdir())
    assert len(own) == 7  # of 44 tokens, and 7 of the answer
    contents = {path: path.read_bytes() for path in own}
    # An unfinished file has another name; folders and files of other names stay.
    (tmp_path / "note.txt").write_text("mine")
    (tmp_path / f"{'0' * 32}-{'1' * 32}.safetensors").write_bytes(contents[own[0]])
    (tmp_path / f"{own[0].name[:32]}-{'1' * 32}.safetensors").mkdir()
    renamed = tmp_path / f"{own[0].name[:32]}-{'2' * 32}.safetensors"
    renamed.write_bytes(contents[own[0]])
    assert PrefixFiles(tmp_path, 1)._header(renamed.name) is None
    lengths, tokens, form = list[int](), {"tokens": torch.arange(8)}, files_module._FORMAT
    for path in own:
        abouts = None, {"name": path.name}, {form: "{", "name": path.name}
        for damage in (contents[path][:-1], os.urandom(200), *(save(tokens, one) for one in abouts)):
            path.write_bytes(damage)
            found, known = answered(new_target(model), restarted(tmp_path), prompt)
            assert found == answer
            lengths.append(known)
        path.write_bytes(contents[path])
    assert sorted(lengths) == sorted(5 * [0, 8, 16, 24, 32, 40, 44])  # where the damaged file begins
    own[lengths.index(0) // 5].write_bytes(b"")  # the first block
    cache = restarted(tmp_path)
    found, known = answered(new_target(model), cache, prompt)
    assert (found, known < 44) == (answer, True)
    cache.close()
    assert answered(new_target(model), restarted(tmp_path), prompt) == (answer, 44)  # what was missing is written again
    assert (tmp_path / "note.txt").read_text() == "mine"


def one_prefix(tokens):
    """A prefix of attention alone, of 64 bytes per token, with logits at its end."""
    model = new_target(shared_model("llama"))
    list(model.restore(State(None, 0, 0, True), Prompt(torch.tensor([tokens])), 1))
    state = model.snapshot(0)
    stops = {len(tokens): Stop((), torch.ones(1, 1, 4))}
    return Prefix(tokens, "key", replace(state, stops=stops), {})


@pytest.mark.parametrize("use", ["read", "write"])
def test_the_least_recently_used_files_are_removed_and_the_ends_of_prefixes_first(use, tmp_path):
    files, prefixes = PrefixFiles(tmp_path, 1 << 30), [one_prefix([*range(n, n + 24)]) for n in (0, 30, 60)]

    def known():
        found = [files.find([*one.tokens, 1, 2], "key", ()) for one in prefixes]
        return [one and one[1] for one in found]

    for one in prefixes[:2]:
        assert len(list(files.write(one))) == 3
        assert list(files.write(one)) == []
    assert known() == [24, 24, None]
    assert files.find(prefixes[0].tokens, "another key", ()) is None
    media = replace(one_prefix([*range(24)]), key="media", least=18)  # which end after 18 tokens
    apart = PrefixFiles(tmp_path.with_name("media"), 1 << 30)
    list(apart.write(media))
    assert apart.find([*range(18), 99], "media", ())[1] == 18
    assert apart.find([*range(17), 99], "media", ()) is None
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    chain, length = files.find(prefixes[0].tokens, "key", ())
    if use == "read":
        assert files.read(chain, length, "key", new_target(shared_model("llama"))).tokens == prefixes[0].tokens
    else:
        assert list(files.write(prefixes[0])) == []
    files.limit = size
    list(files.write(prefixes[2]))
    assert known() == [24, None, 24]  # the first was used since
    files.limit = size // 2
    list(files.write(one_prefix([*range(90, 98)])))
    assert known()[0] in (None, 8, 16)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= size // 2
    files.limit = size // 8  # less than one file
    (note := tmp_path / "note.txt").write_text("mine")
    list(files.write(one_prefix([*range(70, 94)])))
    assert list(tmp_path.iterdir()) == [note]


def test_files_are_written_again_for_states_that_they_lack(tmp_path):
    files, whole = PrefixFiles(tmp_path, 1 << 30), one_prefix([*range(24)])
    whole = replace(whole, features={name: torch.zeros(1, 24, 4) for name in ("last", 1)})
    state, logits = (torch.ones(1, 2),), torch.ones(1, 1, 4)
    for stops, count in (({}, 3), ({16: Stop(state)}, 1), ({16: Stop(state, logits)}, 1), ({16: Stop(state)}, 0)):
        assert len(list(files.write(replace(whole, state=replace(whole.state, stops=stops))))) == count
    assert files.find(whole.tokens, "key", [1, "last"]) == files.find(whole.tokens, "key", ["last", 1]) is not None
    assert files.find(whole.tokens, "key", ["last"]) is None


def test_the_newest_prefix_is_written_first_and_none_after_a_clear(tmp_path):
    cache, (first, second) = restarted(tmp_path), (one_prefix([*range(n, n + 24)]) for n in (0, 30))
    cache.add(first)
    cache.add(second)
    cache.turn()
    assert [cache.files.find(one.tokens, "key", ()) is not None for one in (first, second)] == [False, True]
    for _ in range(2):  # in the middle of a prefix, and before one
        assert cache.pending
        cache.clear()
        assert not cache.pending
        cache.add(first)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("length", "known"), [(17, 25), (18, 18)])
def test_files_are_read_for_eight_tokens_more_than_memory_has(length, known, tmp_path):
    model, prompt = shared_model("llama"), Prompt(text_inputs(1, 25)["input_ids"])
    saved(tmp_path, model, [prompt])
    target, cache = new_target(model), restarted(tmp_path)
    answered(target, cache, Prompt(prompt.input_ids[:, :length]), new=1)
    assert answered(target, cache, prompt)[1] == known


def test_several_processes_share_a_folder(tmp_path, monkeypatch):
    one, other = (PrefixFiles(tmp_path, 1 << 30) for _ in range(2))
    first, second = one_prefix([*range(24)]), one_prefix([*range(20), 50, 51])
    list(one.write(first))
    assert other.find(second.tokens, "key", ())[1] == 20
    assert len(list(other.write(second))) == 1  # common blocks are there
    chain, length = one.find(second.tokens, "key", ())
    (tmp_path / chain[0]).write_bytes(save({name: torch.zeros(1, 1) for name in ("tokens", "cache.0000")}))
    assert one.read(chain, length, "key", new_target(shared_model("llama"))) is None
    for path in tmp_path.iterdir():  # the other process removes files between find and read
        path.unlink()
    assert one.read(chain, length, "key", new_target(shared_model("llama"))) is None
    assert one.find(second.tokens, "key", ()) is None
    list(other.write(second))
    assert one.find([*second.tokens, 1], "key", ())[1] == 22
    for path in tmp_path.iterdir():
        path.unlink()
    # A file is in the folder whole or not at all.
    written = files_module.save_file

    def cut(tensors, path, about):
        written(tensors, path, about)
        path.write_bytes(path.read_bytes()[:50])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files_module, "save_file", cut)
    with pytest.raises(UserError, match=r"expected a place that can be written, received .*No space left"):
        list(one.write(first))
    tmp_path.rmdir()
    assert one.find(first.tokens, "key", ()) is None


def test_files_are_written_while_no_sequence_runs(tmp_path):
    pipe = mmspec.load("tiny-hybrid", "ngram", prefix_cache=MEMORY, prefix_cache_dir=tmp_path / "deep" / "folder")
    folder, cache = tmp_path / "deep" / "folder", pipe.engine.prefixes
    stream = pipe.stream("Work out: 37 + 48", max_new_tokens=200, ignore_eos=True)
    for number, _ in enumerate(stream):
        assert list(folder.iterdir()) == []
        if number == 5:
            break
    stream.close()
    pipe.engine.drain()
    assert cache.pending
    pipe.generate("Work out: 37 + 49", max_new_tokens=2)
    with pipe.engine._changed:
        assert pipe.engine._changed.wait_for(lambda: not cache.pending, 60)
    assert len(list(folder.iterdir())) >= 3
    assert folder.stat().st_mode & 0o777 == 0o700
    again = mmspec.load("tiny-hybrid", "ngram", prefix_cache=MEMORY, prefix_cache_dir=folder)
    assert again.generate("Work out: 37 + 48", max_new_tokens=2).stats.num_cached_tokens > 8
    # At the end of a process too, of which no files are written twice.
    again.generate("Another question?", max_new_tokens=2)
    before = {path: path.stat().st_ino for path in folder.iterdir()}
    again.engine.close()
    after = {path: path.stat().st_ino for path in folder.iterdir()}
    assert len(after) > len(before)
    assert before.items() <= after.items()


def test_recurrent_states_are_kept_at_about_equal_distances(monkeypatch):
    def stops(ends, size=4):
        return {end: Stop((torch.zeros(size // 4),)) for end in ends}

    assert list(spaced(stops(range(10, 161, 10)))) == [*range(10, 161, 10)]
    assert list(spaced(stops(range(10, 171, 10)))) == [*range(20, 171, 10)]
    kept: dict[int, Stop] = {}
    for end in range(10, 2001, 10):
        kept = spaced({**kept, end: Stop()})
    ends = [0, *kept]
    assert len(kept) == 16
    assert ends[-2:] == [1990, 2000]
    assert max(after - before for before, after in pairwise(ends)) <= 2 * 2000 // 14 + 10
    for room, known in ((24, [20, 30, 40]), (0, [30, 40])):
        monkeypatch.setattr(core_target, "_MOST_BYTES", room)
        assert list(spaced(stops([10, 20, 30, 40], 8))) == known


def test_mistakes_are_named(tmp_path, monkeypatch):
    target, options = new_target(shared_model("llama")), {"prefix_cache": MEMORY}
    with pytest.raises(UserError, match="needs prefix_cache, memory for the states, to be > 0: got 0"):
        mmspec.Pipeline(target, prefix_cache_dir=tmp_path)
    with pytest.raises(UserError, match="prefix_cache_size must be > 0: got 0"):
        mmspec.Pipeline(target, **options, prefix_cache_dir=tmp_path, prefix_cache_size=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"must be a folder that can be made: got .*File exists: .*file"):
        mmspec.Pipeline(target, **options, prefix_cache_dir=tmp_path / "file")
    monkeypatch.setattr(target.model, "_tp_size", 2)
    with pytest.raises(UserError, match="prefix_cache_dir is read by one process: got a target that is sharded"):
        mmspec.Pipeline(target, **options, prefix_cache_dir=tmp_path)
