"""Small configs, meshes and runs that several tests share; what is costly to compile runs once."""

import functools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import version

import jax
import numpy as np

import reference
from meshwright.models.batch import Batch
from meshwright.models.pattern import held
from meshwright.models.position import position_number
from meshwright.sharding.config import MESH_AXES, LayoutConfig, MeshConfig
from meshwright.sharding.layout import Layout, is_param, make_layout
from meshwright.sharding.mesh import make_mesh
from meshwright.trainer.checkpoint.layer_order import (
    in_model_order,
    in_stage_order,
    model_order_shapes,
)
from meshwright.trainer.config import Config
from meshwright.trainer.config.load import override
from meshwright.trainer.data.loader import token_order
from meshwright.trainer.inspect.verify import LAYOUT_METRIC, REFERENCE, global_norm, synthetic_batch
from meshwright.trainer.optim.precision import first_scale
from meshwright.trainer.state import State, abstract_state, lay_out, named_leaves, sharded_shapes
from meshwright.trainer.step import make_train_step, shard_loss_and_grads

T0 = (
    "model.layers=4",
    "model.heads=4",
    "model.kv_heads=2",
    "model.d_ff=128",
    "train.seq_len=64",
    "train.batch_size=16",
)
"""The cases' model: vocabulary 257, d_model 64."""

SMALL = (
    "model.layers=2",
    "model.d_model=16",
    "model.heads=4",
    "model.kv_heads=2",
    "model.d_ff=24",
    "train.seq_len=16",
    "train.batch_size=16",
)

SGD = (
    "optimizer.name=sgd",
    "optimizer.lr=0.3",
    "optimizer.schedule=constant",
    "optimizer.momentum=0.9",
    "optimizer.clip=null",
)


def make_config(*overrides: str) -> Config:
    """On one device and with ZeRO-3, where the overrides do not say otherwise."""
    return override(Config(), *REFERENCE, *overrides)


def layout_on(dims=(), mode="ring", **keys):
    """A layout on as many of the eight devices as the mesh axes among the keys take. mode:
    layout.context, since context is an axis too."""
    axes = {"data": 1} | {key: keys.pop(key) for key in MESH_AXES if key in keys}
    mesh = make_mesh(MeshConfig(**axes), jax.devices()[: math.prod(axes.values())])
    return make_layout(LayoutConfig(context=mode, **keys), mesh, dims)


def shard_map(function, layout, in_specs, out_specs):
    return jax.jit(
        jax.shard_map(
            function, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
    )


def random_params(config: Config):
    """Parameters on the host, none of them zero or one but the vocabulary's padding: where biases
    are zero and norms one, half of the mistakes are invisible. Drawn layers first, their norms
    last."""
    rng = np.random.default_rng(1)
    params = abstract_state(config, held(config.model)).params

    def draw(param):
        value = rng.normal(size=param.get_value().shape).astype(np.float32)
        if param.role in ("norm", "bias"):
            return np.float32(param.role == "norm") + 0.3 * value
        if param.role == "embedding":
            value[config.model.vocab_size :] = 0
        return value / np.float32(math.sqrt(config.model.d_model))

    names = [*named_leaves(params)]
    leaves = dict(zip(names, jax.tree.leaves(params, is_leaf=is_param), strict=True))

    def order(name):
        return not name.startswith("layers."), name.count(".") == 2 and name.endswith(".norm"), name

    drawn = {name: leaves[name].replace(draw(leaves[name])) for name in sorted(names, key=order)}
    structure = jax.tree.structure(params, is_leaf=is_param)
    return jax.tree.unflatten(structure, [drawn[name] for name in names])


def place(batch: Batch, config: Config, layout: Layout) -> Batch:
    """A batch [1, B, S] in the config's micro-batches, on the layout's devices."""
    pieces = config.train.microbatches
    order = token_order(config.train.seq_len, layout)
    batch = jax.tree.map(lambda a: a[..., order].reshape(pieces, -1, a.shape[-1]), batch)
    return jax.device_put(batch, layout.sharding(layout.batch_spec()))


def first_devices(config: Config) -> list[jax.Device]:
    return jax.devices()[: math.prod(config.mesh.sizes().values())]


AS_SHIPPED = {"xla_cpu_use_fusion_emitters": True} if version("jaxlib").startswith("0.10.") else {}
"""Compiler options for what has to give the same bits, which conftest.py's flags do not promise."""


def layout_gradients(config: Config, batch: Batch | None = None, options=None):
    """Metrics and gradient leaves of `random_params` in the config's layout; default: the synthetic
    batch. options: of the compiler."""
    batch = synthetic_batch(config) if batch is None else batch
    layout = lay_out(config, first_devices(config))
    whole = model_order_shapes(config, layout).params
    params = jax.device_put(random_params(config), jax.tree.map(lambda leaf: leaf.sharding, whole))
    params = in_stage_order(params, sharded_shapes(config, layout).params, config)
    run = jax.jit(shard_loss_and_grads(config, layout, params), compiler_options=options)
    metrics, grads = run(params, place(batch, config, layout))
    grads = in_model_order(grads, whole, config)
    metrics, grads = jax.device_get((metrics, named_leaves(grads)))
    return {name: value.tolist() for name, value in metrics.items()}, grads


@functools.cache
def gradients(*overrides: str):
    return layout_gradients(make_config(*overrides))


def reference_loss_gradients(config: Config, batch: Batch | None = None):
    """What `layout_gradients` returns, by `reference.py`; `objective` is what is differentiated."""
    batch = synthetic_batch(config) if batch is None else batch
    loss = functools.partial(reference.loss, config=config)
    differentiate = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (objective, nll), grads = jax.device_get(differentiate(random_params(config), batch))
    return {"loss": float(nll), "objective": float(objective)}, named_leaves(grads)


@functools.cache
def reference_gradients(*overrides: str):
    return reference_loss_gradients(make_config(*overrides))


def assert_same_gradients(grads, expected):
    """Law 0: every leaf within 1e-4 of its largest value, or of 1e-6 of the global norm."""
    assert list(grads) == list(expected)
    norm = global_norm(expected)
    for name, leaf in expected.items():
        leaf = np.asarray(leaf)
        scale = max(np.abs(leaf).max(), 1e-6 * norm)
        np.testing.assert_allclose(
            grads[name] / scale, leaf / scale, rtol=0, atol=1e-4, err_msg=name
        )


def assert_same_metrics(metrics, expected, rtol=1e-5):
    assert list(metrics) == list(expected)
    for name, value in expected.items():
        if name != LAYOUT_METRIC:
            np.testing.assert_allclose(metrics[name], value, rtol=rtol, err_msg=name)


def run_steps(
    config: Config,
    batches: Iterable[Batch],
    between: Callable[[State], object] = lambda state: None,
):
    """Metrics of each update on the host, and the last state on its devices. The first has
    `random_params`. between: is shown the state after each update."""
    layout = lay_out(config, first_devices(config))
    whole = model_order_shapes(config, layout)
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), whole)
    loss_scale = jax.device_get(first_scale(config.precision))
    state = replace(state, params=random_params(config), loss_scale=loss_scale)
    state = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, whole))
    state = in_stage_order(state, sharded_shapes(config, layout), config)
    step, history = make_train_step(config, layout), []
    for batch in batches:
        state, metrics = step(state, place(batch, config, layout))
        values = {name: jax.device_get(value).tolist() for name, value in metrics.items()}
        history.append(values | {"position": position_number(metrics["position"])})
        between(state)
    return history, state


@functools.cache
def train(steps: int, *overrides: str):
    """`run_steps` on synthetic batches."""
    config = make_config(*overrides)
    batches = (synthetic_batch(override(config, f"run.seed={seed}")) for seed in range(steps))
    return run_steps(config, batches)


def assert_same_params(state: State, expected: State):
    for name, leaf in jax.device_get(named_leaves(expected.params)).items():
        found = jax.device_get(named_leaves(state.params)[name])
        scale = np.abs(leaf).max()
        np.testing.assert_allclose(found / scale, leaf / scale, rtol=0, atol=1e-4, err_msg=name)


_COLLECTIVE = re.compile(
    r'"stablehlo\.(all_gather|all_reduce|reduce_scatter|all_to_all|collective_permute)"'
    r".*?-> \(?tensor<(?:\d+x)*(\w+)>",
    re.DOTALL,
)


def collectives(text: str) -> list[tuple[str, str]]:
    """(name, dtype of the first result) of each collective in StableHLO text, in its order."""
    return _COLLECTIVE.findall(text)
