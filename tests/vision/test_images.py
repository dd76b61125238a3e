"""Tests of `load_image`: sources, formats and modes pixel by pixel; broken input, and files that are no media."""

import base64
import bz2
import gzip
import io
import lzma
import os
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

pytest.importorskip("av")

from mmspec.errors import UserError
from mmspec.vision.images import load_image
from mmspec.vision.media import MAX_PIXELS, printable
from mmspec.vision.video import kind_of, load_video
from tests.media_files import film

RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'


def picture(width=6, height=4):
    """RGB noise: no two orientations, channels or rows look alike."""
    return np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)


def pixels(source):
    image = load_image(source)
    assert image.mode == "RGB"
    return np.asarray(image)


def assert_user_error(source, *expected):
    with pytest.raises(UserError) as caught:
        load_image(source)
    for part in expected:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def png(width, height, depth, colour, data, *extra):
    """A hand-written PNG, for formats that Pillow cannot write."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">2I5B", width, height, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", header), *extra, (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def test_source_types(tmp_path):
    expected = picture()
    path = tmp_path / "a.png"
    Image.fromarray(expected).save(path)
    for source in (path, str(path), path.read_bytes(), bytearray(path.read_bytes()), io.BytesIO(path.read_bytes())):
        assert np.array_equal(pixels(source), expected)
    with path.open("rb") as file:
        assert np.array_equal(pixels(file), expected)
        assert not file.closed
    given = Image.fromarray(expected)
    loaded = load_image(given)
    assert loaded is not given
    loaded.putpixel((0, 0), BLACK)
    assert np.array_equal(np.asarray(given), expected)


def test_exif_orientation(tmp_path):
    upright = picture()
    stored = {  # stored pixels of the upright image for each tag (Exif 2.32, 4.6.4)
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }
    for orientation, turned in stored.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        for suffix in ("png", "tiff", "webp"):
            path = tmp_path / f"{orientation}.{suffix}"
            Image.fromarray(np.ascontiguousarray(turned)).save(path, exif=exif, lossless=True)
            assert np.array_equal(pixels(path), upright)


def test_broken_exif_is_ignored(tmp_path):
    Image.fromarray(picture()).save(tmp_path / "a.png", exif=b"Exif\x00\x00not a TIFF header")
    assert np.array_equal(pixels(tmp_path / "a.png"), picture())


def test_palette_with_and_without_transparency(tmp_path):
    image = Image.new("P", (3, 1))
    image.putpalette([*RED, *GREEN, *BLUE])
    image.putdata([0, 1, 2])
    image.save(tmp_path / "plain.png")
    assert pixels(tmp_path / "plain.png").tolist() == [[[*RED], [*GREEN], [*BLUE]]]
    image.save(tmp_path / "one.png", transparency=1)
    image.save(tmp_path / "one.gif", transparency=1)
    for name in ("one.png", "one.gif"):
        assert pixels(tmp_path / name).tolist() == [[[*RED], [*WHITE], [*BLUE]]]
    image.save(tmp_path / "many.png", transparency=bytes([0, 255, 128]))
    assert pixels(tmp_path / "many.png").tolist() == [[[*WHITE], [*GREEN], [127, 127, 255]]]


GREYS = {
    "L": {77: 77},
    "1": {1: 255, 0: 0},
    "I;16": {65535: 255, 128: 0, 129: 1, 257 * 77: 77},
    "I;16B": {257 * 77: 77},
    "I": {257 * 77 + 128: 77, 0: 0, 65535: 255},
    "F": {0.0: 0, 1.0: 255, 0.5: 128, 77.4: 77, 255.0: 255, 257.0 * 77: 77, 65535.0: 255},
}


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("RGBA", (255, 0, 0, 0), WHITE),
        ("RGBA", (255, 0, 0, 255), RED),
        ("RGBA", (0, 0, 0, 51), (204, 204, 204)),
        ("LA", (0, 51), (204, 204, 204)),
        ("La", (0, 51), (204, 204, 204)),
        ("RGBa", (0, 0, 0, 51), (204, 204, 204)),
        ("PA", (0, 0), WHITE),
        ("CMYK", (0, 255, 255, 0), RED),
        ("CMYK", (0, 0, 0, 255), BLACK),
        ("HSV", (0, 255, 255), RED),
        ("LAB", (255, 128, 128), (254, 255, 254)),
        ("YCbCr", (255, 128, 128), WHITE),
        *((mode, value, (grey,) * 3) for mode, greys in GREYS.items() for value, grey in greys.items()),
    ],
)
def test_modes(mode, value, expected):
    if mode in ("I;16", "I;16B"):
        order = "<u2" if mode == "I;16" else ">u2"
        image = Image.frombytes(mode, (2, 2), np.full((2, 2), value, order).tobytes())
    else:
        image = Image.new(mode, (2, 2), value)
    assert load_image(image).getpixel((1, 1)) == expected


def test_colour_key_transparency(tmp_path):
    image = Image.new("RGB", (2, 1), RED)
    image.putpixel((1, 0), BLUE)
    image.save(tmp_path / "a.png", transparency=BLUE)
    assert pixels(tmp_path / "a.png").tolist() == [[[*RED], [*WHITE]]]


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_sixteen_bit_png(colour, channels):
    values = np.array([[0, 0x4D4D, 0xFFFF], [0x0101, 0x8080, 0xFEFE]], dtype=">u2")
    full = np.repeat(values[:, :, None], channels, axis=2)
    if channels in (2, 4):
        full[:, :, -1] = 0xFFFF
    data = b"".join(b"\x00" + row.tobytes() for row in full)
    found = pixels(png(3, 2, 16, colour, data))
    assert found[:, :, 0].tolist() == [[0, 77, 255], [1, 128, 254]]
    assert (found == found[:, :, :1]).all()


def test_sixteen_bit_png_with_a_colour_key():
    data = b"\x00" + struct.pack(">6H", 65535, 0, 0, 0, 0, 65535)
    keyed = png(2, 1, 16, 2, data, (b"tRNS", struct.pack(">3H", 0, 0, 65535)))
    assert pixels(keyed)[0, 0].tolist() == [*RED]
    assert pixels(png(1, 1, 16, 0, b"\x00\xff\xff", (b"tRNS", b"\x00\x00"))).tolist() == [[[*WHITE]]]


@pytest.mark.parametrize("suffix", ["gif", "png", "webp", "tiff"])
def test_first_frame_of_an_animation(tmp_path, suffix):
    pages = [Image.new("RGB", (8, 8), colour) for colour in (RED, GREEN, BLUE)]
    pages[0].save(tmp_path / f"a.{suffix}", save_all=True, append_images=pages[1:], lossless=True)
    assert load_image(tmp_path / f"a.{suffix}").getpixel((4, 4)) == RED


ARRAYS: list[tuple[np.ndarray, np.ndarray]] = [
    (picture(), picture()),
    (picture(1, 5000), picture(1, 5000)),
    (picture()[:, :, 0], np.repeat(picture()[:, :, :1], 3, axis=2)),
    (picture()[:, :, :1], np.repeat(picture()[:, :, :1], 3, axis=2)),
    (picture()[::-1, ::2], picture()[::-1, ::2]),
    (picture().astype(np.uint16) * 257, picture()),
    (picture().astype(np.float64) / 255, picture()),
    ((picture() / 255).astype(np.float16), picture()),
    (picture() > 127, (picture() > 127) * np.uint8(255)),
    (np.dstack([picture(), np.full((4, 6), 255, np.uint8)]), picture()),
    (np.dstack([picture(), np.zeros((4, 6), np.uint8)]), np.full((4, 6, 3), 255, np.uint8)),
]


def test_arrays():
    for array, expected in ARRAYS:
        assert np.array_equal(pixels(array), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_tensors(dtype):
    expected = np.where(picture(8, 6) > 127, np.uint8(255), np.uint8(0))
    tensor = (torch.from_numpy(expected) if dtype == torch.uint8 else torch.from_numpy(expected) / 255).to(dtype)
    assert np.array_equal(pixels(tensor), expected)
    assert np.array_equal(pixels(tensor.permute(2, 0, 1)), expected)
    assert np.array_equal(pixels(tensor[:, :, 0]), np.repeat(expected[:, :, :1], 3, axis=2))
    if dtype.is_floating_point:
        assert np.array_equal(pixels(tensor.clone().requires_grad_()), expected)


def test_invalid_arrays_raise():
    assert_user_error(np.zeros((2, 2, 2), np.uint8), "(H, W) or (H, W, 1|3|4), received shape (2, 2, 2)")
    assert_user_error(np.zeros((3, 8, 8), np.uint8), "received shape (3, 8, 8)")
    assert_user_error(np.zeros((1, 2, 2, 3), np.uint8), "received shape (1, 2, 2, 3)")
    assert_user_error(np.zeros((0, 4, 3), np.uint8), "expected at least 1x1 pixels, received 4x0")
    assert_user_error(np.zeros((2, 2), np.int64), "uint8, uint16, bool or float, received int64")
    assert_user_error(np.array([[-2.5, 1.0]]), "float pixels must lie in 0..1, received -2.5..1")
    assert_user_error(np.array([[0.0, 255.0]]), "received 0..255")
    assert_user_error(np.array([[0.0, np.nan]]), "received nan")
    assert_user_error(torch.zeros(2, 8, 8), "a tensor must be", "received shape (2, 8, 8)")
    for shape in ((1, 1, 3), (3, 1, 1), (4, 9, 3)):
        assert_user_error(torch.zeros(shape), f"shape {shape} could be channels first or last")
    assert_user_error(Image.new("RGB", (0, 3)), "received 0x3")
    assert_user_error(Image.new("RGB", (3, 0)), "received 3x0")
    assert_user_error(Image.fromarray(np.array([[-1, 5]], np.int32)), "0..65535, received -1..5")
    assert_user_error(Image.fromarray(np.array([[7, 65536]], np.int32)), "0..65535, received 7..65536")
    for low, high in ((np.nan, 5), (-0.5, 5), (7, 65536)):
        assert_user_error(Image.fromarray(np.array([[low, high]], np.float32)), "float pixels must lie in")
    assert_user_error(None, "an image must be a path, bytes or a file object: received NoneType")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        *((url, "received a URL") for url in ("http://a.b/c.png", "HTTPS://a.b/c", "s3://b/c", "file:///etc/x")),
        ("data:image/png,abc", "a data URI must be data:TYPE;base64,CONTENT: got another form"),
        ("data:image/png;base64,???", "a data URI must contain base64: got other content"),
        ("Data:image/png;base64,aGVsbG8=", "<data URI>: expected an image, received text"),
    ],
)
def test_urls_raise(url, message):
    assert_user_error(url, message)


def test_data_uris_are_read():
    file = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(file, "PNG")
    loaded = load_image("data:image/png;base64," + base64.b64encode(file.getvalue()).decode())
    assert (loaded.size, loaded.getpixel((0, 0))) == ((3, 2), (255, 0, 0))


def test_files_that_are_not_images(tmp_path, monkeypatch):
    assert_user_error(tmp_path / "none.png", "none.png: expected an image, received no such file")
    assert_user_error(tmp_path, "received a folder")
    assert_user_error("a\x00b", "a\\x00b: expected an image, received a file that cannot be opened")
    assert_user_error("x" * 5000, "cannot be opened")
    (tmp_path / "empty.png").touch()
    assert_user_error(tmp_path / "empty.png", "empty.png: expected an image, received an empty file")
    assert_user_error(b"", "<bytes>: expected an image, received no bytes")
    assert_user_error(io.StringIO("text"), "binary mode, received one in text mode")
    assert_user_error(b"\x1aE\xdf\xa3" + bytes(100), "received a Matroska or WebM video; pass it as a video")
    assert_user_error(b"\x00\x00\x01\xb3\x14\x00\xf0" + bytes(100), "received an MPEG video; pass it as a video")
    assert_user_error(b"\x00\x00\x00\x18ftypisom" + bytes(100), "received an MP4 or MOV video; pass it as a video")
    assert_user_error(b"\x00\x00\x00\x18ftypheic" + bytes(100), "received a HEIF image that cannot be decoded")
    for data in (bytes(range(128, 228)), b"\xff\xff", b"\xff\xffab", b"abcd\x00"):
        assert_user_error(data, f"received unknown data (first bytes {data[:8].hex(' ')})")
    for data in (b"\xff\xfea\x00", b"\xfe\xff\x00a", b"\xff\xffabc"):
        assert_user_error(data, "received text")
    (tmp_path / "link.png").symlink_to(tmp_path / "gone.png")
    assert_user_error(tmp_path / "link.png", "received a broken link")
    os.mkfifo(tmp_path / "pipe.png")
    assert_user_error(tmp_path / "pipe.png", "received a device or pipe")

    def forbidden(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    assert_user_error(tmp_path / "empty.png", "cannot be opened (Permission denied)")


def test_source_names_in_messages(tmp_path):
    with pytest.raises(UserError, match=r"^upload 3: expected an image, received text$"):
        load_image(b"hello", name="upload 3")
    (tmp_path / "two\nlines.png").write_text("x")
    assert_user_error(tmp_path / "two\nlines.png", "two\\nlines.png: expected an image")
    assert len(printable("n" * 10_000)) < 300


def bomb(width, height):
    return png(width, height, 8, 2, b"")


@pytest.mark.parametrize("factor", [1.01, 5])
def test_decompression_bombs(factor, monkeypatch):
    side = int((MAX_PIXELS * factor) ** 0.5)
    assert_user_error(bomb(side, side), f"expected at most {MAX_PIXELS} pixels")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as the calling program may have set it
    assert_user_error(bomb(side, side), f"expected at most {MAX_PIXELS} pixels, received {side}x{side}")
    assert_user_error(np.broadcast_to(np.uint8(0), (side, side)), f"received {side}x{side}")
    monkeypatch.setattr("mmspec.vision.images.MAX_PIXELS", 24)
    assert pixels(picture(6, 4)).shape == (4, 6, 3)
    assert_user_error(picture(5, 5), "expected at most 24 pixels, received 5x5")


def test_text_chunk_bomb():
    body = b"Comment\x00\x00" + zlib.compress(bytes(200 << 20))
    assert_user_error(png(1, 1, 8, 2, b"\x00\x01\x02\x03", (b"zTXt", body)), "received")


def test_no_descriptors_leak(tmp_path):
    Image.fromarray(picture()).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes((tmp_path / "good.png").read_bytes()[:90])
    before = psutil.Process().num_fds()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            load_image(tmp_path / "good.png")
            assert_user_error(tmp_path / "bad.png", "received a broken one")
            assert psutil.Process().num_fds() == before


def saved(kind):
    data = io.BytesIO()
    Image.fromarray(picture(200, 200)).save(data, kind)
    return data.getvalue()


def jpeg():
    return saved("JPEG")


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
    "FLAC": (lambda: b"fLaC" + bytes(600) + jpeg(), "a FLAC audio file"),
    "MP3": (lambda: b"ID3\x04" + bytes(600) + jpeg(), "an MP3 audio file"),
    "SQLite": (lambda: b"SQLite format 3\x00" + bytes(600) + jpeg(), "an SQLite data file"),
    "NumPy": (lambda: b"\x93NUMPY\x01" + bytes(600) + jpeg(), "a NumPy data file"),
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
    data = film({"libx264": "h264", "mpeg4": "m4v"}.get(codec, codec), codec, {})
    assert kind_of(data) == "video"
    with pytest.raises(UserError, match="received unknown data"):
        kind_of(b"\x80\x05\x95\x00B\x00" + data)
