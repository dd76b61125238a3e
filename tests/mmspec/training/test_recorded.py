"""Features that are recorded while answers are generated."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import mmspec
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.sampling.params import SamplingParams
from mmspec.training.answering import AnswerGenerator, PendingConversation
from mmspec.training.features import Extractor, RecordedFeatures, Recorder
from tests.model_folders import save_text_model

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = save_text_model(tmp_path_factory.mktemp("text"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return mmspec.load(str(folder), None, "cpu")


@pytest.fixture(scope="module")
def target(loaded):
    return loaded.target


@pytest.fixture(scope="module")
def conversations(loaded, tmp_path_factory):
    """Answers in batches of three, of which some join and leave; and the folder of their features."""
    pipe = Pipeline(loaded.target, loaded.processor, Recorder(), max_num_seqs=3)
    jobs = [PendingConversation(f"{k}", [[{"type": "text", "text": "ab " * (k + 1)}]], [0]) for k in range(11)]
    params = SamplingParams(temperature=4.0, max_new_tokens=150)
    found, folder = [], tmp_path_factory.mktemp("features")
    for number, some in enumerate((jobs[:6], jobs[6:])):
        answered = [one for done in AnswerGenerator(pipe, 0, params).run(some) for one in done]
        assert len(pipe.drafter.finished) == len(answered) == len(some)
        pipe.drafter.save(folder / f"{number}.safetensors", answered, pipe)
        assert not pipe.drafter.finished
        found += answered
    return found, folder


def test_recorded_features_are_those_of_a_pass_over_the_conversation(loaded, target, conversations):
    found, folder = conversations
    assert len({len(one.answers[0]) for one in found}) > 2  # they end at different times
    recorded, extract = RecordedFeatures([folder], target), Extractor(loaded)
    for batch in (found[:1], found[3:9], found):
        ours, theirs = recorded(batch), extract(batch)
        assert torch.equal(ours.answer, theirs.answer)
        assert torch.equal(ours.keep, theirs.keep)
        assert torch.equal(ours.tokens, theirs.tokens)
        known = theirs.keep & torch.cat([theirs.keep[:, 1:], theirs.keep[:, :1] & False], dim=1)
        torch.testing.assert_close(ours.hidden[known], theirs.hidden[known], atol=1e-4, rtol=1e-4)
        assert torch.equal(ours.embeds, theirs.embeds)


def test_features_belong_to_their_answers(target, conversations, tmp_path):
    found, folder = conversations
    recorded = RecordedFeatures([folder], target)
    assert found[0] in recorded
    assert replace(found[0], id="1/0") in recorded  # of the second of several files
    assert replace(found[0], id="none") not in recorded
    with pytest.raises(UserError, match="of another answer"):
        recorded([replace(found[0], answers=((5, 6, 7),))])
    (tmp_path / "damaged.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="expected recorded features"):
        RecordedFeatures([tmp_path], target)


def test_a_file_that_is_cut_while_in_use_is_an_error(target, conversations, tmp_path):
    found, folder = conversations
    shutil.copytree(folder, tmp_path / "cut")
    recorded = RecordedFeatures([tmp_path / "cut"], target)
    for file in (tmp_path / "cut").iterdir():
        os.truncate(file, 8)
    with pytest.raises(UserError, match=f"expected the recorded features of {found[0].id} in a whole file"):
        recorded(found[:1])


def test_features_of_another_model_and_none_are_refused(target, tmp_path):
    with pytest.raises(UserError, match=r"expected features of make-data --record in .*, received none"):
        RecordedFeatures([tmp_path], target)
    save_file({"a/tokens": torch.ones(3), "a/hidden": torch.zeros(2, 6)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=rf"of size {target.config.hidden_size}, .* received size 6"):
        RecordedFeatures([tmp_path], target)
