"""The words around the tasks. All are our own; `OWN` marks the rows that are made with them."""

from collections.abc import Sequence

OWN = "own"

NOISE = "The kettle is warm. The lamp is lit. The street is quiet. The clock ticks on. Somebody turns a page."


def listing(items: Sequence[str]) -> str:
    """Items as a sentence lists them: "a", "a and b", "a, b and c"."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def needle(kind: str, key: str, value: str) -> str:
    """The sentence that tells one secret value."""
    return f"Note: a secret {kind} of {key} is {value}."


def needle_question(kind: str, text: str, keys: Sequence[str], answers: int) -> tuple[str, str]:
    """(input, answer prefix): some secret values, in the singular where there is one answer."""
    one = answers == 1
    asked = (
        f"Which secret {kind} of {keys[0]} does the text tell?"
        if one
        else f"Which secret {kind}s of {listing(keys)} does the text tell? Name every one of them."
    )
    before = f"The text below tells {f'a secret {kind}' if one else f'secret {kind}s'}. Remember what it tells."
    prefix = f"The secret {kind}{'' if one else 's'} of {listing(keys)} that the text tells {'is' if one else 'are'}"
    return f"{before} You will be asked at the end.\n\n{text}\n\n{asked}", prefix


def assignment(name: str, value: str) -> str:
    """The first link of a chain."""
    return f"Box {name} gets the number {value}."


def copy(name: str, other: str) -> str:
    """A further link of a chain."""
    return f"Box {name} gets what is in box {other}."


def chain_question(text: str, value: str, count: int) -> tuple[str, str]:
    """(input, answer prefix): the names that a value reached."""
    before = "The text below puts numbers into boxes, and copies them from box to box. Follow where each number goes."
    asked = f"Which boxes hold the number {value} in the end? There are {count}; name all of them."
    return f"{before}\n\n{text}\n\n{asked}", f"The {count} boxes that hold the number {value} are"


def common_question(text: str, count: int) -> tuple[str, str]:
    """(input, answer prefix): the words that a list repeats most."""
    before = "Here are words with their numbers; a few of the words come up far more often than all the rest."
    asked = f"Which {count} words stand most often in the list?"
    return f"{before}\n\n{text}\n\n{asked}", f"The {count} words that stand most often in the list are:"


def frequent_question(text: str) -> tuple[str, str]:
    """(input, answer prefix): the three most frequent words of a coded text."""
    before = "Below is a text in a secret code. Count how often each code word occurs, and pass over the dots."
    asked = "Apart from the dots, which three code words occur most often in the text?"
    return f"{before}\n\n{text}\n\n{asked}", "The three code words that occur most often are:"


def document(number: int, text: str) -> str:
    """One document of a question's."""
    return f"Document {number}:\n{text}"


def document_question(documents: Sequence[str], question: str) -> tuple[str, str]:
    """(input, answer prefix): a question to documents, the instruction before and after them."""
    how = "Reply with the bare answer and nothing besides."
    joined = "\n\n".join(document(number, text) for number, text in enumerate(documents, 1))
    text = f"A question follows these documents; they tell the answer. {how}\n\n{joined}\n\n"
    return f"{text}Here is the question; the documents above tell the answer. {how}\n\nQuestion: {question}", "Answer:"
