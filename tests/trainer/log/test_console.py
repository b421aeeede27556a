"""What is printed: lines where there is no terminal, a bar where there is one."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from meshwright.trainer.log import console
from meshwright.trainer.runtime.stop import Stopped


def metrics(step: int) -> dict:
    return {
        "step": step,
        "loss": 2.0 + step / 1000,
        "tokens_per_second": 12345.6,
        "lr": 0.00123,
        "grad_norm": 0.9876,
    }


@pytest.fixture
def shown(monkeypatch):
    """A function that reports ten steps on a console of 100 columns and gives back its text."""

    def show(*, terminal: bool, say: str = "", every: int = 4, done=0, quiet=False) -> str:
        file = io.StringIO()
        settings = {"file": file, "width": 100, "color_system": None}
        monkeypatch.setattr(console, "Console", lambda **asked: Console(**asked, **settings))
        monkeypatch.setattr(console, "is_terminal", lambda: terminal)
        with console.report_steps(10, every, quiet=quiet) as reporter:
            reporter.begin(done)
            for step in range(done + 1, 11):
                reporter.step(metrics(step))
                if say and step == 5:
                    reporter.say(say)
        return file.getvalue()

    return show


def test_without_a_terminal_a_line_every_few_steps(shown):
    assert shown(terminal=False).splitlines() == [
        "step 4  loss 2.0040  12,346 tokens/s  lr 0.00123  norm 0.988",
        "step 8  loss 2.0080  12,346 tokens/s  lr 0.00123  norm 0.988",
    ]


def test_without_a_terminal_nothing_but_text_is_written(shown):
    assert re.fullmatch(r"[\w .,/\n]+", shown(terminal=False, every=1))


def test_on_a_terminal_a_bar_and_no_lines(shown):
    text = shown(terminal=True)
    assert "━" in text
    assert "10/10" in text
    assert "loss 2.0100  12,346 tokens/s" in text
    assert not re.search(r"step \d", text)


def test_a_resumed_run_begins_where_it_was(shown):
    text = shown(terminal=True, done=9)
    assert "9/10" in text
    assert "10/10" in text
    assert "1/10" not in text.replace("10/10", "")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_quiet_process_says_nothing(shown, terminal):
    assert shown(terminal=terminal, say="run a", quiet=True) == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_said_stands_unchanged_on_one_line(shown, terminal):
    line = f"run [bold]a[/bold] {'x' * 150} 3.14"
    assert line in shown(terminal=terminal, say=line)


def test_the_bar_is_closed_when_a_step_fails(monkeypatch):
    """Else the terminal stays without a cursor."""
    file = io.StringIO()
    monkeypatch.setattr(console, "Console", lambda **settings: Console(file=file, **settings))
    monkeypatch.setattr(console, "is_terminal", lambda: True)
    with pytest.raises(KeyError), console.report_steps(10, 1) as reporter:
        reporter.step({"step": 1})
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


def test_what_is_said_keeps_its_colons(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(console, "Console", lambda **settings: Console(file=file, **settings))
    with console.report_steps(1, 1) as reporter:
        reporter.say("run /tmp/a:on:b")
    assert file.getvalue() == "run /tmp/a:on:b\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


LOUD = {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}


@pytest.mark.parametrize(
    ("file", "environ", "bar"),
    [
        (io.StringIO(), LOUD, False),
        (Terminal(), LOUD | {"TERM": "dumb"}, False),
        (Terminal(), {"TERM": "xterm", "TTY_COMPATIBLE": "0", "TTY_INTERACTIVE": "0"}, True),
    ],
)
def test_the_stream_alone_says_whether_it_is_a_terminal(file, environ, bar, monkeypatch):
    """Not the variables by which other programs are made to colour a file."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", file)
    with console.report_steps(10, 1) as reporter:
        for step in range(1, 11):
            reporter.step(metrics(step))
    assert ("\x1b[" in file.getvalue()) == bar
    assert ("step 10  loss" in file.getvalue()) == (not bar)


def test_there_may_be_no_stdout(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert not console.is_terminal()


def test_what_fails_in_a_decoration_is_one_line():
    said = []
    with console.decoration("loss.png", said.append):
        raise OSError(28, "No space\nleft")
    assert said == ["note        no loss.png: OSError: [Errno 28] No space left"]
    with pytest.raises(Stopped), console.decoration("sample", said.append):
        raise Stopped
    with pytest.raises(KeyboardInterrupt), console.decoration("sample", said.append):
        raise KeyboardInterrupt
    with pytest.raises(KeyError), console.decoration("sample", said.append, but=KeyError):
        raise KeyError
    assert len(said) == 1
