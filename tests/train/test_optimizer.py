import pytest
import torch
from tiny_run import model_config

from attention_residuals.errors import CheckpointError
from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.models import Decoder
from attention_residuals.train import AdamW, Muon
from attention_residuals.train.optimizer import Optimizer, kind_of

CONFIGS = pytest.mark.parametrize("config", [AdamW(), Muon()], ids=["AdamW", "Muon"])


def trained(optimizer_config, residual=None, steps=3, tied=True):
    torch.manual_seed(0)
    model = Decoder(model_config(residual, tied=tied))
    optimizer = Optimizer(model.named_parameters(), optimizer_config)
    for _ in range(steps):
        model(torch.randint(300, (2, 9))).square().mean().backward()
        optimizer.step(0.01)
    return model, optimizer


def frozen(model):
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


@CONFIGS
def test_every_trainable_parameter_is_stepped_and_no_other(config):
    before, _ = trained(config, steps=0)
    after, _ = trained(config, steps=1)
    same = {
        name
        for (name, old), (_, new) in zip(before.named_parameters(), after.named_parameters(), strict=True)
        if torch.equal(old, new)
    }
    # Zero queries give the gains no gradient in the first step.
    gains = {name for name in same if name.endswith("key_gain")}
    assert same - gains == {name for name in frozen(after) if name.endswith("pseudo_query")}
    assert len(frozen(after)) == 2


@pytest.mark.parametrize("tied", [True, False])
def test_muon_steps_the_matrices_of_attention_and_mlp_and_nothing_else(tied):
    model, optimizer = trained(Muon(), tied=tied)
    by_muon = {name.partition("/")[2] for name in optimizer.tensors() if name.startswith("momentum_buffer/")}
    by_adamw = {name.partition("/")[2] for name in optimizer.tensors() if name.startswith("exp_avg/")}
    assert by_muon == {name for name, _ in model.named_parameters() if ".weight" in name and "layers" in name}
    assert by_adamw == {name for name, _ in model.named_parameters()} - by_muon - frozen(model)
    assert {"embedding.weight", "norm.gain"} <= by_adamw
    assert ("head.weight" in by_adamw) is not tied


@CONFIGS
def test_weight_decay_shrinks_matrices_and_tables_only(config):
    model, optimizer = trained(config, tied=False, steps=0)
    for parameter in optimizer.parameters:
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.5)
    for name, parameter in model.named_parameters():
        shrinks = name.endswith(".weight")
        expected = 1 - 0.5 * config.weight_decay if shrinks else 1.0
        if parameter.requires_grad:
            torch.testing.assert_close(parameter, torch.full_like(parameter, expected), msg=name)


def test_what_a_residual_rule_learns_is_a_vector_whatever_its_shape():
    assert kind_of("residual.readers.pseudo_queries", torch.zeros(5, 8)) == "vector"
    assert kind_of("layers.0.experts", torch.zeros(5, 8, 8)) == "stack"


@CONFIGS
def test_a_gradient_is_used_once(config):
    model, _ = trained(config, steps=1)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_adamw_gets_the_betas_and_eps_of_its_config():
    _, optimizer = trained(AdamW(beta1=0.5, beta2=0.7, eps=0.1, learning_rate=0.2, weight_decay=0.3), steps=0)
    (adamw,) = optimizer.parts
    assert adamw.defaults["betas"] == (0.5, 0.7)
    assert adamw.defaults["eps"] == 0.1
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.3, 0.3, 0.0]
    _, optimizer = trained(Muon(momentum=0.6), steps=0)
    assert optimizer.parts[0].defaults["momentum"] == 0.6


@CONFIGS
@pytest.mark.parametrize(
    "residual", [StandardResidual(), AttnRes(sublayers_per_block=1)], ids=["sum", "full"]
)
def test_a_restored_optimizer_goes_on_with_the_same_bits(config, residual):
    model, optimizer = trained(config, residual)
    twin = Decoder(model.config)
    twin.load_state_dict(model.state_dict())
    restored = Optimizer(twin.named_parameters(), config)
    restored.load({name: tensor.clone() for name, tensor in optimizer.tensors().items()}, "state")
    tokens = torch.randint(300, (2, 9))
    for each, steps in ((model, optimizer), (twin, restored)):
        each(tokens).square().mean().backward()
        steps.step(0.02)
    assert optimizer.tensors().keys() == restored.tensors().keys()
    assert all(torch.equal(restored.tensors()[name], value) for name, value in optimizer.tensors().items())
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_loaded_state_is_a_copy():
    _, optimizer = trained(AdamW())
    _, other = trained(AdamW(), steps=0)
    state = optimizer.tensors()
    other.load(state, "state")
    other.tensors()["exp_avg/norm.gain"].zero_()
    assert state["exp_avg/norm.gain"].any()


@pytest.mark.parametrize(
    "state",
    [
        {"exp_avg/nobody": torch.zeros(32)},
        {"exp_avg/norm.gain": torch.zeros(31)},
        {"exp_avg/residual.readers.L0_attention.pseudo_query": torch.zeros(32)},
    ],
    ids=["unknown", "shape", "frozen"],
)
def test_state_that_fits_no_parameter_is_refused(state):
    _, optimizer = trained(AdamW(), steps=0)
    with pytest.raises(CheckpointError, match=next(iter(state))):
        optimizer.load(state, "state")
