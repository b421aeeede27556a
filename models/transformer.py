"""A decoder as three functions that a schedule drives: embed, blocks, head_share.

All three are local code inside the step's `shard_map`. x is the residual stream [B_{data,fsdp},
S_{context,tensor}, D] in the compute dtype; parameters are f32 masters. The layers of one kind have
one stack [n, ...]; which layer has which kinds is data, see `pattern.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..sharding import context
from ..sharding.layout import Layout
from ..sharding.linear import lookup
from ..sharding.traffic import taken
from . import init, pattern
from .batch import Batch
from .config import ModelConfig, RematConfig
from .dropout import EMBEDDING, FFN, MIXER, Dropout, drop
from .inputs import LayerInputs
from .kernels.attention import Tokens
from .layers.kinds import KINDS
from .layers.sublayer import Sublayer, Tally
from .norms import rms_norm
from .pattern import Layer, Slot
from .remat import recompute_all, scan_repeats
from .rope import rotations
from .vocab import Loss, cross_entropy_share


class Layers(nnx.Module):
    """Under the name of each kind the parameters of the layers that have it, [n, ...]."""

    def __init__(self, config: ModelConfig, key: jax.Array, held: Mapping[str, Sequence[int]]):
        for kind, numbers in held.items():
            setattr(self, kind, _stack(partial(KINDS[kind].params, config), key, numbers, config))


def _stack(
    params: Callable[[jax.Array], Sublayer], key: jax.Array, numbers: Sequence[int], config: Any
) -> Sublayer:
    """Each layer's parameters follow from its number; padding is all zeros."""
    held = jnp.asarray(numbers)
    keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(held)
    stack, real = jax.vmap(params)(keys), held < config.layers
    return jax.tree.map(lambda a: jnp.where(jnp.expand_dims(real, range(1, a.ndim)), a, 0.0), stack)


class Transformer(nnx.Module):
    """Parameters alone; `unembed` is None where the embedding table is tied. held: of each kind the
    numbers of its layers in the order in which their stack has them, default the model's; the
    number of layers stands for padding.
    """

    def __init__(
        self, config: ModelConfig, key: jax.Array, held: Mapping[str, Sequence[int]] | None = None
    ):
        self.embed = init.embedding(key, config, "embed")
        self.layers = Layers(config, key, pattern.held(config) if held is None else held)
        self.norm = init.scale(("channel",), (config.d_model,))
        self.unembed = None if config.tie_embeddings else init.embedding(key, config, "unembed")


def split(params: Transformer) -> tuple[Transformer, Layers]:
    """(embedding and head, the layers)"""
    ends = jax.tree.map(lambda leaf: leaf, params)
    ends.layers = None
    return ends, params.layers


def join(ends: Transformer, layers: Layers) -> Transformer:
    """Undoes `split`."""
    params = jax.tree.map(lambda leaf: leaf, ends)
    params.layers = layers
    return params


def embed(
    params: Transformer, batch: Batch, layout: Layout, dtype: Any, dropout: Dropout | None = None
) -> jax.Array:
    """Token ids [B, S_context] -> x[B, S_{context,tensor}, D]."""
    with jax.named_scope("embed"):
        x = lookup(batch.tokens, params.embed, layout, dtype)
        return drop(x, dropout, 0, EMBEDDING, layout)


class Chunk(NamedTuple):
    """Layers that follow one another in the model: all of them, or those of a pipeline's stage."""

    slots: tuple[Slot, ...]
    numbers: jax.Array
    """[slots]: which layer of the model each is; the number of layers stands for padding"""
    choice: jax.Array
    """[slots]: which of its slot's options"""
    depths: int
    """chunks of the model"""
    first: Sequence[int]
    """depths of those that the first stage holds, as which `plan` counts"""


def chunk_at(
    depth: jax.Array | int, depths: int, config: ModelConfig, first_depths: Sequence[int] = (0,)
) -> Chunk:
    """The chunk at that depth of `depths`. first_depths: of the first stage."""
    count, slots = config.layers, pattern.slots(pattern.layers(config), depths)
    first, end = count * depth // depths, count * (depth + 1) // depths
    numbers = first + jnp.arange(len(slots))
    choice = jnp.asarray([slot.choice for slot in slots])[:, depth]
    return Chunk(slots, jnp.where(numbers < end, numbers, count), choice, depths, first_depths)


def layer_inputs(
    batch: Batch,
    layout: Layout,
    config: ModelConfig,
    dropout: Dropout | None = None,
    token_share: jax.Array | None = None,
    buffers: Mapping[str, Any] | None = None,
) -> LayerInputs:
    """What all layers are given for one micro-batch. buffers: by kind, [n, ...]."""
    everywhere = context.gather_tokens(Tokens(batch.positions, batch.segments), layout)
    return LayerInputs(
        config=config,
        layout=layout,
        segments=batch.segments,
        everywhere=everywhere,
        rotations=all_rotations(batch.positions, config),
        dropout=dropout,
        token_share=token_share,
        buffers=buffers,
    )


def all_rotations(positions: jax.Array, config: ModelConfig) -> dict[Any, Any]:
    """`LayerInputs.rotations` of positions [B, S]."""
    needed = dict.fromkeys(
        (layer.rope, KINDS[layer.mixer].rotary_width(config)) for layer in pattern.layers(config)
    )
    return {
        (rope, width): rotations(positions, rope, width)
        for rope, width in needed
        if rope is not None and width is not None
    }


def blocks(
    p: Layers, x: jax.Array, chunk: Chunk, inputs: LayerInputs, remat: RematConfig
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """The layers of a chunk: x after them, this device's further share of the loss, and of the sums
    to log, those by layer [n, ...] in the order of the model.

    Layers whose kinds repeat are one `lax.scan` over repeats, with a loop over the period inside.
    """
    loss, totals = jnp.zeros(()), defaultdict(list)
    by_layer: dict[str, dict[str, list[jax.Array]]] = defaultdict(lambda: defaultdict(list))
    used: dict[str, int] = defaultdict(int)
    for segment in pattern.segments([slot.options for slot in chunk.slots]):
        first, repeats, period = segment
        slots = chunk.slots[first : first + period]
        here = slice(first, first + repeats * period)
        stacks = {}
        for kind in pattern.kinds_of_slots(slots):
            count = sum(slot.has(kind) for slot in slots)
            rows = slice(used[kind], used[kind] + repeats * count)
            used[kind] += repeats * count
            by_repeat = partial(_by_repeat, rows=rows, repeats=repeats)
            stacks[kind] = jax.tree.map(by_repeat, getattr(p, kind))
        told, chosen = knows_number(chunk, inputs), any(len(slot.options) > 1 for slot in slots)
        places = chunk.numbers[here].reshape(repeats, period) if told else None
        choice = chunk.choice[here].reshape(repeats, period) if chosen else None
        layers = [
            partial(
                _run_slot,
                slots=slots,
                place=place,
                scopes=_scopes(chunk.slots[here][place::period], chunk.first),
                inputs=inputs,
                depths=chunk.depths,
            )
            for place in range(period)
        ]
        x, tallies = scan_repeats(layers, x, (stacks, places, choice), remat)
        for kind in stacks:
            found = [tally[kind] for tally in tallies if kind in tally]
            loss += sum(jnp.sum(tally.loss) for tally in found)
            for tally in found:
                for name, sums in tally.totals.items():
                    totals[name].append(jnp.sum(sums, axis=0))
            for name in found[0].by_layer if found else ():
                rows = jnp.stack([tally.by_layer[name] for tally in found], axis=1)
                by_layer[kind][name].append(rows.reshape(-1, *rows.shape[2:]))
    sums = {name: sum(parts[1:], parts[0]) for name, parts in totals.items()}
    for kind, named in by_layer.items():
        for name, parts in named.items():
            sums[name] = _in_model(kind, jnp.concatenate(parts), chunk, inputs.config)
    return x, loss, sums


def knows_number(chunk: Chunk, inputs: LayerInputs) -> bool:
    """Whether anything follows from the numbers of the layers: what is random, which buffers are
    theirs, where padding is. What a recomputed layer is given it saves.
    """
    return chunk.depths > 1 or inputs.dropout is not None or bool(inputs.buffers)


def _by_repeat(stack: jax.Array, rows: slice, repeats: int) -> jax.Array:
    """Some rows of stack[n, ...] as [repeats, rows of a repeat, ...], or as [repeats, ...] where a
    repeat has one.
    """
    if rows.stop - rows.start < len(stack):
        stack = stack[rows]
    return stack if len(stack) == repeats else stack.reshape(repeats, -1, *stack.shape[1:])


def _in_model(kind: str, rows: jax.Array, chunk: Chunk, config: ModelConfig) -> jax.Array:
    """What a chunk's places of a kind have measured -> [n, ...] of the model's layers of the kind,
    zero for those of other chunks.
    """
    if chunk.depths == 1:
        return rows
    places = [place for place, slot in enumerate(chunk.slots) if slot.has(kind)]
    at = place_of(kind, config)[chunk.numbers[np.asarray(places)]]
    count = len(pattern.held(config)[kind])
    return jnp.zeros((count, *rows.shape[1:]), rows.dtype).at[at].add(rows, mode="drop")


def place_of(kind: str, config: ModelConfig) -> jax.Array:
    """[layers + 1]: the place of each layer among the n of a kind; n for others and for padding."""
    numbers = pattern.held(config)[kind]
    places = np.full(config.layers + 1, len(numbers), np.int32)
    places[numbers] = np.arange(len(numbers))
    return jnp.asarray(places)


def _run_slot(
    x: jax.Array,
    repeat: Any,
    *,
    slots: Sequence[Slot],
    place: int,
    scopes: Sequence[str],
    inputs: LayerInputs,
    depths: int,
) -> tuple[jax.Array, dict[str, Tally]]:
    """The layer at a place of a period. repeat: (parameters by kind, numbers, choices), these two
    None where nothing follows from them. scopes: of the branches of its slot.
    """
    slot, count = slots[place], inputs.config.layers

    def run(layer: Layer, x: jax.Array, repeat: Any) -> tuple[jax.Array, dict[str, Tally]]:
        stacks, numbers, _ = repeat
        p = {kind: _row(stacks[kind], slots, place, kind) for kind in layer.kinds}
        x = checkpoint_name(x, "block.input")
        own = inputs if numbers is None else of_layer(inputs, numbers[place], layer)
        after, tallies = block(p, x, layer, own)
        if depths > 1 and numbers is not None:  # a chunk may have padding
            real = numbers[place] < count
            after = jnp.where(real, after, x)
            tallies = jax.tree.map(lambda a: jnp.where(real, a, jnp.zeros_like(a)), tallies)
        return after, tallies

    if len(slot.options) == 1:
        return run(slot.options[0], x, repeat)
    branches = [partial(run, layer) for layer in slot.options]
    return _run_chosen(branches, scopes, place, x, repeat)


def _scopes(slots: Sequence[Slot], first_depths: Sequence[int]) -> list[str]:
    """Names that say how often the first stage takes each branch of slots that have the same."""
    chosen = [slot.choice[depth] for slot in slots for depth in first_depths]
    return [taken(chosen.count(number), len(chosen)) for number in range(len(slots[0].options))]


def _run_chosen(
    runs: Sequence[Callable[..., Any]], scopes: Sequence[str], place: int, x: jax.Array, repeat: Any
) -> tuple[jax.Array, dict[str, Tally]]:
    """One of several layers, whichever this chunk has at the place: a branch that all devices of
    its stage take. It is recomputed whatever the policy, since what every branch would save, its
    parameters too, would be saved for each of them.
    """
    shapes = [jax.eval_shape(run, x, repeat)[1] for run in runs]
    whole = {kind: tally for tallies in shapes for kind, tally in tallies.items()}

    def complete(run: Callable[..., Any], scope: str, x: jax.Array, repeat: Any) -> Any:
        with jax.named_scope(scope):
            after, tallies = run(x, repeat)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), whole)
        return after, zeros | tallies

    branches = [partial(complete, run, scope) for run, scope in zip(runs, scopes, strict=True)]
    return recompute_all(lambda x, repeat: lax.switch(repeat[2][place], branches, x, repeat))(
        x, repeat
    )


def _row(stack: Any, slots: Sequence[Slot], place: int, kind: str) -> Any:
    """The parameters of the layer at a place, out of a period's of its kind."""
    if sum(slot.has(kind) for slot in slots) == 1:
        return stack
    row = sum(slot.has(kind) for slot in slots[:place])
    return jax.tree.map(lambda a: a[row], stack)


def of_layer(inputs: LayerInputs, number: jax.Array | int, layer: Layer) -> LayerInputs:
    """What the layer of that number is given."""
    buffers = inputs.buffers and {
        kind: jax.tree.map(
            lambda a, kind=kind: a.at[place_of(kind, inputs.config)[number]].get(mode="clip"),
            inputs.buffers[kind],
        )
        for kind in layer.kinds
        if kind in inputs.buffers
    }
    return replace(inputs, number=number, buffers=buffers)


def block(
    p: Mapping[str, Any], x: jax.Array, layer: Layer, inputs: LayerInputs
) -> tuple[jax.Array, dict[str, Tally]]:
    """One layer: x after it, and what its halves have measured, by kind."""
    tallies = {}
    for kind, site in zip(layer.kinds, (MIXER, FFN), strict=True):
        x, tally = half(p[kind], x, partial(KINDS[kind].apply, layer=layer), kind, site, inputs)
        if tally is not None:
            tallies[kind] = tally
    return x, tallies


def half(
    p: Any, x: jax.Array, run: Callable[..., Any], kind: str, site: int, inputs: LayerInputs
) -> tuple[jax.Array, Any]:
    """One half of a layer with its norms: x with what `run(p, x, inputs=)` adds to it, and what
    else that returns.
    """
    eps = inputs.config.norm_eps
    with jax.named_scope(KINDS[kind].scope):
        y, other = run(p, x if p.norm is None else rms_norm(x, p.norm, eps), inputs=inputs)
        if p.out_norm is not None:
            y = rms_norm(y, p.out_norm, eps)
        return x + drop(y, inputs.dropout, inputs.number, site, inputs.layout), other


def head_share(
    params: Transformer, x: jax.Array, batch: Batch, layout: Layout, config: ModelConfig, loss: Loss
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """This device's share of the loss, and of the sums to log. batch.weights are relative: they add
    up to one over the global batch, so shares add up to means over its valid targets.
    """
    with jax.named_scope("unembed"):
        x, table = head(params, x, config)
        return cross_entropy_share(x, table, batch.targets, batch.weights, layout, loss)


def head(params: Transformer, x: jax.Array, config: ModelConfig) -> tuple[jax.Array, nnx.Param]:
    """x normed, and the table [V_tensor, D_fsdp] it is then multiplied by."""
    table = params.embed if params.unembed is None else params.unembed
    return rms_norm(x, params.norm, config.norm_eps), table
