"""Questions that the model cannot answer; each answer says what the model does not know or cannot do."""

from redline.datasets.conversations.draw import Draw
from redline.datasets.conversations.facts import OTHER_COUNTRIES
from redline.datasets.conversations.names import PEOPLE, city, made_up_word
from redline.datasets.conversations.scene import Scene, asked
from redline.datasets.conversations.table_text import entries, words
from redline.datasets.conversations.words import WORDS, article

_SURNAMES = words("""
Smith Miller Brown Wilson Taylor Moore Clark Lewis Walker Hall Young King Wright Scott Green Baker Adams
Nelson Hill Campbell Mitchell Roberts Carter Phillips Evans Turner Parker Collins Edwards Stewart""")
_SUBJECTS = entries("""
quantum physics|the French revolution|chess openings|inflation|photosynthesis|black holes|taxes|philosophy|
the stock market|genetics|vaccines|the Roman empire|climate change|electric cars|opera|modern art|the human brain|
volcanoes|dinosaurs|nuclear power|the Second World War|machine learning|Shakespeare|the Middle Ages|economics|
football results|politics|religion|bitcoin|rocket engines""")
_NOW = (
    ("What time is it?", "I do not know the time, because I have no clock."),
    ("What is the time now?", "I do not know the time, because I have no clock."),
    ("What day is it today?", "I do not know today's date, because I have no clock."),
    ("What is the date?", "I do not know today's date, because I have no clock."),
    ("What year is it?", "I do not know today's date, because I have no clock."),
    ("What is in the news?", "I do not know the news, because I cannot look anything up."),
    ("What happened today?", "I do not know the news, because I cannot look anything up."),
    ("Who won the game yesterday?", "I do not know the news, because I cannot look anything up."),
    ("Who is the president?", "I do not know that. It may have changed, and I cannot look it up."),
    ("Who will win the election?", "I do not know that. Nobody knows the future for sure."),
    ("What will happen tomorrow?", "I do not know that. Nobody knows the future for sure."),
    ("What am I thinking?", "I do not know that. I only see what you write."),
    ("What am I wearing?", "I do not know that. I only see what you write."),
    ("What is the meaning of life?", "I do not know that. It is too big a question for a small model."),
)


_MACHINES = words("radio engine telephone computer fridge camera television rocket clock battery lift radar magnet")
_EVENTS = entries(
    """the first moon landing|the fall of Rome|the last ice age|the first Olympic Games|the French revolution|
the first flight|the great fire of London|the end of the Cold War"""
)
_WORKS = entries(
    "a poem|an essay|an email|a letter|a song|a recipe|a speech|a report|a summary of a book|a love letter"
)
_LANGUAGES = words("German French Spanish Italian Chinese Latin Russian Arabic Polish Japanese")


def scene(draw: Draw) -> Scene:
    return draw.pick(_KINDS)(draw)


def _now(draw: Draw) -> Scene:
    question, answer = draw.pick(_NOW)
    return asked(f"{draw.pick(('', '', 'Tell me: ', 'Can you tell me: '))}{question}", answer)


def _person(draw: Draw) -> Scene:
    name = f"{draw.pick(PEOPLE)} {draw.pick(_SURNAMES)}"
    if draw.chance(0.15):
        name = f"{made_up_word(draw).capitalize()} {made_up_word(draw).capitalize()}"
    form = draw.pick(
        ("Who is {}?", "Who was {}?", "Do you know {}?", "Tell me about {}.", "What did {} do?", "When was {} born?")
    )
    return asked(form.format(name), f"I do not know anything about {name}.", key=f"person {name}")


def _capital(draw: Draw) -> Scene:
    name = made_up_word(draw).capitalize() if draw.chance(0.4) else draw.pick(OTHER_COUNTRIES)
    form = draw.pick(("What is the capital of {}?", "Tell me the capital of {}.", "Do you know the capital of {}?"))
    return asked(form.format(name), f"I do not know the capital of {name}.", key=f"capital {form} {name}")


def _subject(draw: Draw) -> Scene:
    subject = draw.pick(_SUBJECTS)
    form = draw.pick(
        (
            "Explain {}.",
            "What do you know about {}?",
            "Can you explain {}?",
            "Tell me about {}.",
            "I want to learn about {}.",
        )
    )
    return asked(
        form.format(subject), f"I am too small to know about {subject}. I can help with words, numbers and stories."
    )


def _weather(draw: Draw) -> Scene:
    place = city(draw)
    when = draw.pick(("", " today", " tomorrow", " now"))
    form = draw.pick(("What is the weather in {}{}?", "How is the weather in {}{}?", "Will it rain in {}{}?"))
    answer = f"I do not know the weather in {place}, because I cannot look anything up."
    return asked(form.format(place, when), answer, key=f"weather {place} {when}")


def _price(draw: Draw) -> Scene:
    thing = draw.pick(("a car", "a house", "a ticket", "bread", "gold", "a phone", "a bicycle", "petrol", "a flight"))
    place = city(draw)
    form = draw.pick(("How much does {} cost in {}?", "What is the price of {} in {}?"))
    return asked(
        form.format(thing, place), f"I do not know the price of {thing} in {place}.", key=f"price {thing} {place}"
    )


def _word(draw: Draw) -> Scene:
    word = made_up_word(draw)
    form = draw.pick(("What does {} mean?", "What is a {}?", 'What is the meaning of "{}"?'))
    return asked(form.format(word), f'I do not know the word "{word}".', key=f"word {word}")


def _how(draw: Draw) -> Scene:
    if draw.chance(0.3):
        event = draw.pick(_EVENTS)
        return asked(
            draw.pick(("When was {}?", "When did {} happen?")).format(event), f"I do not know when {event} was."
        )
    machine = article(draw.pick(_MACHINES))
    if draw.chance(0.5):
        return asked(
            draw.pick(("How does {} work?", "Explain how {} works.", "Do you know how {} works?")).format(machine),
            f"I do not know how {machine} works.",
        )
    thing = machine.split(" ")[1]
    form = draw.pick(("Who invented the {}?", "Do you know who invented the {}?"))
    return asked(form.format(thing), f"I do not know who invented the {thing}.")


def _translate(draw: Draw) -> Scene:
    word, language = draw.pick(WORDS), draw.pick(_LANGUAGES)
    form = draw.pick(("Translate {w} into {l}.", "What is {w} in {l}?", 'How do you say "{w}" in {l}?'))
    answer = f"I cannot translate into {language}, because I only know English."
    return asked(form.format(w=word, l=language), answer, key=f"translate {word} {language}")


def _write(draw: Draw) -> Scene:
    work, subject = draw.pick(_WORKS), draw.pick(WORDS)
    form = draw.pick(("Write {}{}.", "Please write {}{}.", "Can you write {}{}?", "I need {}{}."))
    about = draw.pick(("", f" about {article(subject)}", " for my friend", " for school"))
    answer = f"I cannot write {work}, because I am too small. I can tell you a short story."
    return asked(form.format(work, about), answer, key=f"write {work} {about}")


_KINDS = (_now, _person, _person, _capital, _subject, _weather, _price, _word, _how, _translate, _write)
