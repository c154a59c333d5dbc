"""Edited passes: their traces, several edits, errors, other schedules and models."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from edited import (
    BUT_FIRST,
    EXAMPLES,
    OTHER,
    SCORED,
    TOKENS,
    VOCABULARY,
    Looker,
    every_rule,
    look,
    model_of,
    references,
)

from attention_residuals.errors import ConfigError, EditError
from attention_residuals.inference import Engine, prefill
from attention_residuals.layers.residual import (
    AttnRes,
    TwoPhaseRule,
)
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
    intervene,
    joined,
    record,
    reference_of,
)


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
