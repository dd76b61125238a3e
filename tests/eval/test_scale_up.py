"""Scaled-up models keep the small model's function and have the memory and compute of their shape."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

import mmspec
from mmspec.core.target import Prompt
from mmspec.drafters.registry import make_drafter
from mmspec.errors import UserError
from mmspec.eval import speed
from mmspec.eval.harness.prompts import held_out_requests, warm_up_requests
from mmspec.eval.scale_up.drafters import draft_vocabulary, prompt_tokens, scale_up_drafter, scale_up_msd
from mmspec.eval.scale_up.models import (
    SHAPES,
    MambaShape,
    Shape,
    grow_heads,
    scale_up,
    shape_of,
)
from mmspec.pipeline import Pipeline
from mmspec.ssm.drafters.mamba import Mamba
from mmspec.vision.drafters.msd import Flash
from tests.tiny.models import mamba_network, msd_network, text_model

WIDE = Shape(416, 500, 11, 8, 8, 128, 1500)  # heads twice as large, one KV head each
GROUPED = Shape(320, 400, 9, 16, 4, 64, 896)  # larger query groups, same vocabulary


@pytest.fixture(scope="module")
def small():
    return mmspec.load("tiny-llava", drafter=None, dtype="float32")


@pytest.fixture(scope="module")
def big(small):
    """One model per shape, never modified."""
    return {shape: scale_up(small.model, shape, dtype=torch.float32) for shape in (WIDE, GROUPED)}


@pytest.fixture(scope="module")
def request_():
    return warm_up_requests(1, visual=True)[0]


class RecordingDrafter:
    """A drafter that keeps all drafted trees."""

    def __init__(self, drafter):
        self.drafter, self.trees = drafter, []
        self.features = getattr(drafter, "features", ())
        for name in ("attach", "begin", "select", "observe"):
            setattr(self, name, getattr(drafter, name))

    def propose(self, token, budget):
        tree = self.drafter.propose(token, budget)
        self.trees.append((tree.tokens.tolist(), tree.parents.tolist()))
        return tree


def decode(pipe, model, drafter, request, tokens=24):
    """Tokens and trees of an answer of ``model``."""
    recorder = RecordingDrafter(drafter)
    own = Pipeline(type(pipe.target)(model), pipe.processor, recorder)
    return own.generate(**request, max_new_tokens=tokens, nodes=12).token_ids, recorder.trees


@pytest.mark.parametrize("shape", [WIDE, GROUPED], ids=["wide", "grouped"])
def test_a_llava_keeps_its_function(small, big, request_, shape):
    model = big[shape]
    assert shape_of(model.config.text_config) == shape
    prompt = small.encode([request_])
    inputs = {"input_ids": prompt.input_ids, **prompt.inputs}
    with torch.inference_mode():
        was, now = small.model(**inputs), model(**inputs)
    vocab = small.model.config.text_config.vocab_size
    torch.testing.assert_close(now.logits[..., :vocab], was.logits, atol=3e-5, rtol=1e-5)
    # Added tokens copy one that is never emitted.
    added, filler = now.logits[..., vocab:], was.logits[..., :1]
    torch.testing.assert_close(added, filler.expand_as(added), atol=3e-5, rtol=1e-5)
    assert (was.logits[:, -1].amax(-1) - filler[:, -1, 0] > 15).all()
    answers = [m.generate(**inputs, max_new_tokens=24, do_sample=False) for m in (small.model, model)]
    assert torch.equal(*answers)


HYBRID = Shape(192, 100, 12, 8, 4, 24, 150, MambaShape(16, 24, 16, 4, (2, 7, 9)))


@pytest.mark.parametrize("name", ["bamba", "bamba-limits"])
def test_a_hybrid_keeps_its_function(name):
    model = text_model(name)
    wide = scale_up(model, HYBRID, dtype=torch.float32)
    assert shape_of(wide.config) == HYBRID
    ids = torch.randint(3, 90, (2, 19), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        was, now = model(ids).logits, wide(ids).logits
    torch.testing.assert_close(now[..., :101], was, atol=2e-4, rtol=1e-5)
    # Added tokens copy token 0, which this untrained model may emit.
    same = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [0, *range(101, 150)]}
    answers = [m.generate(ids, **same) for m in (model, wide)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", ["msd", "auto"])
def test_an_embedded_drafter_drafts_the_same_trees(small, big, request_, name):
    drafter = make_drafter(name, small.model.config.name_or_path)
    wide = scale_up_msd(drafter, small.model, big[WIDE])
    assert len(wide.draft_ids) == WIDE.vocab // 4
    shape = wide.network.config
    assert (shape.hidden_size, shape.mlp, shape.heads, shape.kv_heads) == (416, 250, 4, 4)
    was = decode(small, small.model, drafter, request_)
    now = decode(small, big[WIDE], wide, request_)
    assert was == now
    assert len(was[1]) < 12  # few steps: drafts are accepted


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"slots": 3},
        {"slots": 2, "latents": 5, "visual_states": True},
        {"reads": [1, 6], "norm_output": True, "confidence": True},
        {"slots": 5, "rank": 20, "head": 300, "confidence": True, "hide_visual": True},
    ],
    ids=str,
)
def test_random_networks_draft_the_same_trees(small, big, request_, settings):
    network = msd_network(small.model, input_norm=True, qkv_bias=True, mlp=80, norm_eps=0.1, **settings)
    for name, parameter in network.named_parameters():
        parameter.data.normal_(std=1.0 if "latents" in name or "norm" in name else 0.1)
    drafter = Flash(network, torch.arange(300), top_k=3, depth=5)
    wide = scale_up_msd(drafter, small.model, big[GROUPED])
    assert decode(small, small.model, drafter, request_, 8) == decode(small, big[GROUPED], wide, request_, 8)


def test_other_networks_are_refused(small, big):
    with pytest.raises(UserError, match="only MSD's and FLASH's networks can be scaled up: got a Mamba"):
        scale_up_drafter(Mamba(mamba_network()), small.model, big[WIDE])


def test_a_large_draft_vocabulary_is_reduced():
    small = Shape(8, 8, 1, 1, 1, 8, 100)
    assert draft_vocabulary(None, small, replace(small, vocab=40_000)) is None
    assert draft_vocabulary(None, small, replace(small, vocab=80_000)).tolist() == list(range(20_000))
    some = draft_vocabulary(torch.tensor([7, 3]), small, replace(small, vocab=120))
    assert some.tolist() == [7, 3, *range(100, 120)][:30]


def test_weights_share_no_memory_and_are_not_zero(big):
    model = big[WIDE]
    seen = set()
    for name, parameter in model.model.language_model.named_parameters():
        assert parameter.is_contiguous()
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4
        assert parameter.data_ptr() not in seen
        seen.add(parameter.data_ptr())
        empty = (parameter == 0).float().mean()
        # Added weights that write to the stream are zero; so are queries at added features of copied heads.
        limit = {"o_proj": 1, "down_proj": 1, "embed_tokens": 1, "q_proj": 0.3}.get(name.split(".")[-2], 0.01)
        assert empty <= limit, name


def test_added_layers_and_heads_compute_something(small, big, request_):
    model, seen = big[WIDE], []
    layers = model.model.language_model.layers
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for layer in layers
    ]
    small.target.__class__(model).prefill(small.encode([request_]), 1)
    for handle in handles:
        handle.remove()
    assert len(seen) == WIDE.layers
    assert all(read.unflatten(-1, (WIDE.heads, -1)).abs().amax((0, 1, 3)).min() > 1e-4 for read in seen)


def test_a_clip_fills_the_cache(small, monkeypatch):
    """As many KV slots as claimed, without masked tokens; 16 frames fill at least the 576 of an image of LLaVA-1.5."""
    (clip,) = held_out_requests(0, 1, 16)
    target, prompt = small.target.fork(), small.encode([clip])
    assert prompt_tokens(small, clip) == prompt.input_ids.shape[1] > 16 * 36
    pad = torch.nn.functional.pad
    masked = Prompt(pad(prompt.input_ids, (9, 0)), pad(torch.ones_like(prompt.input_ids), (9, 0)), prompt.inputs)
    monkeypatch.setattr(small, "encode", lambda requests: masked)
    target.prefill(masked, 1)
    assert target.runner.cache.lengths == [prompt_tokens(small, clip)] == [prompt.input_ids.shape[1]]


def test_a_query_group_may_need_several_big_groups():
    small = Shape(8, 8, 1, 6, 2, 4, 8)
    heads = grow_heads(small, replace(small, heads=10, kv_heads=5, head_dim=8))
    # Three heads of a group need two groups of two; rotary frequency i becomes 2 * i.
    assert heads.keys.source.view(5, 8)[:, 0].tolist() == [0, 0, 4, 4, -1]
    assert heads.queries.source.view(10, 8)[:, 0].tolist() == [0, 4, 8, -1, 12, 16, 20, -1, -1, -1]
    assert heads.queries.source[:8].tolist() == [0, -1, 1, -1, 2, -1, 3, -1]
    assert heads.output.source[:8].tolist() == [0, 1, 2, 3, -1, -1, -1, -1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden": 100}, "hidden must be at least 192, got 100"),
        ({"layers": 7}, "8 layers must fit"),
        ({"kv_heads": 1}, "at least 2 key-value heads"),
        ({"head_dim": 96}, "multiple of 64"),
        ({"mamba": MambaShape(4, 8, 8, 1, ())}, "must be that of a llama"),
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(small, changes, said):
    with pytest.raises(UserError, match=said):
        scale_up(small.model, replace(WIDE, **changes))


def test_the_command(monkeypatch, tmp_path):
    monkeypatch.setitem(SHAPES, "test", replace(GROUPED, vocab=1000))
    monkeypatch.setattr(speed.main.params[1].type, "choices", ["test"])
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path))
    line = "--shape test --nodes 6 --drafters msd --frames 2 --images 0 --several 1 --videos 1 --warm-up 1 --rounds 1"
    run = CliRunner().invoke(speed.main, [*line.split(), "--max-new-tokens", "8", "--dtype", "float32"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.output.splitlines()[-1])
    assert (found["shape"], found["parameters"] > 10_000_000) == ("test", True)
    assert [method["method"] for method in found["methods"]][2:] == ["msd, 6 nodes", "msd, adaptive"]
    assert all(method["equal"] == 2 and method["decoding_ratio_plain"] > 0 for method in found["methods"])
