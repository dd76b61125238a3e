"""Open image and video sources (paths, bytes, data URIs, file objects) and identify their format by the first bytes.

Does not decode. URLs other than data URIs are rejected: the caller must download them.
"""

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from mmspec.errors import UserError
from mmspec.validation import data_of, is_data_uri

HEAD_BYTES = 4096
"""Bytes of a file that are read to identify its format."""

MAX_PIXELS = 89_478_485
"""Maximum pixels of an image or video frame: the size at which Pillow warns of decompression bombs (256 MiB of RGB)."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_MAX_NAME = 200  # characters of a source's name in error messages

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"BM", "a BMP image"),
    (b"II*\x00", "a TIFF image"),
    (b"MM\x00*", "a TIFF image"),
    (b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (b"FLV\x01", "an FLV video"),
    (b"\x00\x00\x01\xba", "an MPEG video"),
    (b"\x00\x00\x01\xb3", "an MPEG video"),
    (b"0&\xb2u\x8ef\xcf\x11", "a Windows Media file"),
    (b"YUV4MPEG2 ", "a Y4M video"),
    (b"OggS", "an Ogg file"),
    (b"ID3", "an MP3 audio file"),
    (b"fLaC", "a FLAC audio file"),
    (b"MThd", "a MIDI audio file"),
    (b"#!AMR", "an AMR audio file"),
    (b"%PDF", "a PDF document"),
    (b"%!PS", "a PostScript document"),
    (b"\xc5\xd0\xd3\xc6", "a PostScript document"),
    (b"{\\rtf", "an RTF document"),
    (b"AT&TFORM", "a DjVu document"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a Microsoft Office document"),
    (b"\xd7\xcd\xc6\x9a", "a WMF drawing"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"PK\x05\x06", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a program"),
    (b"SQLite format 3\x00", "an SQLite data file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 data file"),
    (b"\x93NUMPY", "a NumPy data file"),
    (b"PAR1", "a Parquet data file"),
    (b"GGUF", "a GGUF data file"),
)
_OFFICE = (  # names of entries at the start of a ZIP archive
    (b"mimetypeapplication/epub+zip", "an EPUB document"),
    (b"mimetypeapplication/vnd.oasis.opendocument", "an OpenDocument document"),
    (b"[Content_Types].xml", "a Microsoft Office document"),
    (b"word/", "a Microsoft Office document"),
    (b"ppt/", "a Microsoft Office document"),
    (b"xl/", "a Microsoft Office document"),
)
_MARKUP = re.compile(rb"<(svg|!doctype svg|html|!doctype html|head|body|script)\b", re.IGNORECASE)
_CONTROL = frozenset(range(32)) - frozenset(b"\t\n\f\r\x1b")  # bytes that no text contains
# last words of descriptions of formats without images and videos
_NEITHER = ("text", "document", "drawing", "archive", "audio file", "program", "data file")
_ADVICE = {
    "a PDF document": "; render its pages first, e.g. pdftoppm -png",
    "a PostScript document": "; render its pages first, e.g. gs -sDEVICE=png16m",
    "an SVG drawing": "; render it first, e.g. rsvg-convert",
}
_RIFF = {b"AVI ": "an AVI video", b"WAVE": "a WAV audio file", b"WEBP": "a WebP image"}
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")
_SCRIPTS = (b"#EXTM3U", b"ffconcat", b"v=0", b"<")  # playlists and markup, whatever their encoding
_QUICKTIME_ATOMS = (b"moov", b"mdat", b"wide", b"free", b"skip")


@dataclass(frozen=True)
class MediaSource:
    """A non-empty source of bytes, a ``path`` or a ``stream``, that can be opened repeatedly: its name in error
    messages and its first ``HEAD_BYTES`` bytes (``head``)."""

    name: str
    head: bytes
    path: Path | None = None
    stream: BinaryIO | None = None

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open a binary stream at position 0. Files are closed at the end; the caller's own stream is not."""
        if self.path is not None:
            with self.path.open("rb") as file:
                yield file
        else:
            assert self.stream is not None
            self.stream.seek(0)
            yield self.stream

    @cached_property
    def description(self) -> str:
        """The format according to the first bytes, with an article: "a PNG image", "text"."""
        return _describe(self.head)

    @property
    def is_neither(self) -> bool:
        """Whether the first bytes belong to text or to a format that contains neither images nor videos."""
        return self.description.endswith(_NEITHER)

    def refusal(self, expected: str) -> UserError:
        """The error for a source that is not ``expected``: "an image", "a video", or "an image or a video"."""
        what = self.description
        advice = _ADVICE.get(what, "; unpack it first" if what.endswith("archive") else "")
        return UserError(f"{self.name}: expected {expected}, received {what}{advice}")


def printable(name: object) -> str:
    """Escape control characters in a name and shorten it, for one-line error messages."""
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(name))
    return text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME // 2]}...{text[-_MAX_NAME // 2 :]}"


def _describe(head: bytes) -> str:
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12], "a RIFF file")
    if head[:4] == b"FORM" and head[8:11] == b"AIF":
        return "an AIFF audio file"
    if head[4:8] == b"ftyp":
        if head[8:12] in (b"avif", b"avis"):
            return "an AVIF image"
        if head[8:12] in _HEIF_BRANDS:
            return "a HEIF image"
        return "an M4A audio file" if head[8:11] == b"M4A" else "an MP4 or MOV video"
    if head[4:8] in _QUICKTIME_ATOMS:
        return "an MP4 or MOV video"
    if head[:1] == b"G" and head[188:189] == b"G" and head[376:377] == b"G":  # sync byte of every 188-byte packet
        return "an MPEG transport stream video"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(_SCRIPTS):
        markup = _MARKUP.search(head)
        return ("an SVG drawing" if b"svg" in markup[1].lower() else "an HTML document") if markup else "text"
    what = next((what for signature, what in _SIGNATURES if head.startswith(signature)), None)
    if what == "a ZIP archive":
        return next((document for entry, document in _OFFICE if entry in head), what)
    if what is not None:
        return what
    if head[257:262] == b"ustar":
        return "a tar archive"
    # UTF-16 with a BOM, or UTF-8 or mostly ASCII without control characters.
    characters = head.decode(errors="ignore") if _CONTROL.isdisjoint(head) else ""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or 2 * len(characters.encode()) > len(head):
        return "text"
    if b"%PDF-" in head[:1024]:  # readers accept bytes before the header
        return "a PDF document"
    return f"unknown data (first bytes {head[:8].hex(' ')})"


def resolve(source: object, *, expected: str, name: str | None = None) -> MediaSource:
    """Check that a source is readable and not empty: str or path-like, a base64 data URI, bytes-like, or a binary file
    object, which is not closed, but read into memory if it cannot seek. Messages contain ``expected``, "an image" or "a
    video", and ``name``, by default the path. Raises ``UserError``: the source is a URL, a missing, empty or unreadable
    file, a folder, a device, or of another type."""
    if isinstance(source, str) and is_data_uri(source):
        source, name = data_of(source), name or "<data URI>"
    if isinstance(source, str | os.PathLike):
        return _resolve_path(os.fspath(source), expected, name)
    if isinstance(source, bytes | bytearray | memoryview):
        stream: BinaryIO = io.BytesIO(source)
        label = printable(name or "<bytes>")
    elif hasattr(source, "read"):
        stream, label = _resolve_stream(source, expected, name)
    else:
        raise UserError(f"{expected} must be a path, bytes or a file object: received {type(source).__name__}")
    head = stream.read(HEAD_BYTES)
    if not head:
        raise UserError(f"{label}: expected {expected}, received no bytes")
    return MediaSource(label, head, stream=stream)


def _resolve_path(text: str | bytes, expected: str, name: str | None) -> MediaSource:
    path_text = os.fsdecode(text)
    label = printable(name or path_text)
    if _URL.match(path_text) and not os.path.exists(path_text):
        raise UserError(f"{label}: expected a local file, received a URL; fetch it first")
    path = Path(path_text)
    received, head = "an empty file", b""
    try:
        if path.is_dir():
            received = "a folder"
        elif path.exists() and not path.is_file():
            received = "a device or pipe"
        else:
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        received = f"a file that cannot be opened ({getattr(error, 'strerror', None) or error})"
        if os.path.islink(path_text) and not os.path.exists(path_text):
            received = "a broken link"
        elif isinstance(error, FileNotFoundError):
            received = "no such file"
    if not head:
        raise UserError(f"{label}: expected {expected}, received {received}")
    return MediaSource(label, head, path=path)


def _resolve_stream(source: object, expected: str, name: str | None) -> tuple[BinaryIO, str]:
    own_name = getattr(source, "name", None)
    label = printable(name or (own_name if isinstance(own_name, str) else f"<{type(source).__name__}>"))
    assert hasattr(source, "read")
    try:
        if isinstance(source.read(0), str):
            raise UserError(f"{label}: expected a file opened in binary mode, received one in text mode")
        if hasattr(source, "seek") and hasattr(source, "seekable") and source.seekable():
            source.seek(0)
            return source, label  # type: ignore[return-value]  # duck-typed: only read and seek are used
        return io.BytesIO(source.read()), label
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{label}: expected {expected}, received a file object that cannot be read ({error})") from None
