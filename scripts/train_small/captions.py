"""Scenes to sentences: templates with synonyms, some things left unsaid, now and then a word that means nothing here.

Used by the text and expert stages, and by the evaluation, which asks in the plainest words.
"""

from random import Random

from scripts.tiny_tokenizer import TEXT
from scripts.train_small.world import BACKGROUNDS, BOUNCE, CIRCLE, COLOURS, MOTIONS, SHAPES, SPEEDS, STILL, Scene

SHAPE_WORDS = {
    "ball": ("ball", "circle", "disc"),
    "square": ("square", "box"),
    "triangle": ("triangle",),
    "cross": ("cross", "plus"),
}
VERBS = ("moves", "slides", "goes", "travels", "flies")
WAYS = {
    "left": ("left", "to the left"),
    "right": ("right", "to the right"),
    "up": ("up", "upwards"),
    "down": ("down", "downwards"),
    "up-left": ("up and to the left", "diagonally up and left"),
    "up-right": ("up and to the right", "diagonally up and right"),
    "down-left": ("down and to the left", "diagonally down and left"),
    "down-right": ("down and to the right", "diagonally down and right"),
}
OTHER_MOTIONS = {
    STILL: ("stays still", "does not move", "rests", "stands still"),
    BOUNCE: ("bounces", "bounces up and down"),
    CIRCLE: ("moves in a circle", "circles around"),
}
SPEED_WORDS = {"slow": ("slowly", "at a slow pace"), "fast": ("quickly", "fast")}
PLACES = ("on a {} background", "against a {} background", "over a {} background")
OPENINGS = ("", "", "", "a video of ", "a clip of ", "we see ")
WITH_MEANING = {
    "red",
    "blue",
    "orange",
    "yellow",
    "grey",
    "light",
    "slow",
    "slowly",
    "still",
    "static",
    "under",
    "over",
}
WORDS_WITHOUT_MEANING = tuple(
    word for word in sorted({word.strip(",;") for word in TEXT.split()}) if word not in WITH_MEANING
)
DISTRACTED = 0.15  # share of captions with a word without meaning


def random_scene(random: Random, scene: Scene) -> Scene:
    """The scene with speed and background left unsaid at times; something that stands still has no speed."""
    speed = scene.speed if scene.motion != STILL and random.random() < 0.7 else None
    return Scene(*scene.combination, speed, scene.background if random.random() < 0.7 else None)


def caption(random: Random, scene: Scene) -> str:
    """One sentence that says what the scene holds, no more."""
    thing = f"{_coloured(scene)} {random.choice(SHAPE_WORDS[scene.shape])} {_motion(random, scene)}"
    place = random.choice(PLACES).format(scene.background) if scene.background else ""
    if place and random.random() < 0.2:
        text = f"{place}, {thing}"
    else:
        text = " ".join(filter(None, (random.choice(OPENINGS) + thing, place)))
    return _distracted(random, text) if random.random() < DISTRACTED else text


def plain_caption(scene: Scene) -> str:
    """The first choice everywhere: what the README tells people to write."""
    motion = OTHER_MOTIONS[scene.motion][0] if scene.motion in OTHER_MOTIONS else f"moves {WAYS[scene.motion][0]}"
    words = [f"{_coloured(scene)} {scene.shape} {motion}"]
    words += [SPEED_WORDS[scene.speed][0]] if scene.speed and scene.motion != STILL else []
    words += [PLACES[0].format(scene.background)] if scene.background else []
    return " ".join(words)


def vocabulary_text() -> str:
    """Every word that a caption can hold, for the tokenizer to know whole."""
    words = ["a", "an", *COLOURS, *MOTIONS, *SPEEDS, *BACKGROUNDS, *SHAPES, *VERBS, *OPENINGS, *PLACES]
    for table in (SHAPE_WORDS, WAYS, OTHER_MOTIONS, SPEED_WORDS):
        words += [phrase for phrases in table.values() for phrase in phrases]
    return " ".join(words).replace("{}", "")


def _coloured(scene: Scene) -> str:
    return f"{'an' if scene.colour[0] in 'aeiou' else 'a'} {scene.colour}"


def _motion(random: Random, scene: Scene) -> str:
    if scene.motion in OTHER_MOTIONS:
        words = [random.choice(OTHER_MOTIONS[scene.motion])]
    else:
        words = [random.choice(VERBS), random.choice(WAYS[scene.motion])]
    if scene.speed:
        words.append(random.choice(SPEED_WORDS[scene.speed]))
    return " ".join(words)


def _distracted(random: Random, text: str) -> str:
    words = text.split()
    words.insert(random.randrange(len(words) + 1), random.choice(WORDS_WITHOUT_MEANING))
    return " ".join(words)
