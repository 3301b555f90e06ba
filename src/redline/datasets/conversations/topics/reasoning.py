"""Conclusions from two or three sentences: who is taller, what everybody has, where things are."""

from redline.datasets.conversations.draw import Draw
from redline.datasets.conversations.names import made_up_word, people, person
from redline.datasets.conversations.scene import Scene, Turn
from redline.datasets.conversations.table_text import words
from redline.datasets.conversations.words import COLOURS, article

# Each row: a comparative, its superlative, and the opposites of both.
_RELATIONS = (
    ("taller", "tallest", "shorter", "shortest"),
    ("older", "oldest", "younger", "youngest"),
    ("faster", "fastest", "slower", "slowest"),
    ("stronger", "strongest", "weaker", "weakest"),
    ("richer", "richest", "poorer", "poorest"),
)
_THINGS = words("ball key book cup coin ring letter apple hat pen stone watch")
_PLACES = words("box drawer bag basket cupboard car kitchen garden bedroom cellar")


def scene(draw: Draw) -> Scene:
    return draw.pick((_chain, _chain, _pair, _moved, _colours, _syllogism))(draw)


def _turns(draw: Draw, text: str, questions: list[Turn]) -> tuple[Turn, ...]:
    """Returns a turn whose message is the text and the first question, and further turns for some other questions."""
    first, *others = questions[: draw.whole(1, len(questions))]
    return (Turn(f"{text} {first.user}", first.answer, first.short), *others)


def _chain(draw: Draw) -> Scene:
    """Asks about three people: `a` exceeds `b`, and `b` exceeds `c`, for example in height or age."""
    a, b, c = people(draw, 3)
    more, most, less, least = draw.pick(_RELATIONS)
    sentences = [
        f"{a} is {more} than {b}." if draw.chance(0.6) else f"{b} is {less} than {a}.",
        f"{b} is {more} than {c}." if draw.chance(0.6) else f"{c} is {less} than {b}.",
    ]
    why = f"{a} is {more} than {b}, and {b} is {more} than {c}."
    x, y = draw.pick(((a, c), (c, a)))
    yes = x == a
    questions = [
        Turn(f"Is {x} {more} than {y}?", f"{'Yes' if yes else 'No'}, {a} is {more} than {c}.", "Yes" if yes else "No"),
        Turn(f"Who is the {most}?", f"{why} So {a} is the {most}.", a),
        Turn(f"Who is the {least}?", f"{why} So {c} is the {least}.", c),
        Turn(f"Who is {less}, {a} or {b}?", f"{b} is {less} than {a}.", b),
    ]
    text = " ".join(draw.shuffled(sentences))
    return Scene(_turns(draw, text, draw.shuffled(questions)), (f"chain {a} {b} {c} {more}",))


def _pair(draw: Draw) -> Scene:
    a, b = people(draw, 2)
    x, y = draw.some(range(5, 90), 2)
    older, younger = (a, b) if x > y else (b, a)
    questions = [
        Turn("Who is older?", f"{older} is older than {younger}.", older),
        Turn("Who is younger?", f"{younger} is younger than {older}.", younger),
        Turn(f"How old is {a}?", f"{a} is {x} years old.", str(x)),
        Turn(f"How old is {b}?", f"{b} is {y} years old.", str(y)),
    ]
    text = draw.pick((f"{a} is {x} years old and {b} is {y}.", f"{a} is {x} and {b} is {y} years old."))
    return Scene(_turns(draw, text, draw.shuffled(questions)), (f"ages {a} {x} {b} {y}",))


def _moved(draw: Draw) -> Scene:
    a = person(draw)
    thing = draw.pick(_THINGS)
    first, second = draw.some(_PLACES, 2)
    text = f"{a} puts the {thing} into the {first}."
    where = first
    if draw.chance(0.6):
        text += draw.pick((f" Then {a} moves it to the {second}.", f" Later the {thing} is moved to the {second}."))
        where = second
    questions = [
        Turn(f"Where is the {thing}?", f"The {thing} is in the {where}.", where),
        Turn(
            f"Is the {thing} in the {first}?",
            f"{'Yes' if where == first else 'No'}, the {thing} is in the {where}.",
            "Yes" if where == first else "No",
        ),
        Turn(f"Who put the {thing} there?", f"{a} did.", a),
    ]
    if where == second:
        questions[2] = Turn(f"Where was the {thing} first?", f"The {thing} was in the {first} first.", first)
    return Scene(_turns(draw, text, draw.shuffled(questions)), (f"moved {a} {thing} {first} {where}",))


def _colours(draw: Draw) -> Scene:
    count = draw.whole(2, 4)
    names, colours = people(draw, count), draw.some(COLOURS, count)
    thing = draw.pick(("car", "hat", "bag", "coat", "house", "bike", "door"))
    text = " ".join(f"{name} has a {colour} {thing}." for name, colour in zip(names, colours, strict=True))
    who = draw.whole(0, count - 1)
    x, y = names[who], colours[who]
    questions = [
        Turn(f"What colour is {x}'s {thing}?", f"{x}'s {thing} is {y}.", y),
        Turn(f"Who has the {y} {thing}?", f"{x} has the {y} {thing}.", x),
        Turn(f"Which {thing} does {x} have?", f"{x} has the {y} {thing}.", y),
    ]
    key = f"colours {sorted(zip(names, colours, strict=True))} {thing}"
    return Scene(_turns(draw, text, draw.shuffled(questions)), (key,))


def _syllogism(draw: Draw) -> Scene:
    kind, name, colour = made_up_word(draw), person(draw), draw.pick(COLOURS)
    other = draw.pick([one for one in COLOURS if one != colour])
    text = draw.pick(
        (
            f"All {kind}s are {colour}. {name} is {article(kind)}.",
            f"{name} is {article(kind)}. All {kind}s are {colour}.",
        )
    )
    guess = colour if draw.chance(0.5) else other
    yes = "Yes" if guess == colour else "No"
    because = f"{name} is {article(kind)}, and all {kind}s are {colour}."
    questions = [
        Turn(f"What colour is {name}?", f"{because} So {name} is {colour}.", colour),
        Turn(f"Is {name} {guess}?", f"{yes}. {because}", yes),
    ]
    return Scene(_turns(draw, text, draw.shuffled(questions)), (f"all {kind} {colour} {name}",))
