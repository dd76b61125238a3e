"""Short videos: an initial scene with one or two events, rendered at any number of frames."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from mmspec.vision.scenes.scene import Item, Scene, sample_item
from mmspec.vision.scenes.vocabulary import BACKGROUNDS, COLOURS, GRID, SIZES
from mmspec.vision.scenes.wording import (
    COLOUR_WORDS,
    NUMBERS,
    SHAPE_WORDS,
    Writer,
    capital,
    in_reading_order,
)

EVENTS = ("move", "grow", "shrink", "recolour", "appear", "vanish")


@dataclass(frozen=True)
class Event:
    """An event of a clip.

    Attributes:
        kind: one of `EVENTS`.
        index: of the object.
        goal: the object after the event; unchanged if it vanishes.
        start, end: times as shares of the clip's duration. Equal, except for moving, growing and shrinking.
    """

    kind: str
    index: int
    goal: Item
    start: float
    end: float


@dataclass(frozen=True)
class Clip:
    """Initial objects, including those that appear later, and events. No two objects have the same colour and shape."""

    background: str
    items: tuple[Item, ...]
    events: tuple[Event, ...]

    def at(self, time: float) -> Scene:
        """Returns the scene at a time from 0 to 1."""
        shown: list[Item] = []
        events = {event.index: event for event in self.events}
        for index, item in enumerate(self.items):
            event = events.get(index)
            now = item if event is None else _at(item, event, time)
            if now is not None:
                shown.append(now)
        return Scene(self.background, tuple(shown))

    def frames(self, count: int, first: float = 0.0, last: float = 1.0) -> list[Scene]:
        """Returns `count` scenes, evenly spaced from time `first` to time `last`."""
        step = (last - first) / max(count - 1, 1)
        return [self.at(first + k * step) for k in range(count)]


def _at(item: Item, event: Event, time: float) -> Item | None:
    if event.kind == "appear":
        return item if time >= event.start else None
    if event.kind == "vanish":
        return item if time < event.start else None
    if event.kind == "recolour":
        return event.goal if time >= event.start else item
    goal = event.goal
    done = (time - event.start) / (event.end - event.start)
    if not 0.0 < done < 1.0:
        return item if done <= 0.0 else goal
    return replace(
        item,
        row=item.row + done * (goal.row - item.row),
        col=item.col + done * (goal.col - item.col),
        extent=round(item.extent + done * (goal.extent - item.extent)),
    )


def sample_clip(rng: random.Random) -> Clip:
    """Samples a clip of 1-3 objects with one or two events on different objects."""
    background = rng.choice(tuple(BACKGROUNDS))
    count = rng.choice((1, 1, 2, 2, 3))
    cells = rng.sample([(r, c) for r in range(GRID) for c in range(GRID)], count)
    items: list[Item] = []
    for row, col in cells:
        item = sample_item(rng, row, col)
        while any((item.colour, item.shape) == (other.colour, other.shape) for other in items):
            item = sample_item(rng, row, col)
        items.append(item)
    events: list[Event] = []
    taken = set(cells)
    happening = 1 if count == 1 else rng.choice((1, 1, 2))
    for index in range(happening):
        event, items[index] = _sample_event(rng, index, items, taken)
        events.append(event)
    return Clip(background, tuple(items), tuple(events))


def _sample_event(rng: random.Random, index: int, items: list[Item], taken: set[tuple[int, int]]) -> tuple[Event, Item]:
    item = items[index]
    kind = rng.choice((*EVENTS, "move", "move"))
    start, end = rng.uniform(0.0, 0.15), rng.uniform(0.85, 1.0)
    if kind == "move":
        row, col = item.cell
        line = [(row, c) for c in range(GRID) if c != col] + [(r, col) for r in range(GRID) if r != row]
        free = [cell for cell in line if not taken & set(_cells_on_way(item.cell, cell))]
        if free:
            cell = rng.choice(free)
            taken.update(_cells_on_way(item.cell, cell))
            return Event(kind, index, replace(item, row=cell[0], col=cell[1]), start, end), item
        kind = "recolour"
    if kind in ("grow", "shrink"):
        before, after = ("small", "large") if kind == "grow" else ("large", "small")
        item = replace(item, size=before, extent=rng.randint(*SIZES[before]), dx=0, dy=0)
        goal = replace(item, size=after, extent=rng.randint(*SIZES[after]))
        return Event(kind, index, goal, start, end), item
    middle = rng.uniform(0.35, 0.65)
    goal = item
    if kind == "recolour":
        used = {other.colour for other in items}
        goal = replace(item, colour=rng.choice([name for name in COLOURS if name not in used]))
    return Event(kind, index, goal, middle, middle), item


def _cells_on_way(start: tuple[int, int], goal: tuple[int, int]) -> list[tuple[int, int]]:
    """Cells from start (excluded) to goal along a row or a column."""
    steps = max(abs(goal[0] - start[0]), abs(goal[1] - start[1]))
    unit = ((goal[0] - start[0]) // steps, (goal[1] - start[1]) // steps)
    return [(start[0] + k * unit[0], start[1] + k * unit[1]) for k in range(1, steps + 1)]


def describe_clip(clip: Clip, rng: random.Random) -> str:
    """Returns 2-5 sentences: the initial objects, the events, and perhaps what does not change or the background."""
    habit = tuple(BACKGROUNDS).index(clip.background) + len(clip.items) + len(clip.items[0].colour)
    writer = Writer(rng, habit, sizes=False)
    late = {event.index for event in clip.events if event.kind == "appear"}
    still = [item for k, item in enumerate(clip.items) if k not in {event.index for event in clip.events}]
    sentences = []
    opening = in_reading_order([item for k, item in enumerate(clip.items) if k not in late])
    if opening:
        parts = [f"{writer.a(item)} {writer.where(item.cell)}" for item in opening]
        listed = " and ".join(parts) if len(parts) < 3 else f"{parts[0]}, {parts[1]} and {parts[2]}"
        start = writer.pick(("At first there is", "The video starts with", "In the beginning one can see"))
        sentences.append(f"{start} {listed}.")
    else:
        sentences.append(writer.pick(("At first nothing is there.", "The video starts with an empty picture.")))
    for position, event in enumerate(sorted(clip.events, key=lambda event: clip.items[event.index].cell)):
        text = _event_sentence(clip.items[event.index], event, writer)
        lead = writer.pick(("", "then ")) if position == 0 else writer.pick(("meanwhile ", "also, "))
        sentences.append(capital(lead + text))
    if still and rng.random() < 0.6:
        item = in_reading_order(still)[0]
        stays = writer.pick(("stays where it is", "does not change", "remains still"))
        sentences.append(f"The {writer.name(item)} {stays}.")
    elif rng.random() < 0.4:
        sentences.append(f"The background is {clip.background} all the time.")
    return " ".join(sentences)


def _event_sentence(item: Item, event: Event, writer: Writer) -> str:
    name = writer.name(item)
    if event.kind == "move":
        rows, cols = event.goal.row - item.row, event.goal.col - item.col
        way = ("down" if rows > 0 else "up") if rows else ("to the right" if cols > 0 else "to the left")
        verb = writer.pick(("moves", "slides", "glides"))
        end = writer.where(event.goal.cell)
        return writer.pick(
            (f"the {name} {verb} {way} and ends {end}.", f"the {name} {verb} {way}, coming to rest {end}.")
        )
    if event.kind == "grow":
        return writer.pick((f"the {name} grows.", f"the {name} gets bigger.", f"the {name} becomes larger."))
    if event.kind == "shrink":
        return writer.pick((f"the {name} shrinks.", f"the {name} gets smaller."))
    if event.kind == "recolour":
        new = writer.pick(COLOUR_WORDS[event.goal.colour])
        return writer.pick((f"the {name} turns {new}.", f"the {name} changes its colour to {new}."))
    if event.kind == "appear":
        return writer.pick(
            (
                f"{writer.a(item)} appears {writer.where(item.cell)}.",
                f"{writer.a(item)} shows up {writer.where(item.cell)}.",
            )
        )
    return writer.pick((f"the {name} disappears.", f"the {name} vanishes."))


def ask_clip(clip: Clip, rng: random.Random) -> tuple[str, str]:
    """Returns a short question about a clip and its answer."""
    event = rng.choice(clip.events)
    item = clip.items[event.index]
    name = f"{item.colour} {rng.choice(SHAPE_WORDS[item.shape])}"
    writer = Writer(rng, 0, loyalty=0.0, sizes=False)
    kind = rng.random()
    if kind < 0.5 or event.kind == "appear":
        question = rng.choice(("What happens in the video?", "What changes?", "What is going on?"))
        happening = [_event_sentence(clip.items[e.index], e, writer) for e in _by_cell(clip)]
        return question, " ".join(capital(text) for text in happening)
    if kind < 0.8:
        question = f"What does the {name} do?" if event.kind == "move" else f"What happens to the {name}?"
        return question, capital(_event_sentence(item, event, writer))
    count = len(clip.at(1.0).items)
    verb = "is" if count == 1 else "are"
    return "How many objects are there at the end?", f"There {verb} {NUMBERS[count]}."


def _by_cell(clip: Clip) -> list[Event]:
    return sorted(clip.events, key=lambda event: clip.items[event.index].cell)
