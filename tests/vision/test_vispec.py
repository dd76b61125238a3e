"""ViSpec drafters as published draft what their network says: trees against plain loops, image by image."""

import math

import pytest
import torch

from mmspec import SamplingParams
from mmspec.drafters.registry import make_drafter
from mmspec.vision.drafters.vispec import ViSpec
from tests.drafting import check_drafts, plain_layer, states_of
from tests.published import VISPEC, vispec_tensors, write
from tests.targets import prompt_of, row_of
from tests.tiny import shared_model
from tests.tiny.models import text_inputs, vision_inputs


def published(folder, name):
    config = VISPEC[name]
    tensors = vispec_tensors(config)
    drafter = make_drafter(str(write(folder, config, tensors, "bin")))
    assert isinstance(drafter, ViSpec)
    drafter.top_k = 3
    return drafter, tensors


def image_token(t, features, query):
    """What a query takes of an image's features, head by head."""
    heads, dim = t["imadpt.q"].shape[1:]
    keys, values = (features @ t[f"imadpt.{n}_proj.weight"].T + t.get(f"imadpt.{n}_proj.bias", 0.0) for n in "kv")
    read = []
    for head in range(heads):
        own = slice(head * dim, (head + 1) * dim)
        weights = (keys[:, own] @ t["imadpt.q"][query, head] / math.sqrt(dim)).softmax(0)
        read.append(weights @ values[:, own])
    return torch.cat(read) @ t["imadpt.o_proj.weight"].T


def plain_entries(t, hidden, embeds, visual):
    """Inputs of the layer, their positions, and the vector of the last image."""
    inputs, positions, vector, j = [], [], torch.zeros_like(embeds[0]), 0
    while j < len(embeds):
        if not visual[j]:
            inputs.append(fused(t, embeds[j], hidden[j], vector))
            positions.append(j)
            j += 1
            continue
        end = j
        while end < len(embeds) and visual[end]:
            end += 1
        inputs.append(image_token(t, embeds[j:end], 0))
        vector = image_token(t, embeds[j:end], 1)
        positions.append(end - 1)
        j = end
    return torch.stack(inputs), positions, vector


def fused(t, embed, state, vector):
    state = t["img_fc.weight"] @ torch.cat([state, vector]) + t["img_fc.bias"]
    return t["fc.weight"] @ torch.cat([embed, state]) + t["fc.bias"]


@torch.no_grad()
def plain_gain(drafter, t, target, hidden, embeds, visual, path):
    """Path probability of drafted tokens; the target has more of them than the drafter."""
    inputs, positions, vector = plain_entries(t, hidden[:-1], embeds[1:], visual[1:])
    gain = 1.0
    for token in path:
        state = plain_layer(drafter.network, inputs, positions)[-1]
        gain *= float(target.head(state)[:96].softmax(-1)[token])
        inputs = torch.cat([inputs, fused(t, target.embed(torch.tensor(token)), state, vector)[None]])
        positions = [*positions, positions[-1] + 1]
    return gain


def check(model, inputs, drafter, tensors, **asked):
    rows = [row_of(inputs, b) for b in range(inputs["input_ids"].shape[0])]

    def gains(target, b, said, paths):
        hidden, embeds = states_of(model, rows[b], said)
        visual = torch.zeros(len(embeds), dtype=torch.bool)
        marks = target.visual(prompt_of({**inputs, "input_ids": rows[b]["input_ids"]}))
        visual[: marks.shape[1]] = marks[0]
        return [plain_gain(drafter, tensors, target, hidden, embeds, visual, path) for path in paths]

    return check_drafts(model, inputs, drafter, gains, **asked)


@pytest.mark.parametrize("name", VISPEC)
@pytest.mark.parametrize(("batch", "images"), [(1, 1), (1, 2), (3, 1)])
def test_trees_of_images(name, batch, images, tmp_path):
    drafter, tensors = published(tmp_path, name)
    check(shared_model(name), vision_inputs(name, batch, images), drafter, tensors, skip=(1, 4), new=8)


@pytest.mark.parametrize("name", ["llava_next", "qwen2_5_vl"])
def test_trees_without_an_image(name, tmp_path):
    drafter, tensors = published(tmp_path, name)
    check(shared_model(name), text_inputs(3), drafter, tensors, new=8)
    check(shared_model(name), vision_inputs(name), drafter, tensors, new=4)


def test_trees_while_sampling(tmp_path):
    drafter, tensors = published(tmp_path, "llava_next")
    params = SamplingParams(temperature=1.0)
    check(shared_model("llava_next"), vision_inputs("llava_next", 2), drafter, tensors, params=params, new=8)
