"""Tests of commands that listen: the steps of their start."""

import logging
import sys

import pytest

from mmspec.cli.listening import steps_shown


@pytest.mark.parametrize("terminal", [True, False])
def test_steps_are_shown_on_a_terminal_only(terminal, monkeypatch, capsys, caplog):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    log = logging.getLogger("mmspec")
    before = log.level, log.propagate, list(log.handlers)
    with steps_shown():
        logging.getLogger("mmspec.load").info("loading %s", "tiny-llava")
        logging.getLogger("mmspec.load").debug("a detail")
    logging.getLogger("mmspec.load").info("a request")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == ("loading tiny-llava...\n" if terminal else "")
    assert (log.level, log.propagate, log.handlers) == before
    with caplog.at_level(logging.INFO, "mmspec"), steps_shown():
        logging.getLogger("mmspec.load").info("loading again")
    assert ("loading again" in caplog.text) is not terminal


@pytest.mark.long
def test_start_of_the_server_on_a_terminal(tmp_path):
    """Run in a pseudo-terminal: the steps are on stderr, the address alone on stdout."""
    pty = pytest.importorskip("pty")
    import os
    import signal
    import subprocess

    from tests.process import ROOT

    script = "import sys; from mmspec.cli import main; sys.exit(main(['serve', '--port', '0', '--drafter', 'none']))"
    reader, writer = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=writer) as server:
        line = server.stdout.readline().decode()
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    os.close(writer)
    said = b""
    while not said.endswith(b"dtype auto)...\r\n"):
        said += os.read(reader, 1)
    os.close(reader)
    assert line.startswith("mmspec serve: http://127.0.0.1:")
    assert b"importing torch and transformers..." in said
    assert b"loading tiny-llava (drafter none, device auto, dtype auto)..." in said
