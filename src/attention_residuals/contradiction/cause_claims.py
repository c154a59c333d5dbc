"""What may be said of causes: patches, pairs of routes, other weights, and which readable number ranks routes."""

from collections.abc import Mapping, Sequence
from typing import Any

from attention_residuals.contradiction.causal import DIRECTIONS, METRICS
from attention_residuals.contradiction.claims import Claim, away_p

__all__ = ["cause_claims"]

Result = Mapping[str, Any]

PATCHES = ("weights", "values", "both")

LARGEST_RANK_P = 0.1
"""Of the preregistered rank among random routes; with 10 of them the smallest is 1/11."""

MORE = "does more than they do"

GIVING = {
    "repair": "Giving the contradictory text the consistent one's",
    "break": "Giving the consistent text the contradictory one's",
}
"""By direction."""


def cause_claims(passing: Result) -> tuple[Claim, ...]:
    """Makes the sentences about causes.

    Args:
        passing: By seed, what confirm.json holds of the models that pass the gate; one or more.
    """
    return (*_patches(passing), *_pairs(passing), *_exclusive(passing), *_readable(passing))


def _patches(passing: Result) -> list[Claim]:
    return [_patch(passing, direction, metric) for direction in DIRECTIONS for metric in METRICS]


def _patch(passing: Result, direction: str, metric: str) -> Claim:
    told, words = [], set()
    for seed, one in passing.items():
        found = one["causes"][direction]
        word = _against_random(found["random"][metric])
        words.add(word)
        shares = ", ".join(f"{patch} {_share(found[patch][metric])}" for patch in PATCHES)
        told.append(f"seed {seed} {word} ({_ranked(found['random'][metric])}); share restored: {shares}")
    every = f"More with every seed, as was asked for: {'yes' if words == {MORE} else 'no'}"
    return Claim(
        f"{GIVING[direction]} weights on the preregistered routes, for the {metric}, against random routes of the "
        f"same mass: {'; '.join(told)}. {every}.",
        f"rank among random routes, p <= {LARGEST_RANK_P:g}: towards the other text as preregistered, the other way "
        "as seen afterwards; shares of the difference between the texts with Fieller's interval over items",
        f"confirm.json: seeds.*.causes.{direction}",
        "causes",
    )


def _against_random(found: Result) -> str:
    """Says what one model's chosen routes do; movement is towards the other text's number."""
    if found["chosen"] > 0 and found["p"] <= LARGEST_RANK_P:
        return MORE
    if found["chosen"] < 0 and away_p(found) <= LARGEST_RANK_P:
        return "moves it the other way, farther than they do"
    return "does not do more than they do"


def _ranked(found: Result) -> str:
    chosen, random = found["chosen"], found["random"]
    return (
        f"{chosen:+.3f} logits towards the other text, {len(random)} random ones {min(random):+.3f} to "
        f"{max(random):+.3f}, p {found['p']:.2g} towards and {away_p(found):.2g} the other way"
    )


def _share(found: Result) -> str:
    share = found["share"]
    if share["estimate"] is None:
        return "none (the texts do not differ for sure)"
    return f"{share['estimate']:+.0%} [{share['low']:+.0%}, {share['high']:+.0%}]"


def _readable(passing: Result) -> list[Claim]:
    told = []
    for seed, one in passing.items():
        found = one["causes"]["agreement"]["correlations"]
        parts = [f"{name} {_correlation(value)}" for name, value in found.items()]
        told.append(f"seed {seed}: {', '.join(parts)}")
    return [
        Claim(
            "How readable numbers rank routes as patching their weights does (Spearman, all routes): "
            f"{'; '.join(told)}.",
            "rank correlation, bootstrap over routes",
            "confirm.json: seeds.*.causes.agreement",
            "causes",
        )
    ]


def _correlation(found: Result) -> str:
    if found["correlation"] is None:
        return "undefined"
    return f"{found['correlation']:+.2f} [{found['low']:+.2f}, {found['high']:+.2f}]"


def _pairs(passing: Result) -> list[Claim]:
    """Of models with two routes or more: whether pairs do what the sum of both does."""
    found = {
        seed: one["causes"]["interactions"]
        for seed, one in passing.items()
        if "interactions" in one["causes"]
    }
    if not found:
        return []
    told, clear = [], []
    for seed, pairs in found.items():
        ways = [pair["beyond"]["estimate"] > 0 for pair in pairs if pair["family_p"] <= 0.05]
        clear += ways
        told.append(
            f"seed {seed}: {sum(ways)} more and {len(ways) - sum(ways)} less than the sum, of {len(pairs)} tests; "
            f"{_largest(max(pairs, key=lambda pair: abs(pair['beyond']['estimate'])))}"
        )
    start = (
        "Some pairs of preregistered routes do not do what the sum of both alone does, so no route is judged by its "
        "own patch alone"
        if clear
        else "No pair of preregistered routes is seen to do more or less than the sum of both alone"
    )
    return [
        Claim(
            f"{start} (weights, both directions, logits of the answer towards the other text's): "
            f"{'; '.join(told)}.",
            "sign flips of templates, max-T over all pairs in both directions, p <= 0.05",
            "confirm.json: seeds.*.causes.interactions",
            "causes",
        )
    ]


def _largest(pair: Result) -> str:
    beyond = pair["beyond"]
    return (
        f"the largest is {pair['first']} with {pair['second']} ({pair['direction']}), {beyond['estimate']:+.4f} "
        f"[{beyond['low']:+.4f}, {beyond['high']:+.4f}] beyond the sum, p {pair['family_p']:.2g}: "
        f"{pair['first_alone']:+.4f} and {pair['second_alone']:+.4f} alone, {pair['together']:+.4f} together"
    )


def _exclusive(passing: Result) -> list[Claim]:
    """How far weights can move at a fixed cost, beside how far the contradiction moves them."""
    told, all_beyond = [], True
    for seed, one in passing.items():
        reads = one["causes"]["exclusivity"]["reads"]
        by_read = [read["moved"] for read in reads]
        beyond = sum(read["moved_same"] > read["pair"] for read in reads)
        all_beyond &= beyond == len(reads)
        told.append(
            f"seed {seed}: {_mean(reads, 'moved'):.1%} of the weight (from {min(by_read):.1%} to {max(by_read):.1%} "
            f"by read; {_mean(reads, 'farthest'):.1%} is the farthest possible), where the contradiction moves "
            f"{_mean(reads, 'pair'):.1%}; {_mean(reads, 'same_answers'):.1%} of first answers stay, and {beyond} of "
            f"{len(reads)} reads move farther than that without another one"
        )
    bound = next(iter(passing.values()))["causes"]["exclusivity"]["bound"]
    start = (
        "Weights of single reads can move farther than the contradiction moves them without another first answer, so "
        "they do not explain the answer by themselves"
        if all_beyond
        else "For some reads no weights were found that are farther from the model's own than the contradiction moves "
        "them and leave the first answer as it is"
    )
    return [
        Claim(
            f"{start}. Found at a KL of {bound:g} nats at the answer, read by read, so at least so far: "
            f"{'; '.join(told)}.",
            f"exclusivity search (Jain and Wallace), mean KL <= {bound:g} nats; described, not tested",
            "confirm.json: seeds.*.causes.exclusivity",
            "causes",
        )
    ]


def _mean(reads: Sequence[Result], name: str) -> float:
    return float(sum(read[name] for read in reads) / len(reads))
