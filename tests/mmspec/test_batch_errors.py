"""Mistakes of single requests of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

import mmspec
from mmspec import Generation, Pipeline, SamplingParams, UserError
from mmspec.drafters.ngram import Ngram
from mmspec.targets.processor import Processor
from mmspec.targets.transformers_target import TransformersTarget
from tests.tiny import byte_model, byte_tokenizer

LONG = SamplingParams(max_new_tokens=20)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"prompt": "a", "image": 1}, "a request's keys are"),
    "prompt": ({"prompt": [5.5]}, "must be an object: got 5.5"),
    "media": ({"prompt": "a", "images": ["a.png"]}, "reads text only"),
    "length": ({"prompt": "a" * 500}, "must be shorter than the model's context"),
    "empty": ({"prompt": ""}, "must not be empty"),
    "grammar": ({"prompt": "a", "params": SamplingParams(regex="[^\\x00-\\x{10FFFF}]")}, "allows no token"),
}


def pipeline() -> Pipeline:
    return Pipeline(TransformersTarget(byte_model()), Processor(byte_tokenizer()), Ngram())


@pytest.mark.parametrize("name", WRONG)
def test_others_decode_as_alone(name: str) -> None:
    wrong, message = WRONG[name]
    good = [{"prompt": "Say: "}, {"prompt": "What?", "params": LONG}]
    pipe = pipeline()
    alone = [pipe.generate_batch([one], max_new_tokens=12, nodes=6)[0].token_ids for one in good]
    first, failed, last = pipe.generate_batch([good[0], wrong, good[1]], max_new_tokens=12, nodes=6, on_error="return")
    assert isinstance(failed, UserError)
    assert message in str(failed)
    assert isinstance(first, Generation)
    assert isinstance(last, Generation)
    assert [first.token_ids, last.token_ids] == alone
    with pytest.raises(UserError, match=message):
        pipe.generate_batch([good[0], wrong, good[1]], max_new_tokens=12, nodes=6)
    assert pipe.generate("Say: ", max_new_tokens=12, nodes=6).token_ids == alone[0]  # no request is left over
    assert pipe.generate_batch([]) == []


def test_an_error_while_decoding_is_the_requests_own() -> None:
    class Fails:
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if input_ids.shape[1] > len("Say: ") + 3:
                raise UserError("no more")
            return scores

    keywords: dict[str, Any] = {"logits_processor": [Fails()], "max_new_tokens": 9, "nodes": 4, "on_error": "return"}
    ended, failed = pipeline().generate_batch(
        [{"prompt": "S", "params": SamplingParams(max_new_tokens=3)}, {"prompt": "Say: "}], **keywords
    )
    assert isinstance(ended, Generation)
    assert str(failed) == "no more"


def test_a_broken_image(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    pipe = mmspec.load("tiny-llava", None, device="cpu")
    image = np.full((32, 32, 3), 200, dtype=np.uint8)
    requests = [{"prompt": "Describe the image.", "images": one} for one in (image, str(broken), image)]
    alone = pipe.generate(**requests[0], max_new_tokens=8)
    first, failed, last = pipe.generate_batch(requests, max_new_tokens=8, on_error="return")
    assert isinstance(failed, UserError)
    assert str(broken) in str(failed)
    assert [getattr(one, "token_ids", None) for one in (first, last)] == [alone.token_ids] * 2


def test_keywords_of_the_call_are_checked() -> None:
    with pytest.raises(UserError, match=r"^temperature must be"):
        pipeline().generate_batch([{"prompt": "a"}], temperature=-1, on_error="return")
    with pytest.raises(UserError, match=r"^on_error must be 'raise' or 'return': got 'skip'$"):
        pipeline().generate_batch([{"prompt": "a"}], on_error="skip")  # type: ignore[call-overload]
