"""Inkling2's text model: what Transformers computes, around our rule, from the files that it writes."""

import json

import pytest
import torch
import transformers
from closeness import assert_close, distance
from safetensors.torch import load_file, save_file
from torch import nn

from attention_residuals import Decoder, presets, record, save_model
from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.inference import KVCache, prefill
from attention_residuals.layers.residual import Inkling2
from attention_residuals.layers.tap import OUTPUT, Site
from attention_residuals.models.formats import load_inkling2, save_inkling2

KINDS = ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"]
SHAPE = {
    "vocab_size": 64,
    "unpadded_vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 4,
    "d_rel": 4,
    "rel_extent": 8,
    "layer_types": KINDS,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_layers_per_attn_res_block": 2,
    "rms_norm_eps": 1e-5,
    "log_scaling_n_floor": 3,
    "max_position_embeddings": 32,
    "eos_token_id": 2,
}
TOKENS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(5))


def made(**changes):
    """A model of Transformers, all of its numbers drawn at random."""
    torch.manual_seed(0)
    config = transformers.Inkling2TextConfig(**{**SHAPE, **changes})
    model = transformers.Inkling2ForCausalLM(config).eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        one = "norm" in name or "scale" in name
        nn.init.normal_(tensor, mean=float(one), std=1.0 if "query" in name else 0.2)
    return model


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A model of Transformers and where it has saved itself."""
    model, folder = made(), tmp_path_factory.mktemp("theirs")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture
def folder(theirs, tmp_path):
    """A copy that a test may damage."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((theirs[1] / name).read_bytes())
    return tmp_path


@torch.no_grad()
def run(model, tokens=TOKENS, **options):
    output = model(tokens, **options)
    return getattr(output, "logits", output)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def same(actual, expected):
    return actual.keys() == expected.keys() and all(
        actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor)
        for name, tensor in expected.items()
    )


def refused(folder, *parts):
    with pytest.raises(CheckpointError) as raised:
        load_inkling2(folder)
    for part in (str(folder), *parts):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_layers_per_attn_res_block": 1},
        {"n_layers_per_attn_res_block": 3},
        {"n_layers_per_attn_res_block": 64},
        {"layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid", "hybrid_sliding"]},
        {"vocab_size": 60},
    ],
    ids=str,
)
def test_our_logits_are_those_of_transformers(tmp_path, changes):
    model = made(**changes)
    model.save_pretrained(tmp_path)
    assert_close(run(load_inkling2(tmp_path)), run(model))


def test_padding_positions_and_the_last_logits_are_as_in_transformers(theirs):
    model, ours = theirs[0], load_inkling2(theirs[1])
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    mask[0, :3] = False
    assert_close(run(ours, mask=mask)[mask], run(model, attention_mask=mask.long())[mask])
    positions = torch.arange(9).expand(2, 9) + 7
    moved = run(ours, positions=positions)
    assert_close(moved, run(model, position_ids=positions))
    assert distance(moved, run(ours)) > 1e-4
    assert_close(run(ours, num_logits=2), run(ours)[:, -2:])


def test_in_bfloat16_we_are_as_near_to_float32_as_transformers_is(theirs, tmp_path):
    exact = made()
    exact.load_state_dict({name: tensor.bfloat16().float() for name, tensor in exact.state_dict().items()})
    made().to(torch.bfloat16).save_pretrained(tmp_path)
    their = transformers.Inkling2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = load_inkling2(tmp_path)
    assert ours.transformers.dtype == torch.bfloat16
    assert ours.config.residual.source_dtype == "float32"  # in which Transformers mixes, too
    assert ours.residual.readers["L1_mlp"].pseudo_query.dtype == torch.float32
    assert distance(run(ours), run(exact)) < 1.05 * distance(run(their), run(exact))


def test_every_query_has_its_place(theirs):
    model, ours = theirs[0], load_inkling2(theirs[1])
    readers, layers = ours.residual.readers, model.model.layers
    for number, part in enumerate("qkv"):
        assert torch.equal(
            readers[f"L3_attention_{part}"].pseudo_query, layers[3].attention_input.query[number]
        )
        assert torch.equal(readers[f"L2_attention_{part}"].pseudo_query, layers[2].attention_input.query)
    assert torch.equal(readers["L0_mlp"].pseudo_query, layers[0].mlp_input.query)
    assert torch.equal(readers["output"].pseudo_query, model.model.final_input.query)
    assert ours.config.residual == Inkling2(sublayers_per_block=4, key_eps=1e-6)


def test_a_model_has_each_number_once(theirs):
    model, ours = theirs[0], load_inkling2(theirs[1])
    unread = sum(parameter.numel() for parameter in ours.residual.parameters() if not parameter.requires_grad)
    assert unread == 3 * 32  # of the first site, which Transformers leaves out
    counts = [sum(parameter.numel() for parameter in each.parameters()) for each in (model, ours)]
    assert counts[1] == counts[0] + unread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_transformers_wrote_is_written_out_again_bit_for_bit(tmp_path, dtype):
    # Transformers keeps some tensors in float32, and so it stores them.
    made().save_pretrained(tmp_path / "float32")
    transformers.Inkling2ForCausalLM.from_pretrained(tmp_path / "float32", dtype=dtype).save_pretrained(
        tmp_path / "theirs"
    )
    model = load_inkling2(tmp_path / "theirs")
    save_inkling2(model, tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert same(after, before)
    assert dtype in {tensor.dtype for tensor in before.values()}
    old, new = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours"))
    assert new == {name: value for name, value in old.items() if name != "transformers_version"}
    assert load_inkling2(tmp_path / "ours").config == model.config
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto").eval()
    expected = transformers.Inkling2ForCausalLM.from_pretrained(tmp_path / "theirs", dtype="auto").eval()
    assert torch.equal(run(again), run(expected))


def test_the_text_part_of_an_inkling2_config_is_read(folder):
    text = json.loads((folder / "config.json").read_text())
    expected = run(load_inkling2(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "inkling2", "text_config": text}))
    assert torch.equal(run(load_inkling2(folder)), expected)
    edit_tensors(folder, lambda t: t.update({"model.visual.proj_in.weight": torch.ones(2)}))
    refused(folder, "vision tower", "model.visual.proj_in.weight", "Inkling2ForCausalLM")


def test_a_loaded_model_is_traced(theirs):
    ours, sums = load_inkling2(theirs[1]), {}

    class Watch:
        def begin(self, run):
            pass

        def read(self, read):
            sums[read.site, read.part] = (read.weights[..., None] * torch.stack(read.values)).sum(0)
            return read

        def write(self, write):
            return write

    logits = run(ours, tap=Watch())
    assert torch.equal(logits, run(ours))
    with torch.no_grad():
        assert_close(ours.unembed(sums[OUTPUT, "in"]), logits)
    sliding, full = Site(2, "attention"), Site(3, "attention")
    assert torch.equal(sums[sliding, "q"], sums[sliding, "v"])
    assert distance(sums[full, "q"], sums[full, "v"]) > 1e-3
    trace = record(ours, TOKENS)
    assert trace.semantics["values"] == "normalised"
    assert any("values are normalised" in caution for caution in trace.cautions)
    assert [len(site.source_names) for site in trace.sites if site.site == "L4.attention"] == [3, 3, 3]


def test_gradients_reach_the_queries_of_every_read(theirs):
    ours = load_inkling2(theirs[1])
    ours(TOKENS).square().mean().backward()
    for name, parameter in ours.residual.named_parameters():
        assert (parameter.grad is not None and parameter.grad.norm() > 0) == ("L0_attention" not in name), (
            name
        )


def test_what_it_cannot_do_is_refused(theirs, tmp_path):
    ours = load_inkling2(theirs[1])
    with pytest.raises(ConfigError, match="a cache"):
        ours(TOKENS, cache=KVCache())
    with pytest.raises(ConfigError, match="a cache"):
        prefill(ours, TOKENS)
    with pytest.raises(ConfigError, match="a mask of pairs"):
        ours(TOKENS, mask=torch.ones(2, 9, 9, dtype=torch.bool))
    with pytest.raises(ConfigError, match="save_inkling2"):
        save_model(ours, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(ConfigError, match="a Decoder"):
        save_inkling2(Decoder(presets.scaled(2, vocab_size=300)), tmp_path / "model")
    with torch.no_grad():
        ours.residual.readers["L2_attention_k"].pseudo_query = nn.Parameter(torch.ones(32))
    with pytest.raises(ConfigError, match=r"L2\.attention that differ"):
        save_inkling2(ours, tmp_path / "model")
    with pytest.raises(CheckpointError, match="exists"):
        save_inkling2(load_inkling2(theirs[1]), theirs[1])


def test_dropout_stays_off(tmp_path):
    made(attention_dropout=0.5).save_pretrained(tmp_path)
    ours = load_inkling2(tmp_path).train()
    assert torch.equal(run(ours), run(ours))


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop("model.llm.attn_res.attn_queries.0"), "attn_queries.0"),
        (lambda t: t.pop("model.llm.attn_res.output_query"), "attn_res.output_query"),
        (lambda t: t.pop("model.llm.layers.1.k_input_norm.weight"), "layers.1.k_input_norm.weight"),
        (lambda t: t.pop("model.llm.unembed.weight"), "unembed.weight"),
        (lambda t: t.update({"model.llm.attn_res.mlp_queries.5": torch.ones(32)}), "mlp_queries.5"),
        (lambda t: t.update({"model.llm.attn_res.attn_queries.1": torch.ones(3, 32)}), "[3, 32]"),
        (lambda t: t.update({"model.llm.unembed.weight": torch.ones(60, 32)}), "[64, 32]"),
        (
            lambda t: t.update({"model.llm.layers.0.mlp.experts.w13_weight_scale": torch.ones(4, 32, 1)}),
            "_scale",
        ),
        (lambda t: t.update({"model.llm.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}), "quantised"),
        (
            lambda t: t.update({"model.llm.final_query": t.pop("model.llm.attn_res.output_query")}),
            "did you mean 'model.llm.final_query'",
        ),
    ],
    ids=["query", "output", "norm", "head", "layer", "queries", "unpadded", "scale", "float8", "renamed"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(folder, edit, named):
    edit_tensors(folder, edit)
    refused(folder, named)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "inkling2_loop"}, "inkling2_loop is another rule"),
        ({"model_type": "inkling2_loop_text"}, "inkling2_loop is another rule"),
        ({"model_type": "inkling2", "text_config": None}, "inkling2_text"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"n_layers_per_attn_res_block": 0}, "ZeroDivisionError"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"scoring_func": "swoosh"}, "swoosh"),
        ({"n_layers_per_attnres_block": 2}, "did you mean 'n_layers_per_attn_res_block'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "modeling.Model"}}, "never run"),
    ],
    ids=str,
)
def test_configs_that_do_not_fit_are_refused_by_name(folder, changes, named):
    edit_config(folder, **changes)
    refused(folder, named)


def test_pickles_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin", "never opened")
