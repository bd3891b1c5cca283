"""Train the built-in pair `retrieval-tiny`: a main model and a smaller speculator that answer questions about values
hidden in prose (`specprefill_jax.evals.lookups`).

    python scripts/train_retrieval_pair.py --out build/retrieval --work build/retrieval-training

Killed and run again, it goes on from its last checkpoint, and what comes out is the same to the last bit. The folders
`<out>/retrieval-tiny` and `<out>/retrieval-tiny-speculator` are in Hugging Face layout, bfloat16.
"""

import dataclasses
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # texts are short, and a step's products want the cores

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro
from flax import nnx
from rich.console import Console
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from specprefill_jax.evals import lookups
from specprefill_jax.models.config import LlamaConfig, RopeConfig
from specprefill_jax.models.llama import Block, Layout, Outer
from specprefill_jax.models.rope import frequencies, rotation
from specprefill_jax.models.weights import (
    axes_of,
    expected_shapes,
    layer_name,
    layer_rows,
    outer_rows,
    row_of,
    sizes_of,
)
from specprefill_jax.tokens import Tokenizer

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Answer:\n{% endif %}"
)
"""A chat with the text and its question is a prompt such as the models are trained on."""
MAIN = LlamaConfig(
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=192,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope=RopeConfig(
        theta=1e9
    ),  # so that two fifths of a head's features hardly turn over the context: they match words
    max_position_embeddings=4096,
    bos_token_id=BOS_ID,
    eos_token_ids=(EOS_ID,),
    dtype="bfloat16",
)
SPECULATOR = dataclasses.replace(MAIN, hidden_size=64, intermediate_size=96, num_layers=3)
CONFIGS = {"retrieval-tiny": MAIN, "retrieval-tiny-speculator": SPECULATOR}


class Stage(NamedTuple):
    """Part of the curriculum: texts of one length."""

    tokens: int
    steps: int
    lists: float
    """Share of the texts that are bare keys and values; a fifth of the others are in the words of our RULER tasks."""
    jumps: float
    """Share of the texts whose positions jump ahead here and there, as those of a prompt read in part do."""


STAGES = (Stage(128, 60, 0.6, 0.0), Stage(256, 80, 0.3, 0.3), Stage(512, 100, 0.2, 0.5), Stage(1280, 100, 0.1, 0.5))
RULER_SHARE = 0.2
MOST_NEEDLES = 16
RATE, WARM_UP = 2e-3, 25
QUERY_BLOCK = 256


@dataclass
class Args:
    """Train the pair."""

    out: Path = Path("build/retrieval")
    """Where the two model folders go."""
    work: Path = Path("build/retrieval-training")
    """Where checkpoints go; those of other settings are left alone."""
    models: tuple[Literal["retrieval-tiny", "retrieval-tiny-speculator"], ...] = (
        "retrieval-tiny",
        "retrieval-tiny-speculator",
    )
    """Which to train; two runs side by side may do one each."""
    seed: int = 0
    step_tokens: int = 4096
    """Tokens of a step."""
    save_every: int = 20
    """Steps between checkpoints."""


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE of the texts' words, digits in pairs; the same each time."""
    backend = Backend(models.BPE())
    cut = Regex(r" ?\p{N}{1,2}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(cut, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    words = (*lookups.NOUNS, *lookups.ADJECTIVES, *lookups.PAST, *lookups.PLACES, *lookups.NAMES)
    texts = [f" {word}" * 50 for word in words]
    texts += [f" {number}" * 50 + f" {number:02}{number:02}" * 50 for number in range(100)]
    texts += [f" {digit}" * 50 + f" 11{digit}" * 50 for digit in range(10)]
    texts += ["".join(lookups.prose(rng, 200, len)) for _ in range(3000)]
    for form in lookups.FORMS:
        texts += [needle.told + needle.question + needle.prefix for needle in lookups.draw_needles(rng, 300, form)]
    trainer = trainers.BpeTrainer(
        vocab_size=MAIN.vocab_size,
        special_tokens=[AddedToken(BOS, special=True), AddedToken(EOS, special=True)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return Tokenizer(backend, special_tokens={"bos_token": BOS, "eos_token": EOS}, chat_templates={"default": CHAT})


class Batch(NamedTuple):
    """B texts of T tokens, and the R tokens of each that are learned."""

    tokens: np.ndarray
    """int32 [B, T]"""
    positions: np.ndarray
    """int32 [B, T]"""
    rows: np.ndarray
    """int32 [B, R]: which tokens the learned ones follow."""
    targets: np.ndarray
    """int32 [B, R]: the learned tokens."""
    weights: np.ndarray
    """float32 [B, R]: 1, or 0 where there is none."""


Encode = Callable[[str], list[int]]


def draw_text(rng: random.Random, stage: Stage, encode: Encode) -> tuple[list[int], list[bool]]:
    """The ids of a text of `stage.tokens` tokens at most, and which of them are answers."""
    form: lookups.Form = "list" if rng.random() < stage.lists else "ruler" if rng.random() < RULER_SHARE else "prose"
    room = stage.tokens - 1
    needles: list[lookups.Needle] = []
    for needle in lookups.draw_needles(rng, rng.randint(1, MOST_NEEDLES), form):
        length = sum(len(encode(part)) for part in (needle.told, needle.question, needle.prefix, needle.answer)) + 1
        if length <= room:
            needles.append(needle)
            room -= length
    told = lookups.hide(rng, lookups.prose(rng, room, lambda text: len(encode(text))), needles)
    ids = [BOS_ID, *(index for sentence in told for index in encode(sentence))]
    answers = [False] * len(ids)
    for needle in rng.sample(needles, len(needles)):
        # Half of the answers from their first word on: as well as a chat's prompt, one may end in the answer's start.
        whole = form != "list" and rng.random() < 0.5
        for part, learned in ((needle.question, False), (needle.prefix, whole), (needle.answer, True)):
            ids += encode(part)
            answers += [learned] * (len(ids) - len(answers))
        if form != "list":
            ids.append(EOS_ID)
            answers.append(True)
    return ids, answers


def draw_positions(rng: random.Random, stage: Stage) -> np.ndarray:
    """Positions of a text's tokens, int32 [T]."""
    positions = np.arange(stage.tokens, dtype=np.int32)
    if rng.random() < stage.jumps:
        most = rng.randint(0, MAIN.max_position_embeddings - stage.tokens)
        cuts = sorted(rng.sample(range(1, stage.tokens), 8))
        aheads = sorted(rng.randint(0, most) for _ in cuts)
        for cut, before, ahead in zip(cuts, [0, *aheads], aheads, strict=False):
            positions[cut:] += ahead - before
    return positions


def make_batch(seed: int, step: int, stage: Stage, step_tokens: int, encode: Encode) -> Batch:
    """The batch of a step; no other step has a part in it."""
    rng = random.Random(f"{seed} {step}")
    texts, learned = max(1, step_tokens // stage.tokens), min(stage.tokens // 3, 8 * MOST_NEEDLES)
    batch = Batch(
        np.full((texts, stage.tokens), EOS_ID, np.int32),
        np.zeros((texts, stage.tokens), np.int32),
        np.zeros((texts, learned), np.int32),
        np.zeros((texts, learned), np.int32),
        np.zeros((texts, learned), np.float32),
    )
    for row in range(texts):
        ids, answers = draw_text(rng, stage, encode)
        at = np.flatnonzero(answers)[:learned]
        batch.tokens[row, : len(ids)] = ids
        batch.positions[row] = draw_positions(rng, stage)
        batch.rows[row, : len(at)] = at - 1
        batch.targets[row, : len(at)] = np.array(ids)[at]
        batch.weights[row, : len(at)] = 1
    return batch


class Llama(nnx.Module):
    """The package's modules with the plainest attention, for training."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        layout, dtype = Layout(), jnp.dtype("float32")
        self.outer = Outer(config, dtype, layout, rngs=rngs)
        self.blocks = nnx.List([Block(config, dtype, layout, rngs=rngs) for _ in range(config.num_layers)])

    def __call__(self, tokens: jax.Array, positions: jax.Array, rows: jax.Array, inv_freq: np.ndarray) -> jax.Array:
        """Logits [B, R, V] after the tokens `rows` [B, R] of texts [B, T]."""
        by = rotation(positions, inv_freq)
        x = self.outer.embedding(tokens)
        for block in self.blocks:
            x = block(x, by, attend)
        x = jnp.take_along_axis(x, rows[..., None], axis=1)
        return self.outer.logits(x.reshape(-1, x.shape[-1])).reshape(*rows.shape, -1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of q [B, T, N, H] to k, v [B, T, K, H]; the scores are computed again for the gradient."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])

    @partial(jax.checkpoint, static_argnums=3)
    def block(q: jax.Array, k: jax.Array, v: jax.Array, start: int) -> jax.Array:
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * q.shape[-1] ** -0.5
        seen = start + jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
        return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(jnp.where(seen, scores, -1e30)), v)

    ends = [(start, start + QUERY_BLOCK) for start in range(0, q.shape[1], QUERY_BLOCK)]
    blocks = [block(grouped[:, start:end], k[:, :end], v[:, :end], start) for start, end in ends]
    return jnp.concatenate(blocks, axis=1).reshape(q.shape)


def start_weights(config: LlamaConfig, seed: int) -> dict[str, np.ndarray]:
    """First weights, float32 by HF name, near what an answer needs: minutes of training are enough from here.

    Otherwise the models would first have to find induction heads (arXiv 2209.11895), which takes hours. The residual
    stream has four slots: this token, the one before, the one before that, the answer. Layer 0's first two heads fill
    slots 1 and 2, by RoPE. Layer 1 looks for tokens whose slots 1 and 2 are like this token's slots 0 and 1, that is
    for what followed these two tokens before, and puts it into slot 3, which the head reads. The rest is noise. All
    of it is trained.
    """
    c, noise = config, 0.01
    draw = np.random.default_rng(seed).standard_normal
    width = c.hidden_size // 4
    slots = np.eye(c.hidden_size).reshape(4, width, c.hidden_size)
    codes = draw((c.vocab_size, width))
    codes *= 2 * width**0.5 / np.linalg.norm(codes, axis=1, keepdims=True)
    embed = codes @ slots[0] + 5 * noise * draw((c.vocab_size, c.hidden_size))
    head = 0.25 * codes @ slots[3] + noise * draw((c.vocab_size, c.hidden_size))
    # The last feature is the same in all embeddings: what layer 0 makes positions of.
    embed[:, -1], head[:, -1] = 3 * (c.hidden_size / 128) ** 0.5, 0
    constant = embed[0, -1] / np.sqrt((4 * width + embed[0, -1] ** 2) / c.hidden_size)  # after the norm
    inv_freq = frequencies(c.rope, c.head_dim)[0]
    fast, half = np.arange(4), c.head_dim // 2
    slow = np.flatnonzero(np.tile(inv_freq, 2) < 5e-4)  # hardly turned within the context
    sizes = sizes_of(c)

    def layer(index: int) -> dict[str, np.ndarray]:
        """Arrays by our names."""
        scales: dict[str, float] = dict.fromkeys("qkv", float(c.hidden_size)) | {"o": 25.0 * c.num_heads * c.head_dim}
        scales = scales if index > 1 else dict.fromkeys(scales, noise**-2)
        scales |= {"gate": c.hidden_size, "up": c.hidden_size, "down": 100 * c.intermediate_size}
        arrays = {name: draw([sizes[axis] for axis in axes_of(name)]) * scale**-0.5 for name, scale in scales.items()}
        q, k, v, o = (arrays[name] for name in "qkvo")
        if index < 2:
            v[:, :width] += slots[0]
        if index == 0:
            k[:, fast, -1] += 1 / constant
            for h in range(c.num_heads):
                angles, gain = inv_freq[fast] * (h + 1), 14 * c.head_dim**0.5 / constant
                q[h, fast, -1] += gain * np.cos(angles)
                q[h, fast + half, -1] -= gain * np.sin(angles)
            for back in (1, 2):
                o[:, back - 1, :width] += slots[back].T
        if index == 1:
            group = c.num_heads // c.num_kv_heads
            for h in range(c.num_kv_heads):
                here, before = draw((2, len(slow), width)) * len(slow) ** -0.5
                k[h, slow] += here @ slots[1] + before @ slots[2]
                q[group * h : group * (h + 1), slow] += 1.5 * (here @ slots[0] + before @ slots[1])
            o[:, :, :width] += 2 / c.num_heads * slots[3].T[:, None]
        return arrays | {"attn_norm": np.ones(c.hidden_size), "mlp_norm": np.ones(c.hidden_size)}

    outer = {"embed": embed, "norm": np.ones(c.hidden_size), "head": head}
    arrays = {row.hf: outer[row.ours] for row in outer_rows(c)}
    for index in range(c.num_layers):
        ours = layer(index)
        arrays |= {layer_name(index, row): ours[row.ours] for row in layer_rows(c, index)}
    return {name: arrays[name].reshape(shape).astype(np.float32) for name, shape in expected_shapes(c).items()}


def make_logits(config: LlamaConfig) -> Callable[..., jax.Array]:
    """A function from arrays by HF name, tokens, positions and rows to `Llama`'s logits."""
    definition, state = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    inv_freq = frequencies(config.rope, config.head_dim)[0]
    names = []
    for path, _ in nnx.to_flat_state(state):
        ours = next(part for part in reversed(path) if part != "weight")
        names.append(layer_name(path[1], row_of(ours)) if path[0] == "blocks" else row_of(ours).hf)
    shapes, tree = [leaf.shape for leaf in jax.tree.leaves(state)], jax.tree.structure(state)

    def logits(weights: dict[str, jax.Array], tokens: jax.Array, positions: jax.Array, rows: jax.Array) -> jax.Array:
        leaves = [weights[name].reshape(shape) for name, shape in zip(names, shapes, strict=True)]
        model = nnx.merge(definition, jax.tree.unflatten(tree, leaves))
        out: jax.Array = model(tokens, positions, rows, inv_freq)
        return out

    return logits


def train(
    name: str,
    config: LlamaConfig,
    tokenizer: Tokenizer,
    stages: tuple[Stage, ...],
    args: Args,
    report: Callable[[int, int, dict[str, float]], None] = lambda step, steps, means: None,
) -> dict[str, np.ndarray]:
    """Train a model, from its last checkpoint where there is one.

    Args:
        name: the checkpoints' folder is named after it.
        config: the model.
        tokenizer: of its texts.
        stages: the curriculum.
        args: seed, size of steps, where and when to save.
        report: called with steps done, steps in all, loss and accuracy after each step.

    Returns:
        Float32 arrays by HF name.
    """
    plan = [stage for stage in stages for _ in range(stage.steps)]
    decay = len(plan) // 3
    schedule = optax.schedules.join_schedules(
        [
            optax.linear_schedule(0.0, RATE, WARM_UP),
            optax.constant_schedule(RATE),
            optax.linear_schedule(RATE, RATE / 20, decay),
        ],
        [WARM_UP, len(plan) - decay],
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    logits_of = make_logits(config)

    def loss(weights: dict[str, jax.Array], batch: Batch) -> tuple[jax.Array, jax.Array]:
        logits = logits_of(weights, batch.tokens, batch.positions, batch.rows)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        right = jnp.argmax(logits, axis=-1) == batch.targets
        total = batch.weights.sum()
        return (losses * batch.weights).sum() / total, (right * batch.weights).sum() / total

    @partial(jax.jit, donate_argnums=0)
    def advance(state: dict[str, Any], batch: Batch) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        (value, right), gradient = jax.value_and_grad(loss, has_aux=True)(state["weights"], batch)
        updates, optimizer_state = optimizer.update(gradient, state["optimizer"], state["weights"])
        weights = optax.apply_updates(state["weights"], updates)
        return {"weights": weights, "optimizer": optimizer_state}, {"loss": value, "accuracy": right}

    encode = cache(partial(tokenizer.encode, add_special_tokens=False))
    weights = {key: jnp.asarray(array) for key, array in start_weights(config, args.seed).items()}
    state = {"weights": weights, "optimizer": optimizer.init(weights)}
    folder = (args.work / f"{name}-seed{args.seed}-{args.step_tokens}").absolute()
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(folder, options=options) as checkpoints:
        done = checkpoints.latest_step() or 0
        if done:
            state = checkpoints.restore(done, args=ocp.args.StandardRestore(state))
        for step in range(done, len(plan)):
            state, means = advance(state, make_batch(args.seed, step, plan[step], args.step_tokens, encode))
            if (step + 1) % args.save_every == 0 or step + 1 == len(plan):
                checkpoints.save(step + 1, args=ocp.args.StandardSave(state))
            report(step + 1, len(plan), {key: float(value) for key, value in means.items()})
    return {key: np.asarray(value) for key, value in state["weights"].items()}


def write_folder(folder: Path, config: LlamaConfig, weights: dict[str, np.ndarray], tokenizer: Tokenizer) -> None:
    """Write a model in Hugging Face layout, its weights rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: array.astype(ml_dtypes.bfloat16) for name, array in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n")
    tokenizer.save(folder)
    # Without the line breaks: they are a third of the file.
    text = json.dumps(json.loads((folder / "tokenizer.json").read_text()), ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(text + "\n")


def main(args: Args) -> int:
    """Train both models and write them."""
    console = Console(stderr=True)
    tokenizer = train_tokenizer()
    for name in args.models:
        config = CONFIGS[name]
        begin = time.perf_counter()

        def report(step: int, steps: int, means: dict[str, float], name: str = name, begin: float = begin) -> None:
            if step % 10 == 0 or step == steps:
                took = time.perf_counter() - begin
                console.print(f"{name} {step}/{steps} {took:.0f} s", *(f"{k} {v:.3f}" for k, v in means.items()))

        weights = train(name, config, tokenizer, STAGES, args, report)
        write_folder(args.out / name, config, weights, tokenizer)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
