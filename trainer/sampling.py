"""How a text is continued: the settings of `generate`. No JAX here: mistakes answer at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings of `generate`. Raises ValueError naming one that cannot be."""

    tokens: int = 64
    """to add at most; end-of-text ends a row earlier"""
    temperature: float = 0.8
    """divides the logits; 0: always the likeliest token"""
    top_k: int | None = None
    """only the k likeliest tokens; None: all"""
    top_p: float | None = None
    """of those only as many as together reach this probability (nucleus sampling, arXiv
    1904.09751); None: all"""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens={self.tokens}: write at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature}: write 0 for the likeliest token, or more"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: write at least 1, or leave it out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: write more than 0 and at most 1")
        if self.temperature == 0:
            for key in ("top_k", "top_p"):
                if (value := getattr(self, key)) is not None:
                    raise ValueError(
                        f"{key}={value} is not read by temperature=0, always the likeliest token; "
                        f"leave it out"
                    )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed}: write a number from 0 to {2**32 - 1}")


def check_prompts(prompts: Iterable[str]) -> None:
    """Raise ValueError, by its number, for a prompt that is no text: a shell may pass any bytes."""
    for number, prompt in enumerate(prompts, 1):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompt {number}: the character at {error.start} is not UTF-8; write it as UTF-8 "
                f"or leave it out"
            ) from None
