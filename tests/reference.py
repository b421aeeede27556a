"""The plain model on one device, from the papers: whole arrays, whole logits, autodiff.

It shares no code with the model it checks, only the parameter tree and the batch. Rows of all
micro-batches go through at once: a mean over valid targets does not care how they are grouped.
"""

import jax
import jax.numpy as jnp


def loss(params, batch, config):
    """Mean objective over the valid targets of batch [G, B, S], and the mean nll."""
    model, train = config.model, config.train
    rows = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), batch)
    z = logits(params, rows, model)
    log_p = jax.nn.log_softmax(z)
    nll = -jnp.take_along_axis(log_p, rows.targets[..., None], axis=-1)[..., 0]
    objective = (1 - train.label_smoothing) * nll - train.label_smoothing * log_p.mean(-1)
    objective += train.z_loss * jax.nn.logsumexp(z, axis=-1) ** 2
    mean = rows.weights / rows.weights.sum()
    return jnp.sum(objective * mean), jnp.sum(nll * mean)


def logits(params, rows, model):
    """[B, S, vocabulary] of a batch [B, S]."""
    x = params.embed[...][rows.tokens]
    for layer in range(model.layers):
        p = jax.tree.map(lambda a, layer=layer: a[layer], params.blocks)
        x = x + attention(p.attention, norm(x, p.norm1[...], model), rows, model)
        x = x + mlp(p.mlp, norm(x, p.norm2[...], model))
    table = params.embed if params.unembed is None else params.unembed
    z = norm(x, params.norm[...], model) @ table[...][: model.vocab_size].T
    return model.logit_softcap * jnp.tanh(z / model.logit_softcap) if model.logit_softcap else z


def norm(x, scale, model):
    wide = x * scale.reshape((1,) * (x.ndim - 1) + (-1,))
    return wide / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + model.norm_eps)


def attention(p, x, rows, model):
    def project(w, b):
        y = jnp.einsum("bsd,dhk->bshk", x, w[...])
        return y if b is None else y + b[...][None, None]

    q, k, v = project(p.q, p.q_bias), project(p.k, p.k_bias), project(p.v, p.v_bias)
    if p.q_norm is not None:
        q, k = norm(q, p.q_norm[...], model), norm(k, p.k_norm[...], model)
    q, k = rope(q, rows.positions, model), rope(k, rows.positions, model)
    group = model.heads // model.num_kv_heads
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    score = jnp.einsum("bqhk,bshk->bhqs", q, k) / jnp.sqrt(model.size_per_head)
    if model.attention_softcap:
        score = model.attention_softcap * jnp.tanh(score / model.attention_softcap)
    distance = rows.positions[:, :, None] - rows.positions[:, None, :]
    visible = (rows.segments[:, :, None] == rows.segments[:, None, :]) & (distance >= 0)
    if model.window:
        visible &= distance < model.window
    score = jnp.where(visible[:, None], score, -1e30)
    if p.sink is not None:
        extra = jnp.broadcast_to(p.sink[...][:, None, None], (*score.shape[:3], 1))
        score = jnp.concatenate([score, extra], axis=-1)
    weight = jax.nn.softmax(score)[..., : k.shape[1]]
    o = jnp.einsum("bhqs,bshk->bqhk", weight, v)
    y = jnp.einsum("bqhk,hkd->bqd", o, p.o[...])
    return y if p.o_bias is None else y + p.o_bias[...][None, None]


def rope(x, positions, model):
    half = model.size_per_head // 2
    frequency = model.rope_theta ** (-jnp.arange(half) / half)
    turn = jnp.exp(1j * positions[..., None, None] * frequency[None, None, None])
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def mlp(p, x):
    def add(y, b):
        return y if b is None else y + b[...][None, None]

    gate, up = add(x @ p.gate[...], p.gate_bias), add(x @ p.up[...], p.up_bias)
    return add((gate * jax.nn.sigmoid(gate) * up) @ p.down[...], p.down_bias)
