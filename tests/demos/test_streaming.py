"""Times of streamed answers."""

from types import SimpleNamespace

from mmspec import Pipeline
from mmspec.answer import Piece
from mmspec.demos import racing
from mmspec.demos.racing import stream_answer
from mmspec.engine.stats import Stats
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer


def test_seconds_are_those_of_preprocessing_and_of_the_engine(monkeypatch):
    """Of 2 s until the first piece, the engine took 0.5; a consumer that takes hours does not count."""
    now = [100.0]
    monkeypatch.setattr(racing, "clock", lambda: now[0])

    def stream(**_):
        now[0] += 2.0
        yield Piece("A", [65], seconds=0.5)
        yield Piece("B", [66], "stop", Stats(), seconds=0.75)

    io = SimpleNamespace(tokenizer=SimpleNamespace(decode=str), decode=lambda ids: "AB"[: len(ids)])
    pipe = SimpleNamespace(name="tiny", io=io, drafter=None, stream=stream)
    seconds = []
    for answer in stream_answer(pipe, "none", {}, {"max_new_tokens": 9}):
        seconds.append(answer.seconds)
        now[0] += 3600
    assert seconds == [2.0, 2.25]
    assert answer.pass_ends == [2.0, 2.25]
    assert answer.limit == 9


def test_pieces_have_the_seconds_of_the_engine():
    pipe = Pipeline(TransformersTarget(byte_model()), Processor(byte_tokenizer()), None, "tiny")
    seconds = [piece.seconds for piece in pipe.stream("abcabc", max_new_tokens=9, temperature=0.0)]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < seconds[-1]
