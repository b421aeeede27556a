"""Tables and costs for tests of pipeline schedules: any builder's, any that are drawn."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import strategies as st

from meshwright.sharding.pipeline.schedules import (
    NAMES,
    UNIFORM,
    Schedule,
    build_schedule,
)
from meshwright.sharding.pipeline.simulate import Costs


@st.composite
def schedules(draw, most_stages: int = 5) -> Schedule:
    """Any builder's table."""
    name = draw(st.sampled_from(NAMES))
    p = draw(st.integers(1, most_stages))
    m = draw(st.integers(1, 2 * p + 2))
    v = None
    if name == "interleaved":
        m, v = p * draw(st.integers(1, 3)), draw(st.integers(1, 4))
    if name == "dualpipe_v":
        m += 2 * p
    uniform = name in UNIFORM and draw(st.booleans())
    return build_schedule(name, p, m, v, uniform)


times = st.fractions(min_value=Fraction(1, 8), max_value=4, max_denominator=8)
costs = st.builds(Costs, times, times, times, st.sampled_from([Fraction(0), Fraction(1, 8)]))

SIZES = [(p, p * times) for p in (2, 4, 8) for times in (1, 2, 4)]
