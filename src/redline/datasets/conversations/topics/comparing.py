"""Comparing and sorting numbers and words, even and odd numbers."""

from redline.datasets.conversations.draw import Draw
from redline.datasets.conversations.scene import Scene, asked
from redline.datasets.conversations.words import WORDS, listed


def scene(draw: Draw) -> Scene:
    return draw.pick((_two, _extreme, _sort_numbers, _sort_words, _even, _first_word))(draw)


def _two(draw: Draw) -> Scene:
    a, b = draw.some(range(1000 if draw.chance(0.3) else 100), 2)
    bigger = draw.chance(0.5)
    word = draw.pick(("larger", "bigger", "greater") if bigger else ("smaller", "less"))
    found, other = (max(a, b), min(a, b)) if bigger else (min(a, b), max(a, b))
    key = f"compare {min(a, b)} {max(a, b)}"
    if draw.chance(0.4):
        right = found == a
        answer = f"{'Yes' if right else 'No'}, {found} is {word} than {other}."
        return asked(f"Is {a} {word} than {b}?", answer, "Yes" if right else "No", key=key)
    form = draw.pick(("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?", "{a} or {b}, which is {w}?"))
    return asked(form.format(w=word, a=a, b=b), f"{found} is {word} than {other}.", str(found), key=key)


def _extreme(draw: Draw) -> Scene:
    numbers = draw.some(range(1, 100), draw.whole(3, 6))
    largest = draw.chance(0.5)
    word = draw.pick(("largest", "biggest", "highest") if largest else ("smallest", "lowest"))
    found = max(numbers) if largest else min(numbers)
    shown = ", ".join(map(str, numbers))
    form = draw.pick(
        ("Which of these numbers is the {w}: {n}?", "What is the {w} number in {n}?", "Find the {w}: {n}.")
    )
    key = f"extreme {sorted(numbers)}"
    return asked(form.format(w=word, n=shown), f"The {word} number is {found}.", str(found), key=key)


def _sort_numbers(draw: Draw) -> Scene:
    numbers = draw.some(range(1, 100), draw.whole(3, 6))
    down = draw.chance(0.3)
    order = draw.pick((" from large to small", " in descending order") if down else ("", " from small to large"))
    form = draw.pick(("Sort these numbers{o}: {n}.", "Put these numbers in order{o}: {n}", "Sort {n}{o}."))
    if down and form.startswith("Put"):
        form = "Put these numbers{o}: {n}"
    shown = ", ".join(map(str, numbers))
    answer = ", ".join(map(str, sorted(numbers, reverse=down)))
    return asked(form.format(o=order, n=shown), f"{answer}.", key=f"sort {sorted(numbers)}")


def _sort_words(draw: Draw) -> Scene:
    words = draw.some(WORDS, draw.whole(3, 5))
    form = draw.pick(
        ("Sort these words: {}.", "Put these words in alphabetical order: {}.", "Sort alphabetically: {}", "Sort {}.")
    )
    text = form.format(", ".join(words))
    return asked(text, f"{', '.join(sorted(words))}.", key=f"sort {' '.join(sorted(words))}")


def _even(draw: Draw) -> Scene:
    number = draw.whole(0, 999)
    word = "even" if number % 2 == 0 else "odd"
    why = f"{number} is {word}, because it ends in {number % 10}."
    if draw.chance(0.5):
        return asked(f"Is {number} even or odd?", why, word, key=f"even {number}")
    guess = draw.pick(("even", "odd"))
    yes = "Yes" if guess == word else "No"
    return asked(f"Is {number} an {guess} number?", f"{yes}, {why}", yes, key=f"even {number}")


def _first_word(draw: Draw) -> Scene:
    words = draw.some(WORDS, 2)
    first = min(words)
    form = draw.pick(("Which word comes first in the alphabet, {}?", "Which comes first in a dictionary: {}?"))
    answer = f'"{first}" comes before "{max(words)}".'
    text = form.format(" or ".join(words))
    return asked(text, answer, first, key=f"before {listed(sorted(words))}")
