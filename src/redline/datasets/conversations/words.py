"""Common words by kind, for spelling, sorting, lists and opposites."""

from redline.datasets.conversations.table_text import entries, words

ANIMALS = words("""
cat dog horse cow sheep goat pig lion tiger bear wolf fox rabbit mouse elephant giraffe monkey camel deer
duck hen goose eagle owl parrot penguin swan crow snake lizard turtle crocodile frog toad shark salmon trout bee ant
butterfly spider whale dolphin seal bat kangaroo zebra""")
FRUITS = words("apple banana orange pear grape lemon cherry peach plum mango melon kiwi strawberry blueberry pineapple")
VEGETABLES = words("carrot potato tomato onion pea bean cabbage lettuce spinach pumpkin cucumber garlic")
COLOURS = words("red blue green yellow orange purple black white brown pink grey")
TOOLS = words("hammer saw drill spade rake screwdriver axe knife ladder brush")
CLOTHES = words("shirt coat hat shoe sock glove scarf dress skirt jacket belt boot")
FURNITURE = words("table chair bed sofa desk shelf lamp cupboard bench stool")
VEHICLES = words("car bus train bicycle boat ship plane truck tram rocket")
INSTRUMENTS = words("piano guitar violin drum flute trumpet harp cello")
SPORTS = words("football tennis swimming running cycling basketball skiing hockey")
JOBS = words("teacher doctor baker farmer pilot nurse painter cook gardener driver singer writer")
KINDS = {
    "animals": ANIMALS,
    "fruits": FRUITS,
    "vegetables": VEGETABLES,
    "colours": COLOURS,
    "tools": TOOLS,
    "clothes": CLOTHES,
    "pieces of furniture": FURNITURE,
    "vehicles": VEHICLES,
    "musical instruments": INSTRUMENTS,
    "sports": SPORTS,
    "jobs": JOBS,
}
_MORE = words("""
house garden river mountain forest island bridge castle village window door kitchen school book letter paper
pencil music picture story winter summer spring autumn morning evening night water fire stone wood glass metal silver
gold sugar salt bread butter cheese milk coffee tea soup dinner friend family brother sister mother father child king
queen soldier doctor sun moon star cloud rain snow wind storm sea lake beach road street city market train station
ticket money pocket bottle cup plate spoon clock watch mirror candle basket blanket pillow button thread needle rope
wheel engine machine computer keyboard screen camera radio phone number question answer word language dream idea secret
promise gift party holiday journey flower tree leaf grass seed root branch feather wing tail nose mouth finger hand foot
shoulder heart brain happy sad quick slow bright dark heavy light strong weak young old early late clean dirty empty
full simple hard soft warm cold sweet bitter round square narrow wide deep short long quiet loud brave kind clever""")
# All words above, which the topics use for spelling, sorting, copying and similar questions.
WORDS = sorted({word for kind in KINDS.values() for word in kind} | set(_MORE))
_OPPOSITES = """hot cold|big small|tall short|fast slow|old young|happy sad|light dark|early late|full empty|hard soft|
strong weak|rich poor|open closed|clean dirty|wet dry|up down|left right|in out|day night|summer winter|good bad|
high low|long short|wide narrow|thick thin|heavy light|near far|loud quiet|sweet sour|true false|right wrong|
first last|top bottom|inside outside|begin end|buy sell|give take|push pull|win lose|love hate|laugh cry|north south|
east west|always never|more less|easy difficult|cheap expensive|safe dangerous|brave afraid|deep shallow"""
OPPOSITES: dict[str, str] = {}
for _pair in entries(_OPPOSITES):
    _one, _other = _pair.split()
    OPPOSITES.setdefault(_one, _other)
    OPPOSITES.setdefault(_other, _one)
_IRREGULAR = {
    "mouse": "mice",
    "child": "children",
    "foot": "feet",
    "tooth": "teeth",
    "goose": "geese",
    "man": "men",
    "woman": "women",
    "person": "people",
    "sheep": "sheep",
    "deer": "deer",
    "fish": "fish",
    "leaf": "leaves",
    "knife": "knives",
    "wolf": "wolves",
    "shelf": "shelves",
    "wife": "wives",
    "tomato": "tomatoes",
    "potato": "potatoes",
    "ox": "oxen",
    "spoon": "spoons",
}
_NOUNS = words("""
house river mountain forest island bridge castle window door book letter pencil picture story stone friend
brother sister king queen star cloud lake beach street city ticket bottle cup plate clock watch candle basket button
wheel engine machine computer number question answer word idea secret party journey flower tree branch feather wing
finger hand brush box bus glass dress fox church baby lady country family cherry strawberry key boy toy""")
_VOWELS = "aeiou"


def plural(noun: str) -> str:
    """Returns the plural of a noun; handles only the irregular nouns of these tables."""
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in _VOWELS:
        return noun[:-1] + "ies"
    return noun + "s"


PLURALS = {noun: plural(noun) for noun in sorted({*_IRREGULAR, *_NOUNS, *ANIMALS, *FRUITS, *TOOLS, *VEHICLES})}
# Verb: its past tense.
PAST = dict(
    pair.split()
    for pair in entries("""
go went|see saw|eat ate|drink drank|run ran|swim swam|sing sang|write wrote|speak spoke|take took|
give gave|come came|find found|buy bought|think thought|bring brought|sleep slept|fall fell|fly flew|know knew|
make made|say said|tell told|sit sat|stand stood|win won|lose lost|build built|send sent|break broke|walk walked|
play played|work worked|look looked|help helped|ask asked|open opened|close closed|jump jumped|cook cooked|
paint painted|clean cleaned|dance danced|laugh laughed|talk talked|watch watched""")
)


def article(noun: str) -> str:
    """Returns the noun with its indefinite article, such as "an apple"."""
    return f"{'an' if noun[0] in _VOWELS else 'a'} {noun}"


def listed(items: list[str]) -> str:
    """Returns the items joined as text, such as "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
