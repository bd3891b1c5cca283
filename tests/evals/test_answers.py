"""Whole answers: what is read of them, and that nothing malformed passes."""

import asyncio

import pytest
from load_server import END, STREAM, event, serving, whole

from specprefill_jax.evals.answers import RefusedError, ask
from specprefill_jax.evals.load import Job
from specprefill_jax.evals.wire import ProtocolError

READ = {"engaged": True, "reason": "engaged"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def ask_for(answer, **body):
    with serving(lambda path, body: answer) as seen:
        return asyncio.run(ask(seen.target, Job("/v1/completions", body)))


def chunk(*choices, **more):
    return {"id": "a", "object": "text_completion", "created": 1, "model": "m", "choices": list(choices), **more}


def said(text, *ids, index=0, finish=None, **more):
    return {"index": index, "text": text, "token_ids": list(ids), "logprobs": None, "finish_reason": finish, **more}


def stream_of(*chunks, done=True):
    return [STREAM, *(event(one) for one in chunks), *([event("[DONE]")] if done else []), END]


GOOD = (
    chunk(said("a", 5, logprobs={"token_logprobs": [-0.5]})),
    chunk(said("b", 6, 7, logprobs={"token_logprobs": [-1.0, -2.0]})),
    chunk(said("", finish="stop"), specprefill=READ),
    chunk(usage=USAGE),
)


def test_a_stream_is_put_together():
    answer = ask_for(stream_of(*GOOD), stream=True)
    [choice] = answer.choices
    assert (choice.text, choice.token_ids, choice.logprobs) == ("ab", [5, 6, 7], [-0.5, -1.0, -2.0])
    assert (choice.finish_reason, choice.specprefill, answer.usage) == ("stop", READ, USAGE)


def test_several_choices_of_a_stream_are_told_apart():
    chunks = [chunk(said("a", 5)), chunk(said("b", 6, 7, index=1)), chunk(said("", index=1, finish="length"))]
    answer = ask_for(stream_of(*chunks, chunk(said("", finish="stop")), GOOD[-1]), stream=True, n=2)
    assert [choice.token_ids for choice in answer.choices] == [[5], [6, 7]]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]


def test_an_answer_in_one_piece():
    content = {"content": [{"logprob": -0.5}, {"logprob": -1.0}, {"logprob": -2.0}]}
    message = {"index": 0, "message": {"content": "ab"}, "token_ids": [5, 6, 7], "logprobs": content}
    [choice] = ask_for(
        [whole({"choices": [message | {"finish_reason": "length"}], "usage": USAGE, "specprefill": READ})]
    ).choices
    assert (choice.text, choice.token_ids, choice.logprobs) == ("ab", [5, 6, 7], [-0.5, -1.0, -2.0])
    assert (choice.finish_reason, choice.specprefill) == ("length", READ)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (GOOD[:-1], "without usage"),
        ((*GOOD, GOOD[-1]), "after the one with usage"),
        ((GOOD[0], GOOD[2], GOOD[1], GOOD[3]), "after the one with its choice's finish_reason"),
        ((GOOD[0], GOOD[1], GOOD[3]), "before every choice has its finish_reason"),
        ((chunk(said("")), *GOOD), "before its first token"),
        ((GOOD[0] | {"id": "b"}, *GOOD[1:]), "in one stream"),
        ((GOOD[0], *GOOD[2:]), "of 1 generated tokens"),
        ((*GOOD[:-1], chunk(usage=USAGE | {"total_tokens": 7})), "does not add up"),
        ((chunk(said("a", 5, logprobs={"token_logprobs": []})), *GOOD[1:]), "1 tokens with 0 log-probabilities"),
        ((chunk(said("a", 5, finish="abort")),), "finish_reason='abort'"),
        ((chunk(said("a", 5, index=1)),), "not one choice of 1"),
        ((GOOD[0] | {"usage": USAGE}, *GOOD[1:]), "usage before the end"),
    ],
)
def test_what_breaks_the_protocol_of_streams(chunks, message):
    with pytest.raises(ProtocolError, match=message):
        ask_for(stream_of(*chunks), stream=True)


def test_a_stream_must_say_that_it_is_done_and_then_be():
    with pytest.raises(ProtocolError, match=r"without \[DONE\]"):
        ask_for(stream_of(*GOOD, done=False), stream=True)
    with pytest.raises(ProtocolError, match=r"after \[DONE\]"):
        ask_for([STREAM, *map(event, (*GOOD, "[DONE]", "[DONE]")), END], stream=True)


def test_refusals_and_errors_in_a_stream():
    error = {"error": {"message": "too long", "type": "invalid_request_error"}}
    with pytest.raises(RefusedError, match="400: too long") as refused:
        ask_for([whole(error, "400 Bad Request")])
    assert refused.value.status == 400
    with pytest.raises(RefusedError, match="200: too long"):
        ask_for(stream_of(GOOD[0], error), stream=True)
    with pytest.raises(ProtocolError, match="not OpenAI-shaped"):
        ask_for([whole({"detail": "too long"}, "400 Bad Request")])
