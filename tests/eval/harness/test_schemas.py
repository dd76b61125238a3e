"""Generated JSON schemas."""

import json

import pytest

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

import jsonschema

from mmspec import SamplingParams
from mmspec.eval.harness.schemas import KINDS, schema_requests


def test_schemas_are_valid_different_and_supported():
    requests = schema_requests(204)
    assert [one.kind for one in requests[: len(KINDS)]] == list(KINDS)
    for one in requests:
        jsonschema.Draft202012Validator.check_schema(one.schema)
        assert SamplingParams(json_schema=one.schema).json_schema == json.dumps(one.schema)
        assert all(name in one.prompt for name in one.schema["properties"])
    assert len({json.dumps(one.schema) for one in requests}) >= 200


def test_schemas_are_seeded():
    assert schema_requests(20) == schema_requests(40)[:20]
    assert schema_requests(20) != schema_requests(20, seed=1)
