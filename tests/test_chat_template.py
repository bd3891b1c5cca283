"""Chat templates: what they may use, that they equal transformers', and what hostile ones run into."""

import time

import pytest
from small_tokenizers import CHAT, TOKENIZERS, byte_level

from specprefill_jax import chat_template
from specprefill_jax.chat_template import ChatTemplate
from specprefill_jax.errors import ArgumentError, TokenizerError
from specprefill_jax.tokens import Tokenizer


class TestChatTemplate:
    def chat(self, template: str, **special: str) -> Tokenizer:
        return Tokenizer(byte_level(), chat_templates={"default": template}, special_tokens=special, source="here")

    def test_helpers(self) -> None:
        template = (
            "{{ bos_token }}\n{% for message in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n"
            "{{ message.role ~ ':' }}{% generation %}{{ message['content'] | trim }}{% endgeneration %}\n"
            "{% endfor %}\n{{ tools | tojson }}{{ tools | tojson(indent=1) }}{{ strftime_now('%Y') | length }}"
            "{{ 7 % 4 }}{{ 'ab' * 2 }}{{ [1, 2] | join('-') }}{{ 'a-b'.replace('-', '+') }}{{ '{:>3}'.format(1) }}"
            "{{ none is none and missing is undefined }}{{ mode }}{% if add_generation_prompt %}!{% endif %}"
        )
        tokenizer = self.chat(template, bos_token="<|begin|>")
        messages = [{"role": "user", "content": " <é> "}, {"role": "user", "content": "never"}]
        text = tokenizer.render_chat(messages, tools=[{"b": "<", "a": 1}], variables={"mode": "M", "tools": "lost"})
        assert text == '<|begin|>\nuser:<é>[{"b": "<", "a": 1}][\n {\n  "b": "<",\n  "a": 1\n }\n]43abab1-2a+b  1TrueM!'
        assert tokenizer.encode_chat(messages)[0] == tokenizer.bos_token_id
        assert tokenizer.render_chat(messages, add_generation_prompt=False).endswith("True")

    def test_equal_to_transformers(self) -> None:
        from transformers import PreTrainedTokenizerFast

        template = (
            "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}\n  {%- if m.tool_calls is defined %}\n"
            "{{ m.tool_calls | tojson(indent=2) }}\n  {% endif %}\n{% macro show(x) %}<{{ x }}>{% endmacro %}"
            "{{ show(m.role) }} {{ m.content if m.content is string else m.content | length }}"
            "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{% set tail %} {{ ns.n ~ 'x' }}{% endset %}{{ tail }}"
        )
        messages = [
            {"role": "user", "content": "a <b> & 'c'", "tool_calls": None},
            {"role": "assistant", "content": [{"type": "text", "text": "q"}], "tool_calls": [{"name": "é", "n": 1.5}]},
        ]
        theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<|begin|>", chat_template=template)
        expected = theirs.apply_chat_template(messages, tokenize=False)
        assert self.chat(template, bos_token="<|begin|>").render_chat(messages) == expected
        assert '"name": "é"' in expected

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{% for %}", "does not compile"),
            ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "does not compile: RecursionError"),
            ("{{ raise_exception('roles must alternate') }}", "failed: roles must alternate"),
            ("{{ messages[0].content.none.more }}", "has no attribute 'none'"),
            ("{{ 'a' + 1 }}", "TypeError"),
            ("{{ ''.__class__.__mro__ }}", "unsafe"),
            ("{{ messages.append(1) }}", "unsafe"),
            ("{% include 'secret' %}", "no loader"),
            ("{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}", "RecursionError"),
            ("{% for i in range(10 ** 9) %}{% endfor %}", "[Rr]ange"),
            ("{{ 'a' * 10**10 }}", "a product above"),
            ("{{ [1] * (10**10) }}", "a product above"),
            ("{{ 2 ** 100000 }}", "operands this large"),
            ("{{ '%99999999999d' % 1 }}", "formatting with %"),
            ("{{ '%99999999999d' | format(1) }}", "No filter named 'format'"),
            ("{{ '{:>99999999999}'.format(1) }}", "a format this wide"),
            ("{{ '{:>{}}'.format(1, 999999999) }}", "a format this wide"),
            ("{{ ''.ljust(1000000000) }}", "1000000000 is too wide"),
            ("{{ '' | center(1000000000) }}", "1000000000 is too wide"),
            ("{{ messages | tojson(indent=1000000000) }}", "1000000000 is too wide"),
            ("{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}", "output is longer"),
        ],
    )
    def test_hostile_templates_are_errors(self, template: str, message: str) -> None:
        with pytest.raises(TokenizerError, match=message) as error:
            self.chat(template).render_chat(CHAT)
        assert str(error.value).startswith("here: the chat template")

    @pytest.mark.parametrize(
        "growth",
        [
            "{% set ns.s = ns.s ~ ns.s %}",
            "{% set ns.s = ns.s + ns.s %}",
            "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}",
            "{% set ns.s = ns.s | replace('a', 'aaaaaaaa') %}",
            "{% set ns.s = ns.s.replace('a', 'aaaaaaaa') %}",
            "{% set ns.s = [ns.s, ns.s] | join %}",
            "{% set ns.s = ','.join([ns.s, ns.s]) %}",
            "{% set ns.s = twice(ns.s) %}",
        ],
    )
    def test_doubling_ends_early(self, growth: str) -> None:
        macro = "{% macro twice(s) %}{{ s }}{{ s }}{% endmacro %}"
        template = macro + "{% set ns = namespace(s='aa') %}{% for i in range(60) %}" + growth + "{% endfor %}"
        with pytest.raises(TokenizerError, match="more than 33554432"):
            self.chat(template).render_chat(CHAT)

    def test_growing_numbers_end_early(self) -> None:
        template = "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}"
        with pytest.raises(TokenizerError, match="a product above"):
            self.chat(template).render_chat(CHAT)

    @pytest.mark.parametrize(
        "template",
        [
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        ],
    )
    def test_endless_templates_stop(self, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.05)
        start = time.monotonic()
        with pytest.raises(TokenizerError, match=r"it ran longer than 0\.05 s"):
            self.chat(template).render_chat(CHAT)
        assert time.monotonic() - start < 30

    def test_long_template(self) -> None:
        with pytest.raises(TokenizerError, match="1048577 characters, at most 1048576"):
            ChatTemplate("x" * (1 << 20) + "y", "here")

    def test_no_template(self) -> None:
        tokenizer = TOKENIZERS["bytes"]
        assert not tokenizer.has_chat_template
        with pytest.raises(TokenizerError, match="no chat template named 'default'"):
            tokenizer.render_chat(CHAT)

    @pytest.mark.parametrize("messages", [[], "hi", None, {"role": "user"}, [1], [{"content": "x"}], [{"role": 3}]])
    def test_messages_of_another_shape(self, messages: object) -> None:
        with pytest.raises(ArgumentError, match="messages"):
            self.chat("x").render_chat(messages)
