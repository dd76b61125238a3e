"""Tests of ``mmspec demo``: options, logins, signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import httpx
import pytest
from click.testing import CliRunner

from mmspec import UserError, plugins
from mmspec.adaptation.options import AdaptOptions
from mmspec.demos.api import API
from mmspec.demos.catalog import make_catalog
from mmspec.demos.command import _signals_raise, demo
from mmspec.vision.embedded import samples
from tests.demos.serving import TIMEOUT, stored_path, upload
from tests.process import ROOT

IMAGE = samples() / "scene.png"


@pytest.mark.parametrize("auth", ["user", "user:", ":password"])
def test_malformed_login_raises(auth):
    result = CliRunner().invoke(demo, ["--auth", auth])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == "--auth must be USER:PASSWORD, neither of them empty"


def test_missing_model_raises_at_start():
    result = CliRunner().invoke(demo, ["--model", "/no/such/folder"])
    assert isinstance(result.exception, UserError)
    assert "there is no such folder" in str(result.exception)


@pytest.fixture
def served(monkeypatch):
    """Run the command up to its server; returns the server's arguments."""
    for name in ("MMSPEC_DEMO_AUTH", "MMSPEC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("mmspec.demos.models.ModelCache.get", lambda self, name: seen["models"].append(name))
    seen = {"models": []}

    class StopError(Exception):
        pass

    def run_server(models, catalog, **options):
        seen.update(options, catalog=catalog)
        raise StopError

    monkeypatch.setattr("mmspec.demos.server.run_server", run_server)

    def run(*arguments, **options):
        result = CliRunner().invoke(demo, arguments, **options)
        if not isinstance(result.exception, StopError):
            raise result.exception
        return seen

    return run


@pytest.mark.parametrize("host", [[], ["--host", "localhost"], ["--host", "127.8.8.8"], ["--host", "[::1]"]])
def test_loopback_address_has_an_open_catalog(served, host):
    seen = served(*host)
    assert (seen["auth"], seen["share"], seen["catalog"].open) == (None, False, True)
    assert seen["server_port"] == 7860
    assert seen["models"] == [plugins.default_model()]


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
def test_public_address_requires_a_login(served, public, variable):
    with pytest.raises(UserError) as error:
        served(*public, env={"MMSPEC_DEMO_AUTH": variable})
    assert str(error.value) == (
        "a public address needs a login: expected --auth USER:PASSWORD, MMSPEC_DEMO_AUTH or --no-auth, got none"
    )


@pytest.mark.parametrize("public", PUBLIC)
def test_public_address_has_a_closed_catalog(served, public):
    seen = served(*public, "--auth", "a:b:c", "--port", "0", "--model", "x", "--model", "y", "--drafter", "d")
    assert (seen["auth"], seen["share"], seen["server_port"]) == (("a", "b:c"), "--share" in public, 0)
    assert seen["catalog"] == make_catalog(["x", "y"], ["d"], open=False)
    assert seen["models"] == ["y", "x"]  # all are loaded; the first one last, so that it is cached


def test_login_options(served):
    assert served("--host", "0.0.0.0", env={"MMSPEC_DEMO_AUTH": "ann:secret"})["auth"] == ("ann", "secret")
    assert served("--host", "0.0.0.0", "--no-auth")["auth"] is None
    with pytest.raises(UserError, match="exclude each other"):
        served("--host", "0.0.0.0", "--no-auth", "--auth", "ann:secret")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], None),
        (["--api"], API(plugins.default_model(), "auto", "127.0.0.1", None)),
        (["--api", "--adapt"], API(plugins.default_model(), adapt=AdaptOptions())),
        (["--api", "--host", "localhost", "--api-key", "k"], API(plugins.default_model(), "auto", "localhost", "k")),
        (["--api", "--share", "--no-auth", "--model", "x", "--drafter", "d"], API("x", "d", None, None)),
        (
            ["--api", "--host", "0.0.0.0", "--auth", "a:b", "--api-key", "k"],
            API(plugins.default_model(), "auto", None, "k"),
        ),
    ],
)
def test_api_of_the_command(served, monkeypatch, options, expected):
    monkeypatch.setattr("mmspec.demos.api.API.app", lambda self, models: self)
    assert served(*options).get("api") == expected


@pytest.mark.parametrize("public", PUBLIC)
def test_api_on_a_public_address_requires_a_key(served, public):
    with pytest.raises(UserError, match="a public address needs a key: expected --api-key KEY, MMSPEC_API_KEY or"):
        served("--api", *public, "--auth", "a:b")


def test_adapt_without_the_api(served):
    with pytest.raises(UserError, match="--adapt goes with --api: got no --api"):
        served("--adapt-space", "64", "--adapt")


def test_a_key_without_the_api(served):
    with pytest.raises(UserError, match="--api-key goes with --api: got no --api"):
        served("--api-key", "k")
    assert "api" not in served(env={"MMSPEC_API_KEY": "k"})  # which is for mmspec serve, too


@pytest.mark.long
def test_sigterm_during_a_race(tmp_path):
    """The process ends, and leaves no temporary files, processes and tracebacks."""
    script = "import sys; from mmspec.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "demo", "--model", "tiny-llava", "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=PIPE, stderr=PIPE, text=True) as server:
        url = server.stdout.readline().split()[2]
        image = {"path": upload(url, IMAGE.read_bytes()).json()[0], "meta": {"_type": "gradio.FileData"}}
        given = {"prompt": "Describe the image.", "image": image, "temperature": 2.0, "max_new_tokens": 512}
        joined = httpx.post(f"{url}gradio_api/call/v2/compare", json=given, timeout=TIMEOUT).json()
        with httpx.stream("GET", f"{url}gradio_api/call/compare/{joined['event_id']}", timeout=TIMEOUT) as events:
            next(line for line in events.iter_lines() if '"tokens": 2' in line)
            server.send_signal(signal.SIGTERM)
            assert server.wait(TIMEOUT) == 128 + signal.SIGTERM
        assert "Traceback" not in server.stderr.read()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(("mmspec", "gradio"))] == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signals_remove_uploads(number, tmp_path):
    script = "import sys; from mmspec.cli import main; sys.exit(main(['demo', '--port', '0', '--model', 'tiny-llava']))"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment, stdout=PIPE, text=True) as server:
        path = Path(stored_path(server.stdout.readline().split()[2]))
        assert path.is_relative_to(tmp_path)
        assert path.exists()
        server.send_signal(number)
        assert server.wait(TIMEOUT) == 128 + number
    assert list(tmp_path.glob("mmspec-demo-*")) == []


def test_ignored_signals_stay_ignored():
    def send(number):
        with _signals_raise():
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
