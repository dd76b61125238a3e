"""Texts from facts: stories from notes, descriptions of rooms, and questions about a few facts."""

from __future__ import annotations

import random
import re

from mmspec.ssm.texts.words import COLOURS, HE, SHE, article, listed, person, sentence

JOBS = ("baker", "sailor", "teacher", "painter", "farmer", "doctor", "clockmaker", "gardener", "postman", "pilot")
PLACES = ("harbour", "old mill", "market", "forest", "castle", "lighthouse", "station", "village", "bridge", "library")
WEATHER = ("rainy", "sunny", "foggy", "windy", "snowy", "stormy")
FINDS = (
    "silver key",
    "lost letter",
    "small dog",
    "golden ring",
    "torn map",
    "wooden flute",
    "strange stone",
    "red kite",
)
MOODS = ("proud", "happy", "tired", "curious", "calm", "surprised")
FURNITURE = ("lamp", "chair", "carpet", "clock", "vase", "sofa", "mirror", "desk", "shelf", "cushion", "stove", "bed")
SPOTS = ("near the door", "under the window", "in the corner", "beside the wall", "in the middle", "behind the curtain")
SIZES = ("small", "large", "tall", "round", "old", "new")


def story(rng: random.Random) -> tuple[str, str]:
    """Returns notes in random order and a story of four to seven sentences that mentions all of them."""
    name, pronoun = person(rng)
    friend, _ = person(rng, name)
    notes = {
        "name": name,
        "job": rng.choice(JOBS),
        "place": rng.choice(PLACES),
        "weather": rng.choice(WEATHER),
        "find": rng.choice(FINDS),
        "friend": friend,
        "mood": rng.choice(MOODS),
    }
    for extra in ("weather", "friend", "mood", "job"):
        if rng.random() < 0.2:
            del notes[extra]
    order = list(notes.items())
    rng.shuffle(order)
    ask = rng.choice(
        ("Write a short story from these notes.", "Tell a story with these facts.", "Make a story of this:")
    )
    prompt = ask + "".join(f"\n{key}: {value}" for key, value in order)
    first = rng.random() < 0.5
    sentences = [*_beginning(notes, pronoun, first, rng), *_middle(notes, pronoun, rng), *_end(notes, pronoun, rng)]
    return prompt, " ".join(sentences)


def _beginning(notes: dict[str, str], pronoun: str, by_weather: bool, rng: random.Random) -> list[str]:
    name, place = notes["name"], notes["place"]
    who = (
        name if "job" not in notes else rng.choice((f"{name}, {article(notes['job'])},", f"the {notes['job']} {name}"))
    )
    goes = rng.choice(("walks", "goes", "comes", "wanders"))
    lines = []
    if "weather" in notes and by_weather:
        day = rng.choice(("morning", "day", "evening"))
        lines.append(f"On {article(notes['weather'])} {day} {who} {goes} to the {place}.")
    else:
        lines.append(sentence(f"{who} {goes} to the {place}."))
        if "weather" in notes:
            lines.append(rng.choice((f"It is {notes['weather']}.", f"The weather is {notes['weather']}.")))
    if rng.random() < 0.5:
        quiet = rng.choice(
            ("Nobody else is there", "Everything is quiet", "A bell rings far away", "The path is empty")
        )
        lines.append(rng.choice((f"{quiet}.", f"{quiet} when {pronoun} arrives.")))
    return lines


def _middle(notes: dict[str, str], pronoun: str, rng: random.Random) -> list[str]:
    find = notes["find"]
    spot = rng.choice(("under a bench", "behind a tree", "beside the road", "between two stones", "near a gate"))
    lines = [
        rng.choice(
            (
                f"There {pronoun} finds {article(find)} {spot}.",
                f"{sentence(spot)} lies {article(find)}.",
                f"Suddenly {pronoun} sees {article(find)} {spot}.",
            )
        )
    ]
    if "friend" in notes:
        friend = notes["friend"]
        lines.append(
            rng.choice(
                (
                    f"{sentence(pronoun)} calls {friend}, who comes at once.",
                    f"{friend} hears of it and wants to see the {find}.",
                    f"Later {pronoun} shows it to {friend}.",
                    f"Together with {friend} {pronoun} looks at the {find} for a long time.",
                )
            )
        )
        if rng.random() < 0.5:
            quote = rng.choice(("What a day!", "Whose is it?", "Let us keep it.", "I have never seen one."))
            lines.append(f'"{quote}" says {friend}.')
    return lines


def _end(notes: dict[str, str], pronoun: str, rng: random.Random) -> list[str]:
    home = rng.choice(
        ("takes it home", f"brings it back to the {notes['place']}", "keeps it in a drawer", "gives it away")
    )
    if "mood" not in notes:
        return [rng.choice((f"In the end {pronoun} {home}.", f"At night {notes['name']} {home}."))]
    mood = notes["mood"]
    return [
        rng.choice(
            (
                f"In the end {notes['name']} is {mood} and {home}.",
                f"{sentence(pronoun)} {home} and feels {mood}.",
                f"{notes['name']} {home}. That makes {'her' if pronoun == 'she' else 'him'} {mood}.",
            )
        )
    ]


def room(rng: random.Random) -> tuple[str, str]:
    """Returns two to five objects of a room and its description, in order or backwards as requested."""
    count = rng.randint(2, 5)
    things = [
        (rng.choice(SIZES), rng.choice(COLOURS), thing, spot)
        for thing, spot in zip(rng.sample(FURNITURE, count), rng.sample(SPOTS, count), strict=True)
    ]
    backwards = rng.random() < 0.4
    if backwards:
        ask = rng.choice(("Describe the room from the last thing to the first.", "Describe this room backwards."))
    else:
        ask = rng.choice(("Describe the room.", "Describe this room in order.", "What does the room look like?"))
    prompt = ask + "".join(f"\n- {thing}: {size}, {colour}, {spot}" for size, colour, thing, spot in things)
    ordered = list(reversed(things)) if backwards else things
    lines = [
        rng.choice(
            (f"The room holds {_number(count)} things.", "This is a quiet room.", f"I see {_number(count)} things.")
        )
    ]
    for index, (size, colour, thing, spot) in enumerate(ordered):
        lines.append(_thing(f"{size} {colour} {thing}", spot, index, rng))
    if rng.random() < 0.4:
        colours = sorted({colour for _, colour, _, _ in things})
        lines.append(f"The colours are {listed(colours)}." if len(colours) > 1 else f"Everything is {colours[0]}.")
    return prompt, " ".join(lines)


def _thing(what: str, spot: str, index: int, rng: random.Random) -> str:
    lead = (
        rng.choice(("Then there is", "There is also", "Next comes"))
        if index
        else rng.choice(("There is", "First comes"))
    )
    return rng.choice(
        (
            f"{lead} {article(what)} {spot}.",
            f"{sentence(spot)} stands {article(what)}.",
            f"{sentence(article(what))} stands {spot}.",
        )
    )


def _number(count: int) -> str:
    return ("no", "one", "two", "three", "four", "five")[count]


def question(rng: random.Random) -> tuple[str, str]:
    """Returns facts about people with a question about one of them; the answer states the fact it is based on."""
    count = rng.randint(3, 5)
    people = rng.sample(SHE + HE, count)
    goods = rng.sample(("kite", "drum", "boat", "bike", "hat", "scarf", "bag", "bell", "ball", "cup"), count)
    colours = [rng.choice(COLOURS) for _ in people]
    homes = rng.sample(PLACES, count)
    facts = []
    for who, what, colour, home in zip(people, goods, colours, homes, strict=True):
        owns = rng.choice((f"{who} has {article(colour)} {what}", f"The {what} of {who} is {colour}"))
        facts.append(owns + rng.choice((f" and lives at the {home}.", f". {who} lives at the {home}.")))
    k = rng.randrange(count)
    who, what, colour, home = people[k], goods[k], colours[k], homes[k]
    query, reason, result = rng.choice(
        (
            (f"Who has the {what}?", f"The text says that {who} has {article(colour)} {what}", who),
            (f"What colour is the {what}?", f"{who} has the {what}, and it is {colour}", colour),
            (
                f"Where does the owner of the {what} live?",
                f"The {what} belongs to {who}, who lives at the {home}",
                home,
            ),
            (
                f"What does the person at the {home} own?",
                f"{who} lives at the {home} and has {article(colour)} {what}",
                what,
            ),
        )
    )
    return f"{' '.join(facts)} {query}", f"{reason}.\nAnswer: {result}"


def notes_of(prompt: str) -> list[str]:
    """Returns the notes of a prompt (of a story or a room) that the text must mention."""
    notes = re.findall(r"^[a-z]+: (.+)$", prompt, re.MULTILINE)
    for thing, size, colour, spot in re.findall(r"^- ([a-z]+): (\w+), (\w+), (.+)$", prompt, re.MULTILINE):
        notes += [f"{size} {colour} {thing}", spot]
    return notes


def missing(prompt: str, text: str) -> list[str]:
    """Returns the notes of the prompt that a text does not mention."""
    lower = text.lower()
    return [note for note in notes_of(prompt) if not re.search(rf"\b{re.escape(note.lower())}\b", lower)]
