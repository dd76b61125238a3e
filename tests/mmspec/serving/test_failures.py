"""An unexpected exception at any stage of a request reaches its client, and leaves the server as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mmspec.engine.sequence import Sequence
from mmspec.engine.stopping import Stopper
from mmspec.sampling.defaults import Defaults
from mmspec.serving import formats, runner
from mmspec.serving.media import MediaReader
from mmspec.serving.metrics import Metrics
from mmspec.targets.detokenizer import AnswerReader
from tests.testkit.served import SCENE, Served, data_uri, eventually, question

pytestmark = pytest.mark.usefixtures("one_thread")


class BrokenError(Exception):
    """Raised by the stages."""


def at_call(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose call of this number, from 0 on, raises."""
    left = [number]

    def called(*args: Any, **keywords: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise BrokenError("out of order")
        return function(*args, **keywords)

    return called


# The object that owns a stage's function, given the server; the function; the call that fails.
STAGES: dict[str, tuple[Callable[[Served], Any], str, int]] = {
    "media": (lambda server: MediaReader, "read", 0),
    "encoding": (lambda server: server.pipe.io, "encode", 0),
    "defaults": (lambda server: Defaults, "complete", 0),
    "stopping": (lambda server: Stopper, "limit", 0),
    "key of the batch": (lambda server: server.pipe.target, "batch_key", 0),
    "queue": (lambda server: server.pipe.engine, "submit", 0),
    "prefill": (lambda server: server.pipe.target, "prefill", 0),
    "first token": (lambda server: Sequence, "accept", 0),
    "verify pass": (lambda server: server.pipe.target, "verify", 1),
    "commit": (lambda server: server.pipe.target, "commit", 1),
    "later token": (lambda server: Sequence, "accept", 3),
    "text": (lambda server: AnswerReader, "append", 0),
    "later text": (lambda server: AnswerReader, "append", 2),
    "figures of the first token": (lambda server: server.app.state.metrics.first_token, "observe", 0),
    "figures of later tokens": (lambda server: server.app.state.metrics.next_tokens, "observe", 0),
    "figures of the end": (lambda server: Metrics, "ended", 0),
    "response": (lambda server: formats, "per_request", 0),
    "parameters of the second choice": (lambda server: runner, "replace", 0),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_it_reaches_the_client(
    stage: str, stream: bool, server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = question("Describe the image.", data_uri(SCENE), temperature=1.0, seed=2**64 - 1, n=2, stream=stream)
    expected = server.post(body)
    assert expected.status_code == 200
    owner, name, number = STAGES[stage]
    where = owner(server)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, at_call(number, getattr(where, name)))
        response = server.post(body)
    events = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    found = json.loads(events[-2] if events else response.text)
    assert "out of order" not in response.text  # nothing of the inside
    assert eventually(lambda: "out of order" in caplog.text)
    message = "internal error (BrokenError): details are in the server's log"
    assert found["error"] == {"message": message, "type": "server_error", "param": None, "code": None}
    assert response.status_code == (200 if events else 500)
    if [*STAGES].index(stage) <= [*STAGES].index("first token"):
        assert response.status_code == 500  # of a stream, too, before its first piece
    assert not events or events[-1] == "[DONE]"
    assert eventually(lambda: server.idle)
    again = server.post(body)
    assert again.status_code == 200
    if not stream:
        assert again.json()["choices"] == expected.json()["choices"]
