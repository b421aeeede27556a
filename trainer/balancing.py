"""Experts in balance without a loss, and what is logged of them, from the counts of a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..models.config import ModelConfig


def first_bias(model: ModelConfig) -> jax.Array | None:
    """[layers with experts, E] of State; None without model.balance_bias."""
    if not model.balance_bias or model.experts is None:
        return None
    return jnp.zeros((model.layers - model.dense_layers, model.experts), jnp.float32)


def next_bias(
    bias: jax.Array | None, metrics: dict[str, jax.Array], model: ModelConfig
) -> jax.Array | None:
    """After an update: more for experts that were chosen less often than the mean, less for the
    others (arXiv 2408.15664). Counts are integers, so it is the same on every mesh.
    """
    if bias is None:
        return None
    load = metrics["expert_load"]
    # the mean lies between these two; total - load·E would outgrow 32 bits
    total, count = jnp.sum(load, axis=-1, keepdims=True), load.shape[-1]
    sign = (load < -(-total // count)).astype(jnp.float32) - (load > total // count)
    return bias + model.balance_bias * sign


def expert_metrics(metrics: dict[str, jax.Array], pieces: int) -> dict[str, jax.Array]:
    """Counts of `pieces`, devices times micro-batches, as figures. expert_load [L]: choices of each
    layer's most chosen expert over the mean; dropped: share of choices that found no room;
    expert_rounds: exchanges of a micro-batch and layer, 0 where nothing travels.
    """
    if "expert_load" not in metrics:
        return metrics
    load = metrics["expert_load"].astype(jnp.float32)
    mean = jnp.maximum(jnp.mean(load, axis=-1), 1e-30)
    figures: dict[str, Any] = {
        "expert_load": jnp.max(load, axis=-1) / mean,
        "expert_rounds": metrics["expert_rounds"] / (pieces * len(load)),
    }
    if "dropped" in metrics:
        figures["dropped"] = jnp.sum(metrics["dropped"]) / jnp.maximum(jnp.sum(load), 1.0)
    return metrics | figures
