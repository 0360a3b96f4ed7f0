"""The relations that passages and records are made of: statements, questions and replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from training.weft_tiny import wordings, words
from training.weft_tiny.grammar import Draw, Phrases, Pool

Sample = Callable[[Draw], str | int]


@dataclass(frozen=True)
class Relation:
    """A kind of fact; ``keys`` are the names a JSON record may give it."""

    keys: tuple[str, ...]
    sample: Sample
    say: Phrases
    ask: Phrases
    reply: str


def drawn_from(pool: Pool) -> Sample:
    """Values of a list."""
    return lambda draw: draw.value(pool)


def within(low: int, high: int) -> Sample:
    """Numbers of a range."""
    return lambda draw: draw.number(low, high)


def one_of(options: tuple[str, ...]) -> Sample:
    """Values of a small closed list, which is not split."""
    return lambda draw: draw.pick(options)


def _widened(subject: str, relations: tuple[Relation, ...]) -> tuple[Relation, ...]:
    """The relations with their further wordings."""
    return tuple(
        replace(
            relation,
            say=relation.say.also(*wordings.SAY[subject, relation.keys[0]]),
            ask=relation.ask.also(*wordings.ASK[subject, relation.keys[0]]),
        )
        for relation in relations
    )


# fmt: off
PERSON = _widened("person", (
    Relation(
        ("city", "town", "home", "residence"),
        drawn_from(words.CITIES),
        Phrases(
            "{s} lives in {v}.", "{s} has a (flat|house|home|small flat) in {v}.",
            "{s} moved to {v} last (year|month).",
            "The home of {s} is in {v}.", "{s} comes from {v}.", "{s}, who lives in {v}, is very kind.",
            "For (two|three|many) years {s} has lived in {v}.", "{s} is from {v}.",
            "~{v} is where {s} lives.", "~{s} settled in {v} (long ago|years ago).",
        ),
        Phrases(
            "Where does {s} live?", "(Which|What) (city|town) does {s} live in?", "Where is {s} from?",
            "In (which|what) (city|town) is the home of {s}?", "Tell me where {s} lives.",
            "What is the (city|town) of {s}?", "Which place does {s} call home?",
            "~Where is {s}'s home?", "~Can you name the (town|city) where {s} lives?",
        ),
        "{s} lives in {v}.",
    ),
    Relation(
        ("age", "years"),
        within(5, 99),
        Phrases(
            "{s} is {v} years old.", "{s} is {v}.", "{s} turned {v} (this year|last week|in May).",
            "At {v}, {s} is still very active.", "The age of {s} is {v}.", "{s} is aged {v}.",
            "~{s} has just had a birthday and is now {v}.", "~{s}'s age is {v}.",
        ),
        Phrases(
            "How old is {s}?", "What is the age of {s}?", "What age is {s}?", "How many years old is {s}?",
            "Tell me how old {s} is.", "What is {s}'s age?", "~Do you know the age of {s}?",
            "~How old would you say {s} is?",
        ),
        "{s} is {v} years old.",
    ),
    Relation(
        ("job", "occupation", "profession", "work"),
        drawn_from(words.WORK),
        Phrases(
            "{s} works as a {v}.", "{s} is a {v}.", "{s} has a job as a {v}.", "{s} became a {v} (long ago|last year).",
            "The job of {s} is {v}.", "{s} earns a living as a {v}.", "Everyone knows {s} the {v}.",
            "~By profession, {s} is a {v}.", "~{s} trained for years to be a {v}.",
        ),
        Phrases(
            "What does {s} do for a living?", "What is the job of {s}?", "What is {s}'s (job|profession|occupation)?",
            "What (job|kind of work) does {s} have?", "What does {s} work as?", "What is {s} by trade?",
            "~How does {s} earn a living?", "~Tell me {s}'s job.",
        ),
        "{s} is a {v}.",
    ),
    Relation(
        ("food", "favorite_food", "meal"),
        drawn_from(words.MEALS),
        Phrases(
            "{s} likes to eat {v}.", "{s} loves {v}.", "The favorite food of {s} is {v}.", "{s} always orders {v}.",
            "For lunch {s} has {v}.", "{s} eats {v} (every day|all the time).",
            "Nothing tastes better to {s} than {v}.", "~When hungry, {s} wants {v}.", "~{s} cannot live without {v}.",
        ),
        Phrases(
            "What does {s} like to eat?", "What is the favorite food of {s}?", "Which food does {s} love?",
            "What food does {s} like?", "What is {s}'s favorite food?", "What does {s} (eat|order)?",
            "~Which dish is {s} fond of?", "~What would {s} want to eat?",
        ),
        "{s} likes to eat {v}.",
    ),
    Relation(
        ("hobby", "pastime", "interest"),
        drawn_from(words.PASTIMES),
        Phrases(
            "The hobby of {s} is {v}.", "{s} enjoys {v}.", "In the evening {s} goes for {v}.",
            "{s} is very good at {v}.",
            "On weekends {s} does some {v}.", "{s} spends free time on {v}.", "{s}'s hobby is {v}.",
            "~{v} is what {s} does for fun.", "~In spare hours, {s} practices {v}.",
        ),
        Phrases(
            "What is the hobby of {s}?", "What does {s} enjoy?", "What hobby does {s} have?", "What is {s}'s hobby?",
            "What does {s} do (on weekends|in free time|for fun)?", "What is {s} good at?",
            "~How does {s} spend spare time?", "~Which pastime does {s} have?",
        ),
        "The hobby of {s} is {v}.",
    ),
    Relation(
        ("pet", "animal"),
        drawn_from(words.PETS),
        Phrases(
            "{s} has a pet {v}.", "{s} keeps a {v}.", "{s} owns a {v}.", "The pet of {s} is a {v}.",
            "{s} walks home with a {v}.", "{s} found a {v} and kept it.", "At home {s} feeds a {v}.",
            "~A {v} lives with {s}.", "~{s} looks after a {v}.",
        ),
        Phrases(
            "What pet does {s} have?", "What animal does {s} (own|keep)?", "Which animal does {s} have?",
            "What is the pet of {s}?", "What kind of pet does {s} own?", "What is {s}'s pet?",
            "~What creature does {s} look after?", "~Which animal lives with {s}?",
        ),
        "{s} has a {v}.",
    ),
    Relation(
        ("friend", "best_friend", "partner"),
        drawn_from(words.NAMES),
        Phrases(
            "{s} is a friend of {v}.", "The best friend of {s} is {v}.", "{s} and a friend called {v} often talk.",
            "{s} plays with {v}.", "{s} has a friend named {v}.", "{s} met a friend, {v}.",
            "~{s} trusts a friend by the name of {v}.", "~{s}'s closest friend is {v}.",
        ),
        Phrases(
            "Who is the (best friend|friend) of {s}?", "Who is {s}'s (best friend|friend)?",
            "What is the name of {s}'s friend?", "Which friend does {s} have?", "What is {s}'s friend called?",
            "~Who does {s} have as a friend?", "~Name the friend of {s}.",
        ),
        "The friend of {s} is {v}.",
    ),
    Relation(
        ("phone", "phone_number", "number"),
        lambda draw: str(draw.number(1000, 99999)),
        Phrases(
            "The phone number of {s} is {v}.", "{s} can be called at {v}.", "Call {s} on {v}.", "{s}'s number is {v}.",
            "{s} has the number {v}.", "To reach {s}, dial {v}.", "~Phone {s} at {v}.", "~{s} answers calls to {v}.",
        ),
        Phrases(
            "What is the phone number of {s}?", "What is {s}'s (number|phone number)?", "Which number does {s} have?",
            "How can I call {s}?", "What number do I dial for {s}?", "~On which number can {s} be called?",
            "~I need to phone {s}. What is the number?",
        ),
        "The number of {s} is {v}.",
    ),
    Relation(
        ("color", "favorite_color"),
        one_of(words.COLORS),
        Phrases(
            "The favorite color of {s} is {v}.", "{s} likes the color {v}.", "{s} always wears {v}.",
            "{s} painted the door {v}.", "{s} has a {v} coat.", "{s} loves the color {v}.",
            "~Of all colors, {s} prefers {v}.", "~{s} dresses in {v}.",
        ),
        Phrases(
            "What is the favorite color of {s}?", "Which color does {s} like?", "What color does {s} (like|love|wear)?",
            "What is {s}'s (color|favorite color)?", "~Which color does {s} prefer?", "~Name the color of {s}.",
        ),
        "The color of {s} is {v}.",
    ),
))

ITEM = _widened("item", (
    Relation(
        ("price", "cost"),
        within(2, 999),
        Phrases(
            "The {s} costs {v} (dollars|euros).", "The price of the {s} is {v} (dollars|euros).",
            "You can buy the {s} for {v} (dollars|euros).", "The {s} is sold for {v} (dollars|euros).",
            "One pays {v} (dollars|euros) for the {s}.", "~The shop asks {v} (dollars|euros) for the {s}.",
            "~The {s} is priced at {v} (dollars|euros).",
        ),
        Phrases(
            "How much (is|does|for) the {s}?", "What is the price of the {s}?", "What does the {s} cost?",
            "How much does the {s} cost?", "How much must I pay for the {s}?", "~How expensive is the {s}?",
            "~At what price is the {s} sold?",
        ),
        "The {s} costs {v}.",
    ),
    Relation(
        ("weight", "mass"),
        within(2, 400),
        Phrases(
            "The {s} weighs {v} (grams|kilos).", "The weight of the {s} is {v} (grams|kilos).",
            "The {s} has a weight of {v} (grams|kilos).", "With {v} (grams|kilos), the {s} is easy to carry.",
            "~The scale shows {v} (grams|kilos) for the {s}.",
        ),
        Phrases(
            "How much does the {s} weigh?", "What is the weight of the {s}?", "How heavy is the {s}?",
            "~What weight does the {s} have?",
        ),
        "The {s} weighs {v}.",
    ),
    Relation(
        ("color", "shade"),
        one_of(words.COLORS),
        Phrases(
            "The {s} is {v}.", "The color of the {s} is {v}.", "The {s} was painted {v}.", "The {s} comes in {v}.",
            "The {s} has a nice {v} color.", "~Someone chose {v} as the color of the {s}.", "~The {s} shines in {v}.",
        ),
        Phrases(
            "What color is the {s}?", "What is the color of the {s}?", "Which color does the {s} have?",
            "~In what color does the {s} come?", "~Tell me the color of the {s}.",
        ),
        "The {s} is {v}.",
    ),
    Relation(
        ("material",),
        one_of(words.MATERIALS),
        Phrases(
            "The {s} is made of {v}.", "The {s} was made from {v}.", "The material of the {s} is {v}.",
            "They built the {s} out of {v}.", "~A craftsman made the {s} from {v}.", "~{v} was used for the {s}.",
        ),
        Phrases(
            "What is the {s} made of?", "What is the material of the {s}?", "Which material is the {s} made from?",
            "~What was used to make the {s}?", "~Of what material is the {s}?",
        ),
        "The {s} is made of {v}.",
    ),
    Relation(
        ("owner",),
        drawn_from(words.NAMES),
        Phrases(
            "The {s} belongs to {v}.", "The owner of the {s} is {v}.", "{v} owns the {s}.", "The {s} was given to {v}.",
            "{v} bought the {s}.", "~The {s} is the property of {v}.", "~{v} has the {s}.",
        ),
        Phrases(
            "Who owns the {s}?", "Who is the owner of the {s}?", "To whom does the {s} belong?", "Whose is the {s}?",
            "Who has the {s}?", "~Who does the {s} belong to?", "~Name the owner of the {s}.",
        ),
        "The {s} belongs to {v}.",
    ),
    Relation(
        ("location", "place", "room"),
        lambda draw: "the " + draw.pick(("kitchen", "garden", "cellar", "attic", "hall", "office", "garage", "barn",
        "library")),
        Phrases(
            "The {s} is in {v}.", "The {s} was left in {v}.", "You can find the {s} in {v}.",
            "Somebody put the {s} in {v}.",
            "The {s} stands in {v}.", "~One must look in {v} for the {s}.", "~The {s} was last seen in {v}.",
        ),
        Phrases(
            "Where is the {s}?", "In which room is the {s}?", "Where can I find the {s}?", "Where was the {s} left?",
            "~Where should I look for the {s}?", "~Which place holds the {s}?",
        ),
        "The {s} is in {v}.",
    ),
))

EVENT = _widened("event", (
    Relation(
        ("day", "weekday"),
        one_of(words.DAYS),
        Phrases(
            "The {s} is on {v}.", "The {s} will be held on {v}.", "The {s} takes place on {v}.",
            "On {v} there is the {s}.",
            "The {s} was moved to {v}.", "~Come on {v} for the {s}.", "~The {s} has been planned for {v}.",
        ),
        Phrases(
            "When is the {s}?", "On (which|what) day is the {s}?", "What day is the {s}?", "Which day is the {s} on?",
            "~On what day does the {s} take place?", "~When will the {s} be?",
        ),
        "The {s} is on {v}.",
    ),
    Relation(
        ("city", "place", "location", "venue"),
        drawn_from(words.CITIES),
        Phrases(
            "The {s} is in {v}.", "The {s} takes place in {v}.", "The {s} will be held in {v}.",
            "People come to {v} for the {s}.", "~{v} is the venue of the {s}.",
            "~They chose {v} as the place for the {s}.",
        ),
        Phrases(
            "Where is the {s}?", "Where does the {s} take place?", "In (which|what) (city|town) is the {s}?",
            "~In which place will the {s} be?", "~Where do they hold the {s}?",
        ),
        "The {s} is in {v}.",
    ),
    Relation(
        ("host", "organizer", "speaker"),
        drawn_from(words.NAMES),
        Phrases(
            "{v} hosts the {s}.", "The {s} is hosted by {v}.", "The host of the {s} is {v}.", "{v} runs the {s}.",
            "The {s} is run by {v}.", "~{v} is in charge of the {s}.", "~The {s} was set up by {v}.",
        ),
        Phrases(
            "Who hosts the {s}?", "Who is the host of the {s}?", "Who runs the {s}?", "By whom is the {s} hosted?",
            "~Who is in charge of the {s}?", "~Name the host of the {s}.",
        ),
        "The host of the {s} is {v}.",
    ),
    Relation(
        ("guests", "people", "visitors"),
        within(4, 900),
        Phrases(
            "There are {v} guests at the {s}.", "{v} people will come to the {s}.", "The {s} has {v} guests.",
            "The {s} is for {v} people.", "~They expect {v} people at the {s}.", "~As many as {v} guests join the {s}.",
        ),
        Phrases(
            "How many (people|guests) are at the {s}?", "How many (people|guests) come to the {s}?",
            "How many (people|guests) does the {s} have?", "~How many visitors are expected at the {s}?",
        ),
        "There are {v} guests at the {s}.",
    ),
))

# One sentence for several facts on one subject.
COMPOUNDS: dict[tuple[str, ...], Phrases] = {
    ("city", "age"): Phrases(
        "At {age}, {s} lives in {city}.", "Now {age}, {s} has a home in {city}.",
        "{city} is home to {s}, who is {age} years old.", "{s}, aged {age}, calls {city} home.",
        "{s} moved to {city} and is now {age}.", "{s}: {age} years, {city}.", "Name: {s}. Age: {age}. City: {city}.",
        "The {age}-year-old {s} lives in {city}.", "There is someone in {city} called {s}, {age} years old.",
        "{s} was born {age} years ago and lives in {city}.", "My name is {s}. I am {age} and I live in {city}.",
        "I am {s} from {city}, {age} years old.",
        "{s}, {age}, lives in {city}.", "{s} is {age} and lives in {city}.", "{s} from {city} is {age} years old.",
        "{s} (age {age}) lives in {city}.", "In {city} lives {s}, who is {age}.",
        "~{s}, aged {age}, has a home in {city}.",
    ),
    ("job", "city"): Phrases(
        "{s} lives in {city} and (works|earns a living) as a {job}.", "The people of {city} know {s} as a {job}.",
        "{s} moved to {city} to work as a {job}.", "{s}: {job}, {city}.", "{city} has a {job} called {s}.",
        "A {job} by trade, {s} lives in {city}.", "In {city} there is a {job} named {s}.",
        "Name: {s}. Job: {job}. City: {city}.", "I am {s}, I live in {city}, and my job is {job}.",
        "{s} found a job as a {job} and lives in {city}.", "If you need a {job} in {city}, call {s}.",
        "{s} is a {job} (from|in) {city}.", "{s} works as a {job} in {city}.", "{s}, a {job}, lives in {city}.",
        "In {city}, {s} works as a {job}.", "The {job} {s} comes from {city}.",
        "~{s} earns a living in {city} as a {job}.",
    ),
    ("age", "job"): Phrases(
        "At {age}, {s} works as a {job}.", "{s} (age {age}) is a {job}.", "{s}, {age}, works as a {job}.",
        "{s}: {job}, {age} years old.", "{s} became a {job} and is now {age}.", "The {age}-year-old {s} is a {job}.",
        "I am {s}, {age}, and I work as a {job}.", "Aged {age}, {s} is still a {job}.",
        "Name: {s}. Age: {age}. Job: {job}.",
        "{s} is a {age} year old {job}.", "{s}, a {job}, is {age} years old.", "{s} is {age} and works as a {job}.",
        "The {job} {s} is {age}.", "~At the age of {age}, {s} became a {job}.",
    ),
    ("age", "job", "city"): Phrases(
        "{s}, a {job} from {city}, is {age}.", "In {city} lives {s}, a {job} of {age} years.",
        "{s} lives in {city}, is {age} and has a job as a {job}.", "A {job} in {city}, {s} is {age} years old.",
        "{s}: {age}, {job}, {city}.", "Name: {s}\nAge: {age}\nJob: {job}\nCity: {city}.",
        "The {job} {s}, {age}, calls {city} home.", "At {age}, {s} lives in {city} and works as a {job}.",
        "{s} (age {age}, {job}) lives in {city}.", "Meet {s}: {age} years old, {job} by trade, at home in {city}.",
        "Hi, I am {s}, {age} years old. I work as a {job} in {city}.",
        "There is a {job} in {city} called {s}, who is {age}.",
        "My {age}-year-old neighbour {s} is a {job} in {city}.", "This is {s} from {city}. Job: {job}. Age: {age}.",
        "{s} is a {age}-year-old {job} from {city}.", "{s}, {age}, is a {job} (in|from) {city}.",
        "{s} is {age} years old, lives in {city} and works as a {job}.", "{s} ({age}) works in {city} as a {job}.",
        "My name is {s}, I am {age}, I live in {city} and I am a {job}.",
        "I am {s}, a {job} of {age} years from {city}.",
        "~Meet {s}: {age} years old, {job}, living in {city}.", "~The {job} from {city} is called {s} and is {age}.",
    ),
    ("city", "pet"): Phrases(
        "{s} has a {pet} and lives in {city}.", "At home in {city}, {s} has a pet {pet}.",
        "{s} of {city} owns a {pet}.", "The pet of {s}, who lives in {city}, is a {pet}.",
        "{s} moved to {city} with a {pet}.", "{s}: lives in {city}, has a {pet}.",
        "I am {s}, I live in {city}, and I have a {pet}.", "In a house in {city} live {s} and a {pet}.",
        "{s} lives in {city} with a {pet}.", "{s} and a {pet} live in {city}.", "In {city}, {s} keeps a {pet}.",
        "~A {pet} shares a flat in {city} with {s}.",
    ),
    ("food", "hobby"): Phrases(
        "{s}'s hobby is {hobby}, and {s}'s favorite food is {food}.", "After {hobby}, {s} eats {food}.",
        "{s} spends free time on {hobby} and likes to eat {food}.",
        "{s}: hobby {hobby}, favorite food {food}.",
        "For fun {s} does {hobby}; for dinner it has to be {food}.",
        "My name is {s}, my hobby is {hobby}, and I love to eat {food}.",
        "{s} likes {food} and {hobby}.", "{s} enjoys {hobby} and eats {food}.",
        "{s} loves {hobby} and a plate of {food}.", "~After some {hobby}, {s} has {food}.",
    ),
    ("friend", "city"): Phrases(
        "{s} from {city} is a friend of {friend}.", "{s}, who lives in {city}, has a friend called {friend}.",
        "In {city} lives {s}, a friend of {friend}.", "{friend} is the friend of {s}, and {s} lives in {city}.",
        "{s}: home in {city}, friend {friend}.", "I am {s} from {city}, and my best friend is {friend}.",
        "{s} has a friend named {friend} and lives in {city}.",
        "{s} lives in {city}, and the best friend of {s} is {friend}.",
        "~{s}'s friend is {friend}, and {s}'s home is {city}.",
    ),
    ("phone", "city"): Phrases(
        "{s} from {city} has the phone number {phone}.", "To reach {s} in {city}, dial {phone}.",
        "{s}, {city}, phone {phone}.", "The number of {s}, who lives in {city}, is {phone}.",
        "{s} lives in {city} and can be reached at {phone}.", "I am {s}, I live in {city}, and my number is {phone}.",
        "{s} lives in {city} and has the number {phone}.", "Call {s} in {city} on {phone}.",
        "~{s} in {city} answers at {phone}.",
    ),
    ("price", "color"): Phrases(
        "The {s} in {color} is {price} (dollars|euros).", "They sell the {s} in {color} for {price} (dollars|euros).",
        "A {color} {s} costs {price} (dollars|euros).",
        "The {s} comes in {color} and is sold for {price} (dollars|euros).",
        "Item: {s}, color: {color}, price: {price} (dollars|euros).",
        "You pay {price} (dollars|euros) for the {color} {s}.", "The {s}: {color}, {price} (dollars|euros).",
        "The {color} {s} costs {price} (dollars|euros).", "The {s} is {color} and costs {price} (dollars|euros).",
        "For {price} (dollars|euros) you get the {color} {s}.",
        "~A price of {price} (dollars|euros) is asked for the {s}, which is {color}.",
    ),
    ("color", "material"): Phrases(
        "The {s} is {color} {material}.", "They made the {s} of {material} and painted it {color}.",
        "The {s} comes in {color} and is made of {material}.", "The {s}: {color}, made of {material}.",
        "It is a {color} {s} made of {material}.", "The color of the {s} is {color}, its material is {material}.",
        "There is a {s} of {color} {material}.",
        "The {s} is made of {color} {material}.", "The {color} {s} is made of {material}.",
        "The {s} is {color} and made of {material}.", "~The {s}, built from {material}, is {color}.",
    ),
    ("price", "weight"): Phrases(
        "For {price} (dollars|euros) you get the {s}, which weighs {weight} (grams|kilos).",
        "The {s}: {weight} (grams|kilos), {price} (dollars|euros).",
        "With a weight of {weight} (grams|kilos), the {s} costs {price} (dollars|euros).",
        "The {s} weighs {weight} kilos and is sold for {price} (dollars|euros).",
        "The price of the {s} is {price} (dollars|euros), its weight is {weight} (grams|kilos).",
        "At {weight} (grams|kilos), the {s} sells for {price} (dollars|euros).",
        "The {s} weighs {weight} grams and costs {price} (dollars|euros).",
        "The {s} costs {price} dollars and weighs {weight} kilos.",
        "~At {weight} grams, the {s} is sold for {price} (dollars|euros).",
    ),
    ("owner", "location"): Phrases(
        "{owner} owns the {s} and keeps it in {location}.", "In {location} stands the {s} that belongs to {owner}.",
        "The {s}, which belongs to {owner}, is in {location}.", "The {s} of {owner} was left in {location}.",
        "The owner of the {s} is {owner}; its place is in {location}.",
        "You can find the {s} of {owner} in {location}.", "{owner} bought the {s} and put it in {location}.",
        "The {s} of {owner} is in {location}.", "{owner} keeps the {s} in {location}.",
        "The {s} belongs to {owner} and is in {location}.", "~In {location} is the {s} that {owner} owns.",
    ),
    ("price", "color", "material"): Phrases(
        "The {s} costs {price} (dollars|euros), is {color} and is made of {material}.",
        "For {price} (dollars|euros) you get a {color} {s} made of {material}.",
        "The {color} {s} is made of {material} and sold for {price} (dollars|euros).",
        "The {s}: {color}, {material}, {price} (dollars|euros).",
        "They ask {price} (dollars|euros) for the {s} of {color} {material}.",
        "Made of {material} and painted {color}, the {s} costs {price} (dollars|euros).",
        "The {s} is made of {color} {material} and costs {price} (dollars|euros).",
        "The {color} {material} {s} costs {price} (dollars|euros).",
        "~You pay {price} (dollars|euros) for the {s}, a {color} one of {material}.",
    ),
    ("day", "city"): Phrases(
        "There is a {s} in {city} on {day}.", "The {s} will be held in {city} on {day}.",
        "On {day} people go to {city} for the {s}.", "Next {day} the {s} comes to {city}.",
        "{city} has a {s} on {day}.", "The {s}: {day}, {city}.",
        "The {s} takes place on {day}, and {city} is the place.", "See you in {city} on {day} for the {s}.",
        "On {day}, in {city}, there is the {s}.",
        "The {s} is on {day} in {city}.", "On {day} the {s} takes place in {city}.", "The {s} in {city} is on {day}.",
        "Come to {city} on {day} for the {s}.", "~{city} has the {s} on {day}.",
    ),
    ("day", "city", "host"): Phrases(
        "{host} invites to the {s} in {city} on {day}.", "In {city}, {host} hosts the {s} on {day}.",
        "On {day} the {s} takes place in {city}, with {host} as host.",
        "The host of the {s} in {city} on {day} is {host}.", "The {s}: {day}, {city}, host {host}.",
        "The {s} is on {day}, it is in {city}, and {host} runs it.", "Come to {city} on {day}: {host} hosts the {s}.",
        "{city} welcomes the {s} of {host} on {day}.",
        "{host} hosts the {s} in {city} on {day}.", "The {s} on {day} in {city} is run by {host}.",
        "The {s}, hosted by {host}, is on {day} in {city}.",
        "On {day}, {host} runs the {s} in {city}.", "~{day} is the day of the {s} that {host} holds in {city}.",
    ),
    ("day", "guests"): Phrases(
        "There will be {guests} guests at the {s} on {day}.", "{guests} guests join the {s} on {day}.",
        "The {s} takes place on {day} with {guests} guests.", "The {s}: {day}, {guests} guests.",
        "On {day} the {s} is for {guests} people.", "For the {s} on {day}, {guests} people are invited.",
        "The {s} on {day} has {guests} guests.", "{guests} people come to the {s} on {day}.",
        "On {day}, {guests} guests join the {s}.", "~For the {s} on {day} they expect {guests} people.",
    ),
    ("host", "guests"): Phrases(
        "{host} runs the {s}, which has {guests} guests.", "{guests} guests come to the {s} of {host}.",
        "With {host} as host, the {s} has {guests} guests.", "{host} invited {guests} people to the {s}.",
        "The {s}: host {host}, {guests} guests.", "At the {s}, {host} is the host of {guests} guests.",
        "{host} hosts the {s} for {guests} people.", "The {s} of {host} has {guests} guests.",
        "~{guests} people were asked to the {s} by {host}.",
    ),
}
# fmt: on
