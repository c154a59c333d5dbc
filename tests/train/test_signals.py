import signal
import subprocess
import threading
import time

import pytest
from run_checks import assert_same_run, command
from tiny_run import NUM_STEPS

from attention_residuals.train import load_checkpoint_model
from attention_residuals.train.checkpoint import checkpoints


def start(corpus, folder):
    """Starts a run of 200 slow steps."""
    arguments = command(corpus, folder, kind="long")
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_ends_cleanly(corpus, tmp_path, number):
    with start(corpus, tmp_path / "run") as process:
        steps = [process.stdout.readline() for _ in range(3)]
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert steps == ["1\n", "2\n", "3\n"]
    assert process.returncode == 0, err
    *later, said, step = out.split()
    assert said == "interrupted"
    assert later in ([], ["4"])
    assert f"stopped and saved at step {step}; the same command goes on" in err
    assert checkpoints(tmp_path / "run")[-1].name == f"step-{int(step):08d}"
    load_checkpoint_model(tmp_path / "run")


def test_a_second_interrupt_stops_at_once(corpus, tmp_path):
    with start(corpus, tmp_path / "run") as process:
        while process.stdout.readline() != "3\n":
            pass
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in err
    assert checkpoints(tmp_path / "run")[-1].name == "step-00000002"


@pytest.mark.parametrize("at_step", [3, 4, NUM_STEPS])
def test_a_stopped_run_goes_on_to_the_same_bits(go, tmp_path, uninterrupted, at_step):
    def monitor(step, model):
        if step == at_step:
            signal.raise_signal(signal.SIGTERM)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stopped = go(monitor=monitor)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert (stopped.step, stopped.interrupted) == (at_step, at_step < NUM_STEPS)
    assert (stopped.loss is None) == (at_step < 4)
    finished = go()
    assert (finished.step, finished.interrupted) == (NUM_STEPS, False)
    assert_same_run(tmp_path / "run", uninterrupted)


def test_an_interrupt_after_a_request_to_stop_interrupts_at_once(go, tmp_path):
    def monitor(step, model):
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

    assert go(monitor=monitor).step == 3


def test_outside_of_the_main_thread_a_run_goes_without_handlers(go):
    results, before = [], signal.getsignal(signal.SIGINT)
    thread = threading.Thread(
        target=lambda: results.append(go(monitor=lambda *_: seen.append(signal.getsignal(signal.SIGINT))))
    )
    seen = []
    thread.start()
    thread.join()
    assert results[0].step == NUM_STEPS
    assert seen == [before] * NUM_STEPS
