"""Tests of ``mmspec demo``: options, logins, signals, the port."""

import os
import signal
import socket
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from mmspec import UserError, plugins
from mmspec.adaptation.options import AdaptOptions
from mmspec.demos import server
from mmspec.demos.catalog import make_catalog
from mmspec.demos.command import _signals_raise, demo
from mmspec.demos.page import build
from mmspec.demos.server import API
from mmspec.demos.service import Service
from mmspec.demos.storage import UploadFolder
from tests import projectors


def test_missing_model_raises_at_start():
    result = CliRunner().invoke(demo, ["--model", "/no/such/folder"])
    assert isinstance(result.exception, UserError)
    assert "there is no such folder" in str(result.exception)


@pytest.fixture
def served(monkeypatch, request):
    """Run the command up to its server, without loading a model by default; returns the server's arguments."""
    for name in ("MMSPEC_DEMO_AUTH", "MMSPEC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    seen = {"models": []}
    if getattr(request, "param", None) != "loads":

        def get(self, name):
            seen["models"].append(name)
            return SimpleNamespace(processor=SimpleNamespace(reads_media=name != "y"))

        monkeypatch.setattr("mmspec.demos.models.ModelCache.get", get)

    class StopError(Exception):
        pass

    def run_server(models, catalog, **options):
        seen.update(options, catalog=catalog, cache=models)
        raise StopError

    monkeypatch.setattr("mmspec.demos.server.run_server", run_server)

    def run(*arguments, **options):
        seen["models"] = []
        result = CliRunner().invoke(demo, arguments, **options)
        if not isinstance(result.exception, StopError):
            raise result.exception
        return seen

    return run


def test_loopback_addresses_have_an_open_catalog(served):
    for host in ([], ["--host", "localhost"], ["--host", "127.8.8.8"], ["--host", "[::1]"]):
        seen = served(*host)
        assert (seen["auth"], seen["share"], seen["catalog"].open) == (None, False, True)
        assert (seen["server_port"], seen["models"].pop()) == (7860, plugins.default_model())


@pytest.mark.parametrize("served", ["loads"], indirect=True)
@pytest.mark.parametrize(("tower", "kind"), [(False, "text"), (True, "image")])
@pytest.mark.parametrize("public", [[], ["--host", "0.0.0.0", "--no-auth"]], ids=str)
def test_the_page_opens_on_what_the_model_of_a_gguf_file_can_do(served, tower, kind, public, tmp_path, monkeypatch):
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("mmspec.demos.page._OPENING_TOKENS", 4)
    file, projector = projectors.save("llava", tmp_path)
    seen = served("--model", str(file), *(["--mmproj", str(projector)] if tower else []), *public)
    (tmp_path / "uploads" / "samples").mkdir(parents=True)
    uploads = UploadFolder(tmp_path / "uploads", 2**30)
    service = Service(seen["cache"], seen["catalog"], uploads)
    _, first = build(service, tmp_path / "uploads" / "samples")
    uploads.exempt_existing()
    *_, race = service.opening(first.opening_request())
    assert (first.kind, race.finished, race.lanes[0].model) == (kind, True, str(file))


PUBLIC = (["--share"], *(["--host", at] for at in ("0.0.0.0", "192.168.1.7", "::", "localhost.example.org", "")))


@pytest.mark.parametrize("public", PUBLIC, ids=str)
def test_public_addresses_have_a_closed_catalog_and_require_a_login_and_a_key(served, public):
    seen = served(*public, "--auth", "a:b:c", "--port", "0", "--model", "x", "--model", "y", "--drafter", "d")
    assert (seen["auth"], seen["share"], seen["server_port"]) == (("a", "b:c"), "--share" in public, 0)
    expected = make_catalog(["x", "y"], ["d"], ["y"], open=False)
    assert seen["catalog"] == expected
    assert [expected.models_for(kind) for kind in ("image", "video", "text")] == [["x"], ["x"], ["x", "y"]]
    assert seen["models"] == ["y", "x"]  # all are loaded; the first one last, so that it is cached
    message = "a public address needs a login: expected --auth USER:PASSWORD, MMSPEC_DEMO_AUTH or --no-auth, got none"
    with pytest.raises(UserError, match=f"^{message}$"):
        served(*public, env={"MMSPEC_DEMO_AUTH": None})
    with pytest.raises(UserError, match="a public address needs a key: expected --api-key KEY, MMSPEC_API_KEY or"):
        served("--api", *public, "--auth", "a:b")


def test_login_options(served):
    assert served("--host", "0.0.0.0", env={"MMSPEC_DEMO_AUTH": "ann:secret"})["auth"] == ("ann", "secret")
    assert served("--host", "0.0.0.0", "--no-auth")["auth"] is None
    with pytest.raises(UserError, match="exclude each other"):
        served("--host", "0.0.0.0", "--no-auth", "--auth", "ann:secret")
    for auth in ("user", "user:", ":password"):
        with pytest.raises(UserError, match=r"^--auth must be USER:PASSWORD, neither of them empty$"):
            served("--auth", auth)


@pytest.mark.parametrize(
    ("options", "name"), [([], "AUTH"), (["--no-auth"], "AUTH"), (["--api"], "API_KEY"), (["--api", "--share"], "AUTH")]
)
def test_empty_secrets_are_refused(options, name, served):
    option, variable = f"--{name.lower().replace('_', '-')}", f"MMSPEC_{'DEMO_' * (name == 'AUTH')}{name}"
    for given, value in (([option, ""], None), ([option, ""], "a:b"), ([], "")):
        with pytest.raises(UserError, match=rf"^{option} \(or {variable}\) must not be empty: expected"):
            served(*options, *given, env={variable: value})


def test_options_of_the_api(served, monkeypatch):
    monkeypatch.setattr("mmspec.demos.server.API.app", lambda self, models: self)
    model = plugins.default_model()
    for options, expected in (
        ([], None),
        (["--api"], API(model, "auto", "127.0.0.1", None)),
        (["--api", "--adapt"], API(model, adapt=AdaptOptions())),
        (["--api", "--host", "localhost", "--api-key", "k"], API(model, "auto", "localhost", "k")),
        (["--api", "--share", "--no-auth", "--model", "x", "--drafter", "d"], API("x", "d", None, None)),
        (["--api", "--host", "0.0.0.0", "--auth", "a:b", "--api-key", "k"], API(model, "auto", None, "k")),
    ):
        assert served(*options).pop("api", None) == expected
    assert "api" not in served(env={"MMSPEC_API_KEY": "k"})  # which is for mmspec serve, too
    for option, given in (("--adapt", ["--adapt-space", "64", "--adapt"]), ("--api-key", ["--api-key", "k"])):
        with pytest.raises(UserError, match=f"{option} goes with --api: got no --api"):
            served(*given)


def test_signals_end_the_process_in_order_and_ignored_ones_stay_ignored():
    def send(number):
        with _signals_raise():
            os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        send(signal.SIGHUP)
        with pytest.raises(SystemExit) as ended:
            send(signal.SIGTERM)
        assert ended.value.code == 128 + signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


class Page:
    """Fake page whose first launches fail because the port is taken."""

    def __init__(self, taken):
        self.taken, self.tried = taken, []

    def launch(self, *, server_name, server_port):
        self.tried.append(server_port)
        if len(self.tried) <= self.taken:
            raise OSError("taken")


def test_a_free_port_that_is_taken_meanwhile_is_replaced():
    page = Page(taken=2)
    server._launch(page)
    assert len(page.tried) == 3
    assert 0 not in page.tried
    with pytest.raises(OSError, match="taken"):
        server._launch(Page(taken=100))
    for host in ("127.0.0.1", "localhost", "0.0.0.0"):
        assert server._bindable_port(host, 0) > 1023


def test_given_port_is_the_only_one_tried():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        page, port = Page(taken=0), other.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            server._launch(page, server_port=port)
    assert page.tried == []
    page = Page(taken=1)
    with pytest.raises(OSError, match="taken"):
        server._launch(page, server_port=port)
    assert page.tried == [port]
