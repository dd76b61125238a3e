"""A pipeline travels to another process, as Ray and multiprocessing send it, and gives the same tokens there."""

import pickle
import subprocess
import sys

import pytest

from mmspec import Pipeline
from mmspec.drafters.recycle import Recycle
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer, shared_model

ASKED = {"prompt": "one,two,one,two", "max_new_tokens": 12, "nodes": 6}


def pipelines():
    models = byte_model(), shared_model("gemma2"), shared_model("bamba")
    return [Pipeline(TransformersTarget(model), Processor(byte_tokenizer()), Recycle()) for model in models]


def answers(pipes):
    return [pipe.generate(**ASKED).token_ids for pipe in pipes]


def test_a_round_trip_gives_the_same_tokens():
    pipes = pipelines()
    expected, sent = answers(pipes), pickle.dumps(pipes)
    assert answers(pickle.loads(sent)) == expected


@pytest.mark.slow
def test_another_process_gives_the_same_tokens(tmp_path):
    pipes = pipelines()
    expected = answers(pipes)
    (tmp_path / "pipes").write_bytes(pickle.dumps((pipes, ASKED)))
    program = """
import pickle, sys
pipes, asked = pickle.load(open(sys.argv[1], "rb"))
print([pipe.generate(**asked).token_ids for pipe in pipes])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, tmp_path / "pipes"], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(expected)


def test_a_pipeline_in_use_travels_without_the_request():
    pipe = pipelines()[0]
    stream = pipe.stream(**ASKED)
    head = next(stream)
    again = pickle.loads(pickle.dumps(pipe))
    assert again.generate(**ASKED).token_ids == [*head.token_ids, *(t for piece in stream for t in piece.token_ids)]
