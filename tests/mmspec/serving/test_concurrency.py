"""What happens at the same time: several clients, dropped connections, the queue; grammars and their limits."""

import asyncio
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import httpx
import psutil
import pytest

from mmspec.engine.stats import Stats
from mmspec.errors import UserError
from mmspec.eval.harness.prompts import held_out_requests
from mmspec.pipeline import Piece
from mmspec.sampling.syntax import CheckedText, GrammarTrial
from mmspec.serving.media import MediaReader
from mmspec.serving.runner import GrammarChecker
from mmspec.serving.settings import Limits
from tests.testkit.served import (
    LONG,
    QUESTION,
    SCENE,
    TIMEOUT,
    data_uri,
    eventually,
    open_stream,
    question,
    served,
    texts,
)

pytestmark = pytest.mark.usefixtures("server", "one_thread")


@pytest.fixture
def narrow(pipe):
    """A server for one choice at a time, and one that waits."""
    with served(pipe, Limits(max_running=1, max_waiting=1)) as running:
        yield running


def text_of(server, body):
    """The answer to a request, of a stream its pieces together."""
    (text,) = texts(server.post(body))
    return text


def test_answers_together_are_those_alone(server, tmp_path, monkeypatch):
    bodies = []
    for index, asked in enumerate(held_out_requests("mixed", 12)):
        asked["images"][0].save(tmp_path / f"{index}.png")
        images = [data_uri(tmp_path / f"{index}.png")] if index % 3 else []
        seeds = {"temperature": 1.0, "seed": index} if index % 4 == 0 else {}
        bodies.append(question(asked["prompt"], *images, max_tokens=24, stream=index % 2 == 0, **seeds))
    alone = [text_of(server, body) for body in bodies]
    core, together = server.pipe.engine.core, [0]
    step = core.step

    def watch():
        assert max(together) > 3 or eventually(lambda: len(core.running) + len(core.queued) > 3)
        step()
        together.append(len(core.running))

    monkeypatch.setattr(core, "step", watch)
    with ThreadPoolExecutor(len(bodies)) as threads:
        assert list(threads.map(lambda body: text_of(server, body), bodies)) == alone
    assert max(together) > 3
    assert server.idle


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_goes_away_frees_its_slots(server, slow, stream, n):
    slow(0.05)
    connection = open_stream(server, question(QUESTION, data_uri(SCENE), stream=stream, n=n, **LONG))
    if stream:
        assert b"200 OK" in connection.recv(1 << 16)
    core = server.pipe.engine.core
    assert eventually(lambda: len(core.running) == n)
    sequences = list(core.running)
    connection.close()
    assert eventually(lambda: server.idle)
    assert all(sequence.cancelled for sequence in sequences)
    assert text_of(server, question(max_tokens=4))


def test_a_client_that_goes_away_while_its_image_is_decoded(narrow, monkeypatch):
    decode, finish = MediaReader._read, threading.Event()

    def slowly(reader, medium):
        finish.wait(10 * TIMEOUT)
        return decode(reader, medium)

    monkeypatch.setattr(MediaReader, "_read", slowly)
    try:
        connection = open_stream(narrow, question(QUESTION, data_uri(SCENE)))
        assert eventually(lambda: narrow.app.state.slots.running == 1)
        connection.close()
        assert eventually(lambda: narrow.idle)
        assert text_of(narrow, question(max_tokens=2))
    finally:
        finish.set()


def test_requests_beyond_the_queue_are_refused_and_a_waiting_client_may_leave_it(narrow, slow):
    slow(0.05)
    slots = narrow.app.state.slots
    running = open_stream(narrow, question(stream=True, **LONG))
    assert eventually(lambda: slots.running == 1)
    for stream in (True, False):
        waiting = open_stream(narrow, question(stream=stream))
        assert eventually(lambda: slots.waiting == 1)
        refused = narrow.post(question(stream=stream))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "busy with 2 requests: try again" in refused.json()["error"]["message"]
        # Requests that need no slot are answered.
        assert httpx.get(f"{narrow.url}/health").status_code == 200
        metrics = httpx.get(f"{narrow.url}/metrics").text
        assert all(f'num_requests_{name}{{model_name="tiny-llava"}} 1.0' in metrics for name in ("running", "waiting"))
        waiting.close()
        assert eventually(lambda: slots.waiting == 0)
    assert slots.running == 1
    running.close()
    assert eventually(lambda: narrow.idle)


def test_a_client_that_does_not_read_occupies_no_slot(narrow, monkeypatch):
    async def long(prompt, **keywords):
        for number in range(32):
            last = number == 31
            yield Piece("x" * (1 << 20), [1], "length" if last else None, Stats() if last else None)

    monkeypatch.setattr(narrow.pipe, "astream", long)
    connection = open_stream(narrow, question(stream=True))
    assert b"200 OK" in connection.recv(15)
    assert eventually(lambda: narrow.idle)
    received = b""
    while not received.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
        received += connection.recv(1 << 20)
    assert received.count(b"x") >= 32 << 20
    connection.close()


def test_a_client_that_goes_away_during_its_request(server):
    host, port = server.url.removeprefix("http://").split(":")
    for head in (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", b"POST /v1/ch"):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head)
    assert text_of(server, question(max_tokens=2))
    assert server.idle


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"  # the body is incomplete
ONE = Limits(max_running=1, max_waiting=0)


@contextmanager
def connections(server, count, first=b""):
    """Open connections that send only these bytes."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection((host, int(port)))).sendall(first)
        yield


def status(server, path):
    return httpx.get(f"{server.url}{path}", timeout=TIMEOUT).status_code


def test_concurrent_requests_are_limited(pipe):
    """Connections without a request and probes do not count."""
    with served(pipe, ONE) as server:
        with connections(server, ONE.requests + 10):
            assert server.post(question(max_tokens=2)).status_code == 200
        with connections(server, ONE.requests + 256):
            assert eventually(lambda: status(server, "/livez") == 503)
        with connections(server, ONE.requests, HEAD):
            assert eventually(lambda: status(server, "/v1/models") == 503)
            busy = server.post(question())
            assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
            assert busy.json()["error"]["message"] == "the server is answering 65 requests: try again later"
            assert [status(server, path) for path in ("/livez", "/health", "/readyz")] == [200] * 3
        assert eventually(lambda: server.post(question(max_tokens=2)).status_code == 200)


def test_requests_without_the_key_do_not_count(pipe):
    with served(pipe, ONE, api_key="secret") as server, connections(server, ONE.requests + 10, HEAD):
        headers = {"Authorization": "Bearer secret"}
        assert server.post(question(max_tokens=2), headers=headers).status_code == 200


# ---------------------------------------------------------------------- grammars


PATTERN = {"type": "string", "pattern": "(?i)" + r"\p{Lu}\p{Ll}" * 7500}  # 3 s, 300 MiB
WIDE = {"type": "object", "properties": {f"p{n:04}": {"type": "string"} for n in range(4000)}}


def constrained(schema, **fields):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return question(response_format=form, **fields)


def workers():
    return [one for one in psutil.Process().children() if "mmspec.sampling.syntax" in " ".join(one.cmdline())]


@pytest.mark.long
@pytest.mark.parametrize("schema", [PATTERN, WIDE], ids=["pattern", "wide"])
def test_others_are_served_while_a_grammar_is_compiled(server, schema, monkeypatch):
    """Both while it is compiled in a worker and after that; times are the processor's, as other load takes none."""
    server.post(constrained({"type": "boolean"}))  # starts a worker
    health, chat, compiling = [], [], threading.Event()

    def held(trial, *given, **options):
        compiling.wait(10 * TIMEOUT)
        return CHECK(trial, *given, **options)

    monkeypatch.setattr(GrammarTrial, "check", held)
    with ThreadPoolExecutor(2) as threads:
        refused = [threads.submit(server.post, constrained({**schema, "title": str(n)})) for n in range(2)]
        try:
            while not all(one.done() for one in refused):
                started = time.process_time()
                assert httpx.get(f"{server.url}/health", timeout=TIMEOUT).status_code == 200
                health.append(time.process_time() - started)
                assert server.post(question(max_tokens=2)).status_code == 200
                chat.append(time.process_time() - started - health[-1])
                if len(chat) == 3:
                    compiling.set()
        finally:
            compiling.set()
    # A step takes up to 0.7 s with a mask of the wide schema.
    assert max(health) < 2
    assert max(chat) < 4
    for response in (one.result() for one in refused):
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert message.startswith(("json_schema must compile ", "the json_schema is too complex after"))
        assert "\n" not in message
    assert eventually(lambda: server.idle)


def test_a_client_that_goes_away_ends_its_compilation(pipe, monkeypatch):
    monkeypatch.setattr(GrammarTrial, "check", _patient)
    others = workers()  # of the package's server

    def compiling():
        with suppress(psutil.NoSuchProcess):
            return any(one.cpu_times().user > 0.3 for one in workers() if one not in others)
        return False

    with served(pipe, Limits(max_running=1, max_waiting=1)) as server:
        connection = open_stream(server, constrained(PATTERN))
        assert eventually(compiling)
        assert server.app.state.slots.running == 1
        connection.close()
        assert eventually(lambda: server.idle and not compiling())
        assert server.post(constrained({"const": "red"})).json()["choices"][0]["message"]["content"] == '"red"'


def _patient(trial, *given, **options):
    trial.seconds = 10 * TIMEOUT
    return CHECK(trial, *given, **options)


CHECK = GrammarTrial.check


def test_results_are_kept(monkeypatch):
    """Requests share a check; the last 64 results are kept, errors of grammars included, other errors are not."""
    checked = Counter()

    def check(trial, kind, text, **options):
        checked[text] += 1
        time.sleep(0.1 * (text == "shared"))
        if text == "wrong":
            raise UserError("a wrong grammar")
        if text == "broken":
            raise RuntimeError("no worker")
        return CheckedText(text)

    async def scenario():
        checker = GrammarChecker()
        await asyncio.gather(*(checker.check(("regex", "shared")) for _ in range(3)))
        for _ in range(2):
            assert await checker.check(("regex", "right")) == "right"
            with pytest.raises(UserError, match=r"^a wrong grammar$"):
                await checker.check(("regex", "wrong"))
            with pytest.raises(RuntimeError, match="no worker"):
                await checker.check(("regex", "broken"))
        assert checked == {"shared": 1, "right": 1, "wrong": 1, "broken": 2}
        for number in range(63):
            await checker.check(("regex", str(number)))
        for text in ("right", "0", "62"):
            await checker.check(("regex", text))
        checker.close()

    monkeypatch.setattr(GrammarTrial, "check", check)
    asyncio.run(scenario())
    assert (checked["right"], checked["0"], checked["62"]) == (2, 1, 1)


def test_millions_of_values(server):
    for content in (b'{"messages":[' + b"[]," * 2_000_000 + b"[]]}", b"[" * 3_000_000):
        response = httpx.post(f"{server.url}/v1/chat/completions", content=content, timeout=60)
        assert response.status_code == 400
        assert "must have at most 1000000 values" in response.json()["error"]["message"]
