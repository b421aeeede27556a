import glob
import json
import os
import random
import shutil
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.trainer.config import DataConfig
from meshwright.trainer.data.sources import (
    documents,
    fingerprint,
    is_held_out,
    source_files,
    split_texts,
)


def text(*paths, **settings):
    return DataConfig(source="text", paths=[str(path) for path in paths], **settings)


def jsonl(path, **settings):
    return DataConfig(source="jsonl", paths=[str(path)], **settings)


def names(config):
    return [document.name for document in documents(config)]


def test_stdlib_is_a_corpus():
    found = list(documents(DataConfig()))
    assert 500 < len(found) < 1000
    assert 9e6 < sum(len(text) for _, text in found) < 15e6
    in_order = [name for name, _ in found]
    assert in_order == sorted(in_order)
    assert "asyncio/tasks.py" in in_order
    for name in in_order:
        assert not set(name.split("/")) & {"test", "tests", "idle_test", "site-packages"}


def test_stdlib_passes_over_tests_packages_and_undecodable_files(tmp_path, monkeypatch):
    for name in ("a.py", "b.txt", "test/c.py", "site-packages/d.py", "e/tests/f.py", "e/g.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert names(DataConfig()) == ["a.py", "e/g.py"]


def test_text_takes_globs_and_files_once_by_name(corpus):
    everything = names(text(corpus / "**" / "*.txt"))
    assert everything == sorted(everything)
    assert len(everything) == 31
    assert "deeper/00.txt" in everything
    assert names(text(corpus / "01.txt")) == ["01.txt"]
    assert names(text(corpus / "deeper/*.txt"))[0] == "00.txt"
    assert names(text(corpus / "02.txt", corpus / "**" / "*.txt"))[:2] == ["02.txt", "01.txt"]
    assert len(names(text(corpus / "02.txt", corpus / "**" / "*.txt"))) == 31


def test_text_is_read_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_bytes("é\r\n\tx".encode())
    assert [text for _, text in documents(text(tmp_path / "a.txt"))] == ["é\r\n\tx"]


def test_moved_corpus_keeps_names_and_fingerprint_and_a_changed_one_does_not(corpus):
    before = text(corpus / "**" / "*.txt")
    moved = corpus.parent / "elsewhere"
    shutil.copytree(corpus, moved)
    after = text(moved / "**" / "*.txt")
    assert names(after) == names(before)
    assert fingerprint(after) == fingerprint(before)
    content = (moved / "01.txt").read_text()
    (moved / "01.txt").write_text(content.replace("1", "2"))
    assert fingerprint(after) != fingerprint(before)
    (moved / "01.txt").write_text(content)
    (moved / "01.txt").rename(moved / "100.txt")
    assert fingerprint(after) != fingerprint(before)


def test_jsonl_reads_its_field_and_names_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [{"body": "one", "text": "x"}, {"body": "zwei ü\n"}]
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    assert list(documents(jsonl(path, field="body"))) == [
        ("a.jsonl:1", "one"),
        ("a.jsonl:3", "zwei ü\n"),
    ]


def test_held_out_depends_on_the_name_alone():
    """Pinned: a corpus keeps its split for ever."""
    chosen = [i for i in range(1000) if is_held_out(f"{i}.py", 0.02)]
    assert chosen == [109, 184, 244, 278, 437, 462, 547, 595, 617, 720, 768, 834, 920, 988]
    assert set(chosen) < {i for i in range(1000) if is_held_out(f"{i}.py", 0.1)}
    share = sum(is_held_out(f"{i}.py", 0.1) for i in range(20_000)) / 20_000
    assert abs(share - 0.1) < 0.01


def test_paths_that_match_nothing(corpus):
    with pytest.raises(
        ValueError, match=r"^data\.paths=\[/nope\] matches no file; write a file or"
    ):
        list(documents(text("/nope")))
    with pytest.raises(ValueError, match=r"/\*\.md\] matches no file"):
        list(documents(text(corpus / "01.txt", corpus / "*.md")))
    with pytest.raises(ValueError, match=r"matches no file; .* for a folder .*corpus/\*\*/\*$"):
        list(documents(text(corpus)))


def test_paths_and_source_must_fit():
    with pytest.raises(ValueError, match=r"data\.paths=\[\]: data\.source=text needs files"):
        DataConfig(source="text")
    with pytest.raises(
        ValueError, match=r"data\.paths=\[/nope\] is not read by data\.source=stdlib"
    ):
        DataConfig(paths=["/nope"])
    with pytest.raises(ValueError, match=r"data\.store=null: data\.source=store needs"):
        DataConfig(source="store")


def test_undecodable_bytes_name_file_and_offset(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xe4c")
    with pytest.raises(ValueError, match=r"a\.txt: byte 0xe4 at offset 2 is not UTF-8; "):
        list(documents(text(tmp_path / "a.txt")))
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl: byte 0xff at offset 24 is not UTF-8; "):
        list(documents(jsonl(tmp_path / "a.jsonl")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r"line 2: not JSON \(Expecting value, column 10\)"),
        ('{"body": "x"}', r"line 2: no string under data\.field=text \(found keys body\)"),
        ('{"text": 3}', r"line 2: no string under data\.field=text \(found keys text\)"),
        ('["text"]', r"line 2: no string under data\.field=text \(found list\)"),
        (r'{"text": "\ud800"}', r"line 2: data\.field=text holds half a surrogate pair"),
        ('{"text": "x", "n": ' + "9" * 5000 + "}", "line 2: a number of more than 4,300 digits$"),
        ("[" * 200_000, "line 2: JSON that is nested too deep to be read$"),
    ],
)
def test_bad_json_lines_name_file_and_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=r"a\.jsonl, " + message) as error:
        list(documents(jsonl(path)))
    assert "\n" not in str(error.value)


def test_a_single_document_is_split_by_position(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("abcdefghij" * 10)
    sides = list(split_texts(text(path, holdout=0.2)))
    assert [side for side, _ in sides] == ["train", "heldout"]
    assert [len(part) for _, part in sides] == [80, 20]
    assert "".join(part for _, part in sides) == path.read_text()


def write(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name!r}")


def found(*paths, **settings):
    return [file.name for file in source_files(text(*paths, **settings))]


def test_what_exists_is_meant_literally(tmp_path):
    """A path, and the beginning of a glob."""
    write(tmp_path, "f[v2].txt", "fv.txt", "what?.txt", "whats.txt", "*.txt", "data[1]/a.txt")
    write(tmp_path, "data1/b.txt", "data[1]/x[2]/c.txt", "data[1]/x2/d.txt")
    assert found(tmp_path / "f[v2].txt") == ["f[v2].txt"]
    assert found(tmp_path / "what?.txt") == ["what?.txt"]
    assert found(tmp_path / "*.txt") == ["*.txt"]
    assert found(tmp_path / "data[1]/*.txt") == ["a.txt"]
    assert found(tmp_path / "data[1]/**/*.txt") == ["a.txt", "x2/d.txt", "x[2]/c.txt"]
    assert found(tmp_path / "data[1]/x[2]/*") == ["c.txt"]
    (tmp_path / "f[v2].txt").unlink()
    assert found(tmp_path / "f[v2].txt") == ["fv.txt"]
    with pytest.raises(ValueError, match=r"for a folder .*data\[1\]/\*\*/\*$"):
        found(f"{tmp_path}/data[1]/")


def test_any_name_of_a_file_system_is_a_name(tmp_path):
    odd = ["a b.txt", "l\nn.txt", "[.txt", "].txt", "q?.txt", os.fsdecode(b"\xff\xe9.txt")]
    write(tmp_path, *odd, *(f"{os.fsdecode(bytes([0xFE]))}/{name}" for name in odd))
    *utf8, _ = odd  # a config holds text; what is not UTF-8 is met by a glob
    assert found(*(tmp_path / name for name in utf8)) == utf8
    everything = found(tmp_path / "**" / "*.txt")
    assert sorted(odd) == [name for name in everything if "/" not in name]
    assert len(everything) == 12
    config = text(tmp_path / "**" / "*.txt")
    assert [document.name for document in documents(config)] == everything
    assert len(fingerprint(config)) == 64


NAMES = ["a", "b", ".h", "c.txt", "d.txt", "x[1]", "y?", "n\nl", "é.txt"]
PARTS = ["*", "**", "a", "b", "*.txt", ".h", ".*", "?", "[ab]", "x*", "c.txt", "*[*", "[!a]*"]


@given(st.randoms(use_true_random=False), st.lists(st.sampled_from(PARTS), min_size=1, max_size=4))
def test_a_glob_matches_what_python_s_does(tmp_path_factory, choose: random.Random, parts):
    """On trees without links, where no wildcard is itself the name of something."""
    root = tmp_path_factory.mktemp("tree")

    def grow(folder: Path, depth: int) -> None:
        for name in choose.sample(NAMES, choose.randint(1, 5)):
            if depth and choose.random() < 0.6:
                (folder / name).mkdir()
                grow(folder / name, depth - 1)
            else:
                (folder / name).write_text("x")

    grow(root, 3)
    start = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    fixed, pattern = root.joinpath(*parts[:start]), root.joinpath(*parts)
    matches = map(Path, glob.glob(str(pattern), recursive=True))
    expected = sorted({p.relative_to(fixed).as_posix() for p in matches if p.is_file()} - {"."})
    if expected:
        assert found(pattern) == expected
    else:
        with pytest.raises(ValueError, match="matches no file"):
            found(pattern)


def test_each_folder_is_read_once_whatever_links_lead_to_it(tmp_path):
    """Two links upwards made a walk that never ended."""
    write(tmp_path, "data/z/1.txt", "data/z/deep/2.txt", "outside/3.txt", "outside/in/4.txt")
    write(tmp_path, "above.txt")
    data = tmp_path / "data"
    for place, target in (
        ("data/up1", "."),
        ("data/up2", ".."),
        ("data/z/up3", ".."),
        ("data/z/deep/up4", "../../.."),
        ("outside/in/up5", "../.."),
        ("outside/back", "../data"),
        ("data/a", "z"),  # sorts before it; the folder itself comes first all the same
        ("data/o1", "../outside"),
        ("data/o2", "../outside"),
        ("data/loop", "loop"),
        ("data/broken", "nowhere"),
    ):
        (tmp_path / place).symlink_to(target)
    expected = ["o1/3.txt", "o1/in/4.txt", "z/1.txt", "z/deep/2.txt"]
    assert found(data / "**" / "*.txt") == expected
    assert found(data / "**" / "**" / "*.txt") == expected
    assert found(data / "**") == expected
    assert found(data / "**" / "deep" / "*.txt") == ["z/deep/2.txt"]
    assert found(data / "*" / "**" / "*.txt") == expected
    assert found(data / "a" / "*.txt") == ["1.txt"]  # named by who writes the glob
