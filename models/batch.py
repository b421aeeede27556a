"""What a step is fed: packed rows of tokens, and everything the model must know about each token.

G microbatches of B/G sequences of S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Arrays [G, B/G, S].

    tokens: int32 ids.
    targets: int32 id of the next token of the same document; 0 where the weight is 0.
    weights: float32, 1 where the target counts in the loss, 0 where there is none.
    positions: int32, tokens since the document's start or the row's, whichever is later.
    segments: int32, which document of its row a token belongs to; below 0: padding, which
        attends to nothing.
    """

    tokens: jax.Array
    targets: jax.Array
    weights: jax.Array
    positions: jax.Array
    segments: jax.Array
