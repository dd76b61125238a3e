"""The process of ``mmspec serve``: start, signals, restart, mistakes on the command line."""

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

import mmspec
from mmspec.adaptation import AdaptOptions
from mmspec.cli import main
from mmspec.sampling import reasoning
from mmspec.serving.call_formats import NAMES
from mmspec.serving.command import serve
from mmspec.serving.server import listen, loading
from mmspec.serving.settings import Limits, ServerSettings
from tests.model_folders import save_gguf
from tests.testkit.serve_process import KEY, answers, gone, long_stream, process
from tests.testkit.served import LONG, QUESTION, SCENE, TIMEOUT, data_uri, eventually, question

GRACE = Limits().shutdown_timeout  # seconds


def workers_of(running, url):
    """The server's processes that decode images, after a request with one."""
    response = httpx.post(
        f"{url}/chat/completions", json=question(QUESTION, data_uri(SCENE)), headers=KEY, timeout=TIMEOUT
    )
    assert response.status_code == 200
    workers = psutil.Process(running.pid).children(recursive=True)
    assert workers
    return workers


@pytest.mark.long
def test_a_kill_a_restart_and_an_orderly_end(pipe):
    with process("--port", "0", "--drafter", "none") as (running, url):
        workers = workers_of(running, url)
        with long_stream(url):
            running.kill()
            running.wait()
        assert eventually(lambda: gone(workers))
    port = url.removesuffix("/v1").rpartition(":")[2]  # free at once
    with process("--port", port, "--drafter", "none", "--api-key", "secret") as (running, again):
        assert again == url
        answer = httpx.post(f"{url}/chat/completions", json=question(**LONG), headers=KEY, timeout=TIMEOUT).json()
        expected = pipe.generate(QUESTION, max_new_tokens=2000, temperature=5.0, seed=11).text
        assert answer["choices"][0]["message"]["content"] == expected
        # It cancels what still runs some time after SIGTERM, and ends.
        assert httpx.get(f"{url}/models", timeout=TIMEOUT).status_code == 401
        workers = workers_of(running, url)
        with long_stream(url) as lines:
            started = time.monotonic()
            running.send_signal(signal.SIGTERM)
            assert eventually(lambda: not answers(url))
            left = list(lines)  # cancelled after the grace period
            assert left[-2:] == ["data: [DONE]", ""]
            assert json.loads(left[-4].removeprefix("data: "))["error"]["type"] == "server_error"
            assert time.monotonic() - started > GRACE / 2
        assert running.wait(TIMEOUT) == 0
        assert eventually(lambda: gone(workers))


@pytest.mark.long
def test_sigterm_under_load(tmp_path):
    """Streams, a request that waits, one that uploads its body, and one that comes too late."""
    options = ("--port", "0", "--shutdown-timeout", "10")
    with (tmp_path / "err").open("w") as err, process(*options, stderr=err) as (running, url):
        body = question(**LONG)
        with ThreadPoolExecutor(9) as threads:
            streams = [
                threads.submit(httpx.post, f"{url}/chat/completions", json={**body, "stream": True}, timeout=TIMEOUT)
                for _ in range(8)
            ]
            assert eventually(lambda: 'running{model_name="tiny-llava"} 8' in metrics(url))
            waiting = threads.submit(httpx.post, f"{url}/chat/completions", json=body, timeout=TIMEOUT)
            assert eventually(lambda: 'waiting{model_name="tiny-llava"} 1' in metrics(url))
            port = int(url.removesuffix("/v1").rpartition(":")[2])
            uploading = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)
            uploading.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n".encode())
            uploading.sendall(b"Content-Length: 999\r\n\r\n{")
            assert answers(url)  # on a later connection: the upload has begun
            running.send_signal(signal.SIGTERM)
            assert eventually(lambda: not answers(url))
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/models", timeout=TIMEOUT)
            assert running.wait(TIMEOUT) == 0
            for one in streams:
                lines = one.result().text.split("\n\n")
                assert lines[-2:] == ["data: [DONE]", ""]
                assert "error" in lines[-3] or '"finish_reason":"' in lines[-3]
            response = waiting.result()
            assert response.status_code in (200, 503)
            assert "error" in response.json() or response.status_code == 200
            answer = uploading.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b'"server_error"' in answer
            uploading.close()
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_while_the_model_loads():
    with listen("127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with loading(listening):
            unready = ("/health", "/readyz", "/v1/models", "/v1/messages")
            for path, status in (("/livez", 200), *((path, 503) for path in unready)):
                response = httpx.get(url + path, timeout=30)
                assert (path, response.status_code) == (path, status)
                if status == 503:
                    message = "the server is loading its model: try again later"
                    assert response.json()["error"]["message"] == message
                    assert response.headers["Retry-After"] == "1"
                    kind = "overloaded_error" if path == "/v1/messages" else "server_error"
                    assert response.json()["error"]["type"] == kind
        with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.2) as client:  # nobody answers, nobody refuses
            client.get(f"{url}/livez")


def metrics(url):
    return httpx.get(f"{url.removesuffix('/v1')}/metrics", timeout=TIMEOUT).text


def speculative(**fields):
    return ["--speculative-config", json.dumps(fields)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "a public address needs a key"),
        (["--api-key", ""], "--api-key (or MMSPEC_API_KEY) must not be empty: expected KEY"),
        (["--api-key", "a b"], "--api-key (or MMSPEC_API_KEY) must be printable"),
        (["--api-key", "a", "--no-auth"], "exclude each other"),
        (["--host", "203.0.113.1", "--no-auth"], "cannot listen on 203.0.113.1, port 8000"),
        (["--replicas", "2"], "--replicas and --replica-gpus go with --engine ray: got --engine local"),
        (["--replica-gpus", "2"], "--replicas and --replica-gpus go with --engine ray: got --engine local"),
        (["--engine", "ray", "--adapt-folder", "."], "by one process: expected --engine local, received ray"),
        (["--drafter", "ngram", "--drafter", "recycle", "--adapt"], "--adapt goes with one --drafter: got 2"),
        (["--adapter", "one"], "must be NAME=FOLDER: got 'one'"),
        (["--max-running", "0"], "0 is not in the range x>=1"),
        (["--chat-template-kwargs", "[1]"], "a JSON object"),
        (["--speculative-config", "5"], "a JSON object"),
        (speculative(method="ngram", disable_by_batch_size=4), "model, num_speculative_tokens: got disable_by"),
        (speculative(method="mlp_speculator"), "method must be one of ngram, suffix, mtp, "),
        (speculative(method="ngram", model="a"), "the method ngram needs no model: got 'a'"),
        (speculative(method="draft_model"), "the method draft_model needs a model: got None"),
        (speculative(method="eagle3", model=5), "the method eagle3 needs a model: got 5"),
        (speculative(method=["ngram"]), "got ['ngram']"),
        (speculative(num_speculative_tokens=3), "got None"),
        (speculative(method="ngram", num_speculative_tokens=0), "num_speculative_tokens must be > 0: got 0"),
        (["--drafter", "ngram", *speculative(method="ngram")], "goes in place of --drafter: got both"),
        (["--frames", "513"], "513 is not in the range 1<=x<=512"),
        (["--model", "nobody/nothing", "--port", "0"], "cannot load model 'nobody/nothing'"),
    ],
)
def test_mistakes_are_one_line(options, message, capfd):
    assert main(["serve", *options]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {"adapt": None, "drafter": "auto", "others": [], "rest": ("127.0.0.1", 8000), "prefix_cache": 1 << 31}),
        (
            "--host ::1 --api-key k --adapter a=. --prefix-cache-size 3",
            {
                **{"api_key": "k", "hosts": {"localhost", "127.0.0.1", "[::1]", "::1"}, "adapters": {"a": "."}},
                **{"prefix_cache_size": 3 << 20, "device_map": None, "rest": ("::1", 8000)},
            },
        ),
        ("--adapt", {"adapt": AdaptOptions()}),
        ("--adapt-folder . --adapt-space 64", {"adapt": AdaptOptions(Path(), 64)}),
        ("--drafter ngram --prefix-cache-dir .", {"drafter": "ngram", "others": [], "prefix_cache_dir": Path()}),
        (
            "--drafter ngram --drafter recycle --max-draft-tokens 9",
            {"drafter": "ngram", "others": ["recycle"], "max_draft_tokens": 9},
        ),
        ('--speculative-config {"method":"ngram"}', {"drafter": "ngram", "num_draft_tokens": None, "others": []}),
        (
            '--speculative-config {"method":"draft_model","model":"a/b","num_speculative_tokens":5}',
            {"drafter": "small:a/b", "num_draft_tokens": 5},
        ),
        ('--speculative-config {"method":"eagle3","model":"./c"}', {"drafter": "./c"}),
        ("--engine ray --replica-gpus 4", {"device_map": "auto", "rest": (1, 4, "127.0.0.1", 8000)}),
        ('--engine ray --replica-gpus 4 --device-map {"":"cpu"}', {"device_map": {"": "cpu"}}),
    ],
)
def test_options(options, expected, monkeypatch):
    given = {}

    def start(settings, *rest):
        given.update({**vars(settings), **settings.loading, **settings.access, **vars(settings.limits), "rest": rest})

    monkeypatch.setattr("mmspec.serving.command._here", start)
    monkeypatch.setattr("mmspec.serving.command._on_ray", start)
    assert main(["serve", *options.split()]) == 0
    assert {name: given[name] for name in expected} == expected


def test_mistakes_of_a_job(capfd, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("_here", "_on_ray"):
        monkeypatch.setattr(f"mmspec.serving.command.{name}", lambda *_: None)
    assert main(["serve", "--drafter", "ngram", "--drafter", "recycle"]) == main(["serve", "--engine", "ray"]) == 2
    sharded, own = capfd.readouterr().err.splitlines()
    assert sharded == "error: a model that is sharded over ranks goes with one --drafter: got 2"
    assert own == "error: --engine ray starts its own processes: got one of 2 ranks of a job"


def test_formats_are_those_of_the_command_line():
    options = {one.name: one for one in serve.params}
    assert options["tool_call_parser"].type.choices == NAMES
    assert all(one.name in options["reasoning_parser"].help for one in reasoning.FORMATS)


def test_a_port_in_use(capfd):
    both = socket.has_dualstack_ipv6()
    with listen("[::1]" if both else "localhost", 0) as local:
        assert local.getsockname()[0] == ("::1" if both else "127.0.0.1")
    with listen("::" if both else "127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
        assert capfd.readouterr().err == f"error: cannot listen on 127.0.0.1, port {port}: Address already in use\n"


def test_the_first_line_and_mmspec_generate_have_the_defaults_of_a_gguf_file(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("mmspec.serving.server.run", lambda *_: None)
    named = {"temp": 0.6, "top_k": 5, "top_p": 0.7, "min_p": 0.1, "penalty_repeat": 1.5}
    sampling = {f"general.sampling.{key}": value for key, value in named.items()}
    usual = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.0}
    for entries, form, values in (
        ({"general.file_type": 15, **sampling}, "Q4_K_M", dict(zip(usual, named.values(), strict=True))),
        ({"general.file_type": 999, "general.sampling.temp": 0.0}, "GGUF", {**usual, "temperature": 0.0}),
        ({}, "GGUF", usual),
    ):
        file = str(save_gguf(tmp_path / f"{len(entries)}.gguf", entries=entries))
        main(["serve", "--model", file, "--port", "0"])
        shown = ", ".join(
            f"{name} {value}" for name, value in values.items() if (name, value) != ("repetition_penalty", 1)
        )
        assert f", {form} on cpu; by default {shown}, max_tokens " in capsys.readouterr().out
        main(["generate", "a b c", "--model", file, "--seed", "3", "--max-new-tokens", "24", "--ignore-eos", "--json"])
        found = json.loads(capsys.readouterr().out)["token_ids"]
        pipe, asked = mmspec.load(file, device="cpu"), {"max_new_tokens": 24, "ignore_eos": True}
        assert found == pipe.generate("a b c", seed=3, **asked, **values).token_ids
        greedy = pipe.generate("a b c", **asked).token_ids  # in Python
        assert greedy == pipe.generate("a b c", temperature=0.0, **asked).token_ids
        assert (found == greedy) == (values["temperature"] == 0)


def test_the_first_line_says_what_is_in_force(monkeypatch, capsys):
    class Changed(ServerSettings):
        def pipelines(self):
            ((_, pipe),) = found = super().pipelines().items()
            pipe.model.generation_config.update(do_sample=True, temperature=0.5, top_p=0.5, suppress_tokens=[5])
            return dict(found)

    monkeypatch.setattr("mmspec.serving.command.ServerSettings", Changed)
    monkeypatch.setattr("mmspec.serving.server.run", lambda *_: None)
    main(["serve", "--model", "tiny-llava", "--port", "0", "--dtype", "int8", "--max-tokens", "9"])
    line = capsys.readouterr().out
    shown = "temperature 0.5, top_p 0.5, top_k 50, max_tokens 9, SuppressTokensLogitsProcessor"
    assert f"(model tiny-llava, drafter flash, int8 on cpu; by default {shown}; Ctrl-C" in line
    assert line.endswith("; Ctrl-C to stop)\n")
