"""Chat prompts: the ids are the template's own, and what is forced is all but the inside of long contents.

The independent count: tokens of a byte-level tokenizer are runs of bytes, so where each lies follows from the lengths
of their bytes, and a chat whose text is put together here says itself where its contents lie.
"""

import gzip
import itertools
import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import DATA, TOKENIZERS, byte_level
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from specprefill_jax import SpecPrefillConfig
from specprefill_jax.chat_prompt import HEAD_TOKENS, QUESTION_TOKENS, TAIL_TOKENS, ChatPrompt, encode_chat
from specprefill_jax.errors import ArgumentError, TokenizerError
from specprefill_jax.planning import Plan, plan
from specprefill_jax.tokens import Tokenizer

SMOLLM2 = Backend.from_str(gzip.decompress((DATA / "tokenizers/smollm2/tokenizer.json.gz").read_bytes()).decode())
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# In the manner of Llama 3.1's: tools in the first user message, contents trimmed, results of tools as JSON.
LLAMA = """{{- '<|begin|>' }}
{%- if messages[0].role == 'system' %}
    {%- set instructions = messages[0].content | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set instructions = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|head|>system<|/head|>\\n\\nKnowledge ends: never\\n' ~ instructions ~ '<|turn|>' }}
{%- if tools %}
    {{- '<|head|>user<|/head|>\\n\\nThese can be called, by JSON alone:\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=2) ~ '\\n' }}{% endfor %}
    {{- rest[0].content | trim ~ '<|turn|>' }}
    {%- set rest = rest[1:] %}
{%- endif %}
{%- for m in rest %}
    {%- if m.tool_calls %}
        {{- '<|head|>assistant<|/head|>\\n\\n' }}
        {%- set call = m.tool_calls[0].function %}
        {{- '{"name": "' ~ call.name ~ '", "parameters": ' ~ call.arguments | tojson ~ '}<|turn|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|head|>ipython<|/head|>\\n\\n' ~ m.content | tojson ~ '<|turn|>' }}
    {%- else %}
        {{- '<|head|>' ~ m.role ~ '<|/head|>\\n\\n' ~ m.content | trim ~ '<|turn|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": f"Does thing number {number}, and says in detail how it went. " * 4,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for number in range(12)
]


def smollm2(template: str = CHATML) -> Tokenizer:
    return Tokenizer(SMOLLM2, chat_templates={"default": template})


def words(word: str, count: int) -> str:
    return " ".join(f"{word}{number}" for number in range(count))


def message(role: str, content: object, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def forced_mask(prompt: ChatPrompt) -> np.ndarray:
    """bool [M], after checking the spans' form."""
    mask, end = np.zeros(len(prompt.ids), np.bool_), -1
    for start, stop in prompt.forced_spans:
        assert end < start < stop <= len(prompt.ids)
        mask[start:stop] = True
        end = stop
    return mask


def dropped(tokenizer: Tokenizer, prompt: ChatPrompt) -> list[str]:
    """The texts between the forced spans."""
    edges = [0, *itertools.chain.from_iterable(prompt.forced_spans), len(prompt.ids)]
    gaps = [prompt.ids[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
    return [tokenizer.decode(gap, skip_special_tokens=False) for gap in gaps]


def checked(tokenizer: Tokenizer, messages: list, **options: object) -> ChatPrompt:
    """The prompt; its ids are `Tokenizer.encode_chat`'s."""
    prompt = encode_chat(tokenizer, messages, **options)
    assert prompt.ids == tokenizer.encode_chat(messages, **options)
    if not options.get("add_generation_prompt", True):
        assert prompt.generation_tail == 0
    return prompt


def expected_mask(tokenizer: Tokenizer, ids: list[int], text: str, contents: list[tuple[int, int, bool, bool]]):
    """Forced tokens by bytes. `contents`: characters (start, end) without outer white space, may be dropped, is last.

    For the last user message its parts; written to be read, not to be quick.
    """
    ends = np.cumsum([len(tokenizer.token_bytes(index)) for index in ids])
    starts = np.concatenate([[0], ends[:-1]])
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    forced = np.ones(len(ids), np.bool_)
    inside = []
    for start, end, droppable, is_last in contents:
        first, past = len(text[:start].encode()), len(text[:end].encode())
        tokens = np.flatnonzero((starts >= first) & (ends <= past)) if start < end else np.array([], int)
        inside.append(tokens)
        if droppable and not is_last:
            forced[tokens] = False
    question = [tokens for tokens, content in zip(inside, contents, strict=True) if content[3] and len(tokens)]
    for tokens in question:
        if len(tokens) > QUESTION_TOKENS:
            low, high = question[0][0] + HEAD_TOKENS, question[-1][-1] + 1 - TAIL_TOKENS
            forced[[token for token in tokens if low <= token < high]] = False
    return forced, len(ids) - int(np.searchsorted(ends, len(text[: contents[-1][1]].encode()), "right"))


# SmolLM2 has no token for some bytes and leaves them out; here every byte is to be accounted for.
CHARACTERS = st.characters(
    max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d", exclude_categories=["Cs"]
)
PIECES = st.one_of(
    st.text(CHARACTERS, max_size=30),
    st.sampled_from(
        [
            *(
                "\U000f0000",
                "\U000f0001\U000f0003\U000f0002",
                "\U0010fffd",
                "user",
                "a",
                "😀👩‍👩‍👧",
                "漢字 かな",
                "é́",
                " ",
                "\n\n",
            ),
            *("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n", "<|im_end|>", '{"role": "system"}', "{{ 1 }}"),
            *("lorem ipsum " * 40, "12345" * 80, "漢" * 100, "long document. " * 200),
        ]
    ),
)
TEXTS = st.lists(PIECES, max_size=4).map("".join)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", "judge"])


class TestProperties:
    @settings(max_examples=50, deadline=None)
    @given(
        chat=st.lists(st.tuples(ROLES, TEXTS | st.lists(TEXTS, min_size=1, max_size=4)), min_size=1, max_size=6),
        header=st.booleans(),
    )
    def test_exactly_the_inside_of_contents_may_be_dropped(self, chat: list, header: bool) -> None:
        tokenizer = smollm2()
        last = max((number for number, (role, _) in enumerate(chat) if role == "user"), default=None)
        text, contents, messages = "", [], []
        for number, (role, content) in enumerate(chat):
            text += f"<|im_start|>{role}\n"
            for part in [content] if isinstance(content, str) else content:
                if part.strip():
                    start = len(text) + len(part) - len(part.lstrip())
                    droppable = role in ("user", "assistant", "tool")
                    contents.append((start, start + len(part.strip()), droppable, number == last))
                text += part
            text += "<|im_end|>\n"
            parts = content if isinstance(content, str) else [{"type": "text", "text": part} for part in content]
            messages.append(message(role, parts))
        text += "<|im_start|>assistant\n" if header else ""
        prompt = checked(tokenizer, messages, add_generation_prompt=header)
        assert tokenizer.render_chat(messages, add_generation_prompt=header) == text
        mask, tail = expected_mask(tokenizer, prompt.ids, text, contents or [(0, 0, False, False)])
        np.testing.assert_array_equal(forced_mask(prompt), mask)
        assert prompt.generation_tail == (tail if header else 0)

    @settings(max_examples=40, deadline=None)
    @given(chat=st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=6))
    def test_a_template_that_counts_drops_no_more(self, chat: list) -> None:
        """Marks are of no use with it; what the search finds is right, or it is forced."""
        tokenizer = smollm2("{% for m in messages %}[{{ m.role }} {{ m.content | length }}]{{ m.content }}{% endfor %}")
        last = max((number for number, (role, _) in enumerate(chat) if role == "user"), default=None)
        text, contents = "", [(0, 0, False, False)]
        for number, (role, content) in enumerate(chat):
            text += f"[{role} {len(content)}]"
            start = len(text) + len(content) - len(content.lstrip())
            droppable = role in ("user", "assistant", "tool")
            contents.append((start, start + len(content.strip()), droppable, number == last))
            text += content
        prompt = checked(tokenizer, [message(role, content) for role, content in chat])
        mask, _ = expected_mask(tokenizer, prompt.ids, text, contents)
        assert (forced_mask(prompt) >= mask).all()

    @settings(max_examples=20, deadline=None)
    @given(contents=st.lists(TEXTS, min_size=2, max_size=5), system=TEXTS, name=st.sampled_from(sorted(TOKENIZERS)))
    def test_system_prompt_and_tools_are_always_forced(self, contents: list[str], system: str, name: str) -> None:
        """For tokenizers that normalise, split at spaces or fall to bytes, too: by the texts that may be dropped."""
        tokenizer = Tokenizer(TOKENIZERS[name]._backend, chat_templates={"default": LLAMA})
        roles = itertools.cycle(["user", "assistant"])
        messages = [message("system", "SYSTEM " + system), *map(message, roles, contents)]
        prompt = checked(tokenizer, messages, tools=TOOLS[:1])
        ids, offsets = tokenizer.encode_with_offsets(tokenizer.render_chat(messages, TOOLS[:1]))
        text = tokenizer.render_chat(messages, TOOLS[:1])
        opening = text.index("<|turn|>", text.index('"required"')) - len(contents[0].strip())
        mask = forced_mask(prompt)
        assert ids == prompt.ids
        for (start, end), forced in zip(offsets, mask, strict=True):
            assert forced or start >= opening, text[start:end]
        assert mask[-prompt.generation_tail :].all()


LONG = {"user": words("ask", 300), "assistant": words("reply", 300), "tool": words("found", 300)}
TRANSCRIPT = [
    message("system", words("rule", 300)),
    message("user", LONG["user"]),
    message("assistant", f" \n{LONG['assistant']}\n "),
    message("tool", LONG["tool"]),
    message("user", "Now, what was it?"),
]
ALL = {"user", "assistant", "tool"}
HOSTILE = {
    # The marks come through.
    "trims": ("{{ m.content | trim }}", ALL),
    "strips and splits": ("{{ m.content.strip().split('</think>')[-1].lstrip('\n') }}", ALL),
    "writes JSON": ("{{ m.content | tojson }}", ALL),
    "upper case": ("{{ m.content | upper }}", ALL),
    "writes twice": ("{{ m.content }}/{{ m.content }}", ALL),
    "leaves out": ("{{ m.content if m.role != 'assistant' else 'nothing' }}", {"user", "tool"}),
    "without the first word": ("{{ m.content.strip().split(' ', 1)[-1] }}", set()),
    # They come through further inside.
    "looks at the start": ("{{ 'found!' if m.content.startswith('found0') }}{{ m.content }}", ALL),
    "looks at the end": ("{{ 'ask!' if m.content.endswith('found299') }}{{ m.content }}", ALL),
    # The contents are looked for.
    "counts": ("{{ m.content | length }} {{ m.content }}", ALL),
    "escapes": ("{{ m.content | tojson(ensure_ascii=True) }}", ALL),
    "shows an object": ("{{ [m.content] }}", ALL),
    "refuses": (
        "{% if m.role == 'tool' and m.content | length != 2589 %}{{ raise_exception('no') }}{% endif %}{{ m.content }}",
        ALL,
    ),
    # Nothing is known of what was written.
    "cuts": ("{{ m.content[:900] }}", set()),
    "turns around": ("{{ m.content | reverse }}", set()),
}


class TestTemplates:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_hostile_templates_lose_nothing_of_their_own(self, name: str) -> None:
        body, expected = HOSTILE[name]
        template = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + body + "<|im_end|>{% endfor %}reply0 found0:"
        tokenizer = smollm2(template)
        prompt = checked(tokenizer, TRANSCRIPT)
        texts = dropped(tokenizer, prompt)
        origins = [[role for role, long in LONG.items() if text in long or text in long.upper()] for text in texts]
        assert all(len(roles) == 1 for roles in origins)
        assert {roles[0] for roles in origins} == expected
        assert all(len(text.split()) > 250 for text in texts)
        assert len(texts) == len(expected) * (2 if name == "writes twice" else 1)

    def test_marks_further_inside(self) -> None:
        """A template that looks at the start of a content, and writes it so that it cannot be looked for."""
        body = "{{ '[log]' if m.content.startswith('found0') }}{{ m.content | tojson }}"
        tokenizer = smollm2("{% for m in messages %}{{ m.role }}: " + body + "\n{% endfor %}")
        prompt = checked(tokenizer, [message("tool", LONG["tool"].replace(" ", "\n")), message("user", "Well?")])
        texts = dropped(tokenizer, prompt)
        assert len(texts) == 1
        assert texts[0] in LONG["tool"].replace(" ", "\\n")
        assert len(texts[0]) > len(LONG["tool"]) - 2 * 80

    def test_offsets_that_leave_out_spaces(self) -> None:
        """The token of the template's space and the content's first letter names the letter alone, and is forced."""
        backend = byte_level()
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
        template = "{{ messages[0].content }} wall: {{ messages[1].content }}!"
        tokenizer = Tokenizer(backend, chat_templates={"default": template})
        prompt = checked(tokenizer, [message("tool", "w" + " w" * 50), message("tool", "w" + " w" * 50)])
        assert tokenizer.encode_with_offsets("a w")[1] == [(0, 1), (2, 3)]
        assert dropped(tokenizer, prompt) == ["w" + " w" * 49, " w" * 50]

    def test_content_in_another_order(self) -> None:
        """And the last user message is known from the messages, not from where it stands."""
        tokenizer = smollm2("{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
        texts = dropped(tokenizer, checked(tokenizer, TRANSCRIPT))
        assert [text.split()[1] for text in texts] == ["found1", "reply1", "ask1"]

    def test_content_that_is_also_template_text_is_not_taken_for_it(self) -> None:
        """A template that counts leaves only the search, which believes no content that could stand in two places."""
        notice = words("notice", 100)
        body = "{% for m in messages %}{{ m.role }}{{ m.content | length }}{{ m.content }}\n{% endfor %}"
        tokenizer = smollm2(notice + "\n" + body)
        messages = [message("user", notice), message("assistant", LONG["assistant"]), message("user", "user")]
        texts = dropped(tokenizer, checked(tokenizer, messages))
        assert [text.split()[1] for text in texts] == ["reply1"]

    @pytest.mark.parametrize(
        "content", [{"text": "x"}, None, 7, [], [{"type": "image"}], [{"type": "text", "text": 3}]]
    )
    def test_other_contents_are_forced(self, content: object) -> None:
        tokenizer = smollm2("{% for m in messages %}{{ m.role }} {{ m.content | default('-') }}\n{% endfor %}")
        prompt = checked(tokenizer, [message("tool", content), message("tool", LONG["tool"]), message("user", "Hi")])
        assert len(dropped(tokenizer, prompt)) == 1
        whole = checked(tokenizer, [message("user", content)])
        assert whole.forced_spans == ((0, len(whole.ids)),)
        assert whole.generation_tail == len(whole.ids)

    def test_a_chat_that_holds_every_mark(self) -> None:
        """No character is left to mark with, so contents are looked for; as one is not there, none is believed."""
        every = "".join(chr(code) for code in range(0xF0000, 0x10FFFE))
        messages = [message("tool", every), message("assistant", LONG["assistant"]), message("user", "What is this?")]
        template = "{% for m in messages %}{{ m.role }} {{ m.content if m.role != 'tool' }}\n{% endfor %}"
        prompt = checked(smollm2(template), messages)
        assert prompt.forced_spans == ((0, len(prompt.ids)),)

    def test_an_empty_render_and_errors(self) -> None:
        assert encode_chat(smollm2("{{ '' }}"), [message("user", "x")]) == ChatPrompt([], (), 0)
        with pytest.raises(ArgumentError, match="messages"):
            encode_chat(smollm2(), [])
        with pytest.raises(TokenizerError, match="no chat template"):
            encode_chat(Tokenizer(SMOLLM2), [message("user", "x")])
        with pytest.raises(ArgumentError, match="lone surrogate"):
            encode_chat(smollm2(), [message("user", "x\ud800")])

    @pytest.mark.parametrize(
        "body", ["{{ m.content }}", "{{ m.content }}{{ m.content | length }}", "{{ m.content[:9] }}"]
    )
    def test_work_does_not_grow_with_the_turns(self, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = smollm2("{% for m in messages %}{{ m.role }}: " + body + "\n{% endfor %}")
        calls = []

        def counted(name: str, method: Callable) -> Callable:
            return lambda *args, **more: calls.append(name) or method(*args, **more)

        for name in ("render_chat", "encode_with_offsets", "encode"):
            monkeypatch.setattr(tokenizer, name, counted(name, getattr(tokenizer, name)))
        messages = [message(role, "ab" * 40) for role in ("user", "tool") * 400]
        encode_chat(tokenizer, messages)
        assert calls.count("render_chat") <= 3
        assert calls.count("encode_with_offsets") == 1
        assert "encode" not in calls


class TestQuestion:
    """What is forced of the last user message."""

    def forced(self, content: object) -> list[bool]:
        """Which tokens of a message are forced."""
        prompt = checked(smollm2(), [message("user", content)])
        return forced_mask(prompt)[3 : -prompt.generation_tail].tolist()

    @pytest.mark.parametrize("length", [1, 255, 256, 257, 300, 1000])
    def test_whole_or_both_ends(self, length: int) -> None:
        inner = max(0, length - 32 - 64) if length > 256 else 0
        expected = [True] * 32 + [False] * inner + [True] * 64 if inner else [True] * length
        assert self.forced("7" * length) == expected

    def test_parts(self) -> None:
        """A short part is whole wherever it stands; of the message as a whole both ends are."""
        parts = [{"type": "text", "text": "7" * length} for length in (10, 500, 256, 257, 300)]
        expected = [True] * 32 + [False] * (510 - 32) + [True] * 256 + [False] * (257 + 300 - 64) + [True] * 64
        assert self.forced(parts) == expected

    def test_generation_tail(self) -> None:
        """From the mark that ends the last message on; none where no header is asked for."""
        tokenizer = smollm2()
        prompt = checked(tokenizer, [message("user", "Hi")])
        assert tokenizer.decode(prompt.ids[-prompt.generation_tail :], False) == "<|im_end|>\n<|im_start|>assistant\n"
        assert checked(tokenizer, [message("user", "Hi")], add_generation_prompt=False).generation_tail == 0

    def test_omlx_1401_the_question_about_pasted_code_is_whole_at_either_end(self) -> None:
        """https://github.com/jundot/omlx/issues/1401: pasted code; the question before it, behind it, or a part."""
        tokenizer, question = smollm2(), "Quote the twenty lines after the comment that says `retry`, exactly."
        code = "\n".join(f"    value_{number} = compute({number}, retry={number % 7})" for number in range(300))
        parts = [{"type": "text", "text": code}, {"type": "text", "text": question}]
        for content in (f"{question}\n\n{code}", f"{code}\n\n{question}", parts, parts[::-1]):
            prompt = checked(tokenizer, [message("system", "You are careful."), message("user", content)])
            texts = dropped(tokenizer, prompt)
            assert len(texts) == 1
            assert texts[0] in code
            assert len(texts[0]) > len(code) * 0.9
            assert plan_of(prompt).engaged


def plan_of(prompt: ChatPrompt, **changes: object) -> Plan:
    """The plan by the defaults, but for `changes`."""
    return plan(
        len(prompt.ids),
        SpecPrefillConfig(**changes),
        forced_spans=prompt.forced_spans,
        generation_tail=prompt.generation_tail,
    )


def agent(turns: int, size: int) -> list[dict[str, object]]:
    """An agent's transcript: system prompt, task, then calls of tools with results of about `size` characters."""
    messages = [
        message("system", "You mend programs. " + words("rule", 200)),
        message("user", "Find out why it fails."),
    ]
    for turn in range(turns):
        call = {"name": f"tool_{turn}", "arguments": {"path": f"src/part_{turn}/main.py", "note": "<|turn|>é"}}
        messages.append(message("assistant", None, tool_calls=[{"type": "function", "function": call}]))
        lines = "".join(f'{number}: log "{turn}" step {number * turn} went {{well}}\n' for number in range(size))
        messages.append(message("tool", lines[:size]))
    return messages


class TestAgents:
    """Transcripts of agents by a template in Llama 3.1's manner: complaints of other implementations' users."""

    def read(self, messages: list, **changes: object) -> tuple[ChatPrompt, Plan, str, list[str]]:
        """The prompt, its plan, its text, and the texts of the runs of chunks that are not forced."""
        tokenizer = smollm2(LLAMA)
        prompt = checked(tokenizer, messages, tools=TOOLS)
        planned = plan_of(prompt, **changes)
        tokens = np.repeat(planned.forced_mask(), planned.chunk_size)[: planned.num_tokens]
        edges = np.flatnonzero(np.diff(np.concatenate([[True], tokens, [True]]).astype(int)))
        texts = [tokenizer.decode(prompt.ids[i:j], False) for i, j in zip(edges[::2], edges[1::2], strict=True)]
        return prompt, planned, tokenizer.render_chat(messages, tools=TOOLS), texts

    def test_lucebox_75_tool_results_are_what_is_dropped(self) -> None:
        """https://github.com/Luce-Org/lucebox/pull/75: 99 % of a transcript is tool output, so that must shrink."""
        messages = agent(10, 7000)
        prompt, planned, text, texts = self.read(messages)
        results = [json.dumps(m["content"], ensure_ascii=False) for m in messages if m["role"] == "tool"]
        assert len(text) > 70_000
        opening = smollm2(LLAMA).encode(text[: text.index("<|head|>assistant")], False)
        assert len(opening) > 2000
        assert planned.engaged
        assert len(texts) == 10
        assert all(dropped in result for dropped, result in zip(texts, results, strict=True))
        assert sum(map(len, texts)) > 0.95 * sum(map(len, results))
        assert len(planned.forced_chunks) < 0.5 * planned.kept_chunks
        assert set(range(len(opening) // 32)) <= set(planned.forced_chunks)
        assert prompt.forced_spans[0][0] == 0

    def test_omlx_2439_the_end_of_the_template_survives_tool_results(self) -> None:
        """https://github.com/jundot/omlx/issues/2439: header and tail are forced, so no score can lose them."""
        prompt, planned, text, _ = self.read(agent(6, 5000), tail_tokens=1)
        assert text.endswith('"<|turn|><|head|>assistant<|/head|>\n\n')
        header = smollm2(LLAMA).decode(prompt.ids[-prompt.generation_tail :], False)
        assert header.endswith("<|turn|><|head|>assistant<|/head|>\n\n")
        assert prompt.forced_spans[-1] == (len(prompt.ids) - prompt.generation_tail, len(prompt.ids))
        last = range((len(prompt.ids) - prompt.generation_tail) // 32, planned.num_chunks)
        assert set(last) <= set(planned.forced_chunks)

    def test_omlx_2443_the_system_prompt_is_the_same_forced_prefix_in_every_turn(self) -> None:
        """https://github.com/jundot/omlx/issues/2443: what a cache shares between turns is never dropped."""
        short, _, text, _ = self.read(agent(0, 0))
        assert short.forced_spans == ((0, len(short.ids)),)
        shared = smollm2(LLAMA).encode(text[: text.index("Find out why")], False)
        for turns in (1, 8):
            prompt, planned, _, _ = self.read(agent(turns, 4000), keep_rate=0.6)
            assert planned.engaged
            assert prompt.ids[: len(shared)] == shared == short.ids[: len(shared)]
            assert prompt.forced_spans[0][0] == 0
            assert prompt.forced_spans[0][1] >= len(shared)
            assert set(range(-(-len(shared) // 32))) <= set(planned.forced_chunks)

    def test_omlx_548_every_call_of_a_long_tool_loop_is_whole(self) -> None:
        """https://github.com/jundot/omlx/issues/548: answers went bad after a few turns; headers and calls all stay."""
        messages = agent(8, 3000)
        for turns in (1, 4, 8):
            _, _, text, texts = self.read(messages[: 2 + 2 * turns])
            kept = text
            for part in texts:
                before, found, after = kept.partition(part)
                assert found
                kept = before + "…" + after
            for turn in range(turns):
                path = f"src/part_{turn}/main.py"
                call = f'{{"name": "tool_{turn}", "parameters": {{"path": "{path}", "note": "<|turn|>é"}}}}'
                assert f"<|head|>assistant<|/head|>\n\n{call}<|turn|><|head|>ipython<|/head|>\n\n" in kept
            assert kept.count("…") == turns

    @settings(max_examples=12, deadline=None)
    @given(turns=st.integers(0, 3), size=st.integers(0, 6000), rate=st.floats(0.01, 1.0))
    def test_rapid_mlx_1106_forced_spans_never_take_the_whole_budget(self, turns: int, size: int, rate: float) -> None:
        """https://github.com/raullenchai/Rapid-MLX/pull/1106: either something is ranked, or all is read."""
        _, planned, _, _ = self.read(agent(turns, size), keep_rate=rate)
        if planned.engaged:
            assert len(planned.forced_chunks) < planned.kept_chunks < planned.num_chunks
        else:
            assert planned.kept_chunks == planned.num_chunks
            assert planned.num_kept_tokens == planned.num_tokens
