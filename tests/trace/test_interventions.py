from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from closeness import assert_close, distance
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_residuals.errors import ConfigError, DataError, EditError
from attention_residuals.inference import Engine, prefill
from attention_residuals.layers.residual import (
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
    TwoPhaseRule,
    ValueQuery,
)
from attention_residuals.layers.tap import Chain
from attention_residuals.models import Decoder, DecoderConfig
from attention_residuals.ops import weighted_sum
from attention_residuals.stats import mixing_matrix
from attention_residuals.trace import (
    Drop,
    Force,
    Intervention,
    Mean,
    MeanWrite,
    Patch,
    PatchWeights,
    PatchWrite,
    Recorder,
    RemoveWriter,
    ReplaceQuery,
    Resample,
    ResampleWrite,
    RotateQuery,
    ScaleQuery,
    Shuffle,
    Skip,
    Static,
    Temperature,
    Zero,
    ZeroWrite,
    control,
    dataset_mean,
    divergence,
    intervene,
    joined,
    record,
    reference_of,
)

VOCABULARY = 23
TOKENS = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))
OTHER = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1))
BUT_FIRST = ("*", "!L0.attention")

RULES = {
    "standard": StandardResidual(),
    "full": AttnRes(sublayers_per_block=1),
    "block": AttnRes(sublayers_per_block=4),
    "odd block": AttnRes(sublayers_per_block=3),
    "input query": InputQuery(sublayers_per_block=2),
    "static": StaticMixing(),
    "static, not normalised": StaticMixing(normalised=False),
    "sigmoid": Sigmoid(),
    "sigmoid, normalised": Sigmoid(normalised=True),
    "raw keys": RawKeys(),
    "window": SlidingWindow(window=2),
    "heads": MultiHead(num_heads=2),
    "value query": ValueQuery(),
    "delta": Delta(sublayers_per_block=2),
    "inkling2": Inkling2(sublayers_per_block=2),
    "cumulative": Cumulative(),
    "denseformer": DenseFormer(),
    "hyper-connections": HyperConnections(streams=2),
    "mHC": ManifoldHyperConnections(streams=2),
    "highway": Highway(),
}
SOFTMAX = ["full", "block", "odd block", "input query", "static", "sigmoid, normalised", "raw keys", "window",
           "heads", "value query", "inkling2", "cumulative"]  # fmt: skip
SCORED = [*SOFTMAX, "sigmoid", "delta"]
CANNOT = (Drop, Force, Temperature, ScaleQuery, RotateQuery, ReplaceQuery)  # without scores
every_rule = pytest.mark.parametrize("rule", RULES)
softmax_rules = pytest.mark.parametrize("rule", SOFTMAX)
_MODELS: dict = {}
_REFERENCES: dict = {}


def model_of(rule: str, *, eps: float = 1e-6, depth: int = 3, fresh: bool = False) -> Decoder:
    """A small float64 model with weights that matter; the same one at every call unless a fresh one is asked for."""
    key = (rule, eps, depth)
    if key not in _MODELS or fresh:
        config = DecoderConfig(
            vocab_size=VOCABULARY, num_layers=depth, width=12, num_heads=2, num_kv_heads=1, head_width=6,
            mlp_width=16, max_tokens=32, norm_eps=eps, residual=RULES[rule],
        )  # fmt: skip
        torch.manual_seed(3)
        model = Decoder(config).double().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if name.startswith("residual"):
                parameter += torch.randn_like(parameter) * (0.4 if "query" in name else 0.1)
            elif parameter.ndim == 2:
                parameter.copy_(torch.randn_like(parameter) / 3)
        if fresh:
            return model
        _MODELS[key] = model
    return _MODELS[key]


class Looker:
    """Keeps every event, returns each as it came."""

    def __init__(self):
        self.reads, self.writes = {}, {}

    def begin(self, run):
        pass

    def read(self, read):
        self.reads[f"{read.site}.{read.part}"] = read
        return read

    def write(self, write):
        self.writes[write.writer] = write.output
        return write

    def state(self, name):
        read = self.reads[name]
        return weighted_sum(read.weights, read.values)


def look(model, edits, tokens=TOKENS, **options) -> Looker:
    looker = Looker()
    intervene(model, tokens, edits, tap=looker, **options)
    return looker


def references(model):
    if model not in _REFERENCES:
        run = reference_of(model, OTHER)
        _REFERENCES[model] = {"paired": run, "other": run, "mean": dataset_mean(model, [TOKENS, OTHER])}
    return _REFERENCES[model]


# one edit of each verb, at a read (a write) of the middle of a block model of three layers
EXAMPLES = {
    "drop": Drop(sites="L2.mlp", sources="B1"),
    "zero": Zero(sites="L2.mlp", sources="B1"),
    "mean": Mean(sites="L2.mlp", sources="B2"),
    "mean, routed anew": Mean(sites="L2.mlp", sources="B2", reroute=True),
    "resample": Resample(sites="L2.mlp", sources="*"),
    "resample, routed anew": Resample(sites="L2.mlp", sources="*", row=0, reroute=True),
    "patch": Patch(sites="L2.mlp", sources="B1"),
    "patch, routed anew": Patch(sites="L2.mlp", sources="B1", reroute=True),
    "remove": RemoveWriter(sites="L2.mlp", writer="L0.mlp"),
    "remove, routed anew": RemoveWriter(sites="L2.mlp", writer="L0.mlp", reroute=True),
    "one-hot": Force(sites="L2.mlp", to="B1"),
    "uniform": Force(sites="L2.mlp"),
    "a row": Force(sites="L2.mlp", to=(0.5, 0.2, 0.3)),
    "patched weights": PatchWeights(sites="L2.mlp"),
    "static": Static(sites="L2.mlp"),
    "shuffle": Shuffle(sites="L2.mlp"),
    "temperature": Temperature(sites="L2.mlp", temperature=0.3),
    "scaled query": ScaleQuery(sites="L2.mlp", factor=-2.0),
    "turned query": RotateQuery(sites="L2.mlp", degrees=50.0),
    "another query": ReplaceQuery(sites="L2.mlp", by="L1.mlp"),
    "no write": ZeroWrite(writers="L1.mlp"),
    "mean write": MeanWrite(writers="L1.mlp"),
    "resampled write": ResampleWrite(writers="L1.mlp"),
    "patched write": PatchWrite(writers="L1.*"),
    "skip": Skip(layers=(1,)),
}
READ_EDITS = {name: edit for name, edit in EXAMPLES.items() if hasattr(edit, "sites")}
every_edit = pytest.mark.parametrize("edit", EXAMPLES.values(), ids=EXAMPLES.keys())
every_read_edit = pytest.mark.parametrize("edit", READ_EDITS.values(), ids=READ_EDITS.keys())


# --- what an edit reaches -------------------------------------------------------------------------------


@every_edit
def test_tokens_before_an_edit_do_not_change_by_a_bit(edit):
    model, edit = model_of("odd block"), replace(edit, positions=(3,))
    clean = control(model, TOKENS, [edit])
    edited = intervene(model, TOKENS, [edit], references=references(model)).logits
    assert torch.equal(edited[:, :3], clean[:, :3])
    assert (edited[:, 3] != clean[:, 3]).any(-1).all()
    assert_close(clean, model(TOKENS))


def test_an_edit_of_an_early_site_reaches_all_later_tokens_through_attention():
    edit = Zero(sites="L0.mlp", sources="embedding", positions=(3,))
    model = model_of("odd block")
    changed = (intervene(model, TOKENS, [edit]).logits != control(model, TOKENS, [edit])).any(-1)
    assert changed.tolist() == [[False] * 3 + [True] * 3] * 2


@every_edit
def test_rows_that_are_not_chosen_do_not_change_by_a_bit(edit):
    model, edit = model_of("odd block"), replace(edit, rows=(1,))
    clean = control(model, TOKENS, [edit])
    edited = intervene(model, TOKENS, [edit], references=references(model)).logits
    assert torch.equal(edited[0], clean[0])
    assert (edited[1] != clean[1]).any()


@every_read_edit
def test_an_edited_read_is_one_readers_only(edit):
    model = model_of("odd block")
    looker = look(model, [edit], references=references(model))
    clean = look(model, [ZeroWrite(writers="L2.mlp")])  # which no read before the output sees
    for name, read in clean.reads.items():
        if name not in ("L2.mlp.in", "output.in"):
            assert torch.equal(looker.reads[name].weights, read.weights)
            assert all(map(torch.equal, looker.reads[name].values, read.values))
    assert not torch.equal(looker.state("L2.mlp.in"), clean.state("L2.mlp.in"))


@pytest.mark.parametrize("rule", ["odd block", "heads"])
@every_edit
def test_a_receipt_says_how_far_weights_and_state_have_moved(rule, edit):
    model = model_of(rule)
    if rule != "odd block" and hasattr(edit, "sources") and edit.sources != "*":
        edit = replace(edit, sources="embedding")
    if isinstance(edit, Force):
        edit = replace(edit, to="uniform")
    by_part = ReplaceQuery(sites="L2.mlp", by="L0.mlp")
    edit = by_part if isinstance(edit, ReplaceQuery) else edit
    before, after = Looker(), Looker()
    intervention = Intervention(model, [edit], references=references(model))
    model(TOKENS, tap=Chain(before, intervention.tap(), after))
    (receipt,) = intervention.receipts()
    if hasattr(edit, "sites"):
        weights = (after.reads["L2.mlp.in"].weights - before.reads["L2.mlp.in"].weights).abs().max().item()
        old, new = before.state("L2.mlp.in"), after.state("L2.mlp.in")
        assert receipt.places == ("L2.mlp",)
        assert receipt.fired == 1
        assert receipt.tokens == 12
    else:
        weights = 0.0
        old = torch.cat([before.writes[place] for place in receipt.places])
        new = torch.cat([after.writes[place] for place in receipt.places])
    states = ((new - old).norm(dim=-1) / old.norm(dim=-1)).max().item()
    assert receipt.largest_weight_change == pytest.approx(weights, abs=1e-12)
    assert receipt.largest_state_change == pytest.approx(states, rel=1e-9)


@pytest.mark.parametrize(("edit", "fired", "tokens"), [
    (Zero(sources="embedding"), 7, 7 * 9),
    (Zero(sources="B1"), 6, 6 * 9),  # open at L0.mlp and L1.attention
    (Zero(sources="B1", positions=(0, -1)), 6, 6 * 4),
    (Zero(sources="B1", positions=("2..",), rows=(1,)), 6, 6 * 1),
    (Zero(sites="mlp", sources="B1"), 3, 3 * 9),
    (Zero(sites=("L2.*", "output"), sources="B2"), 3, 3 * 9),
    (Zero(sources="B1.open@*"), 2, 2 * 9),
    (ZeroWrite(writers="attention"), 3, 3 * 9),
    (ZeroWrite(writers="*", positions=(5,)), 7, 7),
    (Skip(layers=("1..",)), 4, 4 * 9),
    (RemoveWriter(writer="L0.mlp"), 5, 5 * 9),
])  # fmt: skip
def test_receipts_count_exactly(edit, fired, tokens):
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    (receipt,) = intervene(model_of("odd block"), TOKENS, [edit], mask=mask).receipts
    assert (receipt.fired, receipt.tokens, len(receipt.places)) == (fired, tokens, fired)
    assert receipt.edit == edit


@pytest.mark.parametrize("rule", ["full", "block", "heads", "standard", "mHC"])
def test_edits_of_a_padded_batch_are_those_of_its_rows_alone(rule):
    model = model_of(rule)
    edits = [
        Zero(sites="output", sources="*", positions=(1,)),
        ZeroWrite(writers="L1.mlp", positions=(-1, 0)),
    ]
    mask = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    batched = intervene(model, TOKENS, edits, mask=mask)
    single = [intervene(model, TOKENS[:1], edits), intervene(model, TOKENS[1:, 2:], edits)]
    assert_close(batched.logits[:1], single[0].logits)
    assert_close(batched.logits[1:, 2:], single[1].logits)
    for whole, *parts in zip(batched.receipts, single[0].receipts, single[1].receipts, strict=True):
        assert whole.tokens == sum(part.tokens for part in parts)
        assert whole.largest_state_change == pytest.approx(max(part.largest_state_change for part in parts))


# --- laws of the verbs ----------------------------------------------------------------------------------


@softmax_rules
def test_zero_is_one_minus_the_weight_times_what_drop_leaves(rule):
    model, looker = model_of(rule), Looker()
    model(TOKENS, tap=looker)
    for name, read in looker.reads.items():
        site = str(read.site)
        if len(read.values) == 1 or read.site.layer != 2:
            continue
        for source in (read.source_names[0], read.source_names[-1]):
            zero, drop = (
                look(model, [edit(sites=site, part=read.part, sources=source)]).state(name)
                for edit in (Zero, Drop)
            )
            left = 1 - read.weights[read.source_names.index(source)]
            if left.ndim == 3:  # a weight for each group of channels
                left = left.repeat_interleave(model.config.width // left.shape[-1], dim=-1)
            assert_close(zero, drop * (left if left.ndim == 3 else left[..., None]))


@pytest.mark.parametrize("weight", [0.5, 0.9, 0.99, 0.999, 0.9999])
def test_after_a_norm_zero_and_drop_agree_but_near_weight_one(weight):
    model = model_of("block")
    first = Force(sites="output", to=(weight, (1 - weight) / 2, (1 - weight) / 2))
    zero, drop = (look(model, [first, edit(sites="output", sources="embedding")]) for edit in (Zero, Drop))
    size = drop.state("output.in").square().mean(-1, keepdim=True)
    predicted = (1 - weight) * ((size + 1e-6) / ((1 - weight) ** 2 * size + 1e-6)).sqrt()
    logits = [
        intervene(model, TOKENS, [first, edit(sites="output", sources="embedding")]).logits
        for edit in (Zero, Drop)
    ]
    assert_close(logits[0], logits[1] * predicted)
    difference = distance(*logits)
    assert (difference < 1e-4) == (weight <= 0.9)
    assert (difference > 0.1) == (weight >= 0.999)
    assert_close(zero.state("output.in"), (1 - weight) * drop.state("output.in"))


@softmax_rules
@pytest.mark.parametrize("kind", ["drop", "one-hot", "static", "temperature", "patch"])
def test_weights_still_sum_to_one(rule, kind):
    model = model_of(rule)
    edit = {
        "drop": Drop(sites=("*", "!L0.attention"), sources="embedding"),
        "one-hot": Force(to="embedding"),
        "static": Static(),
        "temperature": Temperature(temperature=0.1),
        "patch": PatchWeights(),
    }[kind]
    if rule == "cumulative" and kind == "drop":
        edit = replace(edit, sites=(*edit.sites, "!output"))  # which reads the stream only
    if rule == "static" and kind in ("static", "patch"):
        with pytest.raises(EditError, match="changed nothing"):
            intervene(model, TOKENS, [edit], references=references(model))
        return
    looker = look(model, [edit], references=references(model))
    for read in looker.reads.values():
        assert_close(read.weights.sum(0), torch.ones_like(read.weights[0]))
        assert (read.weights >= 0).all()


@pytest.mark.parametrize(
    "rule", ["heads", "delta", "sigmoid", "sigmoid, normalised", "static, not normalised"]
)
@every_read_edit
def test_scores_stay_those_of_the_weights_where_there_are_any(rule, edit):
    model = model_of(rule)
    if hasattr(edit, "sources") and edit.sources != "*":
        edit = replace(edit, sources="embedding")
    if isinstance(edit, Force):
        edit = replace(edit, to="embedding" if edit.to == "B1" else "uniform")
    if rule == "static, not normalised" and getattr(edit, "reroute", False):
        edit = replace(edit, reroute=False)
    looker = Looker()
    intervention = Intervention(model, [edit], references=references(model))
    if rule == "static, not normalised" and isinstance(edit, CANNOT):
        with pytest.raises(EditError, match="whose weights are 'learned'"):
            model(TOKENS, tap=intervention.tap())
        return
    model(TOKENS, tap=Chain(intervention.tap(), looker))
    read, frozen = looker.reads["L2.mlp.in"], isinstance(edit, Zero | Mean | Resample | Patch | RemoveWriter)
    known = ~read.logits.isnan().any(0)
    assert known.all() or (rule == "delta" and isinstance(edit, Force))
    dropped = read.logits == -torch.inf
    made = model.residual.weights_of(read.logits).masked_fill(dropped, 0.0)
    assert_close(made[:, known], read.weights[:, known])
    if not frozen or getattr(edit, "reroute", False):
        return
    clean = Looker()
    model(TOKENS, tap=clean)
    assert torch.equal(read.weights, clean.reads["L2.mlp.in"].weights)


@every_rule
def test_all_writes_of_another_text_make_the_other_text(rule):
    model = model_of(rule)
    found = intervene(model, TOKENS, [PatchWrite(writers="*")], references=references(model))
    assert_close(found.logits, model(OTHER))
    assert found.receipts[0].fired == 7


@every_rule
def test_rows_that_exchange_all_writes_exchange_all_predictions(rule):
    model = model_of(rule)
    own = {"other": reference_of(model, TOKENS)}
    found = intervene(model, TOKENS, [ResampleWrite(writers="*")], references=own).logits
    assert_close(found, model(TOKENS).flip(0))


@every_rule
def test_all_values_and_weights_of_another_texts_output_read_make_its_predictions(rule):
    model = model_of(rule)
    edits = [Patch(sites="output", sources="*"), PatchWeights(sites="output")]
    own_weights = rule in ("standard", "static", "static, not normalised", "cumulative", "highway",
                           "denseformer", "hyper-connections", "mHC")  # fmt: skip
    edits = edits[:1] if own_weights else edits
    assert_close(intervene(model, TOKENS, edits, references=references(model)).logits, model(OTHER))
    if rule in SCORED:
        anew = [Patch(sites="output", sources="*", reroute=True)]
        assert_close(intervene(model, TOKENS, anew, references=references(model)).logits, model(OTHER))
        exchanged = [Resample(sites="output", sources="*", reroute=True)]
        own = {"other": reference_of(model, TOKENS)}
        assert_close(intervene(model, TOKENS, exchanged, references=own).logits, model(TOKENS).flip(0))


@pytest.mark.parametrize("rule", ["hyper-connections", "mHC"])
def test_gates_of_streams_can_be_those_of_another_text(rule):
    model, other = model_of(rule), Looker()
    model(OTHER, tap=other)
    read = look(model, [PatchWeights(sites="L1.mlp")], references=references(model)).reads["L1.mlp.in"]
    assert torch.equal(read.weights, other.reads["L1.mlp.in"].weights)
    assert read.logits is None
    mean = look(model, [Static(sites="L1.mlp")], references=references(model)).reads["L1.mlp.in"].weights
    assert_close(mean, references(model)["mean"].reads["L1.mlp"].weights[:, None, None].expand_as(mean))


@pytest.mark.parametrize("rule", [*SCORED, "static, not normalised", "standard", "denseformer"])
@pytest.mark.parametrize("writer", ["embedding", "L0.mlp"])
def test_a_writer_taken_out_of_every_read_has_written_nothing(rule, writer):
    model = model_of(rule)
    routed = rule not in ("static, not normalised", "standard", "denseformer")
    removed = intervene(model, TOKENS, [RemoveWriter(writer=writer, reroute=routed)], tap=Recorder())
    gone = intervene(model, TOKENS, [ZeroWrite(writers=writer)], tap=Recorder())
    assert_close(removed.logits, gone.logits)
    for one, other in zip(removed.trace.sites, gone.trace.sites, strict=True):
        assert_close(one.weights, other.weights)
        assert_close(one.source_norms, other.source_norms)
        if routed:
            assert_close(one.inverse_norms, other.inverse_norms)
    matrix, other = mixing_matrix(removed.trace), mixing_matrix(gone.trace)
    number = matrix.writers.index(writer)
    assert matrix.weights[:, number].eq(0).all()
    left = [one for one in range(len(matrix.writers)) if one != number]
    assert_close(matrix.weights[:, left], other.weights[:, left])


def test_frozen_removal_is_linear_and_routing_anew_is_not():
    model, clean = model_of("odd block"), Looker()
    model(TOKENS, tap=clean)
    state = clean.state("L2.mlp.in")

    def change(*writers, reroute=False):
        edits = [RemoveWriter(sites="L2.mlp", writer=writer, reroute=reroute) for writer in writers]
        return state - look(model, edits).state("L2.mlp.in")

    weight = clean.reads["L2.mlp.in"].weights[1, ..., None]
    assert_close(change("L0.mlp"), weight * clean.writes["L0.mlp"])
    assert_close(change("L0.mlp", "L0.attention"), change("L0.mlp") + change("L0.attention"))
    anew = change("L0.mlp", reroute=True)
    assert distance(change("L0.mlp"), anew) > 0.05  # the gap that is itself a finding
    both = change("L0.mlp", "L0.attention", reroute=True)
    assert distance(both, anew + change("L0.attention", reroute=True)) > 0.01


def test_a_write_of_zeros_is_a_dropped_source_to_readers_with_a_norm():
    model = model_of("full", eps=1e-30)
    later = ("L1.attention", "L1.mlp", "L2.*", "output")
    gone = intervene(model, TOKENS, [ZeroWrite(writers="L0.mlp")]).logits
    dropped = intervene(model, TOKENS, [Drop(sites=later, sources="L0.mlp")]).logits
    assert_close(gone, dropped)
    zeroed = intervene(model, TOKENS, [Zero(sites=later, sources="L0.mlp")]).logits
    assert_close(zeroed, dropped)
    frozen = intervene(model, TOKENS, [RemoveWriter(writer="L0.mlp")]).logits
    assert_close(frozen, zeroed)


@pytest.mark.parametrize("rule", ["standard", "full", "block", "delta"])
def test_without_any_layer_the_embedding_is_the_output(rule):
    model = model_of(rule, eps=1e-30)
    found = intervene(model, TOKENS, [Skip(layers=("0..",))])
    embedding = model.embedding(TOKENS)
    normed = embedding * embedding.square().mean(-1, keepdim=True).rsqrt() * model.norm.gain
    weight = model.embedding.weight if model.head is None else model.head.weight
    assert_close(found.logits, normed @ weight.T)


def test_means_are_those_of_a_trace_over_all_data():
    model = model_of("odd block")
    mask = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    means = dataset_mean(model, [(TOKENS, mask), OTHER])
    traces = [record(model, TOKENS, mask=mask), record(model, OTHER)]
    real = torch.cat([mask, torch.ones_like(mask)])
    for name in ("L1.mlp", "output"):
        weights = torch.cat([trace[name].weights for trace in traces], 1)
        assert_close(means.reads[name].weights, weights[:, real].mean(1))
    lookers = [Looker(), Looker()]
    model(TOKENS, mask=mask, tap=lookers[0])
    model(OTHER, tap=lookers[1])
    for source in range(3):
        value = torch.cat([looker.reads["L2.mlp.in"].values[source] for looker in lookers])
        assert_close(means.reads["L2.mlp"].values[source], value[real].mean(0))
    assert_close(means.writes["L1.mlp"], torch.cat([one.writes["L1.mlp"] for one in lookers])[real].mean(0))
    assert means.num_tokens == 22
    with pytest.raises(DataError, match="no real token"):
        dataset_mean(model, [])


def test_means_of_one_token_are_that_tokens_own():
    model = model_of("odd block")
    given_ = {"mean": dataset_mean(model, [OTHER[:1, :1]]), "paired": reference_of(model, OTHER)}
    for mean, patch in (
        (Mean(sites="L2.*", sources="*", positions=(0,), rows=(0,)), Patch),
        (Static(positions=(0,), rows=(0,)), PatchWeights),
        (MeanWrite(writers="L1.*", positions=(0,), rows=(0,)), PatchWrite),
    ):
        own = {name: getattr(mean, name) for name in ("sites", "sources", "writers") if hasattr(mean, name)}
        logits = [
            intervene(model, TOKENS, [edit], references=given_).logits
            for edit in (mean, patch(positions=(0,), rows=(0,), **own))
        ]
        assert_close(*logits)


def test_shuffled_weights_are_the_same_ones_at_other_sources():
    model, clean = model_of("full"), Looker()
    model(TOKENS, tap=clean)
    old = clean.reads["L2.mlp.in"].weights
    found = [look(model, [Shuffle(sites="L2.mlp", seed=seed)]).reads["L2.mlp.in"] for seed in (0, 0, 1, 2, 3)]
    assert torch.equal(found[0].weights, found[1].weights)
    assert any(not torch.equal(found[0].weights, other.weights) for other in found[2:])
    for read in found:
        assert torch.equal(read.weights.sort(0).values, old.sort(0).values)
        assert (read.weights != old).all()
    part = look(model, [Shuffle(sites="L2.mlp", sources=("embedding", "L0.*"))]).reads["L2.mlp.in"].weights
    assert torch.equal(part[3:], old[3:])
    assert (part[:3] != old[:3]).all()


def test_extremes_of_temperature_are_the_best_source_and_all_alike():
    model, clean = model_of("full"), Looker()
    model(TOKENS, tap=clean)
    old = clean.reads["output.in"]
    cold = look(model, [Temperature(sites="output", temperature=1e-6)]).reads["output.in"].weights
    assert torch.equal(cold.argmax(0), old.logits.argmax(0))
    assert_close(cold.amax(0), torch.ones(2, 6, dtype=torch.float64))
    hot, uniform = (
        intervene(model, TOKENS, [edit]).logits
        for edit in (Temperature(sites="output", temperature=1e12), Force(sites="output"))
    )
    assert_close(hot, uniform)
    with pytest.raises(EditError, match="changed nothing"):
        intervene(model, TOKENS, [Temperature(temperature=1.0)])


@pytest.mark.parametrize(
    "rule", ["full", "odd block", "sigmoid", "raw keys", "heads", "value query", "inkling2"]
)
def test_a_longer_query_is_a_lower_temperature(rule):
    model, factor = model_of(rule), 3.0
    one, other = (
        intervene(model, TOKENS, [edit]).logits
        for edit in (ScaleQuery(factor=factor), Temperature(temperature=1 / factor))
    )
    assert_close(one, other)


def test_a_bias_is_not_scaled_with_the_query():
    model = model_of("cumulative")
    sites = ("*", "!output")
    one, other = (
        intervene(model, TOKENS, [edit]).logits
        for edit in (ScaleQuery(sites=sites, factor=2.0), Temperature(sites=sites, temperature=0.5))
    )
    assert distance(one, other) > 1e-3


@pytest.mark.parametrize("rule", ["full", "cumulative", "inkling2", "value query"])
def test_another_query_is_that_of_a_model_that_has_it(rule):
    model, other = model_of(rule), model_of(rule, fresh=True)
    readers = dict(other.residual.readers.items())
    readers["L1_mlp"].pseudo_query.copy_(readers["L2_mlp"].pseudo_query)
    found = intervene(model, TOKENS, [ReplaceQuery(sites="L1.mlp", by="L2.mlp")]).logits
    assert_close(found, other(TOKENS))
    numbers = tuple(readers["L2_mlp"].pseudo_query.tolist())
    assert torch.equal(intervene(model, TOKENS, [ReplaceQuery(sites="L1.mlp", by=numbers)]).logits, found)
    with pytest.raises(EditError, match="changed nothing"):
        intervene(model, TOKENS, [ReplaceQuery(sites="L1.mlp", by="L1.mlp")])
    with pytest.raises(ConfigError, match=r"did you mean 'L2\.mlp'"):
        intervene(model, TOKENS, [ReplaceQuery(sites="L1.mlp", by="L2.mpl")])
    with pytest.raises(ConfigError, match="by=2 numbers"):
        intervene(model, TOKENS, [ReplaceQuery(sites="L1.mlp", by=(1.0, 2.0))])


def test_a_query_of_one_part_is_named_by_its_part():
    model = model_of("value query")
    edits = [ReplaceQuery(sites="L1.attention", part="v", by="L2.attention.v")]
    looker = look(model, edits)
    clean = look(model, [ZeroWrite(writers="L2.mlp")])
    assert torch.equal(looker.reads["L1.attention.in"].weights, clean.reads["L1.attention.in"].weights)
    assert not torch.equal(looker.reads["L1.attention.v"].weights, clean.reads["L1.attention.v"].weights)


@given(degrees=st.floats(1, 179), seed=st.integers(0, 99))
@settings(max_examples=8)
def test_a_turned_query_keeps_its_length_and_its_angle(degrees, seed):
    model = model_of("full")
    own = model.residual.readers["L2_mlp"].pseudo_query
    read = Looker()
    model(TOKENS, tap=read)
    edit = RotateQuery(sites="L2.mlp", degrees=degrees, seed=seed)
    turned = edit.query(own, read.reads["L2.mlp.in"], model.residual)
    assert turned.norm().item() == pytest.approx(own.norm().item())
    cosine = (turned @ own / own.norm().square()).clamp(-1, 1)
    assert torch.rad2deg(cosine.arccos()).item() == pytest.approx(degrees, abs=1e-4)


def test_a_query_turned_around_is_its_negative_and_zero_cannot_be_turned():
    model = model_of("full")
    logits = [
        intervene(model, TOKENS, [edit]).logits
        for edit in (RotateQuery(degrees=180.0), ScaleQuery(factor=-1.0))
    ]
    assert_close(*logits)
    fresh = model_of("full", fresh=True)
    for reader in fresh.residual.readers.values():
        reader.pseudo_query.zero_()
    with pytest.raises(EditError, match="changed nothing"):
        intervene(fresh, TOKENS, [RotateQuery(degrees=90.0)])


def test_one_group_of_channels_is_edited_alone():
    model, clean = model_of("heads"), Looker()
    model(TOKENS, tap=clean)
    old = clean.reads["L2.mlp.in"]
    for edit in (Drop(sites="L2.mlp", sources="embedding", heads=(1,)), Force(sites="L2.mlp", heads=(1,)),
                 Static(sites="L2.mlp", heads=(1,)), ScaleQuery(sites="L2.mlp", factor=3.0, heads=(1,))):  # fmt: skip
        read = look(model, [edit], references=references(model)).reads["L2.mlp.in"]
        assert torch.equal(read.weights[..., 0], old.weights[..., 0])
        assert not torch.equal(read.weights[..., 1], old.weights[..., 1])
    found = intervene(
        model, TOKENS, [Zero(sites="L2.mlp", sources="L0.mlp", heads=(1,))], tap=Recorder("values")
    )
    values = found.trace["L2.mlp"].values[2]
    assert torch.equal(values[..., :6], old.values[2][..., :6])
    assert values[..., 6:].eq(0).all()
    unknown = mixing_matrix(found.trace).weights.isnan().nonzero()[:, :2].unique(dim=0)
    assert unknown.tolist() == [[5, 2]]


def test_keys_of_all_groups_are_new_where_one_group_is_routed_anew():
    model = model_of("heads")
    edit = Patch(sites="L2.mlp", sources="L0.mlp", heads=(1,), reroute=True)
    read = look(model, [edit], references=references(model)).reads["L2.mlp.in"]
    found = model.residual.attend(read.values, read.site, "in", None, None)
    assert_close(read.logits, found.logits)
    assert_close(read.weights, found.logits.softmax(0))
    clean = look(model, [ZeroWrite(writers="L2.mlp")]).reads["L2.mlp.in"].weights
    assert (read.weights != clean).any((0, 1, 2)).all()


# --- the trace of an edited pass ------------------------------------------------------------------------


@every_rule
def test_the_mixing_matrix_of_an_edited_pass_makes_its_states(rule):
    model = model_of(rule)
    edits = [
        Zero(sites="L1.attention", sources="*", positions=(2,)),
        RemoveWriter(writer="L0.mlp", positions=("1..4",)),
        ZeroWrite(writers="L1.attention", rows=(0,)),
    ]
    if rule in SCORED:
        first = record(model, TOKENS)["L2.attention"].source_names[0]
        edits += [Drop(sites="L2.attention", sources=first, positions=(3,)), Shuffle(sites="L2.mlp")]
    found = intervene(model, TOKENS, edits, tap=Recorder("values"))
    matrix, writes = mixing_matrix(found.trace).weights, found.trace.writes
    looked = found.trace.sites if matrix.ndim == 4 else []
    for number, site in enumerate(looked):
        state = torch.einsum("sbt,sbtd->btd", site.weights, site.values)
        assert_close(torch.einsum("wbt,wbtd->btd", matrix[number].double(), writes), state)
    if matrix.ndim == 5 and rule == "value query":
        for site in found.trace.sites:
            row = matrix[[s.site for s in found.trace.sites if s.part == "in"].index(site.site)]
            part = row[..., 1 if site.part == "v" else 0]
            state = torch.einsum("sbt,sbtd->btd", site.weights, site.values)
            assert_close(torch.einsum("wbt,wbtd->btd", part, writes), state)


def test_values_of_another_run_have_no_known_writers():
    model = model_of("odd block")
    edit = Patch(sites="L2.mlp", sources="B1", positions=(2,))
    found = intervene(model, TOKENS, [edit], references=references(model), tap=Recorder())
    unknown = mixing_matrix(found.trace).weights.isnan()
    assert unknown[5, :6, :, 2].all()
    unknown[5, :, :, 2] = False
    assert not unknown.any()


def test_a_trace_is_there_only_where_it_was_recorded():
    assert intervene(model_of("full"), TOKENS, [Force()]).trace is None


# --- several edits --------------------------------------------------------------------------------------


def test_edits_act_in_order_each_on_what_was_left():
    model = model_of("full")
    drop, cool = Drop(sites="output", sources="embedding"), Temperature(sites="output", temperature=0.4)
    force, zero = Force(sites="output", to="L0.mlp"), Zero(sites="output", sources="L0.mlp")

    def logits(*edits):
        return intervene(model, TOKENS, edits).logits

    assert_close(logits(drop, cool), logits(cool, drop))
    assert_close(logits(drop, force), logits(force))
    spread = Force(sites="output", to=tuple([0.5, 0.5] + [0.0] * 5))
    assert_close(logits(spread, drop), logits(Force(sites="output", to="L0.attention")))
    assert logits(force, zero).eq(0).all()


def test_dropped_sources_stay_dropped_in_every_rule():
    for rule in SCORED:
        model = model_of(rule)
        edits = [Drop(sites="L2.mlp", sources="embedding"), Temperature(sites="L2.mlp", temperature=0.5)]
        if rule != "window":
            edits += [Drop(sites="L2.mlp", sources=record(model, TOKENS)["L2.mlp"].source_names[1])]
        read = look(model, edits).reads["L2.mlp.in"]
        assert read.weights[0].eq(0).all()
        assert read.weights[-1].ne(0).all()


def test_scores_made_anew_do_not_undo_an_edit_in_silence():
    model = model_of("odd block")
    patch = Patch(sites="L2.mlp", sources="B1", reroute=True, positions=(3,))
    drop = Drop(sites="L2.mlp", sources="embedding", positions=(3,))
    scale = ScaleQuery(sites="L2.mlp", factor=2.0, positions=(3,))
    given_ = references(model)
    frozen = replace(patch, reroute=False)
    for first, second in (
        (drop, patch),
        (drop, scale),
        (scale, patch),
        (frozen, patch),
        (frozen, scale),
        (scale, scale),
    ):
        with pytest.raises(EditError, match="scores anew, behind an edit"):
            intervene(model, TOKENS, [first, second], references=given_)
    intervene(model, TOKENS, [patch, scale, drop], references=given_)
    intervene(model, TOKENS, [replace(drop, positions=(2,)), patch], references=given_)
    intervene(model, TOKENS, [replace(drop, sites="L2.attention"), patch], references=given_)
    twice = [patch, replace(patch, sources="B2")]
    weights = look(model, twice, references=given_).reads["L2.mlp.in"].weights
    assert_close(
        weights, look(model, [replace(patch, sources="B*")], references=given_).reads["L2.mlp.in"].weights
    )


def test_a_writer_cannot_be_taken_out_of_a_value_that_nobody_knows():
    model = model_of("odd block")
    edits = [Patch(sites="L2.mlp", sources="B1"), RemoveWriter(sites="L2.mlp", writer="L0.mlp")]
    with pytest.raises(EditError, match="put RemoveWriter first"):
        intervene(model, TOKENS, edits, references=references(model))
    intervene(model, TOKENS, edits[::-1], references=references(model))


# --- nothing in silence ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("edits", "message"), [
    ([], "no edits"),
    ([Drop(sites="L2.mpl", sources="B1")], r"site 'L2\.mpl'.*\n.*\n.*did you mean 'L2\.mlp'"),
    ([Drop(sites=("L2.mlp", "L9.*"), sources="B1")], r"site 'L9\.\*'"),
    ([Drop(sites=("*", "!L9.mlp"), sources="B1")], r"site '!L9\.mlp'"),
    ([Drop(sites=("*", "!L*", "!output"), sources="B1")], "a site that is left"),
    ([Drop(sites=BUT_FIRST, sources="embeding")], "did you mean 'embedding'"),
    ([Zero(sources=("embedding", "B7"))], "source 'B7'"),
    ([Force(to="B7")], "source 'B7'"),
    ([Drop(sites=BUT_FIRST, sources="B1", part="q")], r"part='q'.*\n.*\['in'\]"),
    ([ZeroWrite(writers="L7.mlp")], r"writer 'L7\.mlp'.*\n.*\n.*did you mean"),
    ([RemoveWriter(writer="L0.mpl")], r"did you mean 'L0\.mlp'"),
    ([Skip(layers=(3,))], r"layers=\(3,\).*\n.*0 to 2"),
    ([Skip(layers=("5..",))], "layers="),
])  # fmt: skip
def test_a_name_that_the_model_does_not_have_is_refused_with_the_nearest(edits, message):
    with pytest.raises(ConfigError, match=message):
        intervene(model_of("odd block"), TOKENS, edits)


@pytest.mark.parametrize(("edit", "message"), [
    (Drop(sources="embedding"), r"at L0\.attention, which would read nothing.*\n.*\n.*!L0\.attention"),
    (Drop(sites="L2.mlp", sources="*"), "which would read nothing"),
    (Zero(sources="B1", positions=(6,)), "never fired"),
    (Zero(sources="B1", positions=("3..2",)), "never fired"),
    (ZeroWrite(writers="L1.mlp", positions=(99,)), "never fired"),
    (Zero(sources="B1", rows=(2,)), r"rows=\(2,\).*\n.*0 to 1"),
    (Zero(sources="B1", heads=(0,)), r"heads=\(0,\) at L0\.mlp.*\n.*no heads"),
    (Force(sites="output", to=(0.5, 0.5)), "2 weights at output"),
    (Force(sites="output", to="B*"), "one source"),
    (Mean(sites="output", sources="B1"), r"no reference 'mean'.*\n.*dataset_mean"),
    (Mean(sites="output", sources="B1", reference="paired"), "a Reference as reference 'paired'"),
    (Patch(sites="output", sources="B1", reference="pared"), r"no reference 'pared'.*\n.*\n.*did you mean 'paired'"),
    (PatchWeights(reference="short"), r"texts of \[6, 6\] tokens, paired with \[4, 4\]"),
    (PatchWrite(writers="L1.mlp", reference="short"), "of the same lengths"),
    (Patch(sources="B1", reference="one row"), r"paired with \[6\]"),
    (Resample(sources="B1", reference="short"), "token 4 of row 0, which the other text does not have"),
    (Resample(sources="B1", reference="own", row=2), r"row=2.*\n.*0 to 1"),
    (PatchWeights(reference="own"), "fired 7 times and changed nothing"),
    (Patch(sources="*", reference="own"), "changed nothing"),
    (PatchWrite(writers="*", reference="own"), "changed nothing"),
    (ScaleQuery(factor=1.0), "changed nothing"),
    (PatchWeights(reference="other model"), "which reads embedding"),
    (Mean(sources="*", reference="NaN"), "leaves NaN or infinity"),
])  # fmt: skip
def test_an_edit_that_cannot_be_made_or_does_nothing_is_an_error(edit, message):
    model = model_of("odd block")
    means = dataset_mean(model, [OTHER])
    broken = {
        name: read._replace(values=tuple(v * torch.nan for v in read.values))
        for name, read in means.reads.items()
    }
    given_ = {
        "paired": reference_of(model, OTHER),
        "short": reference_of(model, OTHER[:, :4]),
        "one row": reference_of(model, OTHER[:1]),
        "own": reference_of(model, TOKENS),
        "other model": reference_of(model_of("block"), OTHER),
        "NaN": replace(means, reads=broken),
    }
    if edit == Mean(sites="output", sources="B1"):
        given_ = {}
    with pytest.raises(EditError, match=message):
        intervene(model, TOKENS, [edit], references=given_)


def test_a_reference_of_a_deeper_model_is_named():
    model, shallow = model_of("odd block"), model_of("odd block", depth=2)
    given_ = {"paired": reference_of(shallow, OTHER), "mean": dataset_mean(shallow, [OTHER])}
    for edit, message in (
        (Patch(sites="L2.mlp", sources="B1"), r"without the read L2\.mlp"),
        (PatchWrite(writers="L2.mlp"), r"without the writer L2\.mlp"),
        (Static(sites="L2.mlp"), r"without the read L2\.mlp"),
        (MeanWrite(writers="L2.mlp"), r"without the writer L2\.mlp"),
    ):
        with pytest.raises(EditError, match=message):
            intervene(model, TOKENS, [edit], references=given_)


def test_rows_are_drawn_from_a_run_of_another_size_by_the_seed():
    model = model_of("full")
    given_ = {"other": reference_of(model, torch.cat([OTHER, OTHER.flip(1), TOKENS.flip(1)]))}
    found = [
        intervene(model, TOKENS, [ResampleWrite(writers="*", seed=seed)], references=given_).logits
        for seed in range(9)
    ]
    whole = torch.cat([model(text) for text in (OTHER, OTHER.flip(1), TOKENS.flip(1))])
    drawn = [[int((whole - row).abs().amax((1, 2)).argmin()) for row in logits] for logits in found]
    assert len({tuple(pair) for pair in drawn}) > 4
    for logits, pair in zip(found, drawn, strict=True):
        assert_close(logits, whole[pair])
    one = {"other": reference_of(model, OTHER[:1])}
    edited = intervene(model, TOKENS, [ResampleWrite(writers="*")], references=one).logits
    assert_close(edited, model(OTHER[:1].expand(2, -1)))
    third = intervene(model, TOKENS, [ResampleWrite(writers="*", row=3)], references=given_).logits
    assert_close(third, model(OTHER[1:].flip(1).expand(2, -1)))


def test_one_row_has_no_other_to_resample_and_a_pair_has_as_many_rows():
    model = model_of("full")
    with pytest.raises(EditError, match="changed nothing"):
        intervene(
            model, TOKENS[:1], [Resample(sources="*")], references={"other": reference_of(model, TOKENS[:1])}
        )
    intervention = Intervention(
        model, [Patch(sources="*")], references={"paired": reference_of(model, OTHER)}
    )
    with pytest.raises(EditError, match="a paired run of 2 rows for a batch of 1"):
        model(TOKENS[:1], tap=intervention.tap())


@pytest.mark.parametrize("rule", ["standard", "static, not normalised", "denseformer", "mHC", "highway"])
@pytest.mark.parametrize("edit", [
    Drop(sites="L2.mlp", sources="*"), Temperature(sites="L2.mlp", temperature=2.0), Force(sites="L2.mlp"),
    ScaleQuery(sites="L2.mlp", factor=2.0), RotateQuery(sites="L2.mlp", degrees=9.0),
    Patch(sites="L2.mlp", sources="*", reroute=True),
], ids=lambda edit: type(edit).__name__)  # fmt: skip
def test_what_a_rule_without_scores_cannot_do_is_an_error(rule, edit):
    model = model_of(rule)
    with pytest.raises(EditError, match=f"of a {type(model.residual).__name__}, whose weights are"):
        intervene(model, TOKENS, [edit], references=references(model))


def test_a_query_edit_needs_a_pseudo_query():
    for rule, site in (("input query", "L1.mlp"), ("cumulative", "output"), ("static", "L1.mlp")):
        with pytest.raises(EditError, match=f"ScaleQuery at {site}"):
            intervene(model_of(rule), TOKENS, [ScaleQuery(sites=site, factor=2.0)])


def test_forced_weights_that_were_there_fire_and_change_no_bit():
    model = model_of("odd block")
    for edit in (
        PatchWeights(sites="output", reference="own"),
        Patch(sites="output", sources="*", reference="own"),
    ):
        intervention = Intervention(model, [edit], references={"own": reference_of(model, TOKENS)})
        assert torch.equal(model(TOKENS, tap=intervention.tap()), control(model, TOKENS, [edit]))
        with pytest.raises(EditError, match="fired 1 times and changed nothing"):
            intervention.receipts()


@pytest.mark.parametrize("edit", [EXAMPLES[name] for name in ("scaled query", "patch, routed anew", "skip")])
def test_an_exception_leaves_nothing_behind(edit):
    class Fails(Looker):
        def read(self, read):
            if str(read.site) == "output":
                raise KeyError("on purpose")
            return read

    model = model_of("odd block")
    before, parameters = model(TOKENS), deepcopy(model.state_dict())
    identities = [id(parameter) for parameter in model.parameters()]
    with pytest.raises(KeyError, match="on purpose"):
        intervene(model, TOKENS, [edit], references=references(model), tap=Fails())
    assert torch.equal(model(TOKENS), before)
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert all(torch.equal(one, parameters[name]) for name, one in model.state_dict().items())


def test_edits_can_be_differentiated_through():
    model = model_of("full", fresh=True).requires_grad_()
    edits = [
        ScaleQuery(sites="L1.mlp", factor=2.0),
        Drop(sites="output", sources="embedding"),
        Zero(sources="L0.mlp"),
    ]
    model(TOKENS, tap=Intervention(model, edits).tap()).square().sum().backward()
    assert model.embedding.weight.grad.isfinite().all()
    grad = model.residual.readers["L1_mlp"].pseudo_query.grad
    # A scaled query has the factor times the gradient that a model with the longer query has.
    other = model_of("full", fresh=True).requires_grad_()
    other.residual.readers["L1_mlp"].pseudo_query.data *= 2.0
    other(TOKENS, tap=Intervention(other, edits[1:]).tap()).square().sum().backward()
    assert_close(grad, 2.0 * other.residual.readers["L1_mlp"].pseudo_query.grad)


# --- other schedules, other models ----------------------------------------------------------------------


@pytest.mark.parametrize("edit", [EXAMPLES[name] for name in (
    "drop", "patch, routed anew", "remove, routed anew", "static", "turned query", "patched write")])  # fmt: skip
def test_two_phases_are_edited_as_one(edit):
    model = model_of("odd block")
    given_ = references(model)
    one = intervene(model, TOKENS, [edit], references=given_)
    schedule = TwoPhaseRule(model.residual)
    other = intervene(model, TOKENS, [edit], references=given_, residual=schedule)
    assert_close(other.logits, one.logits)
    assert [receipt[:4] for receipt in other.receipts] == [receipt[:4] for receipt in one.receipts]
    assert_close(control(model, TOKENS, [edit], residual=schedule), model(TOKENS))


GENERATED = {**EXAMPLES, "zero everywhere": Zero(sites="*", sources="B1")}
for name in ("resample", "patch", "mean", "remove", "one-hot", "uniform", "a row", "static", "temperature", "skip",
             "scaled query", "turned query", "mean write", "no write"):  # fmt: skip
    del GENERATED[name]


@pytest.mark.parametrize("edit", GENERATED.values(), ids=GENERATED.keys())
def test_an_edited_generation_is_one_edited_pass_over_its_text(edit):
    model = model_of("odd block")
    if edit.__dict__.get("sites") != "*":
        edit = replace(edit, positions=(2, 4, "6.."))
    text = torch.randint(VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(9))
    given_ = {"paired": reference_of(model, text), "mean": dataset_mean(model, [OTHER])}
    given_["other"] = given_["paired"]
    intervention, recorders = Intervention(model, [edit], references=given_), []

    def tap():
        recorders.append(Recorder())
        return Chain(intervention.tap(), recorders[-1])

    pieces = list(Engine(model, chunk=2).stream([5, 6, 7, 8, 9], max_new_tokens=5, tap=tap))
    trace = joined([recorder.trace(model) for recorder in recorders])
    longer = {**given_, "paired": reference_of(model, text[:, :9])}
    full = intervene(model, trace.tokens, [edit], references=longer, tap=Recorder())
    assert full.trace.tokens.shape == (1, 9)
    assert [piece.token for piece in pieces[:-1]] == trace.tokens[0, 5:].tolist()
    log_probabilities = full.logits[0].log_softmax(-1)[4:]
    for piece, expected in zip(pieces, log_probabilities, strict=True):
        assert piece.log_probability == pytest.approx(expected[piece.token].item(), abs=1e-4)
    for one, other in zip(trace.sites, full.trace.sites, strict=True):
        assert_close(one.weights, other.weights)
        assert torch.equal(one.membership.isnan(), other.membership.isnan())
    (receipt,), (expected,) = intervention.receipts(), full.receipts
    assert receipt.tokens == expected.tokens
    assert receipt.places == expected.places
    assert receipt.largest_state_change == pytest.approx(expected.largest_state_change)
    assert receipt.largest_weight_change == pytest.approx(expected.largest_weight_change, abs=1e-12)


def test_positions_from_the_end_are_refused_where_the_end_is_not_known():
    model = model_of("full")
    intervention = Intervention(model, [Zero(sources="*", positions=(-1,))])
    with pytest.raises(EditError, match="goes on with a text"):
        list(Engine(model).stream([5, 6], max_new_tokens=3, tap=intervention.tap))
    with pytest.raises(EditError, match="goes on with a text"):
        prefill(model, TOKENS, chunk=3, tap=Intervention(model, [Zero(sources="*", positions=("-2..",))]).tap)


def test_a_text_that_runs_past_its_pair_is_told():
    model = model_of("full")
    intervention = Intervention(
        model, [Patch(sources="*")], references={"paired": reference_of(model, OTHER[:1, :3])}
    )
    with pytest.raises(EditError, match="token 3 of row 0"):
        list(Engine(model).stream([5, 6], max_new_tokens=5, tap=intervention.tap))


def test_converted_models_are_edited_too():
    transformers = pytest.importorskip("transformers")
    from attention_residuals.models.hf.conversion import convert
    from attention_residuals.models.hf.converted_model import ConvertedModel

    shape = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=12, intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, rms_norm_eps=1e-6,
    )  # fmt: skip
    model = ConvertedModel(convert(transformers.LlamaForCausalLM(shape), AttnRes(sublayers_per_block=3)))
    for reader in model.residual.readers.values():
        reader.pseudo_query.data.normal_()
    model.double()
    given_ = references(model)
    for name in ("drop", "patch, routed anew", "remove, routed anew", "scaled query", "patched write"):
        edited = replace(EXAMPLES[name], positions=(3,))
        clean = control(model, TOKENS, [edited])
        found = intervene(model, TOKENS, [edited], references=given_).logits
        assert torch.equal(found[:, :3], clean[:, :3])
        assert (found[:, 3:] != clean[:, 3:]).any()
    assert_close(
        intervene(model, TOKENS, [PatchWrite(writers="*")], references=given_).logits, model(OTHER).detach()
    )


# --- what it is for -------------------------------------------------------------------------------------


@pytest.mark.parametrize("planted", [0, 2, 4])
def test_a_planted_route_is_the_one_whose_loss_hurts_most(planted):
    model, clean = model_of("full", fresh=True), Looker()
    for reader in model.residual.readers.values():
        reader.pseudo_query.zero_()
    # The mean direction of one source, as the query of one site, makes the site read that source.
    model(TOKENS, tap=clean)
    keys = torch.stack([v / v.norm(dim=-1, keepdim=True) for v in clean.reads["output.in"].values]).flatten(
        1, 2
    )
    mean = keys.mean(1)
    others = mean[[n for n in range(len(mean)) if n != planted]]
    query = mean[planted] - others.T @ torch.linalg.lstsq(others.T, mean[planted, :, None]).solution[:, 0]
    model.residual.readers["output"].pseudo_query.copy_(40 * query / query.norm())
    logits, trace = model(TOKENS), record(model, TOKENS)
    names = trace["output"].source_names
    assert trace["output"].weights.mean((1, 2)).argmax() == planted
    for verb in (Drop, Zero):
        effects = [
            divergence(logits, intervene(model, TOKENS, [verb(sites="output", sources=name)]).logits).mean()
            for name in names
        ]
        assert max(range(len(names)), key=effects.__getitem__) == planted
        assert effects[planted] > 1.2 * sorted(effects)[-2]
