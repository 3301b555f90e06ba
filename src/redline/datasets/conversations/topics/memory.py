"""Questions about what the user told the model earlier in the conversation, such as a name or an age.

If the user asks for something that was not told, the answer says so.
"""

from redline.datasets.conversations.draw import Draw
from redline.datasets.conversations.names import city, person, pet
from redline.datasets.conversations.scene import Scene, Turn
from redline.datasets.conversations.words import ANIMALS, COLOURS, FRUITS, JOBS, SPORTS, article

_FAVOURITES = {"colour": COLOURS, "animal": ANIMALS, "fruit": FRUITS, "sport": SPORTS}
_UNKNOWN = (
    ("What is my name?", "You have not told me your name."),
    ("Where do I live?", "You have not told me where you live."),
    ("How old am I?", "You have not told me your age."),
    ("What is my favourite colour?", "You have not told me your favourite colour."),
    ("What is my favourite animal?", "You have not told me your favourite animal."),
    ("What is my job?", "You have not told me your job."),
    ("What is the name of my dog?", "You have not told me the name of your dog."),
    ("What is the name of my brother?", "You have not told me the name of your brother."),
)


def scene(draw: Draw) -> Scene:
    """Returns one to three statements of the user, and the questions about them as later turns."""
    kinds = dict.fromkeys(draw.some(_KINDS, draw.whole(1, 3)))
    made = [kind(draw) for kind in kinds]
    told: list[Turn] = []
    if len(made) > 1 and draw.chance(0.3):
        # The user says everything in one message.
        text = _together(draw, [statement for statement, _, _, _ in made])
        answer = "Thank you, I will remember that in this conversation."
        told.append(Turn(text, answer))
    else:
        told += [Turn(statement, answer) for statement, answer, _, _ in made]
    questions = [draw.pick(asks) for _, _, asks, _ in made]
    if draw.chance(0.25):
        subjects = {subject for _, _, _, subject in made}
        missing = [(question, answer) for question, answer in _UNKNOWN if not any(one in question for one in subjects)]
        questions.append(Turn(*draw.pick(missing)))
    key = "memory " + " ".join(sorted(statement for statement, _, _, _ in made))
    return Scene(tuple(told), (key,), tuple(draw.shuffled(questions)))


def _together(draw: Draw, statements: list[str]) -> str:
    """Returns the statements as one message; two of them may become one sentence."""
    if len(statements) == 2 and statements[1].startswith(("I ", "My ")) and draw.chance(0.6):
        first, second = statements
        return f"{first.removesuffix('.')} and {second.replace('My ', 'my ', 1)}"
    return " ".join(statements)


def nothing_told(draw: Draw) -> Scene:
    """Asks for something that the user has not told.

    The answer is right only if no `memory` scene comes before it, and `conversation` makes sure of that.
    """
    question, answer = draw.pick(_UNKNOWN)
    return Scene((Turn(question, answer),), ())


# What each function in `_KINDS` returns: the user's statement, the answer to it, the questions about it, and a text
# that occurs in the questions of `_UNKNOWN` about the same subject, which must not be asked after this statement.
Told = tuple[str, str, list[Turn], str]


def _name(draw: Draw) -> Told:
    name = person(draw)
    form = draw.pick(("My name is {}.", "I am {}.", "I'm {}.", "Call me {}.", "Hi, I'm {}.", "Hello, my name is {}."))
    asks = (
        "What is my name?",
        "Do you remember my name?",
        "What's my name?",
        "Who am I?",
        "How did I say I am called?",
    )
    return (
        form.format(name),
        f"Nice to meet you, {name}!",
        [Turn(ask, f"Your name is {name}.", name) for ask in asks],
        "my name",
    )


def _home(draw: Draw) -> Told:
    place = city(draw)
    form = draw.pick(("I live in {}.", "I am from {}.", "My home is in {}.", "I come from {}."))
    asks = ("Where do I live?", "Where am I from?", "In which city do I live?")
    return (
        form.format(place),
        f"I hope you like it in {place}.",
        [Turn(ask, f"You live in {place}.", place) for ask in asks],
        "I live",
    )


def _age(draw: Draw) -> Told:
    age = draw.whole(5, 90)
    form = draw.pick(("I am {} years old.", "I'm {} years old.", "My age is {}."))
    asks = ("How old am I?", "What is my age?", "Do you remember how old I am?")
    return (
        form.format(age),
        f"{age} is a good age.",
        [Turn(ask, f"You are {age} years old.", str(age)) for ask in asks],
        "old am I",
    )


def _favourite(draw: Draw) -> Told:
    kind = draw.pick(tuple(_FAVOURITES))
    value = draw.pick(_FAVOURITES[kind])
    form = draw.pick(("My favourite {k} is {v}.", "The {k} I like best is {v}.", "{V} is my favourite {k}."))
    text = form.format(k=kind, v=value, V=value.capitalize())
    asks = (f"What is my favourite {kind}?", f"Which {kind} do I like best?", f"Do you remember my favourite {kind}?")
    answer = f"Your favourite {kind} is {value}."
    return (
        text,
        f"I will remember that your favourite {kind} is {value}.",
        [Turn(ask, answer, value) for ask in asks],
        "favourite",
    )


def _pet(draw: Draw) -> Told:
    animal, name = draw.pick(("dog", "cat", "horse", "rabbit", "parrot")), pet(draw)
    form = draw.pick(("I have a {a} named {n}.", "My {a} is called {n}.", "The name of my {a} is {n}."))
    asks = [
        Turn(f"What is the name of my {animal}?", f"Your {animal} is called {name}.", name),
        Turn(f"What is my {animal} called?", f"Your {animal} is called {name}.", name),
        Turn("What is the name of my pet?", f"Your {animal} is called {name}.", name),
        Turn(f"Which animal is {name}?", f"{name} is your {animal}.", animal),
    ]
    return form.format(a=animal, n=name), f"{name} is a nice name for {article(animal)}.", asks, "dog"


def _relative(draw: Draw) -> Told:
    kind, name = draw.pick(("brother", "sister", "mother", "father", "friend", "teacher")), person(draw)
    form = draw.pick(("My {k} is called {n}.", "The name of my {k} is {n}.", "I have a {k} named {n}."))
    if kind in ("mother", "father") and "have a" in form:
        form = "My {k} is called {n}."
    asks = (f"What is the name of my {kind}?", f"What is my {kind} called?", f"What's my {kind}'s name?")
    answer = f"Your {kind} is called {name}."
    return (
        form.format(k=kind, n=name),
        f"Please say hello to {name} from me.",
        [Turn(ask, answer, name) for ask in asks],
        "brother",
    )


def _job(draw: Draw) -> Told:
    job = draw.pick(JOBS)
    form = draw.pick(("I work as {}.", "My job: I am {}.", "I am {} by profession."))
    asks = ("What is my job?", "What do I do for a living?", "What do I work as?")
    answer = f"You work as {article(job)}."
    return (
        form.format(article(job)),
        "That sounds like interesting work.",
        [Turn(ask, answer, job) for ask in asks],
        "job",
    )


_KINDS = (_name, _name, _home, _age, _favourite, _pet, _relative, _job)
