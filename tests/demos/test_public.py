"""A server that strangers reach: names outside of its offer are refused, and uploads limited in total."""

import os
import re
from pathlib import Path

import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from demos.offer import offer
from tests.demos.serving import PATIENCE, SHORT, demo_server, upload


@pytest.fixture(scope="module")
def public():
    """One that offers a model and no drafter, and keeps a MiB of uploads."""
    with demo_server(offered=offer(["tiny-hybrid"], ["ngram"], open=False), upload_space=1) as url:
        yield url


def test_uploads_are_limited_in_total(public):
    first = upload(public, bytes(600_000))
    refused = upload(public, bytes(500_000))
    assert refused.status_code == 507
    assert refused.json() == {"detail": "the server's space for uploads is full: try again in a few minutes"}
    (path,) = first.json()
    assert Path(path).exists()
    os.utime(path, (0, 0))
    assert upload(public, bytes(500_000)).status_code == 200
    assert not Path(path).exists()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"model": "tiny-llava"}, "model must be one that this server offers: expected tiny-hybrid, got 'tiny-llava'"),
        ({"model": "/etc"}, "model must be one that this server offers"),
        ({"drafter": "recycle"}, "drafter must be one that this server offers: expected auto, ngram, none"),
        ({"drafter": "small:/etc"}, "drafter must be one that this server offers"),
    ],
)
def test_names_outside_of_the_offer_are_refused(public, asked, message):
    client = Client(public, verbose=False, httpx_kwargs={"timeout": PATIENCE})
    for name in ("/generate", "/compare"):
        with pytest.raises(AppError, match=re.escape(message)):
            client.predict("Work out: 3 + 4", api_name=name, **asked, **SHORT)
