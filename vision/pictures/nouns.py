"""Names of things and their kinds: WordNet's nouns, and the thousand classes of ImageNet.

WordNet comes from the package `wordnet-base` of Debian and its kin; the classes' synsets and words from files of timm.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mmspec.errors import UserError

WORDNET = Path("/usr/share/wordnet")


def _table(text: str) -> dict[str, str]:
    """ "b: a1 a2; d: c" as {"a1": "b", "a2": "b", "c": "d"}; underscores of what precedes a colon are spaces."""
    rows = [row.split(":") for row in text.split(";") if row.strip()]
    return {word: name.strip().replace("_", " ") for name, words in rows for word in words.split()}


_SAME = """
dog cat wolf fox bear monkey ape rabbit horse sheep cow pig deer antelope whale seal elephant mouse squirrel
bird fish snake lizard turtle frog salamander crocodile dinosaur spider butterfly beetle fly bee insect crab
snail shark jellyfish mushroom flower tree fruit vegetable bread cake soup drink car truck bus train boat ship
airplane helicopter bicycle motorcycle tractor spacecraft church house tower bridge shop building fence chair
table bed furniture hat shoe shirt skirt coat dress mask bag bottle cup bowl pot box basket spoon knife tool
weapon clock lamp ball toy computer telephone camera mountain beach lake valley cliff person instrument machine
vehicle animal plant food clothing container device rodent marsupial mammal amphibian reptile worm dessert nut
aircraft seat garment utensil shore
"""

KINDS: dict[str, str] = {
    **{name: name for name in _SAME.split()},
    **_table("""
cat: domestic_cat big_cat wildcat; mammal: viverrine mustelid; rabbit: lagomorph; horse: equine; hoofed_animal:
bovid ungulate; cow: cattle; pig: swine; monkey: primate lemur; spider: arachnid; shellfish: crustacean mollusk;
sea_animal: echinoderm coelenterate; fish: ray; mushroom: fungus; fruit: edible_fruit; food: baked_goods dish
foodstuff nutriment; drink: beverage; vegetable: produce; vehicle: motor_vehicle craft conveyance; bicycle:
bike; train: locomotive; boat: sailing_vessel; ship: warship; musical_instrument: musical_instrument; hat:
headdress; shoe: footwear; weapon: firearm gun; tool: edge_tool hand_tool; kitchen_utensil: kitchen_utensil
cooking_utensil; clock: timepiece; sports_equipment: game_equipment sports_equipment; toy: plaything;
household_appliance: white_goods home_appliance; electronic_device: electronic_equipment; computer:
digital_computer; cloth: fabric; mountain: natural_elevation; landscape: geological_formation; water:
body_of_water; building: structure; church: place_of_worship; house: dwelling; optical_instrument:
optical_instrument; measuring_instrument: measuring_instrument; celestial_body: celestial_body; pen:
writing_implement; jewel: jewelry; ornament: adornment; part_of_the_body: body_part; book: publication; sign:
signboard; container: vessel;
"""),
}
"""First word of a synset, and how its members' kind is said. The nearest such synset above a thing names its kind."""

_ANIMALS = """
amphibian animal antelope ape bear bee beetle bird butterfly cat cow crab crocodile deer dinosaur dog elephant
fish fly fox frog hoofed_animal horse insect jellyfish lizard mammal marsupial monkey mouse pig rabbit reptile
rodent salamander sea_animal seal shark sheep shellfish snail snake spider squirrel turtle whale wolf worm
"""
ANIMALS = frozenset(word.replace("_", " ") for word in _ANIMALS.split())

GENERAL: dict[str, str] = _table("""
food: fruit vegetable bread cake soup dessert nut; drink: drink; vehicle: car truck bus train boat ship bicycle
motorcycle tractor; aircraft: airplane helicopter; building: church house tower bridge shop; piece_of_furniture:
chair table bed seat furniture; piece_of_clothing: hat shoe shirt skirt coat dress garment clothing; container:
bottle cup bowl pot box basket bag; utensil: spoon; tool: knife; plant: mushroom flower tree; landscape:
mountain beach lake valley cliff shore water;
""")
"""More general words for kinds; those of animals are not listed."""


_MISREAD = {"peacock": "bird", "seal": "sea animal", "castle": "building", "palace": "building"}
"""Kinds of words whose first senses are others."""


def general(kind: str) -> str:
    """Returns the more general word for a kind: "animal" for "dog"; itself where there is none."""
    return "animal" if kind in ANIMALS else GENERAL.get(kind, kind)


def article(noun: str) -> str:
    """Returns the noun after its indefinite article; plural nouns and masses stay bare."""
    if noun in MASSES or (re.search(r"(?<![su])s$", noun.lower()) and not re.search(r"(ss|us|is|ns)$", noun.lower())):
        return noun
    return f"{'an' if re.match(r'(?i)[aeio]|u(?!ni|se|ku)', noun) else 'a'} {noun}"


MASSES = frozenset(
    ("bread", "food", "water", "clothing", "furniture", "jewelry", "cloth", "sports equipment", "broccoli", "cheese")
)


@dataclass(frozen=True)
class Noun:
    """A thing's name.

    Attributes:
        name: without article, "golden retriever".
        kind: "dog".
    """

    name: str
    kind: str


@cache
def _synsets() -> tuple[dict[int, tuple[list[str], list[int]]], dict[str, list[int]]]:
    """WordNet's nouns: words and hypernyms by offset, and offsets by word, the most frequent sense first."""
    data, index = WORDNET / "data.noun", WORDNET / "index.noun"
    if not data.is_file():
        raise UserError(f"the names of things come from WordNet, expected {data}: run apt-get install wordnet-base")
    synsets = {}
    for line in data.read_text().splitlines():
        if line.startswith("  "):
            continue
        fields = line.split(" | ")[0].split()
        words = int(fields[3], 16)
        pointers = fields[5 + 2 * words :]
        above = [int(pointers[k + 1]) for k in range(len(pointers)) if pointers[k] == "@"]  # persons have "@i"
        synsets[int(fields[0])] = ([re.sub(r"\(.*\)", "", w) for w in fields[4 : 4 + 2 * words : 2]], above)
    senses = {}
    for line in index.read_text().splitlines():
        if not line.startswith("  "):
            fields = line.split()
            senses[fields[0]] = [int(x) for x in fields[-int(fields[2]) :]]
    return synsets, senses


def kind_of(offset: int) -> str | None:
    """Returns the kind of a synset, that of the nearest synset of `KINDS` above it or itself; None if there is none."""
    synsets, _ = _synsets()
    queue, seen = deque([offset]), {offset}
    while queue:
        words, above = synsets[queue.popleft()]
        if words[0].lower() in KINDS:
            return KINDS[words[0].lower()]
        queue += [a for a in above if a not in seen]
        seen |= set(above)
    return None


def noun(phrase: str) -> Noun | None:
    """Returns the name and kind of a phrase such as "blue bicycle" by its last words; None for other than things.

    Of a word's first three senses, animals go before food, and birds before butterflies of the same name.
    """
    words = re.findall(r"[A-Za-z'-]+", phrase)
    if words and words[-1].lower() in _MISREAD:
        return Noun(" ".join(words), _MISREAD[words[-1].lower()])
    synsets, senses = _synsets()
    for length in (3, 2, 1):
        head = "_".join(words[-length:]).lower() if length <= len(words) else ""
        for form in (head, head.removesuffix("s"), head.removesuffix("es")):
            offsets = [offset for offset in senses.get(form, []) if synsets[offset][1]][:3]
            if kinds := [kind for offset in offsets if (kind := kind_of(offset))]:
                living = [kind for kind in kinds if kind in ANIMALS]
                edible = general(kinds[0]) == "food"
                kind = (
                    ("bird" if "bird" in living else living[0])
                    if living and (edible or kinds[0] in ANIMALS)
                    else kinds[0]
                )
                return Noun(" ".join(words), kind)
    return None


def compound(phrase: str) -> Noun | None:
    """Returns the name and kind of a phrase that is a word of WordNet as a whole, "fire engine"; None otherwise."""
    return noun(phrase) if phrase.replace(" ", "_") in _synsets()[1] else None


@cache
def classes() -> tuple[Noun, ...]:
    """Returns the names and kinds of ImageNet's thousand classes.

    Raises:
        UserError: timm is not installed.
    """
    spec = find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the names of ImageNet's classes come from files of timm: run pip install --no-deps timm")
    folder = Path(next(iter(spec.submodule_search_locations))) / "data" / "_info"
    words = dict(line.split("\t")[:2] for line in (folder / "imagenet_synset_to_lemma.txt").read_text().splitlines())
    found = []
    for synset in (folder / "imagenet_synsets.txt").read_text().split():
        name = _common(words[synset].split(","))
        found.append(Noun(name, kind_of(int(synset[1:])) or "thing"))
    return tuple(found)


def _common(names: list[str]) -> str:
    """The first name that is no Latin one of two words, and not longer than three words."""
    names = [name.strip() for name in names]
    short = [name for name in names if len(name.split()) <= 3]
    return (short or names)[0]
