"""What saving costs a run of 100M parameters (1.2 GB of state): the seconds that `save` keeps the
loop waiting, as a share of a step; the seconds until the checkpoint is committed; how much slower
steps are meanwhile; and what verifying and restoring take.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
from measure import parse_rounds, random_batch

from meshwright import load
from meshwright.trainer.checkpoint.restore import restore
from meshwright.trainer.checkpoint.save import open_checkpoints
from meshwright.trainer.data.tokenizer import ByteTokenizer
from meshwright.trainer.runtime.devices import prepare_devices
from meshwright.trainer.state import init_state, lay_out, sharded_shapes
from meshwright.trainer.step import make_train_step

CONFIG = (
    *("train.seq_len=128", "train.batch_size=8", "train.microbatches=1", "precision.compute=f32"),
    *("mesh.data=1", "mesh.fsdp=2", "device.platform=cpu", "device.cpu_devices=2"),
)


def main() -> int:
    rounds = parse_rounds(__doc__, default=3)
    config = load("small", *CONFIG)
    prepare_devices(config)
    layout = lay_out(config)
    state = init_state(config, layout)
    batch = jax.device_put(random_batch(config), layout.sharding(layout.batch_spec()))
    step = make_train_step(config, layout).lower(state, batch).compile()

    def timed_step() -> float:
        nonlocal state
        started = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        return time.perf_counter() - started

    def timed(work) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    timed_step()
    alone, stall, commit, during = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        text = ByteTokenizer.text
        with open_checkpoints(Path(folder), config, layout, text, {}, print) as checkpoints:
            for number in range(rounds + 1):  # the first warms up
                alone.append(timed_step())
                started = time.perf_counter()
                stall.append(timed(lambda number=number: checkpoints.save(number, state)))
                during.append(timed_step())
                checkpoints.wait()
                commit.append(time.perf_counter() - started)
        target = sharded_shapes(config, layout)
        restoring = timed(lambda: jax.block_until_ready(restore(Path(folder), target)[1]))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    first = stall.pop(0)
    alone, commit, during = (statistics.median(times[1:]) for times in (alone, commit, during))
    waits = statistics.median(stall)
    print(f"{parameters:,} parameters, {size / 1e9:.2f} GB of state, {rounds} rounds, medians")
    print(f"step alone          {alone:6.2f} s")
    print(
        f"save keeps waiting  {waits:6.2f} s, {waits / alone:.2f} of a step (first: {first:.2f} s)"
    )
    print(f"step while writing  {during:6.2f} s, {during / alone:.2f} of a step alone")
    print(f"until committed     {commit:6.2f} s, that step included")
    print(f"restore and check   {restoring:6.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
