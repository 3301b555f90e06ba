"""Sums, differences, products, quotients and word problems, with the steps that lead to the result."""

from redline.datasets.conversations.draw import Draw
from redline.datasets.conversations.names import people
from redline.datasets.conversations.scene import Scene, asked
from redline.datasets.conversations.words import FRUITS, TOOLS, VEHICLES, plural

_FORMS = (
    "What is {}?",
    "How much is {}?",
    "Calculate {}.",
    "What's {}?",
    "{} = ?",
    "What does {} make?",
    "Can you work out {}?",
    "{}",
    "Please compute {}.",
    "I need the result of {}.",
)
_WORDS = {"+": "plus", "-": "minus", "×": "times", "÷": "divided by"}
_ALSO_TIMES = ("×", "*", "x")
_THINGS = [plural(noun) for noun in (*FRUITS, *TOOLS, *VEHICLES, "book", "pencil", "cup", "stone", "button")]


def scene(draw: Draw) -> Scene:
    return draw.pick((_sum, _sum, _difference, _difference, _product, _quotient, _three, _story, _count, _sequence))(
        draw
    )


def add(a: int, b: int) -> str:
    """Returns the sum with its steps.

    >>> add(47, 38)
    '40 + 30 = 70, 7 + 8 = 15, 70 + 15 = 85. So 47 + 38 = 85.'
    """
    if min(a, b) < 10 and max(a, b) < 20:
        return f"{a} + {b} = {a + b}."
    tens, ones = a - a % 10 + b - b % 10, a % 10 + b % 10
    first = f"{a - a % 10} + {b - b % 10} = {tens}, {a % 10} + {b % 10} = {ones}, "
    return f"{first}{tens} + {ones} = {a + b}. So {a} + {b} = {a + b}."


def subtract(a: int, b: int) -> str:
    """Returns the difference with its steps; b must not be larger than a.

    >>> subtract(82, 47)
    '82 - 40 = 42, 42 - 7 = 35. So 82 - 47 = 35.'
    """
    if b < 10 or b % 10 == 0 or a < 20:
        return f"{a} - {b} = {a - b}."
    between = a - (b - b % 10)
    return f"{a} - {b - b % 10} = {between}, {between} - {b % 10} = {a - b}. So {a} - {b} = {a - b}."


def multiply(a: int, b: int) -> str:
    """Returns the product with its steps; `a` is at most 12.

    >>> multiply(7, 24)
    '7 × 20 = 140, 7 × 4 = 28, 140 + 28 = 168. So 7 × 24 = 168.'
    """
    if a <= 12 and b <= 12 or b % 10 == 0:
        return f"{a} × {b} = {a * b}."
    tens, ones = b - b % 10, b % 10
    parts = f"{a} × {tens} = {a * tens}, {a} × {ones} = {a * ones}"
    return f"{parts}, {a * tens} + {a * ones} = {a * b}. So {a} × {b} = {a * b}."


def _question(draw: Draw, a: int, sign: str, b: int, answer: str, result: int, key: str) -> Scene:
    shown = draw.pick(_ALSO_TIMES) if sign == "×" else sign
    if draw.chance(0.25):
        shown = _WORDS[sign]
    written = f"{a}{shown}{b}" if shown in ("+", "-", "*") and draw.chance(0.2) else f"{a} {shown} {b}"
    return asked(draw.pick(_FORMS).format(written), answer, str(result), key=key)


def _sum(draw: Draw) -> Scene:
    most = draw.pick((10, 20, 100, 100, 100))
    a, b = draw.whole(0, most), draw.whole(0, most)
    # Small sums are meant to be learned by heart, so they are not held out. An empty key makes the text of the question
    # the combination, so only some wordings of a small sum are held out.
    key = f"{min(a, b)} + {max(a, b)}" if max(a, b) > 20 else ""
    return _question(draw, a, "+", b, add(a, b), a + b, key)


def _difference(draw: Draw) -> Scene:
    most = draw.pick((10, 20, 100, 100, 100))
    b, a = sorted((draw.whole(0, most), draw.whole(0, most)))
    key = f"{a} - {b}" if a > 20 else ""
    return _question(draw, a, "-", b, subtract(a, b), a - b, key)


def _product(draw: Draw) -> Scene:
    a = draw.whole(0, 12)
    b = draw.whole(13, 40) if draw.chance(0.4) else draw.whole(0, 12)
    # Products up to 12 × 12, and with 0 or 1, are meant to be learned by heart, so only wordings of them are held out.
    key = f"{a} × {b}" if b > 12 and a > 1 else ""
    return _question(draw, a, "×", b, multiply(a, b), a * b, key)


def _quotient(draw: Draw) -> Scene:
    a, b = draw.whole(1, 12), draw.whole(1, 12)
    answer = f"{a} × {b} = {a * b}, so {a * b} ÷ {a} = {b}."
    return _question(draw, a * b, "÷", a, answer, b, "")


def _three(draw: Draw) -> Scene:
    a, b, c = (draw.whole(1, 30) for _ in range(3))
    answer = f"{a} + {b} = {a + b}, {a + b} + {c} = {a + b + c}. So {a} + {b} + {c} = {a + b + c}."
    key = f"{a} + {b} + {c}"
    return asked(draw.pick(_FORMS).format(key), answer, str(a + b + c), key=key)


def _story(draw: Draw) -> Scene:
    one, other = people(draw, 2)
    things, a, b = draw.pick(_THINGS), draw.whole(2, 40), draw.whole(2, 40)
    end = draw.pick((f"How many {things} does {one} have now?", f"How many {things} has {one} got now?"))
    if draw.chance(0.5):
        more = draw.pick(
            (f"{other} gives {one} {b} more.", f"{one} gets {b} more from {other}.", f"{one} buys {b} more.")
        )
        text, total, step = f"{one} has {a} {things}. {more} {end}", a + b, f"{a} + {b}"
    else:
        a, b = max(a, b), min(a, b)
        less = draw.pick((f"{one} gives {b} to {other}.", f"{one} loses {b} of them.", f"{one} sells {b} of them."))
        text, total, step = f"{one} has {a} {things}. {less} {end}", a - b, f"{a} - {b}"
    return asked(text, f"{step} = {total}. {one} has {total} {things} now.", str(total), key=f"story {step} {things}")


def _count(draw: Draw) -> Scene:
    a = draw.whole(0, 60)
    b = a + draw.whole(2, 9)
    numbers = list(range(a, b + 1))
    if draw.chance(0.3):
        numbers.reverse()
    first, last = numbers[0], numbers[-1]
    form = draw.pick(("Count from {} to {}.", "Can you count from {} to {}?", "Please count from {} to {}."))
    return asked(form.format(first, last), ", ".join(map(str, numbers)) + ".", key=f"count {first} {last}")


def _sequence(draw: Draw) -> Scene:
    first, step = draw.whole(0, 40), draw.pick((1, 2, 3, 4, 5, 10))
    shown = [first + step * n for n in range(4)]
    text = ", ".join(map(str, shown))
    form = draw.pick(
        ("What comes next: {}?", "Which number comes next: {}?", "Continue the sequence {}.", "{}, and then?")
    )
    answer = f"Each number is {step} more than the one before, so the next one is {shown[-1] + step}."
    return asked(form.format(text), answer, str(shown[-1] + step), key=f"sequence {text}")
