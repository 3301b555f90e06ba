"""Questions about the table of facts.

Which questions are held out is decided by the text of the question. So a held-out question has a new wording, but its
fact occurs in training, because a model cannot know a fact that it never saw.
"""

from redline.datasets.conversations.draw import Draw
from redline.datasets.conversations.facts import (
    ANIMALS,
    COLOURS_OF,
    COUNTRIES,
    DAYS,
    JOBS,
    KIND_OF,
    LEGS_OF,
    MADE_OF,
    MIXED,
    MONTH_DAYS,
    MONTHS,
    PLANETS,
    SEASONS,
    SIDES,
    SINGLE,
    USES,
)
from redline.datasets.conversations.scene import Scene, asked
from redline.datasets.conversations.words import article

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh")
_NAMES = tuple(COUNTRIES)
_MIXED, _SINGLE_ANIMALS, _KIND_OF = tuple(MIXED.items()), tuple(ANIMALS), tuple(KIND_OF)
_COLOURS, _MADE_OF, _JOBS, _USES = (tuple(table.items()) for table in (COLOURS_OF, MADE_OF, JOBS, USES))
_SIDES = tuple(SIDES.items())


def scene(draw: Draw) -> Scene:
    return draw.pick(_KINDS)(draw)


def _country(draw: Draw) -> Scene:
    name = draw.pick(_NAMES)
    capital, continent, language = COUNTRIES[name]
    about = draw.pick(("capital", "capital", "capital", "reverse", "reverse", "continent", "language", "is"))
    if about == "capital":
        forms = (
            f"What is the capital of {name}?",
            f"What's the capital of {name}?",
            f"Which city is the capital of {name}?",
            f"Do you know the capital of {name}?",
            f"Tell me the capital of {name}.",
            f"The capital of {name}?",
            f"Name the capital of {name}.",
            f"capital of {name}",
        )
        return asked(draw.pick(forms), f"The capital of {name} is {capital}.", capital)
    if about == "reverse":
        forms = (
            f"{capital} is the capital of which country?",
            f"Which country has the capital {capital}?",
            f"Of which country is {capital} the capital?",
            f"In which country is {capital}?",
            f"Where is {capital}?",
        )
        return asked(draw.pick(forms), f"{capital} is the capital of {name}.", name)
    if about == "continent":
        forms = (f"Which continent is {name} in?", f"On which continent is {name}?", f"Where is {name}?")
        return asked(draw.pick(forms), f"{name} is in {continent}.", continent)
    if about == "language":
        forms = (
            f"Which language do people speak in {name}?",
            f"What language is spoken in {name}?",
            f"What do they speak in {name}?",
        )
        return asked(draw.pick(forms), f"People in {name} speak {language}.", language)
    other = capital if draw.chance(0.5) else COUNTRIES[draw.pick(_NAMES)][0]
    yes = "Yes" if other == capital else "No"
    answer = f"{yes}, the capital of {name} is {capital}."
    return asked(f"Is {other} the capital of {name}?", answer, yes)


def _animal(draw: Draw) -> Scene:
    name = draw.pick(_SINGLE_ANIMALS)
    sound, young, _, _ = ANIMALS[name]
    one = article(name)
    about = draw.whole(0, 2)
    if about == 0:
        verb = draw.pick(
            (f"What sound does {one} make?", f"What noise does {one} make?", f"What does {one} do: bark or moo?")
        )
        if "bark or moo" in verb and name not in ("dog", "cow"):
            verb = f"How does {one} sound?"
        return asked(verb, f"{one.capitalize()} {sound}.", sound)
    if about == 1:
        forms = (
            f"What is a baby {name} called?",
            f"What do you call a young {name}?",
            f"What is the young of {one} called?",
        )
        return asked(draw.pick(forms), f"A young {name} is called a {young}.", young)
    forms = (f"Which animal {sound}?", f"What animal {sound}?", f"Name an animal that {sound}.")
    return asked(draw.pick(forms), f"{one.capitalize()} {sound}.", name)


def _kind(draw: Draw) -> Scene:
    name = draw.pick(_KIND_OF)
    one, kind, legs = article(name), KIND_OF[name], LEGS_OF[name]
    about = draw.whole(0, 2)
    if about == 0:
        forms = (
            f"What kind of animal is {one}?",
            f"What type of animal is {one}?",
            f"Is {one} a mammal, a bird or something else?",
        )
        return asked(draw.pick(forms), f"{one.capitalize()} is {article(kind)}.", kind)
    if about == 1:
        forms = (f"How many legs does {one} have?", f"How many legs has {one} got?", f"Number of legs of {one}?")
        count = "no legs" if not legs else f"{legs} legs"
        return asked(draw.pick(forms), f"{one.capitalize()} has {count}.", str(legs))
    guess = draw.pick(("mammal", "bird", "fish", "insect", "reptile"))
    yes = guess == kind
    answer = f"{'Yes' if yes else 'No'}, {one} is {article(kind)}."
    return asked(f"Is {one} {article(guess)}?", answer, "Yes" if yes else "No")


def _colour(draw: Draw) -> Scene:
    if draw.chance(0.4):
        (one, other), mixed = draw.pick(_MIXED)
        if draw.chance(0.5):
            one, other = other, one
        forms = (
            f"What do you get when you mix {one} and {other}?",
            f"Which colour do {one} and {other} make?",
            f"Mix {one} with {other}: which colour is it?",
        )
        return asked(draw.pick(forms), f"{one.capitalize()} and {other} make {mixed}.", mixed)
    thing, colour = draw.pick(_COLOURS)
    forms = (f"What colour is {thing}?", f"Which colour does {thing} have?", f"Tell me the colour of {thing}.")
    return asked(draw.pick(forms), f"{thing[0].upper()}{thing[1:]} is {colour}.", colour)


def _planet(draw: Draw) -> Scene:
    place = draw.whole(0, len(PLANETS) - 1)
    name = PLANETS[place]
    if draw.chance(0.5) and place + 1 < len(PLANETS):
        forms = (f"Which planet comes after {name}?", f"What is the next planet after {name}?")
        return asked(draw.pick(forms), f"{PLANETS[place + 1]} comes after {name}.", PLANETS[place + 1])
    number = _ORDINALS[place]
    forms = (f"What is the {number} planet from the sun?", f"Which planet is {number} from the sun?")
    return asked(draw.pick(forms), f"{name} is the {number} planet from the sun.", name)


def _day(draw: Draw) -> Scene:
    place = draw.whole(0, 6)
    day = DAYS[place]
    if draw.chance(0.4):
        days = draw.whole(2, 6)
        steps = [DAYS[(place + n) % 7] for n in range(1, days + 1)]
        forms = (f"What day is it {days} days after {day}?", f"Today is {day}. What day is it in {days} days?")
        answer = f"After {day} come {', '.join(steps)}. So it is {steps[-1]}."
        return asked(draw.pick(forms), answer, steps[-1])
    if draw.chance(0.5):
        forms = (f"Which day comes after {day}?", f"What day follows {day}?", f"Today is {day}. What day is tomorrow?")
        found = DAYS[(place + 1) % 7]
        return asked(draw.pick(forms), f"The day after {day} is {found}.", found)
    forms = (f"Which day comes before {day}?", f"What day is before {day}?", f"Today is {day}. What day was yesterday?")
    found = DAYS[place - 1]
    return asked(draw.pick(forms), f"The day before {day} is {found}.", found)


def _month(draw: Draw) -> Scene:
    place = draw.whole(0, 11)
    month = MONTHS[place]
    about = draw.whole(0, 4)
    if about == 0:
        forms = (
            f"Which month comes after {month}?",
            f"What month follows {month}?",
            f"What is the month after {month}?",
        )
        return asked(draw.pick(forms), f"{MONTHS[(place + 1) % 12]} comes after {month}.", MONTHS[(place + 1) % 12])
    if about == 1:
        forms = (f"Which month comes before {month}?", f"What is the month before {month}?")
        return asked(draw.pick(forms), f"{MONTHS[place - 1]} comes before {month}.", MONTHS[place - 1])
    if about == 2:
        forms = (f"How many days does {month} have?", f"How many days are in {month}?", f"How long is {month}?")
        return asked(draw.pick(forms), f"{month} has {MONTH_DAYS[place]} days.", str(MONTH_DAYS[place]))
    if about == 3:
        forms = (f"Which season is {month} in?", f"In which season is {month}?")
        return asked(draw.pick(forms), f"In Europe, {month} is in {SEASONS[place]}.", SEASONS[place])
    number = (*_ORDINALS, "twelfth")[place]
    forms = (f"What is the {number} month of the year?", f"Which month is the {number} one?")
    return asked(draw.pick(forms), f"{month} is the {number} month of the year.", month)


def _thing(draw: Draw) -> Scene:
    about = draw.whole(0, 3)
    if about == 0:
        thing, made_of = draw.pick(_MADE_OF)
        forms = (
            f"What is {thing} made of?",
            f"What is {thing} usually made of?",
            f"Which material is {thing} made of?",
        )
        return asked(draw.pick(forms), f"{thing[0].upper()}{thing[1:]} is usually made of {made_of}.", made_of)
    if about == 1:
        job, does = draw.pick(_JOBS)
        forms = (
            f"What does {article(job)} do?",
            f"What is the work of {article(job)}?",
            f"Explain the job of {article(job)}.",
        )
        return asked(draw.pick(forms), f"{article(job).capitalize()} {does}.")
    if about == 2:
        thing, use = draw.pick(_USES)
        forms = (f"What is {thing} for?", f"What do you use {thing} for?", f"What can I do with {thing}?")
        return asked(draw.pick(forms), f"You use {thing} to {use}.")
    shape, sides = draw.pick(_SIDES)
    forms = (
        f"How many sides does {article(shape)} have?",
        f"How many sides has {article(shape)} got?",
        f"How many corners does {article(shape)} have?",
    )
    what = "corners" if "corners" in (text := draw.pick(forms)) else "sides"
    return asked(text, f"{article(shape).capitalize()} has {sides} {what}.", str(sides))


def _single(draw: Draw) -> Scene:
    question, answer, short = draw.pick(SINGLE)
    start = draw.pick(("", "", "Do you know this: ", "I wonder: ", "A question for you: ", "My teacher asks: "))
    return asked(f"{start}{question}", answer, short)


_KINDS = (_country, _country, _country, _animal, _kind, _colour, _planet, _day, _month, _month, _thing, _thing, _single)
