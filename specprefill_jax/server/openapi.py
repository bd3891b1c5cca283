"""The API's description, from the models that check its bodies."""

from typing import Any

from pydantic.json_schema import models_json_schema

from specprefill_jax.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
)

_BODIES: dict[str, tuple[str, tuple[type[Body], ...]]] = {
    "/v1/chat/completions": ("Answer a chat", (ChatBody,)),
    "/v1/completions": ("Continue one or several prompts", (CompletionBody,)),
    "/tokenize": ("Token ids of a text or a chat", (TokenizeBody, TokenizeChatBody)),
    "/detokenize": ("The text of token ids", (DetokenizeBody,)),
}
_GETS = {
    "/v1/models": "The model that is served",
    "/tokenizer_info": "What tokenizer it has",
    "/health": "200 when requests are taken, else 503",
    "/metrics": "Prometheus metrics",
    "/version": "The package's version",
}
_ERROR = {
    "description": "An error",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {
                    "error": {
                        "type": "object",
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                        "required": ["message", "type", "param", "code"],
                    }
                },
                "required": ["error"],
            }
        }
    },
}


def describe(version: str) -> dict[str, Any]:
    """The OpenAPI document."""
    models = {model for _, several in _BODIES.values() for model in several}
    names, schemas = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for path, (summary, several) in _BODIES.items():
        refs = [names[model, "validation"] for model in several]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": {"description": "The answer"}, "default": _ERROR},
            }
        }
    for path, summary in _GETS.items():
        paths[path] = {
            "get": {"summary": summary, "responses": {"200": {"description": "The answer"}, "default": _ERROR}}
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "specprefill-jax", "version": version},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }
