"""Objects that are registered as entry points."""

import pytest

from mmspec import UserError, plugins
from mmspec.drafters.ngram import SPEC


def test_entry_points_are_read_once(monkeypatch):
    names = plugins.names("drafters")
    monkeypatch.setattr(plugins, "entry_points", lambda **_: pytest.fail("read again"))
    assert plugins.names("drafters") == names
    assert plugins.find("drafters", "ngram") is SPEC
    assert [entry.name for entry in plugins.registered("drafters")] == names


def test_unknown_names():
    with pytest.raises(UserError, match=r"^unknown drafter: expected one of .*ngram.*, got 'nothing'$"):
        plugins.find("drafters", "nothing")
    assert plugins.model_path("some/folder") == "some/folder"
    assert plugins.limits("some/folder") is None
    assert not plugins.reads_text_only("some/folder")


def test_models_that_read_text_only():
    assert plugins.reads_text_only("tiny-hybrid")
    assert not plugins.reads_text_only("tiny-llava")
