"""The file of results: whole runs or nothing, whatever dies while it is written."""

import multiprocessing
import os
import signal

import pytest

from attention_residuals.errors import CheckpointError, DataError
from attention_residuals.experiments import Key, Number, Outcome, Results
from attention_residuals.experiments.results import COLUMNS, DONE

NUMBERS = (Number("loss, nats", 3.25, 10), Number("size", 0.1 + 0.2, 10, 2), Number("whole", 7.0))


def made(seed, status=DONE, numbers=NUMBERS, arm="block"):
    return Outcome(
        key=Key("main", arm, "rate 0.004, long", seed), config="c0", status=status, numbers=numbers
    )


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "results.csv")


def test_what_is_appended_is_read_to_the_last_bit(results):
    outcomes = [made(0), made(1, "diverged: a loss of nan nats,\n at step 3", ()), made(2, numbers=())]
    for one in outcomes:
        assert results.append(one) is None
    table = results.read()
    assert table.torn is None
    assert [one.numbers for one in table.outcomes.values()] == [NUMBERS, (), ()]
    assert [one.status for one in table.outcomes.values()] == [
        DONE,
        "diverged: a loss of nan nats, at step 3",
        DONE,
    ]
    assert list(table.outcomes) == [one.key for one in outcomes]


def test_a_file_that_is_not_there_holds_nothing(results):
    assert results.read() == ({}, None)


@pytest.mark.parametrize("cut", range(1, 190, 7))
def test_wherever_a_write_is_torn_the_runs_before_it_stay_and_the_next_write_repairs(results, cut):
    results.append(made(0))
    whole = results.path.read_bytes()
    results.append(made(1))
    everything = results.path.read_bytes()
    results.path.write_bytes(everything[: len(everything) - cut])
    torn = results.read()
    assert list(torn.outcomes) == [made(0).key]
    assert (torn.torn is not None) == (len(everything) - cut > len(whole))
    assert results.append(made(2)) == torn.torn
    assert results.path.read_bytes().startswith(whole)
    assert list(results.read().outcomes) == [made(0).key, made(2).key]
    assert results.read().torn is None


def test_a_torn_header_is_no_damage(results):
    results.path.write_bytes(",".join(COLUMNS).encode()[:10])
    assert results.read().outcomes == {}
    results.append(made(0))
    assert list(results.read().outcomes) == [made(0).key]


def test_the_last_outcome_of_a_run_counts(results):
    results.append(made(0, "out of memory", ()))
    results.append(made(1))
    results.append(made(0))
    table = results.read()
    assert table.outcomes[made(0).key].is_done
    assert list(table.outcomes) == [made(1).key, made(0).key]


@pytest.mark.parametrize(
    ("line", "damage"),
    [
        (1, lambda text: text.replace(b"quantity", b"quality")),
        (2, lambda text: text.replace(b"3.25", b"three")),
        (3, lambda text: text.replace(b",c0,", b",c0,,")),
        (4, lambda text: text.replace(b",0,c0", b",zero,c0")),
    ],
)
def test_damage_before_the_end_is_told_by_its_line_and_nothing_is_written(results, line, damage):
    results.append(made(0))
    results.append(made(1))
    lines = results.path.read_bytes().splitlines(keepends=True)
    lines[line - 1] = damage(lines[line - 1])
    broken = b"".join(lines)
    results.path.write_bytes(broken)
    for act in (results.read, lambda: results.append(made(2))):
        with pytest.raises(DataError, match=f"line {line}"):
            act()
    assert results.path.read_bytes() == broken


def test_a_lost_status_does_not_give_its_numbers_to_the_next_run(results):
    results.append(made(0))
    results.append(made(1))
    lines = results.path.read_bytes().splitlines(keepends=True)
    del lines[4]  # the status of the first run
    results.path.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match="line 5"):
        results.read()


@pytest.mark.parametrize("number", [Number("loss", float("nan")), Number("status", 1.0)])
def test_what_cannot_be_read_back_is_not_written(results, number):
    with pytest.raises(DataError, match="finite"):
        results.append(made(0, numbers=(number,)))
    assert not results.path.exists()


def test_a_place_that_cannot_be_written_is_told(results):
    results.path.mkdir()
    with pytest.raises(DataError, match="may be read"):
        results.append(made(0))
    blocked = Results(results.path / "file" / "results.csv")
    (results.path / "file").write_bytes(b"")
    with pytest.raises((CheckpointError, DataError)):
        blocked.append(made(0))


def append_many(results, first):
    for seed in range(first, first + 10):
        results.append(made(seed))


def test_processes_that_append_at_once_lose_nothing(results):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=append_many, args=(results, 10 * number)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert {key.seed for key in results.read().outcomes} == set(range(30))
    assert all(one.numbers == NUMBERS for one in results.read().outcomes.values())


def die_in_the_write(results):
    def half_then_die(file):
        os.ftruncate(file, os.fstat(file).st_size - 20)
        os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = half_then_die
    results.append(made(1))


def test_a_process_that_dies_in_its_write_keeps_no_lock_and_leaves_what_was_there(results):
    results.append(made(0))
    process = multiprocessing.get_context("fork").Process(target=die_in_the_write, args=(results,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert results.read().torn is not None
    assert results.append(made(2)) is not None
    assert [key.seed for key in results.read().outcomes] == [0, 2]


def test_numbers_are_found_by_step_and_index_and_the_last_one_by_default():
    numbers = [
        Number("loss", 4.0, 5),
        Number("loss", 3.0, 10),
        Number("size", 1.0, 5, 0),
        Number("size", 2.0, 10, 0),
    ]
    one = made(0, numbers=(*numbers, Number("size", 9.0, 10, 1)))
    assert (one.value("loss"), one.value("loss", step=5), one.value("size", place=0)) == (3.0, 4.0, 2.0)
    assert one.series("loss") == {5: 4.0, 10: 3.0}
    assert one.series("size", step=10) == {0: 2.0, 1: 9.0}
    with pytest.raises(DataError, match="no 'speed'"):
        one.value("speed")


def test_a_table_gives_the_runs_of_a_stage_that_are_done(results):
    for one in (made(0), made(1, "diverged", ()), made(2, arm="full")):
        results.append(one)
    table = results.read()
    assert [key.seed for key in table.done("main")] == [0, 2]
    assert [key.seed for key in table.done("main", "full")] == [2]
    assert not table.done("main", "full", "another setting")
    assert not table.done("sweep")
