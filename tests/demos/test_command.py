"""``mmspec demo``: its options, and what it says where they are wrong."""

import pytest
from click.testing import CliRunner

from demos.command import demo
from mmspec import UserError


@pytest.mark.parametrize("auth", ["user", "user:", ":password"])
def test_a_login_is_a_pair(auth):
    result = CliRunner().invoke(demo, ["--auth", auth])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == "--auth must be USER:PASSWORD, neither of them empty"


def test_a_model_that_is_not_there_is_told_at_once():
    result = CliRunner().invoke(demo, ["--model", "/no/such/folder"])
    assert isinstance(result.exception, UserError)
    assert "there is no such folder" in str(result.exception)


def test_nothing_is_shared_unless_asked(monkeypatch):
    seen = {}

    class StopError(Exception):
        pass

    def serving(models, **options):
        seen.update(options)
        raise StopError

    monkeypatch.setattr("demos.server.serving", serving)
    monkeypatch.setattr("demos.models.Models.get", lambda self, name: None)
    for arguments, expected in (
        ([], {"server_name": "127.0.0.1", "server_port": 7860, "auth": None, "share": False}),
        (
            ["--host", "0.0.0.0", "--port", "0", "--auth", "a:b:c", "--share"],
            {"server_name": "0.0.0.0", "server_port": 0, "auth": ("a", "b:c"), "share": True},
        ),
    ):
        assert isinstance(CliRunner().invoke(demo, arguments).exception, StopError)
        assert {name: seen[name] for name in expected} == expected
