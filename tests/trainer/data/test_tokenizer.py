import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from meshwright.trainer.data.tokenizer import (
    LONGEST_PIECE,
    BpeTokenizer,
    ByteTokenizer,
    read_tokenizer,
    tokenizer_digest,
    train_bpe,
)

TEXTS = [
    "def f(x):\n    return x\n",
    "the cat, the hat; the bat",
    "für élan 漢字\r\n\t<|endoftext|>",
] * 3
BPE = train_bpe(TEXTS, 300)
any_text = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])
@given(any_text)
def test_text_round_trips_without_end_of_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert (ids < tokenizer.vocab_size).all()
    assert tokenizer.end_of_text not in ids


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])
def test_end_of_text_is_an_id_and_no_text(tokenizer):
    ids = tokenizer.encode("a <|endoftext|> b")
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(np.append(ids, tokenizer.end_of_text)) == "a <|endoftext|> b"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])
@pytest.mark.parametrize("beyond", [0, 127, -1000])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, beyond):
    unknown = tokenizer.vocab_size + beyond
    with pytest.raises(ValueError, match=f"^token id {unknown} is outside the vocabulary of "):
        tokenizer.decode(np.array([65, unknown]))


def test_bytes_are_their_own_ids():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    np.testing.assert_array_equal(tokenizer.encode("aé"), [97, 0xC3, 0xA9])
    assert tokenizer.decode(np.array([97, 0xC3])) == "a\N{REPLACEMENT CHARACTER}"


def test_bpe_training_is_deterministic_and_merges():
    assert BPE.model.to_str() == train_bpe(TEXTS, 300).model.to_str()
    assert 257 < BPE.vocab_size <= 300
    assert len(BPE.encode("the cat")) < 7


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])
def test_its_text_gives_the_same_tokenizer(tokenizer):
    loaded = read_tokenizer(tokenizer.text, "a file")
    assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
    assert (loaded.kind, loaded.text) == (tokenizer.kind, tokenizer.text)
    for text in TEXTS:
        np.testing.assert_array_equal(loaded.encode(text), tokenizer.encode(text))


def test_a_digest_tells_tokenizers_apart_and_not_how_a_file_is_laid_out():
    other = train_bpe(TEXTS, 301)
    digests = {tokenizer_digest(one.text) for one in (ByteTokenizer(), BPE, other)}
    assert len(digests) == 3
    again = json.dumps(json.loads(BPE.text), indent=4, ensure_ascii=True, sort_keys=True)
    assert again != BPE.text
    assert tokenizer_digest(again) == tokenizer_digest(BPE.text)


def test_bpe_without_texts_is_bytes():
    assert train_bpe([], 257).vocab_size == 257


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"type": "words"}', "[" * 100_000])
def test_what_is_no_tokenizer_is_named(text):
    with pytest.raises(ValueError, match="^x/tokenizer.json is not a readable tokenizer"):
        read_tokenizer(text, "x/tokenizer.json")


def test_a_tokenizer_without_end_of_text_is_refused():
    text = BPE.text.replace("endoftext", "end")
    with pytest.raises(ValueError, match=r"not a readable tokenizer \(no token <\|endoftext\|>\)"):
        read_tokenizer(text, "x")


RUN = st.builds(
    lambda text, times, rest: (text * times)[: LONGEST_PIECE * 3] + rest,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3),
    st.integers(100, 1000),
    any_text,
)
LONG = train_bpe(["a" * 3000, "漢" * 3000, " " * 3000], 300)


@given(RUN)
def test_a_long_run_without_blanks_round_trips(text):
    assert LONG.decode(LONG.encode(text)) == text


@pytest.mark.parametrize("one", ["a", " ", "\n", "7", ".", "漢"])
def test_no_piece_is_longer_than_the_bound(one):
    """In a text of one character without end, which was one piece, training took time with the
    square of its length."""
    pieces = LONG.model.pre_tokenizer.pre_tokenize_str(one * 5000)
    sizes = [len(piece) for piece, _ in pieces]
    assert max(sizes) == LONGEST_PIECE
    assert sum(sizes) == 5000 * len(one.encode())
    longest = max(LONG.model.get_vocab(), key=len)
    assert len(longest) <= LONGEST_PIECE


def test_a_file_keeps_the_bound():
    loaded = read_tokenizer(LONG.text, "a file")
    text = "ab" * 2000 + " " + "a" * 700
    np.testing.assert_array_equal(loaded.encode(text), LONG.encode(text))
    assert len(loaded.encode("a" * LONGEST_PIECE)) < len(loaded.encode("a" * (LONGEST_PIECE + 1)))


@given(st.lists(st.text("ab c\n\t1.é漢'", max_size=LONGEST_PIECE // 3), max_size=3))
def test_text_of_shorter_pieces_is_tokenised_as_without_a_bound(texts):
    unbounded = BpeTokenizer(
        type(BPE.model).from_str(BPE.model.to_str()), BPE.end_of_text, BPE.text
    )
    unbounded.model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = " ".join(texts)
    np.testing.assert_array_equal(BPE.encode(text), unbounded.encode(text))
