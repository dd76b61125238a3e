"""`mmspec train make-data`: the target's own answers, turn after turn, and runs that were killed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from PIL import Image

import mmspec
from mmspec.distil import data
from mmspec.errors import UserError
from tests.standin import save_llava, save_text_model
from vision.distil.answering import AnswerGenerator, PendingConversation, without_answers
from vision.distil.make_data import Dataset, make_data
from vision.distil.scenes import KINDS, scene_conversations
from vision.scenes.conversations import video
from vision.scenes.scene import seeded

NEW = ("--max-new-tokens", "7")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("llava")))


@pytest.fixture(scope="module")
def pipe(model):
    return mmspec.load(model, drafter=None, device="cpu")


def run(*arguments):
    result = CliRunner().invoke(make_data, list(map(str, arguments)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def records(out):
    return [json.loads(line) for line in (out / "data.jsonl").read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path):
    """Questions with answers that the target is to replace."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name in "ab":
        Image.new("RGB", (20, 20), {"a": "red", "b": "blue"}[name]).save(folder / f"{name}.png")
    talks = [
        {"id": "one", "image": "a.png", "said": ["<image>\nWhat?", "x" * 40, "Sure?", "y", "Why?", "z"]},
        {"id": "two", "image": ["a.png", "b.png"], "said": ["Compare.", "x"]},
        {"id": "words", "said": ["Hello", "x", "And you?"]},
        {"id": "later", "image": "b.png", "said": ["Hi", "x", "<image>\nSee?", "x"]},
    ]
    for talk in talks:
        said = talk.pop("said")
        talk["conversations"] = [{"from": ("human", "gpt")[k % 2], "value": value} for k, value in enumerate(said)]
    path = folder / "p.json"
    path.write_text(json.dumps(talks))
    return path


def test_answers_are_the_target_s_own_turn_after_turn(model, pipe, prompts, tmp_path):
    out = tmp_path / "out"
    summary = run("--target", model, "--prompts", prompts, "--out", out, "--batch", 2, *NEW)
    assert summary["conversations"] == 4
    assert summary["answers"] == 8
    written = {record["id"]: record for record in records(out)}
    asked = {found.id: found for found in data.read(prompts, answered=False).conversations}
    assert set(written) == set(asked)
    for found in data.read(out / "data.jsonl").conversations:
        questions = [m["content"] for m in asked[found.id].messages if m["role"] == "user"]
        messages = []
        for number, question in enumerate(questions):
            messages.append({"role": "user", "content": question})
            answer = pipe.generate(messages, max_new_tokens=7)
            assert found.answers[number] == tuple(answer.token_ids)
            assert found.messages[2 * number + 1]["content"] == answer.text.strip()
            messages.append({"role": "assistant", "content": answer.text.strip()})
        # The media are found from where the file lies.
        for item, source in zip(found.media, asked[found.id].media, strict=True):
            assert Path(item["path"]).resolve() == Path(source["path"]).resolve()
    assert summary["tokens"] == sum(len(t["token_ids"]) for r in written.values() for t in r["conversations"][1::2])


def test_scenes(model, tmp_path):
    out = tmp_path / "out"
    summary = run("--target", model, "--scenes", 12, "--first", 30, "--out", out, "--batch", 4, *NEW)
    assert summary["conversations"] == 12
    found = data.read(out / "data.jsonl").conversations
    jobs = {job.id: job for job in scene_conversations(range(30, 42), tmp_path / "again")}
    assert {one.id for one in found} == set(jobs)
    for one in found:
        assert len(one.answers) == len(jobs[one.id].questions)
        for item in one.media:
            path = Path(item["path"])
            assert path.parent.resolve() == (out / "images").resolve()
            assert path.read_bytes() == (tmp_path / "again/images" / path.name).read_bytes()
    assert not list(out.glob("**/*.part"))


def test_kinds_of_scenes(tmp_path):
    jobs = list(scene_conversations(range(150), tmp_path))
    media = {
        kind: {
            len([i for i in job.questions[0] if i["type"] == "image"]) for job in jobs if job.id.startswith(f"{kind}-")
        }
        for kind in KINDS
    }
    assert media == {"image": {1}, "questions": {1}, "several": {2, 3}, "video4": {4}, "video8": {8}, "words": {0}}
    assert max(len(job.questions) for job in jobs) > 3
    clip = next(job for job in jobs if job.id.startswith("video4"))
    example = video(seeded("train", int(clip.id.split("-")[1])), 4)
    assert clip.questions[0][-1]["text"] == example.turns[0][0]


def test_killed_run_goes_on(model, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    arguments = ("--target", model, "--scenes", 10, "--batch", 3, *NEW)
    run(*arguments, "--out", whole)
    run(*arguments[:3], 6, *arguments[4:], "--out", parts)
    path = parts / "data.jsonl"
    path.write_bytes(path.read_bytes()[:-25])  # killed while writing
    kept = path.read_text().splitlines()[:-1]
    run(*arguments, "--out", parts)
    assert path.read_text().splitlines()[: len(kept)] == kept
    assert sorted(records(parts), key=lambda r: r["id"]) == sorted(records(whole), key=lambda r: r["id"])
    before = path.read_bytes()
    assert run(*arguments, "--out", parts)["answers"] == 0
    assert path.read_bytes() == before


def test_other_settings_are_refused(model, tmp_path):
    arguments = ("--target", model, "--scenes", 2, "--out", tmp_path / "out")
    run(*arguments, "--max-new-tokens", 3)
    with pytest.raises(UserError, match="holds answers made with"):
        run(*arguments, "--max-new-tokens", 4)
    run(*arguments, "--max-new-tokens", 4, "--no-resume")
    assert len(records(tmp_path / "out")) == 2


def test_cut_answers_carry_no_end(model, tmp_path):
    run("--target", model, "--scenes", 6, "--out", tmp_path / "out", "--max-new-tokens", 3)
    ids = [turn["token_ids"] for record in records(tmp_path / "out") for turn in record["conversations"][1::2]]
    assert {len(answer) for answer in ids} == {3}
    assert any(answer[-1] != 2 for answer in ids)


def test_sampling_depends_on_the_seed(model, tmp_path):
    def answers(name, seed):
        out = tmp_path / name
        run("--target", model, "--scenes", 4, "--out", out, "--temperature", 1.5, "--seed", seed, *NEW)
        return [[turn.get("token_ids") for turn in record["conversations"]] for record in records(out)]

    assert answers("a", 1) == answers("b", 1) != answers("c", 2)


def test_every_batch_is_sampled_from_a_seed_of_its_own():
    """Batches of equal seeds would draw alike: another seed for each batch, turn and seed of the run."""

    class Recorded:
        target = None

        def __init__(self):
            self.seeds = []

        def generate_batch(self, requests, seed, **keywords):
            self.seeds.append(seed)
            return [SimpleNamespace(text="yes", token_ids=[1])] * len(requests)

    def seeds(seed):
        pipe = Recorded()
        jobs = [PendingConversation(str(k), [[{"type": "text", "text": "What?"}]] * 2, [1, 1]) for k in range(6)]
        assert sum(map(len, AnswerGenerator(pipe, 2, seed, {}).run(jobs))) == 6
        return pipe.seeds

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 2 * len(seeds(1)) == 12


def test_text_targets(tmp_path, prompts):
    folder = save_text_model(tmp_path / "text")
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    (folder / "chat_template.jinja").write_text(template)
    talks = [record for record in json.loads(prompts.read_text()) if record["id"] == "words"]
    prompts.write_text(json.dumps(talks))
    run("--target", folder, "--prompts", prompts, "--out", tmp_path / "out", *NEW)
    (found,) = data.read(tmp_path / "out/data.jsonl").conversations
    assert len(found.answers) == 2


def test_conversations_that_cannot_be_answered_are_left_out(model, prompts, tmp_path):
    (prompts.parent / "b.png").unlink()
    out = tmp_path / "out"
    run("--target", model, "--prompts", prompts, "--out", out, *NEW)
    found = {record["id"]: len(record["conversations"]) for record in records(out)}
    assert found == {"one": 6, "words": 4, "later": 2}
    (prompts.parent / "a.png").unlink()
    only = [record for record in json.loads(prompts.read_text()) if record["id"] == "one"]
    prompts.write_text(json.dumps(only))
    with pytest.raises(UserError, match=r"one: .*a\.png"):
        run("--target", model, "--prompts", prompts, "--out", tmp_path / "none", *NEW)


def test_sources(model, prompts, tmp_path):
    with pytest.raises(UserError, match="either --scenes or --prompts, received neither"):
        run("--target", model, "--out", tmp_path)
    with pytest.raises(UserError, match="received both"):
        run("--target", model, "--out", tmp_path, "--scenes", 1, "--prompts", prompts)
    (tmp_path / "data.jsonl").write_text("nonsense\n")
    with pytest.raises(UserError, match=r"data\.jsonl:1: expected a record with an id"):
        Dataset(tmp_path, {}, resume=True)


def test_pictures_in_memory_and_system_messages(pipe):
    picture = {"type": "image", "image": Image.new("RGB", (9, 9), "green")}
    job = PendingConversation("x", [[picture, {"type": "text", "text": "What?"}]], [0])
    answering = AnswerGenerator(pipe, 2, 0, {"max_new_tokens": 5})
    ((found,),) = answering.run([job])
    assert len(found.answers[0]) == 5
    system = {"role": "system", "content": "Be brief."}
    asked = data.Conversation("y", (system, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}), ())
    ((found,),) = answering.run([without_answers(asked)])
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant"]


def test_like_questions_are_answered_together(pipe):
    def job(number, media, length):
        items = [{"type": "image", "image": Image.new("RGB", (9, 9))}] * media
        return PendingConversation(str(number), [[*items, {"type": "text", "text": "What?"}]], [length])

    seen = []

    class Recording(AnswerGenerator):
        def _answer(self, group):
            seen.append([job.id for job in group])
            super()._answer(group)

    mixed = [
        job(n, media, length) for n, (media, length) in enumerate([(0, 50), (1, 5), (0, 3), (1, 60), (0, 4), (1, 6)])
    ]
    list(Recording(pipe, 2, 0, {"max_new_tokens": 2}).run(mixed))
    assert seen == [["2", "4"], ["0", "1"], ["5", "3"]]


def test_scenes_can_keep_their_own_answers(tmp_path):
    result = CliRunner().invoke(make_data, ["--as-told", "--scenes", "12", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = data.read(tmp_path / "data.jsonl", None).conversations
    jobs = list(scene_conversations(range(12), tmp_path))
    assert [one.id for one in found] == [job.id for job in jobs]
    for one, job in zip(found, jobs, strict=True):
        assert [m["content"] for m in one.messages if m["role"] == "assistant"] == list(job.known)
        assert one.answers == (None,) * len(job.known)
    prompts = str(tmp_path / "data.jsonl")
    with pytest.raises(UserError, match="expected --scenes, received --prompts"):
        make_data.main(["--as-told", "--prompts", prompts, "--out", str(tmp_path)], standalone_mode=False)
