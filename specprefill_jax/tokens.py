"""Text to token ids and back: tokenizers from folders and GGUF files, chat templates, incremental decoding.

Built on the `tokenizers` library alone: importing transformers' tokenizer classes costs well over a second at every
start of a command, `tokenizers` a twentieth of one.
"""

import codecs
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from specprefill_jax import gguf_tokenizer
from specprefill_jax.errors import TokenizerError, argument_error
from specprefill_jax.stop_strings import StopStrings

if TYPE_CHECKING:
    from specprefill_jax.chat_template import ChatTemplate

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()


class Tokenizer:
    """A model's tokenizer: encodes, decodes and renders chats; immutable, and safe to share between threads."""

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        source: str = "tokenizer",
    ) -> None:
        """Wrap `backend`.

        Args:
            backend: a tokenizer of the `tokenizers` library; truncation and padding in it are switched off.
            special_tokens: text by role (`bos_token`, `eos_token`, ...), each in the vocabulary; templates see them.
            eos_token_ids: ids that end a generation; the id of `eos_token` is added to them.
            chat_templates: Jinja sources by name; `default`, and `tool_use` for chats with tools.
            source: where it came from, for error messages.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.source = source
        self._token_bytes: dict[int, bytes] = {}
        self._templates = dict(chat_templates or {})
        self.special_tokens = {role: text for role, text in (special_tokens or {}).items() if self._known(role, text)}
        # Named by the configuration, so special even where tokenizer.json forgot to say so.
        special = [AddedToken(text, special=True, normalized=False) for text in self.special_tokens.values()]
        backend.add_special_tokens([token for token in special if token.content not in self._special_texts()])
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        eos = [*eos_token_ids, self.token_id(self.special_tokens.get("eos_token"))]
        self.eos_token_ids = tuple(dict.fromkeys(index for index in eos if index is not None))
        self.bos_token_id = self.token_id(self.special_tokens.get("bos_token"))
        self.special_ids = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> Self:
        """Read a folder in Hugging Face layout.

        `tokenizer.json` is required; `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`,
        `additional_chat_templates/`, `generation_config.json` and `config.json` are used where they are.
        Raises TokenizerError naming the file that is missing or damaged.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{file}: no such file; a tokenizer in the `tokenizers` library's format is needed")
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{file}: not a tokenizer: {error}") from error
        config_file = folder / "tokenizer_config.json"
        config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(config_file)}
        _add_missing_tokens(backend, config.get("added_tokens_decoder"), config_file)
        special = {role: text for role in _ROLES if (text := _token_text(config.get(role), role, config_file))}
        return cls(
            backend,
            special_tokens=special,
            eos_token_ids=_eos_ids(folder, config, backend.get_vocab_size(with_added_tokens=True)),
            chat_templates=_read_templates(folder, config, config_file),
            source=str(folder),
        )

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> Self:
        """Build the tokenizer described in a GGUF file's metadata: byte-level BPE, `pre` smollm or llama-bpe.

        Raises TokenizerError, naming the file and the key, for other kinds and for damaged metadata.
        """
        source = os.fspath(path)
        metadata = gguf_tokenizer.read_metadata(source)
        backend = gguf_tokenizer.build_backend(metadata, source)
        size = backend.get_vocab_size(with_added_tokens=True)
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {role: gguf_tokenizer.token_id(metadata, name, size, source) for role, name in names.items()}
        special = {role: backend.id_to_token(index) for role, index in ids.items() if index is not None}
        ends = [gguf_tokenizer.token_id(metadata, name, size, source) for name in ("eos", "eot", "eom")]
        return cls(
            backend,
            special_tokens={role: text for role, text in special.items() if text is not None},
            eos_token_ids=[index for index in ends if index is not None],
            chat_templates=gguf_tokenizer.chat_templates(metadata),
            source=source,
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which `from_folder` and transformers read back."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        config["clean_up_tokenization_spaces"] = False
        if list(self._templates) == ["default"]:
            config["chat_template"] = self._templates["default"]
        elif self._templates:
            config["chat_template"] = [{"name": name, "template": text} for name, text in self._templates.items()]
        # A key of ours: transformers keeps further ends of generation in the model's generation_config.json.
        config["eos_token_ids"] = list(self.eos_token_ids)
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with BOS in front where the tokenizer adds one.

        As in transformers, the text of a special token (`<|im_end|>`) within `text` becomes that token: a plain prompt
        may hold a ready-made chat. Whoever passes on text of others decides whether that is wanted.
        """
        return self._encoding(text, add_special_tokens).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of `text` with nothing added, and the characters [start, end) of it that each is made from.

        Tokens that share a character both name it; a token may leave out white space at its ends.
        """
        encoding = self._encoding(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        if not isinstance(text, str):
            raise argument_error("text", text, "a str")
        try:
            text.encode()  # the library's own complaint is a TypeError that says neither what nor where
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise argument_error("text", text, f"valid Unicode (lone surrogate at character {error.start})") from error

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; incomplete characters become U+FFFD, ids without a token are left out.

        Spaces stay as they are, whatever `clean_up_tokenization_spaces` says, so that streams and whole texts agree.
        """
        return self._backend.decode([_check_id(index) for index in ids], skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text of a chat, by the checkpoint's own template (see chat_template.py for its limits).

        Args:
            messages: at least one {"role": ..., "content": ...}; None values are dropped, as in transformers.
            tools: JSON schemas for the template.
            add_generation_prompt: end with the header of the assistant's answer.
            variables: anything else the template knows (`enable_thinking`, `date_string`, ...), not the above.

        Raises TokenizerError when there is no template or it fails, ArgumentError for messages of another shape.
        """
        if not isinstance(messages, list | tuple) or not messages:
            raise argument_error("messages", messages, "a non-empty list of messages")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise argument_error("messages", message, "mappings with a `role` that is a str")
        return self._template(with_tools=bool(tools)).render(
            {
                **self.special_tokens,
                **(variables or {}),
                "messages": [{key: item for key, item in message.items() if item is not None} for message in messages],
                "tools": [dict(tool) for tool in tools] if tools else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Token ids of a chat. Nothing is added to the template's text, which holds BOS itself where it is wanted.

        As in transformers, special tokens spelled out in a message's content become tokens.
        """
        return self.encode(self.render_chat(messages, tools, add_generation_prompt, variables), False)

    def token_id(self, token: str | None) -> int | None:
        """The id of the token spelled `token`; None when there is none."""
        return None if token is None else self._backend.token_to_id(token)

    @functools.cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens are runs of bytes (GPT-2, Llama 3) and not of text (Llama 2)."""
        return self._decoder_kinds == ["ByteLevel"]

    def token_bytes(self, index: int) -> bytes:
        """The bytes that token `index` of a byte-level tokenizer stands for; none when there is no such token."""
        if index not in self._token_bytes:
            token = self._backend.id_to_token(index) or ""
            values = [_BYTES.get(character) for character in token]
            # An added token is plain text: as soon as one character is no byte's, none of them is.
            known = [value for value in values if value is not None]
            self._token_bytes[index] = bytes(known) if len(known) == len(values) else token.encode()
        return self._token_bytes[index]

    def is_transparent(self, index: int) -> bool:
        """Whether a token of text leaves a run of byte tokens open: one more of them (`<0xE3>`), or no token at all."""
        token = self._backend.id_to_token(index)
        if token is None or "ByteFallback" not in self._decoder_kinds:
            return token is None
        return len(token) == 6 and token.startswith("<0x") and token.endswith(">")

    @functools.cached_property
    def anchor(self) -> tuple[list[int], int]:
        """A token to decode others behind, and the length of its text (see StreamDecoder)."""
        for index in self.vocabulary.values():
            text = self._backend.decode([index], skip_special_tokens=False)
            if text.isalnum() and self._backend.decode([index, index], skip_special_tokens=False).startswith(text):
                return [index], len(text)
        raise TokenizerError(f"{self.source}: no token stands for a word, so generations cannot be decoded one by one")

    @functools.cached_property
    def _decoder_kinds(self) -> list[str]:
        decoder = json.loads(self._backend.decoder.__getstate__()) if self._backend.decoder else {"type": "None"}
        kinds = [part["type"] for part in decoder.get("decoders", [decoder])]
        if "ByteLevel" in kinds and len(kinds) > 1:
            raise TokenizerError(f"{self.source}: a decoder made of {kinds} is not supported")
        return kinds

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return bool(self._templates)

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the template for chats without tools; None where there is none."""
        return self._templates.get("default")

    @functools.cached_property
    def vocabulary(self) -> dict[str, int]:
        """Ids by token, added tokens included, in the order of ids."""
        return dict(sorted(self._backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]))

    def fingerprint(self) -> str:
        """SHA-256 over the vocabulary and the merges: equal for tokenizers that cut text into the same pieces."""
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        merges = json.loads(self._backend.to_str())["model"].get("merges")
        content = json.dumps([list(self.vocabulary.items()), merges], separators=(",", ":"))
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    @functools.cached_property
    def _compiled(self) -> dict[str, "ChatTemplate"]:
        from specprefill_jax.chat_template import ChatTemplate  # jinja2 takes 0.1 s to import: only for chats

        return {name: ChatTemplate(text, self.source) for name, text in self._templates.items()}

    def _template(self, with_tools: bool) -> "ChatTemplate":
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            found = f"only {sorted(self._templates)}" if self._templates else "none"
            raise TokenizerError(f"{self.source}: no chat template named {name!r} ({found}): give the prompt as text")
        return self._compiled[name]

    def _known(self, role: str, text: str) -> bool:
        if self._backend.token_to_id(text) is not None:
            return True
        if role in ("bos_token", "eos_token"):
            raise TokenizerError(f"{self.source}: {role}={text!r} is not in the vocabulary")
        return False  # a padding token that no model row stands for does no harm

    def _special_texts(self) -> set[str]:
        return {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}


class StreamDecoder:
    """Text of one generation as its tokens come.

    What `push` returns, put together with `flush`, is `tokenizer.decode` of all ids, cut before the first stop string.
    No piece ends within a character, and nothing that may begin a stop string is given out before that is decided.
    Every token is decoded once: the cost is linear in the output.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        """Decode with `tokenizer`; ArgumentError for an empty stop string."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stops = StopStrings(stop)
        self._pieces = _BytePieces(tokenizer) if tokenizer.is_byte_level else _TextPieces(tokenizer)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stops.stopped

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is now certain, "" once stopped."""
        index = _check_id(token_id)
        if self.stopped or index in self._skipped:
            return ""
        return self._stops.push(self._pieces.push(index))

    def flush(self) -> str:
        """The tokens have ended: return what was held back, U+FFFD for a character that was never completed."""
        return self._stops.push(self._pieces.flush()) + self._stops.flush()


class _BytePieces:
    """Byte-level BPE: a token is a run of bytes, and text is their UTF-8."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, index: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(index))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _TextPieces:
    """Tokens that stand for text, such as SentencePiece's with a mark for the space before a word.

    Two things keep a token from being decoded alone. The first token of a text loses its leading space: later ones are
    decoded behind an anchor token whose text is then cut off. And a run of byte tokens (`<0xE3>`) is read as a whole,
    as characters or, if it is no UTF-8, as one U+FFFD a byte: it is held until another token ends it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._anchor: list[int] = []  # empty until some text is out
        self._skip = 0

    def push(self, index: int) -> str:
        self._pending.append(index)
        return "" if self._tokenizer.is_transparent(index) else self.flush()

    def flush(self) -> str:
        text = self._tokenizer.decode(self._anchor + self._pending, skip_special_tokens=False)[self._skip :]
        if text and not self._anchor:
            self._anchor, self._skip = self._tokenizer.anchor
        if self._anchor:
            self._pending = []
        return text


def same_tokenizer(
    main: Tokenizer | None, speculator: Tokenizer | None, main_vocab: int, speculator_vocab: int
) -> None:
    """Raise TokenizerError unless both models read the same ids as the same tokens.

    Compares the vocabularies by content. Models may have more embedding rows than tokens (padding). Two checkpoints
    without tokenizers are compared by their vocabulary sizes, all that is known; one with and one without is refused.
    """
    if main is None or speculator is None:
        if main is not speculator:
            lacking, other = ("main", speculator) if main is None else ("speculator", main)
            raise TokenizerError(
                f"the {lacking} model has no tokenizer to compare with that of {other.source if other else ''}: "
                "copy its tokenizer.json into the checkpoint's folder if they are the same"
            )
        if main_vocab != speculator_vocab:
            raise TokenizerError(
                f"the models' vocabularies differ: main has {main_vocab} tokens, speculator has {speculator_vocab}"
            )
        return
    for name, tokenizer, rows in (("main", main, main_vocab), ("speculator", speculator, speculator_vocab)):
        if tokenizer.vocab_size > rows:
            raise TokenizerError(
                f"{tokenizer.source}: {tokenizer.vocab_size} tokens, but the {name} model embeds only {rows}"
            )
    if main is speculator or main.vocabulary == speculator.vocabulary:
        return
    tokens = [{index: token for token, index in side.vocabulary.items()} for side in (main, speculator)]
    first = min(index for index in tokens[0] | tokens[1] if tokens[0].get(index) != tokens[1].get(index))
    raise TokenizerError(
        f"the tokenizers differ: {main.source} has {main.vocab_size} tokens and {speculator.source} has "
        f"{speculator.vocab_size}; first at id {first}: main {tokens[0].get(first)!r}, "
        f"speculator {tokens[1].get(first)!r}. The speculator must use the main model's vocabulary"
    )


def _check_id(value: int) -> int:
    index = int(value)
    if not 0 <= index < 1 << 32:
        raise argument_error("ids", value, "non-negative token ids")
    return index


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, {} when there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: a JSON object is expected, not {type(value).__name__}")
    return value


def _token_text(value: object, key: str, file: Path) -> str | None:
    """A token is written as its text or as an object with the text under `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is None or isinstance(text, str):
        return text
    raise TokenizerError(f"{file}: {key}={value!r} is not the text of a token")


def _add_missing_tokens(backend: Backend, listed: object, file: Path) -> None:
    """Add what `added_tokens_decoder` lists and tokenizer.json lacks, as transformers does; ids must come out right."""
    if listed is None:
        return
    if not isinstance(listed, dict) or not all(str(key).isdecimal() for key in listed):
        raise TokenizerError(f"{file}: added_tokens_decoder is not an object of tokens by id")
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        text = _token_text(entry, f"added_tokens_decoder[{key}]", file)
        if not text or backend.token_to_id(text) is not None:
            continue
        flags = ("lstrip", "rstrip", "normalized", "single_word", "special")
        backend.add_tokens([AddedToken(text, **{flag: bool(entry[flag]) for flag in flags if flag in entry})])
        if backend.token_to_id(text) != int(key):
            raise TokenizerError(
                f"{file}: added_tokens_decoder wants id {key} for {text!r}, where tokenizer.json leaves "
                f"{backend.token_to_id(text)}"
            )


def _eos_ids(folder: Path, config: dict[str, Any], vocab_size: int) -> list[int]:
    """The ids that end a generation: the generation config's, else the model config's, else the tokenizer config's."""
    names = {
        folder / "generation_config.json": "eos_token_id",
        folder / "config.json": "eos_token_id",
        folder / "tokenizer_config.json": "eos_token_ids",
    }
    for file, key in names.items():
        value = config.get(key) if file.name == "tokenizer_config.json" else _read_json(file).get(key)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        for index in ids:
            if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < vocab_size:
                raise TokenizerError(f"{file}: {key}={value!r} is outside the vocabulary of {vocab_size} tokens")
        return ids
    return []


def _read_templates(folder: Path, config: dict[str, Any], config_file: Path) -> dict[str, str]:
    """Chat templates by name; template files win over the configuration, as in transformers."""
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (main := folder / "chat_template.jinja").is_file():
        files["default"] = main
    if files:
        try:
            return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{folder}: a chat template cannot be read: {error}") from error
    value = config.get("chat_template")
    if value is None:
        return {}
    entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
    templates = {}
    for entry in entries:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise TokenizerError(f"{config_file}: chat_template is neither a str nor a list of name and template")
        templates[name] = text
    return templates
