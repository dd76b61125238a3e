"""Training of the embedded vision-language model: tokenizer, labels, resuming, export."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

pytest.importorskip("accelerate")

from mmspec.errors import UserError
from mmspec.training.loss import IGNORE
from mmspec.training.optimisers import lr_factor
from mmspec.training.trainer import CHECKPOINT, LOG, MODEL, Trainer
from mmspec.vision.cli.models import tiny_llava
from mmspec.vision.scenes.conversations import one_image, several_images, video
from mmspec.vision.scenes.drawing import draw, picture
from mmspec.vision.scenes.reading import Mention, ReadEvent, read_events, read_objects
from mmspec.vision.scenes.scene import Item, Scene, Sign, sample_dense, sample_scene, seeded
from mmspec.vision.scenes.vocabulary import CHARACTERS, COLOURS, SHAPES
from mmspec.vision.training.accuracy import answer, match
from mmspec.vision.training.batches import (
    CONVERSATIONS,
    LISTS_UNTIL,
    POOL,
    ConversationSampler,
    collate,
    held_out_examples,
    render,
    to_pixels,
)
from mmspec.vision.training.network import TrainedLlava
from mmspec.vision.training.perception import TASKS, patch_labels, perception_accuracy, perception_loss
from mmspec.vision.training.task import TOWER_SHARE, Architecture, TowerTask, llava_config, llava_task, stages
from mmspec.vision.training.text import IMAGE_TOKENS, corpus, encode, make_processor, token_ids, train_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

SMALL = Architecture(32, 1, 2, 32, 1, 2, 1, 16, 32, 1024, 512)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    examples = [kind.make(seeded("train", index)) for index in range(150) for kind in CONVERSATIONS.values()]
    folder = tmp_path_factory.mktemp("run") / "tokenizer"
    train_tokenizer(corpus(examples), 512).save_pretrained(folder)
    return folder


@pytest.fixture
def start(tokenizer_folder: Path, tmp_path: Path) -> Callable[..., Iterator[tuple[str, Trainer]]]:
    """Starts or resumes the stages of a run of a tiny model in a named folder."""

    def run(name: str, **changes: Any) -> Iterator[tuple[str, Trainer]]:
        folder = tmp_path / name
        if not folder.exists():
            folder.mkdir()
            shutil.copytree(tokenizer_folder, folder / "tokenizer")
        settings = {"size": 0.1, "steps": (3, 6), "checkpoint_minutes": 0.0, "architecture": SMALL, **changes}
        return stages(folder, **settings)

    return run


@pytest.mark.parametrize(
    "text", ['It says "CAT7".', "  two\n\nlines\t", "Ünï 漢字 🎉 \u200d", "ABC 12 USER", "a\x00b", ""]
)
def test_the_tokenizer_round_trips_any_text(tokenizer_folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_signs_are_tokenized_character_by_character() -> None:
    # Texts that would make any free BPE merge these words.
    tokenizer = train_tokenizer(['The sign reads "GREEN". It says "RED" or "4207".'] * 50, 512)
    for text in ("RED", "GREEN", "4207", "QZX", "A", "7"):
        tokens = tokenizer.tokenize(f'The sign reads "{text}".')
        opening = next(index for index, token in enumerate(tokens) if token.endswith('"'))
        assert tokens[opening + 1 : opening + 1 + len(text)] == list(text)
    assert tokenizer.tokenize("USER: x ASSISTANT:")[0] == "USER:"


def test_encoding_marks_answers_and_expands_images(tokenizer_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    image = tokenizer.convert_tokens_to_ids("<image>")
    for example in (one_image(seeded("train", 3)), several_images(seeded("train", 3)), video(seeded("train", 3), 8)):
        ids, answers = encode(example, tokenizer)
        assert ids.count(image) == IMAGE_TOKENS * len(example.scenes)
        predicted = tokenizer.decode([token for token, is_answer in zip(ids, answers, strict=True) if is_answer])
        assert predicted == "".join(f" {text}</s>" for _, text in example.turns)


def test_training_prompt_equals_the_processors_prompt(tokenizer_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    processor = make_processor(tokenizer)
    example = next(e for e in (one_image(seeded("train", k)) for k in range(99)) if len(e.turns) > 1)
    chat = []
    for index, (user, reply) in enumerate(example.turns):
        parts = [{"type": "text", "text": user}] + [{"type": "image"}] * (index == 0)
        chat += [{"role": "user", "content": parts}, {"role": "assistant", "content": reply}]
    text = processor.apply_chat_template(chat)
    inputs = processor(text=text, images=[draw(example.scenes[0])], return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == encode(example, tokenizer)[0]
    prompt = processor.apply_chat_template(chat[:1], add_generation_prompt=True)
    assert text.startswith(prompt)
    assert prompt.endswith("ASSISTANT:")


def test_the_processors_pixels_equal_those_of_training(tokenizer_folder: Path) -> None:
    processor = make_processor(AutoTokenizer.from_pretrained(tokenizer_folder))
    scene = sample_scene(seeded("train", 2))
    pixels = processor.image_processor(draw(scene), return_tensors="pt")["pixel_values"]
    assert torch.allclose(pixels, to_pixels([draw(scene)]), atol=1e-6)
    large = processor.image_processor(draw(scene, 4), return_tensors="pt")["pixel_values"]
    assert (large - pixels).abs().mean() < 0.04


def test_patch_labels_cover_every_patch_of_a_cell() -> None:
    scene = Scene("brown", (Item("star", "pink", "large", 2, 1, 26),), Sign("A7", 0, 3, ((0, 0), (0, 0))))
    labels = dict(zip(TASKS, patch_labels(scene).reshape(-1, 6, 6), strict=True))
    here = np.zeros((6, 6), bool)
    here[4:6, 2:4] = True
    assert (labels["shape"] == np.where(here, SHAPES.index("star"), len(SHAPES))).all()
    assert (labels["colour"] == np.where(here, list(COLOURS).index("pink"), len(COLOURS))).all()
    assert labels["character"][0, 3:5].tolist() == [CHARACTERS.index("A"), CHARACTERS.index("7")]
    assert labels["place"][0, 3:5].tolist() == [0, 1]
    assert (labels["character"] < len(CHARACTERS)).sum() == 2
    assert (labels["background"] == 3).all()


def test_perception_loss_ignores_unlabelled_patches() -> None:
    scene, signs = sample_dense(seeded("train", 1))
    labels = torch.from_numpy(patch_labels(scene, signs))[None]
    perfect = [
        torch.nn.functional.one_hot(labels[:, k], classes).float() * 50 for k, classes in enumerate(TASKS.values())
    ]
    assert perception_loss(perfect, labels) < 1e-6
    assert set(perception_accuracy(perfect, labels).values()) == {1.0}
    assert perception_accuracy(perfect, torch.full_like(labels, IGNORE)) == {}
    wrong = [scores.roll(1, -1) for scores in perfect]
    assert perception_loss(wrong, labels) > 10
    assert perception_loss(wrong, torch.full_like(labels, IGNORE)) == 0


def test_a_conversation_sampler_resumes_at_any_step(tokenizer_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    whole = ConversationSampler(partial(encode, tokenizer=tokenizer), 0.1)
    # Pools of both curriculum stages: what a pool holds follows from the progress at its first step.
    progress = [0.9 * LISTS_UNTIL + 0.01 * step for step in range(2 * POOL)]
    states, in_order = [], []
    for value in progress:
        states.append(whole.state_dict())
        in_order.append([row.ids for row in whole.next(value)])
    for step in (POOL + 1, 2, POOL):
        resumed = ConversationSampler(partial(encode, tokenizer=tokenizer), 0.1)
        resumed.load_state_dict(states[step])
        assert [[row.ids for row in resumed.next(value)] for value in progress[step:]] == in_order[step:]
    assert in_order[0] != in_order[1]


def test_seeds_have_different_conversations(tokenizer_folder: Path) -> None:
    def ids(seed: int) -> list[list[int]]:
        sampler = ConversationSampler(partial(encode, tokenizer=tokenizer), 0.1, seed=seed)
        return [row.ids for _ in range(3) for row in sampler.next(0.9)]

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    first, again, other = ids(0), ids(0), ids(1)
    assert first == again
    assert sum(row in first for row in other) < len(other) / 2


def test_labels_are_the_next_tokens_of_answers(tokenizer_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    batch = collate(ConversationSampler(partial(encode, tokenizer=tokenizer), 0.1).next(0.5), tokenizer.pad_token_id)
    known = batch.labels != IGNORE
    assert known.any()
    assert batch.tokens.shape[1] % 16 == 0
    shifted = torch.cat([batch.tokens[:, 1:], torch.full((len(batch.tokens), 1), tokenizer.pad_token_id)], 1)
    ends = batch.labels == tokenizer.eos_token_id
    assert torch.equal(shifted[known & ~ends], batch.labels[known & ~ends])


def test_degraded_images_stay_close_to_the_scene() -> None:
    scene = sample_scene(seeded("train", 8))
    clean = draw(scene).astype(int)
    seen = [render(scene, seeded("train", index)) for index in range(60)]
    assert all(picture.shape == clean.shape and np.abs(picture - clean).mean() < 12 for picture in seen)
    assert 5 < sum(bool((picture == clean).all()) for picture in seen) < 58


def test_network_equals_transformers_own_forward(tokenizer_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(0)
    network = TrainedLlava(llava_config(SMALL, token_ids(tokenizer))).eval()
    batch = collate(
        held_out_examples(CONVERSATIONS["video4"], partial(encode, tokenizer=tokenizer), 3), tokenizer.pad_token_id
    )
    with torch.no_grad():
        ours = network(batch).metrics["language"]
        out = network.llava(input_ids=batch.tokens, pixel_values=batch.pixels)
        theirs = torch.nn.functional.cross_entropy(
            out.logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE
        )
    assert ours == pytest.approx(theirs.item(), abs=1e-5)


def test_optimisers_cover_every_trained_parameter_once(tokenizer_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    network = TrainedLlava(llava_config(SMALL, token_ids(tokenizer)))
    held = [id(parameter) for parameter in llava_task(network, tokenizer).optimisers.parameters]
    assert len(held) == len(set(held))
    assert set(held) == {id(parameter) for parameter in network.parameters()}
    tower = {id(p) for module in (network.llava.model.vision_tower, network.heads) for p in module.parameters()}
    assert {id(parameter) for parameter in TowerTask(network).optimisers.parameters} == tower


def test_learning_rate_warms_up_holds_and_decays_to_zero() -> None:
    assert lr_factor(0.0, 0, warmup=10, hold=0.5) == pytest.approx(0.1)
    assert lr_factor(0.4, 100, warmup=10, hold=0.5) == 1.0
    assert lr_factor(0.75, 100, warmup=10, hold=0.5) == pytest.approx(0.5)
    assert lr_factor(1.0, 100, warmup=10, hold=0.5) == 0.0


def train_all(runs: Iterator[tuple[str, Trainer]]) -> Trainer:
    for _, trainer in runs:
        trainer.train()
    return trainer


@pytest.mark.long
@pytest.mark.parametrize("killed_at", [[("tower", 2)], [("language", 1), ("language", 3)]])
def test_a_resumed_run_equals_an_uninterrupted_one(
    start: Callable[..., Iterator[tuple[str, Trainer]]], killed_at: list[tuple[str, int]]
) -> None:
    whole = train_all(start("whole"))

    def train_until(at: tuple[str, int]) -> None:
        for stage, trainer in start("killed"):

            def kill(stage: str = stage, trainer: Trainer = trainer) -> bool:
                if (stage, trainer.step) == at:
                    raise KeyboardInterrupt
                return False

            trainer.train(stop=kill)

    for at in killed_at:
        with pytest.raises(KeyboardInterrupt):
            train_until(at)
    stage, resumed = next(start("killed"))
    assert (stage, resumed.step) == killed_at[-1]
    resumed = train_all(start("killed"))
    for name, value in whole.task.network.state_dict().items():
        assert torch.equal(value, resumed.task.network.state_dict()[name]), name


def test_the_loss_falls_in_both_stages(start: Callable[..., Iterator[tuple[str, Trainer]]]) -> None:
    for stage, trainer in start("falls", steps=(20, 80), checkpoint_minutes=9.0):
        rows: list[dict] = []
        trainer.notify = rows.append
        trainer.train()
        losses = [row["loss"] for row in rows if row["event"] == "train"]
        assert np.mean(losses[-5:]) < 0.93 * losses[0], (stage, losses)
        first, last = (row for row in rows if row["event"] == "held-out")
        assert last["loss"] < 0.95 * first["loss"]
        kinds = {name.removesuffix(" loss") for name in last if name.endswith(" loss")}
        assert kinds == (set(CONVERSATIONS) if stage == "language" else set())
        assert len((trainer.folder / LOG).read_text().splitlines()) == len(rows)
        assert (trainer.folder / CHECKPOINT).exists()
        assert (trainer.folder / MODEL).exists() == (stage == "language")


def test_minutes_are_split_between_the_stages(start: Callable[..., Iterator[tuple[str, Trainer]]]) -> None:
    plans = [trainer.plan for _, trainer in start("split", steps=None, minutes=50.0)]
    assert [plan.minutes for plan in plans] == pytest.approx([50 * TOWER_SHARE, 50 * (1 - TOWER_SHARE)])
    with pytest.raises(UserError, match="one of steps and minutes: received steps=None, minutes=None"):
        next(start("neither", steps=None))


@pytest.mark.long
def test_the_command_builds_a_model_that_transformers_loads(tmp_path: Path, tokenizer_folder: Path) -> None:
    shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    options = ["--out", str(tmp_path), "--steps", "1", "2", "--size", "0.05", "--scenes", "0"]
    result = CliRunner().invoke(tiny_llava, options)
    assert result.exit_code == 0, result.output
    folder = tmp_path / MODEL
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert (folder / "model.safetensors").stat().st_size <= 9.5e6
    scene = picture(sample_scene(seeded("heldout", 0)), scale=4)
    model.generation_config.max_new_tokens = 5
    texts = answer(model, processor, ["Describe the image.", "Describe the video.", "Hi."], [[scene], [scene] * 4, []])
    assert len(texts) == 3


def test_objects_are_matched_to_their_mentions() -> None:
    items = (Item("star", "red", "small", 0, 0, 15), Item("ring", "blue", "small", 2, 2, 15))
    moved, other = Mention("red", "star", None, (1, 1)), Mention("green", "ring", None, (2, 2))
    assert list(match(items, [moved, other])) == [(items[0], moved), (items[1], other)]
    assert list(match(items, [])) == [(items[0], None), (items[1], None)]


def test_reading_parses_free_wording() -> None:
    text = 'There is a big violet hoop at the very centre; an orange disc in the upper left, and "A RED STAR".'
    assert read_objects(text)[0] == Mention("purple", "ring", "large", (1, 1))
    assert read_events("Then the violet disc slides to the left and ends in the upper left. A red star vanishes.") == [
        ReadEvent("move", "purple", "circle", (0, 0)),
        ReadEvent("vanish", "red", "star"),
    ]
