"""Tests of the catalog of models and drafters that visitors may select."""

import pytest

from mmspec import UserError, plugins
from mmspec.demos.catalog import check_methods, make_catalog
from mmspec.drafters.registry import drafter_specs
from tests.demos.serving import needs_smollm2


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
    with pytest.raises(UserError, match=r"drafter must be one that this server offers: .* got '/drafters/\.\./msd'"):
        closed.check("llava", "/drafters/../msd")


def test_closed_catalog_defaults_to_installed_models():
    closed = make_catalog(open=False)
    assert closed.models == tuple(plugins.installed())
    assert {"tiny-hybrid", "tiny-llava"} <= set(closed.models)
    assert {"auto", "ngram", "msd", "none"} <= set(closed.drafters)
    for name in ("small:/etc", "../msd", "/"):
        with pytest.raises(UserError, match="drafter must be"):
            closed.check("tiny-llava", name)


def test_open_catalog_allows_any_name():
    free = make_catalog(["llava"], ["/drafters/msd"])
    assert free.models == ("llava", *plugins.installed())
    assert free.drafters[:2] == ("auto", "/drafters/msd")
    free.check("/any/folder", "small:/another")


@pytest.mark.parametrize(
    ("models", "open", "expected"),
    [
        ([], True, ("tiny-llava", "tiny-hybrid")),
        (["llava"], True, ("llava", "tiny-hybrid")),
        (["llava", "tiny-hybrid"], False, ("llava", "tiny-hybrid")),
        (["llava", "other"], False, ("llava", "llava")),
        (["tiny-hybrid"], True, ("tiny-llava", "tiny-hybrid")),
        pytest.param(["smollm2"], True, ("tiny-llava", "smollm2"), marks=needs_smollm2),
        pytest.param(["smollm2", "llava"], False, ("llava", "smollm2"), marks=needs_smollm2),
    ],
)
def test_default_models_are_in_the_catalog(models, open, expected, monkeypatch):
    installed = ["tiny-hybrid", "tiny-llava", *(["smollm2"] if "smollm2" in models else [])]
    monkeypatch.setattr(plugins, "installed", lambda: installed)
    monkeypatch.setattr(plugins, "embedded", lambda: ["tiny-hybrid", "tiny-llava"])
    made = make_catalog(models, open=open)
    assert (made.default_model("image"), made.default_model("text")) == expected
    assert made.default_model("video") == expected[0]
    assert set(expected) <= set(made.models)


def test_images_are_answered_by_a_model_of_photographs_where_its_packages_are_installed(monkeypatch):
    monkeypatch.setattr(plugins, "embedded", lambda: ["smol-llava", "tiny-hybrid", "tiny-llava"])
    monkeypatch.setattr(plugins, "installed", plugins.embedded)
    assert make_catalog().default == make_catalog(["tiny-hybrid"]).default_model("image") == "smol-llava"
    assert make_catalog().default_model("video") == make_catalog(["smol-llava"]).default_model("video") == "tiny-llava"
    assert make_catalog(["smol-llava"], open=False).default_model("video") == "smol-llava"


def test_texts_are_answered_by_a_language_model_where_one_is_installed(monkeypatch):
    monkeypatch.setattr(plugins, "installed", lambda: ["tiny-hybrid", "tiny-llava", "smollm2"])
    assert make_catalog().default_model("text") == "smollm2"
    assert make_catalog(["llava"], open=False).default_model("text") == "llava"


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
