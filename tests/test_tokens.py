"""Tokenizers from folders, comparing them, and incremental decoding.

The golden ids are checked on the whole vocabulary of SmolLM2 (Apache-2.0), kept as tests/data/tokenizers/smollm2: once
read as a folder, once through a GGUF file that the test writes from it.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import CHAT, DATA, TOKENIZERS, byte_level, cut, unpack_smollm2, write_gguf
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from specprefill_jax.errors import ArgumentError, TokenizerError
from specprefill_jax.tokens import StreamDecoder, Tokenizer, same_tokenizer

GOLDEN = json.loads((DATA / "goldens/tokenizer_smollm2.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2_folder)


@pytest.fixture(scope="session")
def smollm2_merges(smollm2_folder: Path) -> list[str]:
    model = json.loads((smollm2_folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    return [" ".join(pair) for pair in model["merges"]]


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2: Tokenizer, smollm2_merges: list[str], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("gguf") / "smollm2.gguf"
    template = json.loads((DATA / "tokenizers/smollm2/tokenizer_config.json").read_text())["chat_template"]
    write_gguf(path, smollm2, smollm2_merges, tokenizer__chat_template=template)
    return Tokenizer.from_gguf(path)


@pytest.fixture(params=["folder", "gguf"])
def golden_tokenizer(request: pytest.FixtureRequest, smollm2: Tokenizer, smollm2_gguf: Tokenizer) -> Tokenizer:
    return smollm2 if request.param == "folder" else smollm2_gguf


def stream(tokenizer: Tokenizer, ids: list[int], stop: str | list[str] = (), skip: bool = True) -> list[str]:
    decoder = StreamDecoder(tokenizer, stop, skip_special_tokens=skip)
    return [*(decoder.push(index) for index in ids), decoder.flush()]


class TestGoldens:
    def test_texts(self, golden_tokenizer: Tokenizer) -> None:
        assert len(GOLDEN["texts"]) == 29
        for case in GOLDEN["texts"]:
            assert golden_tokenizer.encode(case["text"]) == case["ids"]
            assert golden_tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
            assert "".join(stream(golden_tokenizer, case["ids"], skip=False)) == case["decoded"]

    def test_chats(self, golden_tokenizer: Tokenizer) -> None:
        assert len(GOLDEN["chats"]) == 3
        for case in GOLDEN["chats"]:
            assert golden_tokenizer.encode_chat(case["messages"]) == case["ids"]

    def test_properties(self, golden_tokenizer: Tokenizer) -> None:
        assert golden_tokenizer.vocab_size == 49152
        assert golden_tokenizer.bos_token_id == 1
        assert golden_tokenizer.eos_token_ids == (2,)
        assert golden_tokenizer.has_chat_template

    def test_gguf_and_folder_are_the_same(self, smollm2: Tokenizer, smollm2_gguf: Tokenizer) -> None:
        assert smollm2.fingerprint() == smollm2_gguf.fingerprint()
        same_tokenizer(smollm2, smollm2_gguf, 49152, 49160)

    def test_transformers_reads_what_save_writes(self, smollm2_gguf: Tokenizer, tmp_path: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        smollm2_gguf.save(tmp_path / "saved")
        theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
        assert (theirs.bos_token, theirs.eos_token) == ("<|im_start|>", "<|im_end|>")
        for case in GOLDEN["texts"]:
            assert theirs.encode(case["text"]) == case["ids"]
        for case in GOLDEN["chats"]:
            rendered = theirs.apply_chat_template(case["messages"], tokenize=False, add_generation_prompt=True)
            assert rendered == smollm2_gguf.render_chat(case["messages"])

    def test_saved_folder_reads_back_identically(self, smollm2_gguf: Tokenizer, tmp_path: Path) -> None:
        smollm2_gguf.save(tmp_path)
        again = Tokenizer.from_folder(tmp_path)
        assert again.fingerprint() == smollm2_gguf.fingerprint()
        assert again.special_tokens == smollm2_gguf.special_tokens
        assert again.eos_token_ids == smollm2_gguf.eos_token_ids
        assert again.special_ids == smollm2_gguf.special_ids
        again.save(tmp_path / "twice")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


class TestEncodeAndDecode:
    def test_special_tokens_in_text_are_tokens(self) -> None:
        tokenizer = TOKENIZERS["bytes"]
        end = tokenizer.token_id("<|end|>")
        assert tokenizer.encode("he<|end|>")[-1] == end
        assert tokenizer.decode([*tokenizer.encode("he"), end]) == "he"
        assert tokenizer.decode([*tokenizer.encode("he"), end], skip_special_tokens=False) == "he<|end|>"

    def test_offsets(self) -> None:
        """In characters, not bytes; tokens of one character all name it; nothing is added in front."""
        tokenizer = TOKENIZERS["bytes"]
        ids, offsets = tokenizer.encode_with_offsets("hell é<|end|> w")
        assert ids == tokenizer.encode("hell é<|end|> w", add_special_tokens=False)
        assert offsets == [(0, 4), (4, 5), (5, 6), (5, 6), (6, 13), (13, 15)]
        assert TOKENIZERS["llama2"].encode_with_offsets("hi 日")[1] == [(0, 2), (2, 3), (3, 4)]
        assert tokenizer.encode_with_offsets("") == ([], [])
        with pytest.raises(ArgumentError, match="lone surrogate at character 1"):
            tokenizer.encode_with_offsets("a\ud800")

    def test_a_truncating_tokenizer_file_does_not_cut_prompts(self) -> None:
        backend = byte_level()
        backend.enable_truncation(4)
        backend.enable_padding(length=8)
        tokenizer = Tokenizer(backend)
        assert len(tokenizer.encode("z" * 100)) == 100
        assert len(tokenizer.encode("z")) == 1

    def test_configured_special_token_is_special_where_the_file_forgot(self) -> None:
        tokenizer = Tokenizer(byte_level([AddedToken("<eos>", special=False)]), special_tokens={"eos_token": "<eos>"})
        assert tokenizer.eos_token_ids == (tokenizer.token_id("<eos>"),)
        assert tokenizer.decode(tokenizer.encode("he<eos>")) == "he"

    @pytest.mark.parametrize("text", [None, 3, b"bytes", ["a"]])
    def test_only_text_is_encoded(self, text: object) -> None:
        with pytest.raises(ArgumentError, match="text="):
            TOKENIZERS["bytes"].encode(text)

    def test_lone_surrogate(self) -> None:
        with pytest.raises(ArgumentError, match="lone surrogate at character 2"):
            TOKENIZERS["bytes"].encode("ab\ud800")

    def test_ids(self) -> None:
        tokenizer = TOKENIZERS["bytes"]
        assert tokenizer.decode([10**6]) == ""  # a padding row of the model's head
        for bad in (-1, 1 << 32):
            with pytest.raises(ArgumentError, match="ids="):
                tokenizer.decode([bad])
            with pytest.raises(ArgumentError, match="ids="):
                StreamDecoder(tokenizer).push(bad)


class TestFolder:
    def write(self, folder: Path, **files: object) -> Path:
        byte_level().save(str(folder / "tokenizer.json"))
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
        return folder

    def test_missing_and_damaged_files(self, tmp_path: Path) -> None:
        with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
            Tokenizer.from_folder(tmp_path)
        (tmp_path / "tokenizer.json").write_text('{"model": 1')
        with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a tokenizer"):
            Tokenizer.from_folder(tmp_path)

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({"tokenizer_config": "{"}, r"tokenizer_config\.json: cannot be read as JSON"),
            ({"tokenizer_config": [1]}, r"tokenizer_config\.json: a JSON object is expected, not list"),
            ({"tokenizer_config": {"eos_token": "<nope>"}}, "eos_token='<nope>' is not in the vocabulary"),
            ({"tokenizer_config": {"eos_token": 3}}, "eos_token=3 is not the text of a token"),
            ({"tokenizer_config": {"chat_template": 3}}, "chat_template is neither"),
            ({"tokenizer_config": {"chat_template": [{"name": "default"}]}}, "chat_template is neither"),
            ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "<x>"}}}}, "tokens by id"),
            ({"tokenizer_config": {"added_tokens_decoder": {"300": {"content": "<x>"}}}}, "wants id 300 for '<x>'"),
            ({"generation_config": {"eos_token_id": [1, 999]}}, r"eos_token_id=\[1, 999\] is outside .* 264 tokens"),
            ({"config": {"eos_token_id": True}}, "eos_token_id=True"),
        ],
    )
    def test_bad_configuration(self, tmp_path: Path, files: dict[str, object], message: str) -> None:
        with pytest.raises(TokenizerError, match=message):
            Tokenizer.from_folder(self.write(tmp_path, **files))

    def test_eos_ids_of_all_files(self, tmp_path: Path) -> None:
        config = {"eos_token": {"content": "<|end|>"}, "bos_token": "<|begin|>", "pad_token": "<not there>"}
        folder = self.write(tmp_path, tokenizer_config=config, config={"eos_token_id": 9})
        assert Tokenizer.from_folder(folder).eos_token_ids == (9, 263)
        (folder / "generation_config.json").write_text('{"eos_token_id": [5, 263]}')
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer.eos_token_ids == (5, 263)
        assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
        assert tokenizer.vocab_size == 264
        tokenizer.save(tmp_path / "saved")
        assert Tokenizer.from_folder(tmp_path / "saved").eos_token_ids == (5, 263)

    def test_special_tokens_map_and_listed_added_tokens(self, tmp_path: Path) -> None:
        listed = {"264": {"content": "<tool>", "special": True}, "263": {"content": "<|end|>"}}
        folder = self.write(
            tmp_path, special_tokens_map={"eos_token": "<tool>"}, tokenizer_config={"added_tokens_decoder": listed}
        )
        tokenizer = Tokenizer.from_folder(folder)
        assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (265, (264,))
        assert tokenizer.encode("<tool>") == [264]
        assert tokenizer.decode([264]) == ""

    def test_templates_by_name_and_file(self, tmp_path: Path) -> None:
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }}"}]
        folder = self.write(tmp_path, tokenizer_config={"chat_template": named})
        tokenizer = Tokenizer.from_folder(folder)
        assert (tokenizer.render_chat(CHAT), tokenizer.render_chat(CHAT, tools=[{"a": 1}])) == ("plain", "1")
        tokenizer.save(tmp_path / "saved")
        assert Tokenizer.from_folder(tmp_path / "saved").render_chat(CHAT, tools=[{"a": 1}]) == "1"
        (folder / "chat_template.jinja").write_text("file")
        assert Tokenizer.from_folder(folder).render_chat(CHAT, tools=[{"a": 1}]) == "file"
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text("more")
        assert Tokenizer.from_folder(folder).render_chat(CHAT, tools=[{"a": 1}]) == "more"
        (folder / "chat_template.jinja").write_bytes(b"\xff")
        with pytest.raises(TokenizerError, match="a chat template cannot be read"):
            Tokenizer.from_folder(folder)


class TestSameTokenizer:
    def test_without_tokenizers_sizes_decide(self) -> None:
        same_tokenizer(None, None, 512, 512)
        with pytest.raises(TokenizerError, match="main has 512 tokens, speculator has 500"):
            same_tokenizer(None, None, 512, 500)

    def test_one_side_only(self) -> None:
        tokenizer = TOKENIZERS["bytes"]
        with pytest.raises(TokenizerError, match="the speculator model has no tokenizer"):
            same_tokenizer(tokenizer, None, 266, 266)
        with pytest.raises(TokenizerError, match="the main model has no tokenizer"):
            same_tokenizer(None, tokenizer, 266, 266)

    def test_equal_content(self) -> None:
        same_tokenizer(Tokenizer(byte_level(), source="one"), Tokenizer(byte_level(), source="two"), 264, 272)

    def test_names_the_first_difference(self) -> None:
        one = Tokenizer(byte_level([AddedToken("<a>"), AddedToken("<b>")]), source="one")
        two = Tokenizer(byte_level([AddedToken("<a>"), AddedToken("<c>"), AddedToken("<d>")]), source="two")
        message = "one has 266 tokens and two has 267; first at id 265: main '<b>', speculator '<c>'"
        with pytest.raises(TokenizerError, match=message):
            same_tokenizer(one, two, 300, 300)
        with pytest.raises(TokenizerError, match="first at id 265: main None, speculator '<b>'"):
            same_tokenizer(Tokenizer(byte_level([AddedToken("<a>")]), source="three"), one, 300, 300)

    def test_models_must_embed_every_token(self) -> None:
        tokenizer = TOKENIZERS["bytes"]
        with pytest.raises(TokenizerError, match="266 tokens, but the speculator model embeds only 265"):
            same_tokenizer(tokenizer, tokenizer, 266, 265)

    def test_fingerprint_knows_vocabulary_and_merges(self) -> None:
        plain, more = Tokenizer(byte_level()), TOKENIZERS["bytes"]
        backend = byte_level()
        kept = json.loads(backend.to_str())
        kept["model"]["merges"].pop()
        fewer = Tokenizer(Backend.from_str(json.dumps(kept)))
        assert len({plain.fingerprint(), more.fingerprint(), fewer.fingerprint()}) == 3
        assert plain.fingerprint() == Tokenizer(byte_level()).fingerprint()


@pytest.mark.parametrize("name", list(TOKENIZERS))
class TestStreamDecoder:
    @given(data=st.data())
    @settings(max_examples=150, deadline=None)
    def test_any_ids(self, name: str, data: st.DataObject) -> None:
        tokenizer = TOKENIZERS[name]
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
        for skip in (True, False):
            pieces = stream(tokenizer, ids, skip=skip)
            assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)

    @given(data=st.data())
    @settings(max_examples=100, deadline=None)
    def test_any_stop(self, name: str, data: st.DataObject) -> None:
        tokenizer = TOKENIZERS[name]
        ids = data.draw(st.lists(st.integers(256, tokenizer.vocab_size - 1), max_size=40))
        text = tokenizer.decode(ids)
        stops = [
            text[start : start + data.draw(st.integers(1, 4))]
            for start in data.draw(st.lists(st.integers(0, max(0, len(text) - 1)), max_size=2 if text else 0))
        ]
        stops += data.draw(st.lists(st.text("hi aw!<", min_size=1, max_size=3), max_size=2))
        decoder = StreamDecoder(tokenizer, stops)
        shown = ""
        for index in ids:
            piece = decoder.push(index)
            assert not (decoder.stopped and shown + piece != cut(text, stops))
            shown += piece
        shown += decoder.flush()
        assert shown == cut(text, stops)
        assert decoder.stopped == any(stop in text for stop in stops)

    @given(text=st.text("h i日a!😀é ", max_size=30))
    @settings(max_examples=100, deadline=None)
    def test_whole_characters_only(self, name: str, text: str) -> None:
        tokenizer = TOKENIZERS[name]
        ids = tokenizer.encode(text)
        pieces = stream(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces)


class TestStreamDecoderDetails:
    def test_emoji_comes_whole(self, smollm2: Tokenizer) -> None:
        ids = smollm2.encode("ok 👍🏽!")
        assert len(ids) > 5
        assert [piece for piece in stream(smollm2, ids) if piece] == ["ok", " ", "👍", "🏽", "!"]

    def test_truncated_character_is_flushed_once(self) -> None:
        tokenizer = TOKENIZERS["bytes"]
        ids = tokenizer.encode("é")[:1]
        assert stream(tokenizer, ids) == ["", "\ufffd"]
        decoder = StreamDecoder(tokenizer)
        decoder.push(ids[0])
        assert (decoder.flush(), decoder.flush()) == ("\ufffd", "")

    def test_words_keep_their_spaces(self) -> None:
        tokenizer = TOKENIZERS["llama2"]
        hi, a = tokenizer.token_id("▁hi"), tokenizer.token_id("▁a")
        assert stream(tokenizer, [1, hi, a, hi]) == ["", "hi", " a", " hi", ""]
        assert stream(tokenizer, [hi, 2, hi, 2]) == ["hi", "", " hi", "", ""]

    def test_byte_tokens_wait_for_their_run_to_end(self) -> None:
        tokenizer = TOKENIZERS["llama2"]
        face = [3 + byte for byte in "😀".encode()]
        assert stream(tokenizer, [*face, tokenizer.token_id("!")]) == ["", "", "", "", "😀!", ""]
        assert stream(tokenizer, [*face, 3 + 0xFF])[-1] == "\ufffd" * 5
        no_token = tokenizer.vocab_size
        assert stream(tokenizer, [*face[:2], no_token, *face[2:]])[-1] == "😀"

    def test_stop_across_tokens(self) -> None:
        tokenizer = TOKENIZERS["bytes"]
        decoder = StreamDecoder(tokenizer, stop=["ll w"])
        shown = [decoder.push(index) for index in tokenizer.encode("hell wz", add_special_tokens=False)]
        assert "".join(shown) == "he"
        assert decoder.stopped
        assert (decoder.push(5), decoder.flush()) == ("", "")

    def test_special_tokens_are_left_out_and_end_nothing(self) -> None:
        tokenizer = TOKENIZERS["bytes"]
        ids = tokenizer.encode("é")
        assert stream(tokenizer, [ids[0], tokenizer.token_id("<|end|>"), ids[1]]) == ["", "", "é", ""]
        assert stream(tokenizer, [tokenizer.token_id("<|end|>")], skip=False) == ["<|end|>", ""]

    def test_each_token_is_decoded_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer, decoded = Tokenizer(TOKENIZERS["llama2"]._backend), []
        decode = tokenizer.decode

        def counted(ids: list[int], skip_special_tokens: bool = True) -> str:
            decoded.append(len(ids))
            return decode(ids, skip_special_tokens)

        monkeypatch.setattr(tokenizer, "decode", counted)
        text = "".join(stream(tokenizer, [tokenizer.token_id("▁hi")] * 500))
        assert (len(text), sum(decoded)) == (1499, 1000)  # the anchor and the token, each time; the flush has only it

    def test_unsupported_decoders(self) -> None:
        backend = byte_level()
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
        with pytest.raises(TokenizerError, match=r"\['ByteLevel', 'Fuse'\] is not supported"):
            StreamDecoder(Tokenizer(backend))
        backend = Backend(models.BPE(vocab={"!": 0}, merges=[]))
        decoder = StreamDecoder(Tokenizer(backend))
        with pytest.raises(TokenizerError, match="no token stands for a word"):
            decoder.push(0)
