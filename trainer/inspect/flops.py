"""Model FLOPs and utilisation: what a step must compute, not what an implementation happens to.

A multiplication by a weight costs 2 FLOPs per weight and token forward, twice that backward. What
layers cost is said beside their mathematics, in `models/layers`. Attention counts the visible
(query, key) pairs of a whole row, so causal attention half and a window exactly; packed documents
hide more, which is not deducted. Recomputation is not counted. MFU (arXiv 2204.02311) = FLOPs of a
step / (seconds · devices · peak FLOP/s).
"""

from __future__ import annotations

import jax

from ...models.layers.kinds import layer_flops
from ...models.pattern import layers
from ..config import Config

PEAK_BF16_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}
"""Dense bf16 FLOP/s of one device by `jax.Device.device_kind`, from the vendors' data sheets."""


def step_flops(config: Config) -> float:
    """Model FLOPs of one optimizer step, over the whole mesh."""
    model, train = config.model, config.train
    forward = 2 * model.vocab_size * model.d_model * train.seq_len
    forward += sum(layer_flops(model, layer, train.seq_len) for layer in layers(model))
    return 3 * forward * train.batch_size


def peak_flops(config: Config) -> float | None:
    """Peak FLOP/s of a device: `device.peak_flops`, or by its kind; None if unknown, as on CPU."""
    return config.device.peak_flops or PEAK_BF16_FLOPS.get(jax.devices()[0].device_kind)


def mfu(flops: float, seconds: float, devices: int, peak: float | None) -> float | None:
    """Share of the devices' peak that `flops` in `seconds` is; None when the peak is unknown."""
    return None if peak is None else flops / (seconds * devices * peak)
