"""Questions that ask for things of a kind, whether a thing belongs to a kind, and which entry does not belong."""

from redline.datasets.conversations.draw import Draw
from redline.datasets.conversations.scene import Scene, asked
from redline.datasets.conversations.words import KINDS, article, listed

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven")
_KINDS = tuple(KINDS)
# Kinds whose singular is not the plural without its last letter ("clothes" is handled in `singular`).
_ONE = {"pieces of furniture": "piece of furniture"}


def singular(kind: str) -> str:
    return _ONE.get(kind, kind.removesuffix("s")) if kind != "clothes" else "piece of clothing"


def scene(draw: Draw) -> Scene:
    return draw.pick((_list, _list, _belongs, _odd_one, _pick_from))(draw)


def _list(draw: Draw) -> Scene:
    kind = draw.pick(_KINDS)
    count = draw.whole(2, 7)
    items = list(KINDS[kind][:count])
    number = draw.pick((str(count), _NUMBERS[count]))
    plain = (
        "Name {n} {k}.",
        "Give me {n} {k}.",
        "Can you name {n} {k}?",
        "Tell me {n} {k}.",
        "I need {n} {k}.",
    )
    numbered = ("List {n} {k}.", "Make a list of {n} {k}.", "Write a numbered list of {n} {k}.", "Please list {n} {k}.")
    if draw.chance(0.5):
        answer = "\n".join(f"{place}. {item}" for place, item in enumerate(items, 1))
        return asked(draw.pick(numbered).format(n=number, k=kind), answer)
    text = listed(items)
    return asked(draw.pick(plain).format(n=number, k=kind), f"{text[0].upper()}{text[1:]}.")


def _belongs(draw: Draw) -> Scene:
    kind = draw.pick(_KINDS)
    item, its_kind = draw.pick(KINDS[kind]), kind
    if draw.chance(0.5):
        its_kind = draw.pick([other for other in _KINDS if item not in KINDS[other]])
    yes = its_kind == kind
    # Some things belong to two kinds, such as the colour orange.
    kinds = [one for one in _KINDS if item in KINDS[one]]
    right = its_kind if yes else kinds[0]
    name, own = singular(its_kind), singular(right)
    answer = f'{"Yes" if yes else "No"}, "{item}" is {article(own)}.'
    return asked(f'Is "{item}" {article(name)}?', answer, "Yes" if yes else "No")


def _odd_one(draw: Draw) -> Scene:
    kind, other = draw.some(_KINDS, 2)
    items = draw.some(KINDS[kind], draw.whole(2, 4))
    odd = draw.pick([item for item in KINDS[other] if item not in KINDS[kind]])
    words = draw.shuffled([*items, odd])
    form = draw.pick(("Which word does not belong: {}?", "Find the odd one out: {}.", "Which one is different: {}?"))
    answer = f'"{odd}" does not belong, because the others are {kind}.'
    return asked(form.format(", ".join(words)), answer, odd, key=f"odd {sorted(words)}")


def _pick_from(draw: Draw) -> Scene:
    kind, other = draw.some(_KINDS, 2)
    mine = draw.some([item for item in KINDS[kind] if item not in KINDS[other]], draw.whole(1, 3))
    others = draw.some([item for item in KINDS[other] if item not in KINDS[kind]], draw.whole(1, 3))
    words = draw.shuffled([*mine, *others])
    found = [word for word in words if word in mine]
    form = draw.pick(("Which of these are {k}: {w}?", "Pick the {k} from this list: {w}.", "Find the {k}: {w}"))
    text = form.format(k=kind, w=", ".join(words))
    return asked(text, f"{listed(found).capitalize()}.", key=f"pick {kind} {sorted(words)}")
