"""What Meshwright is measured against: the same model, written the straightforward way.

Whole-array attention, whole logits, autodiff, one `lax.scan` over layers. `plain_single` is a step
for one device; `plain_sharded` adds ZeRO-3 over `fsdp` and Megatron tensor and sequence parallelism
over `tensor`, as explicit collectives in one `shard_map`. Both start from Meshwright's parameters
and batch and are held to its loss and gradient norm.

Shapes: B sequences, S tokens, D width, H heads, K kv heads, d head_dim, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from measure import Program, random_batch, stepper

from meshwright.models.batch import Batch
from meshwright.models.config import ModelConfig
from meshwright.models.transformer import Layers, Transformer
from meshwright.sharding.layout import Layout, spec_axes, specs
from meshwright.trainer.config import Config
from meshwright.trainer.optim.learning_rate import learning_rate
from meshwright.trainer.optim.optimizer import decayed
from meshwright.trainer.state import init_state, lay_out
from meshwright.trainer.step import make_train_step


class PlainState(NamedTuple):
    params: Transformer
    opt: optax.OptState


def plain_single(config: Config):
    """The jitted step (state, batch) -> (state, metrics) of one device; the state is donated."""
    model = config.model

    def block(x, p: Layers, rows: Batch):
        a = norm(x, p.attention.norm[...], model)
        q, k, v = (project(a, w[...]) for w in (p.attention.q, p.attention.k, p.attention.v))
        x = x + merge(attention(q, k, v, rows, model), p.attention.o[...])
        m = norm(x, p.swiglu.norm[...], model)
        hidden = jax.nn.silu(m @ p.swiglu.gate[...]) * (m @ p.swiglu.up[...])
        return x + hidden @ p.swiglu.down[...]

    def mean_nll(params: Transformer, rows: Batch):
        x = params.embed[...][rows.tokens]
        x = norm(scan_blocks(block, x, params, rows, config), params.norm[...], model)
        logits = x @ params.unembed[...][: model.vocab_size].T
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, rows.targets)
        return jnp.sum(nll * rows.weights) / jnp.sum(rows.weights)

    return jax.jit(make_step(jax.value_and_grad(mean_nll), config), donate_argnums=0)


def plain_sharded(config: Config, layout: Layout):
    """The same for the axes fsdp and tensor of a mesh whose other axes have size 1."""
    model = config.model

    def block(x, p: Layers, rows: Batch):  # x[B_fsdp, S_tensor, D]
        a = enter(norm(x, p.attention.norm[...], model))
        weights = (p.attention.q, p.attention.k, p.attention.v)
        q, k, v = (project(a, gather(w[...], dim=0)) for w in weights)
        o = attention(q, k, v, rows, model)
        x = x + leave(merge(o, gather(p.attention.o[...], dim=2)))
        m = enter(norm(x, p.swiglu.norm[...], model))
        gate, up = (m @ gather(w[...], dim=0) for w in (p.swiglu.gate, p.swiglu.up))
        return x + leave((jax.nn.silu(gate) * up) @ gather(p.swiglu.down[...], dim=1))

    def nll_share(params: Transformer, rows: Batch):
        """Shares add up to the loss over the mesh: every tensor rank has 1/tensor of its rows'."""
        embed, unembed = gather(params.embed[...], dim=1), gather(params.unembed[...], dim=1)
        first_row = lax.axis_index("tensor") * embed.shape[0]

        def locate(ids):  # row in this device's part of a table, and whether it is there
            row = ids - first_row
            here = (row >= 0) & (row < embed.shape[0])
            return jnp.where(here, row, 0), here

        row, here = locate(rows.tokens)
        x = leave(jnp.where(here[..., None], embed[row], 0.0))
        x = norm(scan_blocks(block, x, params, rows, config), params.norm[...], model)
        logits = enter(x) @ unembed.T  # [B_fsdp, S, V_tensor]
        top = lax.pmax(lax.stop_gradient(logits.max(axis=-1)), "tensor")
        total = lax.psum(jnp.exp(logits - top[..., None]).sum(axis=-1), "tensor")
        row, here = locate(rows.targets)
        at_target = jnp.take_along_axis(logits, row[..., None], axis=-1)[..., 0]
        nll = top + jnp.log(total) - lax.psum(jnp.where(here, at_target, 0.0), "tensor")
        tokens = lax.psum(jnp.sum(rows.weights), "fsdp")
        return jnp.sum(nll * rows.weights) / tokens / lax.axis_size("tensor")

    def loss_and_grads(params: Transformer, rows: Batch):
        loss, grads = jax.value_and_grad(nll_share)(params, rows)
        # over an axis that does not cut it every device has a share of the gradient
        grads = jax.tree.map(lambda g, cut: lax.psum(g, uncut(cut)), grads, cuts)
        return lax.psum(loss, AXES), grads

    state = jax.eval_shape(lambda: init_plain(config))
    cuts = specs(state.params, layout.param_spec)
    whole_loss_and_grads = jax.shard_map(
        loss_and_grads,
        mesh=layout.mesh,
        in_specs=(cuts, P("fsdp")),
        out_specs=(P(), cuts),
        check_vma=False,
    )
    shardings = shard_plain(state, layout)
    return jax.jit(
        make_step(whole_loss_and_grads, config),
        in_shardings=(shardings, layout.sharding(layout.batch_spec())),
        out_shardings=(shardings, layout.sharding(P())),
        donate_argnums=0,
    )


AXES = ("fsdp", "tensor")


def uncut(spec: P) -> list[str]:
    """Which of AXES a spec does not name."""
    return [axis for axis in AXES if axis not in spec_axes(spec)]


def gather(weight: jax.Array, dim: int) -> jax.Array:
    """w[.., D_fsdp, ..] -> w[.., D, ..]"""
    return lax.all_gather(weight, "fsdp", axis=dim, tiled=True)


def enter(x: jax.Array) -> jax.Array:
    """x[B, S_tensor, D] -> x[B, S, D]"""
    return lax.all_gather(x, "tensor", axis=1, tiled=True)


def leave(y: jax.Array) -> jax.Array:
    """y[B, S, D]{partial over tensor} -> y[B, S_tensor, D]"""
    return lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("bsd,dhk->bshk", x, weight)


def merge(o: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("bshk,hkd->bsd", o, weight)


def norm(x: jax.Array, scale: jax.Array, model: ModelConfig) -> jax.Array:
    x = x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + model.norm_eps)
    return x * scale[None, None]


def rotate(x: jax.Array, positions: jax.Array, model: ModelConfig) -> jax.Array:
    """RoPE on x [B, S, H, d]: channel i of the first half and of the second form a pair."""
    frequency = model.rope_theta ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angle = positions[:, :, None, None] * frequency[None, None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, rows: Batch, model: ModelConfig
) -> jax.Array:
    """Causal within each document: q [B, S, H, d], k, v [B, S, K, d] -> [B, S, H, d]."""
    q, k = rotate(q, rows.positions, model), rotate(k, rows.positions, model)
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    visible = rows.positions[:, :, None] >= rows.positions[:, None, :]
    visible &= rows.segments[:, :, None] == rows.segments[:, None, :]
    score = jnp.einsum("bqhd,bshd->bhqs", q, k) / q.shape[-1] ** 0.5
    weight = jax.nn.softmax(jnp.where(visible[:, None], score, -1e30))
    return jnp.einsum("bhqs,bshd->bqhd", weight, v)


def scan_blocks(block, x: jax.Array, params: Transformer, rows: Batch, config: Config) -> jax.Array:
    def layer(x, p: Layers):
        return block(x, p, rows), None

    if config.remat.policy == "full":
        layer = jax.checkpoint(layer, prevent_cse=False)
    return lax.scan(layer, x, params.layers)[0]


def make_step(loss_and_grads, config: Config):
    """(params, rows [B, S]) -> (loss, grads), with the update: (state, batch [1, B, S]) -> ..."""
    rule = make_optimizer(config)

    def step(state: PlainState, batch: Batch):
        loss, grads = loss_and_grads(state.params, jax.tree.map(lambda a: a[0], batch))
        updates, opt = rule.update(grads, state.opt, state.params)
        params = optax.apply_updates(state.params, updates)
        return PlainState(params, opt), {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    return step


def make_optimizer(config: Config) -> optax.GradientTransformation:
    o, settings = config.optimizer, config.optimizer.settings
    rate = learning_rate(o, config.train)
    adamw = optax.adamw(
        *(rate, settings.b1, settings.b2, settings.eps),
        weight_decay=o.weight_decay,
        mask=lambda p: decayed(p, o),
    )
    return optax.chain(optax.clip_by_global_norm(o.clip), adamw)


def init_plain(config: Config) -> PlainState:
    params = Transformer(config.model, jax.random.key(config.run.seed))
    return PlainState(params, make_optimizer(config).init(params))


def shard_plain(state: PlainState, layout: Layout) -> Any:
    """Parameters and moments lie where Meshwright has them with ZeRO-3."""
    return jax.tree.map(layout.sharding, specs(state, layout.param_spec))


def programs(config: Config) -> tuple[Program, Program]:
    """Meshwright's step and the plain one, at the same parameters."""
    layout = lay_out(config)
    batch = jax.device_put(random_batch(config), layout.sharding(layout.batch_spec()))

    def make_plain():
        return plain_single(config) if layout.mesh.size == 1 else plain_sharded(config, layout)

    shardings = shard_plain(jax.eval_shape(lambda: init_plain(config)), layout)
    state = jax.jit(lambda: init_plain(config), out_shardings=shardings)()
    ours = Program(lambda: make_train_step(config, layout), init_state(config, layout), batch)
    return ours, Program(make_plain, state, batch)


def steppers(ours: Program, plain: Program, compiled: tuple[Any, Any]):
    """Both as calls that make one step each, after two that must give the same numbers."""
    calls = stepper(compiled[0], ours), stepper(compiled[1], plain)
    for step in (1, 2):
        a, b = (jax.device_get(call()) for call in calls)
        for name, relative in (("loss", 1e-5), ("grad_norm", 1e-4)):
            if abs(a[name] - b[name]) > relative * abs(b[name]):
                raise SystemExit(f"step {step}: {name} {a[name]} is {b[name]} in the plain step")
    return calls
