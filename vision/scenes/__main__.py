"""`python -m mmspec.vision.scenes --out DIR` writes held-out images and a video as files."""

from __future__ import annotations

import json
from pathlib import Path

import av
import click
from PIL import Image

from mmspec.cli.options import OUT_FOLDER
from mmspec.vision.scenes.captions import caption
from mmspec.vision.scenes.clips import Clip, describe_clip, sample_clip
from mmspec.vision.scenes.drawing import draw
from mmspec.vision.scenes.scene import sample_scene, seeded

SCALE = 4


def write_clip(clip: Clip, path: Path, frames: int = 32, rate: int = 8) -> None:
    """Writes a clip as an H.264 video of 384 x 384 pixels, `rate` frames per second."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width = stream.height = 96 * SCALE
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "23"}
        for scene in clip.frames(frames):
            frame = av.VideoFrame.from_ndarray(draw(scene, SCALE), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


@click.command()
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder to write to.")
@click.option("--images", type=click.IntRange(0), default=1, show_default=True, help="Number of images.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="Held-out index of the first.")
@click.option(
    "--clip", "film", type=click.IntRange(0), default=0, show_default=True, help="Held-out index of the video."
)
def main(out: Path, images: int, first: int, film: int) -> None:
    """Write held-out images and one video, and print their captions."""
    out.mkdir(parents=True, exist_ok=True)
    for index in range(first, first + images):
        rng = seeded("heldout", index)
        scene = sample_scene(rng)
        path = out / ("scene.png" if images == 1 else f"scene-{index}.png")
        Image.fromarray(draw(scene, SCALE)).save(path, optimize=True)
        click.echo(json.dumps({"file": path.name, "caption": caption(scene, rng)}))
    rng = seeded("heldout", film)
    clip = sample_clip(rng)
    write_clip(clip, out / "clip.mp4")
    click.echo(json.dumps({"file": "clip.mp4", "caption": describe_clip(clip, rng)}))


if __name__ == "__main__":
    main()
