"""Kimi Linear trains: documents apart, experts balanced, resumed with the same bits, each parameter by its kind."""

import pytest
import torch
from models.hf.kimi_linear_models import smallest
from run_checks import Killed, stop_after
from tiny_run import SAVING, train_config

from attention_residuals.cli.main import main
from attention_residuals.cli.train_options import TrainOptions
from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import AttnRes
from attention_residuals.models import ConvertedConfig, build, presets
from attention_residuals.train import AdamW, Muon, load_checkpoint_model, load_run, train
from attention_residuals.train.muon import StackedMuon
from attention_residuals.train.optimizer import Optimizer


def small():
    return smallest(2, AttnRes(sublayers_per_block=2), 300)


def run(corpus, folder, monitor=None, **changes):
    config = train_config(model=small(), **changes)
    return train(config, corpus, folder, saving=SAVING, monitor=monitor, progress=False)


@pytest.mark.parametrize(
    "optimizer", [Muon(learning_rate=3e-3), AdamW(learning_rate=3e-3)], ids=["Muon", "AdamW"]
)
def test_a_stopped_run_goes_on_to_the_same_bits_and_experts_are_balanced(corpus, tmp_path, optimizer):
    run(corpus, tmp_path / "whole", optimizer=optimizer)
    with pytest.raises(Killed):
        run(corpus, tmp_path / "run", stop_after(3), optimizer=optimizer)
    run(corpus, tmp_path / "run", optimizer=optimizer)
    whole, other = (load_checkpoint_model(tmp_path / name).state_dict() for name in ("whole", "run"))
    assert all(torch.equal(whole[name], other[name]) for name in whole)
    biases = [tensor for name, tensor in whole.items() if name.endswith("e_score_correction_bias")]
    assert [tuple(bias.shape) for bias in biases] == [(4,)]
    assert 1e-3 <= biases[0].abs().max() <= 6.1e-3
    losses = [row["loss"] for row in load_run(tmp_path / "whole").metrics if "loss" in row]
    assert losses[-1] < losses[0]


def test_bfloat16_trains_close_to_float32(corpus, tmp_path):
    for precision in ("float32", "bfloat16"):
        run(corpus, tmp_path / precision, precision=precision)
    losses = [
        [row["loss"] for row in load_run(tmp_path / name).metrics if "loss" in row]
        for name in ("float32", "bfloat16")
    ]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


def test_muon_steps_matrices_and_experts_and_adamw_steps_queries_gains_and_tables():
    model = build(small())
    optimizer = Optimizer(model.named_parameters(), Muon())
    model(torch.randint(300, (2, 9))).square().mean().backward()
    optimizer.step(0.01)
    names = optimizer.tensors()
    by_muon = {name.partition("/")[2] for name in names if name.startswith("momentum_buffer/")}
    by_adamw = {name.partition("/")[2] for name in names if name.startswith("exp_avg/")}
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert by_muon | by_adamw == trainable
    assert not by_muon & by_adamw
    assert {name.split(".")[-1] for name in by_muon} == {"weight", "gate_up_proj", "down_proj"}
    ends = {
        "pseudo_query",
        "key_gain",
        "A_log",
        "dt_bias",
        "norm.weight",
        "layernorm.weight",
        "conv1d.weight",
    }
    ends |= {"embed_tokens.weight", "lm_head.weight"}
    assert all(name.endswith(tuple(ends)) for name in by_adamw)
    assert not any(name.endswith(tuple(ends)) for name in by_muon)


@pytest.mark.parametrize(("shape", "rows"), [((3, 8, 5), 2), ((3, 5, 8), 1)])
def test_gate_and_up_are_two_matrices_where_one_lies_above_the_other(shape, rows):
    experts = torch.nn.Module()
    experts.gate_up_proj = torch.nn.Parameter(torch.randn(shape))
    experts.down_proj = torch.nn.Parameter(torch.randn((3, 5, 4) if rows == 2 else (3, 4, 5)))
    whole = torch.nn.ModuleDict({"experts": experts, "norm": torch.nn.LayerNorm(2)})
    optimizer = Optimizer(whole.named_parameters(), Muon())
    (stacked,) = (part for part in optimizer.parts if isinstance(part, StackedMuon))
    found = {tuple(group["params"][0].shape): group["rows"] for group in stacked.param_groups}
    assert found == {shape: rows, tuple(experts.down_proj.shape): 1}


@pytest.mark.parametrize(("shape", "rows"), [((3, 6, 4), 1), ((3, 4, 6), 1), ((3, 8, 5), 2)])
def test_a_stack_is_stepped_as_its_matrices_are_by_muon_of_pytorch(shape, rows):
    torch.manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(shape))
    matrices = [torch.nn.Parameter(part.clone()) for one in stack.detach() for part in one.chunk(rows)]
    ours = StackedMuon([{"params": [stack], "rows": rows}], lr=0.1, weight_decay=0.2, momentum=0.9)
    theirs = torch.optim.Muon(
        matrices, lr=0.1, weight_decay=0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        stack.grad = torch.randn(shape)
        stack.grad[1] = 0  # an expert that no token has chosen
        for matrix, gradient in zip(
            matrices, [part for one in stack.grad for part in one.chunk(rows)], strict=True
        ):
            matrix.grad = gradient.clone()
        ours.step()
        theirs.step()
    expected = torch.stack([matrix.detach() for matrix in matrices]).view(shape)
    # Newton-Schulz runs in bfloat16, whose rounding depends on the shape of a product.
    assert torch.allclose(stack.detach(), expected, atol=0.1 * 3 * 0.2 * 6**0.5 * 0.01)
    assert torch.equal(stack[1], expected[1])


def test_decays_are_not_decayed():
    model = build(small())
    optimizer = Optimizer(model.named_parameters(), AdamW(weight_decay=0.5))
    for parameter in optimizer.parameters:
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.5)
    still = {name.split(".")[-1] for name, p in optimizer.named.items() if torch.equal(p, torch.ones_like(p))}
    assert {"A_log", "dt_bias", "pseudo_query", "key_gain"} <= still
    assert not {"gate_up_proj", "down_proj"} & still


def test_the_command_trains_the_preset_with_the_rule_that_is_asked():
    config = TrainOptions(model="kimi-linear-tiny", residual="full").model_config(300)
    assert isinstance(config, ConvertedConfig)
    assert (config.residual, config.vocab_size, config.num_layers) == (AttnRes(sublayers_per_block=1), 300, 8)
    assert config.eps == presets.kimi_linear("kimi-linear-tiny", residual=AttnRes()).eps
    usual = TrainOptions(model="kimi-linear-tiny").model_config(300)
    assert usual == presets.kimi_linear("kimi-linear-tiny", vocab_size=300)
    with pytest.raises(ConfigError, match="kimi-linear-tiny"):
        TrainOptions(model="kimi-tiny").model_config(300)


def test_a_preset_has_its_own_depth(capsys, tmp_path):
    assert main(["train", str(tmp_path / "run"), "--model", "kimi-linear-tiny", "--depth", "4"]) != 0
    assert "--depth together with --model" in capsys.readouterr().err
