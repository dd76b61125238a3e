"""Hub ids without a network: an immediate one-line error, and loading from the local cache."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import mmspec
from mmspec.drafters.small import Small
from mmspec.targets.checkpoints import is_on_hub
from tests.model_folders import save_text_model

# One of mmspec, one of huggingface_hub per process, without retries. A retried load makes dozens.
CONNECTIONS = 2


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No network: every connection is noted and refused."""
    seen: list[Any] = []

    def refuse(address: Any, *_: Any, **__: Any) -> Any:
        seen.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return seen


def load_drafter() -> None:
    mmspec.load("tiny-llava", drafter="nobody/nothing")


@pytest.mark.parametrize(
    ("kind", "load"),
    [
        ("model", lambda: mmspec.load("nobody/nothing")),
        ("drafter", load_drafter),
        ("drafter", lambda: Small("nobody/nothing")),
    ],
)
def test_an_unreachable_hub_is_one_line_without_retries(attempts: list[Any], kind: str, load: Any) -> None:
    with pytest.raises(mmspec.UserError) as caught:
        load()
    message = str(caught.value)
    assert message.startswith(f"cannot load {kind} 'nobody/nothing': expected an embedded model (gemma3-270m, ")
    assert message.endswith(f"the network or the hub ({constants.ENDPOINT}) cannot be reached")
    assert "\n" not in message
    assert "HF_HUB_OFFLINE" not in message
    assert 1 <= len(attempts) <= CONNECTIONS
    assert not constants.HF_HUB_OFFLINE  # the network may come back


def test_offline_mode_is_named_where_it_is_set(attempts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(mmspec.UserError, match="the local cache of the hub lacks it, and HF_HUB_OFFLINE is set"):
        mmspec.load("nobody/nothing")
    assert not attempts


def test_a_cached_model_loads_without_a_network(attempts: list[Any], tmp_path: Path) -> None:
    cached = tmp_path / "models--nobody--something"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    folder = save_text_model(tmp_path / "model")
    shutil.copytree(folder, cached / "snapshots" / ("0" * 40))
    pipe = mmspec.load("nobody/something", drafter=None, cache_dir=tmp_path)
    assert 1 <= len(attempts) <= CONNECTIONS
    expected = mmspec.load(str(folder), drafter=None).generate("A", max_new_tokens=5)
    assert pipe.generate("A", max_new_tokens=5).token_ids == expected.token_ids


def test_what_is_looked_for_on_the_hub(tmp_path: Path) -> None:
    assert is_on_hub("nobody/nothing")
    assert not is_on_hub("tiny-llava")
    assert not is_on_hub(str(tmp_path))
