"""What a model predicts on items: answers, verdicts and surprisal, and remarks as surprising as a wrong claim."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attention_residuals.contradiction.passes import Passed, by_item
from attention_residuals.data.synthetic import VERDICTS, Item, step_tokenizer

__all__ = ["predictions", "remark_texts"]


def predictions(both: list[Passed], items: Sequence[Item], ids: Tensor) -> dict[str, Tensor]:
    """Measures what the model predicts: [items, u, p]."""
    places = items[0].places
    fine, conflict = (int(step_tokenizer().encode(word)[0]) for word in VERDICTS)
    right = torch.tensor([item.answers for item in items])
    claimed = torch.tensor([item.claimed_answers for item in items])
    found: dict[str, list[Tensor]] = {
        name: [] for name in ("surprisal", "answer", "verdict", "right", "misled")
    }
    for planted, one in enumerate(both):
        logits = by_item(one.logits.double().cpu())  # [items, u, T, V]
        plant, answer, check = (logits[:, :, places[place] - back] for place, back in
                                (("plant", 1), ("answer", 0), ("check", 0)))  # fmt: skip
        token = ids[:, :, planted, places["plant"], None]
        found["surprisal"].append(-plant.log_softmax(-1).gather(-1, token).squeeze(-1))
        wrong = claimed.flip(1)  # what the planted value that is not u would imply
        of = [answer.gather(-1, one[..., None]).squeeze(-1) for one in (right, wrong)]
        found["answer"].append(of[0] - of[1])
        found["verdict"].append(check[..., conflict] - check[..., fine])
        best = answer.argmax(-1)
        found["right"].append((best == right).double())
        found["misled"].append(((best == claimed[:, [planted]]) & (best != right)).double())
    return {name: torch.stack(parts, 2) for name, parts in found.items()}


def remark_texts(both: list[Passed], items: Sequence[Item]) -> tuple[list[Tensor], Tensor]:
    """Chooses for each item and u a common remark and one that is rarer by what a wrong claim is.

    Returns:
        The texts with common remarks and those with rare ones, [items, u, T] each, and how surprising both are.
    """
    places = items[0].places
    logits = [by_item(one.logits.double().cpu()) for one in both]
    rare = torch.from_numpy(np.stack([item.rare for item in items]))  # [items, u, remark, T]
    words = rare[..., places["remark"]]
    costs = torch.stack(
        [-logits[u][:, u, places["remark"] - 1].log_softmax(-1).gather(-1, words[:, u]) for u in range(2)],
        1,
    )
    claims = torch.stack(
        [
            -logits[p][:, u, places["plant"] - 1]
            .log_softmax(-1)
            .gather(-1, _planted(items, u, p))
            .squeeze(-1)
            for u in range(2)
            for p in (u, 1 - u)
        ],
        1,
    ).reshape(-1, 2, 2)
    wanted = claims[..., 1] - claims[..., 0]
    common = costs.argmin(-1)
    extra = costs - costs.amin(-1, keepdim=True)
    # Where a wrong claim is no more surprising, the rare remark is still another one than the common one.
    apart = (extra - wanted[..., None]).abs().scatter(-1, common[..., None], torch.inf)
    chosen = torch.stack([common, apart.argmin(-1)], -1)
    texts = rare.gather(2, chosen[..., None].expand(-1, -1, -1, rare.shape[-1]))
    return [texts[:, :, kind] for kind in range(2)], costs.gather(-1, chosen)


def _planted(items: Sequence[Item], u: int, p: int) -> Tensor:
    return torch.tensor([[int(item.ids[u, p, item.places["plant"]])] for item in items])
