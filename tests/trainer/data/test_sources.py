import json
import shutil
import sysconfig

import pytest

from meshwright.trainer.config import DataConfig
from meshwright.trainer.data.sources import documents, fingerprint, is_held_out, split_texts


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
