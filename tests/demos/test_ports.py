"""Tests of the server's port."""

import socket

import pytest

from mmspec.demos import server


class Page:
    """Fake page whose first launches fail because the port is taken."""

    def __init__(self, taken):
        self.taken = taken
        self.tried = []

    def launch(self, *, server_name, server_port):
        self.tried.append(server_port)
        if len(self.tried) <= self.taken:
            raise OSError("taken")


def test_free_port_taken_meanwhile_is_replaced():
    page = Page(taken=2)
    server._launch(page)
    assert len(page.tried) == 3
    assert 0 not in page.tried
    with pytest.raises(OSError, match="taken"):
        server._launch(Page(taken=100))


def test_given_port_is_the_only_one_tried():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        page, port = Page(taken=0), other.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            server._launch(page, server_port=port)
    assert page.tried == []
    page = Page(taken=1)
    with pytest.raises(OSError, match="taken"):
        server._launch(page, server_port=port)
    assert page.tried == [port]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_free_port(host):
    assert server._bindable_port(host, 0) > 1023
