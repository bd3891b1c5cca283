"""Every route and option through the openai client, in one piece and streamed."""

import json

import pytest
from server.fake_engine import ANSWER, TEMPLATE, make_tokenizer
from server.running import DEFAULTS

TOKENIZER = make_tokenizer()
LONG = "all the boats of the harbour " * 100
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": LONG}]


class Routes:
    """Both routes behind one face: text, end and the whole of an answer, streamed or not."""

    def __init__(self, client, route, stream):
        self.client, self.route, self.stream = client, route, stream

    def __call__(self, prompt=LONG, **options):
        if self.route == "chat":
            options = {"messages": [{"role": "user", "content": prompt}], "model": "fake", **options}
            create = self.client.chat.completions.create
        else:
            options = {"prompt": prompt, "model": "fake", **options}
            create = self.client.completions.create
        if not self.stream:
            return create(**options).model_dump()
        return self.joined([chunk.model_dump() for chunk in create(**options, stream=True)])

    def joined(self, chunks):
        """The chunks as the answer in one piece that they stand for."""
        whole = {key: value for key, value in chunks[-1].items() if key != "choices"}
        choices = {}
        for chunk in chunks:
            for piece in chunk["choices"]:
                choice = choices.setdefault(piece["index"], {"index": piece["index"], "text": "", "logprobs": None})
                part = piece["delta"] if self.route == "chat" else piece
                choice["text"] += part.get("text") or part.get("content") or ""
                choice["finish_reason"] = piece["finish_reason"]
                if piece["logprobs"]:
                    lists = choice["logprobs"] = choice["logprobs"] or {}
                    for name, items in piece["logprobs"].items():
                        if items is not None:
                            lists.setdefault(name, []).extend(items)
                if "specprefill" in piece:
                    choice["specprefill"] = piece["specprefill"]
            whole["specprefill"] = chunk.get("specprefill") or whole.get("specprefill")
        if self.route == "chat":
            for choice in choices.values():
                choice["message"] = {"content": choice["text"]}
        return whole | {"choices": [choices[index] for index in sorted(choices)]}

    def text(self, answer, index=0):
        choice = answer["choices"][index]
        return choice["message"]["content"] if self.route == "chat" else choice["text"]


@pytest.fixture(params=["chat", "completions"])
def route(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def ask(request, client, route, engine):
    return Routes(client, route, request.param)


class TestText:
    def test_all_of_the_answer_comes(self, ask):
        answer = ask()
        assert ask.text(answer) == ANSWER
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["model"] == "fake"

    def test_max_tokens(self, ask):
        answer = ask(max_tokens=3)
        assert ask.text(answer) == TOKENIZER.decode(TOKENIZER.encode(ANSWER)[:3])
        assert answer["choices"][0]["finish_reason"] == "length"

    def test_without_max_tokens_the_rest_of_the_context_is_allowed(self, ask, engine):
        ask()
        [request] = engine.submitted
        assert request.sampling.max_tokens == engine.max_model_len - len(request.prompt)

    @pytest.mark.parametrize("stop", ["boat", ["nothing", "boat", "end"]])
    def test_stop(self, ask, stop):
        answer = ask(stop=stop)
        assert ask.text(answer) == ANSWER[: ANSWER.index("boat")]
        assert answer["choices"][0]["finish_reason"] == "stop"

    def test_stop_token_ids(self, ask):
        ids = TOKENIZER.encode(ANSWER)
        answer = ask(extra_body={"stop_token_ids": [ids[4]]})
        assert ask.text(answer) == TOKENIZER.decode(ids[: ids.index(ids[4])])

    def test_ignore_eos(self, ask):
        answer = ask(max_tokens=200, extra_body={"ignore_eos": True})
        assert ask.text(answer).startswith(ANSWER + "hello")
        assert answer["choices"][0]["finish_reason"] == "length"

    def test_token_ids(self, ask):
        answer = ask(max_tokens=3, extra_body={"return_token_ids": True}) if not ask.stream else None
        if answer:
            assert answer["choices"][0]["token_ids"] == TOKENIZER.encode(ANSWER)[:3]


class TestSampling:
    def test_every_option_reaches_the_engine(self, ask, engine):
        extra = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True, "stop_token_ids": [9]}
        ask(temperature=0.7, top_p=0.9, seed=5, stop=["x"], max_tokens=4, extra_body=extra)
        sampling = engine.submitted[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 7, 0.1)
        assert (sampling.repetition_penalty, sampling.seed, sampling.stop) == (1.2, 5, ("x",))
        assert (sampling.max_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (4, True, (9,))

    def test_the_defaults_are_the_api_s(self, ask, engine):
        ask()
        sampling = engine.submitted[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.logprobs) == (1.0, 1.0, None, None)

    def test_n_makes_that_many_choices_with_seeds_that_follow(self, ask, engine):
        answer = ask(n=3, seed=2**32 - 1)
        assert [request.sampling.seed for request in engine.submitted] == [2**32 - 1, 0, 1]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        ids = TOKENIZER.encode(ANSWER)
        expected = [TOKENIZER.decode(ids[(seed % 7) :]) for seed in (2**32 - 1, 0, 1)]
        assert [ask.text(answer, index) for index in range(3)] == expected
        assert all(choice["specprefill"]["engaged"] for choice in answer["choices"])
        assert answer["specprefill"] == answer["choices"][0]["specprefill"]

    def test_top_k_of_minus_one_and_a_negative_seed_are_understood(self, ask, engine):
        ask(seed=-1, extra_body={"top_k": -1})
        assert (engine.submitted[0].sampling.top_k, engine.submitted[0].sampling.seed) == (0, 2**32 - 1)

    def test_nulls_and_neutral_values_and_unknown_fields_do_no_harm(self, ask):
        extra = {"frequency_penalty": 0, "presence_penalty": None, "logit_bias": {}, "best_of": 1, "min_tokens": 0}
        extra |= {"stop": None, "seed": None, "logprobs": None, "user": "u", "metadata": {"a": 1}, "whatever": [1]}
        assert ask.text(ask(extra_body={**extra, "response_format": {"type": "text"}})) == ANSWER


class TestSpecPrefill:
    """What hurt users elsewhere: settings ignored on some routes, and reasons that nobody told."""

    @pytest.mark.parametrize("rate", [0.25, 0.4, 1.0])
    def test_omlx_443_the_keep_rate_that_was_set_is_the_one_that_is_reported(self, ask, engine, rate):
        told = ask(extra_body={"specprefill": {"keep_rate": rate}})["specprefill"]
        assert engine.submitted[0].config.keep_rate == rate
        assert told["requested_keep_rate"] == rate
        assert told["keep_rate"] == told["kept_tokens"] / told["num_tokens"]
        assert abs(told["keep_rate"] - rate) <= 32 / told["num_tokens"]

    def test_omlx_443_the_server_s_default_holds_on_every_route(self, ask, engine):
        told = ask()["specprefill"]
        assert told["requested_keep_rate"] == DEFAULTS.keep_rate
        assert engine.submitted[0].config.min_prompt_tokens == DEFAULTS.min_prompt_tokens

    def test_omlx_443_every_setting_reaches_the_engine(self, ask, engine):
        given = {"keep_rate": 0.2, "look_ahead": 3, "pool_width": 5, "chunk_size": 16, "mode": "paper"}
        given |= {"tail_tokens": 5, "min_prompt_tokens": 1, "min_predicted_gain": 2, "enabled": False}
        given |= {
            "importance_share": 0.7,
            "min_keep_rate": 0.1,
            "max_keep_rate": 0.9,
            "max_divergence": 1,
            "ttft_budget_ms": 5,
        }
        ask(extra_body={"specprefill": given})
        config = engine.submitted[0].config
        assert {name: getattr(config, name) for name in given} == given
        assert engine.submitted[0].draft_tokens is None

    def test_proposals_can_be_limited_and_are_told(self, ask, engine):
        told = ask(extra_body={"specprefill": {"draft_tokens": 2}})["specprefill"]
        assert engine.submitted[0].draft_tokens == 2
        assert (told["proposed_tokens"], told["accepted_tokens"]) == (12, 9)

    def test_an_adaptive_keep_rate_reaches_the_engine_and_is_reported(self, ask, engine):
        told = ask(extra_body={"specprefill": {"keep_rate": "auto"}})["specprefill"]
        assert engine.submitted[0].config.keep_rate == told["requested_keep_rate"] == "auto"
        assert told["keep_rate"] == told["kept_tokens"] / told["num_tokens"]

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            ({}, "engaged"),
            ({"enabled": False}, "disabled"),
            ({"min_prompt_tokens": 5000}, "short_prompt"),
            ({"keep_rate": 1}, "nothing_to_drop"),
            ({"min_predicted_gain": 9}, "low_predicted_gain"),
        ],
    )
    def test_omlx_713_every_answer_says_whether_and_why(self, ask, given, reason):
        told = ask(extra_body={"specprefill": given})["specprefill"]
        assert (told["engaged"], told["reason"]) == (reason == "engaged", reason)
        assert told["detail"] is None
        assert told["cached_tokens"] == 7
        assert told["keep_rate"] < 1 if told["engaged"] else told["keep_rate"] == 1

    def test_lucebox_752_the_phases_add_up_to_the_time_to_the_first_token(self, ask):
        seconds = ask()["specprefill"]["timings"]
        phases = ("tokenise", "queue", "speculate", "score", "main_prefill", "first_token")
        assert sum(seconds[name] for name in phases) == pytest.approx(seconds["ttft"], abs=1e-5)
        assert seconds["total"] == pytest.approx(seconds["ttft"] + seconds["decode"], abs=1e-5)
        assert seconds["tokenise"] > 0

    def test_the_map(self, ask):
        told = ask(extra_body={"specprefill": {"map": True}})["specprefill"]
        assert told["chunk_size"] == 32
        assert len(told["kept_chunks"]) == len(told["forced_chunks"]) == -(-told["num_tokens"] // 32)
        assert told["forced_chunks"][0] == "1"
        assert "0" in told["forced_chunks"]
        kept = [bit == "1" for bit in told["kept_chunks"]]
        sizes = [min(32, told["num_tokens"] - 32 * index) for index in range(len(kept))]
        assert sum(size for size, bit in zip(sizes, kept, strict=True) if bit) == told["kept_tokens"]

    def test_without_being_asked_for_there_is_no_map(self, ask):
        assert "kept_chunks" not in ask()["specprefill"]


class TestUsage:
    @pytest.mark.parametrize("stream", [False, True])
    def test_tokens_are_counted(self, client, engine, route, stream):
        ask = Routes(client, route, stream)
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = ask(max_tokens=5, n=2, **options)
        prompt = len(engine.submitted[0].prompt)
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (prompt, 10, prompt + 10)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 7
        assert usage["prompt_tokens_details"]["kept_tokens"] == answer["specprefill"]["kept_tokens"]


class TestChat:
    def test_template_spans_and_tail_reach_the_engine(self, client, engine):
        client.chat.completions.create(model="fake", messages=CHAT)
        [request] = engine.submitted
        assert request.prompt.tolist() == TOKENIZER.encode_chat(CHAT)
        assert request.config.forced_spans
        assert request.generation_tail > 0

    def test_paper_mode_forces_nothing(self, client, engine):
        client.chat.completions.create(model="fake", messages=CHAT, extra_body={"specprefill": {"mode": "paper"}})
        assert engine.submitted[0].config.forced_spans == ()

    def test_parts_roles_and_variables(self, client, engine):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]
        extra = {"add_generation_prompt": False, "chat_template_kwargs": {"suffix": "!"}}
        client.chat.completions.create(model="fake", messages=messages, extra_body=extra)
        text = "<|begin|>system\nd<|end|><|begin|>user\na\nb<|end|>!"
        assert engine.submitted[0].prompt.tolist() == TOKENIZER.encode(text)

    def test_tools_and_tool_calls(self, client, engine):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
        messages = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "t"},
        ]
        client.chat.completions.create(model="fake", messages=messages, tools=tools, tool_choice="auto")
        text = TOKENIZER.decode(engine.submitted[0].prompt, skip_special_tokens=False)
        assert text.startswith('<|begin|>tools [{"type": "function"')
        assert "Oslo" in text
        client.chat.completions.create(model="fake", messages=messages, tools=tools, tool_choice="none")
        assert "tools" not in TOKENIZER.decode(engine.submitted[1].prompt)

    def test_the_newer_name_of_max_tokens_wins(self, client, engine):
        client.chat.completions.create(model="fake", messages=CHAT, max_completion_tokens=2, max_tokens=9)
        assert engine.submitted[0].sampling.max_tokens == 2

    @pytest.mark.parametrize("stream", [False, True])
    def test_logprobs(self, client, engine, stream):
        answer = Routes(client, "chat", stream)("hi", logprobs=True, top_logprobs=2, max_tokens=2)
        first, second = answer["choices"][0]["logprobs"]["content"]
        ids = TOKENIZER.encode(ANSWER)[:2]
        assert [first["token"], second["token"]] == ["hell", "o"]
        assert first["logprob"] == pytest.approx(-ids[0] / 100)
        assert first["bytes"] == list(b"hell")
        assert [top["logprob"] for top in first["top_logprobs"]] == pytest.approx([-ids[0] / 100, -ids[0] / 50])

    def test_logprobs_without_tops(self, client):
        answer = Routes(client, "chat", False)("hi", logprobs=True, max_tokens=1)
        assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


class TestCompletions:
    @pytest.fixture(params=[False, True], ids=["whole", "stream"])
    def complete(self, request, client, engine):
        return Routes(client, "completions", request.param)

    @pytest.mark.parametrize("prompt", [["hell", "we"], [[1, 2, 3], [4, 5]], [[7]]])
    def test_several_prompts(self, complete, engine, prompt):
        answer = complete(prompt, n=2, max_tokens=1)
        ids = [TOKENIZER.encode(one) if isinstance(one, str) else one for one in prompt]
        assert [request.prompt.tolist() for request in engine.submitted] == [one for one in ids for _ in range(2)]
        assert len(answer["choices"]) == 2 * len(prompt)

    def test_one_prompt_of_ids(self, complete, engine):
        assert "specprefill" not in complete([3, 4, 5])["choices"][0]
        assert engine.submitted[0].prompt.tolist() == [3, 4, 5]

    def test_echo(self, complete):
        assert complete.text(complete("the boat", echo=True)) == "the boat" + ANSWER
        ids = TOKENIZER.encode("the boat")
        assert complete.text(complete([ids, ids], echo=True), 1) == "the boat" + ANSWER

    def test_logprobs(self, complete):
        logprobs = complete("hi", logprobs=2, max_tokens=2)["choices"][0]["logprobs"]
        first, second = TOKENIZER.encode(ANSWER)[:2]
        assert logprobs["tokens"] == ["hell", "o"]
        assert logprobs["token_logprobs"] == pytest.approx([-first / 100, -second / 100])
        assert logprobs["text_offset"] == [0, 4]
        assert logprobs["top_logprobs"][0]["hell"] == pytest.approx(-first / 100)
        assert len(logprobs["top_logprobs"][0]) == 2

    @pytest.mark.parametrize("tokens", [0, 1])
    def test_log_likelihood_as_lm_eval_asks_for_it(self, complete, engine, tokens):
        """The prompt is read whole, and its own log-probabilities come with it, the first token's being unknown."""
        ids = TOKENIZER.encode(LONG)
        answer = complete(ids, echo=True, logprobs=1, max_tokens=tokens, temperature=0, seed=1234)
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(ids) + tokens
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx([-index / 100 for index in ids[1:]])
        assert logprobs["token_logprobs"][1] == max(logprobs["top_logprobs"][1].values())
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert logprobs["text_offset"][2] == len("".join(logprobs["tokens"][:2]))
        assert (answer["specprefill"]["engaged"], answer["specprefill"]["reason"]) == (False, "prompt_logprobs")
        assert choice["finish_reason"] == "length"

    def test_logprobs_of_zero_are_the_token_s_own(self, complete):
        logprobs = complete("hi", logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
        assert logprobs["top_logprobs"] == [{"hell": logprobs["token_logprobs"][0]}]

    def test_max_tokens_of_zero_gives_the_prompt_alone(self, complete):
        answer = complete("the boat", echo=True, max_tokens=0, extra_body={"return_token_ids": True})
        assert complete.text(answer) == "the boat"
        if not complete.stream:
            assert answer["usage"]["completion_tokens"] == 0
            assert answer["choices"][0]["token_ids"] == []


class TestOthers:
    def test_models(self, client, server):
        [model] = client.models.list().data
        assert (model.id, model.model_dump()["root"], model.model_dump()["max_model_len"]) == (
            "fake",
            "root/of/fake",
            4096,
        )
        assert client.models.retrieve("fake").id == "fake"

    def test_tokenize_and_back(self, server):
        _, told = server.post("/tokenize", {"prompt": "hello 🙂", "return_token_strs": True})
        assert told["tokens"] == TOKENIZER.encode("hello 🙂")
        assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 4096)
        assert told["token_strs"][0] == "hell"
        assert server.post("/detokenize", {"tokens": told["tokens"]}) == (200, {"prompt": "hello 🙂"})

    def test_tokenize_a_chat(self, server):
        _, told = server.post("/tokenize", {"messages": CHAT, "model": "fake"})
        assert told["tokens"] == TOKENIZER.encode_chat(CHAT)
        assert told["token_strs"] is None

    def test_tokenizer_info(self, server):
        status, _, data = server.ask("GET", "/tokenizer_info")
        assert status == 200
        assert b'"eos_token_ids":[%d]' % TOKENIZER.eos_token_ids[0] in data
        assert TOKENIZER.fingerprint().encode() in data
        told = json.loads(data)
        # lm-eval looks for these, at this level.
        assert (told["eos_token"], told["chat_template"]) == ("<|end|>", TEMPLATE)

    @pytest.mark.parametrize("path", ["/health", "/version", "/openapi.json"])
    def test_probes(self, server, path):
        assert server.ask("GET", path)[0] == 200
        assert server.ask("HEAD", path)[2] == b""
