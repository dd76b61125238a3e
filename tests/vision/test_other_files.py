"""Files that are neither images nor videos are refused by their content, whatever their name, for what they are."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("av")

import av

from mmspec.errors import UserError
from mmspec.vision.images import load_image
from mmspec.vision.video import kind_of, load_video

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'


def photograph():
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8))


def jpeg():
    return saved("JPEG")


def saved(kind):
    data = io.BytesIO()
    photograph().save(data, kind)
    return data.getvalue()


def zipped(**entries):
    """A ZIP archive without compression: FFmpeg would find the photograph in it."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name.replace("__", "/").replace("_xml", ".xml"), content)
    return data.getvalue()


def tarred():
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        entry = tarfile.TarInfo("photograph.jpg")
        entry.size = len(jpeg())
        archive.addfile(entry, io.BytesIO(jpeg()))
    return data.getvalue()


def database():
    connection = sqlite3.connect(":memory:")
    connection.execute("create table photographs (data blob)")
    connection.execute("insert into photographs values (?)", (jpeg(),))
    connection.commit()
    return bytes(connection.serialize())


def arrays():
    data = io.BytesIO()
    np.save(data, np.zeros(9))
    return data.getvalue()


def sound(kind, codec):
    data = io.BytesIO()
    with av.open(data, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=16000)
        for start in range(0, 16000, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.int16), format="s16", layout="mono")
            frame.sample_rate, frame.pts = 16000, start
            for packet in stream.encode(frame):
                container.mux(packet)
        container.mux(stream.encode(None))
    return data.getvalue()


FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "PDF": (lambda: saved("PDF"), "a PDF document; render its pages first, e.g. pdftoppm -png"),
    "PDF after other bytes": (lambda: b"\x00\x01\r\n" + saved("PDF"), "a PDF document; render its pages first"),
    "EPS": (lambda: saved("EPS"), "a PostScript document; render its pages first"),
    "SVG": (SVG.encode, "an SVG drawing; render it first"),
    "SVG, declared": (lambda: b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- -->\n' + SVG.encode(), "an SVG drawing"),
    "HTML": (lambda: b"<!DOCTYPE html>\n<title>x</title>" + SVG.encode(), "an HTML document"),
    "XML": (lambda: b'<?xml version="1.0"?>\n<rows><row/></rows>', "text"),
    "JSON": (lambda: b'{"a": 1}', "text"),
    "UTF-8": ("Grüße, 世界\n".encode, "text"),
    "Latin-1": (lambda: "Un été à la mer.\n".encode("latin-1") * 99, "text"),
    "UTF-16": (lambda: "Grüße\n".encode("utf-16") * 99, "text"),
    "RTF": (lambda: rb"{\rtf1\ansi x}", "an RTF document"),
    "Word": (lambda: zipped(word__media__image1=jpeg(), word__document_xml=b"<w/>"), "a Microsoft Office document"),
    "Excel, declared": (lambda: zipped(**{"[Content_Types]_xml": b"<T/>"}), "a Microsoft Office document"),
    "EPUB": (lambda: zipped(mimetype=b"application/epub+zip", cover=jpeg()), "an EPUB document"),
    "Writer": (
        lambda: zipped(mimetype=b"application/vnd.oasis.opendocument.text", cover=jpeg()),
        "an OpenDocument document",
    ),
    "old Office": (lambda: bytes.fromhex("d0cf11e0a1b11ae1") + bytes(600) + jpeg(), "a Microsoft Office document"),
    "ZIP": (lambda: zipped(photograph=jpeg()), "a ZIP archive; unpack it first"),
    "tar": (tarred, "a tar archive; unpack it first"),
    "gzip": (lambda: gzip.compress(jpeg()), "a gzip archive; unpack it first"),
    "bzip2": (lambda: bz2.compress(jpeg()), "a bzip2 archive; unpack it first"),
    "xz": (lambda: lzma.compress(jpeg()), "an xz archive; unpack it first"),
    "WAV": (lambda: b"RIFF" + bytes(4) + b"WAVEfmt " + bytes(64), "a WAV audio file"),
    "playlist": (lambda: b"#EXTM3U\n\xe9", "text"),
    "text cut in a character": (lambda: ("é" * 4096).encode()[:4095], "text"),
    "FLAC": (lambda: sound("flac", "flac"), "a FLAC audio file"),
    "MP3": (lambda: sound("mp3", "libmp3lame"), "an MP3 audio file"),
    "SQLite": (database, "an SQLite data file"),
    "NumPy": (arrays, "a NumPy data file"),
    "pickled photograph": (lambda: b"\x80\x05\x95\x00B\x00" + jpeg(), "unknown data (first bytes 80 05"),
}


@pytest.mark.parametrize("kind", FILES)
def test_other_files(tmp_path, kind):
    make, what = FILES[kind]
    data, sources = make(), [tmp_path / "a.png", tmp_path / "a.mp4"]
    for path in sources:
        path.write_bytes(data)
    for load, expected in ((kind_of, "an image or a video"), (load_image, "an image"), (load_video, "a video")):
        for source, name in (*((path, str(path)) for path in sources), (data, "<bytes>")):
            with pytest.raises(UserError) as caught:
                load(source)
            assert str(caught.value).startswith(f"{name}: expected {expected}, received {what}"), caught.value
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("codec", ["libx264", "mpeg4", "mpeg1video", "mpeg2video"])
def test_raw_streams_are_videos(codec):
    """They have no header: FFmpeg finds their start codes anywhere in a file."""
    data = io.BytesIO()
    with av.open(data, "w", format={"libx264": "h264", "mpeg4": "m4v"}.get(codec, codec)) as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for level in range(20, 220, 20):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), level, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert kind_of(data.getvalue()) == "video"
    with pytest.raises(UserError, match="received unknown data"):
        kind_of(b"\x80\x05\x95\x00B\x00" + data.getvalue())
