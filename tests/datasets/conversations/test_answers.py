"""Every topic's answers are right, by rules that do not use the code that wrote them."""

import doctest
import importlib
import json
import re
from collections.abc import Callable
from fractions import Fraction

import pytest

from redline.datasets.conversations import Draw
from redline.datasets.conversations.scene import Scene, Turn
from redline.datasets.conversations.topics import TOPICS, form
from redline.datasets.conversations.topics.stories import make_story

COUNT = 250
OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "×": lambda a, b: a * b,
    "÷": lambda a, b: a / b,
}
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima", "Norway": "Oslo", "Cuba": "Havana"}


def scenes(topic: str) -> list[Scene]:
    return [TOPICS[topic](Draw(5, topic, number)) for number in range(COUNT)]


def turns(topic: str) -> list[Turn]:
    return [turn for scene in scenes(topic) for turn in (*scene.turns, *scene.later)]


def value(text: str) -> Fraction:
    """Computes `a + b + c` from left to right."""
    first, *rest = re.findall(r"[-+×÷]|\d+", text)
    total = Fraction(int(first))
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        total = OPERATIONS[sign](total, Fraction(int(number)))
    return total


def numbers(text: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", text)))


def test_a_question_has_one_answer() -> None:
    answers: dict[str, set[str]] = {}
    for topic in TOPICS:
        if topic == "untold":  # asks what is only unknown where nothing was said
            continue
        for number in range(600):
            scene = TOPICS[topic](Draw(7, topic, number))
            # Without case and punctuation, as users may type it.
            said = scene.system + scene.turns[0].user.lower().rstrip(".?! =")
            if scene.turns[0].exact:
                answers.setdefault(said, set()).add(scene.turns[0].answer)
    assert len(answers) > 4000 and not [said for said, found in answers.items() if len(found) > 1]


def test_every_equation_holds() -> None:
    checked = 0
    for turn in turns("arithmetic"):
        for left, right in re.findall(r"((?:\d+ [-+×÷] )+\d+) = (\d+)", turn.answer):
            assert value(left) == int(right), turn
            checked += 1
        if "= " in turn.answer:
            assert numbers(turn.answer)[-1] == int(turn.short) or turn.answer.endswith(" now.")
            if asked := re.fullmatch(r"\D*((?:\d+ [-+×÷] )+\d+)\D*", turn.user):
                assert value(asked[1]) == int(turn.short), turn
        elif turn.user.startswith(("Count", "Can you count", "Please count")):
            first, last = numbers(turn.user)
            step = 1 if last > first else -1
            assert numbers(turn.answer) == list(range(first, last + step, step))
        else:
            shown = numbers(turn.user)
            assert int(turn.short) - shown[-1] == shown[1] - shown[0] == shown[-1] - shown[-2], turn
    assert checked > COUNT


def test_comparisons() -> None:
    for turn in turns("comparing"):
        given = numbers(turn.user)
        if turn.user.startswith(("Sort", "Put")) and given:
            assert numbers(turn.answer) == sorted(given, reverse="large to small" in turn.user or "desc" in turn.user)
        elif turn.user.startswith(("Sort", "Put")):
            words = turn.answer.rstrip(".").split(", ")
            assert words == sorted(words) and all(word in turn.user for word in words) and len(words) > 2
        elif "even" in turn.answer or "odd" in turn.answer:
            assert f"{given[0]} is {'odd' if given[0] % 2 else 'even'}," in turn.answer
            if turn.short in ("Yes", "No"):
                assert (turn.short == "Yes") == ((" odd " in turn.user) == bool(given[0] % 2))
        elif "alphabet" in turn.user or "dictionary" in turn.user:
            first, second = re.findall(r'"(\w+)"', turn.answer)
            assert first < second and turn.short == first
        elif len(given) == 2:
            a, b = numbers(turn.answer)
            assert {a, b} == set(given)
            assert (a < b) == any(word in turn.answer for word in ("smaller", "less"))
            if turn.short in ("Yes", "No"):
                assert (turn.short == "Yes") == (a == given[0])
        else:
            least = any(word in turn.user for word in ("smallest", "lowest"))
            assert int(turn.short) == (min(given) if least else max(given)) == numbers(turn.answer)[0]


def test_spelling() -> None:
    for scene in scenes("spelling"):
        (turn,) = scene.turns
        word = scene.keys[0].split()[-1]
        letters = "-".join(word)
        kind = scene.keys[0].split()[0]
        assert re.search(rf"\b{word}\b", turn.user)
        if kind == "spell":
            assert turn.answer == f"{word}: {letters}."
        elif kind == "count":
            assert numbers(turn.answer) == [*range(1, len(word) + 1), len(word)] and int(turn.short) == len(word)
            assert "".join(re.findall(r"(\w) \d+[,.]", turn.answer)) == word
        elif kind == "occurrences":
            letter = scene.keys[0].split()[1]
            assert int(turn.short) == sum(one == letter for one in word)
            assert re.sub(r" \(\d\)", "", turn.answer).startswith(letters + ".")
        elif kind == "reverse":
            assert turn.short == "".join(reversed(word)) and turn.answer.endswith(f'so "{turn.short}".')
        elif kind in ("first", "last"):
            assert kind in turn.user or {"first": "start", "last": "end"}[kind] in turn.user
            assert turn.short == (word[0] if kind == "first" else word[-1])
        elif kind == "ordinal":
            place = ("first", "second", "third", "fourth").index(turn.user.split(" letter")[0].split()[-1])
            assert turn.short == word[place]
        else:
            assert kind == "contains" and (turn.short == "Yes") == (scene.keys[0].split()[1] in word)


def test_facts() -> None:
    seen = 0
    for number in range(1500):
        (turn,) = TOPICS["facts"](Draw(6, "facts", number)).turns
        assert turn.answer[0].isupper() and turn.answer.endswith(".")
        assert turn.short in ("Yes", "No") or turn.short.lower() in turn.answer.lower() or turn.short == "0"
        if found := re.search(r"capital of (\w+) is (\w+)", turn.answer):
            assert CAPITALS.get(found[1], found[2]) == found[2]
            seen += found[1] in CAPITALS
        if found := re.fullmatch(r"(.+) and (.+) make (.+)\.", turn.answer):
            assert {found[1].lower(), found[2]} != {"blue", "yellow"} or found[3] == "green"
    assert seen > 3


def test_words() -> None:
    for turn in turns("words"):
        if turn.as_is:
            assert turn.user.rstrip('".').endswith(turn.answer)
        elif "words" in turn.user.lower() and turn.short.isdigit():
            text = re.split(r': |"', turn.user)[1]
            assert len(text.split()) == int(turn.short)
        else:
            assert re.fullmatch(r'The (opposite|plural|past tense) of "\w+" is "\w+"\.', turn.answer)
            assert turn.answer.split('"')[1] in turn.user and turn.answer.split('"')[3] == turn.short


def test_stories_are_consistent() -> None:
    for number in range(COUNT):
        story = make_story(Draw(0, "story", number))
        for part in (story.hero, story.friend, story.place, story.thing, story.look, story.role, story.feeling):
            assert part in story.text
        assert story.hero != story.friend
    for scene in scenes("stories"):
        told = " ".join(turn.user + " " + turn.answer for turn in scene.turns)
        for turn in (*scene.turns[1:], *scene.later):
            names = re.findall(r"\b[A-Z]\w+", turn.answer)
            assert all(name in told for name in names if name not in ("The", "No")), turn
            assert turn.short == "No" or turn.short in told


def test_memory_repeats_what_was_told() -> None:
    for scene in scenes("memory"):
        told = " ".join(turn.user for turn in scene.turns).lower()
        for turn in scene.later:
            if turn.answer.startswith("You have not told me"):
                assert not turn.short
            else:
                assert turn.short.lower() in told and turn.short in turn.answer


def test_reasoning() -> None:
    taller = re.compile(r"(\w+) is (taller|older|faster|stronger|richer) than (\w+)")
    shorter = re.compile(r"(\w+) is (shorter|younger|slower|weaker|poorer) than (\w+)")
    checked = 0
    for scene in scenes("reasoning"):
        if not scene.keys[0].startswith("chain"):
            continue
        text = scene.turns[0].user
        above = {(a, b) for a, _, b in taller.findall(text)} | {(b, a) for a, _, b in shorter.findall(text)}
        above |= {(a, d) for a, b in above for c, d in above if b == c}
        for turn in scene.turns:
            claims = {(a, b) for a, _, b in taller.findall(turn.answer)}
            claims |= {(b, a) for a, _, b in shorter.findall(turn.answer)}
            assert claims and claims <= above, turn
            if turn.short in ("Yes", "No"):
                x, y = re.search(r"Is (\w+) \w+ than (\w+)\?", turn.user).groups()  # type: ignore[union-attr]
                assert (turn.short == "Yes") == ((x, y) in above)
                checked += 1
    assert checked > 10


def test_other_conclusions() -> None:
    for scene in scenes("reasoning"):
        for turn in scene.turns:
            assert turn.short in turn.answer
            if scene.keys[0].startswith(("moved", "colours", "ages")) and turn.short not in ("Yes", "No"):
                assert turn.short in scene.turns[0].user
            if scene.keys[0].startswith("colours") and (found := re.search(r"(\w+)'s (\w+) is (\w+)\.", turn.answer)):
                assert f"{found[1]} has a {found[3]} {found[2]}." in scene.turns[0].user


def test_lists() -> None:
    digits = dict(zip(("two", "three", "four", "five", "six", "seven"), "234567", strict=True))
    for turn in turns("lists"):
        asked = [digits.get(word, word) for word in turn.user.split()]
        count = next((int(word) for word in asked if word in digits.values()), None)
        if count is not None:
            items = re.split(r", | and |\n", turn.answer.rstrip("."))
            assert len(items) == len(set(items)) == count
            if "1." in turn.answer:
                assert [item.split(". ")[0] for item in items] == list(map(str, range(1, count + 1)))
        elif turn.short not in ("Yes", "No"):
            assert all(
                word.lower() in turn.user for word in re.split(r", | and ", turn.answer.rstrip(".")) if turn.short == ""
            )


@pytest.mark.parametrize("topic", ["unknown", "untold"])
def test_what_is_unknown_is_said_so(topic: str) -> None:
    for turn in turns(topic):
        assert turn.answer.startswith(("I do not know", "I cannot", "I am too small", "You have not told me"))
        if found := re.fullmatch(r"I do not know (?:anything about|the capital of|who invented) (.+)\.", turn.answer):
            assert found[1] in turn.user


def test_forms() -> None:
    turn = Turn("What is the capital of France?", "The capital of France is Paris.", "Paris")
    expected = {
        "short": "Paris",
        "capitals": "THE CAPITAL OF FRANCE IS PARIS.",
        "lower": "the capital of france is paris.",
        "json": '{"answer": "Paris"}',
        "quoted": '"Paris"',
        "twice": "The capital of France is Paris. The capital of France is Paris.",
    }
    assert {name: form.formed(turn, name).answer for name in form.FORMS} == expected
    seen = set()
    for scene in scenes("form"):
        last = scene.turns[-1]
        text = last.user.lower()
        if "json" in text:
            assert list(json.loads(last.answer)) == ["answer"]
            seen.add("json")
        elif "capital letters" in text or "in capitals" in text or "upper case" in text:
            assert last.answer == last.answer.upper()
            seen.add("capitals")
        elif "quotation" in text:
            assert last.answer[0] == last.answer[-1] == '"'
            seen.add("quoted")
    assert seen == {"json", "capitals", "quoted"}


def test_system_prompts_are_followed() -> None:
    for scene in scenes("system"):
        assert scene.system
        for turn in scene.turns:
            if "JSON" in scene.system:
                assert json.loads(turn.answer)["answer"]
            elif "capital" in scene.system or "upper" in scene.system:
                assert turn.answer == turn.answer.upper()
            elif turn.short and "name" in turn.user:
                assert turn.short in scene.system and turn.short in turn.answer


@pytest.mark.parametrize("name", ["conversation", "table_text", "topics.arithmetic"])
def test_the_examples_run(name: str) -> None:
    module = importlib.import_module(f"redline.datasets.conversations.{name}")
    found = doctest.testmod(module)
    assert found.attempted and not found.failed
