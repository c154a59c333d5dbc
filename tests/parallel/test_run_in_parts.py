"""Checkpoints in parts, written and read by one rank: no other processes."""

import sys
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from closeness import assert_close
from parallel.run_cases import SAVING, config_of, distance_of_models, make_corpus
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from attention_residuals.cli import main
from attention_residuals.errors import CheckpointError, DataError, RankError
from attention_residuals.models import load_model
from attention_residuals.parallel.blame import tell
from attention_residuals.parallel.config import Parallel
from attention_residuals.parallel.launch import joined
from attention_residuals.parallel.muon import GatheringMuon
from attention_residuals.parallel.shards import Saving, _Writer, wait_for
from attention_residuals.parallel.training import executes
from attention_residuals.train import load_checkpoint_model, newest_checkpoint, train
from attention_residuals.train.metrics import Metrics
from attention_residuals.train.shards import read_shards

PART = "shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture
def in_parts(tmp_path, monkeypatch, corpus):
    """Trains a run in parts, or goes on."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # PyTorch puts its own in front for each group
    number = iter(range(9))

    def run(monitor=None):
        store = dist.FileStore(str(tmp_path / f"store-{next(number)}"), 1)
        with joined(Parallel(), "cpu", store, 0) as ranks:
            return train(
                config_of(num_steps=4),
                corpus,
                tmp_path / "all" / "run",
                saving=SAVING,
                progress=False,
                executes=executes(ranks),
                monitor=monitor,
            )

    return run


@pytest.fixture
def in_ranks(monkeypatch):
    """The ranks of a run as one of two sees them, with another that is only told of."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with joined(Parallel(), "cpu", dist.HashStore(), 0) as ranks:
        monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
        yield ranks
        monkeypatch.undo()


class Killed(BaseException):
    """Ends the run at once."""


def killed_after(step, saved=None):
    def monitor(now, model):
        if now == step:
            while saved is not None and not saved.exists():  # it is written in the background
                time.sleep(0.01)
            raise Killed

    return monitor


def test_a_run_in_parts_is_read_and_continued_by_one_process_and_back(tmp_path, corpus, in_parts):
    together = tmp_path / "all" / "run"
    with pytest.raises(Killed):
        in_parts(killed_after(3, saved=together / "checkpoints" / "step-00000002"))
    dist.destroy_process_group()
    assert sorted(path.name for path in (together / "checkpoints").iterdir()) == ["step-00000002"]
    config = config_of(num_steps=4)
    with pytest.raises(Killed):
        train(config, corpus, together, saving=SAVING, progress=False, monitor=killed_after(3))
    assert in_parts().step == 4
    train(config, corpus, tmp_path / "alone", saving=SAVING, progress=False)
    one, other = load_checkpoint_model(together), load_checkpoint_model(tmp_path / "alone")
    assert distance_of_models(one, other) <= 1e-6
    assert train(config, corpus, together, progress=False).step == 4  # nothing is left to do


def test_a_run_that_fails_holds_its_folder_until_the_background_has_written(tmp_path, monkeypatch, in_parts):
    folder, write, held = tmp_path / "all" / "run", _Writer.write_data, []

    def slow(self, plan, planner):
        time.sleep(1)  # by then the run has failed
        try:
            Metrics(folder).__exit__()
        except CheckpointError as error:
            held.append(error.got)
        return write(self, plan, planner)

    monkeypatch.setattr(_Writer, "write_data", slow)
    with pytest.raises(Killed):
        in_parts(killed_after(3))
    dist.destroy_process_group()
    assert held == [f"{folder}, in which another process is training"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000002"]
    Metrics(folder).__exit__()  # is free again


def test_a_run_in_parts_is_exported_as_one_model(tmp_path, in_parts, capsys):
    in_parts()
    assert main(["export", str(tmp_path / "all"), str(tmp_path / "out")]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    exported, own = load_model(tmp_path / "out"), load_checkpoint_model(tmp_path / "all")
    assert distance_of_models(exported, own) == 0
    assert main(["export", str(tmp_path / "all"), str(tmp_path / "out")]) == 1
    assert main(["train", str(tmp_path / "more"), "--start", str(tmp_path / "all")]) == 2
    assert "attnres export" in capsys.readouterr().err


def test_a_damaged_part_is_noticed_and_the_checkpoint_before_is_named(tmp_path, in_parts):
    in_parts()
    old, new = sorted((tmp_path / "all" / "run" / "checkpoints").iterdir())
    whole = (new / PART).read_bytes()
    (new / PART).write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=f"(?s){PART}, which is truncated.*{old.name}"):
        newest_checkpoint(tmp_path / "all" / "run")
    (new / PART).unlink()
    with pytest.raises(CheckpointError, match=f"(?s){PART}, which is missing.*{old.name}"):
        newest_checkpoint(tmp_path / "all" / "run")


def test_a_file_that_the_checkpoint_does_not_list_is_no_part_of_it(tmp_path, in_parts):
    with pytest.raises(Killed):
        in_parts(killed_after(3, saved=tmp_path / "all" / "run" / "checkpoints" / "step-00000002"))
    dist.destroy_process_group()
    (checkpoint,) = (tmp_path / "all" / "run" / "checkpoints").iterdir()
    save_file(
        {"embedding.weight": torch.zeros(3)}, checkpoint / "shard-00009-model-00001-of-00001.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"shard-00009.*does not belong to it"):
        in_parts()
    dist.destroy_process_group()


def test_a_rank_tells_its_own_error_and_never_only_what_it_waited_for(in_ranks):
    for own in (
        torch.OutOfMemoryError("CUDA out of memory"),
        NotImplementedError("no kernel"),
        KeyError("x"),
    ):
        assert in_ranks.explained(own) is own
    in_ranks.store.set("failed/1", '{"step": 7, "what": "closed", "began_here": false}')
    error = in_ranks.explained(RuntimeError("shapes cannot be multiplied"))
    assert "rank 1 ended in step 7: closed" in str(error)
    assert "shapes cannot be multiplied" in str(error)


def test_what_a_rank_failed_of_is_told_with_its_own_advice_and_without_gloos(in_ranks, monkeypatch):
    monkeypatch.setattr(in_ranks, "rank", 1)
    tell(
        DataError(got="no such file", expected="a file", do="name one"), in_ranks.store, 0, 0, began_here=True
    )
    monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
    with pytest.raises(RuntimeError) as waited:
        in_ranks.lead_first(lambda: "prepared", lambda: "opened")
    error = in_ranks.explained(waited.value)
    assert error.got == (
        "rank 0 failed before the first step: DataError: no such file (rank 1 waited for it before the first step)"
    )
    assert (error.expected, error.do) == ("a file", "name one")
    noise = "[/a/tcp/pair.cc:553] Connection closed by peer. This is typically caused by a remote worker"
    assert (
        "and ended with RuntimeError: Connection closed by peer)"
        in in_ranks.explained(RuntimeError(noise)).got
    )


def test_only_the_lead_prepares_and_the_others_open(in_ranks, monkeypatch):
    assert in_ranks.lead_first(lambda: "prepared", lambda: "opened") == "prepared"
    monkeypatch.setattr(in_ranks, "rank", 1)
    assert in_ranks.lead_first(lambda: "prepared", lambda: "opened") == "opened"


def test_a_part_that_cannot_be_written_is_told_once(tmp_path):
    cause = CheckpointError(got="a folder without a part", expected="one folder", do="share the disk")
    done = Future()
    done.set_exception(CheckpointException("save", {1: (cause, None)}))
    with pytest.raises(CheckpointError) as told:
        wait_for(Saving(tmp_path, 3, done))
    assert str(told.value).count("expected: ") == 1
    assert told.value.got.endswith("could not be written: a folder without a part")
    assert told.value.do.startswith("share the disk; then start again")


def test_a_rank_error_that_names_another_rank_is_told_as_it_is_unless_other_copies_may_know_more(
    in_ranks, monkeypatch
):
    def of(got):
        return RankError(got=got, expected="every rank to finish", do="start again")

    in_ranks.store.set("failed/1", '{"step": 7, "what": "no luck", "began_here": true}')
    found, own = of("rank 1 no longer answers in step 7"), of("rank 0 failed in step 7: connection closed")
    assert in_ranks.explained(found) is found
    assert "rank 1 failed in step 7: no luck" in str(in_ranks.explained(own))
    in_copies = replace(in_ranks.parallel, replicate=2, pipeline=2, microbatches=2)
    monkeypatch.setattr(in_ranks, "parallel", in_copies)
    assert "rank 1 failed in step 7: no luck" in str(in_ranks.explained(found))


def test_an_error_that_names_who_keeps_the_store_outlives_the_store(in_ranks, monkeypatch):
    class Gone(dist.HashStore):
        def set(self, *_):
            raise RuntimeError("broken pipe")

    monkeypatch.setattr(in_ranks, "store", Gone())
    found = RankError(got="the store no longer answers: rank 0", expected="it to live", do="start again")
    assert in_ranks.explained(found) is found
    assert "rank 0 was left alone before the first step: RuntimeError: shapes" in str(
        in_ranks.explained(RuntimeError("shapes"))
    )


def test_what_was_said_before_a_restart_is_not_heard_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    store = dist.HashStore()  # as torchrun's, which outlives the ranks
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        with joined(Parallel(), "cpu", store, 0) as ranks:
            assert not ranks.store.check(["failed/0"])
            ranks.store.set("failed/0", "{}")


def test_parts_that_do_not_make_a_whole_are_refused(tmp_path):
    def part(number, first, size):
        name = f"shard-{number:05d}-model-00001-of-00001.safetensors"
        offsets = f'{{"a": {{"saved_offsets": [{first}]}}}}'
        save_file({"a": torch.arange(first, first + size)}, tmp_path / name, {"DCP_SHARDING_INFO": offsets})
        return name

    names = [part(1, 0, 3), part(2, 3, 2), part(3, 5, 4)]
    assert read_shards(tmp_path, names)["a"].tolist() == list(range(9))
    with pytest.raises(CheckpointError, match=r"only some parts of a"):
        read_shards(tmp_path, names[::2])
    save_file({"a": torch.zeros(3)}, tmp_path / names[1])
    with pytest.raises(CheckpointError, match=names[1]):
        read_shards(tmp_path, names)


def test_muon_of_whole_matrices_is_pytorchs_own():
    start, gradients = torch.randn(6, 4), torch.randn(3, 6, 4)
    found = []
    for kind in (GatheringMuon, torch.optim.Muon):
        weight = torch.nn.Parameter(start.clone())
        muon = kind([weight], lr=0.1, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
        for gradient in gradients:
            weight.grad = gradient.clone()
            muon.step()
        found.append((weight.detach(), muon.state[weight]["momentum_buffer"]))
    (ours, momentum), (theirs, expected) = found
    assert_close(ours, theirs)
    assert torch.equal(momentum, expected)
