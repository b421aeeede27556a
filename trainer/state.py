"""State: everything that a run carries from one step to the next, as one pytree; and where its
leaves live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..models.position import position_words
from ..models.transformer import Transformer
from ..sharding.layout import Layout, is_param, make_layout, specs
from ..sharding.mesh import make_mesh
from .balancing import first_bias
from .config import Config
from .optimizer import Average, make_optimizer
from .precision import DTYPES, LossScale, first_scale


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """step: completed updates, int32. skipped: attempts that were not finite and changed nothing,
    int32. position: rows consumed from the epoch stream by both, uint32 [2], see
    `models/position.py`. params: f32 masters. opt: the optimizer's moments, and its average of the
    parameters if there is one. loss_scale: of f16, else None. router_bias: of layers and experts,
    f32, what is added to scores where experts are chosen, with model.balance_bias, else None.
    """

    step: jax.Array
    skipped: jax.Array
    position: jax.Array
    params: Transformer
    opt: Any
    loss_scale: LossScale | None
    router_bias: jax.Array | None


def lay_out(config: Config, devices: Sequence[Any] | None = None) -> Layout:
    """The config's layout on `devices` (default: all). Raises ValueError where sizes do not fit."""
    mesh, reduce = make_mesh(config.mesh, devices), DTYPES[config.precision.reduce]
    return make_layout(config.layout, mesh, config.dims(), reduce)


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


def abstract_state(config: Config, numbers: Sequence[int] | None = None) -> State:
    """Shapes and dtypes of the state, without a device. numbers: of the layers it holds, default
    those of the config's stages.
    """
    return jax.eval_shape(lambda: _first_state(config, numbers))


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


def _first_state(config: Config, numbers: Sequence[int] | None = None) -> State:
    numbers = config.stacked_layers() if numbers is None else numbers
    # Any: optax's types know no flax module
    params: Any = Transformer(config.model, jax.random.key(config.run.seed), numbers)
    zero = jnp.zeros((), jnp.int32)
    return State(
        step=zero,
        skipped=zero,
        position=jnp.asarray(position_words(0)),
        params=params,
        opt=make_optimizer(config.optimizer).init(params),
        loss_scale=first_scale(config.precision),
        router_bias=first_bias(config.model),
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
    )


def _opt_spec(node: Any, layout: Layout) -> Any:
    if not is_param(node):
        return P()
    # the Param is empty where a rule for other parameters keeps its state
    return jax.tree.map(lambda leaf: layout.state_spec(node.axes, leaf.ndim - len(node.axes)), node)


def state_shardings(state: State, layout: Layout) -> State:
    return jax.tree.map(layout.sharding, state_specs(state, layout))


def eval_params(state: State) -> Transformer:
    """Parameters to evaluate and to generate with, laid out like state.params: the optimizer's
    average of them, or themselves where it keeps none.
    """
    average = state.opt[-1]
    if not isinstance(average, Average):
        return state.params
    return jax.device_put(average.params, jax.tree.map(lambda p: p.sharding, state.params))


def eval_part(state: State) -> dict[str, Any]:
    """The part of a state that evaluation takes, to be restored alone with the shardings of
    state.params: what `eval_params` gives, and the routers' bias where there is one.
    """
    if state.router_bias is not None:
        return eval_part(replace(state, router_bias=None)) | {"router_bias": state.router_bias}
    if not isinstance(state.opt[-1], Average):
        return {"params": state.params}
    return {"opt": (*[None] * len(state.opt[:-1]), Average(params=state.params))}


def with_params(state: State, params: Transformer) -> State:
    """A first state that begins with other parameters; the average begins with them too."""
    average = state.opt[-1]
    if not isinstance(average, Average):
        return replace(state, params=params)
    # a copy: the step is given both to write over
    copy = jax.device_put(
        jax.tree.map(jnp.copy, params), jax.tree.map(lambda p: p.sharding, average.params)
    )
    return replace(state, params=params, opt=(*state.opt[:-1], replace(average, params=copy)))


def named_leaves(tree: Any) -> dict[str, Any]:
    """Path in dots (`params.blocks.attention.q`) -> leaf, in the order of `jax.tree.leaves`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
    return {
        name.removesuffix(".value"): leaf for name, (_, leaf) in zip(names, leaves, strict=True)
    }
