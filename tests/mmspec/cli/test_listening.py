"""Tests of commands that listen: the steps of their start."""

import os
import sys
from contextlib import suppress
from threading import Thread

import pytest


@pytest.mark.long
def test_start_of_the_server_on_a_terminal(tmp_path):
    """Run in a pseudo-terminal: the steps are on stderr, the address alone on stdout."""
    pty = pytest.importorskip("pty")
    import signal
    import subprocess

    from tests.process import ROOT

    arguments = ["serve", "--model", "tiny-llava", "--drafter", "none", "--port", "0"]
    script = f"import sys; from mmspec.cli import main; sys.exit(main({arguments}))"
    reader, writer = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=writer) as server:
        os.close(writer)
        said: list[bytes] = []
        reading = Thread(target=read_all, args=(reader, said))  # a terminal that nobody reads stops the writer
        reading.start()
        line = server.stdout.readline().decode()
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        reading.join()
    os.close(reader)
    assert line.startswith("mmspec serve: http://127.0.0.1:")
    text = b"".join(said)
    assert 0 < text.index(b"importing torch and transformers ...") < text.index(b"loading tiny-llava (drafter none")


def read_all(reader, said):
    """Append what a pseudo-terminal is sent, until its other side is closed."""
    with suppress(OSError):
        while part := os.read(reader, 1 << 12):
            said.append(part)
