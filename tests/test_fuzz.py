"""The fuzz commands: reproducible, with true counts and a failing status; bounded runs of both."""

import json
import re

import pytest
from click.testing import CliRunner

from mmspec.core.verify import accept_path
from mmspec.engine import core
from mmspec.errors import UserError
from mmspec.vision.decoding import DecodeError, MediaDecoder
from mmspec.vision.images import load_image
from mmspec.vision.video import kind_of, load_video
from tests import fuzz, fuzz_decoding
from tests.media_files import media_files


@pytest.fixture(scope="module")
def files():
    return media_files()


def ran(module, *options):
    result = CliRunner().invoke(module.main, options)
    return result.exit_code, json.loads(result.stdout.splitlines()[-1]), result.stdout


def test_every_valid_file_is_decoded_and_mutants_depend_on_seed_and_number(files):
    for kind, data in files.items():
        if kind_of(data) == "image":
            assert load_image(data).width >= 16, kind
        else:
            assert len(load_video(data, frames=4).frames) == 4, kind
    few = list(fuzz.mutants(3, files, 70))
    assert list(fuzz.mutants(3, files, 140))[:70] == few != list(fuzz.mutants(4, files, 70))
    assert {kind for kind, _ in few} == set(files)
    assert sum(data != files[kind] for kind, data in few) > 60


@pytest.mark.parametrize(
    ("raised", "outcome", "status"),
    [
        (UserError("one line"), "refused", 1),  # valid files, too
        (UserError("two\nlines"), "wrong", 1),
        (DecodeError("a line", "exception"), "exception", 1),
        (TypeError("a bug"), "wrong", 1),
        (None, "decoded", 0),
    ],
)
def test_counts_status_and_kept_files(monkeypatch, files, tmp_path, raised, outcome, status):
    def load(decoder, data, frames):
        if raised is not None:
            raise raised
        return fuzz.Image.new("RGB", (1, 1))

    monkeypatch.setattr(MediaDecoder, "load", load)
    monkeypatch.setattr(fuzz, "media_files", lambda: files)
    code, counts, _ = ran(fuzz, "--count", "60", "--keep", str(tmp_path))
    assert (code, counts[outcome], counts["mutants"]) == (status, 60, 60)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    mutants = enumerate(data for _, data in fuzz.mutants(0, files, 60))
    bad = outcome not in ("decoded", "refused")
    assert kept == {f"0-{number}-{outcome}": data for number, data in mutants if bad}
    assert ran(fuzz, "--count", "1000", "--minutes", "0")[1]["mutants"] == 0


def test_an_engine_that_accepts_every_draft_is_noticed(monkeypatch):
    def accept_all(tree, choices):
        choices = choices.clone()
        for row, children in enumerate(tree.children):
            for node, tokens in enumerate(children):
                choices[row, node] = next(iter(tokens), choices[row, node])
        return accept_path(tree, choices)

    monkeypatch.setattr(core, "accept_path", accept_all)
    code, counts, output = ran(fuzz_decoding, "--count", "6")
    assert code == 1
    assert counts["differences"] > 0
    number = re.search(r"^difference: --seed 0 --only (\d+)$", output, re.MULTILINE)[1]
    assert ran(fuzz_decoding, "--only", number)[:2] == (1, {"seed": 0, "cases": 1, "differences": 1})
    monkeypatch.undo()
    assert ran(fuzz_decoding, "--only", number)[:2] == (0, {"seed": 0, "cases": 1, "differences": 0})


@pytest.mark.slow
def test_a_run_of_each():
    code, counts, _ = ran(fuzz, "--seed", "1", "--count", "1500", "--minutes", "5", "--seconds", "60")
    assert (code, counts["mutants"] > 100) == (0, True), counts
    assert counts["decoded"] > 0 < counts["refused"]
    code, counts, output = ran(fuzz_decoding, "--minutes", "1")
    assert (code, counts["cases"] > 5) == (0, True), output
