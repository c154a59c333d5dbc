"""The laws of the verbs."""

from dataclasses import replace

import pytest
import torch
from closeness import assert_close, distance
from edited import (
    CANNOT,
    OTHER,
    SCORED,
    TOKENS,
    Looker,
    every_read_edit,
    every_rule,
    look,
    model_of,
    references,
    softmax_rules,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_residuals.errors import ConfigError, DataError, EditError
from attention_residuals.layers.tap import Chain
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
    dataset_mean,
    intervene,
    record,
    reference_of,
)


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
