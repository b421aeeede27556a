"""Two processes of four devices each: everyone reads the rows that its own devices hold."""

import json
import socket
import subprocess
import sys

PROCESS = """
import json, sys
import jax, numpy as np
port, process = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(process))
from meshwright.sharding.config import LayoutConfig, MeshConfig
from meshwright.sharding.layout import make_layout
from meshwright.sharding.mesh import make_mesh
from meshwright.trainer.data.loader import batch_at
from meshwright.trainer.data.rows import Rows

def rows(positions):
    read.append(positions.tolist())
    values = np.broadcast_to(positions[:, None], (len(positions), 4)).astype(np.int32)
    return Rows(values, values, values.astype(np.float32), values, values)

for sizes in ({"data": 4, "tensor": 2}, {"data": 2, "fsdp": 4}, {"data": 1, "tensor": 8}):
    read = []
    layout = make_layout(LayoutConfig(), make_mesh(MeshConfig(**sizes)), ())
    batch = batch_at(rows, 32, 16, 2, 4, layout.sharding(layout.batch_spec()))
    shards = [np.asarray(shard.data) for shard in batch.tokens.addressable_shards]
    held = sorted({int(row) for shard in shards for row in shard[..., 0].ravel()})
    print(json.dumps([read, held]))
"""


def test_processes_read_the_rows_their_devices_hold():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen([sys.executable, "-c", PROCESS, port, str(i)], stdout=subprocess.PIPE)
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    first, second = ([json.loads(line) for line in output.splitlines()] for output in outputs)
    halves = [[*range(32, 36), *range(40, 44)], [*range(36, 40), *range(44, 48)]]
    for (by_data, by_fsdp, _), half in zip((first, second), halves, strict=True):
        assert by_data == by_fsdp == [[half], half]
    # tensor=8 spans both processes: each holds, and reads, every row
    assert first[2] == second[2] == [[list(range(32, 48))], list(range(32, 48))]
