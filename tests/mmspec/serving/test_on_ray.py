"""``mmspec serve --engine ray`` with two replicas: answers, sessions, load, disconnects, limits, signals."""

import json
import re
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import psutil
import pytest

from mmspec.serving.settings import Limits
from tests.testkit.serve_process import KEY, answers, gone, long_stream, process
from tests.testkit.served import LONG, QUESTION, SCENE, TIMEOUT, data_uri, events, eventually, question, texts

pytest.importorskip("ray.serve", reason="needs ray: pip install -e '.[ray]'")

pytestmark = pytest.mark.long

OPTIONS = ("--engine", "ray", "--replicas", "2", "--port", "0", "--api-key", "secret")
LIMITS = ("--max-running", "2", "--max-waiting", "1")


@pytest.fixture(scope="module")
def url():
    with process(*OPTIONS, *LIMITS) as (running, found):
        yield found
        running.terminate()
        assert running.wait(60) == 0


def post(url, body, session=None):
    headers = KEY | ({"X-Session-Id": session} if session else {})
    return httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=TIMEOUT)


def metrics(url, name):
    """The values of a metric by replica."""
    response = httpx.get(f"{url.removesuffix('/v1')}/metrics", headers=KEY, timeout=TIMEOUT)
    assert response.status_code == 200
    found = Counter()
    for labels, value in re.findall(rf"^vllm:{name}{{(.*)}} (\S+)$", response.text, re.MULTILINE):
        found[re.findall('replica="(.+?)"', labels)[0]] += float(value)
    return found


def running(url):
    return sorted(metrics(url, "num_requests_running").values())


@contextmanager
def stream(url, session=None, **fields):
    headers = KEY | ({"X-Session-Id": session} if session else {})
    body = question(stream=True, **{**LONG, **fields})
    with httpx.stream("POST", f"{url}/chat/completions", json=body, headers=headers, timeout=TIMEOUT) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def test_answers_are_those_of_the_pipeline(url, pipe):
    body = question(QUESTION, data_uri(SCENE))
    expected = pipe.generate(QUESTION, images=str(SCENE), max_new_tokens=16).text
    for session in "abcd":
        assert post(url, body, session).json()["choices"][0]["message"]["content"] == expected
    streamed = post(url, {**body, "stream": True})
    assert texts(streamed) == [expected]
    assert len(events(streamed)) > 2
    assert httpx.get(f"{url}/models", timeout=TIMEOUT).status_code == 401


def test_a_session_stays_at_its_replica_whose_prefix_cache_it_uses(url):
    homes = {}
    for session in map(str, range(12)):
        first = question(f"Describe picture {session} in the album of a long journey.")
        before = metrics(url, "request_success_total")
        answer = post(url, first, session).json()["choices"][0]["message"]
        assert answer["content"]
        follow_up = {"role": "user", "content": "Which colour?"}
        again = post(url, {**first, "messages": [*first["messages"], answer, follow_up]}, session).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        after = metrics(url, "request_success_total")
        (homes[session],) = [name for name in after if after[name] - before.get(name, 0) == 2]
    assert len(set(homes.values())) == 2  # fails by chance once in 2000 runs


def test_requests_without_a_session_go_to_the_replica_with_fewer_requests(url):
    with ExitStack() as streams:
        for _ in range(4):
            streams.enter_context(stream(url))
        assert running(url) == [2, 2]
    assert eventually(lambda: running(url) == [0, 0])


@pytest.mark.parametrize("fields", [{}, {"n": 2}])
def test_a_client_that_goes_away_frees_its_slots(url, fields):
    ended = metrics(url, "request_success_total")
    with stream(url, **fields):
        assert sum(running(url)) == fields.get("n", 1)
    assert eventually(lambda: running(url) == [0, 0])
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/chat/completions", json=question(**LONG), headers=KEY, timeout=0.3)
    assert eventually(lambda: running(url) == [0, 0])
    assert metrics(url, "request_success_total") == ended  # none to its end


def processes(running, name=""):
    """Processes of a server and its Ray, of which some leave its process tree."""
    children = psutil.Process(running.pid).children(recursive=True)
    return [one for one in children if name in " ".join(one.cmdline())]


def sessions_by_replica(url):
    found = {}
    for session in map(str, range(20)):
        before = metrics(url, "request_success_total")
        assert post(url, question(max_tokens=1), session).status_code == 200
        after = metrics(url, "request_success_total")
        found.update({name: session for name in after if after[name] > before.get(name, 0)})
        if len(found) == 2:
            break
    return found


def error_of(lines):
    """The error that a stream ends with; None if it ends without one."""
    *_, last, done = filter(None, lines)
    assert done == "data: [DONE]"
    return json.loads(last.removeprefix("data: ")).get("error")


@pytest.mark.slow
def test_a_lost_replica(pipe):
    """Its requests get an error, other requests and later requests their answers; another replica replaces it."""
    body = question(QUESTION, data_uri(SCENE))
    expected = pipe.generate(QUESTION, images=str(SCENE), max_new_tokens=16).text

    def check_answers():
        for session in "abcdef":
            assert post(url, body, session).json()["choices"][0]["message"]["content"] == expected

    with process(*OPTIONS) as (server, url), ThreadPoolExecutor(2) as threads:
        first, second = sessions_by_replica(url).values()
        before = set(metrics(url, "num_requests_running"))
        with stream(url, first) as one, stream(url, second) as other:
            whole = [threads.submit(post, url, question(**LONG), session) for session in (first, second)]
            assert eventually(lambda: running(url) == [2, 2])
            replica, _ = processes(server, "ServeReplica")
            replica.kill()
            errors = [error_of(list(one)), error_of(list(other))]
        assert sorted(found.result().status_code for found in whole) == [200, 503]
        (refused,) = (found.result() for found in whole if found.result().status_code == 503)
        assert refused.headers["retry-after"] == "1"
        errors.remove(None)  # the stream of the other replica
        assert errors == [refused.json()["error"]]
        assert errors[0]["type"] == "server_error"
        assert "the replica that ran the request was lost" in errors[0]["message"]
        check_answers()
        assert eventually(lambda: len(metrics(url, "num_requests_running")) == 2)
        assert len(set(metrics(url, "num_requests_running")) & before) == 1
        check_answers()
        with stream(url), stream(url):
            assert running(url) == [1, 1]


@pytest.mark.slow
def test_an_orderly_end():
    with process(*OPTIONS) as (running, url):
        children = processes(running)
        with long_stream(url) as lines:
            started = time.monotonic()
            running.send_signal(signal.SIGTERM)
            assert error_of(list(lines))  # cancelled after the grace period
            assert time.monotonic() - started > Limits().shutdown_timeout / 2
        assert running.wait(60) == 0
        assert not answers(url)
        assert eventually(lambda: gone(children))
