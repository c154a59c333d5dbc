"""All studies: fair comparisons, and reports that say what their file of results says."""

import math
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache

import pytest
from experiments.made_up import outcome, table

from attention_residuals.configs import decode, encode
from attention_residuals.errors import ConfigError, DataError
from attention_residuals.experiments import SCALES, STUDIES, Number, Outcome, Report, Results, write_report
from attention_residuals.experiments.ablation import PAPER_LOSSES, SWEEP_SEED, Ablation
from attention_residuals.experiments.cell import Cell
from attention_residuals.experiments.comparing import difference, unfinished
from attention_residuals.experiments.cost import training_flops
from attention_residuals.experiments.dynamics import TrainingDynamics
from attention_residuals.experiments.measures import MEASURES
from attention_residuals.experiments.pruning import Pruning
from attention_residuals.experiments.recipes import PAPER_RUNS, paper_recipe
from attention_residuals.experiments.retrieval import DepthRetrieval
from attention_residuals.experiments.running import foreseen_cost
from attention_residuals.experiments.scaling import PAPER_SCALING, Scaling, on_the_dial
from attention_residuals.experiments.shape import ShapeGrid, shaped
from attention_residuals.models import ConvertedConfig, presets
from attention_residuals.train import TRAIN_CONFIGS

GAINS = {"standard": 0.0, "block": -0.02, "full": -0.03, "block 4": -0.02, "mhc": -0.01}
"""What arms of made-up results gain over the standard model."""

PAPER_TABLE_2 = """
194   38.7  12  12   896  2.99  192  1.931  1.909  1.899
241   45.4  13  13   960  2.80  256  1.895  1.875  1.874
296   62.1  14  14  1024  2.50  320  1.829  1.809  1.804
436   87.9  16  16  1168  2.20  384  1.766  1.746  1.737
528  119.0  17  17  1264  2.02  432  1.719  1.693  1.692
"""
"""Million active parameters, billion tokens, layers, heads, width, learning rate in thousandths, sequences a step;
losses of standard, Block and Full."""


def sizes_of(study):
    return dict.fromkeys(study.texts(), 300)


def noise(key):
    return 0.001 * math.sin(1000 * key.seed + len(key.arm))


def made(cell, *more):
    """Is the outcome of a cell whose loss depends on its rate, its compute, its seed and its arm."""
    flops = training_flops(cell.train)
    rate = cell.train.optimizer.learning_rate
    tokens = cell.train.num_steps * cell.train.tokens_per_step
    loss = 3.0 * (tokens / 1e6) ** -0.05 + GAINS.get(cell.arm, 0.01) + noise(cell.key)
    loss += 0.1 * math.log(rate / 4e-3) ** 2
    return outcome(cell, loss, *more, flops=flops)


def numbers_of(cell):
    """Makes up whatever a study measures beside the loss."""
    layers, steps, gain = cell.train.model.num_layers, cell.train.num_steps, GAINS.get(cell.arm, 0.0)
    kind = type(cell.measure).__name__
    if kind in ("Dynamics", "Routing"):
        for step in (0, steps):
            for layer in range(layers):
                grown = layer if cell.arm == "standard" else 0
                yield Number("output magnitude", 1.0 + grown + 0.01 * cell.train.seed, step, layer)
                yield Number("gradient magnitude", 1.0 / (1 + grown), step, layer)
            if kind == "Routing" and cell.arm != "standard":
                yield from routing_of(cell, learned=step > 0)
    elif kind == "Answers":
        for hops in cell.measure.hops:
            yield Number("accuracy", 0.5 - 10 * gain / hops + noise(cell.key), steps, hops)
    elif kind == "Removal":
        yield Number("loss whole", 3.0, steps)
        for layer in range(layers):
            yield Number("loss without layer", 3.1 - gain, steps, layer)
        for count in cell.measure.counts:
            yield Number("loss without last", 3.0 + count * (0.1 - gain) + noise(cell.key), steps, count)
            yield Number("loss without least useful", 3.0 + count * 0.05 + noise(cell.key), steps, count)


def routing_of(cell, *, learned):
    """Makes up that attention learns to read more broadly, KDA by 0.1 and MLA by 0.2, Full by as much again."""
    layers, far = cell.train.model.num_layers, {"KDA": 0.1, "MLA": 0.2, "MLP": 0.0, "MoE": 0.0, "output": 0.0}
    for layer in range(layers):
        attention, mlp = "MLA" if layer % 4 == 3 else "KDA", "MoE" if layer else "MLP"
        for kind in (attention, mlp) if layer else (mlp,):
            gain = learned * far[kind] * (2 if cell.arm == "full" else 1) + noise(cell.key) * learned
            for name in ("entropy", "newest", "embedding", "far"):
                sign = -1 if name == "newest" else 1
                equal = 0.5 if kind in ("MLP", "MoE") else 0.25 + 0.01 * layer
                yield Number(f"{name}, {kind}", equal + sign * gain, cell.train.num_steps * learned, layer)
    for name in ("entropy", "newest", "embedding", "far"):
        yield Number(f"{name}, output", 0.5, cell.train.num_steps * learned, layers)


@lru_cache
def all_done(study):
    """Makes up outcomes until the study has no more runs."""
    found = {}
    while True:
        cells = study.cells(sizes_of(study), table(found.values()))
        new = {one.key: made(one, *numbers_of(one)) for one in cells if one.key not in found}
        if not new:
            return table(found.values()), cells
        found |= new


def row_of(report, title, first):
    (grid,) = [grid for grid in report.grids if grid.title.startswith(title)]
    (row,) = [row for row in grid.rows if row[0] == first]
    return dict(zip(grid.header, row, strict=True))


SMALL = {name: study.at("smoke") for name, study in STUDIES.items()}
LAPTOP = {name: study.at("laptop") for name, study in STUDIES.items()}


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("scale", ["smoke", "laptop"])
def test_runs_have_names_of_their_own_and_survive_being_written_down(name, scale):
    study = STUDIES[name].at(scale)
    _, cells = all_done(study)
    assert len({one.key for one in cells}) == len({one.name for one in cells}) == len(cells)
    for one in cells[:4]:
        assert decode(encode(one), {**TRAIN_CONFIGS, **MEASURES, "Cell": Cell}) == one


@pytest.mark.parametrize("name", STUDIES)
def test_arms_differ_in_their_rule_and_in_nothing_else(name):
    _, cells = all_done(LAPTOP[name])
    groups = defaultdict(set)
    for one in cells:
        model = replace(one.train.model, residual=STANDARD)
        if isinstance(model, ConvertedConfig):  # whose eps follow from the rule, see presets.kimi_linear
            model = replace(model, eps=(0.0,) * len(model.eps))
        plain = replace(one.train, model=model, seed=0)
        groups[one.stage, one.setting].add(plain)
    assert all(len(configs) == 1 for configs in groups.values())
    seeds = defaultdict(set)
    for one in cells:
        if one.arm == "standard":
            seeds[one.stage, one.setting].add(one.train.seed)
    for one in cells:
        if one.stage != "own rate":
            assert one.train.seed in seeds[one.stage, one.setting], "a run without a partner"


STANDARD = Ablation.at("smoke").arms()["standard"]


@pytest.mark.parametrize("name", STUDIES)
def test_a_report_of_everything_has_its_tables_and_figures(name, tmp_path):
    study = SMALL[name]
    found, _ = all_done(study)
    report = study.report(found)
    path = write_report(report, tmp_path)
    text = path.read_text()
    assert "nan" not in text
    assert study.question in text
    assert report.figures
    for figure in report.figures:
        assert (tmp_path / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
        assert f"({figure}.png)" in text


def test_a_report_takes_the_place_of_an_earlier_one(tmp_path):
    for lines in (("one",), ("two",)):
        path = write_report(Report("Title", lines, (), {}), tmp_path)
    assert path.read_text() == "# Title\n\ntwo\n"


@pytest.mark.parametrize("name", STUDIES)
def test_a_report_can_be_made_of_any_part_of_the_results(name):
    study = SMALL[name]
    found, cells = all_done(study)
    outcomes = list(found.outcomes.values())
    for count in (0, 1, len(outcomes) // 2):
        study.report(table(outcomes[:count])).markdown()
    lost = Outcome(key=outcomes[0].key, config="c0", status="diverged: a loss of nan | at step 3")
    text = study.report(table([lost, *outcomes[1:]])).markdown()
    assert "diverged: a loss of nan / at step 3" in text
    assert len(cells) == len(outcomes)


@pytest.mark.parametrize("name", STUDIES)
def test_a_report_is_made_of_the_file_alone(name, tmp_path):
    study = SMALL[name]
    found, _ = all_done(study)
    results = Results(tmp_path / "results.csv")
    for one in found.outcomes.values():
        results.append(one)
    assert study.report(results.read()).markdown() == study.report(found).markdown()


def test_the_ablation_sweeps_first_and_then_takes_the_standard_models_best_rate():
    study = LAPTOP["ablation"]
    sweep = study.cells(sizes_of(study), table([]))
    assert {one.stage for one in sweep} == {"sweep"}
    assert {one.train.seed for one in sweep} == {SWEEP_SEED}
    assert {one.arm for one in sweep} == {"standard", "block 4", "full"}
    assert study.cells(sizes_of(study), table([made(one) for one in sweep[:-1]])) == sweep
    full = study.cells(sizes_of(study), table([made(one) for one in sweep]))
    main = [one for one in full if one.stage == "main"]
    assert {one.train.optimizer.learning_rate for one in main} == {4e-3}
    assert {one.arm for one in main} == set(study.arms())
    counts = {arm: sum(one.arm == arm for one in main) for arm in study.arms()}
    assert all(counts[arm] == (5 if arm in study.compared else 3) for arm in counts)
    assert len(full) == len(study.foreseen(sizes_of(study)))


def test_a_single_rate_is_not_swept_and_no_report_says_that_it_was():
    study = STUDIES["ablation"].at("paper")
    cells = study.cells({"text": 1000}, table([]))
    assert cells == study.foreseen({"text": 1000})
    assert {(one.stage, one.train.optimizer.learning_rate) for one in cells} == {("main", 2.2e-3)}
    assert len(cells) == len(study.arms())
    report = study.report(table([outcome(one, 3.0) for one in cells]))
    assert any("have the rate of the recipe, not swept, 0.0022" in line for line in report.lines)
    assert not any(grid.title.startswith("Sweep") for grid in report.grids)
    assert "rates" not in report.figures
    assert row_of(report, "Loss by residual rule", "full")["less standard [95 %]"] == "+0.0000 (1 seed)"


def test_an_arm_that_likes_another_rate_is_trained_with_that_too():
    study = LAPTOP["ablation"]
    sweep = study.cells(sizes_of(study), table([]))
    best = {"standard": 2e-3, "block 4": 2e-3, "full": 16e-3}
    swept = [outcome(one, 3.0 + abs(one.train.optimizer.learning_rate - best[one.arm])) for one in sweep]
    own = [one for one in study.cells(sizes_of(study), table(swept)) if one.stage == "own rate"]
    assert {(one.arm, one.train.optimizer.learning_rate) for one in own} == {("full", 16e-3)}
    assert [one.train.seed for one in own] == list(study.seeds)


def test_a_rate_that_diverges_is_no_candidate_and_all_of_them_are_an_error():
    study = SMALL["ablation"]
    sweep = study.cells(sizes_of(study), table([]))
    lost = [Outcome(key=one.key, config="c0", status="diverged") for one in sweep]
    with pytest.raises(DataError, match="without a rate that works"):
        study.cells(sizes_of(study), table(lost))
    one_left = [made(sweep[0]), *lost[1:]]
    assert study.best_rate(table(one_left), "standard") == study.rates[0]
    assert study.best_rate(table(one_left), "full") is None
    assert any(one.stage == "main" for one in study.cells(sizes_of(study), table(one_left)))


def test_the_ablations_table_says_difference_interval_seeds_and_the_papers_number():
    study = LAPTOP["ablation"]
    found, _ = all_done(study)
    report = study.report(found)
    row = row_of(report, "Loss by residual rule", "full")
    gaps = [-0.03 + 0.001 * (math.sin(1000 * seed + 4) - math.sin(1000 * seed + 8)) for seed in range(5)]
    told = difference(dict(enumerate(gaps)), dict.fromkeys(range(5), 0.0))
    assert row["less standard [95 %]"] == told.told()
    assert row["seeds"] == "5"
    assert row["seeds that would show 0.02"] == str(told.needed)
    assert (row["paper"], row["paper less standard"]) == ("1.737", "-0.029")
    assert row_of(report, "Loss by residual rule", "delta")["paper"] == "-"
    assert any("each by itself: of 19, 0.95 are expected to miss" in line for line in report.lines)
    assert set(PAPER_LOSSES) <= set(study.arms())


def test_scaling_finds_the_laws_that_were_put_in_and_the_compute_that_they_save():
    study = LAPTOP["scaling"]
    cells = study.cells(sizes_of(study), table([]))
    outcomes = []
    for one in cells:
        flops = training_flops(one.train)
        saved = {"standard": 1.0, "block": 1.2, "full": 1.3}[one.arm] * (1 + 0.01 * one.train.seed)
        outcomes.append(outcome(one, 3 * (saved * flops / 1e12) ** -0.06, flops=flops))
    report = study.report(table(outcomes))
    row = row_of(report, "Compute that the standard model", "block")
    told = [float(cell.split()[0]) for name, cell in row.items() if name.startswith("at C")]
    assert told == [pytest.approx(1.2, abs=0.002)] * 3
    assert row_of(report, "Fits", "full")["alpha [95 %]"].startswith("0.0600")
    assert row_of(report, "Fits", "full")["runs"] == "15"


def test_sizes_are_on_one_dial_and_tokens_grow_with_parameters():
    sizes = [recipe for _, recipe in LAPTOP["scaling"].sizes]
    for recipe in sizes:
        shape = recipe.shape
        assert shape.width == 4 * shape.num_layers
        assert recipe.num_steps * recipe.tokens_per_step / shape.num_parameters == pytest.approx(10, rel=0.02)
    assert sizes[-1].shape.num_parameters > 10 * sizes[0].shape.num_parameters
    assert on_the_dial(8, tokens_per_parameter=1e-9, learning_rate=1e-3).num_steps == 1


@pytest.mark.parametrize("row", PAPER_TABLE_2.strip().splitlines(), ids=lambda row: row.split()[0])
def test_recipes_of_the_paper_are_its_table(row):
    size, tokens, layers, heads, width, rate, batch, *losses = row.split()
    name = f"paper-{size}m"
    recipe = paper_recipe(name)
    assert recipe.num_steps * recipe.tokens_per_step == pytest.approx(1e9 * float(tokens), rel=1e-4)
    assert recipe.optimizer.learning_rate == pytest.approx(1e-3 * float(rate))
    assert (recipe.batch_size, recipe.sequence_length) == (int(batch), 8192)
    shape = recipe.shape
    assert (shape.num_layers, shape.num_heads, shape.width) == (int(layers), int(heads), int(width))
    assert PAPER_SCALING[name] == tuple(map(float, losses))
    block = Scaling.at("paper").cells({"text": 1000}, table([]))
    (own,) = [one for one in block if one.setting == name and one.arm == "block"]
    assert own.train.model == presets.paper(name, vocab_size=1000)


def test_every_row_of_the_papers_table_has_a_recipe():
    names = [f"paper-{row.split()[0]}m" for row in PAPER_TABLE_2.strip().splitlines()]
    assert names == list(PAPER_RUNS) == list(PAPER_SCALING)


@pytest.mark.parametrize(
    ("scale", "shapes", "flops", "size"), [("laptop", 9, 4e12, 2.5e5), ("paper", 25, 6.5e19, 2.3e8)]
)
def test_shapes_of_a_grid_are_of_one_size_and_cost_the_same(scale, shapes, flops, size):
    study = ShapeGrid.at(scale)
    cells = study.cells(sizes_of(study), table([]))
    assert len(cells) == 2 * shapes * len(study.seeds)
    for one in cells:
        if one.arm == "standard":
            assert training_flops(one.train) == pytest.approx(flops, rel=0.005)
    for width in study.widths_per_layer:
        for heads in study.heads_per_layer:
            shape = shaped(study.num_parameters, width, heads)
            assert shape.num_parameters == pytest.approx(size, rel=0.3)
            assert shape.width / shape.num_layers == pytest.approx(width, rel=0.1)
            assert shape.num_heads * shape.head_width == pytest.approx(shape.width, rel=0.15)


def test_the_best_shape_is_told_once_the_whole_grid_is_there():
    study = SMALL["shape"]
    cells = study.cells(sizes_of(study), table([]))
    outcomes = [outcome(one, 3.0 if "D/L 8" in one.setting else 4.0) for one in cells]
    assert "Best shape of full: D / L = 8, H / L = 0.5." in study.report(table(outcomes)).lines
    assert not any("Best" in line for line in study.report(table(outcomes[:-1])).lines if "full" in line)


def test_dynamics_tell_growth_and_unevenness_over_depth():
    study = SMALL["dynamics"]
    found, _ = all_done(study)
    (grid,) = [grid for grid in study.report(found).grids if grid.title.startswith("Over depth")]
    told = {row[:2]: row[2:] for row in grid.rows}
    standard, block = told["4", "gradient magnitude, largest over smallest"]
    assert standard.startswith("3.000")
    assert block.startswith("1.000")
    assert told["0", "output magnitude, last layer over first"][0].startswith("2.99")
    assert TrainingDynamics.at("paper").seeds == (0,)


def test_answers_stand_beside_chance_and_held_out_hops_are_marked():
    study = SMALL["depth-retrieval"]
    found, cells = all_done(study)
    assert {one.text for one in cells} == {"binding", "recall"}
    report = study.report(found)
    assert [grid.title for grid in report.grids] == [
        "Share of right answers, binding; chance 0.5",
        "Share of right answers, recall; chance 0.125",
    ]
    assert [row[0] for row in report.grids[0].rows] == ["1", "2", "3, held out"]
    gap = row_of(report, "Share of right answers, binding", "2")["full less standard [95 %]"]
    assert float(gap.split()[0]) == pytest.approx(0.15, abs=0.003)
    assert all(one.train.sequence_length == study.documents.document_length for one in cells)
    with pytest.raises(ConfigError, match="paper"):
        DepthRetrieval.at("paper")


def test_pruning_tells_what_layers_cost_beside_the_standard_model():
    study = SMALL["pruning"]
    found, _ = all_done(study)
    row = row_of(study.report(found), "Rise of the loss without the last", "2")
    assert float(row["full less standard [95 %]"].split()[0]) == pytest.approx(0.06, abs=0.003)
    row = row_of(study.report(found), "Rise of the loss without the least useful", "2")
    assert abs(float(row["full less standard [95 %]"].split()[0])) < 0.01
    assert Pruning.at("laptop").measure.counts == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("name", STUDIES)
def test_more_seeds_add_runs_and_change_none(name):
    study = SMALL[name]
    few, many = (all_done(study.with_seeds(number))[1] for number in (1, 2))
    assert set(few) < set(many)
    with pytest.raises(ConfigError, match="0 seeds"):
        study.with_seeds(0)


def test_a_difference_needs_partners_and_an_interval_two_of_them():
    assert difference({0: 1.0}, {1: 1.0}).told() == "-"
    assert difference({0: 1.0}, {0: 1.5}).told() == "-0.5000 (1 seed)"
    alike = difference({0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.5})
    assert (alike.needed, alike.interval.low) == (None, 0.5)
    assert unfinished(table([])) == ()


def test_every_scale_has_a_price_and_the_papers_is_more_than_anybody_has_here():
    for name, study in STUDIES.items():
        for scale in SCALES:
            if (name, scale) != ("depth-retrieval", "paper"):
                assert foreseen_cost(study.at(scale)).num_runs > 0
    paper, laptop = (foreseen_cost(Scaling.at(scale)) for scale in ("paper", "laptop"))
    assert paper.flops > 1e6 * laptop.flops


def test_operations_are_counted_for_matrices_reads_and_attention():
    (one, *_) = SMALL["scaling"].cells({"text": 100}, table([]))
    shape, tokens = SMALL["scaling"].sizes[0][1].shape, one.train.num_steps * one.train.tokens_per_step
    assert one.arm == "standard"
    attention = 3 * 2 * 16 * (48 + 1)  # of 3 layers with heads of 16 in all, over half of 48 tokens
    assert training_flops(one.train) == 3 * tokens * (2 * (shape.num_parameters + 100 * 16) + attention)
