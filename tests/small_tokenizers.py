"""Tokenizers for tests: SmolLM2's from tests/data, small ones made here, GGUF files written from them."""

import gzip
import shutil
from pathlib import Path

import gguf
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specprefill_jax.tokens import Tokenizer

DATA = Path(__file__).parent / "data"
CHAT = [{"role": "user", "content": "hi"}]


def unpack_smollm2(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(
        gzip.decompress((DATA / "tokenizers/smollm2/tokenizer.json.gz").read_bytes())
    )
    shutil.copy(DATA / "tokenizers/smollm2/tokenizer_config.json", folder)
    return folder


def write_gguf(path: Path, tokenizer: Tokenizer, merges: list[str], pre: str = "smollm", **changes: object) -> Path:
    """A GGUF file without tensors; `changes` replace or (None) remove keys, `a__b` standing for `a.b`."""
    added = tokenizer._backend.get_added_tokens_decoder()
    values: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokenizer.vocabulary),
        "tokenizer.ggml.token_type": [
            (3 if added[index].special else 4) if index in added else 1 for index in tokenizer.vocabulary.values()
        ],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(extra: list[AddedToken] | None = None) -> Backend:
    """A tokenizer of the 256 bytes, a few merges and two special tokens, cut as Llama 3's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("ð", "Ł"), ("ã", "ģ")]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|begin|>", special=True), AddedToken("<|end|>", special=True)])
    backend.add_tokens(extra or [])
    return backend


def sentencepiece(decoder: decoders.Decoder) -> Backend:
    """A tokenizer in Llama 2's manner: words carry their leading space, unknown characters fall to byte tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "h", "i", "▁h", "▁hi", "▁▁", "日", "a", "▁a", "!"]
    merges = [("▁", "h"), ("▁h", "i"), ("▁", "▁"), ("▁", "a")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


LLAMA2 = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
TOKENIZERS = {
    "bytes": Tokenizer(byte_level([AddedToken("añ b"), AddedToken("«tool»", special=False)])),
    "llama2": Tokenizer(sentencepiece(LLAMA2), special_tokens={"bos_token": "<s>", "eos_token": "</s>"}),
    "metaspace": Tokenizer(sentencepiece(decoders.Metaspace())),
    "metaspace-never": Tokenizer(sentencepiece(decoders.Metaspace(prepend_scheme="never"))),
}


def cut(text: str, stops: list[str]) -> str:
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text
