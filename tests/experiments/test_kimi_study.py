"""The study of Kimi Linear: its routing by kind measured by a second way, its shapes priced, its report read."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from experiments.made_up import ARMS, VOCABULARY, cell, outcome, small_corpus, table
from experiments.test_studies import all_done, row_of

from attention_residuals.errors import ConfigError
from attention_residuals.experiments import STUDIES, KimiPreset, Number
from attention_residuals.experiments import measures as module
from attention_residuals.experiments.ablation import Ablation
from attention_residuals.experiments.cell import Finished
from attention_residuals.experiments.comparing import plus_minus
from attention_residuals.experiments.cost import training_flops
from attention_residuals.experiments.kimi_linear import KINDS, STATISTICS, beyond_own_mlp
from attention_residuals.experiments.measures import Dynamics, Routing
from attention_residuals.experiments.scaling import Scaling
from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.models import presets
from attention_residuals.models.building import build
from attention_residuals.models.costs import costs
from attention_residuals.trace import record
from attention_residuals.train import load_checkpoint_model, train
from attention_residuals.train.trainer import initial_model

TINY = KimiPreset(preset="kimi-linear-tiny")
MEASURE = Routing(points=1, num_windows=2)
FULL = AttnRes(sublayers_per_block=1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trains a decoder and a Kimi Linear model for four steps each."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = small_corpus(folder / "corpus")
    found = {}
    for name, arm, changes in (
        ("decoder", "block", {}),
        ("standard", "standard", {}),
        ("kimi", "block", {"shape": TINY}),
    ):
        one = cell(arm, measure=MEASURE, **changes)
        train(one.train, corpus, folder / name, saving=MEASURE.saving(4), progress=False)
        run = Finished(folder / name, one.train, corpus)
        found[name] = run, list(MEASURE.numbers(run))
    return found


def weights_by_site(run):
    """Reads the weights of a trained model as they come, averaged over real tokens."""
    batch = module._batch(run, 2)
    mask = module.document_mask(batch.documents_BT)
    trace = record(load_checkpoint_model(run.folder), batch.tokens_BT, mask=mask)
    real = batch.tokens_BT != run.corpus.tokenizer.end_of_text
    assert not real.all()
    return {site.name: site.weights[:, real].double() for site in trace}


def learned(report):
    """Returns what a report says of attention beside MLPs, under Block and Full, by number and kind."""
    (grid,) = [grid for grid in report.grids if grid.title.startswith("What attention has learned")]
    return {row[:2]: row[2:] for row in grid.rows}


def at_end(numbers, quantity):
    return {n.place: n.value for n in numbers if (n.quantity, n.step) == (quantity, 4)}


def test_routing_is_that_of_the_weights_of_each_sites_newest_block_embedding_and_far_blocks(runs):
    run, numbers = runs["kimi"]
    weights = weights_by_site(run)
    kinds = {"attention": lambda layer: "MLA" if layer in (3, 7) else "KDA", "mlp": lambda layer: "MoE"}
    for site, kind_of in kinds.items():
        for layer in range(1, 8):
            read = weights[
                f"L{layer}.{site}"
            ]  # the embedding, finished blocks of a layer each, the open block
            finished = read[1 : layer + 1]
            # The newest writer of the block of layer b is 2 (layer - b) - 1 sublayers away, or one more for an MLP.
            ages = [2 * (layer - block) - (site == "attention") for block in range(layer)]
            far = sum((w for w, age in zip(finished, ages, strict=True) if age > 5), torch.zeros(()).double())
            expected = {
                "entropy": -(read * read.log()).sum(0) / math.log(len(read)),
                "newest": read[-1],
                "embedding": read[0],
                "far": far,
            }
            for name, value in expected.items():
                found = at_end(numbers, f"{name}, {kind_of(layer)}")[layer]
                assert found == pytest.approx(value.mean().item(), abs=1e-6), (name, site, layer)
    assert set(at_end(numbers, "newest, MLP")) == {0}
    assert set(at_end(numbers, "newest, output")) == {8}


def test_kinds_of_kimi_linear_are_kda_mla_and_experts_and_of_a_decoder_attention_and_mlp(runs):
    def counted(name):
        return Counter(n.quantity for n in runs[name][1] if n.step == 4 and n.quantity.startswith("entropy"))

    # The first attention has nothing to choose from.
    expected = {"KDA": 5, "MLA": 2, "MLP": 1, "MoE": 7, "output": 1}
    assert counted("kimi") == {f"entropy, {kind}": number for kind, number in expected.items()}
    assert counted("decoder") == {"entropy, attention": 2, "entropy, mlp": 3, "entropy, output": 1}
    assert not counted("standard")
    names = {n.quantity.partition(",")[0] for n in runs["kimi"][1]}
    assert names == {*STATISTICS, "output magnitude", "gradient magnitude"}


def test_before_training_all_sources_have_equal_weights(runs):
    for name, layers in (("decoder", 3), ("kimi", 8)):
        numbers = [n for n in runs[name][1] if n.step == 0]
        assert all(n.value == pytest.approx(1, abs=1e-6) for n in numbers if n.quantity.startswith("entropy"))
        for n in numbers:
            statistic, _, kind = n.quantity.partition(", ")
            if statistic in ("newest", "embedding"):
                is_open = kind in ("mlp", "MLP", "MoE")  # under blocks of a layer, an MLP reads its own, open
                assert n.value == pytest.approx(1 / (1 + n.place + is_open)), (n, layers)


def test_routing_comes_with_the_dynamics_of_the_same_steps(runs):
    run, numbers = runs["kimi"]
    own = list(Dynamics(points=1, num_windows=2).numbers(run))
    assert len(own) == 2 * 2 * 8
    assert [n for n in numbers if n.quantity.endswith("magnitude")] == own


def test_equal_seeds_begin_with_equal_weights_under_every_rule(runs):
    run, _ = runs["kimi"]
    states = []
    for rule in (StandardResidual(), ARMS["block"], FULL):
        model = TINY.model(VOCABULARY, 48, rule)
        state = initial_model(replace(run.config, model=model)).state_dict()
        states.append({name: value for name, value in state.items() if "pseudo_query" not in name})
    standard, *others = states
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in standard.items())
        assert all(
            value.eq(1).all() for name, value in other.items() if name not in standard
        )  # gains of keys


@pytest.mark.parametrize("rule", [StandardResidual(), FULL])
@pytest.mark.parametrize("length", [7, 8])
def test_operations_of_kimi_linear_are_those_of_each_token_with_the_tokens_before_it(rule, length):
    one = replace(
        cell(), train=replace(cell().train, model=TINY.model(300, 48, rule), sequence_length=length)
    )
    sequence = [costs(one.train.model, context=tokens) for tokens in range(1, length + 1)]
    forward = sum(found.operations + found.reads for found in sequence)
    sequences = one.train.num_steps * one.train.batch_size
    assert training_flops(one.train) == 3 * sequences * forward
    assert training_flops(one.train, 1) == training_flops(one.train) / one.train.num_steps


def test_a_converted_model_of_another_kind_has_no_price():
    model = TINY.model(300, 48, FULL)
    other = replace(model, transformers=model.transformers.replace("kimi_linear", "llama"))
    with pytest.raises(ConfigError, match="a model of type 'llama'"):
        training_flops(replace(cell().train, model=other))


def test_a_kimi_linear_shape_takes_the_place_of_a_decoders():
    with pytest.raises(ConfigError, match="kimi-linear-tiny"):
        KimiPreset(preset="kimi-linear-tny")
    row = KimiPreset(preset="kimi-linear-436m")
    config = presets.kimi_linear("kimi-linear-436m", vocab_size=300, residual=FULL)
    assert row.model(300, 8192, FULL) == config
    assert row.model(300, 10**6, FULL).max_tokens == 8192  # longer sequences are refused by TrainConfig
    assert row.model(300, 100, FULL).max_tokens == 100
    assert (row.num_layers, row.num_heads, row.tied) == (16, 16, False)
    assert row.num_parameters / 1e6 == pytest.approx(436, rel=0.03)  # Table 2


def test_other_studies_take_kimi_linear_too():
    (name, recipe), *_ = Scaling.at("smoke").sizes
    study = replace(Scaling.at("smoke"), sizes=((name, replace(recipe, shape=TINY)),))
    cells = study.cells({"text": 300}, table([]))
    report = study.report(table([outcome(one, 3.0, flops=training_flops(one.train)) for one in cells]))
    assert row_of(report, "Validation loss", name)["parameters in layers"] == f"{TINY.num_parameters:,}"


def test_every_rule_of_the_ablation_but_the_value_query_goes_around_kimi_linear():
    ablation = Ablation.at("smoke")
    rules = replace(ablation, recipe=replace(ablation.recipe, shape=TINY)).arms()
    assert rules["block 4, heads"].num_heads == 4
    twice = TINY.model(300, 48, rules.pop("full, value query"))
    with pytest.raises(ConfigError, match="reads 2 times"):
        build(twice)
    tokens = torch.randint(300, (1, 8), generator=torch.Generator().manual_seed(0))
    for rule in rules.values():
        model = build(TINY.model(300, 48, rule)).requires_grad_(False)
        assert model(tokens).isfinite().all(), rule


def test_recipes_are_those_of_the_other_studies_with_the_papers_own_architecture():
    laptop, paper = (STUDIES["kimi-linear"].at(scale) for scale in ("laptop", "paper"))
    tokens = laptop.recipe.num_steps * laptop.recipe.tokens_per_step
    assert tokens / 2_700 / 60 < 7, "minutes of one core"
    assert laptop.seeds == (0, 1, 2)
    others = STUDIES["dynamics"].at("paper").recipe
    assert replace(paper.recipe, shape=others.shape) == others
    block = next(one for one in paper.cells({"text": 1000}, table([])) if one.arm == "block")
    assert block.train.model == presets.kimi_linear("kimi-linear-436m", vocab_size=1000)


def test_what_attention_learns_is_told_beside_the_mlp_of_its_layer_and_beyond_equal_weights():
    study = STUDIES["kimi-linear"].at("laptop")
    found, cells = all_done(study)
    assert len(cells) == 9
    told = learned(study.report(found))
    for name, words in STATISTICS.items():
        sign = -1 if name == "newest" else 1
        for kind, gain in (("KDA", 0.1), ("MLA", 0.2)):
            values = [float(text.split()[0]) for text in told[words, kind]]
            assert values == [pytest.approx(sign * gain), pytest.approx(sign * 2 * gain)], (name, kind)


def test_routing_of_a_kind_is_the_mean_over_its_sites_with_an_interval_over_seeds():
    study = STUDIES["kimi-linear"].at("laptop")
    found, _ = all_done(study)
    (grid,) = [grid for grid in study.report(found).grids if grid.title.startswith("Routing by kind")]
    assert [row[:2] for row in grid.rows] == [(w, kind) for w in STATISTICS.values() for kind in KINDS]
    row = next(row for row in grid.rows if row[:2] == (STATISTICS["entropy"], "MLA"))
    equal = 0.25 + 0.01 * (3 + 7) / 2
    noises = [0.001 * math.sin(1000 * seed + len("full")) for seed in range(3)]
    assert row[4] == f"{equal:.4f}"
    assert row[5] == plus_minus({seed: equal + 0.4 + noise for seed, noise in enumerate(noises)}, ".4f")


def test_an_mlp_counts_in_the_layers_of_an_attention_alone():
    one = STUDIES["kimi-linear"].at("smoke").cells({"text": 300}, table([]))[1]
    numbers = [
        Number("far, KDA", 0.0, 0, 1),
        Number("far, KDA", 0.5, 4, 1),
        Number("far, MoE", 0.1, 0, 1),
        Number("far, MoE", 0.2, 4, 1),
        Number("far, MLA", 0.0, 0, 3),
        Number("far, MLA", 0.5, 4, 3),
        Number("far, MoE", 0.0, 0, 3),
        Number("far, MoE", 0.9, 4, 3),
    ]
    found = outcome(one, 3.0, *numbers)
    assert beyond_own_mlp("far", "KDA")(found) == pytest.approx(0.4)
    assert beyond_own_mlp("far", "MLA")(found) == pytest.approx(-0.4)


def test_the_report_has_losses_dynamics_and_routing_of_all_three_rules():
    study = STUDIES["kimi-linear"].at("smoke")
    found, _ = all_done(study)
    report = study.report(found)
    shown = {"loss", "output-magnitude", "loss-by-rule", "routing-by-kind", "attention-beside-mlp"}
    assert shown <= set(report.figures)
    row = row_of(report, "Validation loss", str(study.recipe.num_steps))
    assert float(row["full less standard [95 %]"].split()[0]) == pytest.approx(-0.03, abs=0.003)
    assert float(row["block less standard [95 %]"].split()[0]) == pytest.approx(-0.02, abs=0.003)
    one_arm = table([one for one in found.outcomes.values() if one.key.arm == "full"])
    assert set(study.report(one_arm).figures) == {"routing-by-kind", "attention-beside-mlp"}
    one_seed = table([one for one in found.outcomes.values() if one.key.seed == 0])
    assert learned(study.report(one_seed))[STATISTICS["entropy"], "MLA"][1] == "+0.4000 (1 seed)"
