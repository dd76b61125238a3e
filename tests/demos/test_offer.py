"""Models and drafters that visitors may choose: the operator's alone, or any."""

import pytest

from demos.offer import offer
from mmspec import UserError


def test_a_closed_offer_refuses_other_names():
    closed = offer(["llava", "/models/hybrid"], ["/drafters/msd"], open=False)
    assert closed.models == ("llava", "/models/hybrid")
    assert closed.drafters == ("auto", "/drafters/msd", "none")
    for model, drafter in (("llava", "auto"), ("/models/hybrid", "/drafters/msd"), ("llava", "none")):
        closed.check(model, drafter)
    with pytest.raises(UserError) as error:
        closed.check("/etc", "auto")
    told = "model must be one that this server offers: expected llava, /models/hybrid, got '/etc'"
    assert str(error.value) == told
    with pytest.raises(UserError, match=r"drafter must be one that this server offers: .* got '/drafters/\.\./msd'"):
        closed.check("llava", "/drafters/../msd")


def test_a_closed_offer_of_nothing_is_what_the_package_carries():
    closed = offer(open=False)
    assert closed.models == ("tiny-hybrid", "tiny-llava")
    assert {"auto", "ngram", "msd", "none"} <= set(closed.drafters)
    for name in ("small:/etc", "../msd", "/"):
        with pytest.raises(UserError, match="drafter must be"):
            closed.check("tiny-llava", name)


def test_an_open_offer_allows_any_name():
    free = offer(["llava"], ["/drafters/msd"])
    assert free.models == ("llava", "tiny-hybrid", "tiny-llava")
    assert free.drafters[:2] == ("auto", "/drafters/msd")
    free.check("/any/folder", "small:/another")


@pytest.mark.parametrize(
    ("models", "open", "expected"),
    [
        ([], True, ("tiny-llava", "tiny-hybrid")),
        (["llava"], True, ("llava", "tiny-hybrid")),
        (["llava", "tiny-hybrid"], False, ("llava", "tiny-hybrid")),
        (["llava", "other"], False, ("llava", "llava")),
    ],
)
def test_the_model_that_answers_by_default_is_on_offer(models, open, expected):
    made = offer(models, open=open)
    assert (made.model_for("image"), made.model_for("text")) == expected
    assert made.model_for("video") == expected[0]
    assert set(expected) <= set(made.models)
