"""A public server: login and key, closed catalog, limit on uploads and their removal, the opening race."""

import os
import re
from pathlib import Path

import httpx
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from mmspec.demos import service
from mmspec.demos.catalog import make_catalog
from mmspec.demos.models import ModelCache
from mmspec.demos.racing import Race
from mmspec.demos.server import API
from tests.demos.serving import SHORT, TIMEOUT, demo_server, upload
from tests.testkit.serve_process import KEY
from tests.testkit.served import eventually

RACED = []


@pytest.fixture(scope="module")
def public():
    """A server that removes what was not used for 1000 s at once, with 1 MiB for uploads."""
    models = ModelCache(device="cpu")
    options = {
        "catalog": make_catalog(["tiny-hybrid", "tiny-llava"], ["ngram"], open=False),
        "api": API("tiny-hybrid", host=None, key="secret").app(models),
        "auth": ("ann", "pass"),
        "upload_space": 1,
        "cleanup": (0.05, 1000),
        "opened": True,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "race", lambda *given: RACED.append(given[2]) or iter([Race([], equal=True)]))
        patch.setattr(Race, "pays", True)
        with demo_server(models=models, **options) as url:
            assert eventually(lambda: RACED)
            patch.undo()
            yield url


@pytest.fixture
def ann(public):
    """An HTTP client that has logged in."""
    with httpx.Client(timeout=TIMEOUT) as client:
        assert client.post(f"{public}login", data={"username": "ann", "password": "pass"}).status_code == 200
        yield client


def test_first_tab_is_raced_before_a_visitor_comes(public):
    assert [request["prompt"][:12] for request in RACED] == ["Max has 24 a"]


def test_page_has_its_login_and_the_api_its_key(public, ann):
    assert httpx.get(f"{public}config").status_code == 401
    assert httpx.get(f"{public}config", headers=KEY).status_code == 401
    assert httpx.post(f"{public}login", data={"username": "ann", "password": "wrong"}).status_code == 400
    assert upload(public).status_code == 401
    for path in ("v1/models", "metrics"):
        assert httpx.get(f"{public}{path}").status_code == 401
        assert httpx.get(f"{public}{path}", headers=KEY).status_code == 200
    assert httpx.get(f"{public}health").status_code == 200
    assert ann.get(f"{public}config").status_code == 200
    assert ann.get(f"{public}v1/models").status_code == 401
    assert httpx.get(f"{public}v1/models", headers=KEY | {"Host": "example.org"}).status_code == 200
    assert httpx.get(f"{public}v1/models", headers=KEY | {"Origin": "http://example.org"}).status_code == 403
    alive = {httpx.get(f"{public}gradio_api/alive").text for _ in range(2)}  # the page asks for it every second
    assert [re.fullmatch("[0-9a-f]{16}", one) is not None for one in alive] == [True]


def test_uploads_have_a_limit_and_are_removed_and_samples_are_kept(public, ann):
    def send(size):
        return ann.post(f"{public}gradio_api/upload", files={"files": ("a.png", bytes(size))})

    (path,) = send(600_000).json()
    rejected = send(500_000)
    assert rejected.status_code == 507
    assert rejected.json() == {"detail": "the server's space for uploads is full: try again in a few minutes"}
    assert Path(path).exists()
    os.utime(path, (0, 0))
    assert eventually(lambda: not Path(path).exists())
    assert send(500_000).status_code == 200
    addresses = re.findall(r'"(http[^"]*/file=[^"]*\.(?:png|mp4))"', ann.get(f"{public}config").text)
    assert len(addresses) >= 6
    for url in addresses:
        assert ann.get(url).status_code == 200


def test_names_outside_the_catalog_raise(public):
    client = Client(public, verbose=False, auth=("ann", "pass"), httpx_kwargs={"timeout": TIMEOUT})
    offered = "must be one that this server offers: expected"
    for arguments, message in (
        ({"model": "smollm2"}, f"model {offered} tiny-hybrid, tiny-llava, got 'smollm2'"),
        ({"model": "/etc"}, f"model {offered}"),
        ({"drafter": "recycle"}, f"drafter {offered} auto, ngram, none, got 'recycle'"),
        ({"drafter": "small:/etc"}, f"drafter {offered}"),
    ):
        raced = {"methods": ["none", arguments["drafter"]]} if "drafter" in arguments else arguments
        for name, given in (("/generate", arguments), ("/compare", raced)):
            with pytest.raises(AppError, match=re.escape(message)):
                client.predict("Work out: 3 + 4", api_name=name, **given, **SHORT)
