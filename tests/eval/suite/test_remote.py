"""Benchmarks read through ``datasets``, from local folders with the files and columns of the hub's releases.

Columns, splits and configurations follow the dataset cards.
"""

from dataclasses import replace

import pytest
from PIL import Image

from mmspec.errors import UserError
from mmspec.eval.suite.tasks import TASKS
from mmspec.vision.images import load_image

datasets = pytest.importorskip("datasets", reason="needs datasets: pip install -e '.[eval]'")

pytestmark = pytest.mark.filterwarnings("ignore")

TEXT, PICTURE = datasets.Value("string"), datasets.Image()


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


def gqa_images():
    return [{"id": f"n{k}", "image": picture(40 * k)} for k in range(3)], {"id": TEXT, "image": PICTURE}


def mmmu():
    texts = ("id", "question", "options", "explanation", "img_type", "answer", "topic_difficulty", "question_type")
    columns = dict.fromkeys((*texts, "subfield"), TEXT) | {f"image_{k}": PICTURE for k in range(1, 8)}
    row = dict.fromkeys(columns) | {"id": "validation_Art_1", "question": "Which? <image 1>", "answer": "B"}
    row |= {"image_1": picture(1), "image_2": picture(2), "subfield": "Drawing"}
    rows = [{**row, "options": "['sun', 'moon']"}, {**row, "options": "[]", "answer": "['4', 'four']"}]
    return rows, columns


RELEASES = {
    "pope": {"default": {"test": pope("popular", 3)}, "Full": {"adversarial": pope("adversarial", 2)}},
    "gqa": {
        "testdev_balanced_instructions": {"testdev": gqa()},
        "testdev_balanced_images": {"testdev": gqa_images()},
        "train_balanced_instructions": {"train": gqa()},
    },
    "mmmu": {"default": {"dev": mmmu(), "validation": mmmu()}},
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Dataset folders as on the hub: Parquet files, and a card that lists them."""
    root = tmp_path_factory.mktemp("hub")
    for name, configs in RELEASES.items():
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


@pytest.mark.parametrize("limit", [2, None])
def test_a_benchmark_is_read_whole_or_streamed(samples, limit):
    found = samples("pope", limit)
    assert [(one.id, one.category) for one in found] == [(str(k), "popular") for k in range(limit or 3)]
    assert all(one.references == (("yes",),) for one in found)
    for k, one in enumerate(found):
        (stored,) = one.conversation.images
        assert isinstance(stored, bytes)  # decoded images of a benchmark would not fit into memory
        assert load_image(stored).getpixel((0, 0)) == (40 * k, 0, 0)


def test_images_of_another_table_and_several_images(samples):
    (one,) = samples("gqa", 1)
    assert (one.id, one.references) == ("201", (("no",),))
    assert load_image(one.conversation.images[0]).getpixel((0, 0)) == (80, 0, 0)
    choice, free = samples("mmmu", None)
    assert [load_image(image).getpixel((0, 0))[0] for image in choice.conversation.images] == [1, 2]
    assert (choice.references, choice.metadata, choice.category) == ((("B",),), ["sun", "moon"], "Drawing")
    assert (free.references, free.metadata) == ((("4", "four"),), [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"split": "testing"}, "testing"), ({"config": "Half"}, "Half"), ({"path": "/x/y"}, "/x/y")],
)
def test_missing_splits_configs_and_repositories_are_reported(samples, changes, message):
    with pytest.raises(UserError, match=rf"pope: expected to read .* through datasets, or --data FOLDER: .*{message}"):
        samples("pope", 1, **changes)
