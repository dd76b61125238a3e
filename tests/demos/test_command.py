"""``mmspec demo``: its options, and what it says where they are wrong."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from click.testing import CliRunner

from demos.command import _unwound_by_signals, demo
from demos.offer import offer
from mmspec import UserError
from tests.demos.serving import PATIENCE, stored
from tests.process import ROOT


@pytest.mark.parametrize("auth", ["user", "user:", ":password"])
def test_a_login_is_a_pair(auth):
    result = CliRunner().invoke(demo, ["--auth", auth])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == "--auth must be USER:PASSWORD, neither of them empty"


def test_a_model_that_is_not_there_is_told_at_once():
    result = CliRunner().invoke(demo, ["--model", "/no/such/folder"])
    assert isinstance(result.exception, UserError)
    assert "there is no such folder" in str(result.exception)


@pytest.fixture
def served(monkeypatch):
    """Runs the command up to its server; returns what the server would be given."""
    monkeypatch.delenv("MMSPEC_DEMO_AUTH", raising=False)
    monkeypatch.setattr("demos.models.Models.get", lambda self, name: seen["models"].append(name))
    seen = {"models": []}

    class StopError(Exception):
        pass

    def serving(models, offer, **options):
        seen.update(options, offer=offer)
        raise StopError

    monkeypatch.setattr("demos.server.serving", serving)

    def run(*arguments, **options):
        result = CliRunner().invoke(demo, arguments, **options)
        if not isinstance(result.exception, StopError):
            raise result.exception
        return seen

    return run


@pytest.mark.parametrize("host", [[], ["--host", "localhost"], ["--host", "127.8.8.8"], ["--host", "[::1]"]])
def test_a_loopback_address_is_open(served, host):
    seen = served(*host)
    assert (seen["auth"], seen["share"], seen["offer"].open) == (None, False, True)
    assert seen["server_port"] == 7860
    assert seen["models"] == ["tiny-llava"]


PUBLIC = [
    ["--host", "0.0.0.0"],
    ["--host", "192.168.1.7"],
    ["--host", "::"],
    ["--host", "localhost.example.org"],
    ["--host", ""],
    ["--share"],
]


@pytest.mark.parametrize("public", PUBLIC)
@pytest.mark.parametrize("variable", [None, ""])
def test_a_public_address_needs_a_login(served, public, variable):
    with pytest.raises(UserError) as error:
        served(*public, env={"MMSPEC_DEMO_AUTH": variable})
    assert str(error.value) == (
        "a public address needs a login: expected --auth USER:PASSWORD, MMSPEC_DEMO_AUTH or --no-auth, got none"
    )


@pytest.mark.parametrize("public", PUBLIC)
def test_a_public_address_with_a_fixed_offer(served, public):
    seen = served(*public, "--auth", "a:b:c", "--port", "0", "--model", "x", "--model", "y", "--drafter", "d")
    assert (seen["auth"], seen["share"], seen["server_port"]) == (("a", "b:c"), "--share" in public, 0)
    assert seen["offer"] == offer(["x", "y"], ["d"], open=False)
    assert seen["models"] == ["y", "x"]  # each is tried, the first is in memory


def test_ways_to_give_a_login(served):
    assert served("--host", "0.0.0.0", env={"MMSPEC_DEMO_AUTH": "ann:secret"})["auth"] == ("ann", "secret")
    assert served("--host", "0.0.0.0", "--no-auth")["auth"] is None
    with pytest.raises(UserError, match="exclude each other"):
        served("--host", "0.0.0.0", "--no-auth", "--auth", "ann:secret")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_uploads_go_with_a_server_that_a_signal_ends(number, tmp_path):
    # Models are beside the point here, and take long to be read.
    script = (
        "import sys; from demos.models import Models; Models.get = lambda self, name: None\n"
        "from mmspec.cli import main; sys.exit(main(['demo', '--port', '0']))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment, stdout=PIPE, text=True) as server:
        path = Path(stored(server.stdout.readline().split()[2]))
        assert path.is_relative_to(tmp_path)
        assert path.exists()
        server.send_signal(number)
        assert server.wait(PATIENCE) == 128 + number
    assert list(tmp_path.glob("mmspec-demo-*")) == []


def test_a_signal_that_was_ignored_stays_so():
    def send(number):
        with _unwound_by_signals():
            os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        send(signal.SIGHUP)
        with pytest.raises(SystemExit) as ended:
            send(signal.SIGTERM)
        assert ended.value.code == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
