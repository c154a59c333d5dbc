"""Each rule on sources against its formula, written out on plain tensors."""

from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from layers.test_residual_rules import NUM_LAYERS, RULE_CONFIGS, WIDTH, Looker, embedding, rule_of, run
from torch import nn
from torch.nn import functional as F

from attention_residuals.errors import ConfigError
from attention_residuals.layers import OUTPUT, RMSNorm, Site
from attention_residuals.layers.residual import (
    AttnRes,
    Cumulative,
    Delta,
    DenseFormer,
    Highway,
    Inkling2,
    InputQuery,
    MultiHead,
    RawKeys,
    Sigmoid,
    SlidingWindow,
    StaticMixing,
    ValueQuery,
    checked_inputs,
)
from attention_residuals.layers.residual.sources import reader_name
from attention_residuals.models import Decoder, presets

FORMULAS = (AttnRes, Cumulative, Delta, Inkling2, InputQuery, MultiHead, RawKeys, Sigmoid, SlidingWindow,
            StaticMixing, ValueQuery)  # fmt: skip
"""The rules whose formula ``expected_state`` knows."""
on_sources = [config for config in RULE_CONFIGS.values() if type(config) in FORMULAS]


def keys(sources, eps=1e-6):
    return [source * (source.square().mean(-1, keepdim=True) + eps).rsqrt() for source in sources]


def mixed(weights, values):
    return sum(weight[..., None] * value for weight, value in zip(weights, values, strict=True))


def expected_state(rule, read):
    """The state of one read, from the formula of the rule and the sources that it saw."""
    reader, config = rule.readers[reader_name(read.site, read.part)], rule.config
    sources = read.sources

    def scores(direction, normed=None):
        return torch.stack([(key * direction).sum(-1) for key in normed or keys(sources)])

    if isinstance(config, StaticMixing):
        weights = reader.scalars.softmax(0) if config.normalised else reader.scalars
        return sum(weight * source for weight, source in zip(weights, sources, strict=True))
    if isinstance(config, Sigmoid):
        weights = scores(reader.pseudo_query * reader.key_gain).sigmoid()
        return mixed(weights / weights.sum(0) if config.normalised else weights, sources)
    if isinstance(config, RawKeys):
        return mixed(scores(reader.pseudo_query, sources).softmax(0), sources)
    if isinstance(config, InputQuery):
        query = keys(sources)[-1] @ reader.query.T
        return mixed(scores(query * reader.key_gain).softmax(0), sources)
    if isinstance(config, Inkling2):
        values = sources if len(sources) == 1 else keys(sources)
        return mixed((scores(reader.pseudo_query, values) / WIDTH**0.5).softmax(0), values)
    if isinstance(config, Cumulative):
        if read.site == OUTPUT:
            return sources[-1]
        logits = scores(reader.pseudo_query * reader.key_gain)
        logits[-1] += reader.recency_bias
        return mixed(logits.softmax(0), sources)
    if isinstance(config, MultiHead):
        parts = []
        for channels in torch.arange(WIDTH).chunk(config.num_heads):
            own = [source[..., channels] for source in sources]
            normed = keys(own) if config.key_norm == "head" else [key[..., channels] for key in keys(sources)]
            direction = (reader.pseudo_query * reader.key_gain)[channels]
            parts.append(mixed(scores(direction, normed).softmax(0), own))
        return torch.cat(parts, dim=-1)
    state = mixed(scores(reader.pseudo_query * reader.key_gain).softmax(0), sources)
    return state + sum(sources) if isinstance(config, Delta) else state


@pytest.mark.parametrize("config", on_sources, ids=repr)
def test_every_read_follows_the_formula(config):
    rule, looker, norm = rule_of(config), Looker(), RMSNorm(WIDTH).double()
    inputs = run(rule, embedding(), tap=looker, norm=norm)
    for read, used in zip(looker.reads, inputs, strict=True):
        assert_close(used, norm(expected_state(rule, read)))


@pytest.mark.parametrize("config", on_sources, ids=repr)
def test_sources_are_the_blocks_of_the_paper_or_sums_from_the_start(config):
    rule, looker = rule_of(config), Looker()
    run(rule, embedding(), tap=looker)
    outputs = [write.output for write in looker.writes]
    for read in looker.reads:
        written, size = rule.num_written(read.site), config.sublayers_per_block
        if isinstance(config, Cumulative):
            ends = [0, *range(size, written + 1, size), written]
            expected = [sum(outputs[: end + 1]) for end in ends]
            expected = expected[-1:] if read.site == OUTPUT else expected
        else:
            starts = range(1, written + 1, size)
            expected = [outputs[0], *(sum(outputs[n : min(n + size, written + 1)]) for n in starts)]
            if isinstance(config, SlidingWindow):
                expected = expected[:1] + expected[1:][-config.window :]
        assert_close(torch.stack(read.sources), torch.stack(expected))


@pytest.mark.parametrize(
    ("config", "per_site"),
    [
        (RawKeys(), lambda site, n: WIDTH),
        (SlidingWindow(), lambda site, n: 2 * WIDTH),
        (StaticMixing(), lambda site, n: n),
        (Sigmoid(), lambda site, n: 2 * WIDTH),
        (InputQuery(), lambda site, n: WIDTH**2 + WIDTH),
        (MultiHead(num_heads=5), lambda site, n: 2 * WIDTH),
        (ValueQuery(), lambda site, n: (4 if site.kind == "attention" else 2) * WIDTH),
        (Delta(), lambda site, n: 2 * WIDTH),
        (Inkling2(), lambda site, n: (3 if site.kind == "attention" else 1) * WIDTH),
        (Cumulative(), lambda site, n: 0 if site == OUTPUT else 2 * WIDTH + 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_parameters_are_as_many_as_the_docstring_says(config, per_site):
    rule = config.build(num_layers=NUM_LAYERS, width=WIDTH)
    counts = [per_site(site, rule.num_sources(site)) for site in rule.sites()]
    assert sum(parameter.numel() for parameter in rule.parameters()) == sum(counts)


@pytest.mark.parametrize("config", RULE_CONFIGS.values(), ids=RULE_CONFIGS.keys())
def test_every_parameter_but_the_first_sites_learns(config):
    shape = presets.scaled(NUM_LAYERS, vocab_size=40, residual=config)
    model = Decoder(replace(shape, width=WIDTH * 3)).double()
    for parameter in model.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    tokens = torch.randint(40, (2, 7))
    model(tokens).square().mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 1e-15, name


@pytest.mark.parametrize("config", RULE_CONFIGS.values(), ids=RULE_CONFIGS.keys())
def test_checkpointed_activations_give_the_same_gradients(config):
    shape = replace(presets.scaled(NUM_LAYERS, vocab_size=40, residual=config), width=WIDTH * 3)
    plain, saving = Decoder(shape).double(), Decoder(shape, checkpoint_activations=True).double()
    for parameter in plain.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    saving.load_state_dict(plain.state_dict())
    tokens = torch.randint(40, (2, 7))
    for model in (plain, saving):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    for one, other in zip(plain.parameters(), saving.parameters(), strict=True):
        if one.grad is not None:
            assert_close(other.grad, one.grad)


def unchecked(config_type, **options):
    """Checks options that the shape checker of the tests would refuse first."""
    config = config_type()
    for name, value in options.items():
        object.__setattr__(config, name, value)
    config.__post_init__()


def built(config):
    return config.build(num_layers=NUM_LAYERS, width=WIDTH)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: unchecked(AttnRes, key_eps=float("inf")), "key_eps=inf"),
        (lambda: unchecked(AttnRes, key_eps="a"), "key_eps='a'"),
        (lambda: unchecked(Cumulative, recency_bias=float("nan")), "recency_bias=nan"),
        (lambda: unchecked(Cumulative, recency_bias="x"), "recency_bias='x'"),
        (lambda: unchecked(Highway, carry_bias="x"), "carry_bias='x'"),
        (lambda: unchecked(Sigmoid, normalised="no"), "normalised='no'"),
        (lambda: unchecked(StaticMixing, normalised=3), "normalised=3"),
        (lambda: built(DenseFormer(dilation=4)), "dilation=4 for 3 layers"),
        (lambda: built(DenseFormer(period=4)), "period=4 for 3 layers"),
        (lambda: SlidingWindow(window=0), "window=0"),
        (lambda: MultiHead(num_heads=0), "num_heads=0"),
        (lambda: built(MultiHead(num_heads=3)), r"num_heads=3 for a width of 10.*\[1, 2, 5, 10\]"),
        (lambda: built(AttnRes(sublayers_per_block=7)), "sublayers_per_block=7 for 3 layers.*use 6"),
        (lambda: built(Cumulative(sublayers_per_block=7)), "sublayers_per_block=7 for 3 layers"),
    ],
)  # fmt: skip
def test_impossible_options_are_refused_with_what_would_work(make, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        make()


def test_a_key_norm_that_a_file_may_name_but_nothing_supports_is_refused():
    config = MultiHead()
    object.__setattr__(config, "key_norm", "batch")  # the shape checker of the tests would come first
    with pytest.raises(ConfigError, match="key_norm='batch'"):
        config.__post_init__()


class OneInput(nn.Module):
    """An attention of somebody else, which takes one input."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, hidden, context=None):
        return hidden


@pytest.mark.parametrize("config", [ValueQuery(), Inkling2()], ids=repr)
def test_a_rule_with_several_inputs_refuses_an_attention_that_takes_one(config):
    model = Decoder(presets.scaled(2, vocab_size=40, residual=config))
    model.layers[1].attention = OneInput(model.layers[1].attention.norm)
    with pytest.raises(ConfigError, match=r"(?s)3 inputs for OneInput at L1\.attention.*AttnRes"):
        model(torch.tensor([[1, 2]]))


def test_a_rule_with_one_input_takes_any_attention():
    model = Decoder(presets.scaled(2, vocab_size=40))
    model.layers[1].attention = OneInput(model.layers[1].attention.norm)
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, 40)
    inputs = (torch.zeros(1), torch.zeros(1), torch.zeros(1))
    assert checked_inputs(inputs, lambda q, k, v: q, Site(0, "attention")) is inputs
    with pytest.raises(ConfigError, match=r"which takes \(hidden, mask, cache\)"):
        checked_inputs(inputs, lambda hidden, mask=None, cache=None: hidden, Site(0, "attention"))


def test_normalised_sigmoids_of_scores_far_below_zero_are_finite():
    rule = built(Sigmoid(normalised=True))
    weights = rule.weights_of(torch.tensor([[[-110.0]], [[-120.0]]]))
    assert_close(weights.flatten(), torch.tensor([-110.0, -120.0]).softmax(0))


def test_inkling2_normalises_each_finished_block_once():
    rule, norm = rule_of(Inkling2(sublayers_per_block=2)), RMSNorm(WIDTH).double()
    state = rule.open(embedding())
    for site in rule.sites()[:4]:
        _, state = rule.read(state, site, norm)
        state = rule.write(state, site, embedding().flip(0))
    assert len(state.normalised) == len(state.blocks) == 3
    assert_close(torch.stack(state.normalised), torch.stack(keys(state.blocks)))


def test_a_static_rule_looks_at_no_token():
    looker = Looker()
    run(rule_of(StaticMixing()), embedding(), tap=looker)
    assert all((read.weights == read.weights[:, :1, :1]).all() for read in looker.reads)


def test_an_input_query_gives_two_tokens_with_the_same_other_sources_other_weights():
    rule, norm = rule_of(InputQuery()), RMSNorm(WIDTH).double()
    state = rule.open(embedding()[:, :1].expand(-1, 4, -1).contiguous())
    _, state = rule.read(state, Site(0, "attention"), norm)
    state = rule.write(state, Site(0, "attention"), embedding())
    looker = Looker()
    rule.read(state, Site(0, "mlp"), norm, looker)
    assert looker.reads[0].weights[0, 0].unique().numel() == 4


def test_every_rule_has_a_formula_of_its_own():
    formulas = {type(config): type(config).formula for config in RULE_CONFIGS.values()}
    assert all(formula.startswith(("h", "X")) for formula in formulas.values())
    assert len(set(formulas.values())) == len(formulas)
