"""The benchmark of structured output."""

import json

import pytest

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

import mmspec
from mmspec.errors import UserError
from mmspec.eval.harness.schemas import SchemaRequest
from mmspec.eval.structured import Interleaved, is_valid, stored_requests, summary

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}, "required": ["a"]}


def test_validity():
    assert is_valid('{"a": "2024-02-29"}', SCHEMA)
    assert not is_valid('{"a": "2023-02-29"}', SCHEMA)
    assert not is_valid('{"b": 1}', SCHEMA)
    assert not is_valid('{"a": "2024-02-29"', SCHEMA)
    assert not is_valid("1.0000000000000001", {"exclusiveMinimum": 1})


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("time", "20:00:00.5-01:00", "25:00:00Z"),
        ("date-time", "2024-02-29T10:00:00Z", "2023-02-29T10:00:00Z"),
        ("ipv4", "127.0.0.1", "127.0.0.256"),
    ],
)
def test_formats(name, valid, invalid):
    assert is_valid(f'"{valid}"', {"format": name})
    assert not is_valid(f'"{invalid}"', {"format": name})
    assert is_valid("3", {"format": name})


def test_a_request_is_answered_with_and_without_its_schema():
    decoder = Interleaved(mmspec.load("tiny-hybrid", "ngram"))
    schema = {"type": "array", "items": {"enum": [True, False]}, "minItems": 2, "maxItems": 3}
    record = decoder(SchemaRequest("arrays", "Work out: 37 + 48", schema), {"max_new_tokens": 24})
    assert record["valid"] is True
    assert is_valid(record["text"], schema)
    assert 0 < record["mask_seconds"] < record["seconds"]
    (row, _) = summary([record])
    assert row["valid"] == 1.0
    assert row["tokens_per_second"] == pytest.approx(record["tokens_per_second"])


def test_rates_are_of_all_tokens_over_all_seconds():
    def record(kind, tokens, seconds, valid, free_valid):
        speeds = {f"{name}tokens_per_second": tokens / seconds for name in ("", "plain_")}
        same = {"acceptance_length": 2.0, "free_acceptance_length": 1.0, "seconds": 4.0, "mask_seconds": 1.0}
        free = {"free_tokens": 10, "free_tokens_per_second": 10.0, "free_valid": free_valid}
        return {"kind": kind, "tokens": tokens, "valid": valid, **speeds, **same, **free}

    rows = summary(
        [record("a", 10, 1.0, True, None), record("a", 50, 2.0, False, True), record("b", 9, 1.0, None, None)]
    )
    assert [row["kind"] for row in rows] == ["a", "b", "all"]
    assert rows[0]["tokens_per_second"] == 20.0
    assert rows[0]["ratio"] == 2.0
    assert rows[0]["valid"] == 0.5
    assert rows[0]["ratio_free_ended"] == 2.5
    assert rows[1]["valid"] is None
    assert rows[2]["ended"] == 2
    assert rows[2]["mask_share"] == 0.25


def test_schemas_of_a_file_are_requests_of_its_name(tmp_path):
    file = tmp_path / "Github_easy.jsonl"
    file.write_text("\n".join(json.dumps({"json_schema": json.dumps(SCHEMA), "unique_id": k}) for k in "abc"))
    first, second = stored_requests(file, 2)
    assert first == second
    assert (first.kind, first.schema) == ("Github_easy", SCHEMA)
    assert json.dumps(SCHEMA) in first.prompt
    for row in ({"json_schema": "{"}, {"json_schema": "[]"}, {"schema": "{}"}):
        file.write_text(json.dumps(row))
        with pytest.raises(UserError, match=r"Github_easy.jsonl, line 1: expected a (JSON object|field)"):
            stored_requests(file, 2)
