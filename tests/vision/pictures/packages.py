"""Small packages in the layouts that the training reads: WordNet, ImageNet's classes, stamps, clip art."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw

_SYNSETS = (
    # offset, words, hypernym
    (1, ("entity",), None),
    (2, ("animal", "beast"), 1),
    (3, ("bird",), 2),
    (4, ("dog", "domestic_dog"), 2),
    (5, ("golden_retriever",), 4),
    (6, ("vehicle",), 1),
    (7, ("bicycle", "bike"), 6),
    (8, ("food",), 1),
    (9, ("chicken",), 8),
    (10, ("chicken", "Gallus_gallus"), 3),
    (11, ("idea",), 1),
    (12, ("fruit",), 8),
    (13, ("apple",), 12),
    (14, ("mountain_bike",), 7),
)


def write_wordnet(folder: Path) -> None:
    """Writes data.noun and index.noun in WordNet's format (wndb(5WN)), offsets being numbers of synsets."""
    folder.mkdir(parents=True)
    data, senses = ["  1 a licence"], {}
    for offset, words, above in _SYNSETS:
        listed = " ".join(f"{word} 0" for word in words)
        pointer = f"001 @ {above:08d} n 0000" if above else "000"
        data.append(f"{offset:08d} 03 n {len(words):02x} {listed} {pointer} | a gloss with | a bar")
        for word in words:
            senses.setdefault(word.lower(), []).append(offset)
    # a person: an instance, whose pointer is "@i"
    data.append("00000015 18 n 01 Apple 0 001 @i 00000001 n 0000 | a person")
    senses["apple"].insert(0, 15)
    index = ["  1 a licence"]
    for word, offsets in sorted(senses.items()):
        index.append(f"{word} n {len(offsets)} 1 @ {len(offsets)} 1 {' '.join(f'{x:08d}' for x in offsets)}  ")
    (folder / "data.noun").write_text("\n".join(data) + "\n")
    (folder / "index.noun").write_text("\n".join(index) + "\n")


def write_classes(folder: Path) -> None:
    """Writes timm's two files with three classes."""
    folder.mkdir(parents=True)
    lemmas = {
        "n00000005": "golden retriever",
        "n00000013": "apple, Malus domestica",
        "n00000011": "a very long winded idea, idea",
    }
    (folder / "imagenet_synset_to_lemma.txt").write_text("".join(f"{key}\t{text}\n" for key, text in lemmas.items()))
    (folder / "imagenet_synsets.txt").write_text("\n".join(lemmas))


def draw_picture(path: Path, colour: str, size: tuple[int, int] = (60, 40)) -> None:
    """Writes a disc with transparent margins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGBA", size, (0, 0, 0, 0))
    ImageDraw.Draw(image).ellipse((10, 5, size[0] - 10, size[1] - 5), fill=colour)
    image.save(path)


def write_stamps(folder: Path) -> None:
    """Writes stamps: a picture and a text, of which the first line describes it."""
    captions = {
        "animals/dog": "A dog.",
        "animals/hen": "A chicken, which lays eggs.",
        "food/apple": "A red apple.\nzz=Un äppel",
        "vehicles/bike": "A blue bicycle from Swabia. It is old.",
        "symbols/A": "The letter A.",
        "town/thing": "An idea.",
    }
    for index, (name, text) in enumerate(captions.items()):
        draw_picture(folder / f"{name}.png", ("red", "green", "blue", "brown", "black", "grey")[index])
        (folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
    draw_picture(folder / "animals" / "nameless.png", "red")


def write_clip_art(folder: Path) -> None:
    """Writes clip art, named by subject and author, and copies of a placeholder."""
    for name, colour in {
        "animals/dog_anna_b_01": "brown",
        "animals/apple_anna_b_01": "red",
        "transportation/mountain_bike_carl_01": "orange",
        "signs_and_symbols/dog_sign_01": "black",
    }.items():
        draw_picture(folder / f"{name}.png", colour, (80, 50))
    for number in range(5):
        draw_picture(folder / "animals" / f"chicken_{'abcde'[number]}_01.png", "red", (30, 30))
