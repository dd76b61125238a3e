"""Load images: any common source and pixel format to an 8-bit RGB Pillow image.

Conventions: EXIF orientation is applied; transparency is composited on white; 16-bit values are divided by 257 and
rounded (except RGB PNGs of 16 bits, of which Pillow keeps the high byte); the first frame of an animation is returned;
colour profiles are ignored.
"""

import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from mmspec.errors import UserError
from mmspec.vision.media import MAX_PIXELS, MediaSource, printable, resolve

if TYPE_CHECKING:
    import torch

# Exceptions that Pillow's plugins raise on broken data.
DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    LookupError,
    ArithmeticError,
    AttributeError,
    NotImplementedError,
    RuntimeError,
    AssertionError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)

# Formats that Pillow opens but that are rejected here: EPS runs an external program, WMF needs Windows, and the rest is
# recognised but not decoded.
_REJECTED_FORMATS = frozenset({"EPS", "WMF", "MPEG", "BUFR", "GRIB", "HDF5"})

_CHANNELS = (1, 3, 4)


def load_image(source: object, *, name: str | None = None) -> Image.Image:
    """Load an image as 8-bit RGB.

    Args:
        source: path (str or path-like), data URI, bytes, binary file object, Pillow image, array (H, W) or
            (H, W, 1|3|4), or torch tensor of the same shapes or (1|3|4, H, W); ambiguous shapes raise. Arrays are
            uint8, uint16, bool, or floats in [0, 1]; four channels are RGBA.
        name: name of the source in error messages.

    Returns:
        A new RGB image. The source is neither closed nor changed.

    Raises:
        UserError: the source is a URL, unreadable, not an image, broken, empty, or has more than ``MAX_PIXELS`` pixels.
    """
    if isinstance(source, Image.Image):
        return _from_pillow(source, printable(name or getattr(source, "filename", "") or "<image>"))
    if isinstance(source, np.ndarray):
        return _from_array(source, printable(name or "<array>"))
    if type(source).__module__.partition(".")[0] == "torch":
        return _from_tensor(source, printable(name or "<tensor>"))  # type: ignore[arg-type]
    media = resolve(source, expected="an image", name=name)
    with media.open() as stream, warnings.catch_warnings(), _whole(media.name):
        warnings.simplefilter("ignore")  # plugins warn about metadata
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(stream) as image:
                if image.format in _REJECTED_FORMATS:
                    raise _not_an_image(media)
                return _from_pillow(image, media.name)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise UserError(f"{media.name}: expected at most {MAX_PIXELS} pixels, received more") from None
        except UnidentifiedImageError:
            raise _not_an_image(media) from None


@contextmanager
def _whole(name: str) -> Iterator[None]:
    """Raise Pillow's errors on broken data as ``UserError``."""
    try:
        yield
    except UserError:
        raise
    except DECODE_ERRORS as error:
        raise UserError(f"{name}: expected a whole image, received a broken one ({printable(error)})") from None


def image_format(media: MediaSource) -> tuple[str, bool] | None:
    """Pillow's name of an image's format, and whether it is animated; None if Pillow cannot open it."""
    with media.open() as stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(stream) as image:
                if image.format is None or image.format in _REJECTED_FORMATS:
                    return None
                return image.format, bool(getattr(image, "is_animated", False))
        except Image.DecompressionBombError:
            return "image", False
        except DECODE_ERRORS:
            return None


def composite_on_white(image: Image.Image) -> Image.Image:
    """Composite an image with an alpha channel on white; returns RGB."""
    rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _not_an_image(media: MediaSource) -> UserError:
    endings = {"video": "; pass it as a video", "image": " that cannot be decoded"}
    ending = endings.get(media.description.rpartition(" ")[2])
    if ending is None:
        return media.refusal("an image")
    return UserError(f"{media.name}: expected an image, received {media.description}{ending}")


def _check_size(width: int, height: int, name: str) -> None:
    if width < 1 or height < 1:
        raise UserError(f"{name}: expected at least 1x1 pixels, received {width}x{height}")
    if width * height > MAX_PIXELS:
        raise UserError(f"{name}: expected at most {MAX_PIXELS} pixels, received {width}x{height}")


def _from_pillow(image: Image.Image, name: str) -> Image.Image:
    _check_size(*image.size, name)
    with _whole(name):
        image.load()  # before reading EXIF: some plugins apply the orientation while loading
        rgb = _to_rgb(image, name)
    rgb.info = {}
    with suppress(*DECODE_ERRORS):  # broken metadata does not invalidate the pixels
        rgb.getexif()[ExifTags.Base.Orientation] = image.getexif().get(ExifTags.Base.Orientation, 1)
        ImageOps.exif_transpose(rgb, in_place=True)
    return rgb


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image.copy()
    if image.mode.startswith("I"):
        return _from_integers(np.asarray(image), name)
    if image.mode == "F":
        return _from_floats(np.asarray(image), name)
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        return composite_on_white(image)
    return image.convert("RGB")


def _from_integers(values: np.ndarray, name: str) -> Image.Image:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise UserError(f"{name}: integer pixels must lie in 0..65535, received {low}..{high}")
    return Image.fromarray(_to_8_bits(values)).convert("RGB")


def _from_floats(values: np.ndarray, name: str) -> Image.Image:
    """Convert float pixels to RGB; the maximum selects the range 0..1, 0..255 or 0..65535."""
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 65535):  # also false for nan
        raise UserError(f"{name}: float pixels must lie in 0..1, 0..255 or 0..65535, received {low:g}..{high:g}")
    scale = 255.0 if high <= 1 else 1.0 if high <= 255 else 1 / 257
    return Image.fromarray(np.rint(values * scale).astype(np.uint8)).convert("RGB")


def _to_8_bits(values: np.ndarray) -> np.ndarray:
    """Convert 16-bit to 8-bit values, rounded: 65535 -> 255."""
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _from_array(array: np.ndarray, name: str) -> Image.Image:
    shape = tuple(array.shape)
    if array.ndim not in (2, 3) or (array.ndim == 3 and shape[2] not in _CHANNELS):
        raise UserError(f"{name}: an array must be (H, W) or (H, W, 1|3|4), received shape {shape}")
    _check_size(shape[1], shape[0], name)
    if array.dtype == np.bool_:
        pixels = array.astype(np.uint8) * 255
    elif array.dtype == np.uint8:
        pixels = array
    elif array.dtype == np.uint16:
        pixels = _to_8_bits(array)
    elif np.issubdtype(array.dtype, np.floating):
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):  # also false for nan
            raise UserError(f"{name}: float pixels must lie in 0..1, received {low:g}..{high:g}")
        pixels = np.rint(array.astype(np.float32) * 255).astype(np.uint8)
    else:
        raise UserError(f"{name}: pixels must be uint8, uint16, bool or float, received {array.dtype}")
    if pixels.ndim == 3 and shape[2] == 1:
        pixels = pixels[:, :, 0]
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return composite_on_white(image) if image.mode == "RGBA" else image.convert("RGB")


def _from_tensor(tensor: "torch.Tensor", name: str) -> Image.Image:
    values = tensor.detach().cpu()
    if values.is_floating_point():
        values = values.float()  # numpy has no bfloat16
    shape = tuple(values.shape)
    first, last = (shape[0] in _CHANNELS, shape[2] in _CHANNELS) if len(shape) == 3 else (False, False)
    if first and last:
        raise UserError(f"{name}: shape {shape} could be channels first or last: expected a numpy array, channels last")
    if first:
        values = values.permute(1, 2, 0)
    elif not last and len(shape) != 2:
        raise UserError(f"{name}: a tensor must be (H, W), (H, W, 1|3|4) or (1|3|4, H, W), received shape {shape}")
    return _from_array(values.numpy(), name)
