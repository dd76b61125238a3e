"""``mmspec demo``: options, logins, signals, the port."""

import os
import signal
import socket
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from mmspec import UserError, plugins
from mmspec.demos.catalog import Catalog
from mmspec.demos.command import _signals_raise, demo
from mmspec.demos.page import build
from mmspec.demos.service import Service
from mmspec.demos.storage import UploadFolder
from tests import projectors
from tests.demos.serving import demo_server


@pytest.fixture
def served(monkeypatch, request):
    """Run the command up to its server, without loading a model by default; returns the server's arguments."""
    for name in ("MMSPEC_DEMO_AUTH", "MMSPEC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    seen = {}
    if getattr(request, "param", None) != "loads":

        def get(self, name):
            seen["models"].append(name)
            return SimpleNamespace(processor=SimpleNamespace(reads_media=name != "y"))

        monkeypatch.setattr("mmspec.demos.models.ModelCache.get", get)

    def run_server(models, catalog, **options):
        seen.update(options, catalog=catalog, cache=models)
        raise OSError("in use")

    monkeypatch.setattr("mmspec.demos.server.run_server", run_server)
    monkeypatch.setattr("mmspec.demos.server.make_api", lambda models, *given: given)

    def run(*arguments, **options):
        seen.clear()
        seen["models"] = []
        error = CliRunner().invoke(demo, arguments, **options).exception
        if not str(error).startswith("cannot listen on"):
            raise error
        return {**seen, "error": str(error)}

    return run


def test_loopback_addresses_have_an_open_catalog(served):
    for host in ([], ["--host", "localhost"], ["--host", "127.8.8.8"], ["--host", "[::1]"]):
        seen = served(*host)
        assert (seen["auth"], seen["share"], seen["catalog"].open) == (None, False, True)
        assert (seen["port"], seen["models"].pop()) == (7860, plugins.default_model())
        assert seen["error"] == f"cannot listen on {(host or ['', '127.0.0.1'])[1]}, port 7860: in use"


@pytest.mark.parametrize("served", ["loads"], indirect=True)
@pytest.mark.parametrize(("tower", "kind"), [(False, "text"), (True, "image")])
@pytest.mark.parametrize("public", [[], ["--host", "0.0.0.0", "--no-auth"]], ids=str)
def test_the_page_opens_on_what_the_model_of_a_gguf_file_can_do(served, tower, kind, public, tmp_path, monkeypatch):
    monkeypatch.setenv("MMSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("mmspec.demos.page._OPENING_TOKENS", 4)
    file, projector = projectors.save("llava", tmp_path)
    seen = served("--model", str(file), *(["--mmproj", str(projector)] if tower else []), *public)
    (tmp_path / "uploads" / "samples").mkdir(parents=True)
    service = Service(seen["cache"], seen["catalog"], UploadFolder(tmp_path / "uploads", 2**30))
    _, first = build(service, tmp_path / "uploads" / "samples")
    *_, race = service.opening(first.opening_request())
    assert (first.kind, race.finished, race.lanes[0].model) == (kind, True, str(file))


PUBLIC = (["--share"], *(["--host", at] for at in ("0.0.0.0", "192.168.1.7", "::", "localhost.example.org", "")))


@pytest.mark.parametrize("public", PUBLIC, ids=str)
def test_public_addresses_have_a_closed_catalog_and_require_a_login_and_a_key(served, public):
    seen = served(*public, "--auth", "a:b:c", "--port", "0", "--model", "x", "--model", "y", "--drafter", "d")
    assert (seen["auth"], seen["share"], seen["port"]) == (("a", "b:c"), "--share" in public, 0)
    assert seen["catalog"] == Catalog.of(["x", "y"], ["d"], ["y"], open=False)
    assert [seen["catalog"].models_for(kind) for kind in ("image", "text")] == [["x"], ["x", "y"]]
    assert seen["models"] == ["y", "x"]  # all are loaded, the first model last: it stays in the cache
    message = "a public address needs a login: expected --auth USER:PASSWORD, MMSPEC_DEMO_AUTH or --no-auth, got none"
    with pytest.raises(UserError, match=f"^{message}$"):
        served(*public)
    with pytest.raises(UserError, match="a public address needs a key: expected --api-key KEY, MMSPEC_API_KEY or"):
        served("--api", *public, "--auth", "a:b")


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        (["--host", "0.0.0.0", "--no-auth", "--auth", "ann:secret"], {}, "exclude each other"),
        *((["--auth", auth], {}, "--auth must be USER:PASSWORD, neither of them empty") for auth in ("a", "a:", ":b")),
        (["--auth", ""], {}, "--auth (or MMSPEC_DEMO_AUTH) must not be empty: expected USER:PASSWORD"),
        (["--no-auth"], {"MMSPEC_DEMO_AUTH": ""}, "--auth (or MMSPEC_DEMO_AUTH) must not be empty"),
        (["--api", "--api-key", ""], {}, "--api-key (or MMSPEC_API_KEY) must not be empty: expected KEY"),
        (["--api"], {"MMSPEC_API_KEY": ""}, "--api-key (or MMSPEC_API_KEY) must not be empty"),
        (["--adapt-space", "64", "--adapt"], {}, "--adapt goes with --api: got no --api"),
        (["--api-key", "k"], {}, "--api-key goes with --api: got no --api"),
    ],
)
def test_refused_options(served, options, variables, message):
    with pytest.raises(UserError) as error:
        served(*options, env=variables)
    assert message in str(error.value)


def test_a_missing_model_is_an_error_at_start():
    result = CliRunner().invoke(demo, ["--model", "/no/such/folder"])
    assert "there is no such folder" in str(result.exception)


def test_logins_and_options_of_the_api(served):
    assert served("--host", "0.0.0.0", env={"MMSPEC_DEMO_AUTH": "ann:secret"})["auth"] == ("ann", "secret")
    assert served("--host", "0.0.0.0", "--no-auth")["auth"] is None
    model = plugins.default_model()
    for options, expected in (
        ([], None),
        (["--api"], (model, "auto", "127.0.0.1", None, None)),
        (["--api", "--host", "localhost", "--api-key", "k"], (model, "auto", "localhost", "k", None)),
        (["--api", "--share", "--no-auth", "--model", "x", "--drafter", "d"], ("x", "d", None, None, None)),
        (["--api", "--host", "0.0.0.0", "--auth", "a:b", "--api-key", "k"], (model, "auto", None, "k", None)),
    ):
        assert served(*options).get("api") == expected
    assert served("--api", "--adapt")["api"][-1] is not None
    assert "api" not in served(env={"MMSPEC_API_KEY": "k"})  # which is for mmspec serve, too


def test_signals_end_the_process_in_order_and_ignored_ones_stay_ignored():
    def send(number):
        with _signals_raise():
            try:
                os.kill(os.getpid(), number)
            except BaseException:
                os.kill(os.getpid(), signal.SIGTERM)  # during cleanup
                raise

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


def test_a_taken_port_is_an_error():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="in use"), demo_server(port=other.getsockname()[1]):
            pass
