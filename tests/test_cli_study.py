"""``attnres study``, as typed."""

import json
import re

import pytest

import attention_residuals.cli.study  # noqa: F401  joins the command line
from attention_residuals.cli import main
from attention_residuals.cli import study as module
from attention_residuals.configs import encode
from attention_residuals.contradiction import Study, run_study
from attention_residuals.experiments import STUDIES, QueueEnd, Results
from attention_residuals.experiments.cost import Hardware
from attention_residuals.experiments.launchers import OneProcess, Torchrun
from attention_residuals.parallel.config import Parallel


def test_a_stage_without_what_it_needs_says_what_to_do(tmp_path, capsys):
    command = ["study", "contradiction", "--folder", str(tmp_path / "run"), "--stage"]
    assert main([*command, "pilot"]) == 1
    assert "--stage train" in capsys.readouterr().err
    assert main([*command, "report"]) == 2
    assert "--stage confirm" in capsys.readouterr().err
    assert main([*command, "confirm", "--preregistration", str(tmp_path / "none.md")]) == 2
    assert "the preregistration" in capsys.readouterr().err


def test_an_unknown_study_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["study", "agreement"])
    assert "contradiction" in capsys.readouterr().err


@pytest.mark.parametrize(("is_done", "code"), [(True, 0), (False, 130)])
def test_what_is_typed_reaches_the_study(tmp_path, monkeypatch, is_done, code):
    given = {}

    def run(study, folder, preregistration, *, stage, device):
        given.update(study=study, folder=folder, stage=stage, device=device)
        return is_done

    monkeypatch.setattr(module, "run_study", run)
    other = Study(seeds=(7,))
    (tmp_path / "study.json").write_text(json.dumps({"format": 1, "study": encode(other)}))
    typed = ["--folder", str(tmp_path), "--config", str(tmp_path / "study.json"), "--device", "cpu"]
    assert main(["study", "contradiction", *typed]) == code
    assert given == {"study": other, "folder": tmp_path, "stage": None, "device": "cpu"}
    assert run_study is not run


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({}, r"study=None(.|\n)*a study"),
        ({"study": [1]}, r"study=\[1\]"),
        ({"study": {"type": "No"}}, "type 'No'"),
    ],
)
def test_a_config_without_a_study_is_refused(tmp_path, capsys, told, why):
    (tmp_path / "other.json").write_text(json.dumps({"format": 1, **told}))
    typed = ["--folder", str(tmp_path / "run"), "--config", str(tmp_path / "other.json")]
    assert main(["study", "contradiction", *typed]) == 2
    assert re.search(why, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def queued(monkeypatch):
    """Stands in for the queue, and remembers what it was asked to do."""
    asked = []

    def run(experiment, folder, results, **options):
        options.pop("note")
        asked.append((experiment, folder, results, options))
        return ended[0]

    ended = [QueueEnd(True, False, {}, ())]
    monkeypatch.setattr(module, "run_experiment", run)
    return asked, ended


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_a_command_that_queues_its_runs(name, queued, tmp_path):
    asked, _ = queued
    typed = [
        "--scale",
        "smoke",
        "--stage",
        "run",
        "--folder",
        str(tmp_path),
        "--workers",
        "3",
        "--again",
        "--seeds",
        "4",
    ]
    assert main(["study", name, *typed]) == 0
    ((experiment, folder, results, options),) = asked
    assert experiment == STUDIES[name].at("smoke").with_seeds(4)
    assert experiment.seeds == (0, 1, 2, 3)
    assert (folder, results) == (tmp_path, tmp_path / "results.csv")
    assert options == {"corpus": None, "workers": 3, "launcher": OneProcess(), "again": True}


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        (QueueEnd(False, True, {}, ()), 130, ""),
        (QueueEnd(False, False, {"main-block": "OSError: full"}, ()), 1, "failed: main-block: OSError: full"),
        (QueueEnd(False, False, {}, ("a", "b")), 1, "another process has 2 run(s)"),
    ],
)
def test_what_is_not_finished_is_told_by_words_and_code(queued, tmp_path, capsys, ended, code, said):
    queued[1][0] = ended
    assert (
        main(["study", "ablation", "--scale", "smoke", "--stage", "run", "--folder", str(tmp_path)]) == code
    )
    assert said in capsys.readouterr().err


def test_paper_scale_says_what_it_costs_and_waits_for_a_yes(queued, tmp_path, capsys):
    typed = ["study", "scaling", "--scale", "paper", "--folder", str(tmp_path), "--stage", "run"]
    assert main(typed) == 2
    told = capsys.readouterr().err
    assert "15 runs, " in told
    assert " FLOP; " in told
    assert " hours (" in told
    assert "--yes" in told
    assert not queued[0]
    assert main([*typed, "--yes", "--corpus", str(tmp_path)]) == 0
    ((_, _, _, options),) = queued[0]
    assert options["launcher"] == Torchrun(parallel=Parallel(), device="cpu")
    assert (options["workers"], options["corpus"]) == (1, tmp_path)


@pytest.mark.parametrize(
    ("typed", "parallel"),
    [
        ((), Parallel(shard=8)),
        (("--replicate", "2"), Parallel(replicate=2, shard=4)),
        (("--shard", "4"), Parallel(shard=4)),
        (("--replicate", "8", "--shard", "1"), Parallel(replicate=8)),
    ],
)
def test_paper_scale_shares_a_run_out_over_all_gpus_unless_told(
    queued, tmp_path, monkeypatch, typed, parallel
):
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 8)
    words = ["study", "scaling", "--scale", "paper", "--yes", "--folder", str(tmp_path), "--stage", "run"]
    assert main([*words, *typed]) == 0
    assert queued[0][0][3]["launcher"] == Torchrun(parallel=parallel, device="cuda")


def test_more_gpus_than_there_are_are_refused_and_other_scales_take_as_many_processors(
    queued, tmp_path, monkeypatch, capsys
):
    words = ["study", "scaling", "--folder", str(tmp_path), "--stage", "run", "--scale"]
    assert main([*words, "smoke", "--shard", "2"]) == 0
    assert queued[0][0][3]["launcher"] == Torchrun(parallel=Parallel(shard=2), device="cpu")
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 2)
    assert main([*words, "paper", "--yes", "--replicate", "2", "--shard", "2"]) == 2
    assert "at most 2" in capsys.readouterr().err


def test_a_cost_is_that_of_the_gpus_that_are_used(tmp_path, monkeypatch, capsys):
    asked = []

    def hardware(gpus=None):
        asked.append(gpus)
        return Hardware("chips", 1e15)

    monkeypatch.setattr(module, "visible_hardware", hardware)
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 8)
    words = ["study", "dynamics", "--stage", "cost", "--folder", str(tmp_path), "--scale"]
    assert main([*words, "paper", "--shard", "4"]) == 0
    assert main([*words, "smoke"]) == 0
    assert asked == [4, None]


def test_paper_scale_needs_a_corpus_and_the_others_none(tmp_path, capsys):
    typed = ["--stage", "run", "--folder", str(tmp_path)]
    assert main(["study", "dynamics", "--scale", "paper", "--yes", *typed]) == 2
    assert "a prepared corpus" in capsys.readouterr().err
    assert main(["study", "dynamics", "--scale", "smoke", "--corpus", str(tmp_path), *typed]) == 2
    assert "brings its own text" in capsys.readouterr().err
    assert main(["study", "depth-retrieval", "--scale", "paper", *typed]) == 2
    assert "smoke or laptop" in capsys.readouterr().err


def test_cost_is_told_without_a_text_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["study", "ablation", "--stage", "cost"]) == 0
    assert "runs, " in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_report_needs_the_file_of_results_and_nothing_else(tmp_path, capsys, queued):
    results = tmp_path / "results.csv"
    typed = [
        "study",
        "scaling",
        "--scale",
        "smoke",
        "--results",
        str(results),
        "--folder",
        str(tmp_path / "run"),
    ]
    assert main([*typed, "--stage", "report"]) == 2
    assert "without a run" in capsys.readouterr().err
    from experiments.test_studies import all_done

    found, _ = all_done(STUDIES["scaling"].at("smoke"))
    for one in found.outcomes.values():
        Results(results).append(one)
    assert main([*typed, "--stage", "report"]) == 0
    assert not queued[0]
    assert "Scaling with compute" in (tmp_path / "run" / "report" / "report.md").read_text()
    assert main(typed) == 0  # the queue, then the report
    assert len(queued[0]) == 1


def test_help_explains_a_study_and_its_options(capsys):
    with pytest.raises(SystemExit):
        main(["study", "ablation", "--help"])
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Which residual rules lower the loss" in told
    assert "or paper (the paper's own size" in told


@pytest.mark.slow
def test_a_whole_study_runs_as_typed_and_repeats_nothing(tmp_path, capsys):
    typed = ["study", "dynamics", "--scale", "smoke", "--folder", str(tmp_path)]
    assert main(typed) == 0
    before = (tmp_path / "results.csv").read_bytes()
    assert (tmp_path / "report" / "report.md").exists()
    assert len(Results(tmp_path / "results.csv").read().outcomes) == 4
    assert "killed" not in capsys.readouterr().err
    assert main(typed) == 0
    assert (tmp_path / "results.csv").read_bytes() == before
