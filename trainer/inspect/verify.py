"""Law 0 as a command: one batch through one device and through every layout, compared leaf by leaf.

The batch is synthetic and hard on purpose: packed documents, uneven loss masks, a row without any
target, the targets of one data shard all masked. Everything is computed in f32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from ...models.batch import Batch
from ...models.transformer import Transformer
from ...sharding.config import MESH_AXES
from ...sharding.keys import check_local
from ..checkpoint.layer_order import in_model_order, in_stage_order, model_order_shapes
from ..config import Config
from ..config.load import override, read_value
from ..data.loader import token_order
from ..runtime.devices import prepare_devices
from ..runtime.processes import check_same_config
from ..state import init_params, lay_out, named_leaves, sharded_shapes
from ..step import shard_loss_and_grads
from .plan import say_compiling

LOSS_TOLERANCE = 1e-5
"""Largest relative difference of the loss and of every other metric."""

GRADIENT_TOLERANCE = 1e-4
"""Largest difference in a gradient leaf, over the largest value of that leaf."""

SMALLEST_LEAF = 1e-6
"""A leaf's largest value counts as at least this share of the global gradient norm."""

LAYOUT_METRIC = "expert_rounds"
"""What a layout takes, and so the one metric that differs."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "mesh.pipe": (1, 2, 4),
    "mesh.data": (1, 2),
    "mesh.fsdp": (1, 2, 4),
    "mesh.context": (1, 2, 4, 8),
    "mesh.tensor": (1, 2, 4),
    "layout.zero": (3, 0, 1, 2),
    "layout.sequence_parallel": ("true", "false"),
    "layout.overlap": ("none", "ring"),
    "layout.context": ("ring", "zigzag", "ulysses", "all_gather", "usp"),
    "layout.schedule": ("1f1b", "gpipe", "interleaved", "zb_h1"),
    "train.microbatches": (1, 4),
    "remat.policy": ("none", "full"),
}
"""What the default cover varies: axes and options that change how a step is computed. The first of
each is the reference's. Left to --layouts: selective and offloaded recomputation, layout.chunks,
layout.overlap=bidirectional, dropout, and mesh.expert of a model without experts."""

EXPERT_CHOICES: dict[str, tuple[Any, ...]] = {
    "mesh.expert": (1, 2, 4, 8),
    "layout.experts": ("[expert]", "[context]", "[expert,context]", "[context,tensor]"),
}
"""What it varies as well where the model has experts, instead of how queries meet keys and of
collective matmul: those do not touch experts.
"""

PIPELINES = (
    "mesh.pipe=2 mesh.fsdp=4 layout.schedule=zb_h2 train.microbatches=4",
    "mesh.pipe=2 mesh.tensor=2 mesh.fsdp=2 layout.schedule=zb_v train.microbatches=4 layout.zero=1",
    "mesh.pipe=2 mesh.context=2 layout.context=ulysses layout.schedule=dualpipe_v "
    "train.microbatches=4 remat.policy=full",
    "mesh.pipe=4 layout.schedule=zb_v train.microbatches=4",
    "mesh.pipe=8 layout.schedule=1f1b train.microbatches=4",
    "mesh.pipe=8 layout.schedule=zb_h1 train.microbatches=8",
)
"""What the default cover adds, where it is possible: schedules that do not meet everything."""

TOGETHER = ("mesh.tensor", "layout.sequence_parallel", "layout.overlap")
"""Keys of CHOICES that say how activations move: any two values do not cover the third."""

ONE_DEVICE = (
    "device.cpu_devices=null",
    "mesh.dcn={}",
    *(f"mesh.{axis}=1" for axis in MESH_AXES),
    "layout.experts=[expert]",
    "layout.schedule_file=null",
    "train.eval_batch_size=null",
    "precision.compute=f32",
    "precision.reduce=f32",
    "precision.loss_scale=null",
    "precision.first_scale=null",
    "train.halt_on_nan=false",
)
"""Overrides that put any config on one device, in f32."""

REFERENCE = (
    *ONE_DEVICE,
    *("remat.names=null", "remat.every=1", "layout.ulysses=null"),
    "layout.chunks=null",
    *(f"{key}={values[0]}" for key, values in CHOICES.items()),
)
"""What the layouts of the default cover start from."""


@dataclass(frozen=True)
class Comparison:
    """One layout beside one device. Differences are relative, see the tolerances above."""

    layout: str
    loss: float
    metrics: float
    norm: float
    gradient: float
    leaf: str

    @property
    def equal(self) -> bool:
        """False for not-a-number too."""
        metrics = self.loss <= LOSS_TOLERANCE and self.metrics <= LOSS_TOLERANCE
        return metrics and self.norm <= GRADIENT_TOLERANCE and self.gradient <= GRADIENT_TOLERANCE


def verify(config: Config, layouts: str | Path | None = None) -> bool:
    """Compare each layout with one device, print a line for each, say whether all are equal.

    layouts: a text file with one layout a line, as key=value overrides of `config` on one device;
    # starts a comment. Default: a pairwise cover of CHOICES, and PIPELINES, as far as the model and
    the devices allow. Raises ValueError where a layout is impossible or there is none.
    """
    if layouts is not None:
        check_local(layouts, "--layouts ")
    prepare_devices(config)
    if layouts is None:
        config = override(config, *REFERENCE)
        chosen = [*pairwise_cover(config), *possible_pipelines(config)]
    else:
        chosen = read_layouts(Path(layouts))
    if not chosen:
        devices = jax.device_count()
        raise ValueError(
            f"{layouts or 'mesh'}: no layout to compare, on {devices} device(s); "
            f"device.cpu_devices=8 simulates more"
        )
    check_same_config(config, {"layouts": chosen})
    return print_comparisons(config, chosen)


def print_comparisons(config: Config, layouts: Sequence[str]) -> bool:
    """A line for each layout as soon as it is compared; whether all are equal."""
    say_compiling(f"the step of one device and of {len(layouts)} layout(s)", jax.devices())
    console = Console(soft_wrap=True, highlight=False, emoji=False)
    console.print("relative differences from one device; the gradient's is that of its worst leaf")
    head = "loss", "metrics", "norm", "gradient"
    console.print(f"{'':9}{'  '.join(f'{name:8}' for name in head)} {'of leaf':24} layout")
    equal = 0
    for result in compare(config, layouts):
        equal += result.equal
        verdict = "equal  " if result.equal else "DIFFERS"
        differences = result.loss, result.metrics, result.norm, result.gradient
        figures = "  ".join(f"{difference:<8.1e}" for difference in differences)
        console.print(f"{verdict}  {figures} {result.leaf:24} {result.layout}", markup=False)
    console.print(f"{equal} of {len(layouts)} layouts equal one device")
    return equal == len(layouts)


def compare(config: Config, layouts: Sequence[str]) -> Iterator[Comparison]:
    """Each layout's loss, metrics and gradients beside those of one device, in f32.

    layouts: overrides, separated by spaces, of the config on one device.
    """
    reference = override(config, *ONE_DEVICE)
    configs = [layout_config(reference, layout) for layout in layouts]
    batch = synthetic_batch(reference)
    params = jax.device_get(init_params(reference, lay_out(reference, jax.devices()[:1])))
    expected, expected_grads = run_layout(reference, params, batch)
    norm = global_norm(expected_grads)
    for layout, config in zip(layouts, configs, strict=True):
        metrics, grads = run_layout(config, params, batch)
        differences = {
            name: relative(metrics[name], value)
            for name, value in expected.items()
            if name != LAYOUT_METRIC
        }
        leaves = {
            name: np.max(np.abs(grads[name] - leaf)) / max(np.abs(leaf).max(), SMALLEST_LEAF * norm)
            for name, leaf in expected_grads.items()
        }
        # not-a-number is the worst of all
        worst = max(leaves, key=lambda name: np.nan_to_num(leaves[name], nan=np.inf))
        yield Comparison(
            layout=layout,
            loss=differences["loss"],
            metrics=float(np.max(list(differences.values()))),
            norm=relative(global_norm(grads), norm),
            gradient=float(leaves[worst]),
            leaf=worst,
        )


def layout_config(reference: Config, layout: str) -> Config:
    """The config of one line of a layouts file. Raises ValueError naming the line."""
    try:
        config = override(reference, *layout.split())
        if -1 in config.mesh.sizes().values():
            raise ValueError("write every mesh axis as a number, none as -1")
        needed = math.prod(config.mesh.sizes().values())
        if needed > jax.device_count():
            raise ValueError(
                f"it needs {needed} devices, but there are {jax.device_count()}; "
                f"device.cpu_devices={needed} simulates them"
            )
    except ValueError as error:
        raise ValueError(f"layout `{layout}`: {error}") from None
    return config


def run_layout(
    config: Config, params: Transformer, batch: Batch
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metrics, and whole gradient leaves by name, of a batch [1, B, S] on the first devices, as
    many as the config's mesh needs; params and batch from the host.
    """
    layout = lay_out(config, jax.devices()[: math.prod(config.mesh.sizes().values())])
    target = model_order_shapes(config, layout).params
    held = sharded_shapes(config, layout).params
    params = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, target))
    params = in_stage_order(params, held, config)
    pieces = config.train.microbatches
    order = token_order(config.train.seq_len, layout)
    batch = jax.tree.map(lambda a: a[..., order].reshape(pieces, -1, a.shape[-1]), batch)
    batch = jax.device_put(batch, layout.sharding(layout.batch_spec()))
    metrics, grads = jax.jit(shard_loss_and_grads(config, layout, params))(params, batch)
    grads = in_model_order(grads, target, config)
    return jax.device_get((metrics, named_leaves(grads)))


def synthetic_batch(config: Config) -> Batch:
    """[1, B, S] of random tokens in random documents, about a third of the targets masked, the last
    rows, less than half, without any target; the first, if it is not the only one, padding alone.
    """
    rng = np.random.default_rng(config.run.seed)
    shape = rows, tokens = config.train.batch_size, config.train.seq_len
    ids = rng.integers(0, config.model.vocab_size, (rows, tokens + 1), dtype=np.int32)
    starts = rng.random(shape) < 4 / tokens
    starts[:, 0] = True
    segments = np.cumsum(starts, axis=1, dtype=np.int32) - 1
    column = np.broadcast_to(np.arange(tokens, dtype=np.int32), shape)
    positions = column - np.maximum.accumulate(np.where(starts, column, 0), axis=1)
    weights = (rng.random(shape) < 0.7).astype(np.float32)
    weights[rows // 2 + 1 :] = 0.0
    if rows > 1:
        weights[0], segments[0] = 0.0, -1
    arrays = (ids[:, :-1], ids[:, 1:], weights, positions, segments)
    return Batch(*(jnp.asarray(array)[None] for array in arrays))


def pairwise_cover(config: Config) -> list[str]:
    """Few layouts in which every two values of different keys of `choices_for` meet at least once,
    and all values of TOGETHER, as far as `config` and the devices allow; greedy, always the same,
    larger meshes first.
    """
    bits: dict[tuple[str, ...], int] = {}
    met_by = {}
    for layout, choices in possible_layouts(config).items():
        together = tuple(choice for choice in choices if choice.startswith(TOGETHER))
        met = {*combinations(choices, 2), together}
        met_by[layout] = sum(1 << bits.setdefault(values, len(bits)) for values in met)
    cover, missing = [], (1 << len(bits)) - 1
    while missing:
        cover.append(max(met_by, key=lambda layout: (met_by[layout] & missing).bit_count()))
        missing &= ~met_by[cover[-1]]
    return cover


def possible_pipelines(config: Config) -> list[str]:
    """Those of PIPELINES that `config` and the devices allow; says why others are left out."""
    reference, possible = override(config, *REFERENCE), []
    for layout in PIPELINES:
        try:
            layout_config(reference, layout)
            possible.append(layout)
        except ValueError as error:
            print(f"left out: {error}")
    return possible


def choices_for(config: Config) -> dict[str, tuple[Any, ...]]:
    """CHOICES, or those of a model with experts."""
    if config.model.moe.experts is None:
        return CHOICES
    dropped = {"layout.context", "layout.overlap"}
    if config.model.moe.aux_loss_over == "microbatch":  # a unit whose losses depend on them
        dropped.add("train.microbatches")
    kept = {key: values for key, values in CHOICES.items() if key not in dropped}
    return kept | EXPERT_CHOICES


def possible_layouts(config: Config) -> dict[str, list[str]]:
    """Every combination of `choices_for` that `config` and the devices allow, one device left out:
    the layout, as overrides of the reference -> all its choices.
    """
    reference, choices = override(config, *REFERENCE), choices_for(config)
    parsed = {
        f"{key}={value}": read_value(str(value), key)
        for key, values in choices.items()
        for value in values
    }
    layouts = {}
    for values in reversed(list(product(*choices.values()))):
        value_of = dict(zip(choices, values, strict=True))
        devices = math.prod(value for key, value in value_of.items() if key.startswith("mesh."))
        unread = any(
            value_of[axis] == 1 and value_of.get(key, CHOICES[key][0]) != CHOICES[key][0]
            for axis, key in (
                ("mesh.context", "layout.context"),
                ("mesh.pipe", "layout.schedule"),
            )
        )
        alone = value_of["mesh.context"] == 1
        unread |= alone and "context" in value_of.get("layout.experts", "")
        if unread or not 1 < devices <= jax.device_count():
            continue
        chosen = [f"{key}={value}" for key, value in value_of.items()]
        changed = [choice for choice in chosen if choice not in REFERENCE]
        if is_possible(reference, {choice: parsed[choice] for choice in changed}):
            layouts[" ".join(changed)] = chosen
    return layouts


def is_possible(config: Config, changes: dict[str, Any]) -> bool:
    """Whether the config allows other values of some keys, `key=text` -> value: `override` without
    the way through text, since thousands are asked for.
    """
    sections: dict[str, dict[str, Any]] = {}
    for change, value in changes.items():
        section, name = change.partition("=")[0].split(".")
        sections.setdefault(section, {})[name] = value
    try:
        changed = {name: replace(getattr(config, name), **new) for name, new in sections.items()}
        replace(config, **changed)
    except ValueError:
        return False
    return True


def read_layouts(path: Path) -> list[str]:
    """Lines of a layouts file without comments and empty ones; inside a word, # is part of it.
    Raises ValueError if unreadable.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--layouts {path}: {error}") from None
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if line]


def relative(value: Any, expected: Any) -> float:
    """The largest of an array's."""
    difference = np.abs(np.asarray(value) - np.asarray(expected))
    return float(np.max(difference / np.maximum(np.abs(expected), 1e-30)))


def global_norm(grads: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in grads.values())))
