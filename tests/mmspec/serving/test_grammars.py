"""Grammars of requests: other clients are served while one is compiled; limits; clients that go away."""

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event

import httpx
import psutil
import pytest

from mmspec.errors import UserError
from mmspec.sampling.syntax import CheckedText, GrammarTrial
from mmspec.serving.runner import GrammarChecker
from mmspec.serving.settings import Limits
from tests.testkit.served import TIMEOUT, eventually, open_stream, question, served

pytestmark = pytest.mark.usefixtures("server", "one_thread")

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
    health, chat, served = [], [], Event()

    def held(trial, *given, **options):
        served.wait(10 * TIMEOUT)
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
                    served.set()
        finally:
            served.set()
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


def test_outputs_that_follow_the_model_given_the_grammar(server, pipe):
    schema = {"enum": ["a", "b"]}
    fields = {"temperature": 1.5, "seed": 3, "grammar_aligned": True}
    body = server.post(constrained(schema, max_tokens=4, **fields)).json()
    alone = pipe.generate(question()["messages"], json_schema=schema, max_new_tokens=4, **fields)
    assert body["choices"][0]["message"]["content"] == alone.text
    figures = body["metrics"]["speculative_decoding"]
    assert figures["num_rejected_outputs"] == alone.stats.num_rejected_outputs > 0
    refused = server.post(constrained(schema, grammar_aligned=True, temperature=0))
    assert refused.status_code == 400
    assert "grammar_aligned goes with sampling" in refused.json()["error"]["message"]
