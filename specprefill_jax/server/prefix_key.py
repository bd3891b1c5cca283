"""Which requests begin alike: those that a replica's prefix cache can help with what it read for the others."""

import hashlib
import json
from typing import Any

LEADING_CHARACTERS = 1024
"""So much of a prompt that has neither system messages nor tools counts as its beginning."""

LEADING_TOKENS = 256
"""The same for a prompt of token ids: eight pages of the engine's cache."""


def prefix_key(path: str, body: bytes) -> str:
    """A hash of how a request's prompt begins; "" where it has no prompt, or none that can be read.

    Of a chat these are the messages before the first one that is neither `system` nor `developer`, and the tools, which
    are read whole and so shared through the prefix cache; without either, the beginning of the first message. Of a
    completion it is the beginning of its prompt, or of its first one.
    """
    if path not in ("/v1/chat/completions", "/v1/completions"):
        return ""
    try:
        value = json.loads(body)
        beginning = _chat(value) if path == "/v1/chat/completions" else _prompt(value.get("prompt"))
        # What hashes are made of must not depend on how a client spaces or orders its JSON.
        text = json.dumps(beginning, sort_keys=True)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return ""  # the replica says what is wrong with it
    return "" if beginning is None else hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _chat(value: Any) -> Any:
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    leading = []
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        leading.append(message)
    tools = None if value.get("tool_choice") == "none" else value.get("tools") or None
    if leading or tools:
        return [leading, tools]
    content = messages[0].get("content")
    if isinstance(content, list) and content:
        content = content[0].get("text")
    return [messages[0].get("role"), _prompt(content)]


def _prompt(prompt: Any) -> Any:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:LEADING_CHARACTERS]
    return prompt[:LEADING_TOKENS] if isinstance(prompt, list) else None
