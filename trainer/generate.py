"""Text from a model: prompts in, their continuations out, on any mesh.

What is sampled is a function of (seed, number of the prompt, position), never of the mesh or of the
other prompts. Prefill and decoding are one compiled program over one buffer of tokens; it is
compiled again only for another B or T, both rounded up. Shapes: B prompts, T slots for the longest
of them and its continuation, V vocabulary of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ..models.config import ModelConfig
from ..models.decode import Cache, empty_cache, extend
from ..models.transformer import Transformer
from ..sharding.collectives import all_gather, all_reduce_max
from ..sharding.layout import Layout, specs
from .checkpoint.finished_run import open_run
from .checkpoint.layer_order import without_stages
from .config import Config
from .data.tokenizer import Tokenizer
from .optim.precision import DTYPES
from .sampling import Sampling, check_prompts

PIECE = 128
"""Tokens that prefill feeds at once; T is a multiple of it."""


def generate_run(
    run: str | Path,
    prompts: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    tokens: int = Sampling.tokens,
    temperature: float = Sampling.temperature,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = Sampling.seed,
) -> list[str]:
    """The continuation of each prompt by a run's newest checkpoint, on the mesh of its config, or
    of the overrides. The settings are those of `Sampling`.

    Raises ValueError for settings, prompts or a run that cannot be used.
    """
    sampling = Sampling(tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if isinstance(prompts, str):
        raise ValueError("prompts: write a list of texts, as in ['def ']")
    check_prompts(prompts)
    opened = open_run(run, overrides, {"prompts": list(prompts)} | asdict(sampling))
    arguments = opened.params, opened.config, opened.layout, opened.tokenizer, prompts, sampling
    return generate_texts(*arguments, buffers=opened.buffers)


def generate_texts(
    params: Transformer,
    config: Config,
    layout: Layout,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    buffers: Mapping[str, Any] | None = None,
) -> list[str]:
    """`generate` on texts. Bytes that are not UTF-8, as a cut-off character's, give U+FFFD."""
    ids = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    size, end = tokenizer.vocab_size, tokenizer.end_of_text
    known = {"vocab_size": size, "end_of_text": end, "buffers": buffers}
    continued = generate(params, config, layout, ids, sampling, **known)
    return [tokenizer.decode(np.asarray(tokens)) for tokens in continued]


def generate(
    params: Transformer,
    config: Config,
    layout: Layout,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    vocab_size: int,
    end_of_text: int,
    buffers: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Up to `sampling.tokens` token ids below `vocab_size` after each prompt, without the
    `end_of_text` at which one stops. Every process of the mesh calls it alike and gets all.

    Raises ValueError for an empty prompt: no document's first token was ever a target.
    """
    for number, prompt in enumerate(prompts, 1):
        if not len(prompt):
            raise ValueError(
                f"prompt {number} is empty: the model has learnt what follows, not how to begin; "
                f"write at least one character"
            )
    if not prompts:
        return []
    params, layout = without_stages(params, config, layout)
    lengths = [len(prompt) for prompt in prompts]
    batch = _batch(layout)
    rows = _round_up(len(prompts), layout.size(batch))
    text = np.zeros((rows, _round_up(max(lengths) + sampling.tokens, PIECE)), np.int32)
    for row, prompt in zip(text, prompts, strict=False):
        row[: len(prompt)] = prompt
    top_k = sampling.top_k or vocab_size
    settings = _Settings(
        pieces=np.int32(_round_up(max(lengths), PIECE) // PIECE),
        tokens=np.int32(sampling.tokens),
        end_of_text=np.int32(end_of_text),
        seed=np.uint32(sampling.seed),
        temperature=np.float32(max(sampling.temperature, 1e-30)),
        # not by temperature alone, which would draw lots among equals
        top_k=np.int32(1 if sampling.temperature == 0 else min(top_k, vocab_size)),
        top_p=np.float32(np.inf if sampling.top_p in (None, 1) else sampling.top_p),
    )

    def place(values: np.ndarray) -> jax.Array:
        sharding = layout.sharding(P(batch))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    compute = DTYPES[config.precision.compute]
    # a single token cannot be cut over tensor
    single = replace(layout.config, sequence_parallel=False, overlap="none")
    layout = replace(layout, config=single)
    plan = _Plan(layout, config.model, compute, vocab_size)
    counts = np.asarray(lengths + [0] * (rows - len(prompts)), np.int32)
    numbers = np.arange(rows, dtype=np.int32)
    placed = place(text), place(counts), place(numbers)
    text = _continue(params, *placed, settings, buffers, plan)
    return [
        _until(row[length : length + sampling.tokens].tolist(), end_of_text)
        for row, length in zip(jax.device_get(text), lengths, strict=False)
    ]


class _Settings(NamedTuple):
    """The scalars of a call: other values need no compilation. pieces: that hold all prompts."""

    pieces: Any
    tokens: Any
    end_of_text: Any
    seed: Any
    temperature: Any
    top_k: Any
    top_p: Any


@dataclass(frozen=True)
class _Plan:
    """What a program is compiled for. vocab_size: of the tokenizer, which may know fewer tokens
    than the model.
    """

    layout: Layout
    model: ModelConfig
    dtype: Any
    vocab_size: int


@partial(jax.jit, static_argnames="plan")
def _continue(
    params: Transformer,
    text: jax.Array,
    lengths: jax.Array,
    numbers: jax.Array,
    settings: _Settings,
    buffers: Mapping[str, Any] | None,
    plan: _Plan,
) -> jax.Array:
    """text[B, T], rows cut over `_batch`, with each row's prompt at its start -> text[B, T] with
    continuations, on every device. lengths, numbers [B], cut alike: tokens of the prompts, 0 where
    there is none, and which prompt a row is.
    """
    rows = P(_batch(plan.layout))
    run = jax.shard_map(
        partial(_continue_local, plan=plan),
        mesh=plan.layout.mesh,
        in_specs=(specs(params, plan.layout.param_spec), rows, rows, rows, P(), P()),
        out_specs=P(),
        check_vma=False,
    )
    return run(params, text, lengths, numbers, settings, buffers)


def _continue_local(
    params: Transformer,
    text: jax.Array,
    lengths: jax.Array,
    numbers: jax.Array,
    settings: _Settings,
    buffers: Mapping[str, Any] | None,
    plan: _Plan,
) -> jax.Array:
    """Local: this device's rows of `_continue`. Devices along tensor sample the same tokens, from
    the same logits. All leave the loop together: each step has collectives.
    """
    layout, model = plan.layout, plan.model
    rows, slots = text.shape
    feed = partial(
        extend,
        params,
        slots=slots,
        layout=layout,
        config=model,
        dtype=plan.dtype,
        buffers=buffers,
    )
    choose = jax.vmap(sample, in_axes=(0, 0, None, None, None))
    choice = settings.temperature, settings.top_k, settings.top_p

    def prefill(piece: jax.Array, state: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
        logits, cache = state
        position = (piece * PIECE + jnp.arange(PIECE))[None]
        position = jnp.where(position < lengths[:, None], position, -1)
        tokens = lax.dynamic_slice_in_dim(text, piece * PIECE, PIECE, axis=1)
        new, cache = feed(cache, tokens, position)
        return jnp.where(position[:, :1] >= 0, new, logits), cache

    def unfinished(state):
        step, *_, going = state
        return (step < settings.tokens) & going

    def decode(state):
        step, text, logits, cache, ended, _ = state
        position = lengths + step
        keys = jax.vmap(partial(_key, settings.seed))(numbers, position)
        token = choose(logits[:, : plan.vocab_size], keys, *choice)
        text = text.at[jnp.arange(rows), position].set(token)
        ended |= token == settings.end_of_text
        logits, cache = feed(cache, token[:, None], position[:, None])
        going = all_reduce_max(jnp.any(~ended).astype(jnp.int32), _batch(layout), layout) > 0
        return step + 1, text, logits, cache, ended, going

    logits = jnp.zeros((rows, model.vocab_size), jnp.float32)
    cache = empty_cache(rows, slots, layout, model, plan.dtype)
    logits, cache = lax.fori_loop(0, settings.pieces, prefill, (logits, cache))
    state = (jnp.int32(0), text, logits, cache, lengths == 0, jnp.bool_(True))
    _, text, *_ = lax.while_loop(unfinished, decode, state)
    return all_gather(text, _batch(layout), 0, layout)


def sample(
    logits: jax.Array, key: jax.Array, temperature: Any, top_k: Any, top_p: Any
) -> jax.Array:
    """A token id by logits [V]: of softmax(logits / temperature), cut to the k likeliest and then
    to the fewest of those that reach p, and renormalised.
    """
    order = jnp.argsort(logits, descending=True)
    score = logits[order]
    score = (score - score[0]) / temperature
    score = jnp.where(jnp.arange(len(order)) < top_k, score, -jnp.inf)
    probability = jax.nn.softmax(score)
    before = jnp.cumsum(probability) - probability
    score = jnp.where(before < top_p, score, -jnp.inf)
    # noise belongs to tokens, not to ranks: where rounding swaps two, neither's changes
    noise = jax.random.gumbel(key, order.shape)
    return order[jnp.argmax(score + noise[order])]


def _key(seed: jax.Array, number: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), position)


def _batch(layout: Layout) -> tuple[str, ...]:
    """Mesh axes over which prompts are cut: a row is never cut, so context has others too, and so
    has pipe.
    """
    return (*layout.axes("batch"), "context", "pipe")


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens
