"""Two processes of four devices each: everyone reads the rows that its own devices hold."""

import json

from processes import run_processes

READ = """
import json
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
    ended = run_processes(READ, devices=4)
    assert [process.returncode for process in ended] == [0, 0]
    first, second = ([json.loads(line) for line in one.printed] for one in ended)
    halves = [[*range(32, 36), *range(40, 44)], [*range(36, 40), *range(44, 48)]]
    for (by_data, by_fsdp, _), half in zip((first, second), halves, strict=True):
        assert by_data == by_fsdp == [[half], half]
    # tensor=8 spans both processes: each holds, and reads, every row
    assert first[2] == second[2] == [[list(range(32, 48))], list(range(32, 48))]
