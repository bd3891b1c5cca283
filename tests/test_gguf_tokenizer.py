"""Tokenizers out of GGUF metadata, sound and damaged. (SmolLM2's goldens are in test_tokens.py.)"""

import random
from pathlib import Path

import pytest
from small_tokenizers import CHAT, TOKENIZERS, write_gguf

from specprefill_jax.errors import TokenizerError
from specprefill_jax.tokens import Tokenizer


class TestGguf:
    MERGES = ("h e", "l l", "he ll", "Ġ w", "ð Ł", "ã ģ")

    def write(self, path: Path, pre: str = "llama-bpe", **changes: object) -> Path:
        return write_gguf(path / "model.gguf", TOKENIZERS["bytes"], list(self.MERGES), pre, **changes)

    def test_llama_bpe(self, tmp_path: Path) -> None:
        ends = {"tokenizer__ggml__eos_token_id": 263, "tokenizer__ggml__eot_token_id": 3}
        tokenizer = Tokenizer.from_gguf(self.write(tmp_path, tokenizer__ggml__bos_token_id=262, **ends))
        assert tokenizer.encode("hell")[0] == 262  # Llama 3 puts BOS in front
        assert [tokenizer._backend.id_to_token(index) for index in tokenizer.encode("hell")[1:]] == ["hell"]
        assert tokenizer.encode("hell", add_special_tokens=False) == tokenizer.encode("hell")[1:]
        assert tokenizer.eos_token_ids == (263, 3)
        # user-defined tokens are found in text and are not special
        tool = tokenizer.token_id("«tool»")
        assert tokenizer.encode("x«tool»")[-1] == tool
        assert tokenizer.decode([tool]) == TOKENIZERS["bytes"].decode([tool])
        pieces = tokenizer._backend.pre_tokenizer.pre_tokenize_str("I'LL pay 12345\r\n\r\n  now")
        assert [piece for piece, _ in pieces] == ["I", "'LL", "Ġpay", "Ġ", "123", "45", "čĊčĊ", "Ġ", "Ġnow"]

    def test_bos_only_where_the_file_says_so(self, tmp_path: Path) -> None:
        off = Tokenizer.from_gguf(self.write(tmp_path, tokenizer__ggml__add_bos_token=False))
        assert off.encode("z") == off.encode("z", add_special_tokens=False)
        on = Tokenizer.from_gguf(self.write(tmp_path, "smollm", tokenizer__ggml__add_bos_token=True))
        assert on.encode("z") == [1, *on.encode("z", add_special_tokens=False)]

    def test_smollm_cuts_digits(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.from_gguf(self.write(tmp_path, "smollm"))
        pieces = tokenizer._backend.pre_tokenizer.pre_tokenize_str("pay 12345")
        assert [piece for piece, _ in pieces] == ["pay", "Ġ", "1", "2", "3", "4", "5"]

    def test_named_templates(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, tokenizer__chat_template="A", tokenizer__chat_template__tool_use="B")
        tokenizer = Tokenizer.from_gguf(path)
        assert (tokenizer.render_chat(CHAT), tokenizer.render_chat(CHAT, tools=[{}])) == ("A", "B")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model='llama' is not supported"),
            ({"tokenizer__ggml__pre": "deepseek-llm"}, "tokenizer.ggml.pre='deepseek-llm' is not supported"),
            ({"tokenizer__ggml__pre": None}, "tokenizer.ggml.pre=None is not supported"),
            ({"tokenizer__ggml__tokens": None}, "tokenizer.ggml.tokens is missing"),
            ({"tokenizer__ggml__tokens": [1, 2]}, "tokenizer.ggml.tokens is missing or no list of str"),
            ({"tokenizer__ggml__token_type": [1, 1]}, "266 tokens but 2 entries in tokenizer.ggml.token_type"),
            ({"tokenizer__ggml__merges": ["he", "l l"]}, "'he' is not two tokens"),
            ({"tokenizer__ggml__merges": ["h e l"]}, "'h e l' is not two tokens"),
            ({"tokenizer__ggml__merges": ["xx yy"]}, "merges do not fit the vocabulary"),
            ({"tokenizer__ggml__eos_token_id": 400}, "tokenizer.ggml.eos_token_id=400 is outside .* 266"),
            ({"tokenizer__ggml__bos_token_id": "x"}, "tokenizer.ggml.bos_token_id='x'"),
        ],
    )
    def test_unsupported_and_damaged_metadata(self, tmp_path: Path, changes: dict[str, object], message: str) -> None:
        with pytest.raises(TokenizerError, match=message) as error:
            Tokenizer.from_gguf(self.write(tmp_path, **changes))
        assert "model.gguf" in str(error.value)

    def test_repeated_token(self, tmp_path: Path) -> None:
        tokens = [*list(TOKENIZERS["bytes"].vocabulary)[:-1], "hell"]
        with pytest.raises(TokenizerError, match="lists 'hell' more than once"):
            Tokenizer.from_gguf(self.write(tmp_path, tokenizer__ggml__tokens=tokens))

    def test_damaged_files(self, tmp_path: Path) -> None:
        whole = self.write(tmp_path).read_bytes()
        bad = tmp_path / "bad.gguf"
        for size in [*range(1, 64), *range(64, len(whole), len(whole) // 50)]:
            bad.write_bytes(whole[:size])
            with pytest.raises(TokenizerError, match=r"bad\.gguf: the file ends within its metadata"):
                Tokenizer.from_gguf(bad)
        for content, message in [
            (b"", "cannot be read"),
            (b"GGML" + whole[4:], "not a GGUF file"),
            (whole[:4] + b"\x01\0\0\0" + whole[8:], "version 1 is not supported"),
            (whole.replace(b"llama-bpe", b"llama\xff\xffpe"), "not UTF-8"),
        ]:
            bad.write_bytes(content)
            with pytest.raises(TokenizerError, match=message):
                Tokenizer.from_gguf(bad)
        with pytest.raises(TokenizerError, match=r"missing\.gguf: cannot be read"):
            Tokenizer.from_gguf(tmp_path / "missing.gguf")

    def test_random_damage_is_always_a_tokenizer_error(self, tmp_path: Path) -> None:
        whole, bad = self.write(tmp_path).read_bytes(), tmp_path / "bad.gguf"
        randomness, errors = random.Random(0), 0
        for _ in range(200):
            content = bytearray(whole)
            content[randomness.randrange(8, len(content))] = randomness.randrange(256)
            bad.write_bytes(content)
            try:
                Tokenizer.from_gguf(bad)
            except TokenizerError:
                errors += 1
        assert errors > 20
