"""A run on many GPUs, planned on paper."""

import re

import pytest
from models.hf.small_models import PRE_NORM, made

from attention_residuals.cli import main, planning
from attention_residuals.cli.planning import PlanOptions, size_of
from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.models import Decoder, build, presets
from attention_residuals.models.hf.conversion import convert
from attention_residuals.models.hf.converted_model import ConvertedModel
from attention_residuals.models.weights import save_model
from attention_residuals.parallel.estimate import BYTES_PER_PARAMETER, estimate, operations

SMALL = ["--gpus", "4", "--pp", "2", "--vp", "2", "--microbatches", "4", "--tokens", "64"]


@pytest.fixture
def saved(tmp_path):
    residual = AttnRes(sublayers_per_block=2)
    save_model(Decoder(presets.scaled(4, vocab_size=40, residual=residual)), tmp_path / "model")
    return tmp_path / "model"


def rows(text):
    return {line.split()[0]: line.split() for line in text.splitlines() if line.split()}


def test_a_saved_model_is_planned_from_its_folder_and_from_its_config(saved, capsys):
    assert main(["plan", "--model", str(saved), *SMALL]) == 0
    text = capsys.readouterr().out
    found = rows(text)
    assert found["naive"][1:4] == ["9", "3", "6"]
    assert found["paper's"][2:5] == ["6", "1", "5"]
    assert found["ours"][1:4] == ["4", "1", "3"]
    assert found["Interleaved1F1B"][1:] == ["11.1%", "chosen"]
    assert found["1F1B"][1] == "-"
    assert main(["plan", "--model", str(saved / "config.json"), *SMALL]) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[1:] == text.splitlines()[1:]


def test_a_preset_is_planned_on_256_gpus(capsys):
    words = "--model paper-436m --gpus 256 --pp 8 --vp 2 --microbatches 16 --sharded"
    assert main(["plan", *words.split()]) == 0
    text = capsys.readouterr().out
    assert "256 GPUs: 32 x 8 ranks x 2 stages, Interleaved1F1B" in text
    assert "spread over 32 ranks" in text
    assert len([line for line in text.splitlines() if re.match(r" \d  +1\+1 ", line)]) == 8
    assert max(map(len, text[: text.index("training:")].splitlines()[3:])) <= 80


def test_what_attnres_train_refuses_is_marked_in_a_plan(capsys):
    words = "plan --model paper-194m --gpus 8 --pp 2 --vp 2 --microbatches 4"
    assert main([*words.split(), "--sharded"]) == 0
    text = capsys.readouterr().out
    assert rows(text)["Interleaved1F1B"][2:] == ["chosen"]
    assert rows(text)["ZBVZeroBubble"][2:] == ["refused", "by", "attnres", "train"]
    assert "attnres train refuses ZBVZeroBubble together with shard or replicate" in text
    assert main(words.replace("--gpus 8", "--gpus 2").split()) == 0  # one pipeline alone
    assert "refuse" not in capsys.readouterr().out
    assert (
        main(["plan", "--model", "kimi-linear-tiny", "--gpus", "4", "--pp", "2", "--microbatches", "4"]) == 0
    )
    text = capsys.readouterr().out
    assert rows(text)["1F1B"][2:] == ["chosen,", "refused", "by", "attnres", "train"]
    assert "attnres train refuses replicate, shard or tensor for a model of Transformers" in text


def test_kimi_linear_is_planned_with_every_parameter_counted(capsys):
    words = "--model kimi-linear-48b --gpus 64 --pp 8 --vp 3 --microbatches 16"
    assert main(["plan", *words.split()]) == 0
    text = capsys.readouterr().out
    assert "27 layers of width 2304, AttnRes(sublayers_per_block=6" in text
    counted = re.findall(r"^ \d +[\d+]+ +([\d,]+\.\d) M", text, re.MULTILINE)
    assert len(counted) == 8
    assert sum(float(number.replace(",", "")) for number in counted) == pytest.approx(49_123, abs=1)
    assert "KDA: 9 C + 2 K, and in float32 27 C" in text
    found = rows(text)
    assert int(found["naive"][1]) > int(found["paper's"][2]) > int(found["ours"][1])
    assert max(map(len, text[: text.index("training:")].splitlines()[3:])) <= 80


def test_a_saved_kimi_linear_is_planned_and_another_converted_model_refused(tmp_path, capsys):
    config = presets.kimi_linear("kimi-linear-tiny", vocab_size=40)
    save_model(build(config), tmp_path / "kimi")
    assert main(["plan", "--model", str(tmp_path / "kimi"), *SMALL]) == 0
    assert "8 layers of width 128" in capsys.readouterr().out
    save_model(ConvertedModel(convert(made(PRE_NORM["llama"]), AttnRes())), tmp_path / "llama")
    assert main(["plan", "--model", str(tmp_path / "llama"), *SMALL]) == 2
    assert "activations of a model of type 'llama'" in capsys.readouterr().err


def test_memory_of_parameters_is_that_of_the_model():
    config = presets.scaled(4, vocab_size=40)
    arguments = {"num_ranks": 2, "stages_per_rank": 2, "num_microbatches": 4, "num_tokens": 64}
    for schedule in ("Interleaved1F1B", "ZBVZeroBubble"):
        found = estimate(config, schedule=schedule, **arguments)
        whole = sum(p.numel() for p in Decoder(config).parameters())
        twice = 40 * config.width if schedule == "Interleaved1F1B" else 0  # tied, and on two ranks
        assert sum(rank.num_parameters for rank in found.ranks) == whole + twice
        assert sum(rank.parameters for rank in found.ranks) == BYTES_PER_PARAMETER * (whole + twice)
    sharded = estimate(config, schedule="ZBVZeroBubble", num_shards=8, **arguments)
    assert [rank.parameters for rank in sharded.ranks] == [-(-r.parameters // 8) for r in found.ranks]


def test_checkpointing_and_few_microbatches_in_flight_need_less_memory():
    arguments = {"num_ranks": 4, "stages_per_rank": 1, "num_microbatches": 8, "num_tokens": 64}
    config = presets.scaled(8, vocab_size=40)
    gpipe, one = (estimate(config, schedule=name, **arguments) for name in ("GPipe", "1F1B"))
    less = estimate(config, schedule="1F1B", checkpoint_activations=True, **arguments)
    for all_at_once, few, fewest in zip(gpipe.ranks, one.ranks, less.ranks, strict=True):
        assert all_at_once.activations == 8 * few.activations // (4 - few.rank)
        assert fewest.activations < few.activations
        assert few.total == few.parameters + few.activations + few.buffers
        assert few.held == 0
    assert gpipe.bubble == one.bubble == pytest.approx(3 / 11)


def test_the_standard_residual_adds_nothing():
    config = presets.scaled(4, vocab_size=40, residual=StandardResidual())
    assert operations(config)[1:] == (0, 3.0)
    full, block = (
        operations(presets.scaled(4, vocab_size=40, residual=AttnRes(sublayers_per_block=size)))
        for size in (1, 4)
    )
    assert full.reads > block.reads > 0
    assert full.reads == 6 * 64 * (sum(range(1, 10)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": 5}, "use 4 or 6 GPUs"),
        ({"pp": 0}, "--pp 0"),
        ({"tokens": 0}, "--tokens 0"),
        ({"model": "paper-43m"}, "did you mean 'paper-436m'"),
        ({"model": "nowhere/at/all"}, "a preset, or the folder"),
    ],
)
def test_options_that_make_no_plan_are_refused(change, message):
    good = {"model": "paper-436m", "gpus": 4, "pp": 2}
    with pytest.raises(ConfigError, match=message):
        PlanOptions(**{**good, **change}).config()


def test_the_command_tells_what_a_schedule_or_a_model_does_not_admit(saved, capsys):
    assert main(["plan", "--model", str(saved), *SMALL, "--schedule", "1F1B"]) == 2
    assert "2 stages on each rank for 1F1B" in capsys.readouterr().err
    assert main(["plan", "--model", str(saved), "--gpus", "8", "--pp", "8"]) == 2
    assert "4 layers for 8 stages" in capsys.readouterr().err


def test_another_rule_may_be_planned_for_the_same_model():
    options = PlanOptions(model="paper-194m", gpus=2, pp=2, residual="standard", vocab_size=100)
    assert options.config().residual == StandardResidual()
    assert options.config().vocab_size == 100
    assert planning.plan_command(options) == 0


def test_sizes_are_written_for_people():
    assert [size_of(number) for number in (0, 1023, 1024, 1536 * 2**20, 2**50)] == [
        "0 B",
        "1,023 B",
        "1.0 KiB",
        "1.5 GiB",
        "1,048,576.0 GiB",
    ]
