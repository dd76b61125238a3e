"""Tests of the catalog of models and drafters that visitors may select."""

import pytest

from mmspec import UserError, plugins
from mmspec.demos.catalog import check_methods, make_catalog
from mmspec.drafters.registry import drafter_specs


def test_closed_catalog_rejects_other_names():
    closed = make_catalog(["llava", "/models/hybrid"], ["/drafters/msd"], open=False)
    assert closed.models == ("llava", "/models/hybrid")
    assert closed.drafters == ("auto", "/drafters/msd", "none")
    for model, drafter in (("llava", "auto"), ("/models/hybrid", "/drafters/msd"), ("llava", "none")):
        closed.check(model, drafter)
    with pytest.raises(UserError) as error:
        closed.check("/etc", "auto")
    message = "model must be one that this server offers: expected llava, /models/hybrid, got '/etc'"
    assert str(error.value) == message
    usual = make_catalog(open=False)
    assert usual.models == tuple(plugins.installed())
    assert {"auto", "ngram", "msd", "none"} <= set(usual.drafters)
    for name in ("small:/etc", "/drafters/../msd", "../msd", "/"):
        for catalog in (closed, usual):
            with pytest.raises(UserError, match=r"drafter must be one that this server offers: .* got "):
                catalog.check(catalog.default, name)


def test_open_catalog_allows_any_name():
    free = make_catalog(["llava"], ["/drafters/msd"])
    assert free.models == ("llava", *plugins.installed())
    assert free.drafters[:2] == ("auto", "/drafters/msd")
    free.check("/any/folder", "small:/another")


DRAWN, PHOTOGRAPHS, TEXT = ["tiny-hybrid", "tiny-llava"], ["smol-llava"], ["smollm2"]


@pytest.mark.parametrize(
    ("models", "open", "installed", "defaults"),  # for image, video and text
    [
        ([], True, DRAWN, "tiny-llava tiny-llava tiny-hybrid"),
        (["llava"], True, DRAWN, "llava llava tiny-hybrid"),
        (["llava", "tiny-hybrid"], False, DRAWN, "llava llava tiny-hybrid"),
        (["llava", "other"], False, DRAWN, "llava llava llava"),
        (["tiny-hybrid"], True, DRAWN, "tiny-llava tiny-llava tiny-hybrid"),
        (["tiny-hybrid"], True, DRAWN + TEXT, "tiny-llava tiny-llava tiny-hybrid"),
        (["smollm2"], True, DRAWN + TEXT, "tiny-llava tiny-llava smollm2"),
        (["smollm2", "llava"], False, DRAWN + TEXT, "llava llava smollm2"),
        ([], True, DRAWN + TEXT, "tiny-llava tiny-llava smollm2"),
        (["llava"], False, DRAWN + TEXT, "llava llava llava"),
        ([], True, PHOTOGRAPHS + DRAWN, "smol-llava tiny-llava tiny-hybrid"),
        (["tiny-hybrid"], True, PHOTOGRAPHS + DRAWN, "smol-llava tiny-llava tiny-hybrid"),
        (["smol-llava"], True, PHOTOGRAPHS + DRAWN, "smol-llava tiny-llava tiny-hybrid"),
        (["smol-llava"], False, PHOTOGRAPHS + DRAWN, "smol-llava smol-llava smol-llava"),
    ],
)
def test_default_models_are_in_the_catalog(models, open, installed, defaults, monkeypatch):
    monkeypatch.setattr(plugins, "installed", lambda: installed)
    monkeypatch.setattr(plugins, "embedded", lambda: [name for name in installed if name != "smollm2"])
    monkeypatch.setattr(plugins, "reads_text_only", lambda name: name in ("tiny-hybrid", "smollm2"))
    made = make_catalog(models, open=open)
    assert [made.default_model(kind) for kind in ("image", "video", "text")] == defaults.split()
    assert set(defaults.split()) <= set(made.models)


def test_models_and_methods_of_a_kind():
    free = make_catalog()
    assert "tiny-hybrid" in free.models_for("text")
    assert "tiny-hybrid" not in free.models_for("image")
    assert {"tiny-llava", "tiny-hybrid", *free.models_for("video")} <= set(free.models)
    methods = free.methods("tiny-llava")
    assert methods[:2] == ["none", "flash"]
    assert {"msd", "recycle", "ngram", "flash@chain", "msd@chain"} <= set(methods)
    alone = [spec.name for spec in drafter_specs() if spec.alone]
    assert free.methods("somebody/model") == ["none", "auto", *alone]
    assert make_catalog(["tiny-llava"], ["ngram", "/d/eagle"], open=False).methods("tiny-llava") == [
        "none",
        "auto",
        "ngram",
        "/d/eagle",
    ]


@pytest.mark.parametrize("methods", [[], ["none"], ["msd", "msd"], ["none", "ngram", "msd", "flash", "recycle"]])
def test_a_race_compares_two_to_four_methods(methods):
    with pytest.raises(UserError, match="a race compares methods: expected 2 to 4 different ones, got"):
        check_methods(methods)
