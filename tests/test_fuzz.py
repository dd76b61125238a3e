"""The fuzz command: reproducible mutants, true counts, a failing status; a bounded run of it."""

import json

import pytest
from click.testing import CliRunner

from mmspec.errors import UserError
from mmspec.vision.decoding import DecodeError, MediaDecoder
from mmspec.vision.images import load_image
from mmspec.vision.video import kind_of, load_video
from tests import fuzz
from tests.media_files import media_files


@pytest.fixture(scope="module")
def files():
    return media_files()


def ran(*options):
    result = CliRunner().invoke(fuzz.main, options)
    return result.exit_code, json.loads(result.output.splitlines()[-1])


def test_every_valid_file_is_decoded(files):
    for kind, data in files.items():
        if kind_of(data) == "image":
            assert load_image(data).width >= 16, kind
        else:
            assert len(load_video(data, frames=4).frames) == 4, kind


def test_mutants_depend_on_seed_and_number(files):
    few, many = list(fuzz.mutants(3, files, 70)), list(fuzz.mutants(3, files, 140))
    assert many[:70] == few
    assert {kind for kind, _ in few} == set(files)
    assert sum(data != files[kind] for kind, data in few) > 60
    assert list(fuzz.mutants(4, files, 70)) != few


@pytest.mark.parametrize(
    ("raised", "outcome", "status"),
    [
        (UserError("one line"), "refused", 1),  # valid files, too
        (UserError("two\nlines"), "wrong", 1),
        (DecodeError("a line", "crash"), "crash", 1),
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
    code, counts = ran("--count", "60", "--keep", str(tmp_path))
    assert (code, counts[outcome], counts["mutants"]) == (status, 60, 60)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    mutants = enumerate(data for _, data in fuzz.mutants(0, files, 60))
    bad = outcome not in ("decoded", "refused")
    assert kept == {f"0-{number}-{outcome}": data for number, data in mutants if bad}
    assert ran("--count", "1000", "--minutes", "0")[1]["mutants"] == 0


@pytest.mark.slow
def test_a_run():
    code, counts = ran("--seed", "1", "--count", "1500", "--minutes", "5", "--seconds", "60")
    assert code == 0, counts
    assert counts["mutants"] > 100
    assert counts["decoded"] > 0 < counts["refused"]
