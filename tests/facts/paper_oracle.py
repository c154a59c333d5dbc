"""Equations 1 to 6 of the paper written out on lists, as the oracle of every wiring test.

Nothing here is shared with the package: no state, no norm module, no schedule of it.
"""

import torch


def rms_normalised(vector, eps=1e-6):
    return vector / (vector.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def attend(values, query, gain):
    scores = torch.stack([(rms_normalised(value) * gain * query).sum(-1) for value in values])
    weights = torch.softmax(scores, dim=0)
    return sum(weight[..., None] * value for weight, value in zip(weights, values, strict=True))


def states(embedding, functions, queries, gains, sublayers_per_block):
    """The states h_1 .. h_L and that of the output, each a mix of the value set of Eq. 6."""
    finished, members, mixed = [embedding], [], []
    for number, function in enumerate(functions):
        if members and len(members) == sublayers_per_block:
            finished.append(sum(members))
            members = []
        values = finished + ([sum(members)] if members else [])
        mixed.append(attend(values, queries[number], gains[number]))
        members.append(function(rms_normalised(mixed[-1])))
    values = finished + ([sum(members)] if members else [])
    mixed.append(attend(values, queries[-1], gains[-1]))
    return mixed
