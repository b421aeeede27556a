"""Generated tokens are those of the plain model, in every layout; what is sampled depends on the
seed, the prompt's number and the position alone."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright
import reference
from meshwright.models.batch import Batch
from meshwright.trainer import cli
from meshwright.trainer import generate as module
from meshwright.trainer.data.store import open_data
from meshwright.trainer.generate import generate, generate_run, generate_texts, sample
from meshwright.trainer.sampling import Sampling
from meshwright.trainer.state import abstract_state, lay_out, state_shardings
from runs import SMALL, first_devices, make_config, random_params

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 256, length).tolist() for length in (3, 1, 20, 8, 9)]
TOKENS = 10
GREEDY = Sampling(tokens=TOKENS, temperature=0)
RANDOM = Sampling(tokens=TOKENS, temperature=0.7, top_k=50, top_p=0.9, seed=3)

EIGHT = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
LAYOUTS = (
    EIGHT,
    ("mesh.fsdp=8",),
    ("mesh.tensor=4", "layout.zero=0", "layout.overlap=ring"),  # two kv heads
    ("mesh.data=8", "layout.zero=1"),
    ("mesh.fsdp=2", "mesh.context=2", "mesh.tensor=2", "layout.context=zigzag"),
)
OPTIONS = (
    ("model.bias=all", "model.qk_norm=head", "model.attention_softcap=2.0"),
    ("model.tie_embeddings=true", "model.window=4", "model.logit_softcap=3.0"),
)


@pytest.fixture(autouse=True, scope="module")
def short_pieces():
    """The longest prompt takes three pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 8)
        yield


@cache
def model(*overrides):
    config = make_config(*SMALL, *overrides)
    layout = lay_out(config, first_devices(config))
    shardings = state_shardings(abstract_state(config), layout).params
    return jax.device_put(random_params(config), shardings), config, layout


def tokens_of(sampling, *overrides, prompts=PROMPTS, end_of_text=256, vocab_size=257):
    arguments = (*model(*overrides), prompts, sampling)
    return generate(*arguments, vocab_size=vocab_size, end_of_text=end_of_text)


@cache
def by_recomputation(*overrides):
    """The likeliest tokens, each from the plain model on all that stands before it."""
    _, config, _ = model(*overrides)
    text = np.zeros((len(PROMPTS), max(map(len, PROMPTS)) + TOKENS), np.int32)
    for row, prompt in zip(text, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    place = np.broadcast_to(np.arange(text.shape[1], dtype=np.int32), text.shape)
    logits = jax.jit(partial(reference.logits, model=config.model))
    row, lengths = np.arange(len(text)), np.array([len(prompt) for prompt in PROMPTS])
    for step in range(TOKENS):
        batch = Batch(text, text, np.ones(text.shape, np.float32), place, 0 * place)
        at_end = np.asarray(logits(random_params(config), batch))[row, lengths + step - 1]
        text[row, lengths + step] = at_end.argmax(axis=1)
    return [row[n : n + TOKENS].tolist() for row, n in zip(text, lengths, strict=True)]


@pytest.mark.parametrize("options", [(), *OPTIONS])
def test_greedy_equals_recomputing_the_whole_prefix(options):
    expected = by_recomputation(*options)
    assert tokens_of(GREEDY, *options) == expected
    assert len({token for row in expected for token in row}) > 8  # not one token over and over


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_tokens(layout):
    """Five prompts, on up to eight devices that hold different rows."""
    assert tokens_of(GREEDY, *layout) == by_recomputation()
    assert tokens_of(RANDOM, *layout) == tokens_of(RANDOM)


def test_every_option_of_the_model_in_a_layout():
    for options in OPTIONS:
        assert tokens_of(GREEDY, *EIGHT, *options) == by_recomputation(*options)


def test_bf16_computes():
    rough, exact = tokens_of(GREEDY, *EIGHT, "precision.compute=bf16"), by_recomputation()
    assert [row[0] for row in rough] == [row[0] for row in exact]


def test_a_sample_depends_on_seed_prompt_number_and_position_alone():
    sampled = tokens_of(RANDOM)
    assert tokens_of(RANDOM) == sampled
    seeds = [Sampling(tokens=TOKENS, seed=seed) for seed in range(2)]
    assert tokens_of(seeds[0]) != tokens_of(seeds[1])
    others = [PROMPTS[0], [9, 9, 9, 9], PROMPTS[2], [8], [7, 7]]
    changed = tokens_of(RANDOM, prompts=others)
    assert [changed[i] == sampled[i] for i in range(5)] == [True, False, True, False, False]
    same = tokens_of(RANDOM, prompts=[PROMPTS[0]] * 5)
    assert same[0] == sampled[0] and len(set(map(tuple, same))) == 5
    shorter = tokens_of(Sampling(tokens=4, temperature=0.7, top_k=50, top_p=0.9, seed=3))
    assert shorter == [row[:4] for row in sampled]


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}])
def test_the_smallest_choice_is_greedy(limit):
    assert tokens_of(Sampling(tokens=TOKENS, temperature=5.0, **limit)) == by_recomputation()


def test_a_text_ends_before_end_of_text():
    """And all work with the last of them: the slots that were left stay empty."""
    whole = by_recomputation()
    place = next(n for n in range(2, TOKENS) if whole[2][n] not in whole[2][:n])
    end = whole[2][place]
    cut = [row[: row.index(end)] if end in row else row for row in whole]
    assert tokens_of(GREEDY, end_of_text=end) == cut
    assert len(cut[2]) == place and max(map(len, cut)) == TOKENS
    alone = [PROMPTS[2]]
    assert tokens_of(GREEDY, *EIGHT, prompts=alone, end_of_text=end) == [cut[2]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_until", lambda tokens, end: tokens)
        written = tokens_of(GREEDY, *EIGHT, prompts=alone, end_of_text=end)
    assert written == [[*cut[2], end, *[0] * (TOKENS - place - 1)]]


def test_only_tokens_that_the_tokenizer_knows():
    hot = Sampling(tokens=TOKENS, temperature=100.0)
    drawn = {token for row in tokens_of(hot, vocab_size=43) for token in row}
    assert len(drawn) > 20 and max(drawn) < 43


def test_prompts_that_are_none():
    assert tokens_of(GREEDY, prompts=[]) == []
    with pytest.raises(ValueError, match="^prompt 2 is empty: .* write at least one character$"):
        tokens_of(GREEDY, prompts=[[1], []])


P = np.array([0.05, 0.5, 0.15, 0.3])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((1.0, 4, np.inf), P),
        ((0.5, 4, np.inf), P**2),
        ((2.0, 4, np.inf), P**0.5),
        ((1.0, 2, np.inf), P * [0, 1, 0, 1]),
        ((1.0, 4, 0.49), P * [0, 1, 0, 0]),
        ((1.0, 4, 0.79), P * [0, 1, 0, 1]),
        ((1.0, 4, 0.81), P * [0, 1, 1, 1]),
        ((1.0, 2, 0.62), P * [0, 1, 0, 0]),  # of the two, the first has 0.625
        ((2.0, 4, 0.7), P**0.5 * [0, 1, 1, 1]),  # tempered first: two of them have 0.672
    ],
)
def test_tokens_come_as_often_as_they_should(settings, expected):
    """Ten thousand draws: a frequency's standard deviation is at most 0.005."""
    keys = jax.random.split(jax.random.key(0), 10_000)
    logits = jnp.log(P.astype(np.float32)) + 7
    draw = jax.vmap(sample, in_axes=(None, 0, None, None, None))
    drawn = np.asarray(draw(logits, keys, *settings))
    found, expected = np.bincount(drawn, minlength=4) / len(drawn), expected / expected.sum()
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.02)


# A run


TEXTS = ["alpha be", "wörd"]
MESH = ("mesh.data=1", "mesh.fsdp=4", "mesh.tensor=2")


def test_a_run_continues_texts_on_any_mesh(run):
    tokenizer = open_data(run.config).tokenizer
    layout, params = lay_out(run.config), run.result.state.params
    greedy = Sampling(tokens=6, temperature=0)
    texts = generate_texts(params, run.config, layout, tokenizer, TEXTS, greedy)
    assert generate_run(run.folder, TEXTS, tokens=6, temperature=0) == texts
    assert meshwright.generate(run.folder, TEXTS, MESH, tokens=6, temperature=0) == texts
    ids = [tokenizer.encode(text).tolist() for text in TEXTS]
    end, size = tokenizer.end_of_text, tokenizer.vocab_size
    tokens = generate(params, run.config, layout, ids, greedy, vocab_size=size, end_of_text=end)
    assert texts == [tokenizer.decode(np.asarray(row)) for row in tokens]
    with pytest.raises(ValueError, match="^prompts: write a list of texts"):
        generate_run(run.folder, "alpha")


def test_the_command_prints_texts_with_their_continuations(run, capsys):
    first, second = generate_run(run.folder, TEXTS, tokens=6, seed=5)
    words = ["--tokens", "6", "--seed", "5", "--prompt"]
    assert cli.main(["generate", str(run.folder), *words, TEXTS[0], *MESH]) == 0
    assert capsys.readouterr().out == f"{TEXTS[0]}{first}\n"
    assert cli.main(["generate", str(run.folder), *words, TEXTS[0], "--prompt", TEXTS[1]]) == 0
    assert capsys.readouterr().out == (
        f"--- 1 of 2\n{TEXTS[0]}{first}\n--- 2 of 2\n{TEXTS[1]}{second}\n"
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--tokens", "0"], "tokens=0: write at least 1"),
        (["--temperature", "-1"], "temperature=-1.0: write 0 for the likeliest token, or more"),
        (["--temperature", "nan"], "temperature=nan: write 0 for the likeliest token, or more"),
        (["--top-k", "0"], "top_k=0: write at least 1, or leave it out"),
        (["--top-p", "0"], "top_p=0.0: write more than 0 and at most 1"),
        (["--top-p", "1.5"], "top_p=1.5: write more than 0 and at most 1"),
        (
            ["--temperature", "0", "--top-k", "5"],
            "top_k=5 is not read by temperature=0, always the likeliest token; leave it out",
        ),
        (
            ["--temperature", "0", "--top-p", "1"],
            "top_p=1.0 is not read by temperature=0, always the likeliest token; leave it out",
        ),
        (["--seed", "-1"], "seed=-1: write a number from 0 to 4294967295"),
        (["mesh.tensr=2"], "mesh.tensr: no such key; did you mean mesh.tensor?"),
    ],
)
def test_a_wrong_setting_is_one_line_and_2(run, words, line, capsys):
    assert cli.main(["generate", str(run.folder), "--prompt", "a", *words]) == 2
    assert capsys.readouterr() == ("", f"meshwright: {line}\n")


def test_what_is_no_run_or_no_prompt_is_one_line_and_2(run, tmp_path, capsys):
    assert cli.main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and "config.yaml does not exist; RUN is a folder that" in error
    assert cli.main(["generate", str(run.folder), "--prompt", ""]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("meshwright: prompt 1 is empty: ")
    with pytest.raises(ValueError, match="^prompt 2: the character at 1 is not UTF-8; "):
        generate_run(run.folder, ["a", "b\udcff"])
    assert error.count("\n") == 1
    for words in ([], ["--prompt", "a", "--tokens", "many"]):
        assert cli.main(["generate", str(run.folder), *words]) == 2


@pytest.mark.parametrize("run", ["gs://bucket/run", Path("gs://bucket/run")])
def test_a_url_is_no_run(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"^gs:/+bucket/run: URLs are not built yet; write a local"
    ):
        generate_run(run, ["a"])
    assert not list(tmp_path.iterdir())
