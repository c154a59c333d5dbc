"""What an edit reaches, and what its receipt says."""

from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from edited import (
    TOKENS,
    Looker,
    every_edit,
    every_read_edit,
    look,
    model_of,
    references,
)

from attention_residuals.layers.tap import Chain
from attention_residuals.trace import (
    Force,
    Intervention,
    RemoveWriter,
    ReplaceQuery,
    Skip,
    Zero,
    ZeroWrite,
    control,
    intervene,
)


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
