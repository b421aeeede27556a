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
    x, within, used = params.embed[...][rows.tokens], 0.0, {}

    def own(kind):
        """The parameters of the next layer that has the kind."""
        place = used[kind] = used.get(kind, -1) + 1
        return jax.tree.map(lambda a: a[place], getattr(params.layers, kind))

    def add(x, p, function):
        h = x if p.norm is None else norm(x, p.norm[...], model)
        y, more = function(h)
        return x + (y if p.out_norm is None else norm(y, p.out_norm[...], model)), more

    for number in range(model.layers):
        mixer, ffn, window, theta = layer(number, model)
        p = own(mixer)
        mix = {"attention": attention, "mla": latent_attention}[mixer]
        x, _ = add(x, p, lambda h, p=p, m=mix, w=window, t=theta: (m(p, h, rows, model, w, t), 0.0))
        p = own(ffn)
        if ffn == "swiglu":
            x, _ = add(x, p, lambda h, p=p: (mlp(p, h), 0.0))
        else:
            x, more = add(x, p, lambda h, p=p: experts(p, h, rows, model, pieces))
            within = within + more
    table = params.embed if params.unembed is None else params.unembed
    z = norm(x, params.norm[...], model) @ table[...][: model.vocab_size].T
    z = model.logit_softcap * jnp.tanh(z / model.logit_softcap) if model.logit_softcap else z
    return z, within


def layer(number, model):
    """Mixer, what follows it, window and base of RoPE (None: no RoPE) of a layer."""
    usual = "swiglu" if model.moe.experts is None else "moe"
    if model.segments:
        flat = [one for part in model.segments for _ in range(part.repeats) for one in part.layers]
        one = flat[number]
        theta = (one.rope_theta or model.rope_theta) if one.rope else None
        return one.mixer or model.mixer, one.ffn or usual, one.window, theta
    window = model.window
    if model.window_pattern:
        window = model.window_pattern[number % len(model.window_pattern)]
    theta = model.local_rope_theta if window and model.local_rope_theta else model.rope_theta
    if model.rope_pattern and not model.rope_pattern[number % len(model.rope_pattern)]:
        theta = None
    return model.mixer, "swiglu" if number < model.dense_layers else usual, window, theta


def norm(x, scale, model, dims=-1):
    wide = x * scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)
    return wide / jnp.sqrt(jnp.mean(x**2, axis=dims, keepdims=True) + model.norm_eps)


def attention(p, x, rows, model, window, theta):
    def project(w, b):
        y = jnp.einsum("bsd,dhk->bshk", x, w[...])
        return y if b is None else y + b[...][None, None]

    q, k, v = project(p.q, p.q_bias), project(p.k, p.k_bias), project(p.v, p.v_bias)
    if p.q_norm is not None:
        dims = -1 if model.qk_norm == "head" else (-2, -1)
        q, k = norm(q, p.q_norm[...], model, dims), norm(k, p.k_norm[...], model, dims)
    if theta is not None:
        q, k = rope(q, rows.positions, theta), rope(k, rows.positions, theta)
    group = model.heads // model.num_kv_heads
    o = mix(q, jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2), p, rows, model, window)
    if p.gate is not None:
        o = o * jax.nn.sigmoid(project(p.gate, None))
    y = jnp.einsum("bqhk,hkd->bqd", o, p.o[...])
    return y if p.o_bias is None else y + p.o_bias[...][None, None]


def latent_attention(p, x, rows, model, window, theta):
    """Every head's keys and values written out."""
    rank, plain = model.mla.kv_rank, model.mla.nope_dim

    def heads(x, w):
        return jnp.einsum("bsr,rhk->bshk", x, w[...])

    if p.q is not None:
        q = heads(x, p.q)
    else:
        q = heads(norm(x @ p.q_down[...], p.q_norm[...], model), p.q_up)
    down = x @ p.kv_down[...]
    latent, key = norm(down[..., :rank], p.kv_norm[...], model), down[:, :, None, rank:]
    if theta is not None:
        key = rope(key, rows.positions, theta)
        q = jnp.concatenate([q[..., :plain], rope(q[..., plain:], rows.positions, theta)], axis=-1)
    shared = jnp.broadcast_to(key, (*q.shape[:3], key.shape[-1]))
    k = jnp.concatenate([heads(latent, p.k_up), shared], axis=-1)
    o = mix(q, k, heads(latent, p.v_up), p, rows, model, window)
    if p.gate is not None:
        o = o * jax.nn.sigmoid(heads(x, p.gate))
    return jnp.einsum("bqhk,hkd->bqd", o, p.o[...])


def mix(q, k, v, p, rows, model, window):
    """Softmax attention with as many keys and values as queries have heads."""
    score = jnp.einsum("bqhk,bshk->bhqs", q, k) / jnp.sqrt(q.shape[-1])
    if model.attention_softcap:
        score = model.attention_softcap * jnp.tanh(score / model.attention_softcap)
    distance = rows.positions[:, :, None] - rows.positions[:, None, :]
    visible = (rows.segments[:, :, None] == rows.segments[:, None, :]) & (distance >= 0)
    if window:
        visible &= distance < window
    score = jnp.where(visible[:, None], score, -1e30)
    if p.sink is not None:
        extra = jnp.broadcast_to(p.sink[...][:, None, None], (*score.shape[:3], 1))
        score = jnp.concatenate([score, extra], axis=-1)
    weight = jax.nn.softmax(score)[..., : k.shape[1]]
    return jnp.einsum("bhqs,bshk->bqhk", weight, v)


def rope(x, positions, theta):
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half) / half)
    turn = jnp.exp(1j * positions[..., None, None] * frequency[None, None, None])
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def mlp(p, x):
    def add(y, b):
        return y if b is None else y + b[...][None, None]

    gate, up = add(x @ p.gate[...], p.gate_bias), add(x @ p.up[...], p.up_bias)
    return add((gate * jax.nn.sigmoid(gate) * up) @ p.down[...], p.down_bias)


def experts(p, x, rows, model, pieces):
    """Every expert meets every token; gates choose. [B, S, D], and the losses of its router."""
    moe = model.moe
    count, real = moe.experts, rows.segments >= 0
    z = jnp.einsum("bsd,de->bse", x, p.router[...])
    score = jax.nn.softmax(z) if moe.scores == "softmax" else jax.nn.sigmoid(z)
    allowed = to_bits(score, 12)
    if moe.groups_per_token:
        parts = jnp.stack(jnp.split(allowed, moe.groups, axis=-1), axis=-2)
        worth = jnp.sort(parts, axis=-1)[..., -2:].sum(-1)
        place = jnp.arange(moe.groups)
        same = worth[..., None, :] == worth[..., :, None]
        better = worth[..., None, :] > worth[..., :, None]
        better |= same & (place[None, :] < place[:, None])[None, None]
        chosen = better.sum(-1) < moe.groups_per_token
        allowed = jnp.where(chosen[..., None], parts, 0.0)
        allowed = allowed.reshape(score.shape)
    best = jnp.argsort(-allowed, axis=-1)[..., : moe.experts_per_token]
    choice = (best[..., None] == jnp.arange(count)[None, None, None]) & real[..., None, None]
    gate = jnp.take_along_axis(score, best, axis=-1)  # [B, S, k]; choice [B, S, k, E]
    kept = fits(choice, gate, model) if moe.capacity_factor else choice
    if moe.normalize_gates:
        gate = gate / gate.sum(-1, keepdims=True)
    weight = (gate[..., None] * kept).sum(-2) * moe.gate_scale
    hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, p.gate[...]))
    hidden = hidden * jnp.einsum("bsd,edf->bsef", x, p.up[...])
    y = jnp.einsum("bse,bsef,efd->bsd", weight, hidden, p.down[...])
    if p.shared is not None:
        y = y + mlp(p.shared, x)

    share = score / score.sum(-1, keepdims=True)
    row = jnp.arange(len(real)) // (len(real) // pieces)
    same = rows.segments[:, None, :, None] == rows.segments[None, :, None, :]
    if moe.aux_loss_over == "sequence":
        same &= (jnp.arange(len(real))[:, None] == jnp.arange(len(real))[None])[..., None, None]
    else:
        same = (row[:, None] == row[None])[..., None, None] & jnp.ones_like(same)
    load = jnp.einsum("bcst,ctke->bse", same.astype(x.dtype), choice.astype(x.dtype))
    load = load / jnp.maximum(load.sum(-1, keepdims=True), 1.0)
    token = real / real.sum()
    balance = moe.aux_loss * count * jnp.sum((load * share).sum(-1) * token)
    return y, balance + moe.z_loss * jnp.sum(jax.nn.logsumexp(z, axis=-1) ** 2 * token)


def fits(choice, gate, model):
    """Whether fewer choices of the same expert than it takes come before, in the routing group."""
    moe = model.moe
    size, width = moe.routing_group, moe.experts_per_token
    slots = jnp.ceil(size * width / moe.experts * moe.capacity_factor)

    def by_group(a):
        a = a.reshape(-1, size, *a.shape[2:]).swapaxes(1, 2)
        return a.reshape(-1, width * size, *a.shape[3:])

    one, claim = by_group(choice), by_group(gate)
    place = jnp.arange(width * size)
    first = jnp.broadcast_to((place[:, None] > place[None])[None], (len(one), *place.shape * 2))
    if moe.overflow == "probability":
        claim = to_bits(claim, 6)
        same = claim[:, None, :] == claim[:, :, None]
        first = (claim[:, None, :] > claim[:, :, None]) | (same & first)
    before = jnp.einsum("gnm,gme->gne", first.astype(gate.dtype), one.astype(gate.dtype))
    one = one & (before < slots)
    one = one.reshape(-1, width, size, moe.experts).swapaxes(1, 2)
    return one.reshape(choice.shape)


def to_bits(a, bits):
    """The nearest number with so many bits after its first: on this grid choices are compared."""
    fraction, exponent = jnp.frexp(jax.lax.stop_gradient(a))
    return jnp.ldexp(jnp.round(jnp.ldexp(fraction, bits + 1)), exponent - bits - 1)
