"""The common suite: what every residual rule must do. A new rule adds one line to ``RULE_CONFIGS``."""

from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from torch import Tensor, nn

from attention_residuals.errors import ConfigError, ShapeError, TapError
from attention_residuals.layers import EMBEDDING, OUTPUT, RMSNorm, Site
from attention_residuals.layers.norm import foldable
from attention_residuals.layers.residual import (
    RULES,
    AttnRes,
    Cumulative,
    Delta,
    DenseFormer,
    Highway,
    HyperConnections,
    Inkling2,
    InputQuery,
    ManifoldHyperConnections,
    MultiHead,
    RawKeys,
    Sigmoid,
    SlidingWindow,
    StandardResidual,
    StaticMixing,
    ValueQuery,
)
from attention_residuals.layers.tap import Chain
from attention_residuals.models import Decoder, presets
from attention_residuals.ops import weighted_sum

RULE_CONFIGS = {
    "standard": StandardResidual(),
    "full": AttnRes(sublayers_per_block=1),
    "block of 2": AttnRes(sublayers_per_block=2),
    "odd block": AttnRes(sublayers_per_block=3),
    "one block": AttnRes(sublayers_per_block=6),
    "input query": InputQuery(),
    "input query, blocks": InputQuery(sublayers_per_block=2),
    "static": StaticMixing(),
    "static, not normalised": StaticMixing(normalised=False, sublayers_per_block=2),
    "sigmoid": Sigmoid(),
    "sigmoid, normalised": Sigmoid(normalised=True, sublayers_per_block=3),
    "raw keys": RawKeys(),
    "window of 2": SlidingWindow(window=2),
    "window of 1, blocks": SlidingWindow(window=1, sublayers_per_block=2),
    "heads": MultiHead(num_heads=5),
    "heads with norms of their own": MultiHead(num_heads=2, key_norm="head", sublayers_per_block=2),
    "value query": ValueQuery(),
    "delta": Delta(),
    "delta, blocks": Delta(sublayers_per_block=2),
    "inkling2": Inkling2(),
    "inkling2, blocks": Inkling2(sublayers_per_block=4),
    "cumulative": Cumulative(),
    "cumulative, odd block": Cumulative(sublayers_per_block=3),
    "denseformer": DenseFormer(),
    "denseformer, thinned": DenseFormer(dilation=2, period=2),
    "hyper-connections": HyperConnections(),
    "hyper-connections of 2": HyperConnections(streams=2),
    "mHC": ManifoldHyperConnections(),
    "mHC of 3": ManifoldHyperConnections(streams=3),
    "highway": Highway(),
    "highway, biased": Highway(carry_bias=-1.0),
}
every_rule = pytest.mark.parametrize("config", RULE_CONFIGS.values(), ids=RULE_CONFIGS.keys())
NUM_LAYERS, WIDTH = 3, 10


class Looker:
    """Keeps every event, returns each as it came."""

    def __init__(self):
        self.reads, self.writes = [], []

    def begin(self, run):
        self.run = run

    def read(self, read):
        self.reads.append(read)
        return read

    def write(self, write):
        self.writes.append(write)
        return write


class Scaler(Looker):
    """Turns one writer's output around, or moves all weight of one site to its first source."""

    def __init__(self, writer=None, site=None):
        super().__init__()
        self.writer, self.site = writer, site

    def read(self, read):
        if str(read.site) != self.site:
            return super().read(read)
        weights = torch.zeros_like(read.weights)
        weights[0] = 3.0
        return super().read(read._replace(weights=weights))

    def write(self, write):
        return super().write(
            write._replace(output=write.output.flip(-1)) if write.writer == self.writer else write
        )


def rule_of(config, dtype=torch.float64):
    rule = config.build(num_layers=NUM_LAYERS, width=WIDTH).to(dtype)
    for parameter in rule.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    return rule


def run(rule, embedding, *, tap=None, norm=None) -> list[Tensor]:
    """The inputs of every read, under sublayers that are fixed random maps."""
    norm = norm or RMSNorm(WIDTH).to(embedding.dtype)
    generator = torch.Generator().manual_seed(5)
    state, seen = rule.open(embedding, tap), []
    for site in rule.sites():
        inputs, state = rule.read(state, site, norm, tap)
        parts = rule.parts(site)
        assert len(inputs) == (3 if len(parts) > 1 else 1)
        seen += [inputs["qkv".index(part) if part in "qkv" else 0] for part in parts]
        if site != OUTPUT:
            matrix = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64).to(embedding.dtype)
            state = rule.write(state, site, torch.tanh(sum(inputs) @ matrix), tap)
    return seen


def reads_of(rule) -> list[Site]:
    """The site of every read, in order."""
    return [site for site in rule.sites() for _ in rule.parts(site)]


def embedding(dtype=torch.float64):
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def test_every_registered_rule_is_in_this_suite():
    assert set(RULES.values()) <= {type(config) for config in RULE_CONFIGS.values()}


@every_rule
def test_looking_changes_no_bit(config):
    rule = rule_of(config, torch.float32)
    plain, tapped = (run(rule, embedding(torch.float32), tap=tap) for tap in (None, Looker()))
    assert all(torch.equal(one, other) for one, other in zip(plain, tapped, strict=True))


@every_rule
def test_each_site_is_offered_once_in_order_and_each_writer_too(config):
    rule, looker = rule_of(config), Looker()
    run(rule, embedding(), tap=looker)
    assert [read.site for read in looker.reads] == reads_of(rule)
    assert [read.part for read in looker.reads] == [
        part for site in rule.sites() for part in rule.parts(site)
    ]
    assert [write.writer for write in looker.writes] == [EMBEDDING, *map(str, rule.sites()[:-1])]


@every_rule
def test_the_input_is_the_normalised_sum_of_weights_times_values(config):
    rule, looker, norm = rule_of(config), Looker(), RMSNorm(WIDTH).double()
    inputs = run(rule, embedding(), tap=looker, norm=norm)
    for read, used in zip(looker.reads, inputs, strict=True):
        mix = weighted_sum(read.weights, read.values)
        assert_close(used, norm(mix))


@every_rule
def test_every_value_is_the_sum_of_its_members_outputs(config):
    rule, looker = rule_of(config), Looker()
    run(rule, embedding(), tap=looker)
    for read in looker.reads:
        outputs = torch.stack([write.output for write in looker.writes[: len(read.writers)]])
        assert [write.writer for write in looker.writes[: len(read.writers)]] == list(read.writers)
        pattern = "sw,wbtd->sbtd" if read.membership.ndim == 2 else "swbt,wbtd->sbtd"
        assert_close(torch.stack(read.values), torch.einsum(pattern, read.membership.double(), outputs))


@every_rule
def test_names_and_counts_of_sources_fit_the_read(config):
    rule, looker = rule_of(config), Looker()
    run(rule, embedding(), tap=looker)
    for read in looker.reads:
        count = rule.num_sources(read.site)
        assert len(read.source_names) == len(set(read.source_names)) == len(read.sources) == count
        assert read.weights.shape[:3] == (count, 2, 4)
        assert read.membership.shape[:2] == (count, len(read.writers))
        assert read.logits is None or torch.equal(read.weights, rule.weights_of(read.logits))


@every_rule
def test_increments_overlap_nowhere_and_cumulative_sources_do(config):
    rule, looker = rule_of(config), Looker()
    run(rule, embedding(), tap=looker)
    counts = [(read.membership != 0).sum(0).max() for read in looker.reads]
    if rule.semantics.sources == "increments":
        assert max(counts) == 1
    elif max(rule.num_sources(site) for site in rule.sites()) > 1:
        assert max(counts) > 1


@every_rule
@pytest.mark.parametrize(
    "foreign", [nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-6), nn.Identity()], ids=repr
)
def test_any_norm_reads_the_same_mix(config, foreign):
    rule, looker = rule_of(config), Looker()
    inputs = run(rule, embedding(), tap=looker, norm=foreign.double())
    for read, used in zip(looker.reads, inputs, strict=True):
        mix = weighted_sum(read.weights, read.values)
        assert_close(used, foreign(mix))


@every_rule
def test_a_foreign_norm_gives_the_gradients_of_a_folded_one(config):
    class Foreign(RMSNorm):
        """Not folded, since it is another type."""

    gradients = []
    for norm in (RMSNorm(WIDTH).double(), Foreign(WIDTH).double()):
        torch.manual_seed(2)
        rule, start = rule_of(config), embedding().requires_grad_()
        run(rule, start, norm=norm)[-1].square().mul(torch.arange(WIDTH)).sum().backward()
        gradients.append(
            [start.grad, norm.gain.grad, *(p.grad for p in rule.parameters() if p.requires_grad)]
        )
    for folded, foreign in zip(*gradients, strict=True):
        assert_close(foreign, folded)


@every_rule
def test_a_norm_with_a_hook_is_left_to_itself(config):
    rule, norm, calls = rule_of(config), RMSNorm(WIDTH).double(), []
    expected = run(rule, embedding(), norm=norm)
    norm.register_forward_hook(lambda module, args, output: calls.append(args) and None)
    with torch.no_grad():
        actual = run(rule, embedding(), norm=norm)
    assert len(calls) == len(reads_of(rule))
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other.detach())


@every_rule
def test_a_changed_write_reaches_every_later_site_and_no_earlier_one(config):
    rule = rule_of(config)
    plain, changed = (run(rule, embedding(), tap=tap) for tap in (None, Scaler(writer="L1.attention")))
    for site, one, other in zip(reads_of(rule), plain, changed, strict=True):
        assert torch.equal(one, other) == (site in rule.sites()[:3])


@every_rule
def test_a_changed_read_is_mixed_from_its_weights_and_values(config):
    rule, tap, norm = rule_of(config), Scaler(site="L1.mlp"), RMSNorm(WIDTH, eps=0.5).double()
    looker = Looker()
    inputs = run(rule, embedding(), tap=Chain(looker, tap), norm=norm)
    number = reads_of(rule).index(Site(1, "mlp"))
    assert_close(inputs[number], norm(3.0 * looker.reads[number].values[0]))


@every_rule
def test_a_later_tap_of_a_chain_sees_what_the_earlier_one_changed(config):
    rule, before, after = rule_of(config), Looker(), Looker()
    run(rule, embedding(), tap=Chain(before, Scaler(site="L1.mlp"), after))
    number = reads_of(rule).index(Site(1, "mlp"))
    assert after.reads[number].weights[0].eq(3.0).all()
    assert not before.reads[number].weights[0].eq(3.0).any()


@every_rule
def test_a_tap_that_returns_nonsense_is_refused(config):
    class Nothing(Looker):
        def read(self, read):
            return None

    class Short(Looker):
        def read(self, read):
            return read._replace(values=(*read.values, read.values[0]))

    class Narrow(Looker):
        def write(self, write):
            return write._replace(output=write.output[..., :-1])

    rule = rule_of(config)
    for tap, message in ((Nothing(), "NoneType"), (Short(), "values"), (Narrow(), "an output torch.float64")):
        with pytest.raises(TapError, match=message):
            run(rule, embedding(), tap=tap)


@every_rule
def test_an_edit_that_would_change_nothing_is_refused(config):
    class InPlace(Looker):
        def read(self, read):
            read.weights[0] = 0.0
            return read

    class Sources(Looker):
        def read(self, read):
            return read._replace(sources=tuple(2 * source for source in read.sources))

    class Bare(Looker):
        def write(self, write):
            return write.output

    class Half(Looker):
        def write(self, write):
            return write._replace(output=write.output.half())

    rule = rule_of(config)
    cases = ((InPlace(), "in place"), (Sources(), "weights and values that were offered"), (Bare(), "Tensor from"),
             (Half(), "torch.float16"))  # fmt: skip
    for tap, message in cases:
        with pytest.raises(TapError, match=message):
            run(rule, embedding(), tap=tap)


@every_rule
def test_an_output_that_would_be_broadcast_is_refused(config):
    rule = rule_of(config)
    _, state = rule.read(rule.open(embedding()), Site(0, "attention"), RMSNorm(WIDTH).double())
    with pytest.raises(ShapeError, match=r"\[1, 4, 10\] from L0.attention"):
        rule.write(state, Site(0, "attention"), embedding()[:1])


def test_a_site_that_reads_out_of_order_is_refused():
    rule = rule_of(AttnRes(sublayers_per_block=2))
    with pytest.raises(ShapeError, match=r"1 sources at L1\.mlp"):
        rule.read(rule.open(embedding()), Site(1, "mlp"), RMSNorm(WIDTH))


@every_rule
def test_states_are_tensors_and_tuples_and_never_change_in_place(config):
    rule, norm = rule_of(config), RMSNorm(WIDTH).double()

    def tensors(part):
        if isinstance(part, Tensor):
            return [part]
        assert isinstance(part, tuple)
        return [tensor for inner in part for tensor in tensors(inner)]

    state = rule.open(embedding())
    for site in rule.sites()[:-1]:
        copies = [tensor.clone() for tensor in tensors(state)]
        _, after = rule.read(state, site, norm)
        copies_after = [tensor.clone() for tensor in tensors(after)]
        following = rule.write(after, site, embedding())
        assert all(torch.equal(one, other) for one, other in zip(tensors(state), copies, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(tensors(after), copies_after, strict=True))
        state = following


@every_rule
def test_sources_keep_the_embeddings_dtype_under_other_outputs(config):
    rule = rule_of(config, torch.float32)
    _, state = rule.read(rule.open(embedding(torch.float32)), Site(0, "attention"), RMSNorm(WIDTH))
    state = rule.write(state, Site(0, "attention"), embedding(torch.float32).bfloat16())
    inputs, _ = rule.read(state, Site(0, "mlp"), RMSNorm(WIDTH))
    assert inputs[0].dtype == torch.float32


def test_sources_can_be_kept_in_bfloat16():
    rule = rule_of(AttnRes(sublayers_per_block=2, source_dtype="bfloat16"), torch.float32)
    state = rule.write(rule.open(embedding(torch.float32)), Site(0, "attention"), embedding(torch.float32))
    assert {source.dtype for source in state.blocks + state.open_block} == {torch.bfloat16}


def test_standard_has_no_parameters_and_attention_residuals_two_vectors_a_site():
    standard = StandardResidual().build(num_layers=3, width=WIDTH)
    full = AttnRes(sublayers_per_block=1).build(num_layers=3, width=WIDTH)
    assert list(standard.parameters()) == []
    assert sum(p.numel() for p in full.parameters()) == 2 * WIDTH * 7
    assert all(parameter.ndim == 1 for parameter in full.parameters())


def test_pseudo_queries_start_at_zero_and_only_the_first_site_does_not_learn():
    rule = AttnRes(sublayers_per_block=2).build(num_layers=3, width=WIDTH)
    assert all(
        (reader.pseudo_query == 0).all() and (reader.key_gain == 1).all() for reader in rule.readers.values()
    )
    frozen = {name.split(".")[1] for name, p in rule.named_parameters() if not p.requires_grad}
    assert frozen == {"L0_attention"}


@pytest.mark.parametrize(("size", "names"), [
    (1, ("embedding", "L0.attention", "L0.mlp", "L1.attention")),
    (2, ("embedding", "B1", "B2.open@L1.attention")),
    (3, ("embedding", "B1")),
    (4, ("embedding", "B1.open@L1.attention")),
])  # fmt: skip
def test_sources_are_named_by_identity(size, names):
    rule = AttnRes(sublayers_per_block=size).build(num_layers=3, width=WIDTH)
    assert rule.source_names(Site(1, "mlp")) == names


def test_the_output_reads_everything_and_an_uneven_last_block_is_open():
    rule = AttnRes(sublayers_per_block=4).build(num_layers=3, width=WIDTH)
    assert rule.source_names(OUTPUT) == ("embedding", "B1", "B2.open@L2.mlp")
    assert rule.membership(OUTPUT).tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sublayers_per_block": 0}, "sublayers_per_block=0"),
        ({"sublayers_per_block": True}, "sublayers_per_block=True"),
        ({"sublayers_per_block": 2, "key_eps": -1.0}, "key_eps=-1.0"),
        ({"sublayers_per_block": 2, "key_eps": float("nan")}, "key_eps=nan"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        AttnRes(**options)


def test_a_source_dtype_that_a_file_may_name_but_nothing_supports_is_refused():
    config = AttnRes(sublayers_per_block=2)
    object.__setattr__(config, "source_dtype", "float16")  # the shape checker of the tests would come first
    with pytest.raises(ConfigError, match="source_dtype='float16'"):
        config.__post_init__()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_a_norm_of_pytorch_reads_as_it_would_by_itself(dtype, eps):
    rule = AttnRes(sublayers_per_block=2).build(num_layers=NUM_LAYERS, width=WIDTH).to(dtype)
    norm, source = nn.RMSNorm(WIDTH, eps=eps).to(dtype), (embedding() / 20).to(dtype)
    read, _ = rule.read(rule.open(source), Site(0, "attention"), norm)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 4e-3)
    assert_close(read[0], norm(source), tolerance=tolerance)


@pytest.mark.parametrize("watch", [
    lambda norm: norm.register_forward_hook(lambda *_: None),
    lambda norm: norm.register_forward_pre_hook(lambda *_: None),
    lambda norm: norm.register_full_backward_hook(lambda *_: None),
    lambda norm: norm.register_full_backward_pre_hook(lambda *_: None),
    lambda norm: nn.modules.module.register_module_forward_hook(lambda *_: None),
    lambda norm: norm.__dict__.__setitem__("forward", lambda hidden: hidden),
])  # fmt: skip
def test_a_norm_that_somebody_watches_is_not_folded(watch):
    norm = RMSNorm(4)
    assert foldable(norm) is not None
    handle = watch(norm)
    assert foldable(norm) is None
    if handle is not None:
        handle.remove()
        assert foldable(norm) is not None


def test_the_mix_before_a_foreign_norm_is_not_kept_for_backward():
    rule, start = rule_of(AttnRes(sublayers_per_block=2)), embedding().requires_grad_()
    state = rule.write(rule.open(start), Site(0, "attention"), embedding())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
        inputs, _ = rule.read(state, Site(0, "mlp"), nn.LayerNorm(WIDTH).double())
    sources = {source.data_ptr() for source in state.blocks + state.open_block}
    assert {tensor.data_ptr() for tensor in kept if tensor.shape == start.shape} <= sources
    inputs[0].sum().backward()
    assert start.grad is not None


def test_a_model_with_bfloat16_sources_trains_in_float32():
    config = presets.scaled(
        2, vocab_size=40, residual=AttnRes(sublayers_per_block=2, source_dtype="bfloat16")
    )
    model, tokens = Decoder(config), torch.tensor([[1, 2, 3]])
    exact = Decoder(replace(config, residual=AttnRes(sublayers_per_block=2)))
    exact.load_state_dict(model.state_dict())
    assert_close(model(tokens), exact(tokens), tolerance=0.02)
    model(tokens).sum().backward()
    assert model.embedding.weight.grad is not None


def test_which_norms_are_folded():
    assert foldable(nn.RMSNorm(4, eps=None)) is None
    assert foldable(nn.RMSNorm(4, eps=1e-4))[1] == 1e-4
    assert foldable(nn.RMSNorm(4, elementwise_affine=False)) is None
    assert foldable(lambda x: x) is None
