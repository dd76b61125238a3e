"""Local benchmark files in their own fields, generated tasks, and one-line errors."""

import ast
import difflib
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from PIL import Image

from mmspec.errors import UserError
from mmspec.eval.suite.tasks import GROUPS, TASKS, local_rows, select_tasks
from mmspec.vision.images import load_image

try:
    import datasets
except ImportError:
    datasets = None
else:
    TEXT, PICTURE = datasets.Value("string"), datasets.Image()
needs = pytest.mark.skipif(datasets is None, reason="needs datasets: pip install -e '.[eval]'")


def through_datasets(test):
    return needs(pytest.mark.filterwarnings("ignore")(test))


ROWS = {
    "coco": {"image": "a.png", "answer": ["A dog.", "One dog."], "id": 7},
    "flickr30k": {"image": "a.png", "caption": ["A dog."], "img_id": 3},
    "nocaps": {"image": "a", "annotations_captions": ["A dog."], "image_id": 3},
    "vqav2": {"image": "a.png", "question": "Why?", "answers": ["yes", "no"], "question_id": 5, "question_type": "how"},
    "gqa": {"image": "a.png", "question": "Why?", "answer": "tree"},
    "textvqa": {"image": "a.png", "question": "Why?", "answers": ["x", "y"]},
    "vizwiz": {"image": "a.png", "question": "Why?", "answers": ["x"], "category": "other"},
    "chartqa": {"image": "a.png", "question": "Why?", "answer": "12", "type": "human"},
    "docvqa": {"image": "a.png", "question": "Why?", "answers": [{"answer": "x"}, {"answer": "y"}]},
    "activitynet-qa": {"video_name": "clip", "question": "who runs", "answer": "man", "type": 0},
    "msvd-qa": {"video": "clip.mp4", "question": " who RUNS?? ", "answer": "man"},
    "ai2d": {"image": "a.png", "question": "Which?", "options": ["sun", "moon"], "answer": "1", "subject": 0},
    "scienceqa": {"image": None, "question": "Which?", "choices": ["sun", "moon"], "answer": 0, "hint": "Look."},
    "mmmu": {"image_1": "a.png", "image_2": "a.png", "question": "Which?", "options": "['sun', 'moon']", "answer": "B"},
    "pope": {"image": "a.png", "question": "Is it?", "answer": "yes", "category": "popular"},
    "mme": {"image": "a.png", "question": "Is it? Please answer yes or no.", "answer": "Yes", "category": "count"},
    "mm-vet": {"image": "a.png", "question": "Which?", "answer": "sun<OR>moon", "capability": "ocr"},
    "llava-bench": {"image": "a.png", "question": "Which?", "gpt_answer": "The sun.", "category": "conv"},
    "video-detail": {"video_name": "clip", "question": "Describe.", "answer": "A man."},
    "mmspec-benchmark": {"id": "g1", "image": "a.png", "turns": ["One?", "Two?"], "category": "gqa", "topic": "x"},
    "mt-bench": {"prompt_id": 3, "prompt": ["One?", "Two?"], "category": "math"},
    "gsm8k": {"question": "How many?", "answer": "Two and two.\n#### 1,234"},
    "humaneval": {"task_id": "H/0", "prompt": "def f():"},
    "spec-bench": {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]},
    "speed-bench": {"question_id": "q1", "category": "rag", "turns": ["One?", "Two?"], "source": "s"},
}


SHORT = "\nAnswer the question using a single word or phrase."
WHY, RUNS, DOG = f"Why?{SHORT}", f"Who runs?{SHORT}", ("A dog.",)
CAPTION = "Provide a one-sentence caption for the provided image."
WHICH = "Which?\nA. sun\nB. moon\nAnswer with the option's letter from the given choices directly."
FOUR = "How many?\nThink step by step and end with the number that answers the question."
READ = {  # limit of tokens, id of the first row, its questions, references, category and metadata
    "coco": (64, "0:7", [CAPTION], ("A dog.", "One dog."), "", None),
    "flickr30k": (64, "0:3", [CAPTION], DOG, "", None),
    "nocaps": (64, "0:3", [CAPTION], DOG, "", None),
    "vqav2": (32, "0:5", [WHY], ("yes", "no"), "how", None),
    "gqa": (32, "0", [WHY], ("tree",), "", None),
    "textvqa": (32, "0", [WHY], ("x", "y"), "", None),
    "vizwiz": (32, "0", [WHY], ("x",), "other", None),
    "chartqa": (32, "0", [WHY], ("12",), "human", None),
    "docvqa": (32, "0", [WHY], ("x", "y"), "", None),
    "activitynet-qa": (32, "0", [RUNS], ("man",), "0", None),
    "msvd-qa": (32, "0", [RUNS], ("man",), "", None),
    "ai2d": (16, "0", [WHICH], ("B",), "0", ["sun", "moon"]),
    "scienceqa": (16, "0", [f"Context: Look.\n{WHICH}"], ("A",), "", ["sun", "moon"]),
    "mmmu": (32, "0", [WHICH], ("B",), "", ["sun", "moon"]),
    "pope": (16, "0", [f"Is it?{SHORT}"], ("yes",), "popular", None),
    "mme": (16, "0", [f"Is it?{SHORT}"], ("Yes",), "count", "0"),
    "mm-vet": (256, "0", ["Which?"], ("sun<OR>moon",), "ocr", None),
    "llava-bench": (512, "0", ["Which?"], ("The sun.",), "conv", None),
    "video-detail": (512, "0", ["Describe."], ("A man.",), "", None),
    "mmspec-benchmark": (512, "0:g1", ["One?", "Two?"], None, "x", None),  # its topic
    "mt-bench": (512, "0:3", ["One?", "Two?"], None, "math", None),
    "gsm8k": (320, "0", [FOUR], ("1,234",), "math", None),
    "humaneval": (384, "0:H/0", ["Complete this Python function.\n\ndef f():"], None, "coding", None),
    "spec-bench": (512, "0:81", ["One?", "Two?"], None, "writing", None),
    "speed-bench": (512, "0:q1", ["One?", "Two?"], None, "rag", None),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, row in ROWS.items():
        (folder / name / "images").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / name / "images" / "a.png")
        (folder / name / "clip.mp4").write_bytes(b"clip")
        (folder / name / "part.jsonl").write_text("\n".join([json.dumps(row), "", json.dumps(row)]))
    return folder


def test_every_benchmark_has_a_row_here():
    assert set(ROWS) == {task.name for task in TASKS.values() if task.rows is None and task.local is local_rows}


@pytest.mark.parametrize("name", ROWS)
def test_a_benchmark_is_read_from_its_own_fields(data, name):
    task, (limit, title, questions, references, category, metadata) = TASKS[name], READ[name]
    samples = task.samples(data, None)
    one, conversation = samples[0], samples[0].conversation
    assert (task.max_new_tokens, one.id, one.category, one.metadata) == (limit, title, category, metadata)
    assert (list(conversation.questions), one.references) == (questions, (references,) if references else ())
    assert (len(samples), samples[1].id) == (2, "1" + title[1:] if ":" in title else "1")
    assert task.samples(data, 1)[0].id == title.removeprefix("0:")  # rows of one id are numbered
    seen = [*conversation.images, *conversation.videos]
    assert bool(seen) == (task.visual and name != "scienceqa")
    assert all(str(data / name) in path for path in seen)
    assert len(seen) == (2 if name == "mmmu" else len(set(seen)))
    if task.score is None or name in ("coco", "flickr30k", "nocaps"):
        return
    right = [(sample, [sample.references[0][0]]) for sample in samples]
    score = next(iter(task.score(right).values()))
    assert score in (1.0, 200.0, pytest.approx(1.0)) or name in ("vqav2", "textvqa")
    wrong = [(sample, ["something else entirely"]) for sample in samples]
    assert next(iter(task.score(wrong).values())) == 0


def test_pages_of_a_folder(tmp_path):
    folder = tmp_path / "documents"
    with pytest.raises(UserError, match=r"^documents: expected images \(.jpg, .*\) in .*/documents/, there are none$"):
        TASKS["documents"].samples(tmp_path, None)
    folder.mkdir()
    for name in ("b.JPG", "a.png"):
        Image.new("RGB", (4, 4)).save(folder / name)
    (folder / "b.txt").write_text("words")
    (folder / "notes.txt").write_text("of no page")
    samples = TASKS["documents"].samples(tmp_path, None)
    assert [(sample.id, sample.category) for sample in samples] == [("a", "without a text"), ("b", "with a text")]
    assert [sample.conversation.images for sample in samples] == [(f"{folder}/a.png",), (f"{folder}/b.JPG",)]
    assert [sample.id for sample in TASKS["documents"].samples(tmp_path, 1)] == ["a"]


MMSPEC = ROWS["mmspec-benchmark"]
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\nYou are"


def without(field):
    kept = {name: value for name, value in MMSPEC.items() if name != field}
    message = rf"^.*mmspec-benchmark.jsonl, line 2: expected a field '{field}', received {', '.join(kept)}$"
    return "mmspec-benchmark", kept, message


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        *map(without, ("turns", "image", "topic")),
        ("mmspec-benchmark", MMSPEC | {"image": None}, r"^.*line 2: expected an image, received none$"),
        ("mmspec-benchmark", MMSPEC | {"image": "b.png"}, r"^.*line 2: expected the file b.png in .* or its images/"),
        ("speed-bench", ROWS["speed-bench"] | {"turns": [PLACEHOLDER, "Two?"]},
         r"line 2: expected texts from SPEED-Bench's prepare_data.py, received its placeholder"),
        ("pope", "{", r"pope.jsonl, line 2: expected a JSON object, received '{'"),
        ("pope", {"image": "a.png"}, r"line 2: expected a field 'question', received image"),
    ],
)  # fmt: skip
def test_broken_rows_are_named(tmp_path, name, row, message):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    broken = row if isinstance(row, str) else json.dumps(row)
    (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(ROWS[name])}\n{broken}\n")
    with pytest.raises(UserError, match=message):
        TASKS[name].samples(tmp_path, None)
    assert len(TASKS[name].samples(tmp_path, 1)) == 1
    (tmp_path / f"{name}.jsonl").write_text("\n")
    with pytest.raises(UserError, match=f"{name}: expected at least one sample, received none"):
        TASKS[name].samples(tmp_path, None)


def test_missing_data_is_reported(tmp_path, monkeypatch):
    def load_dataset(*given, **options):
        raise ConnectionError("no route to host\nmore")

    for module, data, name, message in (
        (None, tmp_path, "pope", r"pope: expected .*pope.jsonl or .jsonl files in .*pope/, there are none"),
        (None, None, "mmspec-benchmark", r"expected --data FOLDER with mmspec-benchmark.jsonl"),
        (None, None, "gqa", r"gqa: expected --data FOLDER with local files, or the package datasets"),
        (
            SimpleNamespace(load_dataset=load_dataset),
            None,
            "pope",
            r"read .*POPE through datasets, .*: no route to host$",
        ),
    ):
        monkeypatch.setitem(sys.modules, "datasets", module)
        with pytest.raises(UserError, match=message):
            TASKS[name].samples(data, 1)


@pytest.mark.parametrize("name", GROUPS["embedded"])
def test_embedded_tasks_are_whole(name):
    task = TASKS[name]
    samples = task.samples(None, None)
    assert len({sample.id for sample in samples}) == len(samples) == 64
    assert [sample.id for sample in task.samples(None, 2)] == [sample.id for sample in samples[:2]]
    for sample in samples:
        conversation = sample.conversation
        assert task.visual == bool([*conversation.images, *conversation.videos])
        shown = [*conversation.images, *(frame for video in conversation.videos for frame in video.frames)]
        assert {image.size for image in shown} <= {(96, 96)}
        assert not shown or any(len(image.getcolors(10_000)) > 1 for image in shown)
    assert name != "scenes-charts" or all(len(one.metadata) == 8 for one in samples)  # options
    if samples[0].references:
        right = [(one, [(accepted or ("",))[0] for accepted in one.references]) for one in samples]
    else:
        right = [(one, [". ".join(wordings[-1] for wordings in one.metadata)]) for one in samples]
    assert set(task.score(right).values()) == {1.0}
    wrong = [(one, ["Something else."] * len(one.conversation.questions)) for one in samples]
    assert set(task.score(wrong).values()) == {0.0}


def test_edits_of_code_share_most_text_with_their_requests():
    halves = {name: TASKS[name].samples(None, None) for name in ("code-edits", "code-edits-tuning")}
    (kinds, others), names = ([sample.category for sample in half] for half in halves.values()), []
    assert kinds == others == (["rename", "types", "docstring", "fix", "constant", "loop", "default"] * 3)[:20]
    for name, samples in halves.items():
        given = []
        for sample in samples:
            (turn,), ((expected,),) = sample.conversation.questions, sample.references
            instruction, code = turn.removesuffix("\n```").split("\n\n```python\n")
            assert instruction.endswith(" Return the whole function.")
            assert 10 <= len(code.splitlines()) <= 40
            assert 0.6 < difflib.SequenceMatcher(None, code, expected, autojunk=False).ratio() < 1
            names += [ast.parse(code).body[0].name]
            given += [(sample, [f"```python\n{code}\n```"])]
        assert TASKS[name].score(given) == {"edited": 0.0, "parses": 1.0}  # each asks for a change
        answered = [(sample, [f"```python\n{sample.references[0][0]}\n```"]) for sample in samples]
        assert TASKS[name].score(answered) == {"edited": 1.0, "parses": 1.0}
    assert len(set(names)) == 40


def test_tasks_are_selected_by_name_and_group():
    assert [task.name for task in select_tasks("embedded", visual=False)] == ["texts"]
    assert "texts" not in [task.name for task in select_tasks("embedded", visual=True)]
    assert [task.name for task in select_tasks("pope, texts,pope", visual=True)] == ["pope", "texts"]
    with pytest.raises(UserError, match=r"unknown task: expected some of embedded, .*, got 'nope'"):
        select_tasks("pope,nope", visual=True)
    with pytest.raises(UserError, match=r"pope has images or videos: expected a vision-language model"):
        select_tasks("pope", visual=False)
    with pytest.raises(UserError, match=r"expected at least one task"):
        select_tasks(" ,", visual=True)


# ------------------------------------------------------------------ through datasets


def picture(red):
    return Image.new("RGB", (8, 6), (red, 0, 0))


def pope(name, count):
    columns = {"id": TEXT, "question_id": TEXT, "question": TEXT, "answer": TEXT, "image_source": TEXT}
    row = {"question": "Is there a dog in the image?", "answer": "yes", "image_source": "COCO", "category": name}
    rows = [{**row, "id": str(k), "question_id": str(k + 1), "image": picture(40 * k)} for k in range(count)]
    return rows, {**columns, "image": PICTURE, "category": TEXT}


def gqa():
    columns = dict.fromkeys(("id", "imageId", "question", "answer", "fullAnswer"), TEXT) | {
        "isBalanced": datasets.Value("bool")
    }
    row = {"id": "201", "imageId": "n2", "question": "Is it?", "answer": "no", "fullAnswer": "No.", "isBalanced": True}
    return [row], columns


def mmmu():
    texts = ("id", "question", "options", "explanation", "img_type", "answer", "topic_difficulty", "question_type")
    columns = dict.fromkeys((*texts, "subfield"), TEXT) | {f"image_{k}": PICTURE for k in range(1, 8)}
    row = dict.fromkeys(columns) | {"id": "validation_Art_1", "question": "Which? <image 1>", "answer": "B"}
    row |= {"image_1": picture(1), "image_2": picture(2), "subfield": "Drawing"}
    rows = [{**row, "options": "['sun', 'moon']"}, {**row, "options": "[]", "answer": "['4', 'four']"}]
    return rows, columns


def releases():
    """Rows and columns by benchmark, configuration and split; columns, splits and configurations follow the cards."""
    images = [{"id": f"n{k}", "image": picture(40 * k)} for k in range(3)], {"id": TEXT, "image": PICTURE}
    instructions = {f"{split}_balanced_instructions": {split: gqa()} for split in ("testdev", "train")}
    return {
        "pope": {"default": {"test": pope("popular", 3)}, "Full": {"adversarial": pope("adversarial", 2)}},
        "gqa": {**instructions, "testdev_balanced_images": {"testdev": images}},
        "mmmu": {"default": {"dev": mmmu(), "validation": mmmu()}},
    }


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    for name, configs in releases().items():
        card = ["---", "configs:"]
        for config, splits in configs.items():
            card += [f"- config_name: {config}", "  data_files:"]
            for split, (rows, columns) in splits.items():
                path = root / name / ("data" if config == "default" else config) / f"{split}-00000-of-00001.parquet"
                path.parent.mkdir(parents=True, exist_ok=True)
                datasets.Dataset.from_list(rows, features=datasets.Features(columns)).to_parquet(path)
                card += [f"  - split: {split}", f"    path: {path.parent.name}/{split}-*"]
        (root / name / "README.md").write_text("\n".join([*card, "---", ""]))
    return root


@pytest.fixture
def samples(hub, tmp_path, monkeypatch):
    """Reads a task as from the hub, with the path of its repository replaced."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)

    def read(name, limit, **changes):
        task = TASKS[name]
        return replace(task, hub=replace(task.hub, **{"path": str(hub / name), **changes})).samples(None, limit)

    return read


@through_datasets
@pytest.mark.parametrize("limit", [2, None])
def test_a_benchmark_is_read_whole_or_streamed(samples, limit):
    found = samples("pope", limit)
    assert [(one.id, one.category) for one in found] == [(str(k), "popular") for k in range(limit or 3)]
    assert all(one.references == (("yes",),) for one in found)
    for k, one in enumerate(found):
        (stored,) = one.conversation.images
        assert isinstance(stored, bytes)  # decoded images of a benchmark would not fit into memory
        assert load_image(stored).getpixel((0, 0)) == (40 * k, 0, 0)


@through_datasets
def test_images_of_another_table_and_several_images(samples):
    (one,) = samples("gqa", 1)
    assert (one.id, one.references) == ("201", (("no",),))
    assert load_image(one.conversation.images[0]).getpixel((0, 0)) == (80, 0, 0)
    choice, free = samples("mmmu", None)
    assert [load_image(image).getpixel((0, 0))[0] for image in choice.conversation.images] == [1, 2]
    assert (choice.references, choice.metadata, choice.category) == ((("B",),), ["sun", "moon"], "Drawing")
    assert (free.references, free.metadata) == ((("4", "four"),), [])


@through_datasets
@pytest.mark.parametrize(
    ("changes", "message"),
    [({"split": "testing"}, "testing"), ({"config": "Half"}, "Half"), ({"path": "/x/y"}, "/x/y")],
)
def test_missing_splits_configs_and_repositories_are_reported(samples, changes, message):
    with pytest.raises(UserError, match=rf"pope: expected to read .* through datasets, or --data FOLDER: .*{message}"):
        samples("pope", 1, **changes)
