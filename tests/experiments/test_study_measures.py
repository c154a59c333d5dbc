"""What is measured of a trained run, each by a second way."""

import shutil
from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from experiments.made_up import VOCABULARY, cell, small_corpus

from attention_residuals.data import Batch, sequential
from attention_residuals.data.batches import UNSCORED
from attention_residuals.data.synthetic.binding import BindingItems
from attention_residuals.errors import ConfigError
from attention_residuals.experiments import measures as module
from attention_residuals.experiments import removal
from attention_residuals.experiments.cell import Finished
from attention_residuals.experiments.measures import Answers, Dynamics, FinalLoss, Removal
from attention_residuals.experiments.recipes import SMOKE
from attention_residuals.experiments.removal import Without, loss_without
from attention_residuals.layers.residual import AttnRes, Delta, DenseFormer, SlidingWindow, StandardResidual
from attention_residuals.models import Decoder, LanguageModel
from attention_residuals.stats import gradient_magnitude
from attention_residuals.train import train
from attention_residuals.train.evaluation import document_mask
from attention_residuals.train.trainer import initial_model

LAYERS = 4
TOKENS = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))
RULES = [StandardResidual(), *(AttnRes(sublayers_per_block=size) for size in (1, 2, 3, 8))]


def model_of(rule, layers=LAYERS):
    shape = replace(SMOKE.shape, num_layers=layers)
    model = Decoder(shape.model(VOCABULARY, 48, rule)).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.residual.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    for parameter in model.layers.parameters():
        parameter.mul_(5.0 if parameter.ndim == 2 else 1.0)  # layers that do something, by which they differ
    return model


def logits(model, tap=None):
    return model(TOKENS, tap=tap)


# A block is no longer than the shorter model.
SHORTER = [
    (rule, left)
    for rule in RULES
    for left in (1, 2, 3)
    if not isinstance(rule, AttnRes) or rule.sublayers_per_block <= 2 * left
]


@pytest.mark.parametrize(("rule", "left"), SHORTER, ids=str)
def test_a_model_without_its_last_layers_is_the_shorter_model(rule, left):
    whole, short = model_of(rule), model_of(rule, left)
    own = whole.state_dict()
    short.load_state_dict({name: own[name] for name in short.state_dict()})
    removed = Without(range(left, LAYERS))
    assert_close(logits(whole, removed), logits(short))
    assert (logits(whole, removed) - logits(whole)).abs().max() > 1e-3


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_full_model_without_a_layer_is_the_model_of_the_others(layer):
    whole, short = (
        model_of(AttnRes(sublayers_per_block=1)),
        model_of(AttnRes(sublayers_per_block=1), LAYERS - 1),
    )
    kept = [number for number in range(LAYERS) if number != layer]
    own, renamed = whole.state_dict(), {}
    for name in short.state_dict():
        old = name
        for new, number in enumerate(kept):
            for form in (f"layers.{new}.", f"L{new}_", f"readers.{new}."):
                if form in name:
                    old = name.replace(form, form.replace(str(new), str(number)))
        renamed[name] = own[old]
    short.load_state_dict(renamed)
    assert_close(logits(whole, Without([layer])), logits(short))


def test_removing_nothing_changes_nothing_and_the_loss_is_that_of_the_logits():
    model = model_of(RULES[2])
    batch = Batch(TOKENS[:, :-1], TOKENS[:, 1:], torch.ones_like(TOKENS[:, 1:]))
    expected = torch.nn.functional.cross_entropy(
        model(batch.tokens_BT).float().flatten(0, 1), batch.targets_BT.flatten()
    )
    assert loss_without(model, batch, []) == pytest.approx(expected.item(), rel=1e-6)


def test_targets_that_are_not_scored_are_not_in_the_loss():
    model, targets = model_of(RULES[2]), TOKENS[:, 1:].clone()
    targets[:, ::2] = UNSCORED
    batch = Batch(TOKENS[:, :-1], targets, torch.ones_like(targets))
    logits = model(batch.tokens_BT).float()[:, 1::2].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, targets[:, 1::2].flatten())
    assert loss_without(model, batch, []) == pytest.approx(expected.item(), rel=1e-6)


def test_only_rules_for_which_a_missing_layer_has_one_meaning_are_pruned():
    batch = Batch(TOKENS[:, :-1], TOKENS[:, 1:], torch.ones_like(TOKENS[:, 1:]))
    for rule in (DenseFormer(), Delta(sublayers_per_block=2), SlidingWindow(sublayers_per_block=2)):
        with pytest.raises(ConfigError, match=type(rule).__name__):
            loss_without(model_of(rule), batch, [1])
    with pytest.raises(ConfigError, match="layers from 0 to 3"):
        loss_without(model_of(RULES[0]), batch, [4])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("texts") / "corpus")


@pytest.fixture
def finished(tmp_path, corpus):
    def call(measure, **changes):
        one = cell(measure=measure, **changes)
        folder = tmp_path / one.name
        train(one.train, corpus, folder, saving=measure.saving(one.train.num_steps), progress=False)
        return Finished(folder, one.train, corpus)

    return call


def test_the_final_loss_measures_nothing_more(finished):
    assert list(FinalLoss().numbers(finished(FinalLoss()))) == []


def test_dynamics_are_measured_at_the_start_and_at_every_point(finished, corpus):
    measure = Dynamics(points=2, num_windows=3)
    run = finished(measure)
    found = list(measure.numbers(run))
    assert {number.step for number in found} == {0, 2, 4}
    assert len(found) == 3 * 2 * SMOKE.shape.num_layers
    scored = corpus.valid_scored
    batch = next(sequential(corpus.valid, sequence_length=48, batch_size=3, scored=scored))
    untrained = initial_model(run.config)
    state = {name: value.clone() for name, value in untrained.state_dict().items()}
    mask = document_mask(batch.documents_BT)
    sizes = [n.value for n in found if (n.quantity, n.step) == ("gradient magnitude", 0)]
    assert sizes == list(gradient_magnitude(untrained, batch.tokens_BT, batch.targets_BT, mask))
    assert all(torch.equal(value, state[name]) for name, value in untrained.state_dict().items())


@pytest.mark.parametrize("measure", [Dynamics(points=1, num_windows=5), Removal(counts=(1,), num_windows=5)])
def test_what_is_measured_in_parts_is_what_is_measured_at_once(finished, monkeypatch, measure):
    """Windows of a study of the paper's size do not fit into memory together."""
    run = finished(measure)
    at_once = list(measure.numbers(run))
    monkeypatch.setattr(removal, "TOKENS_AT_ONCE", 2 * run.config.sequence_length)
    in_parts = list(measure.numbers(run))
    assert [number.value for number in in_parts] == pytest.approx([n.value for n in at_once], rel=1e-5)
    assert [n.value for n in in_parts] != [n.value for n in at_once]  # it was in parts


def test_a_checkpoint_where_a_run_was_interrupted_is_no_point(finished):
    measure = Dynamics(points=2, num_windows=2)
    run = finished(measure)
    before = list(measure.numbers(run))
    saved = run.folder / "checkpoints"
    shutil.copytree(saved / "step-00000002", saved / "step-00000003")
    assert list(measure.numbers(run)) == before


def test_before_training_gradients_of_block_are_those_of_the_standard_model(finished):
    """With queries of zero, both are the same function of every output, up to the eps of norms."""
    measure = Dynamics(points=1, num_windows=2)
    found = {}
    for arm in ("standard", "block"):
        numbers = measure.numbers(finished(measure, arm=arm))
        found[arm] = [n.value for n in numbers if (n.quantity, n.step) == ("gradient magnitude", 0)]
    assert found["block"] == pytest.approx(found["standard"], rel=0.05)


def test_output_magnitude_of_a_standard_model_is_that_of_its_stream(finished, corpus):
    measure = Dynamics(points=1, num_windows=2)
    run = finished(measure, arm="standard")
    found = {
        n.place: n.value for n in measure.numbers(run) if n.quantity == "output magnitude" and n.step == 0
    }
    model = initial_model(run.config)
    batch = next(sequential(corpus.valid, sequence_length=48, batch_size=2, scored=corpus.valid_scored))
    streams = []

    class Streams(Without):
        def read(self, read):
            if not str(read.site).endswith("mlp"):
                streams.append(read.sources[-1])
            return read

    model(batch.tokens_BT, mask=document_mask(batch.documents_BT), tap=Streams([]))
    real = batch.tokens_BT != 0
    for layer, stream in enumerate(streams[1:]):
        assert found[layer] == pytest.approx(stream[real].square().mean().sqrt().item(), rel=1e-5)


def test_gradient_magnitudes_are_those_of_finite_differences():
    model = model_of(AttnRes(sublayers_per_block=2), 2)
    model.requires_grad_(True)
    tokens, targets = TOKENS[:1, :2], TOKENS[:1, 1:3]
    found = gradient_magnitude(model, tokens, targets)
    assert all(parameter.grad is None for parameter in model.parameters())

    class Nudge(Without):
        def __init__(self, writer, place, size):
            super().__init__([])
            self.writer, self.place, self.size = writer, place, size

        def write(self, write):
            if write.writer != self.writer:
                return write
            output = write.output.clone()
            output.view(-1)[self.place] += self.size
            return write._replace(output=output)

    def loss(tap):
        with torch.no_grad():
            out = model(tokens, tap=tap).flatten(0, 1)
            return torch.nn.functional.cross_entropy(out, targets.flatten()).item()

    for layer in range(2):
        squares = []
        for place in range(tokens.numel() * SMOKE.shape.width):
            high, low = (loss(Nudge(f"L{layer}.mlp", place, size)) for size in (1e-5, -1e-5))
            squares.append(((high - low) / 2e-5) ** 2)
        assert found[layer] == pytest.approx((sum(squares) / len(squares)) ** 0.5, rel=1e-3)


def test_layers_are_chosen_on_other_windows_than_they_are_measured_on(finished, monkeypatch):
    measure = Removal(counts=(1, 2), num_windows=2)
    run, seen = finished(measure), []

    def loss(model, batch, layers, *, cross_documents):
        seen.append((tuple(layers), batch.tokens_BT))
        return {(): 1.0, (0,): 4.0, (1,): 2.0, (2,): 3.0}.get(tuple(layers), 9.0)

    monkeypatch.setattr(module, "loss_without", loss)
    found = [(n.quantity, n.place, n.value) for n in measure.numbers(run)]
    chosen_on = {id(tokens) for _, tokens in seen[:3]}
    measured_on = {id(tokens) for _, tokens in seen[3:]}
    assert not chosen_on & measured_on
    assert not torch.equal(seen[0][1], seen[3][1])
    assert ("loss whole", None, 1.0) in found
    assert [layers for layers, _ in seen[7:]] == [(2,), (1,), (1, 2), (1, 2)]
    assert ("loss without least useful", 1, 2.0) in found
    assert ("loss without last", 1, 3.0) in found


def test_answers_are_counted_against_who_knows_them_and_who_does_not(monkeypatch, finished):
    items = BindingItems(num_chains=2, chain_length=2, num_values=4)
    measure = Answers(items=items, hops=(1, 2), number=60)

    class Knows(LanguageModel):
        def __init__(self, right):
            super().__init__()
            self.right = right

        def forward(self, tokens, *, num_logits):
            assert num_logits == 1
            out = torch.zeros(len(tokens), 1, 60)
            for row, ids in enumerate(tokens.tolist()):
                item = next(i for h in (1, 2) for n in range(60) if (i := items.item(h, n)).ids == tuple(ids))
                others = [one for one in item.candidates if one != item.answer]
                out[row, 0, item.answer if self.right else others[0]] = 5.0
                out[row, 0, 59] = 9.0  # a word that is no candidate is not taken for an answer
            return out

        def unembed(self, state):
            return state

    run = finished(measure)
    for right in (True, False):
        monkeypatch.setattr(module, "load_checkpoint_model", lambda folder, right=right: Knows(right))
        found = {(n.quantity, n.place): n.value for n in measure.numbers(run)}
        assert found["accuracy", 1] == found["accuracy", 2] == float(right)
        assert found["chance", None] == 0.5
        assert found["answer loss", 1] > 0


def test_a_measure_out_of_range_is_refused(finished):
    for make in (
        lambda: Dynamics(points=0),
        lambda: Removal(counts=()),
        lambda: Removal(counts=(0,)),
        lambda: Answers(items=BindingItems(), hops=(1,), number=0),
    ):
        with pytest.raises(ConfigError):
            make()
    measure = Dynamics(points=1, num_windows=100_000)
    with pytest.raises(ConfigError, match="windows of validation text"):
        list(measure.numbers(finished(measure)))
