"""The study of captions of photographs, with a package that the test makes and the smallest embedded model."""

import io
import json
import sys
import tarfile
from hashlib import sha256

import pytest
from click.testing import CliRunner
from PIL import Image

from mmspec.eval import photographs
from mmspec.eval.pictures.picture import blank_pictures
from mmspec.eval.suite.tasks import TASKS, pictures
from mmspec.vision.pictures import fetching
from mmspec.vision.pictures.fetching import Package, Photograph


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """A list of one photograph that can be fetched and one that cannot; two blank pictures."""
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    buffer = io.BytesIO()
    Image.new("RGB", (60, 40), "red").save(buffer, "PNG")
    with tarfile.open(tmp_path / "here.tgz", "w:gz") as opened:
        info = tarfile.TarInfo("cat.png")
        info.size = buffer.tell()
        opened.addfile(info, io.BytesIO(buffer.getvalue()))
    code = f"import shutil; shutil.copy('{tmp_path}/{{name}}.tgz', '.')"
    monkeypatch.setitem(fetching.COMMANDS, "npm", (sys.executable, "-c", code))
    digest = sha256(buffer.getvalue()).hexdigest()
    packages = [
        Package("npm", "here", "1", (Photograph("cat", "cat.png", digest, ("cat",), ("animal",), "animal"),)),
        Package("npm", "gone", "1", (Photograph("car", "car.png", digest, ("car",), group="vehicle"),)),
    ]
    blanks = blank_pictures()[:2]
    for module in (photographs, pictures):
        monkeypatch.setattr(module, "photograph_packages", lambda: packages)
    monkeypatch.setattr(photographs, "blank_pictures", lambda: blanks)
    return packages


def run(*options):
    arguments = ["--model", "tiny-llava", "--dtype", "float32", "--max-new-tokens", "12", *options]
    return CliRunner().invoke(photographs.main, arguments)


def test_photographs_are_fetched_captioned_and_judged(listed, tmp_path):
    done = run("--fetch", "--out", str(tmp_path / "out.json"))
    assert done.exit_code == 0, done.output
    assert "note: gone 1 (npm; car): expected one file from" in done.stderr
    assert "note: 1 photographs are not in the cache: car" in done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["missing"], result["dtype"]) == (["car"], "float32")
    (row,) = result["photographs"]["pictures"]
    assert row["caption"]
    assert row["caption"].split()[0] in done.stdout
    assert result["photographs"]["totals"]["named"]["of"] == 1
    assert result["photographs"]["confusion"] == {"animal": {row["read as"]: 1}}
    assert [row["name"] for row in result["blank"]["pictures"]] == ["noise-colours", "noise-greys"]
    # The same picture is one of a task of the suite, with the same prompt.
    (sample,) = TASKS["photographs"].samples(None, None)
    assert (sample.id, sample.category, sample.references) == ("cat", "animal", (("cat", "animal"),))
    assert sample.conversation.questions == (result["prompt"],)
    wrong, right = ([(sample, [text])] for text in ("A red star.", "An animal."))
    assert TASKS["photographs"].score(right) == {
        "named or its kind": 1.0,
        "named": 0.0,
        "coloured shapes": 0.0,
        "pictures": 1.0,
    }
    assert TASKS["photographs"].score(wrong)["coloured shapes"] == 1.0


def test_no_photograph_in_the_cache(listed):
    done = run()
    assert done.exit_code == 2
    assert "2 photographs are not in the cache: cat, car" in done.stderr
    assert "--fetch downloads the packages" in done.stderr
    with pytest.raises(ValueError, match="photographs: expected pictures in the cache, found none"):
        TASKS["photographs"].samples(None, None)


def test_the_task_of_blank_pictures():
    task = TASKS["blank-pictures"]
    first, second, *others = task.samples(None, None)
    assert len(others) == 18
    answers = [
        (first, ["A plain background."]),
        (second, ["A red star."]),
        (others[0], ["A bear."]),
        (others[1], ["A cat."]),
    ]
    assert task.score(answers) == {"nothing invented": 0.25, "coloured shapes": 0.25, "things": 0.5}
