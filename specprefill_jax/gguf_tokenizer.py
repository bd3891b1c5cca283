"""The tokenizer inside a GGUF file, as a `tokenizers` tokenizer.

Only the metadata at the head of the file is read, by a reader of its own: the `gguf` package makes an array object of
every one of the 100,000 strings of a vocabulary, which takes seconds.
"""

import mmap
import os
import struct
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from specprefill_jax.errors import TokenizerError

# Llama 3's pattern; the GPT-2 pattern is built into the ByteLevel pre-tokenizer.
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


class _Cursor:
    """Reads little-endian values one after another; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, source: str) -> None:
        self.data, self.source, self.offset = data, source, 0

    def take(self, size: int) -> int:
        """Step over `size` bytes and return where they begin."""
        start, self.offset = self.offset, self.offset + size
        if self.offset > len(self.data):
            raise TokenizerError(f"{self.source}: the file ends within its metadata (truncated download?)")
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{self.source}: a metadata string is not UTF-8: {error}") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise TokenizerError(f"{self.source}: metadata of unknown type {kind}")
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            form = f"<{count}{_SCALARS[item]}"
            size = count * struct.calcsize("<" + _SCALARS[item])
            start = self.take(size)
            return list(struct.unpack_from(form, self.data, start))
        if item != _STRING:
            raise TokenizerError(f"{self.source}: a metadata array of type {item} is not supported")
        return [self.string() for _ in range(count)]


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The key-value metadata of a GGUF file (version 2 or 3, little-endian); TokenizerError when it is damaged."""
    source = os.fspath(path)
    try:
        with open(source, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, source)
            start = cursor.take(4)
            if data[start : start + 4] != b"GGUF":
                raise TokenizerError(f"{source}: not a GGUF file")
            version = cursor.scalar("I")
            if version not in (2, 3):
                raise TokenizerError(f"{source}: GGUF version {version} is not supported, only 2 and 3 (little-endian)")
            cursor.scalar("Q")  # the number of tensors
            return {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(cursor.scalar("Q"))}
    except (OSError, ValueError) as error:  # mmap refuses an empty file with ValueError
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(f"{source}: cannot be read: {error}") from error


def build_backend(metadata: dict[str, Any], source: str) -> Backend:
    """Build the byte-level BPE tokenizer that `metadata` describes; TokenizerError for any other kind."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise TokenizerError(f"{source}: tokenizer.ggml.model={model!r} is not supported, only 'gpt2' (byte-level BPE)")
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in ("smollm", "llama-bpe"):
        raise TokenizerError(f"{source}: tokenizer.ggml.pre={pre!r} is not supported, only 'smollm' and 'llama-bpe'")
    tokens = _list_of(metadata, "tokenizer.ggml.tokens", str, source)
    types = _list_of(metadata, "tokenizer.ggml.token_type", int, source)
    merges = [_split_merge(merge, source) for merge in _list_of(metadata, "tokenizer.ggml.merges", str, source)]
    if len(types) != len(tokens):
        raise TokenizerError(f"{source}: {len(tokens)} tokens but {len(types)} entries in tokenizer.ggml.token_type")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        repeated = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise TokenizerError(f"{source}: tokenizer.ggml.tokens lists {repeated!r} more than once")
    try:
        backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{source}: tokenizer.ggml.merges do not fit the vocabulary: {error}") from error
    if pre == "llama-bpe":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    backend.decoder = decoders.ByteLevel()
    for kind in (_CONTROL, _USER_DEFINED):
        added = [token for token, type_ in zip(tokens, types, strict=True) if type_ == kind]
        backend.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False) for token in added])
    bos = token_id(metadata, "bos", len(tokens), source)
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        backend.post_processor = processors.TemplateProcessing(
            single=[f"{tokens[bos]}:0", "$A:0"], special_tokens=[(tokens[bos], bos)]
        )
    return backend


def token_id(metadata: dict[str, Any], role: str, vocab_size: int, source: str) -> int | None:
    """The id under `tokenizer.ggml.<role>_token_id`, None without one; TokenizerError when no token has it."""
    key = f"tokenizer.ggml.{role}_token_id"
    value = metadata.get(key)
    if value is None or (isinstance(value, int) and 0 <= value < vocab_size):
        return value
    raise TokenizerError(f"{source}: {key}={value!r} is outside the vocabulary of {vocab_size} tokens")


def chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    """The chat templates in the file by name; the main one is called `default`."""
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(prefix + "."): text for key, text in metadata.items() if key.startswith(prefix + ".")}
    if prefix in metadata:
        named["default"] = metadata[prefix]
    return {name: text for name, text in named.items() if isinstance(text, str)}


def _list_of(metadata: dict[str, Any], key: str, kind: type, source: str) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise TokenizerError(f"{source}: {key} is missing or no list of {kind.__name__}")
    return value


def _split_merge(merge: str, source: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not (left and separator and right) or " " in right:
        raise TokenizerError(f"{source}: tokenizer.ggml.merges: {merge!r} is not two tokens with a space between")
    return left, right
