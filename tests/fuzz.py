"""Mutation fuzzing of media decoding: `python -m tests.fuzz`.

Mutants of small valid files go through `mmspec.vision.decoding.MediaDecoder`. Each is either decoded or refused by a
`UserError` of one line; where the decoder itself failed (`DecodeError`), it is counted by its cause. The command fails
if a valid file is refused, if anything but a `UserError` reaches this process, or if a decoder raises an unexpected
exception, which decoding in the caller's process would raise.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from PIL import Image

from mmspec.errors import UserError
from mmspec.vision.decoding import DecodeError, MediaDecoder
from mmspec.vision.video import Video
from tests.media_files import media_files

OUTCOMES = ("decoded", "refused", "crash", "time", "memory", "exception", "wrong")
FAILING = ("exception", "wrong")
_PNG = b"\x89PNG\r\n\x1a\n"
_EXTREMES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def flip(data: bytearray, rng: random.Random, other: bytes) -> None:
    """Change a few bytes."""
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] = rng.randrange(256)


def extreme(data: bytearray, rng: random.Random, other: bytes) -> None:
    """Set an integer of 1, 2 or 4 bytes to a border value."""
    size = rng.choice((1, 2, 4))
    at = rng.randrange(max(len(data) - size, 1))
    data[at : at + size] = (rng.choice(_EXTREMES) % (1 << 8 * size)).to_bytes(size, rng.choice(("big", "little")))


def fill(data: bytearray, rng: random.Random, other: bytes) -> None:
    """Overwrite a range with zeros, ones or noise."""
    at, size = _range(data, rng)
    data[at : at + size] = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))


def cut(data: bytearray, rng: random.Random, other: bytes) -> None:
    """Remove a range."""
    at, size = _range(data, rng)
    del data[at : at + size]


def repeat(data: bytearray, rng: random.Random, other: bytes) -> None:
    """Insert a copy of a range elsewhere."""
    (at, size), place = _range(data, rng), rng.randrange(len(data))
    data[place:place] = data[at : at + size]


def truncate(data: bytearray, rng: random.Random, other: bytes) -> None:
    """Drop the end."""
    del data[max(rng.randrange(len(data)), 1) :]


def splice(data: bytearray, rng: random.Random, other: bytes) -> None:
    """Continue with the end of another file."""
    data[rng.randrange(1, len(data) + 1) :] = other[rng.randrange(len(other)) :]


MUTATIONS: list[Callable[[bytearray, random.Random, bytes], None]] = [
    *(flip, flip, flip, extreme, extreme, extreme, fill, cut, repeat, truncate, splice)
]


def mutants(seed: int, files: dict[str, bytes], count: int) -> Iterator[tuple[str, bytes]]:
    """`count` mutants with the kinds of their files; number k depends on the seed and k alone."""
    kinds = list(files)
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        kind = kinds[number % len(kinds)]
        data = bytearray(files[kind])
        for _ in range(rng.choice((1, 1, 1, 3))):
            if data:
                rng.choice(MUTATIONS)(data, rng, files[rng.choice(kinds)])
        if rng.random() < 0.7:
            _mend_checksums(data)  # else most mutants of a PNG end at its first checksum
        yield kind, bytes(data)


def outcome(decoder: MediaDecoder, data: bytes) -> tuple[str, str]:
    """What becomes of a file, one of `OUTCOMES`, and the message."""
    try:
        media = decoder.load(data, frames=4)
    except DecodeError as error:
        return error.cause, str(error)
    except UserError as error:
        return "refused" if "\n" not in str(error) else "wrong", str(error)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    frames = media.frames if isinstance(media, Video) else [media]
    whole = all(isinstance(frame, Image.Image) and frame.mode == "RGB" for frame in frames)
    return ("decoded", "") if frames and whole else ("wrong", f"{frames}")


def _range(data: bytearray, rng: random.Random) -> tuple[int, int]:
    at = rng.randrange(len(data))
    return at, min(rng.choice((1, 4, 16, 64, 256)), len(data) - at)


def _mend_checksums(data: bytearray) -> None:
    """Recompute the checksum of every PNG chunk, in whatever file."""
    at = data.find(_PNG)
    while at >= 0:
        place = at + len(_PNG)
        while place + 12 <= len(data):
            end = place + 8 + int.from_bytes(data[place : place + 4], "big")
            if end + 4 > len(data):
                break
            data[end : end + 4] = zlib.crc32(data[place + 4 : end]).to_bytes(4, "big")
            place = end + 4
        at = data.find(_PNG, at + 1)


@click.command()
@click.option("--seed", default=0, show_default=True)
@click.option("--count", default=2000, show_default=True, help="Mutants, spread evenly over the kinds of files.")
@click.option("--minutes", default=10.0, show_default=True, help="Stop after this time.")
@click.option("--workers", default=2, show_default=True, help="Files decoded at once.")
@click.option("--seconds", default=20.0, show_default=True, help="Limit of time per file.")
@click.option("--memory", default=1024, show_default=True, help="Limit of memory per worker, in MiB.")
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Folder for mutants that fail.")
def main(seed: int, count: int, minutes: float, workers: int, seconds: float, memory: int, keep: Path | None) -> None:
    """Decode mutants of valid media files, and count what becomes of them."""
    start = time.monotonic()
    decoder = MediaDecoder(workers=workers, seconds=seconds, memory=memory << 20)
    files = media_files()
    table: dict[str, Counter[str]] = {kind: Counter() for kind in files}
    refused = [kind for kind, data in files.items() if outcome(decoder, data)[0] != "decoded"]

    def judge(job: tuple[int, tuple[str, bytes]]) -> tuple[int, str, bytes, str, str] | None:
        number, (kind, data) = job
        return None if time.monotonic() - start > 60 * minutes else (number, kind, data, *outcome(decoder, data))

    with ThreadPoolExecutor(workers) as pool:
        for judged in pool.map(judge, enumerate(mutants(seed, files, count))):
            if judged is None:
                break
            number, kind, data, result, message = judged
            table[kind][result] += 1
            if result not in ("decoded", "refused"):
                click.echo(f"{result}: mutant {number}, {kind}: {message}")
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{seed}-{number}-{result}").write_bytes(data)
    decoder.close()
    for kind, found in table.items():
        click.echo(f"{kind}: {', '.join(f'{found[name]} {name}' for name in OUTCOMES if found[name])}")
    total = sum(table.values(), Counter())
    failed = bool(refused) or any(total[name] for name in FAILING)
    counts = {name: total[name] for name in OUTCOMES}
    click.echo(json.dumps({"seed": seed, "mutants": total.total(), **counts, "valid_refused": refused}))
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
