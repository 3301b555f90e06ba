"""Names of people, places and pets. Some are made up, so that a model learns to copy a name that it never saw."""

from redline.datasets.conversations.draw import Draw
from redline.datasets.conversations.table_text import words

GIRLS = words("""
Anna Maria Emma Julia Sofia Laura Clara Nina Eva Lena Sara Ella Mia Lily Grace Ruby Alice Rose Kate Jane Amy
Lucy Helen Diana Olga Vera Irene Paula Carla Elsa Ida Nora Zoe Leila Aisha Fatima Priya Mei Yuki Hana Chloe Marta Tina
Sandra Monica Linda Susan Karen Betty Nancy Donna Carol Ruth Sharon Megan Rachel Hannah Olivia Ava Isabel""")
BOYS = words("""
Ben Tom Max Paul Peter John David Mark Luke Leo Oscar Felix Hugo Jack Harry James George Henry Adam Alex Sam
Daniel Jonas Erik Lars Ivan Boris Pavel Marco Carlos Diego Pedro Juan Omar Ali Hassan Ravi Arjun Wei Ken Hiro Noah Liam
Owen Simon Martin Robert Frank Walter Karl Otto Victor Steve Brian Kevin Gary Scott Eric Ryan Jacob Ethan""")
PEOPLE = GIRLS + BOYS
CITIES = words("""
Berlin Paris London Madrid Rome Vienna Prague Warsaw Oslo Stockholm Helsinki Dublin Lisbon Athens Budapest
Boston Chicago Denver Seattle Toronto Sydney Tokyo Delhi Cairo Lima Hamburg Munich Milan Naples Porto Zurich Geneva
Lyon Leeds Bristol Glasgow Austin Dallas Miami Montreal""")
PETS = words("Bella Rocky Luna Charlie Coco Buddy Milo Daisy Simba Oreo Pepper Ginger Shadow Lucky Molly Teddy")
_STARTS = words("b br c d f g gr h j k kl l m n p r s st t tr v w z")
_MIDDLES = words("a e i o u ai ea oo")
_ENDS = words("n l r s t x m nd ck rt")
# The share of names that are made up.
_MADE_UP = 0.15


def made_up_word(draw: Draw) -> str:
    """Returns a word of two or three syllables that is in no dictionary, such as "grobel"."""
    syllables = [draw.pick(_STARTS) + draw.pick(_MIDDLES) for _ in range(draw.whole(1, 2))]
    return "".join([*syllables, draw.pick(_STARTS), draw.pick(_MIDDLES), draw.pick(_ENDS)])


def person(draw: Draw) -> str:
    return made_up_word(draw).capitalize() if draw.chance(_MADE_UP) else draw.pick(PEOPLE)


def people(draw: Draw, count: int) -> list[str]:
    """Returns `count` different names."""
    found: list[str] = []
    while len(found) < count:
        if (name := person(draw)) not in found:
            found.append(name)
    return found


def city(draw: Draw) -> str:
    return made_up_word(draw).capitalize() if draw.chance(_MADE_UP) else draw.pick(CITIES)


def pet(draw: Draw) -> str:
    return made_up_word(draw).capitalize() if draw.chance(_MADE_UP) else draw.pick(PETS)
