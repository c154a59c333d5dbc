"""Freedom: far where sources are alike, near where one decides, and never past the bound."""

import pytest
import torch
from torch.nn import functional as F

from attention_residuals.errors import ConfigError, EditError, ShapeError
from attention_residuals.layers.residual import AttnRes, HyperConnections, MultiHead, ValueQuery
from attention_residuals.models import Decoder, presets
from attention_residuals.trace import record
from attention_residuals.trace.exclusivity import freedom

TOKENS = torch.randint(40, (2, 6), generator=torch.Generator().manual_seed(0))


def model_of(residual=None, writes=10.0):
    torch.manual_seed(1)
    model = Decoder(presets.scaled(3, vocab_size=40, residual=residual or AttnRes()))
    for parameter in model.residual.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    for name, parameter in model.named_parameters():
        if name.endswith(("output.weight", "down.weight")):
            parameter.data *= writes
    return model


class Putting:
    """A tap that puts weights at one read, and copies of the first value for all where asked to."""

    def __init__(self, site, part="in", weights=None):
        self.place, self.weights = (site, part), weights

    def begin(self, run):
        pass

    def write(self, write):
        return write

    def read(self, read):
        if (str(read.site), read.part) != self.place:
            return read
        return read._replace(weights=self.weights)


class Copying(Decoder):
    """A model whose output read is offered one vector under many names."""

    def forward(self, tokens, *, tap=None, **options):
        return super().forward(tokens, tap=_Copies(tap), **options)


class _Copies:
    def __init__(self, tap):
        self.tap = tap

    def begin(self, run):
        pass

    def write(self, write):
        return write

    def read(self, read):
        if str(read.site) == "output":
            read = read._replace(values=(read.values[0],) * len(read.values))
        return read if self.tap is None else self.tap.read(read)


@torch.no_grad()
def cost_of(model, found, mask=None):
    clean = model(TOKENS, mask=mask).log_softmax(-1)
    tap = Putting(found.site, found.part, found.weights)
    edited = model(TOKENS, mask=mask, tap=tap).log_softmax(-1)
    values = F.kl_div(edited, clean, log_target=True, reduction="none").sum(-1)
    return values[mask].mean().item() if mask is not None else values.mean().item()


def test_equal_sources_leave_all_the_freedom_there_is():
    model = model_of()
    model.__class__ = Copying
    model.residual.readers["output"].pseudo_query.data.zero_()
    found = freedom(model, TOKENS, "output", divergence=1e-6)
    assert len(found.source_names) == 7
    assert found.farthest == pytest.approx(6 / 7)
    assert found.total_variation > 0.98 * found.farthest
    assert found.divergence < 1e-6
    assert found.uniform_total_variation == pytest.approx(0.0, abs=1e-6)


def test_a_source_that_decides_leaves_little():
    model = model_of()
    model.norm.gain.data *= 30  # so that predictions are sharp
    found = freedom(model, TOKENS, "output", divergence=1e-4)
    assert found.total_variation < 0.05 * found.farthest
    assert found.farthest > 0.9
    assert found.uniform_divergence > 0.1
    assert (
        freedom(model, TOKENS, "output", divergence=100.0).total_variation > 0.8
    )  # were it not for the bound


@pytest.mark.parametrize(
    ("residual", "site", "part"),
    [(AttnRes(sublayers_per_block=2), "L2.mlp", None), (ValueQuery(), "L2.attention", "v"),
     (MultiHead(num_heads=4), "L1.mlp", None)],
    ids=repr,
)  # fmt: skip
def test_the_bound_holds_in_a_run_of_its_own(residual, site, part):
    model = model_of(residual)
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    mask[1, 4:] = False
    for bound in (1e-4, 1e-2):
        found = freedom(model, TOKENS, site, part=part, divergence=bound, num_steps=20, mask=mask)
        assert found.divergence <= bound
        assert cost_of(model, found, mask) == pytest.approx(found.divergence, rel=1e-2, abs=1e-6)
        assert found.weights.shape == found.clean_weights.shape
        assert found.weights.min() >= 0
        assert torch.allclose(found.weights.sum(0), torch.ones(found.weights.shape[1:]), atol=1e-5)
        assert torch.equal(found.weights[:, ~mask], found.clean_weights[:, ~mask])
        distance = (found.weights - found.clean_weights).abs().sum(0)[mask].mean().item() / 2
        assert 0 < found.total_variation == pytest.approx(distance, rel=1e-5)
        assert found.total_variation <= found.farthest + 1e-6
        [own] = [
            read.weights
            for read in record(model, TOKENS, mask=mask).sites
            if (read.site, read.part) == (found.site, found.part)
        ]
        assert torch.equal(found.clean_weights, own)


def test_only_tokens_that_count_move_and_must_stay():
    model = model_of()
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    mask[1, 5:] = False
    counted = torch.zeros_like(mask)
    counted[:, 3] = counted[1, 5] = True  # the last one is padding
    found = freedom(model, TOKENS, "L2.mlp", divergence=1e-3, num_steps=20, mask=mask, counted=counted)
    only = counted & mask
    assert torch.equal(found.weights[:, ~only], found.clean_weights[:, ~only])
    assert not torch.equal(found.weights[:, only], found.clean_weights[:, only])
    with torch.no_grad():
        clean = model(TOKENS, mask=mask).log_softmax(-1)
        edited = model(TOKENS, mask=mask, tap=Putting("L2.mlp", "in", found.weights)).log_softmax(-1)
    cost = F.kl_div(edited, clean, log_target=True, reduction="none").sum(-1)[only].mean().item()
    assert found.divergence == pytest.approx(cost, rel=1e-2, abs=1e-6)
    assert 0 < found.divergence <= 1e-3
    distance = (found.weights - found.clean_weights).abs().sum(0)[only].mean().item() / 2
    assert found.total_variation == pytest.approx(distance, rel=1e-5)


def test_more_may_be_spent_on_more_movement():
    model = model_of()
    moved = [
        freedom(model, TOKENS, "output", divergence=bound, num_steps=30).total_variation
        for bound in (1e-4, 1e-2, 1.0)
    ]
    assert moved == sorted(moved)
    assert moved[2] > 2 * moved[0]


def test_what_uniform_weights_cost_is_told():
    model = model_of()
    found = freedom(model, TOKENS, "L2.mlp", num_steps=1)
    uniform = torch.full_like(found.weights, 1 / len(found.source_names))
    distance = (uniform - found.clean_weights).abs().sum(0).mean().item() / 2
    assert found.uniform_total_variation == pytest.approx(distance, rel=1e-5)
    expected = cost_of(model, type(found)(**{**vars(found), "weights": uniform}))
    assert found.uniform_divergence == pytest.approx(expected, rel=1e-2, abs=1e-6)


def test_a_seed_decides_the_search():
    model = model_of()
    first, again, other = (
        freedom(model, TOKENS, "L1.mlp", num_steps=5, seed=seed).weights for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_model_is_left_as_it_was():
    model = model_of()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    one = next(model.parameters())
    one.grad = torch.ones_like(one)
    logits = model(TOKENS)
    freedom(model, TOKENS, "output", num_steps=3)
    assert torch.equal(model(TOKENS), logits)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(one.grad, torch.ones_like(one))
    assert all(parameter.grad is None for parameter in model.parameters() if parameter is not one)
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable


def test_the_search_runs_where_gradients_are_off():
    with torch.no_grad():
        assert freedom(model_of(), TOKENS, "output", num_steps=5).total_variation > 0


def test_what_cannot_move_is_refused():
    model = model_of()
    with pytest.raises(ConfigError, match=r"did you mean 'L2\.mlp'"):
        freedom(model, TOKENS, "L2.mpl")
    with pytest.raises(ConfigError, match="reads 'embedding' alone"):
        freedom(model, TOKENS, "L0.attention")
    with pytest.raises(ConfigError, match=r"one of \['in'\]"):
        freedom(model, TOKENS, "L2.mlp", part="q")
    with pytest.raises(EditError, match="weights that sum to"):
        freedom(model_of(HyperConnections()), TOKENS, "L2.mlp")
    with pytest.raises(ShapeError, match="without a real token"):
        freedom(model, TOKENS, "output", mask=torch.zeros_like(TOKENS, dtype=torch.bool))
    with pytest.raises(ShapeError, match="real token that counts"):
        freedom(model, TOKENS, "output", counted=torch.zeros_like(TOKENS, dtype=torch.bool))
    for options in ({"divergence": 0.0}, {"learning_rate": -1.0}, {"num_steps": 0}):
        with pytest.raises(ConfigError, match="expected: "):
            freedom(model, TOKENS, "output", **options)
