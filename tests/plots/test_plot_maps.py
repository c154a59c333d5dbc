import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.cbook import is_math_text
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from attention_residuals.errors import ConfigError, NonFiniteError
from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.models import Decoder, presets
from attention_residuals.plots import png_bytes, routing_map, style, token_map
from attention_residuals.stats import Routing, average_routing
from attention_residuals.trace import record

TEXTS = (
    "The",
    " price",
    " of",
    " $5",
    " or",
    " $",
    "\n",
    "\t",
    "naïve",
    "中文",
    "\x07",
    "<b>",
    "a b" * 9,
    "^_{2}",
)


def traced(depth, residual=None, num_tokens=14, mask=None):
    torch.manual_seed(0)
    model = Decoder(presets.scaled(depth, vocab_size=300, residual=residual))
    for name, parameter in model.named_parameters():
        if name.endswith("pseudo_query"):
            torch.nn.init.normal_(parameter, std=0.3)
    return record(model, torch.randint(0, 300, (2, num_tokens)), mask=mask)


@pytest.fixture(scope="module")
def block():
    return dataclasses.replace(traced(4), token_texts=(TEXTS, TEXTS))


def both(trace):
    return {
        "attention sites": average_routing(trace, "attention"),
        "MLP sites": average_routing(trace, "mlp"),
    }


def drawn(panels):
    return routing_map(panels, title="Routing", footer="28 tokens, float32")


def by_token(trace, **changes):
    return token_map(
        trace, **({"row": 1, "sites": ["output"], "title": "Tokens", "footer": "float32"} | changes)
    )


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def key(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def outlined(axes):
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert all(to_hex(box.get_edgecolor()) == style.OPEN.lower() and not box.get_fill() for box in boxes)
    return sorted((round(box.get_center()[1]), round(box.get_center()[0])) for box in boxes)


def test_a_map_holds_the_weights_by_site_and_source_and_leaves_out_what_a_site_cannot_read(block):
    panels = both(block)
    figure = drawn(panels)
    for axes, (name, routing) in zip(figure.axes, panels.items(), strict=False):
        shown = axes.images[0].get_array()
        expected = routing.weights.numpy()
        assert axes.get_title(loc="left") == name
        assert (labels(axes.yaxis), labels(axes.xaxis)) == (list(routing.sites), list(routing.sources))
        assert np.array_equal(np.ma.getmaskarray(shown), np.isnan(expected))
        assert np.array_equal(shown.filled(np.nan), expected, equal_nan=True)
    assert [text.get_text() for text in figure.texts] == ["Routing", "28 tokens, float32"]


def test_what_cannot_be_read_looks_different_from_a_weight_of_0(block):
    figure = drawn(both(block))
    picture = figure.axes[0].images[0]
    assert picture.cmap.get_bad()[3] == 0
    assert figure.axes[0].patch.get_hatch() == "////"
    assert to_hex(picture.cmap(0.0)) != "#ffffff"
    assert "not a source here" in key(figure)


@pytest.mark.parametrize("residual", [None, AttnRes(sublayers_per_block=1)])
def test_all_panels_have_the_one_scale_from_0_to_1(residual):
    figure = drawn(both(traced(4, residual)))
    assert len(figure.axes) == 3
    assert {(axes.images[0].norm.vmin, axes.images[0].norm.vmax) for axes in figure.axes} == {(0, 1)}
    assert len({axes.images[0].cmap.name for axes in figure.axes}) == 1


def test_exactly_the_open_blocks_are_outlined_and_the_key_says_what_that_means(block):
    panels = both(block)
    figure = drawn(panels)
    for axes, routing in zip(figure.axes, panels.values(), strict=False):
        assert outlined(axes) == [tuple(place) for place in routing.is_open.nonzero().tolist()]
    assert outlined(figure.axes[1])
    assert "block still open when read" in key(figure)


def test_the_full_form_has_no_open_blocks_and_no_key_to_them():
    figure = drawn(both(traced(3, AttnRes(sublayers_per_block=1))))
    assert outlined(figure.axes[0]) == outlined(figure.axes[1]) == []
    assert key(figure) == ["not a source here"]


def test_the_output_read_alone_has_no_empty_cells_and_no_key():
    figure = drawn({"output": average_routing(traced(3, StandardResidual()), "output")})
    assert not figure.legends
    assert figure.axes[0].images[0].get_array().shape == (1, 1)


def test_small_maps_have_every_weight_written_in_and_large_ones_none(block):
    axes = drawn(both(block)).axes[0]
    weights = average_routing(block, "attention").weights
    written = {
        (round(text.get_position()[1]), round(text.get_position()[0])): text.get_text() for text in axes.texts
    }
    places = [tuple(place) for place in (~weights.isnan()).nonzero().tolist()]
    assert written == {place: f"{weights[place]:.2f}" for place in places}
    large = Routing(
        tuple("abc"), tuple(map(str, range(21))), torch.full((3, 21), 1 / 21), torch.zeros(3, 21).bool()
    )
    assert not drawn({"large": large}).axes[0].texts


def test_written_weights_can_be_read_on_their_colour():
    weights = torch.linspace(0, 1, 20)[None]
    routing = Routing(("output",), tuple(map(str, range(20))), weights, torch.zeros(1, 20).bool())
    for text, weight in zip(drawn({"a": routing}).axes[0].texts, weights[0].tolist(), strict=True):
        assert contrast(to_hex(text.get_color()), to_hex(style.WEIGHTS(weight))) > 3.9


def contrast(one, other):
    """The contrast ratio of WCAG 2: 1 is none, 21 is black on white."""

    def luminance(colour):
        parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_colours_of_weights_only_get_darker():
    shades = [contrast(to_hex(style.WEIGHTS(weight)), "#ffffff") for weight in np.linspace(0, 1, 50)]
    assert all(a < b for a, b in itertools.pairwise(shades))


def panels_of(name):
    if name == "three panels of a block model":
        trace = traced(8)
        return both(trace) | {"output": average_routing(trace, "output")}
    depth, residual = {
        "full, 20 layers": (20, AttnRes(sublayers_per_block=1)),
        "full, 8 layers": (8, AttnRes(sublayers_per_block=1)),
        "block, 8 layers": (8, None),
    }[name]
    return both(traced(depth, residual, num_tokens=3))


@pytest.mark.parametrize(
    "name", ["full, 20 layers", "full, 8 layers", "block, 8 layers", "three panels of a block model"]
)
def test_no_two_texts_of_a_map_overlap_and_none_is_cut(name):
    assert_readable(drawn(panels_of(name)))


def test_no_two_texts_of_a_map_of_tokens_overlap_and_none_is_cut(block):
    assert_readable(by_token(block, sites=["L1.mlp", "L2.attention", "output"]))


def assert_readable(figure):
    with style.applied():
        figure.draw_without_rendering()
    texts = list(figure.texts) + [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        texts += [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, *axes.texts]
        texts += [axes.title, axes._left_title]
    boxes = [text.get_window_extent().padded(-0.5) for text in texts if text.get_text()]
    width, height = figure.canvas.get_width_height()
    assert not [box for box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]
    assert not [one for one, other in itertools.combinations(boxes, 2) if one.overlaps(other)]


def test_wide_maps_stand_below_each_other_and_narrow_ones_side_by_side(block):
    first, second, _ = drawn(both(block)).axes
    assert first.get_subplotspec().rowspan == second.get_subplotspec().rowspan
    first, second, _ = drawn(both(traced(8, AttnRes(sublayers_per_block=1)))).axes
    assert first.get_subplotspec().colspan == second.get_subplotspec().colspan


@pytest.mark.parametrize("weights", [[-0.1, 1.1], [0.5, 1.5]])
def test_weights_that_the_scale_does_not_hold_are_refused(weights, block):
    routing = Routing(("output",), ("a", "b"), torch.tensor([weights]), torch.zeros(1, 2).bool())
    with pytest.raises(ConfigError, match="'signed'"):
        drawn({"signed": routing})


def test_weights_rounded_to_bfloat16_are_no_reason_to_refuse():
    routing = Routing(("output",), ("a",), torch.tensor([[1.002]]), torch.zeros(1, 1).bool())
    assert drawn({"a": routing}).axes[0].texts[0].get_text() == "1.00"


def test_a_site_that_read_nan_is_not_shown_as_one_that_reads_nothing(block):
    routing = average_routing(block, "mlp")
    routing.weights[2] = torch.nan
    with pytest.raises(NonFiniteError, match="'MLPs'"):
        drawn({"MLPs": routing})
    broken = dataclasses.replace(block.sites[-1], weights=block.sites[-1].weights.clone())
    broken.weights[:, 1, 3] = torch.nan
    with pytest.raises(NonFiniteError, match="'output'"):
        by_token(dataclasses.replace(block, sites=(broken,)))
    by_token(dataclasses.replace(block, sites=(broken,)), row=0)


def test_no_panels_are_refused():
    with pytest.raises(ConfigError, match="no panels"):
        drawn({})


def test_a_map_of_tokens_holds_the_weights_of_its_row_a_panel_for_each_site_in_the_order_asked_for(block):
    sites = ["output", "L2.attention", "L1.mlp"]
    figure = by_token(block, sites=sites)
    assert [axes.get_title(loc="left") for axes in figure.axes[:-1]] == sites
    for axes, site in zip(figure.axes, sites, strict=False):
        assert np.array_equal(axes.images[0].get_array(), block[site].weights[:, 1].numpy())
        assert (axes.images[0].norm.vmin, axes.images[0].norm.vmax) == (0, 1)
    assert labels(figure.axes[2].yaxis) == ["embedding", "B1", "B2 (open)"]
    assert figure.axes[2].get_xlabel() == f"tokens 0 to {len(TEXTS) - 1} of text 1"


def test_tokens_are_labels_with_visible_spaces_and_nothing_in_them_is_markup(block):
    expected = [
        "The",
        "␣price",
        "␣of",
        "␣$5",
        "␣or",
        "␣$",
        "⏎",
        r"\t",
        "naïve",
        r"\u4e2d\u6587",
        r"\x07",
        "<b>",
    ]
    expected += ["a␣ba␣ba␣ba␣ba…", "^_{2}"]
    found = labels(by_token(block).axes[0].xaxis)
    assert not any(is_math_text(label) for label in found)
    assert [label.replace(r"\$", "$") for label in found] == expected


@given(st.text(max_size=40))
def test_no_text_is_a_formula_or_lacks_a_glyph_and_printable_ascii_stays(text):
    safe = style.plain(text)
    assert not is_math_text(safe)
    assert style.plain(safe.replace(r"\$", "$")) == safe
    assert all(style._has_glyph(letter) for letter in safe if letter != "\n")
    if text.isascii() and text.isprintable():
        assert safe.replace(r"\$", "$") == text


@given(st.text(max_size=40))
def test_no_token_is_longer_than_its_room(token):
    assert len(style.visible(token).replace(r"\$", "$")) <= 14


def test_every_drawn_letter_has_a_glyph(block):
    token = "中\u202e\ud800😀\x00$\\$"
    strange = dataclasses.replace(block, token_texts=((token,) * len(TEXTS),) * 2)
    png_bytes(by_token(strange, title=token, footer=token))  # a missing glyph would be a warning


def test_without_texts_columns_have_the_ids_and_short_labels_are_level(block):
    figure = by_token(dataclasses.replace(block, token_texts=()), tokens=range(2, 5))
    assert labels(figure.axes[0].xaxis) == [str(token) for token in block.tokens[1, 2:5].tolist()]
    assert {label.get_rotation() for label in figure.axes[0].get_xticklabels()} == {0}
    assert {label.get_rotation() for label in by_token(block).axes[0].get_xticklabels()} == {90}
    assert np.array_equal(figure.axes[0].images[0].get_array(), block["output"].weights[:, 1, 2:5].numpy())


def test_padding_is_left_out():
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    trace = traced(2, num_tokens=5, mask=mask)
    assert by_token(trace, row=0).axes[0].images[0].get_array().shape[1] == 5
    assert by_token(trace, row=1).axes[0].images[0].get_array().shape[1] == 3


def test_reads_for_queries_and_keys_of_one_site_are_panels_of_their_own(block):
    site = block["L2.attention"]
    parts = tuple(dataclasses.replace(site, part=part) for part in ("q", "k"))
    figure = by_token(dataclasses.replace(block, sites=parts), sites=["L2.attention"])
    assert [axes.get_title(loc="left") for axes in figure.axes[:-1]] == [
        "L2.attention (q)",
        "L2.attention (k)",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row": 2}, "row=2"),
        ({"row": -1}, "row=-1"),
        ({"sites": []}, "no sites"),
        ({"sites": ["L9.mlp"]}, "L9.mlp"),
        ({"tokens": range(50, 60)}, "0 tokens"),
    ],
)
def test_what_the_trace_does_not_have_is_refused(block, changes, message):
    with pytest.raises(ConfigError, match=message):
        by_token(block, **changes)


def test_more_tokens_than_can_be_read_are_refused_and_never_cut():
    trace = traced(2, num_tokens=65)
    with pytest.raises(ConfigError, match="65 tokens"):
        by_token(trace)
    assert by_token(trace, tokens=range(1, 65)).axes[0].images[0].get_array().shape[1] == 64
