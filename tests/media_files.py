"""Small valid media files of many kinds, for ``tests.fuzz``."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms, features

pytest.importorskip("av")

import av

from mmspec.vision.embedded import samples

SIDE = 48
FRAMES = 6

PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
EXIF = Image.Exif()
EXIF[ExifTags.Base.Orientation] = 6
MIRROR = (-1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)


def media_files() -> dict[str, bytes]:
    """Files by kind: images first, then videos."""
    return dict([*_images(), *_videos()])


def pages() -> list[Image.Image]:
    """Frames of ``film``."""
    noise = np.random.default_rng(0).integers(0, 32, (FRAMES, SIDE, SIDE, 3), dtype=np.uint8)
    for number, page in enumerate(noise):
        page[8 * number : 8 * number + 8] += 200
    return [Image.fromarray(page) for page in noise]


def _saved(image: Image.Image, kind: str, **options: object) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def _images() -> Iterator[tuple[str, bytes]]:
    first, *others = pages()
    several = {"save_all": True, "append_images": others, "duration": 100}
    palette, grey = first.quantize(16), first.convert("L")
    faded = first.copy()
    faded.putalpha(grey)
    deep = Image.fromarray(np.asarray(grey, dtype=np.uint16) * 257)
    yield "PNG", _saved(first, "PNG", icc_profile=PROFILE, exif=EXIF)
    yield "PNG, palette", _saved(palette, "PNG", transparency=0)
    yield "PNG, alpha", _saved(faded, "PNG")
    yield "PNG, 16 bits", _saved(deep, "PNG")
    yield "PNG, animated", _saved(first, "PNG", **several)
    yield "PNG, animated, profile", _saved(first, "PNG", icc_profile=PROFILE, exif=EXIF, **several)
    yield "GIF", _saved(palette, "GIF", transparency=0)
    yield "GIF, animated", _saved(first, "GIF", **several)
    yield "WebP", _saved(faded, "WEBP", icc_profile=PROFILE, exif=EXIF)
    yield "WebP, lossless", _saved(first, "WEBP", lossless=True)
    yield "WebP, animated", _saved(first, "WEBP", **several)
    yield "TIFF", _saved(first, "TIFF", icc_profile=PROFILE, exif=EXIF)
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"):
        yield f"TIFF, {compression}", _saved(first, "TIFF", compression=compression)
    yield "TIFF, group4", _saved(grey.convert("1"), "TIFF", compression="group4")
    yield "TIFF, pages", _saved(first, "TIFF", save_all=True, append_images=others)
    yield "ICO", _saved(faded, "ICO", sizes=[(16, 16), (32, 32)])
    yield "ICO, bitmaps", _saved(faded, "ICO", sizes=[(16, 16), (32, 32)], bitmap_format="bmp")
    yield "ICO, profile", _icon(_saved(faded, "PNG", icc_profile=PROFILE))
    yield "ICNS", _saved(faded.resize((128, 128)), "ICNS")
    yield "JPEG", _saved(first, "JPEG", icc_profile=PROFILE, exif=EXIF)
    yield "JPEG, progressive", _saved(first, "JPEG", progressive=True)
    yield "JPEG, CMYK", _saved(first.convert("CMYK"), "JPEG")
    if features.check("jpg_2000"):
        yield "JPEG 2000", _saved(first, "JPEG2000")
    if features.check("avif"):
        yield "AVIF", _saved(first, "AVIF", icc_profile=PROFILE, exif=EXIF)
    for kind in ("BMP", "PPM", "TGA", "PCX", "SGI", "DDS", "QOI", "DIB", "IM", "MSP", "SPIDER", "XBM"):
        image = {"MSP": grey.convert("1"), "XBM": grey.convert("1"), "SPIDER": grey.convert("F")}.get(kind, first)
        if kind != "QOI" or "QOI" in Image.SAVE:
            yield kind, _saved(image, kind)


def _icon(png: bytes) -> bytes:
    """An ICO that contains one PNG."""
    return struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", SIDE, SIDE, 0, 0, 1, 32, len(png), 22) + png


def _videos() -> Iterator[tuple[str, bytes]]:
    x264 = {"preset": "ultrafast", "g": "3"}
    b_frames = x264 | {"bf": "2", "b-adapt": "0"}
    yield "MP4", film("mp4", "libx264", b_frames)
    yield "MP4, mirrored", _mirrored(film("mp4", "libx264", x264))
    yield "MP4, fragments", film("mp4", "libx264", x264, {"movflags": "frag_keyframe+empty_moov"})
    yield "MP4, MPEG-4", film("mp4", "mpeg4", {})
    yield "MOV", film("mov", "libx264", b_frames)
    yield "MOV, PNG, profile", _mirrored(film("mov", "png", {}, icc_profile=PROFILE, exif=EXIF))
    yield "MKV", film("matroska", "libx264", b_frames)
    yield "MKV, FFV1", film("matroska", "ffv1", {})
    yield "WebM", film("webm", "libvpx", {"deadline": "realtime", "cpu-used": "8"})
    yield "AVI", film("avi", "mpeg4", {})
    yield "AVI, MJPEG, EXIF", film("avi", "mjpeg", {}, exif=EXIF, icc_profile=PROFILE)
    yield "AVI, raw", film("avi", "rawvideo", {})
    yield "TS", film("mpegts", "libx264", b_frames)
    yield "MPEG", film("mpeg", "mpeg1video", {})
    yield "FLV", film("flv", "flv", {})
    yield "H.264", film("h264", "libx264", b_frames)


def film(kind: str, codec: str, options: dict[str, str], mux: dict[str, str] | None = None, **saved: object) -> bytes:
    """A video; with ``saved``, its frames are image files as Pillow saves them with these options."""
    data = io.BytesIO()
    with av.open(data, "w", format=kind, options=mux or {}) as container:
        stream = container.add_stream(codec, rate=25, options=options)
        stream.width = stream.height = SIDE
        stream.pix_fmt = {"png": "rgb24", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
        for number, page in enumerate(pages()):
            if not saved:
                container.mux(stream.encode(av.VideoFrame.from_image(page)))
                continue
            packet = av.Packet(_saved(page, {"png": "PNG", "mjpeg": "JPEG"}[codec], **saved))
            packet.stream, packet.is_keyframe, packet.time_base = stream, True, Fraction(1, 25)
            packet.pts = packet.dts = number
            packet.duration = 1
            container.mux(packet)
        if not saved:
            container.mux(stream.encode(None))
    return data.getvalue()


def _mirrored(data: bytes) -> bytes:
    """The display matrix of an MP4 or MOV set to a mirror."""
    at = data.index(b"tkhd") + 44
    return data[:at] + struct.pack(">9i", *MIRROR) + data[at + 36 :]


def cut_clip() -> bytes:
    """Half of the sample clip, in Matroska, which declares the length of the whole."""
    file = io.BytesIO()
    with av.open(str(samples() / "clip.mp4")) as whole, av.open(file, "w", format="matroska") as copy:
        stream = copy.add_stream_from_template(whole.streams.video[0])
        for packet in whole.demux(whole.streams.video[0]):
            if packet.size:
                packet.stream = stream
                copy.mux(packet)
    return file.getvalue()[: len(file.getvalue()) // 2]
