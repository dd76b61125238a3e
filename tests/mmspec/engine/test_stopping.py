from functools import partial

import pytest
import torch

from mmspec.engine import stopping
from mmspec.engine.stopping import Stopper
from mmspec.targets.detokenizer import AnswerReader, Vocabulary
from tests.tiny import byte_ids, byte_tokenizer

PROMPT = [5, 6, 7]


def stopping_at(*stop):
    """A stopper that looks for strings in the text with special tokens, and without them."""
    read = partial(AnswerReader, Vocabulary(byte_tokenizer()), stop=stop)
    return Stopper(9999, readers=[read, partial(read, hidden=frozenset())])


def feed(stopper, tokens, pieces, prompt=PROMPT):
    """Pass tokens in paths of the given lengths; returns the kept tokens, and why the row ended."""
    history, kept, at = list(prompt), [], 0
    readers = [read(prompt) for read in stopper.readers]
    for size in pieces:
        part, reason = stopper.append(history, len(prompt), tokens[at : at + size], readers)
        kept += part
        at += size
        assert history == prompt + kept
        if reason is not None:
            return kept, reason
    return kept, None


@pytest.mark.parametrize("limit", range(1, 10))
def test_limit_is_exact_inside_a_path(limit):
    assert feed(Stopper(limit), list(range(10, 20)), [1, 4, 5]) == (list(range(10, 10 + limit)), "length")


@pytest.mark.parametrize("place", range(8))
def test_end_of_sequence_is_kept_and_nothing_after_it(place):
    tokens = list(range(10, 18))
    tokens[place] = 2
    for limit in (50, place + 1):
        assert feed(Stopper(limit, eos_token_ids=[2, 3]), tokens, [1, 3, 4]) == (tokens[: place + 1], "stop")


@pytest.mark.parametrize("pieces", [[1] * 70, [70], [1, 7, 62], [2, 3, 5, 60]])
@pytest.mark.parametrize("stop", ["END", "E", " wörld", "né", "\n\n", "日本語の文章です。終わり"])
def test_stop_strings_split_over_tokens(stop, pieces):
    text = "héllo wörld né\n\nEND more 日本語の文章です。終わり!"
    tokens = byte_ids(text)
    end = len(text[: text.index(stop)].encode()) + len(stop.encode())
    kept, reason = feed(stopping_at("never", stop), tokens, pieces)
    assert (kept, reason) == (tokens[:end], "stop")


def test_stop_strings_are_sought_in_the_answer_alone():
    kept, reason = feed(stopping_at("END"), byte_ids("D and END."), [99], byte_ids("say EN"))
    assert (kept, reason) == (byte_ids("D and END"), "stop")


def test_a_long_answer_is_watched_at_its_end():
    text = "ab" * 500 + "xyz"
    assert feed(stopping_at("xyz"), byte_ids(text + "!"), [1, *[7] * 200]) == (byte_ids(text), "stop")


@pytest.mark.parametrize("form", [bool, lambda done: torch.tensor([done]), torch.tensor])
def test_custom_criteria_see_every_token_once(form):
    seen = []

    def criterion(input_ids, scores):
        (ids,) = input_ids.tolist()
        seen.append(ids)
        return form(ids[-1] == 14)

    assert feed(Stopper(50, criteria=[criterion]), list(range(10, 20)), [1, 3, 6]) == ([10, 11, 12, 13, 14], "stop")
    assert seen == [PROMPT + list(range(10, end + 1)) for end in range(10, 15)]


def test_each_row_has_room_up_to_the_context_limit():
    stopper = Stopper(5, context_limit=10)
    assert [stopper.limit(length) for length in (1, 5, 6, 9)] == [5, 5, 4, 1]
    assert Stopper(5).limit(1000) == 5
    history = list(range(8))
    assert stopper.append(history, 8, [20, 21, 22]) == ([20, 21], "length")


def test_time_counts_from_the_first_token(monkeypatch):
    times = iter([10.0, 10.0, 12.0, 12.5])
    monkeypatch.setattr(stopping, "clock", lambda: next(times))
    assert feed(Stopper(50, max_time=2.0), list(range(10, 20)), [1, 4, 5]) == ([10, 11, 12], "length")


@pytest.mark.parametrize("between", [[1], [1, 0, 2] * 30])
@pytest.mark.parametrize("stop", ["END", "é"])
def test_special_tokens_within_a_stop_string(stop, between):
    """They are not a part of the text, in which the stop string is whole."""
    first, *rest = byte_ids(stop)
    tokens = [*byte_ids("E "), first, *between, *rest]
    assert feed(stopping_at(stop), [*tokens, 9, 9], [5] * 40) == (tokens, "stop")
    # The text before the answer is none of it, but a character that the answer completes is.
    ends = "stop" if stop == "é" else None
    assert feed(stopping_at(stop), [*between, *rest], [99], [*PROMPT, first]) == ([*between, *rest], ends)


def test_a_special_token_as_a_stop_string():
    tokens = [*byte_ids("a"), 1, *byte_ids("b")]
    assert feed(stopping_at("</s>", "a<s>"), tokens, [3]) == (tokens[:2], "stop")
