"""Names and nouns of the generated texts."""

from __future__ import annotations

import random

SHE = ("Anna", "Mia", "Clara", "Eva", "Lina", "Sara", "Nora", "Ida", "Zoe", "Rosa", "Emma", "Julia")
HE = ("Ben", "Tom", "Paul", "Omar", "Leo", "Max", "Finn", "Hugo", "Ivan", "Noah", "Karl", "Sam")

THINGS = {
    "apples": ("apple", "basket", "fruit"),
    "pears": ("pear", "crate", "fruit"),
    "lemons": ("lemon", "bag", "fruit"),
    "books": ("book", "shelf", "library"),
    "pens": ("pen", "box", "school"),
    "stamps": ("stamp", "album", "collection"),
    "coins": ("coin", "jar", "collection"),
    "marbles": ("marble", "bag", "toy"),
    "cards": ("card", "pack", "toy"),
    "shells": ("shell", "bucket", "beach"),
    "eggs": ("egg", "carton", "farm"),
    "tulips": ("tulip", "bunch", "garden"),
    "cookies": ("cookie", "tin", "kitchen"),
    "buttons": ("button", "drawer", "workshop"),
    "nails": ("nail", "box", "workshop"),
    "tickets": ("ticket", "roll", "fair"),
    "bottles": ("bottle", "crate", "shop"),
    "candles": ("candle", "pack", "shop"),
}
"""By plural: singular, container, place."""

COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "grey", "purple", "orange")


def article(noun: str) -> str:
    """Prepends "a" or "an" to a noun."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def plural(noun: str) -> str:
    """Returns the plural of a noun (of those in this package)."""
    if noun == "shelf":
        return "shelves"
    return noun + ("es" if noun.endswith(("x", "ch", "sh")) else "s")


def sentence(text: str) -> str:
    """Capitalises the first letter."""
    return text[0].upper() + text[1:]


def person(rng: random.Random, *others: str) -> tuple[str, str]:
    """Returns a name that is not among `others`, and its pronoun."""
    while True:
        she = rng.random() < 0.5
        name = rng.choice(SHE if she else HE)
        if name not in others:
            return name, "she" if she else "he"


def listed(words: list[str], last: str = "and") -> str:
    """Joins words with commas and `last`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
