"""Short stories from a grammar whose people, places, things and feelings stay consistent, and questions about them."""

from dataclasses import dataclass

from redline.datasets.conversations.draw import Draw
from redline.datasets.conversations.names import BOYS, GIRLS, people, person
from redline.datasets.conversations.scene import Scene, Turn
from redline.datasets.conversations.table_text import entries
from redline.datasets.conversations.words import article

_PLACES = entries("""
forest|garden|market|park|village|castle|school|library|beach|mountain hut|old house|harbour|farm|station|
bakery|museum""")
_THINGS = entries("key|ring|letter|map|lamp|coin|book|box|feather|bell|bottle|mirror|kite|drum|shell|clock")
_LOOKS = entries("small|big|red|blue|green|golden|silver|old|strange|shiny|broken|heavy")
_ROLES = entries("""
baker|teacher|farmer|girl|boy|sailor|painter|king|queen|gardener|cat|dog|fox|owl|mouse|rabbit|bear|
wizard""")
_ANIMALS = ("cat", "dog", "fox", "owl", "mouse", "rabbit", "bear")
_FEMALE, _MALE = ("girl", "queen"), ("boy", "king", "wizard")
_TIMES = ("One morning", "One day", "One evening", "One winter day", "Last summer", "On a rainy day")
_LOST = ("it was lost", "somebody had lost it", "nobody knew whose it was")
_ENDS = (
    ("happy", "They became friends.", "They became friends"),
    ("happy", "They had a big party together.", "They had a big party"),
    ("proud", "Everybody in the {place} talked about it.", "Everybody talked about it"),
    ("glad", "They shared a cake and laughed.", "They shared a cake"),
    ("surprised", "From then on they met every day.", "From then on they met every day"),
)
_WISHES = (
    "Tell me a story.",
    "Tell me a short story.",
    "Can you tell me a story?",
    "Please write a short story.",
    "I would like to hear a story.",
    "Write a story for children.",
)


@dataclass(frozen=True, slots=True)
class Story:
    hero: str
    role: str
    friend: str
    place: str
    look: str
    thing: str
    time: str
    lost: str
    feeling: str
    end: str

    @property
    def pronoun(self) -> str:
        if self.role in _FEMALE:
            return "she"
        return "he" if self.role in _MALE else "it" if self.role in _ANIMALS else "she" if self.hero in GIRLS else "he"

    @property
    def text(self) -> str:
        """Returns the story in six sentences."""
        he = self.pronoun
        found = article(f"{self.look} {self.thing}")
        return (
            f"There was once {article(self.role)} named {self.hero}. {self.time}, {self.hero} went to the {self.place} "
            f"and found {found}. {he.capitalize()} did not know what to do, because {self.lost}. "
            f'Then {he} met {self.friend}, who said: "That is my {self.thing}!" '
            f"{self.hero} gave it back, and {self.friend} was very {self.feeling}. "
            f"{self.end.format(place=self.place)}"
        )

    @property
    def summary(self) -> str:
        found = article(f"{self.look} {self.thing}")
        return f"{self.hero} found {found} in the {self.place} and gave it back to {self.friend}."


def make_story(draw: Draw, hero: str = "", role: str = "", thing: str = "", place: str = "") -> Story:
    role = role or draw.pick(_ROLES)
    if not hero:
        hero = draw.pick(GIRLS if role in _FEMALE else BOYS) if role in (*_FEMALE, *_MALE) else person(draw)
    friend = next(name for name in people(draw, 2) if name != hero)
    feeling, end, _ = draw.pick(_ENDS)
    place, thing = place or draw.pick(_PLACES), thing or draw.pick(_THINGS)
    return Story(hero, role, friend, place, draw.pick(_LOOKS), thing, draw.pick(_TIMES), draw.pick(_LOST), feeling, end)


def scene(draw: Draw) -> Scene:
    wish, story = _wish(draw)
    turns = [Turn(wish, story.text, exact=False)]
    questions = draw.shuffled(_questions(draw, story))
    count = draw.whole(0, 4)
    key = f"story {story.hero} {story.place} {story.look} {story.thing}"
    if draw.chance(0.25):
        # Here the user tells the story and asks about it, instead of requesting one.
        first, *others = questions
        turns = [Turn(f"{story.text} {first.user}", first.answer, first.short), *others[:count]]
        return Scene(tuple(turns), (key,))
    later = tuple(questions[count : count + 1]) if draw.chance(0.3) else ()
    return Scene((*turns, *questions[:count]), (key,), later)


def _wish(draw: Draw) -> tuple[str, Story]:
    """Returns a request for a story, which may name its hero, thing or place, and the story."""
    kind = draw.whole(0, 4)
    if kind == 0:
        role = draw.pick(_ROLES)
        form = draw.pick(
            ("Tell me a story about {}.", "Tell me a short story about {}.", "Do you know a story about {}?")
        )
        return form.format(article(role)), make_story(draw, role=role)
    if kind == 1:
        role = draw.pick(_ROLES)
        hero = draw.pick(GIRLS if role in _FEMALE else BOYS) if role in (*_FEMALE, *_MALE) else person(draw)
        form = draw.pick(("Tell me a story about {} named {}.", "Write a short story about {} called {}."))
        return form.format(article(role), hero), make_story(draw, hero=hero, role=role)
    if kind == 2:
        thing = draw.pick(_THINGS)
        form = draw.pick(("Tell me a story with {} in it.", "Write a story in which somebody finds {}."))
        return form.format(article(thing)), make_story(draw, thing=thing)
    if kind == 3:
        place = draw.pick(_PLACES)
        form = draw.pick(("Tell me a story that happens in {}.", "Write a short story set in {}."))
        return form.format(article(place)), make_story(draw, place=place)
    return draw.pick(_WISHES), make_story(draw)


def _questions(draw: Draw, story: Story) -> list[Turn]:
    hero, thing, he = story.hero, story.thing, story.pronoun
    # How the questions refer to the hero: by name, or by role, such as "the baker".
    they = draw.pick((hero, hero, f"the {story.role}"))
    found = article(f"{story.look} {thing}")
    what = draw.pick((f"What did {they} find?", "What was found in the story?"))
    who = draw.pick(("Who is the story about?", "Who is the hero of the story?", "What is the name of the hero?"))
    short = draw.pick(
        ("Make it shorter.", "Can you summarize the story?", "Sum it up in one sentence.", "Shorter, please.")
    )
    feels = draw.pick((f"How did {story.friend} feel?", f"How did {story.friend} feel in the end?"))
    return [
        Turn(what, f"{hero} found {found}.", thing),
        Turn(who, f"The story is about {hero}, {article(story.role)}.", hero),
        Turn(
            draw.pick((f"Where did {they} go?", "Where does the story happen?")),
            f"{hero} went to the {story.place}.",
            story.place,
        ),
        Turn(f"Who did {they} meet?", f"{hero} met {story.friend}.", story.friend),
        Turn(f"Who owned the {thing}?", f"The {thing} belonged to {story.friend}.", story.friend),
        Turn(feels, f"{story.friend} was very {story.feeling}.", story.feeling),
        Turn(short, story.summary),
        Turn(f"What did the {thing} look like?", f"The {thing} was {story.look}.", story.look),
        Turn(f"Did {they} keep the {thing}?", f"No, {he} gave it back to {story.friend}.", "No"),
        Turn(draw.pick(("Go on.", "Continue the story.", "What happened next?")), _continuation(story)),
    ]


def _continuation(story: Story) -> str:
    hero, friend = story.hero, story.friend
    looked = f"they looked at the {story.thing} together"
    return f"The next day {hero} visited {friend}, and {looked}. {friend} thanked {hero} again."
