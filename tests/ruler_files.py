"""Small texts of our own in the layouts that RULER's tasks are made of."""

import json
from pathlib import Path

from specprefill_jax.evals.prompts import prose

PLACES = ("Alder", "Birch", "Cedar", "Dogwood", "Elm", "Fir")


def write_essays(folder: Path, words: int = 300) -> Path:
    """Three files of generated prose with line breaks in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in "abc":
        (folder / f"{name}.txt").write_text(prose(words, name).replace(" the ", "\nthe ") + "\n", encoding="utf-8")
    return folder


def squad_paragraph(place: str, part: int) -> dict:
    """A paragraph with two questions that it answers and one that it does not."""
    text = (
        f"{place} street, part {part}. {prose(10 + 3 * part, f'{place} {part}')}. Its mayor is {place} number {part}."
    )
    answers = [{"text": f"{place} number {part}", "answer_start": 0}, {"text": place, "answer_start": 0}]
    asked = f"of {place} street, part {part}?"
    return {
        "context": text,
        "qas": [
            {"question": f"Who is the mayor {asked}", "id": "1", "answers": answers * 2, "is_impossible": False},
            {"question": f"Who was the mayor {asked}", "id": "2", "answers": [], "is_impossible": True},
            {"question": f"What is the name {asked}", "id": "3", "answers": answers[1:], "is_impossible": False},
        ],
    }


def write_questions(folder: Path) -> Path:
    """SQuAD with 18 paragraphs and 36 answerable questions, HotpotQA with 6 questions of 5 paragraphs each."""
    folder.mkdir(parents=True, exist_ok=True)
    articles = [
        {"title": place, "paragraphs": [squad_paragraph(place, part) for part in (1, 2, 3)]} for place in PLACES
    ]
    (folder / "dev-v2.0.json").write_text(json.dumps({"version": "v2.0", "data": articles}))
    hops = []
    for place in PLACES:
        context = [[f"{place} {part}", [f"{place} {part} is a lane.", f" {prose(12, place)}."]] for part in range(5)]
        facts = [[f"{place} 1", 0], [f"{place} 3", 0], [f"{place} 1", 1]]
        asked = {"_id": place, "question": f"Is {place} 1 as long as {place} 3?", "answer": "yes", "type": "comparison"}
        hops.append({**asked, "level": "easy", "supporting_facts": facts, "context": context})
    (folder / "hotpot_dev_distractor_v1.json").write_text(json.dumps(hops))
    return folder
