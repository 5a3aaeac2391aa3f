"""Rendered scenes of shapes, a digit and a word, with questions that have one right answer each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

SIZE = 112
"""Side of a picture in pixels."""
PATCH = 8
"""Side of a patch of the model's tower in pixels."""
SHAPES = ("circle", "square", "triangle", "cross", "ring")
COLOURS = {
    "red": (220, 50, 47),
    "green": (60, 170, 70),
    "blue": (50, 100, 225),
    "yellow": (235, 205, 60),
    "purple": (150, 70, 180),
    "orange": (240, 130, 30),
}
WORDS = ("box", "cat", "cup", "dog", "fox", "hat", "jam", "key", "map", "sun")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
KINDS = ("colour", "shape", "count", "count_colour", "exists", "where", "digit", "word")
MOST_OBJECTS = 5

# Disjoint ranges of scene seeds; training draws from the last one.
HELD_OUT_SEEDS = range(0, 100_000)
VALIDATION_SEEDS = range(100_000, 200_000)
TRAINING_SEEDS = range(200_000, 2**31)

# Rows of five pixels, the leftmost one in the highest bit.
_FONT = {
    "0": (14, 17, 19, 21, 25, 17, 14),
    "1": (4, 12, 4, 4, 4, 4, 14),
    "2": (14, 17, 1, 2, 4, 8, 31),
    "3": (31, 2, 4, 2, 1, 17, 14),
    "4": (2, 6, 10, 18, 31, 2, 2),
    "5": (31, 16, 30, 1, 1, 17, 14),
    "6": (6, 8, 16, 30, 17, 17, 14),
    "7": (31, 1, 2, 4, 8, 8, 8),
    "8": (14, 17, 17, 14, 17, 17, 14),
    "9": (14, 17, 17, 15, 1, 2, 12),
    "a": (14, 17, 17, 31, 17, 17, 17),
    "b": (30, 17, 17, 30, 17, 17, 30),
    "c": (14, 17, 16, 16, 16, 17, 14),
    "d": (28, 18, 17, 17, 17, 18, 28),
    "e": (31, 16, 16, 30, 16, 16, 31),
    "f": (31, 16, 16, 30, 16, 16, 16),
    "g": (14, 17, 16, 23, 17, 17, 15),
    "h": (17, 17, 17, 31, 17, 17, 17),
    "j": (7, 2, 2, 2, 2, 18, 12),
    "k": (17, 18, 20, 24, 20, 18, 17),
    "m": (17, 27, 21, 21, 17, 17, 17),
    "n": (17, 17, 25, 21, 19, 17, 17),
    "o": (14, 17, 17, 17, 17, 17, 14),
    "p": (30, 17, 17, 30, 16, 16, 16),
    "s": (15, 16, 16, 14, 1, 1, 30),
    "t": (31, 4, 4, 4, 4, 4, 4),
    "u": (17, 17, 17, 17, 17, 17, 14),
    "x": (17, 17, 10, 4, 10, 17, 17),
    "y": (17, 17, 17, 10, 4, 4, 4),
}


@dataclass(frozen=True)
class Question:
    """A question about a scene.

    Args:
        kind: one of `KINDS`.
        text: the question, in lower-case words.
        answer: the only right answer, one word or two.
    """

    kind: str
    text: str
    answer: str


@dataclass(frozen=True)
class Thing:
    """An object, digit or word in a scene.

    Args:
        name: the shape, the digit or the word.
        colour: name of the colour; None for digits and words, which are light grey.
        cell: number of its cell in the 3x3 grid, row by row.
        box: left, top and side (for words the width) in pixels.
    """

    name: str
    colour: str | None
    cell: int
    box: tuple[int, int, int]


@dataclass(frozen=True)
class Scene:
    """A scene made from a seed.

    Args:
        seed: seed of the background's noise.
        objects: one to five coloured shapes.
        digit: a digit, or None.
        word: a word, or None.
    """

    seed: int
    objects: tuple[Thing, ...]
    digit: Thing | None
    word: Thing | None

    def pixels(self) -> np.ndarray:
        """Return the picture as uint8 of shape (112, 112, 3)."""
        generator = np.random.default_rng(self.seed)
        slope = generator.uniform(-18, 18, size=(2, 3))
        ramp = np.linspace(-1, 1, SIZE)
        canvas = generator.uniform(30, 70, size=3) + ramp[:, None, None] * slope[0] + ramp[None, :, None] * slope[1]
        canvas = canvas + generator.normal(0, 5, size=(SIZE, SIZE, 1))
        for thing in (*self.objects, self.digit, self.word):
            if thing is None:
                continue
            left, top, _ = thing.box
            mask = _mask(thing)
            colour = (225, 225, 225) if thing.colour is None else COLOURS[thing.colour]
            canvas[top : top + mask.shape[0], left : left + mask.shape[1]][mask] = colour
        return canvas.clip(0, 255).astype(np.uint8)

    def render(self) -> Image.Image:
        """Return the picture, 112x112 RGB."""
        return Image.fromarray(self.pixels())

    def questions(self, rng: random.Random) -> dict[str, Question]:
        """Return one question of each kind that this scene allows, by kind."""
        made = {}
        for kind in KINDS:
            question = getattr(self, f"_ask_{kind}")(rng)
            if question is not None:
                made[kind] = Question(kind, *question)
        return made

    def _unique(self, attribute: str) -> list[Thing]:
        values = [getattr(thing, attribute) for thing in self.objects]
        return [thing for thing, value in zip(self.objects, values) if values.count(value) == 1]

    def _ask_colour(self, rng: random.Random) -> tuple[str, str] | None:
        candidates = self._unique("name")
        if not candidates:
            return None
        thing = rng.choice(candidates)
        return f"what color is the {thing.name} ?", str(thing.colour)

    def _ask_shape(self, rng: random.Random) -> tuple[str, str] | None:
        candidates = self._unique("colour")
        if not candidates:
            return None
        thing = rng.choice(candidates)
        return f"what shape is {thing.colour} ?", thing.name

    def _ask_count(self, rng: random.Random) -> tuple[str, str]:
        return "how many objects are there ?", str(len(self.objects))

    def _ask_count_colour(self, rng: random.Random) -> tuple[str, str]:
        present = [str(thing.colour) for thing in self.objects]
        colour = rng.choice(present) if rng.random() < 0.75 else rng.choice(list(COLOURS))
        return f"how many {colour} objects are there ?", str(present.count(colour))

    def _ask_exists(self, rng: random.Random) -> tuple[str, str]:
        present = {(str(thing.colour), thing.name) for thing in self.objects}
        if rng.random() < 0.5:
            colour, shape = rng.choice(sorted(present))
            return f"is there a {colour} {shape} ?", "yes"
        absent = [(colour, shape) for colour in COLOURS for shape in SHAPES if (colour, shape) not in present]
        # Half of the absent pairs share colour or shape with an object: a colour alone does not tell.
        near = [pair for pair in absent if any(pair[0] == c or pair[1] == s for c, s in present)]
        colour, shape = rng.choice(near if near and rng.random() < 0.5 else absent)
        return f"is there a {colour} {shape} ?", "no"

    def _ask_where(self, rng: random.Random) -> tuple[str, str] | None:
        pairs = [(thing.colour, thing.name) for thing in self.objects]
        candidates = [thing for thing, pair in zip(self.objects, pairs) if pairs.count(pair) == 1]
        if not candidates:
            return None
        thing = rng.choice(candidates)
        place = f"{ROWS[thing.cell // 3]} {COLUMNS[thing.cell % 3]}"
        return f"where is the {thing.colour} {thing.name} ?", place

    def _ask_digit(self, rng: random.Random) -> tuple[str, str] | None:
        return None if self.digit is None else ("what digit is shown ?", self.digit.name)

    def _ask_word(self, rng: random.Random) -> tuple[str, str] | None:
        return None if self.word is None else ("what word is shown ?", self.word.name)


def _mask(thing: Thing) -> np.ndarray:
    """Return which pixels of its box a thing covers."""
    side = thing.box[2]
    if thing.colour is None:
        scale = 4 if thing.name.isdigit() else 2
        glyphs = [[[bool(row >> bit & 1) for bit in range(4, -1, -1)] for row in _FONT[c]] for c in thing.name]
        spaced = [np.pad(np.array(glyph), ((0, 0), (0, 1))) for glyph in glyphs]
        return np.kron(np.concatenate(spaced, axis=1)[:, :-1], np.ones((scale, scale), dtype=bool))
    y, x = (np.mgrid[:side, :side] + 0.5) * 2 / side - 1
    radius = np.hypot(x, y)
    return {
        "circle": radius <= 1,
        "square": (abs(x) <= 0.88) & (abs(y) <= 0.88),
        "triangle": (y <= 0.9) & (abs(x) <= (y + 1) / 1.9),
        "cross": (abs(x) <= 0.34) | (abs(y) <= 0.34),
        "ring": (radius <= 1) & (radius >= 0.56),
    }[thing.name]


def make_scene(seed: int, most_objects: int = MOST_OBJECTS) -> Scene:
    """Return the scene of a seed: the same on every machine.

    Args:
        seed: any non-negative integer.
        most_objects: the scene holds one to this many coloured shapes, at most 5.
    """
    rng = random.Random(seed)
    cells = rng.sample(range(9), 9)
    objects = []
    for _ in range(rng.randint(1, most_objects)):
        side = rng.randint(22, 30)
        objects.append(place(rng, rng.choice(SHAPES), rng.choice(list(COLOURS)), cells.pop(), side, side))
    digit = word = None
    if rng.random() < 0.5:
        digit = place(rng, str(rng.randint(0, 9)), None, cells.pop(), 20, 28)
    if rng.random() < 0.5:
        word = place(rng, rng.choice(WORDS), None, cells.pop(), 34, 14)
    return Scene(seed, tuple(objects), digit, word)


def place(rng: random.Random, name: str, colour: str | None, cell: int, width: int, height: int) -> Thing:
    """Return a thing of this size somewhere inside a cell."""
    cell_side = SIZE / 3
    left = int(cell % 3 * cell_side + rng.uniform(0, cell_side - width))
    top = int(cell // 3 * cell_side + rng.uniform(0, cell_side - height))
    return Thing(name, colour, cell, (left, top, width))


def held_out(count: int, seeds: range = HELD_OUT_SEEDS) -> Iterator[tuple[Image.Image, Question]]:
    """Yield pictures with one question each, the kinds in turn.

    Args:
        count: how many.
        seeds: scene seeds to take in order; a scene that does not allow the kind in turn is passed over.
    """
    made = 0
    for seed in seeds:
        if made == count:
            return
        scene = make_scene(seed)
        question = scene.questions(random.Random(seed)).get(KINDS[made % len(KINDS)])
        if question is not None:
            made += 1
            yield scene.render(), question
