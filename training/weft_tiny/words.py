"""Lists of words, and makers of invented ones."""

from __future__ import annotations

import random

from training.weft_tiny.grammar import Pool, is_held


def _list(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.replace("\n", " ").split(",") if word.strip())


_ONSETS = _list(
    "b, br, bl, c, ch, cr, d, dr, f, fl, fr, g, gr, gl, h, j, k, kl, kr, l, m, n, p, pl, pr, qu, r, s, sh, sk, sl, sp,"
    "st, str, t, th, tr, v, w, wh, y, z"
)
_VOWELS = _list("a, e, i, o, u, a, e, i, o, u, a, e, i, o, u, ai, au, ea, ee, ia, ie, oa, oo, ou, y")
_CODAS = (*("",) * 12, *_list("b, ck, d, f, g, l, ll, m, n, n, n, nd, ng, nk, nt, p, r, r, rd, rk, rn, s, sh, ss, st"),
          *_list("t, th, v, x, z"))  # fmt: skip


def spliced(rng: random.Random) -> str:
    """The start of one trained word and the end of another, which gives the letter groups that real words have."""
    first, last = rng.choice(_PARTS), rng.choice(_PARTS)
    word = first[: rng.randint(1, max(1, len(first) - 1))] + last[-rng.randint(2, max(2, len(last) - 1)) :]
    return word[:7]


def syllables(rng: random.Random, low: int = 1, high: int = 3) -> str:
    """An invented lower-case word."""
    if rng.random() < 0.45:
        return spliced(rng)
    word = ""
    for index in range(min(rng.randint(low, high), rng.randint(low, high))):
        onset = "" if index == 0 and rng.random() < 0.12 else rng.choice(_ONSETS)
        word += onset + rng.choice(_VOWELS) + rng.choice(_CODAS)
    if len(word) > 7:
        return syllables(rng, low, high)
    return word if len(word) > 2 else word + rng.choice(_ONSETS) + "o"


def invented_name(rng: random.Random) -> str:
    """An invented capitalised name."""
    return syllables(rng, 1, 3).capitalize()


def invented_noun(rng: random.Random) -> str:
    """An invented common noun, sometimes of two parts."""
    return syllables(rng, 1, 2)


def code(rng: random.Random) -> str:
    """A code such as ``BX-17``, ``a4f9``, ``7731-K`` or ``zado_12``."""
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 3)))
    shape = rng.randrange(7)
    if shape == 0:
        return f"{letters}-{digits}"
    if shape == 1:
        return letters + digits
    if shape == 2:
        return f"{digits}-{letters}"
    if shape == 3:
        return "".join(rng.choice("abcdef0123456789") for _ in range(rng.randint(3, 5)))
    if shape == 4:
        return f"{syllables(rng, 1, 2)}{rng.choice('-_')}{digits}"
    if shape == 5:
        return f"#{digits}"
    return f"{letters}{digits}{rng.choice('ABCXYZ')}"


def identifier(rng: random.Random) -> str:
    """An invented key such as ``zado``, ``blim_rate`` or ``kelo-port``."""
    word = syllables(rng, 1, 2)
    if rng.random() < 0.5:
        return word
    return word + rng.choice("_-.") + rng.choice(KEY_PARTS)


KEY_PARTS = _list("rate, port, size, limit, code, owner, level, id, name, color, mode, path, count, key, total, user")

FIRST_NAMES = _list("""
Ada, Adam, Aisha, Alan, Alice, Amir, Amy, Ana, Anna, Ben, Bob, Bruno, Carla, Carlos, Chen, Clara, Dan, Dana, David,
Diego, Dina, Elena, Eli, Ella, Emil, Emma, Erik, Eva, Farah, Felix, Finn, Frank, Gita, Grace, Hana, Hans, Hugo, Ida,
Igor, Ines, Iris, Ivan, Jack, James, Jan, Jane, Jin, Joan, Joe, John, Jonas, Julia, Kai, Kate, Ken, Kim, Lars, Laura,
Lea, Leo, Lily, Lina, Luca, Lucy, Maria, Mark, Marta, Mary, Max, Maya, Mei, Mia, Mika, Mila, Milo, Mira, Mona, Nadia,
Nina, Noah, Nora, Olga, Oli, Omar, Oscar, Otto, Paul, Petra, Pia, Priya, Quinn, Rana, Rosa, Ravi, Ruth, Sam, Sara,
Sofia, Stella, Tara, Theo, Tim, Tom, Tina, Uma, Vera, Victor, Wanda, Will, Yara, Yuki, Yusuf, Zara, Zoe
""")
PLACES = _list("""
Berlin, Paris, London, Rome, Madrid, Lisbon, Vienna, Oslo, Cairo, Tokyo, Delhi, Lima, Boston, Chicago, Dublin, Geneva,
Hamburg, Helsinki, Istanbul, Kyoto, Lyon, Milan, Munich, Nairobi, Naples, Osaka, Prague, Quito, Riga, Seoul, Sydney,
Toronto, Turin, Utrecht, Venice, Warsaw, Zurich, Athens, Bergen, Bristol, Denver, Dakar, Hanoi, Havana, Jakarta, Kiel,
Leeds, Lagos, Malmo, Miami, Nice, Porto, Perth, Seattle, Sofia, Tunis, Austin, Bath, Basel, Cork, Ghent, Graz
""")
JOBS = _list("""
baker, teacher, doctor, nurse, pilot, farmer, painter, writer, singer, engineer, lawyer, gardener, driver, cook, judge,
tailor, plumber, dentist, carpenter, librarian, musician, dancer, actor, chemist, sailor, waiter, barber, butcher,
florist, mechanic, fisher, guard, potter, weaver, miner, editor, surgeon, designer, translator, photographer
""")
FOODS = _list("""
soup, pizza, rice, bread, cheese, pasta, salad, curry, noodles, pancakes, apples, pears, plums, grapes, figs, honey,
beans, olives, fish, cake, pie, eggs, tomatoes, onions, carrots, cherries, dates, peaches, lemons, berries, mushrooms,
dumplings, porridge, waffles, melons, walnuts
""")
HOBBIES = _list("""
chess, tennis, painting, running, swimming, cycling, reading, hiking, dancing, fishing, knitting, cooking, climbing,
sailing, skiing, singing, gardening, drawing, rowing, surfing, pottery, archery, photography, origami, juggling, yoga
""")
OBJECTS = _list("""
lamp, chair, table, clock, mirror, basket, bottle, bucket, kettle, ladder, hammer, rope, candle, blanket, pillow, box,
bag, cup, plate, bowl, spoon, knife, book, pen, pencil, notebook, map, compass, key, coin, ring, bell, drum, flute,
guitar, violin, piano, kite, ball, doll, boat, bicycle, wagon, wheel, tent, umbrella, hat, coat, scarf, boot, glove,
camera, radio, phone, laptop, keyboard, monitor, printer, cable, battery, shovel, broom, brush, vase, feather, stone,
shell, lantern, telescope, whistle, button, ribbon, puzzle, marble, statue, rug, stool, bench, shelf, jar
""")
ANIMALS = _list("""
cat, dog, horse, rabbit, parrot, turtle, goat, sheep, duck, goose, fox, owl, hamster, pony, lizard, frog, mouse, crow,
donkey, otter, hedgehog, canary, ferret, snail, crab, swan
""")
PRODUCE = _list("""
apple, pear, plum, fig, lemon, peach, melon, mango, grape, cherry, banana, orange, onion, carrot, potato, tomato, bread,
cheese, butter, milk, rice, tea, coffee, sugar, salt, honey, soap, candle, pen, book, cup, hat, lamp, chair, bag, ball
""")
COLORS = _list("red, blue, green, yellow, black, white, brown, orange, purple, pink, gray, gold, silver")
MATERIALS = _list("wood, steel, glass, stone, paper, cotton, silk, wool, leather, plastic, copper, clay, rubber")
DAYS = _list("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTHS = _list("January, February, March, April, May, June, July, August, September, October, November, December")
LANGUAGES = _list("French, German, Spanish, Italian, Dutch, Polish, Greek, Turkish, Arabic, Hindi, Korean, Japanese")
EVENTS = _list("""
concert, meeting, party, lecture, wedding, dinner, picnic, market, parade, workshop, race, festival, exhibition, class,
play, tour, fair, seminar, match, tournament, ceremony, reunion, rehearsal, auction
""")
CURRENCIES = _list("dollars, euros, pounds, yen, francs, crowns, pesos, rupees")
WEATHER = _list("sunny, cloudy, rainy, windy, snowy, foggy, stormy, clear")
ATTRIBUTES = _list("""
code, password, badge, locker, desk, team, seat, tag, room, ticket, nickname, mark, symbol, station, group, level,
rank, score, label, locker code, parking spot, table, gate, platform, license, account, pin, extension, slot, title
""")

# Words whose parts go into invented words, besides the trained words of the lists.
MIXED = _list("""
about, account, across, address, afternoon, against, airport, almost, always, amount, ancient, angle, answer, appear,
april, area, article, author, autumn, balance, band, bank, basic, beautiful, because, bedroom, before, begin, believe,
between, bicker, bishop, bottom, branch, breeze, bridge, bright, broken, brother, building, business, butterfly,
cabinet, calendar, capital, captain, cardinal, castle, center, century, certain, chance, change, chapter, charge,
chimney, choice, church, circle, citizen, classic, clever, climate, closet, cloudy, cobble, collect, column, common,
compare, complete, concert, copper, corner, cottage, country, courage, cousin, crystal, culture, curtain, custom,
cyclone, daily, danger, daughter, decade, degree, delight, desert, detail, dialog, diamond, dinner, direct, distant,
doctor, dollar, double, dragon, dream, eager, earth, eastern, echo, effort, eight, either, electric, elegant, elephant,
empire, empty, energy, engine, enough, entire, equal, escape, evening, exact, example, expert, extra, fabric, factory,
family, famous, father, feather, fellow, fever, figure, final, finger, flower, foreign, forest, forward, freedom,
friend, frozen, future, gallery, general, gentle, giant, ginger, global, golden, grammar, granite, gravity, ground,
habit, hammock, happen, harbor, harvest, health, heaven, hidden, history, hollow, honest, horizon, hotel, hundred,
husband, image, inch, indigo, insect, inside, instead, island, ivory, jacket, jewel, journey, jungle, justice, kernel,
kingdom, kitten, knowledge, ladder, language, laughter, leather, legend, lemonade, letter, liberty, listen, little,
lobster, lonely, lumber, machine, magic, manner, marble, margin, master, matter, meadow, medicine, memory, mercury,
message, middle, midnight, million, minute, miracle, mixture, modern, moment, monkey, morning, mother, motion, mountain,
museum, mystery, narrow, nation, native, nature, needle, neighbor, neither, nephew, noble, normal, northern, notice,
object, ocean, office, opinion, orbit, orchard, ordinary, origin, outside, oxygen, oyster, package, palace, panther,
parent, pattern, peanut, people, pepper, perfect, person, pigeon, planet, pleasure, pocket, poetry, police, popular,
possible, powder, prairie, present, prince, private, problem, promise, proper, public, purple, quality, quarter,
question, quiet, rabbit, railway, rainbow, random, rather, reason, record, region, remember, repair, rescue, river,
rocket, rough, royal, rubber, saddle, salmon, sample, school, science, season, second, secret, sentence, seven, shadow,
shallow, shelter, signal, silence, silver, simple, sister, sketch, soldier, solid, southern, sparrow, special, spider,
spirit, square, stable, statement, steady, stomach, storm, straight, strange, stream, student, sudden, sugar, summer,
surface, surprise, sweater, symbol, system, talent, target, temple, tender, theater, thick, thousand, thread, thunder,
tiger, timber, tissue, token, tomorrow, tongue, tower, traffic, treasure, triangle, trouble, tunnel, twelve, twenty,
uncle, under, union, unit, universe, useful, valley, value, velvet, vessel, victory, village, violet, visit, voice,
volcano, voyage, wagon, water, wealth, weather, weekend, western, whisper, window, winter, wisdom, wonder, wooden,
yellow, yesterday, young, zebra, zigzag
""")
_PARTS = tuple(
    word.lower()
    for words in (FIRST_NAMES, PLACES, JOBS, FOODS, HOBBIES, OBJECTS, ANIMALS, PRODUCE, EVENTS, MIXED, MIXED)
    for word in words
    if len(word) > 2 and not is_held(word)
)

NAMES = Pool(FIRST_NAMES, invented_name, 0.6)
CITIES = Pool(PLACES, invented_name, 0.6)
THINGS = Pool(OBJECTS, invented_noun, 0.3)
WORK = Pool(JOBS, invented_noun, 0.2)
MEALS = Pool(FOODS, invented_noun, 0.2)
PASTIMES = Pool(HOBBIES, invented_noun, 0.2)
PETS = Pool(ANIMALS, invented_noun, 0.2)
GOODS = Pool(PRODUCE, invented_noun, 0.35)
HAPPENINGS = Pool(EVENTS, invented_noun, 0.2)
CODES = Pool((), code, 1.0)
KEYS = Pool((), identifier, 1.0)
NOUNS = Pool((), invented_noun, 1.0)
