"""A small table of well-known facts."""

from redline.datasets.conversations.table_text import lines, words

# Country: capital, continent, language.
COUNTRIES = {
    name: tuple(rest)
    for name, *rest in (
        line.strip().split(", ")
        for line in lines("""France, Paris, Europe, French
Germany, Berlin, Europe, German
Italy, Rome, Europe, Italian
Spain, Madrid, Europe, Spanish
Portugal, Lisbon, Europe, Portuguese
England, London, Europe, English
Ireland, Dublin, Europe, English
Austria, Vienna, Europe, German
Poland, Warsaw, Europe, Polish
Greece, Athens, Europe, Greek
Sweden, Stockholm, Europe, Swedish
Norway, Oslo, Europe, Norwegian
Denmark, Copenhagen, Europe, Danish
Finland, Helsinki, Europe, Finnish
Hungary, Budapest, Europe, Hungarian
Romania, Bucharest, Europe, Romanian
Bulgaria, Sofia, Europe, Bulgarian
Croatia, Zagreb, Europe, Croatian
Ukraine, Kyiv, Europe, Ukrainian
Iceland, Reykjavik, Europe, Icelandic
Russia, Moscow, Europe, Russian
Japan, Tokyo, Asia, Japanese
China, Beijing, Asia, Chinese
Thailand, Bangkok, Asia, Thai
Vietnam, Hanoi, Asia, Vietnamese
Iran, Tehran, Asia, Persian
Mongolia, Ulaanbaatar, Asia, Mongolian
Egypt, Cairo, Africa, Arabic
Morocco, Rabat, Africa, Arabic
Ghana, Accra, Africa, English
Senegal, Dakar, Africa, French
Mexico, Mexico City, North America, Spanish
Cuba, Havana, North America, Spanish
Brazil, Brasilia, South America, Portuguese
Argentina, Buenos Aires, South America, Spanish
Chile, Santiago, South America, Spanish
Peru, Lima, South America, Spanish
Colombia, Bogota, South America, Spanish
Australia, Canberra, Oceania, English""")
    )
}
# Animal: sound as a verb, young, kind of animal, number of legs.
ANIMALS = {
    name: (sound, young, kind, int(legs))
    for name, sound, young, kind, legs in (
        line.split()
        for line in lines("""dog barks puppy mammal 4
cat meows kitten mammal 4
cow moos calf mammal 4
sheep bleats lamb mammal 4
horse neighs foal mammal 4
pig grunts piglet mammal 4
lion roars cub mammal 4
wolf howls pup mammal 4
mouse squeaks pup mammal 4
hen clucks chick bird 2
duck quacks duckling bird 2
goose honks gosling bird 2
owl hoots owlet bird 2
crow caws chick bird 2
frog croaks tadpole amphibian 4
snake hisses snakelet reptile 0
bee buzzes larva insect 6""")
    )
}
# Kind of animal: further animals, for which the table has neither a sound nor a young.
KINDS = {
    "mammal": ("elephant", "tiger", "bear", "monkey", "giraffe", "rabbit", "deer", "fox", "camel", "zebra"),
    "bird": ("eagle", "parrot", "penguin", "swan"),
    "fish": ("salmon", "trout", "shark"),
    "insect": ("ant", "butterfly", "beetle", "fly"),
    "reptile": ("lizard", "crocodile", "turtle"),
}
LEGS = {"mammal": 4, "bird": 2, "fish": 0, "insect": 6, "reptile": 4}
KIND_OF = {name: facts[2] for name, facts in ANIMALS.items()} | {
    name: kind for kind, names in KINDS.items() for name in names
}
LEGS_OF = {name: ANIMALS[name][3] if name in ANIMALS else LEGS[kind] for name, kind in KIND_OF.items()}
# Thing: its colour.
COLOURS_OF = {
    "snow": "white",
    "milk": "white",
    "grass": "green",
    "a cucumber": "green",
    "a banana": "yellow",
    "a lemon": "yellow",
    "the sun": "yellow",
    "blood": "red",
    "a tomato": "red",
    "a strawberry": "red",
    "a carrot": "orange",
    "a pumpkin": "orange",
    "the sky on a clear day": "blue",
    "coal": "black",
    "a raven": "black",
    "chocolate": "brown",
    "an elephant": "grey",
    "a flamingo": "pink",
    "a plum": "purple",
}
MIXED = {
    ("red", "blue"): "purple",
    ("red", "yellow"): "orange",
    ("blue", "yellow"): "green",
    ("red", "white"): "pink",
    ("black", "white"): "grey",
    ("red", "green"): "brown",
}
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
SEASONS = ("winter", "winter", "spring", "spring", "spring", "summer", "summer", "summer", *("autumn",) * 3, "winter")
SIDES = {"triangle": 3, "square": 4, "rectangle": 4, "pentagon": 5, "hexagon": 6, "octagon": 8}
# Thing: the material that it is made of.
MADE_OF = {
    "a window": "glass",
    "a bottle of wine": "glass",
    "a book": "paper",
    "a newspaper": "paper",
    "a nail": "iron",
    "a table": "wood",
    "a chair": "wood",
    "a T-shirt": "cotton",
    "a sweater": "wool",
    "a coin": "metal",
    "a candle": "wax",
    "a tyre": "rubber",
    "a brick": "clay",
    "a shoe": "leather",
    "bread": "flour",
    "cheese": "milk",
    "butter": "milk",
    "wine": "grapes",
    "ice": "frozen water",
}
# Job: its work, which completes a sentence such as "A baker …". USES below is thing: its use, which completes a
# sentence such as "You use a pen to …".
JOBS = {
    "baker": "bakes bread",
    "teacher": "teaches children",
    "doctor": "helps people who are ill",
    "pilot": "flies planes",
    "farmer": "grows food",
    "painter": "paints pictures",
    "cook": "prepares meals",
    "gardener": "looks after gardens",
    "driver": "drives cars or buses",
    "singer": "sings songs",
    "writer": "writes books",
    "firefighter": "puts out fires",
    "sailor": "works on ships",
    "tailor": "makes clothes",
    "astronaut": "travels to space",
}
USES = {
    "a pen": "write",
    "a knife": "cut things",
    "a broom": "sweep the floor",
    "a key": "open a lock",
    "a hammer": "drive in nails",
    "an umbrella": "stay dry in the rain",
    "a clock": "tell the time",
    "a bed": "sleep",
    "a cup": "drink",
    "a spoon": "eat soup",
    "a camera": "take photos",
    "a needle": "sew",
    "a phone": "call people",
    "a map": "find the way",
    "a ladder": "climb up",
    "soap": "wash your hands",
}
# Questions with one answer that fit no table: question, answer, short answer.
SINGLE = (
    ("How many days are in a week?", "A week has 7 days.", "7"),
    ("How many months are in a year?", "A year has 12 months.", "12"),
    ("How many hours are in a day?", "A day has 24 hours.", "24"),
    ("How many minutes are in an hour?", "An hour has 60 minutes.", "60"),
    ("How many seconds are in a minute?", "A minute has 60 seconds.", "60"),
    ("How many days are in a year?", "A year has 365 days, and a leap year has 366.", "365"),
    ("How many letters are in the alphabet?", "The English alphabet has 26 letters.", "26"),
    ("How many planets are there?", "There are 8 planets around the sun.", "8"),
    ("Which is the largest planet?", "Jupiter is the largest planet.", "Jupiter"),
    ("Which planet do we live on?", "We live on Earth.", "Earth"),
    ("What is the largest animal?", "The blue whale is the largest animal.", "whale"),
    ("What is the tallest animal?", "The giraffe is the tallest animal.", "giraffe"),
    ("What is the fastest land animal?", "The cheetah is the fastest land animal.", "cheetah"),
    ("What is the largest ocean?", "The Pacific is the largest ocean.", "Pacific"),
    ("What is the highest mountain?", "Mount Everest is the highest mountain.", "Everest"),
    ("What do bees make?", "Bees make honey.", "honey"),
    ("What do cows give us?", "Cows give us milk.", "milk"),
    ("What do plants need to grow?", "Plants need water, light and air.", ""),
    ("At what temperature does water boil?", "Water boils at 100 degrees Celsius.", "100"),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius.", "0"),
    ("What is frozen water called?", "Frozen water is called ice.", "ice"),
    ("Is the sun a star?", "Yes, the sun is a star.", "Yes"),
    ("Is the moon a planet?", "No, the moon goes around the Earth, so it is not a planet.", "No"),
    ("Can fish fly?", "Most fish cannot fly. They swim.", "No"),
    ("Can penguins fly?", "No, penguins are birds that cannot fly, but they swim well.", "No"),
    ("How many legs does a spider have?", "A spider has 8 legs.", "8"),
    ("Where does the sun rise?", "The sun rises in the east.", "east"),
    ("Where does the sun set?", "The sun sets in the west.", "west"),
    ("What are the four seasons?", "The four seasons are spring, summer, autumn and winter.", ""),
    ("What are the primary colours?", "The primary colours are red, yellow and blue.", ""),
)
# Real countries that are not in COUNTRIES, so the model answers that it does not know their capitals.
OTHER_COUNTRIES = words("""
Canada India Turkey Kenya Nigeria Bolivia Ecuador Latvia Estonia Malta Nepal Laos Samoa Fiji Jordan
Yemen Angola Zambia Malawi Serbia""")
