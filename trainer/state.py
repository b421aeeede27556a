"""State: everything that a run carries from one step to the next, as one pytree; and where its
leaves live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..models.layers.kinds import first_buffers
from ..models.position import position_words
from ..models.transformer import Transformer
from ..sharding.layout import Layout, is_param, make_layout, specs
from ..sharding.mesh import make_mesh
from .config import Config, OptimizerConfig
from .optim.optimizer import make_optimizer
from .optim.precision import DTYPES, LossScale, first_scale


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Layers are stacked in the order in which the config's stages hold them."""

    step: jax.Array
    """completed updates, int32"""
    skipped: jax.Array
    """attempts that were not finite and changed nothing, int32"""
    position: jax.Array
    """rows consumed from the epoch stream by both, uint32 [2], see `models/position.py`"""
    params: Transformer
    """f32 masters"""
    opt: Any
    """the optimizer's moments"""
    average: Transformer | None
    """that of the parameters after each update, with optimizer.ema"""
    buffers: dict[str, Any]
    """by kind of layer what belongs to layers and is no parameter, [n, ...] in the model's order"""
    loss_scale: LossScale | None
    """of f16"""


def lay_out(config: Config, devices: Sequence[Any] | None = None) -> Layout:
    """The config's layout on `devices` (default: all). Raises ValueError where sizes do not fit."""
    mesh, reduce = make_mesh(config.mesh, devices), DTYPES[config.precision.reduce]
    return make_layout(config.layout, mesh, config.dims(), reduce, config.why_branches())


def init_state(config: Config, layout: Layout) -> State:
    """The first state, made on the mesh in one jit with the shardings it will keep."""
    shardings = state_shardings(abstract_state(config), layout)
    state = _run_once(lambda: _first_state(config), shardings)
    return with_params(state, state.params)  # a compiler may round an average of its own otherwise


def init_params(config: Config, layout: Layout) -> Transformer:
    """The parameters of `init_state` alone."""
    shardings = state_shardings(abstract_state(config), layout).params
    return _run_once(lambda: _first_state(config).params, shardings)


def _run_once(make: Callable[[], Any], shardings: Any) -> Any:
    # code that runs once is not worth optimising: this compiles in a third of the time on CPU
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(make, out_shardings=shardings, compiler_options=options)()


def abstract_state(config: Config, held: Mapping[str, Sequence[int]] | None = None) -> State:
    """Shapes and dtypes of the state, without a device. held: by kind the numbers of the layers in
    its stack, default as the config's stages hold them.
    """
    return jax.eval_shape(lambda: _first_state(config, held))


def sharded_shapes(config: Config, layout: Layout) -> State:
    """`abstract_state` with the shardings that its leaves will have."""
    state = abstract_state(config)
    return with_shardings(state, state_shardings(state, layout))


def with_shardings(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def _first_state(config: Config, held: Mapping[str, Sequence[int]] | None = None) -> State:
    held = config.held_layers() if held is None else held
    # Any: optax's types know no flax module
    params: Any = Transformer(config.model, jax.random.key(config.run.seed), held)
    zero = jnp.zeros((), jnp.int32)
    return State(
        step=zero,
        skipped=zero,
        position=jnp.asarray(position_words(0)),
        params=params,
        opt=make_optimizer(config.optimizer).init(params),
        average=None if config.optimizer.ema is None else params,
        buffers=first_buffers(config.model),
        loss_scale=first_scale(config.precision),
    )


def state_specs(state: State, layout: Layout) -> State:
    """What the optimizer keeps follows its own logical axes, those of its parameter or, of means
    over some dims, the rest of them; counters are replicated.
    """
    replicated = jax.tree.map(lambda _: P(), state)
    return replace(
        replicated,
        params=specs(state.params, layout.param_spec),
        opt=jax.tree.map(lambda node: _opt_spec(node, layout), state.opt, is_leaf=is_param),
        average=specs(state.average, layout.state_spec),
    )


def _opt_spec(node: Any, layout: Layout) -> Any:
    if not is_param(node):
        return P()
    # the Param is empty where a rule for other parameters keeps its state
    return jax.tree.map(lambda leaf: layout.state_spec(node.axes, leaf.ndim - len(node.axes)), node)


def state_shardings(state: State, layout: Layout) -> State:
    return jax.tree.map(layout.sharding, state_specs(state, layout))


def next_average(
    average: Transformer | None, params: Transformer, step: jax.Array, config: OptimizerConfig
) -> Transformer | None:
    """After update number `step` that led to `params`: their plain mean over the first 1/(1-ema)
    updates, exponential from then on. So no share of it is ever initialisation.
    """
    if average is None or config.ema is None:
        return None
    share = jnp.maximum(1 - config.ema, 1 / step)
    return jax.tree.map(lambda mean, p: mean + share * (p - mean), average, params)


def eval_params(state: State) -> Transformer:
    """Parameters to evaluate and to generate with, laid out like state.params: their average, or
    themselves where the run keeps none.
    """
    if state.average is None:
        return state.params
    return jax.device_put(state.average, jax.tree.map(lambda p: p.sharding, state.params))


def eval_part(state: State) -> dict[str, Any]:
    """The part of a state that evaluation takes, to be restored alone with the shardings of
    state.params: what `eval_params` gives, and the buffers.
    """
    name = "params" if state.average is None else "average"
    return {name: state.params, "buffers": state.buffers}


def with_params(state: State, params: Transformer) -> State:
    """A first state that begins with other parameters; the average begins with them too."""
    if state.average is None:
        return replace(state, params=params)
    # a copy: the step is given both to write over
    copy = jax.device_put(
        jax.tree.map(jnp.copy, params), jax.tree.map(lambda p: p.sharding, state.average)
    )
    return replace(state, params=params, average=copy)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Path in dots (`params.layers.attention.q`) -> leaf, in the order of `jax.tree.leaves`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
    return {
        name.removesuffix(".value"): leaf for name, (_, leaf) in zip(names, leaves, strict=True)
    }
