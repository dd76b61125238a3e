"""Mutation fuzzing of media decoding: ``python -m tests.fuzz``.

Mutants of small valid files go through ``mmspec.vision.decoding.MediaDecoder``. The command fails if a valid file is
refused, if a mutant raises anything but a ``UserError`` of one line, or if a decoder raises an unexpected exception.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import click
from PIL import Image

from mmspec.errors import UserError
from mmspec.vision.decoding import DecodeError, MediaDecoder
from mmspec.vision.video import Video
from tests.media_files import media_files

FAILING = ("exception", "wrong")
_PNG = b"\x89PNG\r\n\x1a\n"
_EXTREMES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def mutated(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """Data with one change: a part overwritten, removed or repeated, or the end cut or replaced by another file's."""
    at, size = rng.randrange(len(data)), rng.choice((1, 1, 2, 4, 16, 64, 256))
    part = data[at : at + size]
    number = (rng.choice(_EXTREMES) % (1 << 8 * size)).to_bytes(size, rng.choice(("big", "little")))
    new = rng.choice(
        (rng.randbytes(1), number, number, bytes(size), b"\xff" * size, rng.randbytes(size), b"", part * 2)
    )
    rest = rng.choice((*[data[at + size :]] * 7, b"", other[rng.randrange(len(other)) :]))
    return data[:at] + new + rest


def mutants(seed: int, files: dict[str, bytes], count: int) -> Iterator[tuple[str, bytes]]:
    """Mutants with the kinds of their files; mutant k depends on the seed and k alone."""
    kinds = list(files)
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        kind = kinds[number % len(kinds)]
        data = files[kind]
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = mutated(data, rng, files[rng.choice(kinds)]) or data
        # Most mutants of a PNG would end at their first checksum.
        yield kind, _with_checksums(data) if rng.random() < 0.7 else data


def _with_checksums(data: bytes) -> bytes:
    """Data whose PNG has the right checksum in every chunk."""
    fixed, place = bytearray(data), data.find(_PNG) + len(_PNG)
    while place >= len(_PNG) and place + 12 <= len(fixed):
        end = place + 8 + int.from_bytes(fixed[place : place + 4], "big")
        if end + 4 > len(fixed):
            break
        fixed[end : end + 4] = zlib.crc32(fixed[place + 4 : end]).to_bytes(4, "big")
        place = end + 4
    return bytes(fixed)


def outcome(decoder: MediaDecoder, data: bytes) -> tuple[str, str]:
    """What a file leads to ("decoded", "refused", the cause of a ``DecodeError``, or "wrong"), and the message."""
    try:
        media = decoder.load(data, frames=4)
    except DecodeError as error:
        return error.cause, str(error)
    except UserError as error:
        return "refused" if "\n" not in str(error) else "wrong", str(error)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    frames = media.frames if isinstance(media, Video) else [media]
    whole = frames and all(isinstance(frame, Image.Image) and frame.mode == "RGB" for frame in frames)
    return ("decoded", "") if whole else ("wrong", f"{frames}")


@click.command()
@click.option("--seed", default=0, show_default=True)
@click.option("--count", default=2000, show_default=True, help="Mutants, spread evenly over the kinds of files.")
@click.option("--minutes", default=10.0, show_default=True, help="Stop after this time.")
@click.option("--seconds", default=20.0, show_default=True, help="Limit of time per file.")
def main(seed: int, count: int, minutes: float, seconds: float) -> None:
    """Decode mutants of valid media files, and count the outcomes."""
    end, files, counts = time.monotonic() + 60 * minutes, media_files(), Counter[str]()
    decoder = MediaDecoder(workers=2, seconds=seconds, memory=1 << 30)
    refused = [kind for kind, data in files.items() if outcome(decoder, data)[0] != "decoded"]

    def decoded(job: tuple[str, bytes]) -> tuple[str, str]:
        return outcome(decoder, job[1]) if time.monotonic() < end else ("", "")

    made = list(mutants(seed, files, count))
    with ThreadPoolExecutor(2) as pool:
        for number, (result, message) in enumerate(pool.map(decoded, made)):
            counts[result] += bool(result)
            if result not in ("", "decoded", "refused"):
                click.echo(f"{result}: mutant {number}, {made[number][0]}: {message}")
    decoder.close()
    click.echo(json.dumps({"seed": seed, "mutants": counts.total(), **counts, "valid_refused": refused}))
    raise SystemExit(bool(refused) or any(counts[name] for name in FAILING))


if __name__ == "__main__":
    main()
