import io
import sys

import pytest
from tiny_run import NUM_STEPS

from attention_residuals.train import progress as progress_module
from attention_residuals.train.progress import Reporter


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")


def test_a_terminal_shows_loss_bits_speed_and_place(monkeypatch, go):
    monkeypatch.setattr(sys, "stderr", Terminal())
    go(progress=True)
    shown = sys.stderr.getvalue()
    for what in (f"{NUM_STEPS}/{NUM_STEPS}", "loss 5.", "bits/byte", "tokens/s"):
        assert what in shown


def test_without_a_terminal_a_short_run_says_nothing(capsys, go):
    go(progress=True)
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_a_long_run_says_a_line_now_and_then(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    with Reporter(num_steps=100, shown=True) as reporter:
        reporter.begin(0)
        for step in range(1, 41):
            now[0] += 2.0
            bits = None if step == 30 else 1.5
            reporter.step(step, loss=2.0, bits_per_byte=bits, tokens_per_second=12345.6)
    assert capsys.readouterr().err.splitlines() == [
        "step 15/100: loss 2.000, 1.500 bits/byte, 12,346 tokens/s",
        "step 30/100: loss 2.000, 12,346 tokens/s",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_can_be_turned_off(monkeypatch, go, terminal):
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    go(progress=False)
    assert sys.stderr.getvalue() == ""
