"""Downloads on behalf of clients: public addresses only, also after redirects, within limits."""

import socket
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from mmspec.errors import UserError
from mmspec.serving import media
from mmspec.serving.media import download, is_public
from mmspec.serving.settings import is_loopback
from tests.testkit.served import QUESTION, SCENE, data_uri, question, served

PRIVATE = {
    "this host": "0.0.0.0 127.0.0.1 127.255.0.1 :: ::1 ::8.8.8.8",
    "private networks": "10.0.0.1 172.16.0.1 192.168.1.1 100.64.0.1 fc00::1 fec0::1",
    "links": "169.254.169.254 fe80::1%eth0",
    "groups": "224.0.0.1 240.0.0.1 255.255.255.255 ff02::1",
    "examples and tests": "192.0.2.1 198.18.0.1 198.51.100.1 203.0.113.1 2001:db8::1 3fff::1 100::1",
    "protocols": "192.0.0.9 192.88.99.1 5f00::1 2001::1",
    "IPv4 in IPv6": "::ffff:127.0.0.1 ::ffff:10.0.0.1 2002:7f00:1:: 2002:808:808:: 64:ff9b::7f00:1 64:ff9b:1::808:808",
}
PUBLIC = "8.8.8.8 1.1.1.1 192.31.196.1 2606:4700:4700::1111 2620:4f:8000::1 ::ffff:8.8.8.8 64:ff9b::808:808"


@pytest.mark.parametrize("of", [*PRIVATE, "public"])
def test_public_addresses(of):
    addresses = PRIVATE.get(of, PUBLIC).split()
    assert [address for address in addresses if is_public(address)] == (addresses if of == "public" else [])


def test_loopback_hosts():
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "localhost.example.org", ""]))


@pytest.fixture
def site(monkeypatch):
    """A site at 127.0.0.1, which counts as public here; 127.0.0.2 does not."""

    class Site(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.strip("/")
            if name.startswith("to="):
                self.send_response(302)
                self.send_header("Location", self.path.partition("=")[2])
                self.end_headers()
            elif name in ("scene.png", "large", "slow"):
                content = SCENE.read_bytes() if name == "scene.png" else b"x" * 5000
                self.send_response(200)
                if name != "large":
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                for part in range(0, len(content), 500):
                    if name == "slow":
                        time.sleep(0.1)
                    try:
                        self.wfile.write(content[part : part + 500])
                    except OSError:
                        return
            else:
                self.send_error(404)

        def log_message(self, *args):
            pass

    monkeypatch.setattr(media, "is_public", lambda address: address == "127.0.0.1")
    with ThreadingHTTPServer(("0.0.0.0", 0), Site) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_file_is_downloaded(site):
    assert download(f"{site}/large", 5000) == b"x" * 5000
    assert download(f"{site}/to=/to={site}/scene.png", 1 << 20) == SCENE.read_bytes()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nothing", "received status 404"),
        ("/bild-ü.png?größe=1", "received status 404"),
        ("/large", "at most 4999 bytes"),
        ("/slow", "must end within 0.3 s"),
        ("/to=/to=/to=/to=/scene.png", "at most 3 redirects"),
        ("/to=file:///etc/passwd", "must be http or https: got file"),
        ("/to=http://[bad", "cannot download"),
    ],
)
def test_files_that_are_refused(site, path, message):
    with pytest.raises(UserError, match=message):
        download(site + path, 4999, seconds=0.3 if path == "/slow" else 60)


def test_redirects_to_other_addresses_are_refused(site):
    port = site.rpartition(":")[2]
    for url in (f"http://127.0.0.2:{port}/scene.png", f"{site}/to=http://127.0.0.2:{port}/scene.png"):
        with pytest.raises(UserError, match=r"must lead to public addresses: '127\.0\.0\.2' does not"):
            download(url, 1 << 20)


def test_names_are_judged_by_all_their_addresses_and_resolved_once(site, monkeypatch):
    port = int(site.rpartition(":")[2])
    asked = []
    answers = {"good.example": [["127.0.0.1"], ["127.0.0.2"]], "mixed.example": [["127.0.0.1", "127.0.0.2"]]}
    real = socket.getaddrinfo

    def resolve(host, *args, **options):
        if host not in answers:
            return real(host, *args, **options)
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in answers[host].pop(0)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    # A second resolution of this name returns other addresses.
    assert download(f"http://good.example:{port}/scene.png", 1 << 20) == SCENE.read_bytes()
    assert asked == ["good.example"]
    with pytest.raises(UserError, match="public addresses"):
        download(f"http://mixed.example:{port}/scene.png", 1 << 20)


def test_hosts_that_cannot_be_reached(site):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(UserError, match=r"cannot download from '127\.0\.0\.1': ConnectError"):
            download(f"http://127.0.0.1:{free.getsockname()[1]}/", 10)
    with pytest.raises(UserError, match="cannot download from 'nothing"):
        download("http://nothing.invalid/", 10)


def test_requests_with_urls(site, pipe, one_thread):
    with served(pipe, allow_urls=True) as server:
        expected = server.post(question(QUESTION, data_uri(SCENE))).json()["choices"]
        assert server.post(question(QUESTION, f"{site}/scene.png")).json()["choices"] == expected
        for url in ("http://127.0.0.2/a.png", "http://localhost.invalid/a.png", "ftp://127.0.0.1/a.png"):
            response = server.post(question(QUESTION, url))
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "messages[0].content[0].image_url.url"
