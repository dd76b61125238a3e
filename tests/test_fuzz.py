"""The fuzz commands: reproducible, with a failing status for mistakes; bounded runs of both."""

import json
import re

import pytest
from click.testing import CliRunner

from mmspec.core.verify import accept_path
from mmspec.engine import core
from mmspec.errors import UserError
from mmspec.vision.decoding import MediaDecoder
from mmspec.vision.images import load_image
from mmspec.vision.video import kind_of, load_video
from tests import fuzz, fuzz_decoding
from tests.media_files import media_files


def ran(module, *options):
    result = CliRunner().invoke(module.main, options)
    return result.exit_code, json.loads(result.stdout.splitlines()[-1]), result.stdout


def test_every_valid_file_is_decoded_and_a_wrong_error_is_noticed(monkeypatch):
    files = media_files()
    for kind, data in files.items():
        if kind_of(data) == "image":
            assert load_image(data).width >= 16, kind
        else:
            assert len(load_video(data, frames=4).frames) == 4, kind
    few = list(fuzz.mutants(3, files, 70))
    assert list(fuzz.mutants(3, files, 140))[:70] == few
    assert sum(data != files[kind] for kind, data in few) > 60
    monkeypatch.setattr(fuzz, "media_files", lambda: files)
    for error, expected in ((UserError("one line"), "refused"), (UserError("two\nlines"), "wrong")):

        def load(decoder, data, frames, error=error):
            raise error

        monkeypatch.setattr(MediaDecoder, "load", load)
        code, counts, _ = ran(fuzz, "--count", "20")
        assert (code, counts[expected], counts["valid_refused"]) == (1, 20, list(files))


def test_an_engine_that_accepts_every_draft_is_noticed(monkeypatch):
    def accept_all(tree, choices):
        choices = choices.clone()
        for row, children in enumerate(tree.children):
            for node, tokens in enumerate(children):
                choices[row, node] = next(iter(tokens), choices[row, node])
        return accept_path(tree, choices)

    monkeypatch.setattr(core, "accept_path", accept_all)
    code, counts, output = ran(fuzz_decoding, "--count", "6")
    assert (code, counts["differences"] > 0) == (1, True)
    number = re.search(r"^difference: --seed 0 --only (\d+)$", output, re.MULTILINE)[1]
    monkeypatch.undo()
    assert ran(fuzz_decoding, "--only", number)[:2] == (0, {"seed": 0, "cases": 1, "differences": 0})


@pytest.mark.slow
def test_a_run_of_each():
    code, counts, output = ran(fuzz, "--seed", "1", "--count", "1500", "--minutes", "5", "--seconds", "60")
    assert (code, counts["decoded"] > 0, counts["refused"] > 0) == (0, True, True), output
    code, counts, output = ran(fuzz_decoding, "--minutes", "1")
    assert (code, counts["cases"] > 5) == (0, True), output
