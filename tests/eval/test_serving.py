"""The load test: metrics of given requests, and a small run against a real server."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from mmspec.errors import UserError
from mmspec.eval import serving
from mmspec.eval.serving import StreamedRequest
from mmspec.eval.serving import serving as run_server


def test_figures_of_a_load() -> None:
    def request(text: str, tokens: int, first: float, gaps: list[float], accepted: int) -> StreamedRequest:
        metrics = {"num_accepted_draft_tokens": accepted, "num_spec_steps": len(gaps)}
        return StreamedRequest(text, tokens, first, gaps, first + sum(gaps), metrics)

    one, two = request("a", 7, 1.0, [0.5, 0.1], 4), request("b", 1, 3.0, [], 0)
    row = serving._row(2, [([one, two], 4.0, 5 << 20), ([one, two], 2.0, None)], ["a", "c"])
    assert row["tokens_per_second"] == pytest.approx((8 / 4 + 8 / 2) / 2)
    assert row["first_token_seconds"] == 2.0
    assert row["inter_token_seconds"] == pytest.approx(0.3)
    assert row["token_seconds"] == pytest.approx(0.1)
    assert row["mean_acceptance_length"] == 1 + 8 / 4
    assert row["peak_mebibytes"] == 5.0
    assert (row["equal"], row["answers"]) == (2, 4)


@pytest.mark.slow
def test_a_small_run() -> None:
    small = ["--requests", "8", "--clients", "1,4", "--rounds", "1", "--max-new-tokens", "16", "--max-running", "2"]
    done = CliRunner().invoke(serving.main, small)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    assert [(row["clients"], row["answers"], row["equal"]) for row in result["loads"]] == [(1, 8, 8), (4, 8, 8)]
    for row in result["loads"]:
        assert row["tokens_per_second"] > 0 < row["first_token_seconds"] <= row["first_token_seconds_90"]
        assert row["mean_acceptance_length"] > 1
    # With two slots for four clients, some wait.
    assert result["loads"][1]["first_token_seconds_90"] > result["loads"][0]["first_token_seconds"]


@pytest.mark.slow
def test_a_server_that_does_not_start() -> None:
    with pytest.raises(UserError, match="cannot load model 'nobody/nothing'"), run_server(model="nobody/nothing"):
        pass
