"""Hosts, origins and keys of requests, their number, and responses that break off; the log of requests."""

import asyncio
import json
import logging
import re
import time

import httpx
import pytest

from mmspec.serving.middleware import AccessGuard, LostReplica, RequestLimit, RequestLog
from mmspec.serving.settings import Limits, host_names, server_url
from mmspec.targets.detokenizer import AnswerReader
from tests.testkit.serve_process import process
from tests.testkit.served import LONG, TIMEOUT, eventually, open_stream, question, served

pytestmark = pytest.mark.usefixtures("server", "one_thread")


HOSTS = {"localhost", "127.0.0.1", "[::1]"}
HERE = {"Host": "localhost:8000"}
STREAM = [(b"Content-Type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]


def status(headers, path, kind="http", **options):
    """Status of the response; the application has status 200."""
    found = []

    async def application(scope, receive, send):
        await send({"status": 200})

    async def send(message):
        found.append(message)

    given = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": kind, "path": path, "headers": given}
    guard = AccessGuard(application, **{"hosts": HOSTS, "origins": ["http://app.example"], "api_key": None, **options})
    asyncio.run(guard(scope, None, send))
    return found[0]["status"]


ACCESS = {
    200: [
        *({"Host": host} for host in ("LOCALHOST:80", "127.0.0.1", "[::1]", "[::1]:8000")),
        *({**HERE, "Origin": o} for o in ("http://app.example", "http://localhost:8000", "https://localhost:8000")),
        *({**HERE, "Authorization": given} for given in ("Bearer secret", "BEARER  secret ")),
    ],
    403: [
        *({"Host": host} for host in ("[::2]:8000", "localhost.evil.example", "evil.example:80", "")),
        *({**HERE, "Origin": o} for o in ("http://localhost", "http://localhost:8001", "null", "")),
        {**HERE, "Origin": "http://app.example.evil.example"},
    ],
    401: [
        HERE,
        *({**HERE, "Authorization": f"Bearer {key}"} for key in ("secre", "secrets", "Secret", "", "s\xe9cret")),
        {**HERE, "Authorization": "Basic secret"},
    ],
}


@pytest.mark.parametrize(("expected", "headers"), [(code, one) for code, rows in ACCESS.items() for one in rows])
def test_access(expected, headers):
    """Probes need no key; None as hosts accepts all hosts."""
    key = None if expected == 403 or ("Authorization" not in headers and expected == 200) else "secret"
    for path in ("/v1/models", "/metrics", "/health/x"):
        assert status(headers, path, api_key=key) == expected
    assert status(headers, "/health", api_key=key) == (200 if expected == 401 else expected)
    if "Origin" not in headers:
        assert status(headers, "/v1/models", hosts=None) == 200
    assert status({}, "/v1/models", kind="lifespan", api_key="secret") == 200


@pytest.mark.parametrize(
    ("host", "address", "known"),
    [
        ("127.0.0.1", "http://127.0.0.1:80", HOSTS),
        ("localhost", "http://localhost:80", HOSTS),
        ("::1", "http://[::1]:80", HOSTS | {"::1"}),
        ("[::1]", "http://[::1]:80", HOSTS),
        ("127.0.0.2", "http://127.0.0.2:80", HOSTS | {"127.0.0.2"}),
        ("0.0.0.0", "http://0.0.0.0:80", None),
        ("::", "http://[::]:80", None),
        ("server.example", "http://server.example:80", None),
    ],
)
def test_addresses_and_names_of_a_server(host, address, known):
    assert (server_url(host, 80), host_names(host)) == (address, known)


def start(headers, status=200):
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(content, more=None):
    rest = {} if more is None else {"more_body": more}
    return {"type": "http.response.body", "body": content, **rest}


def through(messages, kind="http", path="/v1/completions"):
    """Messages that a client receives if the proxy sends these messages and returns."""
    received = []

    async def proxy(scope, receive, send):
        for message in messages:
            await send(message)

    async def send(message):
        received.append(message)

    asyncio.run(LostReplica(proxy)({"type": kind, "path": path, "headers": []}, None, send))
    return received


@pytest.mark.parametrize(
    "messages",
    [
        [start(JSON), body(b"{}")],
        [start(JSON), body(b"{", True), body(b"}", False)],
        [start(STREAM), body(b"data: 1\n\n")],
        [start(STREAM), body(b"data: 1\n\n", True), body(b"", False)],
        [start(JSON), body(b"{", True)],  # a length was stated: nothing can be added
        [start(JSON)],
    ],
)
def test_responses_pass_as_they_are(messages):
    assert through(messages) == messages


def test_a_request_without_a_response_gets_an_error():
    begin, end = through([])
    headers = dict(begin["headers"])
    assert (begin["status"], headers[b"retry-after"], headers[b"content-type"]) == (503, b"1", b"application/json")
    error = json.loads(end["body"])["error"]
    assert error["message"] == "the replica that ran the request was lost: try again"
    assert error["type"] == "server_error"


@pytest.mark.parametrize("sent", [[], [body(b"", True), body(b"data: 1\n\n", True)]])
@pytest.mark.parametrize("name", [b"content-type", b"Content-Type"])
def test_a_stream_that_breaks_off_ends_with_an_error(sent, name):
    given = [start([(b"x", b"event-stream"), (name, b"text/event-stream")]), *sent]
    *before, last = through(given)
    assert before == given
    event, done, rest = last["body"].decode().split("\n\n")
    assert "was lost" in json.loads(event.removeprefix("data: "))["error"]["message"]
    assert (done, rest) == ("data: [DONE]", "")
    assert not last.get("more_body", False)


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/messages", b"text/event-stream"), ("/api/chat", b"application/x-ndjson")]
)
def test_a_stream_of_other_apis_that_breaks_off(path, kind):
    *_, last = through([start([(b"content-type", kind)]), body(b"{}", True)], path=path)
    text = last["body"].decode()
    if path == "/api/chat":
        assert "was lost" in json.loads(text)["error"]
        assert text.endswith("}\n")
    else:
        name, data, *rest = text.split("\n")
        assert (name, rest) == ("event: error", ["", ""])
        error = json.loads(data.removeprefix("data: "))
        assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")


def test_other_connections_get_nothing():
    assert through([], "lifespan") == []


def test_a_request_that_is_cancelled_leaves_room_for_the_next():
    """As Ray cancels requests whose clients have gone; a cancelled request gets an error."""
    seen = []

    async def application(scope, receive, send):
        seen.append(scope["path"])
        if scope["path"] == "/long":
            await asyncio.Event().wait()
        await send(start(JSON))

    async def send(message):
        seen.extend([message["status"]] if "status" in message else [])

    async def scenario():
        limited = RequestLog(RequestLimit(application, set(), most=1))
        requests = [{"type": "http", "method": "GET", "path": path, "headers": []} for path in ("/long", "/next")]
        first = asyncio.ensure_future(limited(requests[0], None, send))
        while not seen:
            await asyncio.sleep(0)
        await limited(requests[1], None, send)
        first.cancel()
        await asyncio.wait([first])
        await limited(requests[1], None, send)

    asyncio.run(scenario())
    assert seen == ["/long", 503, 503, "/next", 200]


def pairs(record):
    return {name: value.strip('"') for name, value in re.findall(r'(\w+)=("[^"]*"|\S+)', record.getMessage())}


@pytest.fixture
def lines(caplog):
    """Waits for the next records of requests at the level info and above, and returns their pairs."""
    caplog.set_level(logging.INFO, "mmspec.serving")

    def found(count):
        assert eventually(lambda: len(caplog.records) >= count)
        records = [*caplog.records]
        caplog.clear()
        assert len(records) == count, [record.getMessage() for record in records]
        return [{**pairs(record), "level": record.levelname} for record in records]

    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "prefix"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "n": 2}, "chatcmpl-"),
        ("completions", {"prompt": ["Hi", "Ho ho"], "max_tokens": 9}, "cmpl-"),
        ("responses", {"input": "Hi", "max_output_tokens": 9}, "resp_"),
    ],
)
def test_an_answer_is_a_line(path, fields, prefix, stream, server, lines):
    began = time.perf_counter()
    response = server.post({**fields, "temperature": 0, "stream": stream}, path)
    took = time.perf_counter() - began
    (line,) = lines(1)
    usage = server.post({**fields, "temperature": 0}, path).json()["usage"]
    lines(1)
    (identity,) = {*re.findall(rf'"id":"({prefix}\w+)"', response.text)}
    (length,) = {*re.findall(r'"mean_acceptance_length":([\d.]+)', response.text)}
    assert (line["id"], line["endpoint"]) == (identity, f"POST /v1/{path}")
    assert (line["status"], line["finish"], line["level"]) == ("200", "length", "INFO")
    prompt, generated = (
        usage.get(f"{new}_tokens", usage.get(f"{old}_tokens"))
        for new, old in (("input", "prompt"), ("output", "completion"))
    )
    assert (int(line["prompt_tokens"]), int(line["generated_tokens"])) == (prompt, generated)
    assert float(line["acceptance_length"]) == round(float(length), 2)
    queue, first, total = (float(line[f"{name}_s"]) for name in ("queue", "first_token", "total"))
    assert 0 <= queue <= first <= total
    assert total <= took + 1e-3


def test_requests_that_fail_are_lines(server, lines, monkeypatch):
    server.post(question(top_p=2))
    httpx.get(f"{server.url}/x%0A%22{'y' * 300}")
    httpx.get(f"{server.url}/v1/models", headers={"Origin": "http://evil.example"})
    (wrong, unknown, refused) = lines(3)
    assert (wrong["status"], wrong["finish"], wrong["level"]) == ("400", "error", "INFO")
    assert wrong["error"] == "top_p must be <= 1: got 2"
    assert (unknown["endpoint"], unknown["status"]) == (f"GET /x%0A%22{'y' * 196}", "404")
    assert unknown["error"].startswith("there is no /x")
    assert (refused["endpoint"], refused["status"], refused["finish"]) == ("GET /v1/models", "403", "error")
    assert {"id", "prompt_tokens", "queue_s"}.isdisjoint(wrong)

    append, left = AnswerReader.append, []

    def broken(*args, **keywords):
        if not left:
            raise RuntimeError("out of\norder")
        left.pop()
        return append(*args, **keywords)

    monkeypatch.setattr(AnswerReader, "append", broken)
    for stream, pieces in ((False, 0), (True, 0), (True, 2)):
        left += [None] * pieces
        server.post(question(stream=stream))
        (failed,) = lines(1)
        assert (failed["status"], failed["finish"], failed["level"]) == ("500", "error", "ERROR")
        assert failed["error"] == "out of"
    assert eventually(lambda: server.idle)


def test_tracebacks_probes_and_metrics_are_for_debugging(server, lines, caplog, monkeypatch):
    paths = ("/livez", "/health", "/readyz", "/metrics")

    def all_sorts():
        caplog.clear()
        for path in paths:
            httpx.get(server.url + path)
        with monkeypatch.context() as patch:
            patch.setattr(server.pipe.engine, "submit", lambda *_, **__: 1 / 0)
            server.post(question())
        assert eventually(lambda: any("status=500" in record.getMessage() for record in caplog.records))
        return [*caplog.records]

    (only,) = all_sorts()
    assert only.exc_info is None
    caplog.set_level(logging.DEBUG, "mmspec.serving")
    *probes, failed, traceback = all_sorts()
    assert [pairs(one)["endpoint"] for one in probes] == [f"GET {path}" for path in paths]
    assert {one.levelname for one in (*probes, traceback)} == {"DEBUG"}
    assert traceback.exc_info is not None
    assert traceback.exc_info[0] is ZeroDivisionError
    assert pairs(failed)["id"] in traceback.getMessage()


def test_clients_that_disconnect_and_requests_that_do_not_fit(pipe, slow, lines):
    slow(0.02)
    with served(pipe, Limits(max_running=1, max_waiting=0)) as server:
        for stream in (False, True):
            connection = open_stream(server, question(stream=stream, **LONG))
            assert eventually(lambda: server.app.state.slots.running == 1)
            if stream:
                assert b"data: " in connection.recv(1 << 16)
                assert server.post(question()).status_code == 429
                (busy,) = lines(1)
                assert (busy["status"], busy["finish"]) == ("429", "error")
                assert "queue_s" not in busy
            connection.close()
            (gone,) = lines(1)
            assert (gone["status"], gone["finish"], gone["level"]) == ("499", "disconnected", "INFO")
            assert "prompt_tokens" not in gone
            assert eventually(lambda: server.idle)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_the_end_of_the_server_cancels(pipe, slow, lines, stream):
    slow(0.02)
    with served(pipe, Limits(shutdown_timeout=0)) as server:
        connection = open_stream(server, question(stream=stream, **LONG))
        assert eventually(lambda: server.app.state.slots.running == 1)
        assert not stream or b"data: " in connection.recv(1 << 16)
    connection.close()
    (cut,) = lines(1)
    assert (cut["status"], cut["finish"], cut["level"]) == ("503", "error", "ERROR")
    assert cut["error"] == "the server is stopping: try again later"


@pytest.mark.parametrize(("level", "count"), [pytest.param("info", 2, marks=pytest.mark.long), ("warning", 0)])
def test_the_process_writes_them_to_standard_error(level, count, tmp_path):
    with (tmp_path / "err").open("w") as err, process("--port", "0", "--log-level", level, stderr=err) as (_, url):
        for body in (question(), question(top_p=2)):
            httpx.post(f"{url}/chat/completions", json=body, timeout=TIMEOUT)
        found = (tmp_path / "err").read_text()
    line = r'^\d{4}-.* INFO .*endpoint="POST /v1/chat/completions" status=[24]00 '
    assert len(re.findall(line, found, re.M)) == found.count("/v1/chat/completions") == count
    assert "/health" not in found  # uvicorn has no lines of its own
