"""Texts that hide values in varied prose and ask for them: what the pair `retrieval-tiny` learned to answer.

A text begins with prose and needles; questions come at its end, each with its answer, which ends in a full stop:

    ... The price of amber-kettle is 48219. ...

    What is the price of amber-kettle?
    Answer:
    The price of amber-kettle is 48219.

All is drawn from a `random.Random`, so a seed fixes the texts.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from specprefill_jax.evals.ruler import wording


def _listed(text: str, separator: str | None = None) -> tuple[str, ...]:
    """The words of a text, or its parts between separators."""
    return tuple(" ".join(part.split()) for part in text.split(separator))


NOUNS = _listed(
    """
    anchor apple arrow attic axe badge bag ball banner barge barn barrel basin basket beacon bean bear bell bench
    berry blanket boat bolt bone book boot bottle bowl box branch brass bread brick bridge broom brush bucket button
    cabin cable cake camel candle canoe canvas cape card carpet cart castle cat cave cedar chain chair chalk cheese
    cherry chest chimney cider clay cliff cloak clock cloud clover coal coat coin comb compass copper cord cork corn
    cottage cotton crane crate cream crow crown cup curtain cushion daisy desk dish dome donkey door dove dragon
    drawer dress drum duck eagle ear egg elm engine falcon fan feather fence fern ferry fiddle field fig flag flask
    flint flour flute fog fork fountain fox frame frog garden gate ginger glass globe glove goat goose grain grape
    grass gravel hammer harbour harp hat hawk hay hedge helmet hen herring hill hive honey hook horn horse hut ink
    iron island ivory ivy jacket jar jewel jug kettle key kite knife knot lace ladder lake lamp lantern lark leaf
    leather lemon letter lever lily lime linen lion lizard loaf lock log loom magnet mango map maple marble mask
    mast meadow melon mill mint mirror mitten mole moon moss moth mountain mouse mule mustard nail needle nest net
    nut oak oar oats olive onion orange orchard otter oven owl paddle page paint pan paper parcel parrot peach pear
    pearl pebble pen pepper piano pie pigeon pillow pin pine pipe plate plough plum pocket pond pony poppy pot prism
    pump purse quilt rabbit radish raft rail rake raven razor reed ribbon rice ring river robe robin rock roof rope
    rose ruby rug saddle sail salmon salt sand scarf screw seal seed shell shelf shield ship shirt shoe shovel silk
    silver skate sled slate soap sock spade spoon spring stable stamp star statue steel stone stool storm stove
    straw string sugar swan sword table tailor tea tent thimble thread thumb tiger tile timber tin toast torch towel
    tower train tray tree trout trumpet tulip tunnel turnip turtle valley vase veil velvet village vine violin wagon
    wallet walnut watch water wave wax well whale wheat wheel whistle willow window wolf wool wren yard
    """
)
ADJECTIVES = _listed(
    """
    ancient amber bitter black blue bold brave bright broad brown calm careful cheap clean clever cold common cool
    crimson curious damp dark deep distant dry dull dusty early eager empty faint famous fancy fast fine first flat
    foreign fresh gentle golden grand green grey happy hard heavy hidden hollow honest humble hungry idle jolly keen
    large late lazy light little lonely long loud lucky mild modern narrow neat noble noisy old pale patient plain
    polite proud purple quick quiet rare red rich rough round royal rusty sharp short shy silent simple slim slow
    small smooth soft solid sour spare square steady steep strange strong sweet swift tall tame thick thin tidy tiny
    tired useful violet warm wet white wide wild wise wooden young
    """
)
NAMES = _listed(
    """
    Ada Amos Anna Arne Bela Berta Carl Clara Cora Dora Edgar Ella Emil Erik Esther Felix Flora Frida Georg Greta
    Hanna Henry Hugo Ida Ines Irma Ivan Jakob Jonas Judith Karin Klaus Laura Leo Lina Lotte Lukas Magda Marta Max
    Mila Mona Nils Nora Oskar Otto Paula Peter Rosa Rudi Ruth Sara Simon Sofia Stefan Thea Theo Tilda Vera Viktor
    Walter Wanda
    """
)
PAST = _listed(
    """
    bought borrowed broke brought built carried chose cleaned covered described drew dropped examined fetched filled
    found followed forgot gave guarded held hid kept left lifted lost loved made measured mended missed moved needed
    noticed opened packed painted passed praised pulled pushed reached remembered repaired returned saved saw sent
    shared showed sold stored studied threw took touched traded used visited wanted washed watched
    """
)
PLACES = _listed(
    """
    attic bakery bank barn beach bridge cellar chapel church city corner corridor courtyard farm forest garden hall
    harbour hill hotel house inn island kitchen lake library market meadow mill museum office park pier port road
    school shop square stable station street studio theatre tower town valley village wall workshop yard
    """
)
NEAR = _listed(
    """
    near behind beside beyond under above inside outside across from into past through toward
    """
)
TIMES = _listed(
    """
    In the morning | At noon | In the evening | At night | Before dawn | After supper | On Monday | On Friday | On
    Sunday | In spring | In summer | In autumn | In winter | Last year | Years ago | Later | Soon after | Once | At
    last | By then | For a while | Every week | That day
    """,
    "|",
)
TAILS = _listed(
    """
    and nobody knew why | and said nothing about it | because it was late | but it made no difference | as everybody
    had hoped | while the rain went on | and then went home | though it was heavy | so the work could begin | until
    the bell rang | which was no surprise | and laughed | without a word | when the others had gone | before the
    snow came | for the second time
    """,
    "|",
)
Form = Literal["list", "prose", "ruler"]
FORMS: tuple[Form, ...] = get_args(Form)
KINDS = _listed("code number price weight mark score rate count")
"""What a needle tells of its key."""


def draw_sentence(rng: random.Random) -> str:
    """One sentence of prose; one in eight holds a number that no question asks for."""
    a, b, c = (rng.choice(ADJECTIVES) for _ in range(3))
    m, n, o = (rng.choice(NOUNS) for _ in range(3))
    who, did, place, near = (rng.choice(words) for words in (NAMES, PAST, PLACES, NEAR))
    time, tail = rng.choice(TIMES), rng.choice(TAILS)
    many = rng.randrange(2, 10 ** rng.randint(1, 4))
    sentences = (
        f"The {a} {m} stood {near} the {place}, {tail}.",
        f"{who} {did} the {a} {m} {near} the {place}.",
        f"{time} {who} {did} {_one(m)} and {_one(b)} {n}.",
        f"The {m} of the {place} is {a} and {b}.",
        f"{time} the {a} {m} was {near} the {n}, {tail}.",
        f"{who} {did} the {m}, {tail}.",
        f"There was {_one(a)} {m} in the {place}, and {who} {did} it.",
        f"Nobody in the {place} {did} {_one(m)} or the {c} {o}.",
        f"{who} and {rng.choice(NAMES)} {did} the {n} {near} the {a} {place}.",
        f"{time} there were {many} of them {near} the {place}.",
        f"The {place} has {_one(a)} {m}, {_one(b)} {n} and {_one(o)}.",
        f"It was {a}, {tail}.",
        f"{who} {did} {many} {m}s, {tail}.",
        f"The {n} of {rng.choice(NAMES)} is near the {place}.",
        f"{who} has {_one(a)} {m} of {n}.",
        f"The {place} is {near} the {a} {m}.",
    )
    return rng.choice(sentences)


def _one(word: str) -> str:
    """The word with its article."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def prose(rng: random.Random, size: int, measure: Callable[[str], int]) -> list[str]:
    """Sentences, each with a space in front, as many as measure `size` together at most."""
    sentences: list[str] = []
    while True:
        sentence = f" {draw_sentence(rng)}"
        size -= measure(sentence)
        if size < 0:
            return sentences
        sentences.append(sentence)


def hide(rng: random.Random, sentences: list[str], needles: Sequence["Needle"]) -> list[str]:
    """The sentences with each needle's somewhere among them."""
    hidden = list(sentences)
    for needle in needles:
        hidden.insert(rng.randint(0, len(hidden)), needle.told)
    return hidden


@dataclass(frozen=True)
class Needle:
    """A value of a key, and the words around it."""

    told: str
    """The sentence in the text, with a space in front."""
    question: str
    """All between the text, or the answer before, and the start of the answer."""
    prefix: str
    """The start of the answer, up to the value."""
    value: str
    """Digits."""

    @property
    def answer(self) -> str:
        """What follows the prefix."""
        return f" {self.value}."


def draw_needles(rng: random.Random, count: int, form: Form = "prose") -> list[Needle]:
    """Needles of different keys, their values of four to eight digits.

    Args:
        rng: what to draw with.
        count: how many.
        form: "prose" as the module shows; "ruler" in the words of our RULER tasks; "list" as keys and values with
            nothing around them.
    """
    found = []
    for key in _keys(rng, count):
        kind, digits = rng.choice(KINDS), rng.randint(4, 8)
        value = str(rng.randrange(10 ** (digits - 1), 10**digits))
        if form == "list":
            found.append(Needle(f" {key}: {value}.", "", f" {key}:", value))
            continue
        told, prefix = f"The {kind} of {key} is {value}.", f"The {kind} of {key} is"
        question = f"What is the {kind} of {key}?"
        if form == "ruler":
            told = wording.needle(kind, key, value)
            asked, prefix = wording.needle_question(kind, "", [key], 1)
            question = asked.rpartition("\n")[2]
        found.append(Needle(f" {told}", f"\n\n{question}\nAnswer:\n", prefix, value))
    return found


def _keys(rng: random.Random, count: int) -> list[str]:
    """Different keys: a noun, an adjective and a noun, or now and then a made-up word."""
    found: dict[str, None] = {}
    while len(found) < count:
        draw = rng.random()
        if draw < 0.5:
            key = rng.choice(NOUNS)
        elif draw < 0.85:
            key = f"{rng.choice(ADJECTIVES)}{rng.choice(' -')}{rng.choice(NOUNS)}"
        else:
            key = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))
        found[key] = None
    return list(found)


@dataclass(frozen=True)
class Case:
    """A prompt that ends where the value is due, and the value."""

    prompt: str
    value: str


def draw_case(rng: random.Random, size: int, measure: Callable[[str], int]) -> Case:
    """A case of one to four needles in prose, of which one is asked for.

    Args:
        rng: what to draw with.
        size: the prompt measures at least this, and a sentence more at most.
        measure: the tokens of a text.
    """
    needles = draw_needles(rng, rng.randint(1, 4))
    asked = rng.choice(needles)
    question = asked.question + asked.prefix
    rest = size - measure(question) - sum(measure(needle.told) for needle in needles)
    sentences: list[str] = []
    while rest > 0:
        sentences.append(f" {draw_sentence(rng)}")
        rest -= measure(sentences[-1])
    return Case("".join(hide(rng, sentences, needles)) + question, asked.value)
