"""The command, as a person types it."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attention_residuals.cli import main, names, training
from attention_residuals.cli.names import source_of
from attention_residuals.data import HuggingFaceDataset, Tokenizer
from attention_residuals.inference import Engine, Piece
from attention_residuals.trace import Trace
from attention_residuals.train import Result
from attention_residuals.version import __version__


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (folder / f"tale {number}.txt").write_text(
            f"Once upon a time {number} ducks swam to pond {number % 7}.\n" * 6
        )
    return folder


def options(texts, *more):
    small = ["--source", str(texts), "--depth", "2", "--vocab-size", "280", "--sequence-length", "16"]
    return [*small, "--batch-size", "2", "--num-steps", "3", *more]


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "block"
    assert main(["train", str(folder), *options(texts)]) == 0
    return folder


def test_train_writes_a_run_that_eval_and_trace_read(trained, capsys):
    assert main(["eval", str(trained)]) == 0
    words = capsys.readouterr().out.split()
    assert words[1:4] == ["nats", "per", "token,"]
    assert 0 < float(words[4]) < 20
    assert main(["trace", str(trained), "Once upon"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:]] == [
        "L0.attention",
        "L0.mlp",
        "L1.attention",
        "L1.mlp",
        "output",
    ]


def test_the_same_command_again_says_that_the_run_is_finished(trained, texts, capsys):
    assert main(["train", str(trained), *options(texts)]) == 0
    assert "is finished" in capsys.readouterr().err


def test_other_options_in_a_finished_folder_are_refused(trained, texts, capsys):
    assert main(["train", str(trained), *options(texts, "--learning-rate", "0.1")]) == 1
    assert "optimizer.learning_rate is 0.003 there and 0.1 here" in capsys.readouterr().err


def test_a_run_can_be_repeated_from_its_config(trained, texts, tmp_path, capsys):
    again = ["train", str(tmp_path / "again"), "--config", str(trained)]
    assert main([*again, "--source", str(texts), "--vocab-size", "280"]) == 0
    rows = [
        [
            {k: v for k, v in json.loads(line).items() if "second" not in k}
            for line in path.read_text().splitlines()
        ]
        for path in (trained / "run" / "metrics.jsonl", tmp_path / "again" / "run" / "metrics.jsonl")
    ]
    assert rows[0] == rows[1]
    assert main([*again, "--source", str(texts), "--depth", "3"]) == 2
    assert "either of them" in capsys.readouterr().err


def test_a_config_with_an_unknown_key_gets_the_nearest(trained, texts, tmp_path, capsys):
    description = json.loads((trained / "run" / "config.json").read_text())
    description["train"]["bacth_size"] = description["train"].pop("batch_size")
    (tmp_path / "config.json").write_text(json.dumps(description))
    arguments = [
        "train",
        str(tmp_path / "run"),
        "--config",
        str(tmp_path / "config.json"),
        "--source",
        str(texts),
    ]
    assert main(arguments) == 2
    assert "did you mean 'batch_size'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"), [("micro_batch_size", "2"), ("precision", "float17"), ("optimizer", 3)]
)
def test_a_config_with_a_value_of_the_wrong_type_is_refused(trained, texts, tmp_path, capsys, key, value):
    description = json.loads((trained / "run" / "config.json").read_text())
    description["train"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(description))
    arguments = [
        "train",
        str(tmp_path / "run"),
        "--config",
        str(tmp_path / "config.json"),
        "--source",
        str(texts),
    ]
    assert main(arguments) == 2
    assert f"TrainConfig.{key}={value!r}" in capsys.readouterr().err


def test_a_config_of_something_else_is_refused(texts, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"format": 1, "train": {"type": "StandardResidual"}}')
    arguments = [
        "train",
        str(tmp_path / "run"),
        "--config",
        str(tmp_path / "config.json"),
        "--source",
        str(texts),
    ]
    assert main(arguments) == 2
    assert "without a TrainConfig" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        (["--residual", "standard"], {"type": "StandardResidual"}),
        (["--residual", "full"], {"type": "AttnRes", "sublayers_per_block": 1}),
        (["--residual", "block:3", "--optimizer", "muon", "--schedule", "wsd"], {"sublayers_per_block": 3}),
    ],
)
def test_every_residual_rule_can_be_named(texts, tmp_path, more, rule):
    assert main(["train", str(tmp_path / "run"), *options(texts, *more)]) == 0
    model = json.loads((tmp_path / "run" / "run" / "config.json").read_text())["train"]["model"]
    assert model["residual"] | rule == model["residual"]


def test_a_trace_is_written_with_its_pictures(trained, tmp_path, capsys):
    assert (
        main(["trace", str(trained / "run"), "ducks swam", "--token", "-1", "--out", str(tmp_path / "out")])
        == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("token ")
    trace = Trace.load(tmp_path / "out")
    assert trace.token_texts[0][0] == "<|endoftext|>"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "trace.json", "trace.safetensors", "weights.csv",
        "mixing.png", "routing.png", "tokens.png", "mixing.svg", "routing.svg", "tokens.svg",
    }  # fmt: skip
    with (tmp_path / "out" / "weights.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(site.source_names) for site in trace) * trace.tokens.shape[1]
    for row in rows:
        site, token = trace[row["read"]], int(row["token"])
        place = site.source_names.index(row["source"])
        numbers = (site.token_weights, site.norm_shares, site.projections)
        assert row["spelled"] == trace.token_texts[0][token]
        assert [float(row[name]) for name in ("weight", "norm_share", "projection_share")] == [
            number[place, 0, token].item() for number in numbers
        ]


def test_an_existing_folder_for_a_trace_is_refused_before_the_work(trained, tmp_path, capsys):
    assert main(["trace", str(trained), "ducks", "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "which exists" in captured.err
    assert not captured.out


def test_the_mark_before_the_text_is_token_0_and_not_in_the_mean(trained, capsys):
    assert main(["trace", str(trained), "ducks swam", "--token", "0"]) == 0
    assert "token 0 is '<|endoftext|>'" in capsys.readouterr().out
    assert main(["trace", str(trained), "a"]) == 0
    assert "mean of 1 tokens" in capsys.readouterr().out
    assert main(["trace", str(trained), ""]) == 2


def test_a_run_resumes_without_its_text(texts, tmp_path, capsys):
    moved = tmp_path / "texts"
    moved.mkdir()
    for path in texts.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    command = ["train", str(tmp_path / "run"), *options(moved)]
    assert main(command) == 0
    for path in moved.iterdir():
        path.unlink()
    moved.rmdir()
    assert main(command) == 0
    assert "is finished" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "run"), *options(texts)]) == 2
    assert "with which it began" in capsys.readouterr().err


def test_a_run_inside_of_its_own_text_is_refused(texts, capsys):
    assert main(["train", str(texts / "run"), *options(texts)]) == 2
    assert "inside of its own text" in capsys.readouterr().err
    assert not (texts / "run").exists()


def test_a_lone_file_is_cut_at_empty_lines_or_where_told(tmp_path, capsys):
    (tmp_path / "one.txt").write_text("\n\n".join(f"Once {number} ducks swam away." for number in range(99)))
    small = [
        "--depth",
        "2",
        "--vocab-size",
        "280",
        "--sequence-length",
        "16",
        "--batch-size",
        "2",
        "--num-steps",
        "2",
    ]
    source = ["--source", str(tmp_path / "one.txt"), "--valid-fraction", "0.2"]
    assert main(["train", str(tmp_path / "a"), *source, *small]) == 0
    assert main(["train", str(tmp_path / "b"), *source, *small, "--separator", "ducks"]) == 0
    counts = [
        sum(
            split["documents"]
            for split in json.loads((tmp_path / name / "corpus" / "manifest.json").read_text())[
                "splits"
            ].values()
        )
        for name in ("a", "b")
    ]
    assert counts == [99, 100]


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"attnres {__version__}\n"


def test_the_backends_are_listed_with_what_is_missing(capsys):
    assert main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[::2]] == ["cpu", "fla", "eager", "reference"]


def test_a_text_is_continued_as_it_comes(trained, capsys):
    options = ["--max-new-tokens", "5", "--sampling.temperature", "0"]
    texts = []
    for schedule in ("one-phase", "two-phase"):
        assert main(["generate", str(trained), "Once upon", "--schedule", schedule, *options]) == 0
        out, err = capsys.readouterr()
        assert out.startswith("Once upon")
        assert "tokens, ended by" in err
        texts.append(out)
    assert texts[0] == texts[1]


def test_a_stop_string_that_never_comes_is_told(trained, capsys):
    assert main(["generate", str(trained), "Once", "--max-new-tokens", "2", "--stop", "@@@@"]) == 0
    assert "no stop string has come" in capsys.readouterr().err


def test_a_run_goes_into_an_engine_as_the_document_says(trained, capsys):
    document = (Path(__file__).parent.parent / "docs" / "inference.md").read_text()
    (code,) = re.findall(r"```py\n(.*?)```", document, re.DOTALL)
    assert code.count("runs/block") == 2
    exec(compile(code.replace("runs/block", str(trained)), "inference.md", "exec"), {})
    assert capsys.readouterr().out


def interrupted_after(pieces):
    def stream(self, prompt, **options):
        yield from pieces
        raise KeyboardInterrupt

    return stream


def test_ctrl_c_leaves_what_was_generated_and_what_was_held_back(trained, monkeypatch, capsys):
    tokenizer = Tokenizer.load(trained / "run" / "tokenizer.json")
    ids = tokenizer.encode(" a time @@").tolist()
    texts = [" a time", *[""] * (len(ids) - 1)]  # the rest may have begun a stop string
    pieces = [Piece(0, token, 0.0, text, None) for token, text in zip(ids, texts, strict=True)]
    monkeypatch.setattr(Engine, "stream", interrupted_after(pieces))
    assert main(["generate", str(trained), "Once upon"]) == 130
    out, err = capsys.readouterr()
    assert out == "Once upon a time @@\n"
    assert f"{len(ids)} tokens, ended by interrupted; the first after" in err


def test_ctrl_c_before_the_first_token_and_after_the_last(trained, monkeypatch, capsys):
    monkeypatch.setattr(Engine, "stream", interrupted_after([]))
    assert main(["generate", str(trained), "Once upon"]) == 130
    assert capsys.readouterr() == ("Once upon\n", "0 tokens, ended by interrupted\n")
    # Token 5 is a letter; here it ended a stop string, which is not shown.
    monkeypatch.setattr(Engine, "stream", interrupted_after([Piece(0, 5, 0.0, "", "stop string")]))
    assert main(["generate", str(trained), "Once upon"]) == 0
    assert capsys.readouterr().out == "Once upon\n"


def test_each_stop_string_has_its_option_and_no_place_takes_the_prompt(trained, monkeypatch, capsys):
    given = []

    def stream(self, prompt, *, stop, **options):
        given.append((prompt, list(stop)))
        return iter(())

    monkeypatch.setattr(Engine, "stream", stream)
    main(["generate", "--stop", "\\n", str(trained), "abc"])
    main(["generate", str(trained), "abc", "--stop", "\\n\\t", "--stop", "END"])
    assert given == [("abc", ["\n"]), ("abc", ["\n\t", "END"])]


def test_a_terminal_that_lacks_a_letter_shows_a_question_mark(trained):
    command = [sys.executable, "-m", "attention_residuals.cli", "generate", str(trained), "Once é"]
    done = subprocess.run(
        [*command, "--max-new-tokens", "2"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"Once ?")


def test_an_empty_text_is_continued_as_a_new_one(trained, capsys):
    assert main(["generate", str(trained), "", "--max-new-tokens", "3"]) == 0
    assert "tokens, ended by" in capsys.readouterr().err


def test_a_prompt_that_cannot_be_continued_is_told_and_not_repeated(trained, capsys):
    assert main(["generate", str(trained), "Once " * 2000]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "the model's context" in err


def test_a_negative_temperature_is_wrong_usage(trained, capsys):
    assert main(["generate", str(trained), "Once", "--sampling.temperature", "-1"]) == 2
    assert capsys.readouterr().err.startswith(
        "attnres: got: temperature=-1.0\nexpected: a number, 0 or more\n"
    )


def test_a_run_without_its_tokenizer_cannot_generate(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "run" / "tokenizer.json").unlink()
    assert main(["generate", str(tmp_path / "run"), "Once"]) == 1
    assert "do: copy tokenizer.json from where the model was trained" in capsys.readouterr().err


def test_a_pipe_that_closes_early_is_no_failure():
    command = f"{sys.executable} -m attention_residuals.cli rules | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "standard\n", "")


def test_a_device_that_is_not_there_is_refused(trained, monkeypatch, capsys):
    monkeypatch.setattr(names.torch.cuda, "is_available", lambda: False)
    assert main(["eval", str(trained), "--device", "cuda"]) == 2
    assert "a device that is here" in capsys.readouterr().err
    assert main(["eval", str(trained), "--device", "cpu"]) == 0


@pytest.mark.parametrize("what", ["a folder", "not UTF-8"])
def test_a_text_that_is_none_is_told(trained, tmp_path, capsys, what):
    (tmp_path / "file").write_bytes(b"\xff\xfe\x00")
    path = tmp_path if what == "a folder" else tmp_path / "file"
    assert main(["eval", str(trained), "--text", str(path)]) == 1
    assert "expected: a UTF-8 text file" in capsys.readouterr().err


def test_the_text_of_a_file_can_be_evaluated(trained, tmp_path, capsys):
    (tmp_path / "tale.txt").write_text("Once upon a time")
    assert main(["eval", str(trained), "--text", str(tmp_path / "tale.txt")]) == 0
    assert "16 bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "{new}", "--residual", "fulll"], 2, "did you mean 'full'"),
        (["train", "{new}", "--residual", "block:0"], 2, "sublayers_per_block=0"),
        (["train", "{new}", "--source", "shakespear"], 2, "did you mean 'shakespeare'"),
        (["train", "{new}", "--depth", "1"], 2, "depth=1"),
        (["demo", "--folder", "{new}", "--depth", "4"], 2, "depth=4"),
        (["eval", "{new}"], 1, "config.json"),
        (["trace", "{new}", "text"], 1, "config.json"),
    ],
)
def test_what_cannot_be_done_is_told_with_an_exit_code(tmp_path, capsys, arguments, code, message):
    new = tmp_path / "new"
    assert main([argument.format(new=new) for argument in arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("attnres: got: ")
    assert "\nexpected: " in error
    assert "\ndo: " in error
    assert message in error
    assert not (new / "corpus").exists()


def test_a_missing_text_is_told(trained, tmp_path, capsys):
    assert main(["eval", str(trained), "--text", str(tmp_path / "none.txt")]) == 1
    assert "none.txt" in capsys.readouterr().err


def test_a_token_that_the_text_does_not_have_is_refused(trained, capsys):
    assert main(["trace", str(trained), "a", "--token", "5"]) == 2
    assert "token 5 of 2 tokens" in capsys.readouterr().err


def test_an_unknown_option_is_a_usage_error_with_the_nearest_name(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "x", "--reisdual", "full"])
    assert caught.value.code == 2
    assert "--residual" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["train"], ["eval"], ["trace"], ["demo"]])
def test_help_explains_with_examples(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert not command or f"attnres {command[0]}" in text.split("For example:")[1]


def test_ctrl_c_saves_and_the_same_command_goes_on(texts, tmp_path):
    command = [sys.executable, "-m", "attention_residuals.cli", "train", str(tmp_path / "run")]
    command += options(texts)[:-1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "100000"], env=environment, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in error
    assert list((tmp_path / "run" / "run" / "checkpoints").glob("step-*"))


def test_a_source_on_the_hub_is_named_by_its_prefix():
    assert source_of("hub:owner/name") == HuggingFaceDataset(path="owner/name")


@pytest.mark.parametrize("command", ["train", "demo"])
def test_a_training_that_a_signal_stopped_ends_with_the_code_of_an_interruption(
    monkeypatch, texts, tmp_path, command
):
    stopped = Result(folder=tmp_path, step=1, interrupted=True, loss=None, bits_per_byte=None)
    monkeypatch.setattr(training, "train", lambda *_, **__: stopped)
    monkeypatch.setattr(training, "run_demo", lambda *_, **__: None)
    arguments = {"train": ["train", str(tmp_path / "run"), *options(texts)], "demo": ["demo"]}
    assert main(arguments[command]) == 130


def test_a_second_ctrl_c_ends_the_command_at_once(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "run_demo", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err.startswith("attnres: interrupted")


def test_a_warning_is_one_line(texts, tmp_path):
    (tmp_path / "texts").mkdir()
    for path in texts.iterdir():
        (tmp_path / "texts" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "texts" / "picture.png").write_bytes(b"\x89PNG\xff")
    command = [sys.executable, "-m", "attention_residuals.cli", "train", str(tmp_path / "run")]
    command += options(tmp_path / "texts")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "attnres: skipped 1 file(s) that are not UTF-8 text: picture.png\n" in done.stderr
