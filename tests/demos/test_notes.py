"""Tests of the texts around the controls."""

import re
from email.message import Message

from mmspec import plugins
from mmspec.demos import views
from mmspec.demos.catalog import drafter_of, make_catalog


def test_each_method_has_a_line_with_its_paper():
    catalog = make_catalog()
    for model in plugins.installed():
        methods = catalog.methods(model)
        lines = re.findall("<li>.*?</li>", views.methods_html(methods))
        drafters = {name for method in methods for name in drafter_of(method).split("+")}
        chain = any(method.endswith("@chain") for method in methods)
        assert len(lines) == len(drafters) + chain
        for line in lines:
            found = re.search(r'<a href="https://arxiv.org/abs/([0-9.]+)" .+?>arXiv (.+?)</a>', line)
            link, number, again = found.group(0, 1, 2)
            assert number == again
            assert "target" not in line.replace(link, "")


def test_addresses_that_the_package_states_are_linked(monkeypatch):
    stated = Message()
    stated["Project-URL"] = "Source, https://example.org/code"
    stated["Project-URL"] = "Documentation, https://example.org/docs"
    stated["Project-URL"] = "Funding, https://example.org/pay"
    monkeypatch.setattr(views, "metadata", lambda name: stated)
    assert re.findall('<a href="(.+?)">(.+?)</a>', views.links_html()) == [
        ("https://example.org/code", "Code"),
        ("https://example.org/docs", "Docs"),
        ("?view=api", "Use from Python"),
    ]
