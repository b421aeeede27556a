"""A pipeline schedule is a table, stage × tick -> slot, and this file writes the published ones.

Letters: p stages (devices of the pipe axis), r one of them, m micro-batches, v chunks of layers on
each stage. The p·v chunks lie one behind the other in the model: a chunk's depth, 0 … p·v-1.

A slot is what a stage does in one tick: nothing, or at most one op of each kind, in this order:
F, forward; B, gradient of the input; W, gradient of the weights. B and W of one micro-batch in
one slot are the undivided backward pass; F beside them is DualPipe's overlapped pair. A slot takes
its inputs when it begins and sends its results when it ends, one tick before anyone can use them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

Placement = Literal["contiguous", "round_robin", "v"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

Name = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v"]
NAMES: tuple[Name, ...] = get_args(Name)
UNIFORM = ("gpipe", "1f1b", "interleaved")
"""Those that exist in lockstep, too."""

BUFFERS: tuple[str, ...] = ("x", "dy", "stash", "taps")
"""What waits on a stage for its op: x, an activation received for F; dy, a gradient received for B,
or made by the head; stash, what F keeps for B; taps, what B keeps for W."""


class Op(NamedTuple):
    kind: str
    """F, B or W"""
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Slot = tuple[Op, ...]


class Value(NamedTuple):
    """One micro-batch's entry in one of BUFFERS."""

    buffer: str
    stage: int
    microbatch: int
    chunk: int


class Result(NamedTuple):
    """What an op has made, wherever its chunk lies."""

    kind: str
    microbatch: int
    depth: int


@dataclass(frozen=True)
class Schedule:
    name: str
    microbatches: int
    chunks: int
    placement: Placement
    table: tuple[tuple[Slot, ...], ...]
    """[stage][tick]"""
    rows: Mapping[Value, int]
    """the row of its buffer in which a value waits"""
    uniform: bool = False
    """whether it is a lockstep form"""

    @property
    def stages(self) -> int:
        return len(self.table)

    @property
    def ticks(self) -> int:
        return len(self.table[0])

    @property
    def buffers(self) -> dict[str, int]:
        """Rows of each buffer: every stage runs the same program, so the fullest stage decides."""
        sizes = dict.fromkeys(BUFFERS, 0)
        for value, row in self.rows.items():
            sizes[value.buffer] = max(sizes[value.buffer], row + 1)
        return sizes

    def ops(self) -> Iterator[tuple[int, int, Op]]:
        """(stage, tick, op), in the order of time."""
        for tick in range(self.ticks):
            for stage in range(self.stages):
                for op in self.table[stage][tick]:
                    yield stage, tick, op

    def result(self, stage: int, op: Op) -> Result:
        depth = depth_of(self.placement, self.stages, self.chunks, stage, op.chunk)
        return Result(op.kind, op.microbatch, depth)


def depth_of(placement: Placement, stages: int, chunks: int, stage: int, chunk: int) -> int:
    """How many chunks of the model stand before this one.

    contiguous: a stage's chunks follow each other; round_robin: chunk c of all stages, then c+1;
    v: the same, but odd chunks run from the last stage back to the first.
    """
    match placement:
        case "contiguous":
            return stage * chunks + chunk
        case "round_robin":
            return chunk * stages + stage
        case "v":
            return chunk * stages + (stage if chunk % 2 == 0 else stages - 1 - stage)


def needs(result: Result, depths: int) -> list[Result]:
    """What must be there before it: B and W of a chunk need its F and B; F the F before, B the B
    behind it. The last chunk's B needs the head, which runs with its F.
    """
    kind, microbatch, depth = result
    if kind == "W":
        return [Result("B", microbatch, depth)]
    if kind == "B":
        behind = [Result("B", microbatch, depth + 1)] if depth + 1 < depths else []
        return [Result("F", microbatch, depth), *behind]
    return [Result("F", microbatch, depth - 1)] if depth else []


def build_schedule(
    name: str, stages: int, microbatches: int, chunks: int | None = None, uniform: bool = False
) -> Schedule:
    """A published schedule in the order of its paper; ticks follow: each slot as early as it can.

    gpipe 1811.06965; 1f1b, interleaved 2104.04473; zb_h1, zb_h2, zb_v 2401.10241; dualpipe_v, the
    half of 2412.19437 that holds the parameters once. uniform: the lockstep form of those in
    UNIFORM, in which a phase runs on all stages or on none but for masks; same bubble, more memory.
    Raises ValueError for a name or for sizes that do not exist.
    """
    p, m = stages, microbatches
    if name not in NAMES:
        raise ValueError(f"no schedule is named {name}; there are {', '.join(NAMES)}")
    v = _chunks(name, chunks)
    for what, size in (("stages", p), ("microbatches", m), ("chunks", v)):
        if size < 1:
            raise ValueError(f"{what}={size}: write at least 1")
    if name == "interleaved" and m % p:
        raise ValueError(
            f"microbatches={m} is not a multiple of stages={p}, which interleaved needs: "
            f"write microbatches={m + p - m % p}"
        )
    if name == "dualpipe_v" and m < 2 * p:
        raise ValueError(
            f"microbatches={m} is less than twice stages={p}, which dualpipe_v needs: "
            f"write microbatches={2 * p}"
        )
    if uniform and name not in UNIFORM:
        raise ValueError(f"{name} has no uniform form; {', '.join(UNIFORM)} have one")
    placement = "v" if name in ("zb_v", "dualpipe_v") else "round_robin" if v > 1 else "contiguous"
    if uniform and name != "gpipe":  # which is its own uniform form
        return finish(name, m, v, placement, _lockstep(p, m, v), uniform)
    orders = [_order(name, p, r, m, v) for r in range(p)]
    return finish(name, m, v, placement, _in_ticks(orders, v, placement), uniform)


def finish(
    name: str,
    microbatches: int,
    chunks: int,
    placement: Placement,
    table: Sequence[Sequence[Slot]],
    uniform: bool = False,
) -> Schedule:
    """A schedule with a row for each of its values, as few rows as can be. table: [stage][tick],
    in which every op has its place.
    """
    bare = Schedule(name, microbatches, chunks, placement, tuple(map(tuple, table)), {}, uniform)
    rows: dict[Value, int] = {}
    held: dict[tuple[str, int], list[int]] = defaultdict(list)  # the last use of each row
    for value, (birth, death) in sorted(lifetimes(bare).items(), key=lambda item: item[1]):
        deaths = held[value.buffer, value.stage]
        row = next((row for row, last in enumerate(deaths) if last < birth), len(deaths))
        deaths[row : row + 1] = [death]
        rows[value] = row
    return replace(bare, rows=rows)


def forward_schedule(stages: int, microbatches: int, chunks: int, placement: Placement) -> Schedule:
    """Forward passes alone, to evaluate with the layers where training has them; uniform, so that
    anything may run inside a stage.
    """
    units = sorted(
        ((m, c) for m in range(microbatches) for c in range(chunks)),
        key=lambda unit: (unit[0] // stages, unit[1], unit[0]),
    )
    order: list[Slot] = [(Op("F", *unit),) for unit in units]
    table = _in_ticks([order] * stages, chunks, placement)
    return finish("forward", microbatches, chunks, placement, table, uniform=True)


def held_depths(stages: int, chunks: int, placement: Placement) -> list[int]:
    """Depths of all chunks as stages hold them: stage by stage, chunk by chunk."""
    return [
        depth_of(placement, stages, chunks, stage, chunk)
        for stage in range(stages)
        for chunk in range(chunks)
    ]


def lifetimes(schedule: Schedule) -> dict[Value, tuple[int, int]]:
    """When each value is written and when it is last read, as 5·tick + phase of the tick.

    The phases are F, head, B, W and exchange: what a neighbour sends arrives at the end of a tick.
    A W in the slot of its B finds the taps at hand: they need no row. An F without a B keeps
    nothing.
    """
    forward, head, backward, weight, exchange = range(5)
    last = schedule.stages * schedule.chunks - 1
    when = {schedule.result(stage, op): 5 * tick for stage, tick, op in schedule.ops()}
    lives = {}
    for stage, tick, op in schedule.ops():
        kind, microbatch, depth = schedule.result(stage, op)
        now, place = 5 * tick, (stage, microbatch, op.chunk)
        if kind == "F":
            if depth > 0:
                sent = when[Result("F", microbatch, depth - 1)] + exchange
                lives[Value("x", *place)] = (sent, now + forward)
            if (back := Result("B", microbatch, depth)) in when:
                lives[Value("stash", *place)] = (now + forward, when[back] + backward)
        elif kind == "B":
            if depth < last:
                sent = when[Result("B", microbatch, depth + 1)] + exchange
            else:
                sent = when[Result("F", microbatch, depth)] + head
            lives[Value("dy", *place)] = (sent, now + backward)
            used = when[Result("W", microbatch, depth)]
            if used != now:
                lives[Value("taps", *place)] = (now + backward, used + weight)
    return lives


def read_slot(text: str) -> Slot:
    """`F3`, `B3.1` (of chunk 1), `BW3` (B3+W3), `F4+BW3.1`; nothing is idle. Raises ValueError."""
    ops = []
    for part in text.split("+") if text else ():
        found = re.fullmatch(r"(F|BW|B|W)(\d{1,6})(?:\.(\d{1,3}))?", part, re.ASCII)
        if found is None:
            raise ValueError(
                f"{text!r} is no slot; write F3, B3, W3 or BW3, .1 behind it for chunk 1, "
                "+ between ops that run in one slot"
            )
        ops += [Op(kind, int(found[2]), int(found[3] or 0)) for kind in found[1]]
    if (kinds := [op.kind for op in ops]) != sorted(set(kinds), key="FBW".index):
        raise ValueError(f"{text!r}: a slot runs at most one F, one B and one W, in this order")
    return tuple(ops)


def write_slot(slot: Slot) -> str:
    """What `read_slot` reads."""
    text = "+".join(map(str, slot))
    return re.sub(r"B([\d.]+)\+W\1$", r"BW\1", text)


def _chunks(name: str, chunks: int | None) -> int:
    """v: given for interleaved, 2 in a V, 1 elsewhere."""
    if name == "interleaved":
        if chunks is None:
            raise ValueError("interleaved needs chunks, the pieces each stage is cut into: write 2")
        return chunks
    only = 2 if name in ("zb_v", "dualpipe_v") else 1
    if chunks not in (None, only):
        raise ValueError(f"chunks={chunks}: {name} has {only} on each stage; write chunks={only}")
    return only


def _order(name: str, p: int, r: int, m: int, v: int) -> list[Slot]:
    """The slots of stage r, in the paper's order."""
    behind = p - 1 - r
    forwards = [_unit(k, p, v) for k in range(m * v)]
    backwards = [(microbatch, v - 1 - chunk) for microbatch, chunk in forwards]
    match name:
        case "gpipe":
            return _alternate(forwards, backwards, m)
        case "1f1b":
            return _alternate(forwards, backwards, behind)
        case "interleaved":
            return _alternate(forwards, backwards, 2 * behind + (v - 1) * p)
        case "zb_h1":
            return _alternate(forwards, backwards, behind, delay=r)
        case "zb_h2":
            return _alternate(forwards, backwards, 2 * behind, delay=2 * r)
        case "zb_v":
            return _numbered(
                ["F0"] * (2 * behind + 1)
                + ["F1", "F0"] * r
                + ["F1", "B1", "W"] * (p - r)
                + ["F0", "B0", "W", "F1", "B1", "W"] * (m - p)
                + ["B0", "B1"] * r
                + ["B0", "W"] * (p - r)
                + ["W", "W"] * r,
                m,
            )
        case _:  # dualpipe_v
            main = ["F0+BW1", "F1+BW0"] * (m - 2 * p + r + 1)
            if behind == 0:  # here the first pair is one micro-batch: there is nothing to overlap
                main[:1] = ["F0", "BW1"]
            drain = [f"{'BW' if k <= r else 'B'}{1 - k % 2}" for k in range(2 * (r + 1))]
            return _numbered(
                ["F0"] * (2 * behind)
                + ["F0", "F1"] * (r + 1)
                + ["B1", "W", "F1"] * behind
                + main
                + ["BW1", "F1+BW0"] * behind
                + drain
                + ["W", "B0"] * behind
                + ["W"] * (r + 1),
                m,
            )


def _unit(k: int, p: int, v: int) -> tuple[int, int]:
    """(micro-batch, chunk) of a stage's k-th forward: p micro-batches pass a chunk, then the next
    chunk; after the last chunk come the next p micro-batches.
    """
    group, rest = divmod(k, p * v)
    return group * p + rest % p, rest // p


def _alternate(
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]],
    ahead: int,
    delay: int | None = None,
) -> list[Slot]:
    """`ahead` forwards, then one forward and one backward in turn, then the other backwards.

    forwards, backwards: (micro-batch, chunk). With a delay, W has a slot of its own, so many
    backwards after its B; without one, B and W are one slot.
    """
    slots: list[Slot] = [(Op("F", *unit),) for unit in forwards[:ahead]]
    for i, unit in enumerate(backwards):
        slots += [(Op("F", *unit),) for unit in forwards[ahead + i : ahead + i + 1]]
        if delay is None:
            slots.append((Op("B", *unit), Op("W", *unit)))
            continue
        slots.append((Op("B", *unit),))
        if i >= delay:
            slots.append((Op("W", *backwards[i - delay]),))
    late = backwards[max(len(backwards) - (delay or 0), 0) :]
    return slots + [(Op("W", *unit),) for unit in late]


def _numbered(plan: Iterable[str], m: int) -> list[Slot]:
    """Slots of two chunks from a plan in which the digit is the chunk: F0's n-th place is micro-
    batch n's, and places beyond m fall away. A lone W is that of the B which waits longest.
    """
    done: Counter[tuple[str, int]] = Counter()
    waiting: deque[Op] = deque()
    slots: list[Slot] = []
    for text in plan:
        ops = []
        if text == "W":
            ops = [waiting.popleft()._replace(kind="W")] if waiting else []
        for part in text.split("+") if text != "W" else ():
            kinds, chunk = part[:-1], int(part[-1])
            n = done[kinds[0], chunk]
            if n < m:
                done[kinds[0], chunk] += 1
                ops += [Op(kind, n, chunk) for kind in kinds]
                waiting += [Op("B", n, chunk)] if kinds == "B" else []
        slots += [tuple(ops)] if ops else []
    return slots


def _in_ticks(
    orders: Sequence[Sequence[Slot]], chunks: int, placement: Placement
) -> list[list[Slot]]:
    """Each stage's slots in their order, every one in the first tick that has what it needs."""
    stages = len(orders)
    table: list[list[Slot]] = [[] for _ in orders]
    at, done = [0] * stages, set()
    while any(at[stage] < len(order) for stage, order in enumerate(orders)):
        made = set()
        for stage, order in enumerate(orders):
            slot = order[at[stage]] if at[stage] < len(order) else ()
            results = [
                Result(op.kind, op.microbatch, depth_of(placement, stages, chunks, stage, op.chunk))
                for op in slot
            ]
            wanted = (need for result in results for need in needs(result, stages * chunks))
            ready = all(need in done or need in results for need in wanted)
            table[stage].append(slot if ready else ())
            if slot and ready:
                at[stage] += 1
                made.update(results)
        assert made, "the orders wait for each other"
        done |= made
    return table


def _lockstep(p: int, m: int, v: int) -> list[list[Slot]]:
    """F of unit k on stage r at tick k+r and its backward pass so that the last chunk's follows its
    F in the same slot: F alone, then F and BW, then BW alone, at the same ticks everywhere.
    """
    first = (v - 1) * p + 2 * (p - 1)  # the tick of stage 0's first backward pass
    table: list[list[Slot]] = [[() for _ in range(m * v + first)] for _ in range(p)]
    for r in range(p):
        for k in range(m * v):
            microbatch, chunk = _unit(k, p, v)
            table[r][k + r] += (Op("F", microbatch, chunk),)
        for k in range(m * v):
            microbatch, chunk = _unit(k, p, v)
            unit = (microbatch, v - 1 - chunk)
            table[r][k + first - r] += (Op("B", *unit), Op("W", *unit))
    return table
