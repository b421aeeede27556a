"""The plain model on one device, from the papers: whole arrays, whole logits, autodiff.

It shares no code with the model it checks, only the parameter tree and the batch. Rows of all
micro-batches go through at once: a mean over valid targets does not care how they are grouped.
"""

import jax
import jax.numpy as jnp


def loss(params, batch, config):
    """Mean objective over the valid targets of batch [G, B, S], and the mean nll; routers' losses
    are means over all tokens but padding."""
    model, train = config.model, config.train
    rows = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), batch)
    z, within = forward(params, rows, model, train.microbatches)
    log_p = jax.nn.log_softmax(z)
    nll = -jnp.take_along_axis(log_p, rows.targets[..., None], axis=-1)[..., 0]
    objective = (1 - train.label_smoothing) * nll - train.label_smoothing * log_p.mean(-1)
    objective += train.z_loss * jax.nn.logsumexp(z, axis=-1) ** 2
    mean = rows.weights / rows.weights.sum()
    return jnp.sum(objective * mean) + within, jnp.sum(nll * mean)


def logits(params, rows, model):
    """[B, S, vocabulary] of a batch [B, S]."""
    return forward(params, rows, model, 1)[0]


def forward(params, rows, model, pieces):
    """Logits, and the routers' losses; pieces: micro-batches."""
    x, within = params.embed[...][rows.tokens], 0.0
    for layer in range(model.layers):
        dense = layer < model.dense_layers
        stack, place = (
            (params.dense_blocks, layer) if dense else (params.blocks, layer - model.dense_layers)
        )
        p = jax.tree.map(lambda a, place=place: a[place], stack)
        x = x + attention(p.attention, norm(x, p.norm1[...], model), rows, model)
        h = norm(x, p.norm2[...], model)
        if model.experts is None or dense:
            x = x + mlp(p.mlp, h)
        else:
            y, more = moe(p.mlp, h, rows, model, pieces)
            x, within = x + y, within + more
    table = params.embed if params.unembed is None else params.unembed
    z = norm(x, params.norm[...], model) @ table[...][: model.vocab_size].T
    z = model.logit_softcap * jnp.tanh(z / model.logit_softcap) if model.logit_softcap else z
    return z, within


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


def moe(p, x, rows, model, pieces):
    """Every expert meets every token; gates choose. [B, S, D], and the losses of its router."""
    count, real = model.experts, rows.segments >= 0
    z = jnp.einsum("bsd,de->bse", x, p.router[...])
    score = jax.nn.softmax(z) if model.router_scores == "softmax" else jax.nn.sigmoid(z)
    allowed = to_bits(score, 12)
    if model.groups_per_token:
        parts = jnp.stack(jnp.split(allowed, model.expert_groups, axis=-1), axis=-2)
        worth = jnp.sort(parts, axis=-1)[..., -2:].sum(-1)
        place = jnp.arange(model.expert_groups)
        same = worth[..., None, :] == worth[..., :, None]
        better = worth[..., None, :] > worth[..., :, None]
        better |= same & (place[None, :] < place[:, None])[None, None]
        chosen = better.sum(-1) < model.groups_per_token
        allowed = jnp.where(chosen[..., None], parts, 0.0)
        allowed = allowed.reshape(score.shape)
    best = jnp.argsort(-allowed, axis=-1)[..., : model.experts_per_token]
    choice = (best[..., None] == jnp.arange(count)[None, None, None]) & real[..., None, None]
    gate = jnp.take_along_axis(score, best, axis=-1)  # [B, S, k]; choice [B, S, k, E]
    kept = fits(choice, gate, model) if model.capacity else choice
    if model.normalize_gates:
        gate = gate / gate.sum(-1, keepdims=True)
    weight = (gate[..., None] * kept).sum(-2) * model.gate_scale
    hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, p.gate[...]))
    hidden = hidden * jnp.einsum("bsd,edf->bsef", x, p.up[...])
    y = jnp.einsum("bse,bsef,efd->bsd", weight, hidden, p.down[...])
    if p.shared is not None:
        y = y + mlp(p.shared, x)

    share = score / score.sum(-1, keepdims=True)
    row = jnp.arange(len(real)) // (len(real) // pieces)
    same = rows.segments[:, None, :, None] == rows.segments[None, :, None, :]
    if model.balance == "sequence":
        same &= (jnp.arange(len(real))[:, None] == jnp.arange(len(real))[None])[..., None, None]
    else:
        same = (row[:, None] == row[None])[..., None, None] & jnp.ones_like(same)
    load = jnp.einsum("bcst,ctke->bse", same.astype(x.dtype), choice.astype(x.dtype))
    load = load / jnp.maximum(load.sum(-1, keepdims=True), 1.0)
    token = real / real.sum()
    balance = model.balance_loss * count * jnp.sum((load * share).sum(-1) * token)
    return y, balance + model.router_z_loss * jnp.sum(jax.nn.logsumexp(z, axis=-1) ** 2 * token)


def fits(choice, gate, model):
    """Whether fewer choices of the same expert than it takes come before, in the routing group."""
    size, width = model.routing_group, model.experts_per_token
    slots = jnp.ceil(size * width / model.experts * model.capacity)

    def by_group(a):
        a = a.reshape(-1, size, *a.shape[2:]).swapaxes(1, 2)
        return a.reshape(-1, width * size, *a.shape[3:])

    one, claim = by_group(choice), by_group(gate)
    place = jnp.arange(width * size)
    first = jnp.broadcast_to((place[:, None] > place[None])[None], (len(one), *place.shape * 2))
    if model.overflow == "probability":
        claim = to_bits(claim, 6)
        same = claim[:, None, :] == claim[:, :, None]
        first = (claim[:, None, :] > claim[:, :, None]) | (same & first)
    before = jnp.einsum("gnm,gme->gne", first.astype(gate.dtype), one.astype(gate.dtype))
    one = one & (before < slots)
    one = one.reshape(-1, width, size, model.experts).swapaxes(1, 2)
    return one.reshape(choice.shape)


def to_bits(a, bits):
    """The nearest number with so many bits after its first: on this grid choices are compared."""
    fraction, exponent = jnp.frexp(jax.lax.stop_gradient(a))
    return jnp.ldexp(jnp.round(jnp.ldexp(fraction, bits + 1)), exponent - bits - 1)
