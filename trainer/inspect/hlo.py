"""What a compiled step moves, read off its text: every collective with its mesh axes, its bytes,
how often it runs and whether anything is computed meanwhile. What looks like communication and is
not understood is handed back as it stands, so that no byte goes missing.

The text is `compiled.as_text()` of CPU, TPU or GPU: computations of one instruction a line. A mesh
is its axis sizes, slowest first; its i-th device runs partition i of the program. N is the size of
a group of devices, n the bytes of the full array. What one device sends is that of a ring:
all-reduce 2(N-1)/N·n, all-gather and reduce-scatter (N-1)/N·n, all-to-all (N-1)/N of the bytes it
holds, permute and broadcast all of them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

COMPUTING = ("call", "conditional", "convolution", "custom-call", "dot", "fusion", "while")
"""Opcodes that a transfer can hide behind."""

BOOKKEEPING = ("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast")
"""Custom calls of TPU that compute nothing."""


@dataclass(frozen=True)
class Collective:
    """One instruction, or its start and done; of TPU, all the fusions that one transfer runs in.

    axes: the mesh axes of size > 1 that its groups span, in mesh order; of a permute and of an
    all-to-all, which may be among a part of an axis, those along which members differ; None: its
    groups are those of no set of axes.
    dtype: of what travels; bf16+f32 where a combined collective has both.
    sent: bytes that a device sends each time; of a ragged all-to-all, whose sizes are data, what a
    balanced one sends.
    times: executions. at_least: in a loop whose length the text does not say; it is counted as one
    round each time the program comes to it.
    scope: its `jax.named_scope` path.
    overlapped: begun and ended by two instructions with computation between them. Otherwise it is
    exposed: its devices wait for it.
    """

    kind: str
    axes: tuple[str, ...] | None
    dtype: str
    sent: int
    times: int
    at_least: bool
    scope: str
    overlapped: bool


@dataclass(frozen=True)
class Program:
    """unknown: the lines that look like communication and belong to no collective."""

    collectives: tuple[Collective, ...]
    unknown: tuple[str, ...]


class Instruction(NamedTuple):
    """One line of a program's text."""

    name: str
    type: str
    opcode: str
    arguments: str
    """what its parentheses hold"""
    attributes: str
    """what follows them"""
    root: bool
    """whether its computation returns it"""
    line: int
    """its number"""

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.arguments)


Computation = dict[str, Instruction]
"""Instructions by name, in the order in which they are scheduled."""

Computations = Mapping[str, Computation]


class Execution(NamedTuple):
    """An instruction on one path through the program."""

    instruction: Instruction
    computation: str
    """the one that it stands in"""
    times: int
    """as in `Collective`"""
    at_least: bool
    scope: str
    """that of what called its computation"""
    hidden: bool
    """whether it, or what called it, is overlapped"""


class Array(NamedTuple):
    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)


_TAKEN = r"taken_(\d+)_of_(\d+)_times"


Asked = Mapping[str, list[tuple[str, Array]]]
"""Kind of a collective -> the scope of each array that was given to one, and the array."""


def read_program(text: str, mesh: Mapping[str, int], lowered: str | None = None) -> Program:
    """The collectives that one run of a compiled program executes, in its order.

    A computation that is reached from two places counts in both, and every branch of a conditional
    as if it were taken, but for those of `taken`. CPU widens every bf16 that it sends to f32 (and
    f8 to f16). Where it stands in for another platform give `lowered`, the same program's
    `lowered.as_text(debug_info=True)`: then dtypes are those that the program asked for.
    """
    computations, entry = parse(text)
    chains = find_chains(computations)
    asked = asked_dtypes(lowered) if lowered else {}
    collectives: list[Collective] = []
    understood: set[int] = set()
    for execution in executions(computations, entry):
        instruction, computation = execution.instruction, computations[execution.computation]
        lines: list[int] = []
        if chain := chain_of(instruction):
            if not handed_to(computation, instruction, "AsyncCollectiveStart"):
                continue  # the same transfer, further on
            lines, beside = chains[chain]
            execution = execution._replace(hidden=execution.hidden or beside)
        if collective := read_collective(execution, computation, mesh, asked):
            collectives.append(collective)
            lines = [*lines, *(end.line for end in endings(instruction, computation))]
            understood.update((instruction.line, *lines))
    unknown = (
        line.strip()
        for number, line in enumerate(text.splitlines())
        if number not in understood and looks_like_communication(line)
    )
    return Program(tuple(collectives), tuple(unknown))


# --- the text ------------------------------------------------------------------------------------

_COMPUTATION = re.compile(r"(ENTRY )?%([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\(")
_PARENTHESIS = re.compile(r"[()]")
_COMMUNICATION = re.compile(
    r"(?:^|\s)(?:all-|reduce-scatter|ragged-all-|collective-|send|recv)[a-z-]*\("
    r'|custom_call_target="[^"]*(?i:collective|all.?reduce|all.?gather|reduce.?scatter'
    r'|all.?to.?all|nccl)|"has_communication":true'
)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Computations by name, and the name of the entry; "" is an empty one."""
    computations: dict[str, Computation] = {"": {}}
    entry = current = ""
    for number, line in enumerate(text.splitlines()):
        if match := _COMPUTATION.match(line):
            current = match[2]
            computations[current] = {}
            entry = current if match[1] else entry
        elif current and (match := _INSTRUCTION.match(line)):
            root, name, type_, opcode = match.groups()
            end = _closing(line, match.end())
            fields = type_, opcode, line[match.end() : end], line[end + 1 :], bool(root), number
            computations[current][name] = Instruction(name, *fields)
    return computations, entry


def _closing(line: str, start: int) -> int:
    """Where the parenthesis closes that opens just before `start`."""
    depth = 1
    for match in _PARENTHESIS.finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)


def looks_like_communication(line: str) -> bool:
    return bool(_COMMUNICATION.search(line)) and "is_host_transfer=true" not in line


def collective_kind(instruction: Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def scope_of(instruction: Instruction) -> str:
    name = re.search(r'\bop_name="([^"]*)"', instruction.attributes)
    return name[1] if name else ""


def arrays(text: str) -> list[Array]:
    """Those of a type such as `(bf16[8,4]{1,0:T(8,128)}, f32[])`."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", text)
    return [Array(dtype, tuple(_integers(dims))) for dtype, dims in found]


def bits(dtype: str) -> int:
    """bf16 has 16, f8e4m3fn 8; pred takes 8."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8


# --- what runs, and how often --------------------------------------------------------------------


def executions(
    computations: Computations,
    name: str,
    times: int = 1,
    at_least: bool = False,
    scope: str = "",
    hidden: bool = False,
) -> Iterator[Execution]:
    """Every instruction that a computation executes, down through all that it calls."""
    computation = computations[name]
    for instruction in computation.values():
        inside = hidden or is_overlapped(instruction, computation, computations)
        yield Execution(instruction, name, times, at_least, scope, inside)
        for callee, count in calls(instruction, computation, computations):
            product, more = times * (1 if count is None else count), at_least or count is None
            inner = scope_of(instruction) or scope
            yield from executions(computations, callee, product, more, inner, inside)


def calls(
    instruction: Instruction, computation: Computation, computations: Computations
) -> list[tuple[str, int | None]]:
    """The computations that an instruction calls, and how often each; None: not known."""
    found = re.findall(
        r"\b(body|condition|calls|to_apply|\w+_computations?)=\{?((?:%[\w.-]+(?:, )?)+)",
        instruction.attributes,
    )
    named = [(key, name) for key, names in found for name in re.findall(r"%([\w.-]+)", names)]
    named = [(key, name) for key, name in named if name in computations]
    if instruction.opcode != "while":
        return [(name, 1) for _, name in named]
    trips = trip_count(instruction, computation, computations)
    tests = None if trips is None else trips + 1
    return [(name, trips if key == "body" else tests) for key, name in named]


def trip_count(loop: Instruction, outer: Computation, computations: Computations) -> int | None:
    """What the compiler noted. TPU's notes nothing: there it follows from a counter that starts at
    one constant, grows by another and stays below a third.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    callees = dict(re.findall(r"\b(body|condition)=%([\w.-]+)", loop.attributes))
    condition = computations.get(callees.get("condition", ""), {})
    body = computations.get(callees.get("body", ""), {})
    before = parts(outer, outer.get(loop.operands[0]) if loop.operands else None)
    after = parts(body, root_of(body))
    test = root_of(condition)
    if not test or test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    counter, limit, *_ = *operands_of(condition, test), None, None
    index = tuple_index(counter)
    if index is None or index >= len(after) or len(before) != len(after):
        return None
    unchanged = [place for place, part in enumerate(after) if tuple_index(part) == place]

    def integer(value: Instruction | None) -> int | None:
        """Of a constant, or of one that the loop carries round."""
        place = tuple_index(value)
        return constant(before[place] if place in unchanged else value)

    grown = after[index]
    terms = operands_of(body, grown) if grown and grown.opcode == "add" else []
    steps = [integer(term) for term in terms if tuple_index(term) != index]
    start, end = constant(before[index]), integer(limit)
    if start is None or end is None or len(steps) != 1 or not steps[0] or steps[0] < 0:
        return None
    return max(0, math.ceil((end - start) / steps[0]))


def root_of(computation: Computation) -> Instruction | None:
    return next((instruction for instruction in computation.values() if instruction.root), None)


def parts(computation: Computation, whole: Instruction | None) -> list[Instruction | None]:
    """What a tuple is made of."""
    return operands_of(computation, whole) if whole and whole.opcode == "tuple" else []


def operands_of(computation: Computation, instruction: Instruction) -> list[Instruction | None]:
    """What an instruction is given, behind copies."""
    found = []
    for name in instruction.operands:
        operand = computation.get(name)
        while operand and operand.opcode in ("bitcast", "copy") and operand.operands:
            operand = computation.get(operand.operands[0])
        found.append(operand)
    return found


def tuple_index(instruction: Instruction | None) -> int | None:
    """Which part of a tuple this is."""
    if not instruction or instruction.opcode != "get-tuple-element":
        return None
    index = re.search(r"\bindex=(\d+)", instruction.attributes)
    return int(index[1]) if index else None


def constant(instruction: Instruction | None) -> int | None:
    if not instruction or instruction.opcode != "constant":
        return None
    return int(instruction.arguments) if re.fullmatch(r"-?\d+", instruction.arguments) else None


# --- what hides a transfer -----------------------------------------------------------------------


def is_overlapped(
    instruction: Instruction, computation: Computation, computations: Computations
) -> bool:
    """Whether it begins a transfer and something is computed before the transfer ends.

    That a start has no end in its computation happens where a loop carries it to its next round.
    """
    if instruction.opcode != "async-start" and not (
        collective_kind(instruction) and instruction.opcode.endswith("-start")
    ):
        return False
    if '"is_sync":true' in instruction.attributes:
        return False
    last = max((end.line for end in endings(instruction, computation)), default=math.inf)
    between = (other for other in computation.values() if instruction.line < other.line < last)
    return any(computes(other, computations) for other in between)


def endings(start: Instruction, computation: Computation) -> list[Instruction]:
    """The updates and the done of what `start` begins."""
    found = [start]
    for instruction in computation.values():
        if instruction.opcode.endswith(("-update", "-done")):
            given = instruction.operands
            if any(earlier.name in given for earlier in found):
                found.append(instruction)
    return found[1:]


def computes(instruction: Instruction, computations: Computations) -> bool:
    if instruction.opcode == "custom-call":
        return not any(f'"{target}"' in instruction.attributes for target in BOOKKEEPING)
    if instruction.opcode == "fusion" and "kind=kCustom" in instruction.attributes:
        names = [name for name, _ in calls(instruction, {}, computations)]
        return not any(collective_kind(i) for name in names for i in computations[name].values())
    return instruction.opcode in COMPUTING


def find_chains(computations: Computations) -> dict[str, tuple[list[int], bool]]:
    """TPU's transfers that run through several fusions, by chain_id: the lines of each, and whether
    it runs beside a computation.

    The same collective stands in the fusion that ends in AsyncCollectiveStart, in those whose
    product it accompanies, and in the one that ends in AsyncCollectiveDone.
    """
    chains: dict[str, tuple[list[int], bool]] = defaultdict(lambda: ([], False))
    for computation in computations.values():
        for instruction in computation.values():
            if chain := chain_of(instruction):
                markers = handed_to(computation, instruction, "AsyncCollective")
                lines, hidden = chains[chain]
                lines += [instruction.line, *(marker.line for marker in markers)]
                chains[chain] = lines, hidden or not markers
    return chains


def chain_of(instruction: Instruction) -> str | None:
    if not collective_kind(instruction):
        return None
    chain = re.search(r'\bchain_id="(\d+)"', instruction.attributes)
    return chain[1] if chain else None


def handed_to(computation: Computation, given: Instruction, target: str) -> list[Instruction]:
    """The custom calls, to targets of that beginning, that take `given`."""
    return [
        instruction
        for instruction in computation.values()
        if f'custom_call_target="{target}' in instruction.attributes
        and given.name in instruction.operands
    ]


# --- what travels, and where ---------------------------------------------------------------------


def read_collective(
    execution: Execution,
    computation: Computation,
    mesh: Mapping[str, int],
    asked: Asked,
) -> Collective | None:
    """None: it is no collective, or none that is understood."""
    instruction, kind = execution.instruction, collective_kind(execution.instruction)
    if kind is None or "slice_sizes=" in instruction.attributes:  # a permute into part of an array
        return None
    if kind == "all-reduce" and execution.computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # TPU: fused with the slice that is kept
    groups = device_groups(instruction.attributes, math.prod(mesh.values()))
    operands = [computation.get(name) for name in instruction.operands]
    given = [array for operand in operands if operand for array in arrays(operand.type)]
    if groups is None or not given or None in operands:
        return None
    if kind == "ragged-all-to-all":
        given = given[:1]  # the others are offsets and sizes
    if kind == "all-to-all" and len(given) > 1:  # one array in N pieces
        given = [Array(given[0].dtype, (sum(array.elements for array in given),))]
    scope, times = scope_of(instruction) or execution.scope, execution.times
    for some, every in re.findall(rf"\b{_TAKEN}", scope):
        times = times * int(some) // int(every)
    given = [asked_array(array, kind, scope, len(given) > 1, asked) for array in given]
    held = sum(math.ceil(bits(array.dtype) * array.elements / 8) for array in given)
    return Collective(
        kind=kind,
        axes=spanned_axes(groups, mesh, kind),
        dtype="+".join(sorted({array.dtype for array in given})),
        sent=sent_bytes(kind, held, groups.shape[1]),
        times=times,
        at_least=execution.at_least,
        scope=scope,
        overlapped=execution.hidden,
    )


def sent_bytes(kind: str, held: int, size: int) -> int:
    """By each of `size` devices that each give `held` bytes."""
    if kind == "all-reduce":
        return 2 * (size - 1) * held // size
    if kind == "all-gather":
        return (size - 1) * held
    if kind in ("collective-permute", "collective-broadcast"):
        return held
    return (size - 1) * held // size


def device_groups(attributes: str, devices: int) -> np.ndarray | None:
    """[groups, N] of partitions, [pairs, 2] of a permute; None where they are not in the text, do
    not fit `devices` or, but for a permute, are not all devices in groups of one size.
    """
    if pairs := re.search(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes):
        found = np.array(_integers(pairs[1]), int).reshape(-1, 2)
        return found if (found < devices).all() else None
    spelled = re.search(r"\breplica_groups=(.*)", attributes)
    groups = _groups(spelled[1], devices) if spelled else None
    if groups is None or not np.array_equal(np.sort(groups, axis=None), np.arange(devices)):
        return None
    return groups


def _groups(text: str, devices: int) -> np.ndarray | None:
    """Of the spellings `{{0,2},{1,3}}`, `[2,2]<=[2,2]T(1,0)` and `mesh['a'=2,'b'=2] {'a'}`, the
    last with an order of devices `, device_ids=([2,2]T(1,0))` or none.
    """
    if text.startswith("{}"):
        return np.arange(devices)[None]
    if listed := re.match(r"\{(?:\{[\d,]+\},?)+\}", text):
        groups = [_integers(group) for group in listed[0].split("},{")]
        return np.array(groups) if len({len(group) for group in groups}) == 1 else None
    if iota := re.match(r"\[(\d+),(\d+)\]<=(\[[^ ]*[\])])(?=,|$)", text):
        shape, ids = (int(iota[1]), int(iota[2])), _device_ids(iota[3], devices)
        return ids.reshape(shape) if ids is not None and math.prod(shape) == devices else None
    named = re.match(r"mesh\[([^]]*)\](?:, device_ids=\((.*?)\))? \{((?:'\w+',?)*)\}", text)
    if not named:
        return None
    sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
    inner = re.findall(r"\w+", named[3])
    order = [*(axis for axis in sizes if axis not in inner), *inner]
    ids = _device_ids(named[2] or f"[{devices}]", devices)
    fits = math.prod(sizes.values()) == devices and sorted(order) == sorted(sizes)
    if ids is None or not fits:
        return None
    whole = ids.reshape(list(sizes.values())).transpose([list(sizes).index(axis) for axis in order])
    return whole.reshape(-1, math.prod(sizes[axis] for axis in inner))


def _device_ids(text: str, devices: int) -> np.ndarray | None:
    """Of `0,2,1,3`, or of `[2,2]T(1,0)`: counted in rows, then transposed."""
    iota = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not iota:
        listed = np.array(_integers(text))
        return listed if listed.size == devices else None
    dims, order = _integers(iota[1]), _integers(iota[2] or "")
    order = order or list(range(len(dims)))
    if math.prod(dims) != devices or sorted(order) != list(range(len(dims))):
        return None
    return np.arange(devices).reshape(dims).transpose(order).ravel()


def _integers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def spanned_axes(groups: np.ndarray, mesh: Mapping[str, int], kind: str) -> tuple[str, ...] | None:
    """The axes along which members of a group differ, if a group is all devices along them or may
    be some, as one side of a torus is of an axis that gradients are scattered over.
    """
    places = np.stack(np.unravel_index(groups, tuple(mesh.values())), axis=-1)
    differ = (places != places[:, :1]).any(axis=(0, 1))
    axes = tuple(axis for axis, differs in zip(mesh, differ, strict=True) if differs)
    whole = math.prod(mesh[axis] for axis in axes) == groups.shape[1]
    side = kind == "reduce-scatter" and len(axes) == 1
    some = side or kind in ("collective-permute", "all-to-all")
    return axes if whole or some else None


# --- what the program asked for ------------------------------------------------------------------

_LOCATION = re.compile(r'^(#loc\d*) = loc\("([^"]*)"\(', re.MULTILINE)
_REQUEST = re.compile(
    r'"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute'
    r'|collective_broadcast)"\(.*?: \((tensor<[^)]*)\) -> [^\n]* loc\((#loc\d*)\)$',
    re.DOTALL | re.MULTILINE,
)


def asked_dtypes(lowered: str) -> Asked:
    """What StableHLO text gives to collectives. A scope here is the end of the one in the compiled
    text, where functions are inlined.
    """
    scopes = dict(_LOCATION.findall(lowered))
    assert scopes, "lowered.as_text() without debug_info=True"
    found = defaultdict(list)
    for name, types, location in _REQUEST.findall(lowered):
        for dims, dtype in re.findall(r"tensor<((?:\d+x)*)(\w+)>", types):
            array = Array(dtype.lower(), tuple(_integers(dims)))
            found[name.replace("_", "-")].append((scopes.get(location, ""), array))
    return found


def asked_array(
    array: Array,
    kind: str,
    scope: str,
    combined: bool,
    asked: Asked,
) -> Array:
    """The array as the program gave it, narrower than the compiled one, where that is certain.

    Where none had its dims the compiler has reshaped it, and its size must do. The parts of a
    combined collective have lost their scopes but one; any scope will do.
    """
    everywhere = asked.get(kind, [])
    requests = [each for each in everywhere if each[1].dims == array.dims] or [
        each for each in everywhere if each[1].elements == array.elements
    ]
    here = [(len(name), one.dtype) for name, one in requests if f"/{scope}".endswith(f"/{name}")]
    nearest = max(here, default=(0, ""))[0]
    dtypes = {dtype for length, dtype in here if length == nearest}
    if combined and not dtypes:
        dtypes = {one.dtype for _, one in requests}
    narrower = [dtype for dtype in dtypes if bits(dtype) < bits(array.dtype)]
    return array._replace(dtype=narrower[0]) if len(dtypes) == len(narrower) == 1 else array
