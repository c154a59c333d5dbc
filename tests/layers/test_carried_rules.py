"""The rules that carry mixed states along, each against its formula, written out on plain numbers."""

import math
from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from layers.test_residual_rules import NUM_LAYERS, WIDTH, Looker, Scaler, embedding, rule_of, run
from torch.nn import functional as F

from attention_residuals.errors import ConfigError, ShapeError, TapError
from attention_residuals.layers import OUTPUT, RMSNorm, Site
from attention_residuals.layers.residual import (
    DenseFormer,
    Highway,
    HyperConnections,
    ManifoldHyperConnections,
    StandardResidual,
)
from attention_residuals.layers.tap import Chain
from attention_residuals.models import Decoder, presets
from attention_residuals.ops import weighted_sum

DENSE = [DenseFormer(), DenseFormer(dilation=2), DenseFormer(period=2), DenseFormer(dilation=2, period=3)]
STREAMS = [
    HyperConnections(),
    HyperConnections(streams=1),
    HyperConnections(streams=2),
    ManifoldHyperConnections(),
    ManifoldHyperConnections(streams=1),
    ManifoldHyperConnections(streams=3, sinkhorn_steps=2),
]
HIGHWAY = [Highway(), Highway(carry_bias=-1.5)]
CARRIED = [*DENSE, *STREAMS, *HIGHWAY]
every_rule = pytest.mark.parametrize("config", CARRIED, ids=repr)
TOKENS = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(0))


def looked_at(rule, tap=None):
    """The reads of a pass with random maps as sublayers, and every writer's output."""
    looker = Looker()
    run(rule, embedding(), tap=looker if tap is None else Chain(tap, looker))
    return looker.reads, [write.output for write in looker.writes]


def mix_of(read):
    return weighted_sum(read.weights, read.values)


def of_tokens(function, *tensors):
    """Applies a function of one token's vectors, as lists, to each token of tensors [B, T, ...]."""
    flat = [tensor.flatten(0, 1).tolist() for tensor in tensors]
    result = torch.tensor([function(*vectors) for vectors in zip(*flat, strict=True)], dtype=torch.float64)
    return result.unflatten(0, tensors[0].shape[:2])


# The formulas, on lists of Python's numbers.


def sigmoid(number):
    return 1 / (1 + math.exp(-number))


def dot(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))


def normed(vector):
    return [number / math.sqrt(dot(vector, vector) / len(vector) + 1e-6) for number in vector]


def combined(weights, vectors):
    return [dot(weights, numbers) for numbers in zip(*vectors, strict=True)]


@pytest.mark.parametrize("config", DENSE, ids=repr)
def test_denseformer_averages_what_layers_return(config):
    rule = rule_of(config)
    reads, outputs = looked_at(rule)
    scalars = {name: numbers.tolist() for name, numbers in rule.scalars.items()}

    def states(first, *written):
        layers, stream, result = [first], first, []  # layers: X_0, X_1, ...
        for number, output in enumerate([*written, None]):
            layer = number // 2
            if number % 2 == 0 and layer > 0 and layer % config.period == 0:
                own = scalars["output" if output is None else f"L{layer}_attention"]
                taken = [j for j in range(layer + 1) if (layer - j) % config.dilation == 0]
                stream = combined(own, [layers[j] for j in taken])
            result.append(stream)
            if output is not None:
                stream = combined([1.0, 1.0], [stream, output])
                layers += [stream] if number % 2 else []
        return result

    expected = of_tokens(states, *outputs)
    for number, read in enumerate(reads):
        assert_close(mix_of(read), expected[:, :, number])


@pytest.mark.parametrize("config", HIGHWAY, ids=repr)
def test_highway_gates_take_a_share_of_each_output(config):
    rule = rule_of(config)
    reads, outputs = looked_at(rule)
    learned = [(gate.direction.tolist(), gate.bias.item()) for gate in rule.gates.values()]

    def states(first, *written):
        result = [first]
        for number, output in enumerate(written):
            direction, bias = learned[number]
            start = -math.log(number + 1) if config.carry_bias is None else config.carry_bias
            share = sigmoid(dot(direction, normed(result[-1])) + bias + start)
            result.append(combined([1 - share, share], [result[-1], output]))
        return result

    expected = of_tokens(states, *outputs)
    for number, read in enumerate(reads):
        assert_close(mix_of(read), expected[:, :, number])


def test_the_shares_of_highway_sum_to_one_and_start_as_a_mean():
    for rule in (rule_of(Highway()), rule_of(Highway(carry_bias=3.0))):
        for read in looked_at(rule)[0]:
            assert_close(read.membership.sum(1), torch.ones_like(read.membership[:, 0]))
    fresh = Highway().build(num_layers=NUM_LAYERS, width=WIDTH).double()
    for read in looked_at(fresh)[0]:
        assert_close(read.membership, torch.full_like(read.membership, 1 / len(read.writers)))


def test_a_carry_bias_is_the_start_of_every_gate():
    fresh = Highway(carry_bias=-1.5).build(num_layers=NUM_LAYERS, width=WIDTH).double()
    share = looked_at(fresh)[0][-1].membership[0]
    assert_close(share[-1], torch.full_like(share[-1], sigmoid(-1.5)))
    assert_close(share[-2], share[-1] * (1 - sigmoid(-1.5)))


# What every one of them must do.


def decoder(config, eps_of=lambda rule, site: 1e-6, **options):
    shape = replace(presets.scaled(NUM_LAYERS, vocab_size=40, residual=config), width=3 * WIDTH)
    torch.manual_seed(0)
    model = Decoder(shape, **options).double()
    for site in model.residual.sites():
        norm = model.norm if site == OUTPUT else getattr(model.layers[site.layer], site.kind).norm
        norm.eps = eps_of(model.residual, site)
    return model


def perturbed(model):
    generator = torch.Generator().manual_seed(1)
    for parameter in model.residual.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
    return model


def logits_and_gradients(model):
    logits = model(TOKENS)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    return logits, {name: parameter.grad for name, parameter in model.named_parameters()}


def eps_of_the_standard_model(rule, site):
    """A state that is c times the standard model's needs c^2 times the eps."""
    n = rule.config.streams if hasattr(rule.config, "streams") else 1
    if isinstance(rule.config, Highway):
        factor = 1 / (1 + rule.num_written(site))
    elif site == OUTPUT:
        factor = n
    else:
        factor = 0.75 if isinstance(rule.config, ManifoldHyperConnections) and n == 1 else 1
    return 1e-5 * factor**2


@pytest.mark.parametrize("config", [c for c in CARRIED if c != Highway(carry_bias=-1.5)], ids=repr)
def test_a_fresh_model_has_the_logits_and_gradients_of_the_standard_model(config):
    expected, gradients = logits_and_gradients(decoder(StandardResidual(), lambda rule, site: 1e-5))
    logits, own = logits_and_gradients(decoder(config, eps_of_the_standard_model))
    # The biases of mHC are stored in float32 before the model is cast.
    tolerance = 1e-7 if isinstance(config, ManifoldHyperConnections) else 1e-9
    assert_close(logits, expected, tolerance=tolerance)
    for name, gradient in gradients.items():
        assert_close(own[name], gradient, tolerance=tolerance)


@pytest.mark.parametrize("config", DENSE, ids=repr)
def test_a_fresh_denseformer_is_the_standard_model_bit_for_bit(config):
    expected, gradients = logits_and_gradients(decoder(StandardResidual()))
    logits, own = logits_and_gradients(decoder(config))
    assert torch.equal(logits, expected)
    assert all(torch.equal(own[name], gradient) for name, gradient in gradients.items())


def test_a_highway_of_one_bias_is_another_model():
    assert not torch.allclose(decoder(Highway(carry_bias=-1.5))(TOKENS), decoder(StandardResidual())(TOKENS))


@every_rule
def test_every_parameter_learns(config):
    _, gradients = logits_and_gradients(perturbed(decoder(config)))
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-12, name


@every_rule
def test_gradients_are_those_of_finite_differences(config):
    model = perturbed(decoder(config))
    _, gradients = logits_and_gradients(model)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.residual.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        losses = []
        for step in (1e-5, -2e-5):
            parameter.data += step * direction
            with torch.no_grad():
                losses.append(F.cross_entropy(model(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()))
        parameter.data += 1e-5 * direction
        slope = (losses[0] - losses[1]).item() / 2e-5
        assert slope == pytest.approx(
            (gradients[f"residual.{name}"] * direction).sum().item(), rel=1e-4, abs=1e-9
        )


@every_rule
def test_checkpointed_activations_give_the_same_gradients(config):
    logits, plain = logits_and_gradients(perturbed(decoder(config)))
    again, saving = logits_and_gradients(perturbed(decoder(config, checkpoint_activations=True)))
    assert_close(again, logits)
    for name, gradient in plain.items():
        assert_close(saving[name], gradient)


@every_rule
@pytest.mark.parametrize(
    "tap",
    [
        Looker(),
        Scaler(writer="L0.mlp"),
        *(Scaler(site=site) for site in ("L1.attention", "L1.mlp", "output")),
    ],
    ids=["looking", "a changed write", "a changed average", "a changed read", "a changed output"],
)
def test_membership_is_exact_whatever_a_tap_does(config, tap):
    reads, outputs = looked_at(rule_of(config), tap)
    for read in reads:
        held = torch.einsum("swbt,wbtd->sbtd", read.membership, torch.stack(outputs[: len(read.writers)]))
        assert_close(torch.stack(read.values), held)
        assert not read.membership.requires_grad


@every_rule
def test_a_state_holds_no_membership_without_a_tap(config):
    rule, norm = rule_of(config), RMSNorm(WIDTH).double()
    for tap, expected in ((None, False), (Looker(), True)):
        state = rule.open(embedding(), tap)
        for site in rule.sites()[:-1]:
            _, state = rule.read(state, site, norm, tap)
            assert bool(state.membership) == expected
            state = rule.write(state, site, embedding(), tap)
            assert bool(state.membership) == expected


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (DenseFormer(), 2 + 3 + 4),
        (DenseFormer(dilation=2), 1 + 2 + 2),
        (DenseFormer(period=2), 3),
        (DenseFormer(dilation=2, period=3), 2),
        (HyperConnections(), 6 * (6 * WIDTH + 24 + 2)),
        (HyperConnections(streams=1), 6 * (3 * WIDTH + 3 + 2)),
        (ManifoldHyperConnections(), 6 * (4 * WIDTH * 24 + 24 + 3)),
        (Highway(), 6 * (WIDTH + 1)),
    ],
    ids=repr,
)
def test_parameters_are_as_many_as_the_docstring_says(config, count):
    rule = config.build(num_layers=NUM_LAYERS, width=WIDTH)
    assert sum(parameter.numel() for parameter in rule.parameters()) == count
    assert all(parameter.requires_grad for parameter in rule.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DenseFormer(dilation=0), "dilation=0"),
        (lambda: DenseFormer(period=True), "period=True"),
        (lambda: DenseFormer(period=4).build(num_layers=3, width=8), "period=4 for 3 layers.*period=1"),
        (lambda: HyperConnections(streams=0), "streams=0"),
        (lambda: ManifoldHyperConnections(streams=0), "streams=0"),
        (lambda: ManifoldHyperConnections(sinkhorn_steps=0), "sinkhorn_steps=0"),
        (lambda: Highway(carry_bias=math.nan), "carry_bias=nan"),
        (lambda: Highway(carry_bias=-math.inf), "carry_bias=-inf"),
    ],
)  # fmt: skip
def test_impossible_options_are_refused_with_what_would_work(make, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        make()


@pytest.mark.parametrize("config", [DenseFormer(), Highway(), HyperConnections()], ids=repr)
def test_an_output_of_another_shape_is_refused(config):
    rule = rule_of(config)
    _, state = rule.read(rule.open(embedding()), Site(0, "attention"), RMSNorm(WIDTH).double())
    with pytest.raises(ShapeError, match=r"\[2, 4, 9\] from L0.attention"):
        rule.write(state, Site(0, "attention"), embedding()[..., :-1])


@pytest.mark.parametrize("config", [*STREAMS, *HIGHWAY, DenseFormer()], ids=repr)
def test_autocast_changes_no_gate_and_no_dtype_of_the_state(config):
    rule, norm, start = rule_of(config, torch.float32), RMSNorm(WIDTH), embedding(torch.float32)

    def state_after():
        state = rule.open(start)
        for site in rule.sites()[:3]:
            inputs, state = rule.read(state, site, norm)
            assert inputs[0].dtype == torch.float32
            state = rule.write(state, site, start.flip(0).bfloat16())
        return state[0]

    expected = state_after()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(state_after(), expected)


@every_rule
def test_a_bfloat16_model_stays_near_its_float32_form(config):
    model = perturbed(decoder(config)).bfloat16()
    again = decoder(config).float()
    again.load_state_dict(model.state_dict())
    logits = model(TOKENS)
    assert logits.dtype == torch.bfloat16
    assert_close(logits.float(), again(TOKENS), tolerance=0.05)
    logits.float().square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# DenseFormer alone.


def test_denseformer_names_what_it_reads():
    rule = DenseFormer(dilation=2).build(num_layers=4, width=WIDTH)
    assert rule.source_names(Site(0, "attention")) == ("embedding",)
    assert rule.source_names(Site(0, "mlp")) == rule.source_names(Site(2, "mlp")) == ("stream",)
    assert rule.source_names(Site(1, "attention")) == ("L0",)
    assert rule.source_names(Site(2, "attention")) == ("embedding", "L1")
    assert rule.source_names(OUTPUT) == ("embedding", "L1", "L3")
    sparse = DenseFormer(period=2).build(num_layers=3, width=WIDTH)
    assert [sparse.num_sources(site) for site in sparse.sites()] == [1, 1, 1, 1, 3, 1, 1]
    assert sparse.source_names(Site(1, "attention")) == sparse.source_names(OUTPUT) == ("stream",)


class Doubler(Looker):
    """Doubles the weights of one site's read."""

    def __init__(self, site):
        super().__init__()
        self.site = site

    def read(self, read):
        doubled = read._replace(weights=2 * read.weights) if str(read.site) == self.site else read
        return super().read(doubled)


@pytest.mark.parametrize(
    ("site", "goes_on"), [("L1.attention", True), ("L1.mlp", False), ("L0.attention", False)]
)
def test_a_changed_average_goes_on_and_another_changed_read_does_not(site, goes_on):
    # A sublayer sees its doubled input normalised, the same up to the norm's eps; the stream is not.
    rule = rule_of(DenseFormer())
    number = [str(own) for own in rule.sites()].index(site) + 1
    plain, changed = (mix_of(looked_at(rule, tap)[0][number]) for tap in (None, Doubler(site)))
    assert ((changed - plain).norm() / plain.norm() > 0.1) == goes_on


def test_a_tap_that_replaces_an_averages_values_must_say_what_they_hold():
    class Two(Looker):
        def read(self, read):
            if str(read.site) != "L1.attention":
                return super().read(read)
            twice = read._replace(
                values=read.values * 2,
                sources=read.sources * 2,
                source_names=(*read.source_names, *(f"{name} again" for name in read.source_names)),
                weights=read.weights.repeat(2, 1, 1),
            )
            return super().read(twice._replace(membership=self.held(read)))

    tap = Two()
    tap.held = lambda read: read.membership
    with pytest.raises(TapError, match=r"4 values, 4 names, 4 sources and membership of 2 at L1\.attention"):
        looked_at(rule_of(DenseFormer()), tap)
    tap.held = lambda read: read.membership[..., 0, 0].repeat(2, 1)  # the same for every token
    reads, outputs = looked_at(rule_of(DenseFormer()), tap)
    last = reads[-1]
    assert_close(
        torch.stack(last.values), torch.einsum("swbt,wbtd->sbtd", last.membership, torch.stack(outputs))
    )


def test_a_layer_that_is_left_out_is_refused():
    rule = rule_of(DenseFormer())
    with pytest.raises(ShapeError, match=r"after 0 layers at L1\.attention"):
        rule.read(rule.open(embedding()), Site(1, "attention"), RMSNorm(WIDTH))
