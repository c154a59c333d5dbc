"""A model whose output must read one known source: every measure and every tool finds that source."""

import pytest
import torch
from edited import OTHER, TOKENS, Looker, model_of

from attention_residuals.errors import NoChangeError
from attention_residuals.stats import (
    key_split,
    l1_proximity,
    norm_shares,
    normalised_entropy,
    projection_shares,
    writer_weights,
)
from attention_residuals.trace import (
    Drop,
    Force,
    Mean,
    Patch,
    PatchWeights,
    RemoveWriter,
    Resample,
    ScaleQuery,
    Shuffle,
    Static,
    Temperature,
    Zero,
    control,
    dataset_mean,
    divergence,
    edge_estimates,
    every_edge,
    freedom,
    intervene,
    record,
    reference_of,
    sweep,
)

# Not Mean routed anew: the query is the mean direction of its source, whose mean is read all the more.
EDGES = {
    "drop": lambda source: Drop(sites="output", sources=source),
    "zero": lambda source: Zero(sites="output", sources=source),
    "mean": lambda source: Mean(sites="output", sources=source),
    "resample": lambda source: Resample(sites="output", sources=source),
    "resample, routed anew": lambda source: Resample(sites="output", sources=source, reroute=True),
    "patch": lambda source: Patch(sites="output", sources=source),
    "patch, routed anew": lambda source: Patch(sites="output", sources=source, reroute=True),
    "remove": lambda source: RemoveWriter(sites="output", writer=source),
    "remove, routed anew": lambda source: RemoveWriter(sites="output", writer=source, reroute=True),
}
WEIGHTS = {
    "uniform": Force,
    "shuffle": Shuffle,
    "static": Static,
    "patched weights": PatchWeights,
    "temperature": lambda sites: Temperature(sites=sites, temperature=40.0),
    "scaled query": lambda sites: ScaleQuery(sites=sites, factor=0.02),
}


def planted_model(planted):
    """All sites read evenly, but the output, whose query is a direction of one source and of no other."""
    model, clean = model_of("full", fresh=True), Looker()
    for reader in model.residual.readers.values():
        reader.pseudo_query.zero_()
    model(TOKENS, tap=clean)
    keys = [value / value.norm(dim=-1, keepdim=True) for value in clean.reads["output.in"].values]
    mean = torch.stack(keys).flatten(1, 2).mean(1)
    others = mean[[n for n in range(len(mean)) if n != planted]]
    query = mean[planted] - others.T @ torch.linalg.lstsq(others.T, mean[planted, :, None]).solution[:, 0]
    model.residual.readers["output"].pseudo_query.copy_(40 * query / query.norm())
    return model


@pytest.fixture(scope="module", params=[0, 2, 4])
def planted(request):
    model = planted_model(request.param)
    run = reference_of(model, OTHER)
    references = {"paired": run, "other": run, "mean": dataset_mean(model, [TOKENS, OTHER])}
    return request.param, model, references, record(model, TOKENS, keep="values")


def effect(model, edit, references):
    """How far the predictions move, on average, in nats."""
    edited = intervene(model, TOKENS, [edit], references=references).logits
    return divergence(control(model, TOKENS, [edit]), edited).values.mean().item()


def test_every_measure_finds_it(planted):
    number, model, _, trace = planted
    read = trace["output"]
    measures = {
        "weight": read.weights,
        "norm share": norm_shares(trace, "output"),
        "projection share": projection_shares(trace, "output"),
        "nearness": l1_proximity(trace, "output"),
        "writer weight": writer_weights(read),
        "score": key_split(trace, "output", model).by_writer.sum(1),
    }
    assert {
        name: found.flatten(1).nanmean(1).argmax().item() for name, found in measures.items()
    } == dict.fromkeys(measures, number)
    entropy = {site.name: normalised_entropy(trace, site.name).nanmean().item() for site in trace.sites[1:]}
    assert entropy.pop("output") < 0.5
    assert min(entropy.values()) == pytest.approx(1)


@pytest.mark.parametrize("verb", EDGES)
def test_every_edit_of_a_source_hurts_most_there(planted, verb):
    number, model, references, trace = planted
    effects = []
    for name in trace["output"].source_names:
        try:
            effects.append(effect(model, EDGES[verb](name), references))
        except NoChangeError:
            effects.append(0.0)
    assert max(range(len(effects)), key=effects.__getitem__) == number
    assert effects[number] > 1.2 * sorted(effects)[-2]


@pytest.mark.parametrize("verb", WEIGHTS)
def test_every_edit_of_weights_acts_there_and_nowhere_else(planted, verb):
    _, model, references, trace = planted
    assert effect(model, WEIGHTS[verb](sites="output"), references) > 0.05
    for site in trace.sites[1:-1]:
        with pytest.raises(NoChangeError):
            intervene(model, TOKENS, [WEIGHTS[verb](sites=site.name)], references=references)


def test_sweeps_and_estimates_find_it(planted):
    number, model, _, trace = planted
    name = trace["output"].source_names[number]
    edges = [edit for edit in every_edge(model) if edit[0].sites == "output"]
    worst = max(sweep(model, TOKENS, edges, progress=False), key=lambda swept: swept.divergence)
    assert worst.edits[0]["sources"] == name
    estimates = {one.source: one.loss for one in edge_estimates(model, TOKENS) if one.site == "output"}
    assert all(loss.isfinite().all() for loss in estimates.values())
    assert max(estimates, key=lambda source: estimates[source].abs().sum().item()) == name


def test_its_weights_are_pinned_down_more_than_those_of_a_site_that_reads_evenly(planted):
    _, model, _, _ = planted
    there, elsewhere = (freedom(model, TOKENS, site, num_steps=20) for site in ("output", "L1.attention"))
    assert there.total_variation < elsewhere.total_variation
