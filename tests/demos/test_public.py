"""Tests of a public server: closed catalog, limit on uploads."""

import os
import re
from pathlib import Path

import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from mmspec.demos.catalog import make_catalog
from tests.demos.serving import SHORT, TIMEOUT, demo_server, upload


@pytest.fixture(scope="module")
def public():
    """A server with one model, one drafter and 1 MiB for uploads."""
    with demo_server(catalog=make_catalog(["tiny-hybrid"], ["ngram"], open=False), upload_space=1) as url:
        yield url


def test_total_size_of_uploads_is_limited(public):
    first = upload(public, bytes(600_000))
    rejected = upload(public, bytes(500_000))
    assert rejected.status_code == 507
    assert rejected.json() == {"detail": "the server's space for uploads is full: try again in a few minutes"}
    (path,) = first.json()
    assert Path(path).exists()
    os.utime(path, (0, 0))
    assert upload(public, bytes(500_000)).status_code == 200
    assert not Path(path).exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "tiny-llava"}, "model must be one that this server offers: expected tiny-hybrid, got 'tiny-llava'"),
        ({"model": "/etc"}, "model must be one that this server offers"),
        ({"drafter": "recycle"}, "drafter must be one that this server offers: expected auto, ngram, none"),
        ({"drafter": "small:/etc"}, "drafter must be one that this server offers"),
    ],
)
def test_names_outside_the_catalog_raise(public, arguments, message):
    client = Client(public, verbose=False, httpx_kwargs={"timeout": TIMEOUT})
    raced = {"methods": ["none", arguments["drafter"]]} if "drafter" in arguments else arguments
    for name, given in (("/generate", arguments), ("/compare", raced)):
        with pytest.raises(AppError, match=re.escape(message)):
            client.predict("Work out: 3 + 4", api_name=name, **given, **SHORT)
