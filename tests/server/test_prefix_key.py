"""Which requests count as beginning alike."""

import json

import pytest

from specprefill_jax.server.prefix_key import LEADING_CHARACTERS, LEADING_TOKENS, prefix_key

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SYSTEM = {"role": "system", "content": "be brief"}
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}


def user(text):
    return {"role": "user", "content": text}


def chat(*messages, **more):
    return prefix_key(CHAT, json.dumps({"messages": messages, **more}).encode())


def completion(prompt, **more):
    return prefix_key(COMPLETIONS, json.dumps({"prompt": prompt, **more}).encode())


def test_a_chat_is_known_by_its_system_messages_and_tools():
    key = chat(SYSTEM, user("a"), tools=[TOOL])
    assert len(key) == 32
    assert key == chat(SYSTEM, user("b"), {"role": "assistant", "content": "c"}, user("d"), tools=[TOOL], seed=1)
    assert key == prefix_key(CHAT, json.dumps({"tools": [TOOL], "messages": [SYSTEM]}, indent=1).encode())
    others = [
        chat({**SYSTEM, "content": "be long"}, user("a"), tools=[TOOL]),
        chat(SYSTEM, {"role": "developer", "content": "x"}, user("a"), tools=[TOOL]),
        chat(SYSTEM, user("a"), tools=[TOOL, TOOL]),
        chat(SYSTEM, user("a"), tools=[TOOL], tool_choice="none"),
        chat(user("a"), tools=[TOOL]),
    ]
    assert len({key, *others}) == 6
    assert chat(SYSTEM, user("a"), tools=[TOOL], tool_choice="none") == chat(SYSTEM, user("b"), tools=[])


def test_a_chat_with_neither_is_known_by_how_it_starts():
    text = "x" * LEADING_CHARACTERS
    assert chat(user(text)) == chat(user(text + "more"), user("y")) == chat(user([{"type": "text", "text": text}]))
    assert len({chat(user(text)), chat(user(text[1:])), chat({**user(text), "role": "assistant"})}) == 3


def test_a_completion_is_known_by_how_its_first_prompt_starts():
    text, ids = "x" * LEADING_CHARACTERS, list(range(LEADING_TOKENS))
    assert completion(text) == completion(text + "y") == completion([text, "z"])
    assert completion(ids) == completion([*ids, 5]) == completion([ids, [1]])
    assert len({completion(text), completion(text[1:]), completion(ids), completion(ids[1:])}) == 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", b'{"prompt": "x"}'),
        (CHAT, b""),
        (CHAT, b"{"),
        (CHAT, b"\xff"),
        (CHAT, b"[]"),
        (CHAT, b'{"messages": []}'),
        (CHAT, b'{"messages": [1]}'),
        (CHAT, b'{"messages": "x"}'),
        (CHAT, b'{"messages": [{"role": "user", "content": ["x"]}]}'),
        (CHAT, b'{"messages": ' + b"[" * 100_000),
        (COMPLETIONS, b"{}"),
        (COMPLETIONS, b'{"prompt": 1}'),
        (COMPLETIONS, b'{"prompt": ' + b"1" * 10_000 + b"}"),
    ],
)
def test_what_has_no_prompt_has_no_key(path, body):
    assert prefix_key(path, body) == ""


def test_lone_surrogates_are_no_fault():
    assert len(chat({"role": "system", "content": "\ud800"})) == 32
