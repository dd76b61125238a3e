"""Names and paths where either may stand: registered names come first, and any path that the system allows works."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

import mmspec
from mmspec import UserError
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.registry import Selection, make_drafter, registered_name, split
from mmspec.drafters.small import Small
from mmspec.vision.embedded import samples
from mmspec.vision.images import load_image
from mmspec.vision.video import load_video
from tests.model_folders import save_gguf, save_text_model

SIGNS = ["a b", "a+b@chain", "k=v", "x@0.5", "a,b", "c:d", "~t", "#h", "-d", "%20", "größe 模"]
SIGNS += [os.fsdecode(b"\xff\xfe")]
SHADOWING = ["ngram", "recycle", "none", "auto", "recycle+ngram", "ngram@chain", "tiny-llava", "float32", "cpu"]
MISSING = ("no.gguf", "models/no.GGUF", "./no", "")
FOUND = r"expected an embedded model \(.*\), a local folder, a GGUF file or a reachable hub id; there is no such .*"


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A folder with a model, a GGUF file, a drafter for the model, and media."""
    home = tmp_path_factory.mktemp("parts")
    Recycle(top_k=3).save(home / "drafter", mmspec.load(save_text_model(home / "model"), drafter=None).target)
    save_gguf(home / "file")
    shutil.copy(samples() / "scene.png", home / "image")
    shutil.copy(samples() / "clip.mp4", home / "video")
    return home


@pytest.fixture
def put(parts, tmp_path, monkeypatch):
    """Copy a part to a name in the working directory, replacing an existing file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path.with_name("cache")))

    def put(part, name):
        for old in tmp_path.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        shutil.copytree(parts / part, name) if (parts / part).is_dir() else shutil.copyfile(parts / part, name)

    return put


def drafted(spec, home=""):
    return registered_name(make_drafter(spec, home))


@pytest.mark.parametrize("name", SIGNS, ids=ascii)
def test_paths_may_contain_any_sign(name, put, parts, tmp_path):
    for path in (name, f"./{name}", str(tmp_path / name)):
        put("drafter", name)
        for spec, expected in (("{}", "recycle"), ("ngram+{}", "ngram+recycle"), ("{}+ngram@chain3", "recycle+ngram")):
            assert drafted(spec.format(path)) == expected
        assert make_drafter(f"recycle:{path}").top_k == 3
        put("model", name)
        assert [make_drafter(f"small:{path}{at}")._visual.share for at in ("", "@0.25")] == [1, 0.25]
        asked = {"prompt": "A red", "max_new_tokens": 4}
        expected = mmspec.load(parts / "model", drafter=None).generate(**asked).token_ids
        assert mmspec.load(path).generate(**asked).token_ids == expected
        put("file", name)
        assert isinstance(make_drafter(f"small:{path}"), Small)
        assert mmspec.load(path, drafter=None).name == path
        put("image", name)
        assert load_image(path).size == load_image(parts / "image").size
        put("video", name)
        for backend in ("pyav", "decord") if find_spec("decord") else ("pyav",):
            assert load_video(path, backend=backend).times == load_video(parts / "video", backend=backend).times


@pytest.mark.parametrize("folder", SHADOWING)
def test_registered_names_come_before_folders(folder, put, tmp_path):
    put("drafter", folder)
    for spec, expected in (
        ("ngram", "ngram"),
        ("recycle", "recycle"),
        ("none", None),
        ("auto", "recycle+ngram"),
        ("recycle+ngram", "recycle+ngram"),
        ("ngram@chain", "ngram"),
        ("new:ngram", "ngram"),
        (f"./{folder}", "recycle"),
        (Path(folder), "recycle"),
        (tmp_path / folder, "recycle"),
    ):
        assert drafted(spec) == expected
    assert Selection.parse("ngram@chain") == Selection(("ngram",), 8)
    assert mmspec.load("tiny-llava", drafter="auto").generate("Hi", max_new_tokens=1).token_ids
    put("model", "tiny-llava")
    for path in ("./tiny-llava", Path("tiny-llava")):
        assert type(mmspec.load(path, drafter=None).model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("sign", "+,")
def test_the_longest_path_is_taken(sign, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    longest = f"a{sign}b{sign}c"
    for name in ("a", f"a{sign}b", longest):
        Path(name).touch()
    assert split(f"ngram{sign}{longest}{sign}a{sign}b", sign) == ["ngram", longest, f"a{sign}b"]


def test_drafters_in_a_model_s_folder_that_is_called_like_one(put, parts):
    put("model", "ngram:x")
    shutil.copytree(parts / "drafter", "ngram:x/drafter")
    assert make_drafter("auto", "ngram:x").top_k == make_drafter("recycle", "ngram:x").top_k == 3


@pytest.mark.parametrize("name", ["sha256-0a1b", "M.GGUF", "x.gguf.bin", "größe 模.gguf", "link"])
def test_gguf_files_are_known_by_their_content(name, put):
    put("file", name if name != "link" else "blob")
    if name == "link":
        Path(name).symlink_to("blob")
    assert mmspec.load(name, drafter=None).model.config.model_type == "llama"
    if name != "link":
        assert mmspec.load(Path.cwd(), drafter=None).model.config.model_type == "llama"  # the only one in a folder


@pytest.mark.parametrize(
    ("load", "message"),
    [
        *((lambda name=name: mmspec.load(name), f"^cannot load model '{name}': {FOUND}$") for name in MISSING),
        (lambda: make_drafter("small:/no/x@y"), f"^cannot load drafter '/no/x@y': {FOUND}$"),
        (lambda: make_drafter("/no/x@y"), "^/no/x@y: expected the folder of a drafter checkpoint, there is none$"),
        (lambda: make_drafter("/no/c:d"), "^/no/c:d: expected the folder of a drafter checkpoint, there is none$"),
        (lambda: make_drafter("./text"), "^text: expected a drafter's config.json with mmspec_drafter, received none$"),
        (lambda: make_drafter("./model@star"), "^a drafter's shape must be tree, chain or chainN: got 'star'$"),
        (
            lambda: mmspec.load("./text"),
            "^cannot load model 'text': expected a GGUF file, found one that begins with b'tex",
        ),
    ],
)
def test_what_was_looked_for_is_named(load, message, put):
    put("model", "model")
    Path("text").write_text("text")
    with pytest.raises(UserError, match=message):
        load()
