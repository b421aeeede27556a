"""fsdp=4, tensor=2 on eight simulated devices: Meshwright's step over a plain explicit-collective
step with whole logits (plain.py).

4 layers, d_model 256, 4 heads of 64, d_ff 1024, vocabulary 32,000 untied, 8 rows of 512 tokens,
f32, AdamW, full remat.
"""

from __future__ import annotations

import sys
from functools import partial

from measure import alternate, compile_cold, parse_rounds, ratios, report, start_jax, temp_ratio
from plain import programs, steppers

from meshwright.models.config import ModelConfig, RematConfig
from meshwright.sharding.config import MeshConfig
from meshwright.trainer.config import Config, TrainConfig

CONFIG = Config(
    model=ModelConfig(vocab_size=32_000, layers=4, d_model=256, heads=4, d_ff=1024),
    mesh=MeshConfig(data=1, fsdp=4, tensor=2),
    train=TrainConfig(batch_size=8, seq_len=512),
    remat=RematConfig(policy="full"),
)

STEP_CPU, TEMP_BYTES, COMPILE_CPU = 1.0, 0.6, 1.3


def main() -> int:
    rounds = parse_rounds(__doc__, default=5)
    start_jax(8)
    ours, plain = programs(CONFIG)
    compile_costs = alternate(partial(compile_cold, ours), partial(compile_cold, plain), rounds)
    compiled = compile_cold(ours), compile_cold(plain)
    step_costs = alternate(*steppers(ours, plain, compiled), rounds)
    figures = [
        *ratios("step", step_costs, cpu=STEP_CPU),
        temp_ratio("step", *compiled, bound=TEMP_BYTES),
        *ratios("compile", compile_costs, cpu=COMPILE_CPU),
    ]
    return report("fsdp=4 · tensor=2, full remat: Meshwright / plain", figures)


if __name__ == "__main__":
    sys.exit(main())
