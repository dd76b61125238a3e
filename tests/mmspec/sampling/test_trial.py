"""Checks of grammars in worker processes: their limits, and the message of each."""

import json
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

pytest.importorskip("llguidance")

from mmspec import SamplingParams, UserError
from mmspec.sampling.syntax import KINDS, CheckedText, GrammarTrial
from mmspec.workers import Cancellation
from tests.testkit.served import eventually

SLOW = json.dumps({"type": "string", "pattern": "(?i)" + r"\p{Lu}\p{Ll}" * 7500})
"""90 KB that compile in 3 s and 300 MiB."""


@pytest.fixture
def trial():
    found = GrammarTrial()
    yield found
    found.close()


OTHERS: set[int] = set()
"""Processes that other tests' servers have left in this process."""


@pytest.fixture(autouse=True)
def others():
    OTHERS.update(one.pid for one in psutil.Process().children())


def workers():
    own = [one for one in psutil.Process().children() if one.pid not in OTHERS]
    return [one for one in own if "mmspec.sampling.syntax" in " ".join(one.cmdline())]


def test_what_passes_is_not_checked_again(trial, monkeypatch):
    schema = json.dumps({"type": "object"})
    checked = [trial.check("json_schema", schema), trial.check("regex", "a|é"), trial.check("grammar", 'start: "a"')]
    monkeypatch.setattr("mmspec.sampling.syntax.compiled", lambda *_: pytest.fail("compiled"))
    assert all(isinstance(text, CheckedText) for text in checked)
    for kind, text in zip(KINDS, checked, strict=True):
        given = SamplingParams(**{kind: text})
        assert isinstance(given.constraint[1], CheckedText)
    assert len(workers()) == 1


@pytest.mark.parametrize(
    ("kind", "text"),
    [("regex", "("), ("json_schema", '{"type": "thing"}'), ("grammar", "start: foo"), ("regex", "a" * 200_000)],
)
def test_errors_are_those_of_the_check_here(trial, kind, text):
    with pytest.raises(UserError) as ours:
        SamplingParams(**{kind: text})
    with pytest.raises(UserError) as received:
        trial.check(kind, text)
    assert str(received.value) == str(ours.value)


def test_time_limit(trial):
    trial.seconds = 0.3
    with pytest.raises(UserError, match=r"^json_schema must compile within 0.3 s: got one that takes longer$"):
        trial.check("json_schema", SLOW)
    trial.seconds = 60
    assert trial.check("regex", "a") == "a"


def test_memory_limit():
    trial = GrammarTrial(memory=64 << 20, seconds=60)
    with pytest.raises(UserError, match=r"^json_schema must compile in 64 MiB: got one that needs more$"):
        trial.check("json_schema", SLOW)
    assert trial.check("regex", "a") == "a"
    trial.close()


def test_a_stopped_check_ends_its_worker(trial):
    trial.seconds = 600
    stop = Cancellation()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(trial.check, "json_schema", SLOW, stop=stop)
        assert eventually(lambda: any(one.cpu_times().user > 0.2 for one in workers()))
        stop()
        with pytest.raises(UserError, match=r"^json_schema was not checked to the end: stopped$"):
            waiting.result()
    assert workers() == []
    with pytest.raises(UserError, match="stopped"):
        trial.check("regex", "a", stop=stop)
    assert trial.check("regex", "a") == "a"


def test_workers_do_not_load_torch(trial):
    trial.check("regex", "a")
    (worker,) = workers()
    assert not any("torch" in region.path for region in worker.memory_maps())
