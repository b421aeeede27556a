"""Config section `data`. No JAX here."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...sharding.keys import STRICT, LocalPath, ReadWhen, check_read

SMALLEST_VOCABULARY = 257
"""Every tokenizer knows the 256 bytes and end-of-text."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    source: Annotated[
        Literal["stdlib", "text", "jsonl", "store"],
        Field(
            description="stdlib: the sources of Python's own library; text, jsonl: files of "
            "data.paths; store: an existing token store at data.store"
        ),
    ] = "stdlib"
    paths: Annotated[
        list[LocalPath], Field(description="files or globs, ** allowed, for text and jsonl")
    ] = field(default_factory=list)
    field: Annotated[
        str,
        Field(description="jsonl: the key that holds a document's text"),
        ReadWhen("source", ("jsonl",)),
    ] = "text"
    tokenizer: Annotated[
        Literal["byte", "bpe"],
        Field(
            description="byte: 256 bytes and end-of-text; bpe: trained on the training "
            "documents to model.vocab_size"
        ),
    ] = "byte"
    holdout: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="share of documents held out, chosen by a hash of their name; 0: none, and "
            "nothing is evaluated",
        ),
    ] = 0.02
    store: Annotated[
        LocalPath | None,
        Field(
            description="folder of the token store; null: the user's cache, keyed by "
            "source and tokenizer"
        ),
    ] = None
    prefetch: Annotated[int, Field(ge=0, description="batches prepared ahead")] = 2

    def __post_init__(self) -> None:
        if self.source in ("text", "jsonl") and not self.paths:
            raise ValueError(f"data.paths=[]: data.source={self.source} needs files or globs")
        if self.source in ("stdlib", "store") and self.paths:
            raise ValueError(
                f"data.paths=[{', '.join(self.paths)}] is not read by data.source={self.source}; "
                f"write data.source=text or data.source=jsonl"
            )
        check_read(self, "data")
        if self.source == "store" and self.store is None:
            raise ValueError("data.store=null: data.source=store needs the folder of a token store")
