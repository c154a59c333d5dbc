"""``attnres study``, as typed."""

import json

import pytest

import attention_residuals.cli.study  # noqa: F401  joins the command line
from attention_residuals.cli import main
from attention_residuals.cli import study as module
from attention_residuals.configs import encode
from attention_residuals.contradiction import Study, run_study


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
