"""Checkpoints of open-attention-residuals: their schedule written out, and what is refused."""

import json

import pytest
import torch
import transformers
from closeness import assert_close, distance
from models.hf.small_models import SIZES, TOKENS, trained
from safetensors.torch import load_file, save_file
from torch import nn

from attention_residuals import load_model, record, save_model
from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.layers.residual import AttnRes, Cumulative
from attention_residuals.layers.tap import OUTPUT
from attention_residuals.models.formats import load_open_attnres, save_open_attnres
from attention_residuals.models.hf import ConvertedModel
from attention_residuals.models.hf.conversion import original_config
from attention_residuals.models.hf.install import install

NUM_LAYERS, EPS = 5, 1e-5
SHAPE = {**SIZES, "num_hidden_layers": NUM_LAYERS, "head_dim": 8, "rms_norm_eps": EPS}
CONFIG = {
    **SHAPE,
    "model_type": "qwen3_attnres",
    "architectures": ["Qwen3AttnResForCausalLM"],
    "attnres_num_blocks": 3,
    "attnres_recency_bias_init": 1.5,
    "attnres_mode": "block",
    "attnres_gate_type": "bias",
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "5.3.0",
}


def theirs(folder, dtype=torch.float32, **changes):
    """A checkpoint as the repository writes it, made of Qwen3's own and of names in plain sight."""
    torch.manual_seed(0)
    config = {**CONFIG, **changes}
    qwen = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SHAPE, tie_word_embeddings=config["tie_word_embeddings"])
    )
    tensors = {name: tensor for name, tensor in qwen.state_dict().items() if "lm_head" not in name}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = qwen.lm_head.weight.detach()
    for i in range(NUM_LAYERS):
        for kind in ("attn", "mlp"):
            tensors[f"model.layers.{i}.{kind}_res_proj.weight"] = torch.randn(1, 32) / 10
            tensors[f"model.layers.{i}.{kind}_res_norm.weight"] = torch.randn(32) / 5 + 1
            tensors[f"model.layers.{i}.{kind}_res_bias"] = torch.randn(()) + 1
    folder.mkdir()
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def folder(tmp_path):
    return theirs(tmp_path / "model")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def same(actual, expected):
    return actual.keys() == expected.keys() and all(
        actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor)
        for name, tensor in expected.items()
    )


def refused(folder, *parts):
    with pytest.raises(CheckpointError) as raised:
        load_open_attnres(folder)
    for part in (str(folder), *parts):
        assert part in str(raised.value)


@torch.no_grad()
def written_out(model, tensors, config, misread=""):
    """The repository's schedule in plain words, around the layers' own modules."""
    own = model.transformers.model
    stream = own.embed_tokens(TOKENS)
    blocks = [stream]
    rotation = own.rotary_emb(stream, position_ids=torch.arange(TOKENS.shape[1])[None])
    layers_per_block = -(-NUM_LAYERS // config["attnres_num_blocks"])
    full = config["attnres_mode"] == "full"

    def read(stem):
        values = torch.stack([*blocks, stream])
        keys = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + EPS)
        scores = (keys * tensors[f"{stem}_norm.weight"]) @ tensors[f"{stem}_proj.weight"][0]
        scores[0 if misread == "bias on the oldest" else -1] += tensors[f"{stem}_bias"]
        if misread == "no bias":
            scores[-1] -= tensors[f"{stem}_bias"]
        return torch.einsum("sbt,sbtd->btd", scores.softmax(0), values)

    for i, layer in enumerate(own.layers):
        hidden = layer.input_layernorm(read(f"model.layers.{i}.attn_res"))
        stream = stream + layer.self_attn(hidden, position_embeddings=rotation, attention_mask=None)[0]
        if full:
            blocks = [*blocks, stream]
        output = layer.mlp(layer.post_attention_layernorm(read(f"model.layers.{i}.mlp_res")))
        stream = stream + output
        if full or (i + (misread != "boundary one layer late")) % layers_per_block == 0:
            blocks = [*blocks, stream]
    if misread == "output read":
        stream = read(f"model.layers.{NUM_LAYERS - 1}.mlp_res")
    return model.transformers.lm_head(own.norm(stream))


def double(folder, **changes):
    """Checkpoint and model in float64."""
    theirs(folder, torch.float64, **changes)
    return load_open_attnres(folder), load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "changes",
    [
        *({"attnres_num_blocks": number} for number in (1, 2, 3, 4, 5, 8)),
        {"attnres_mode": "full"},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_our_rule_is_their_schedule_written_out(tmp_path, changes):
    model, tensors = double(tmp_path / "model", **changes)
    # Transformers computes norms in float32, whatever the model's dtype.
    assert_close(model(TOKENS), written_out(model, tensors, {**CONFIG, **changes}), 1e-6)


@pytest.mark.parametrize(
    "misread", ["bias on the oldest", "no bias", "boundary one layer late", "output read"]
)
def test_a_misreading_of_their_schedule_is_seen(tmp_path, misread):
    model, tensors = double(tmp_path / "model")
    assert distance(written_out(model, tensors, CONFIG, misread), model(TOKENS)) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"attnres_mode": "full"}, {"tie_word_embeddings": True}, {"attnres_num_blocks": 8}],
    ids=str,
)
def test_a_checkpoint_is_written_out_again_bit_for_bit(tmp_path, changes, dtype):
    theirs(tmp_path / "theirs", dtype, **changes)
    model = load_open_attnres(tmp_path / "theirs")
    save_open_attnres(model, tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert same(after, before)
    old, new = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours"))
    moved = {"rope_theta", "torch_dtype", "transformers_version"}
    assert {name: new[name] for name in old.keys() - moved} == {n: old[n] for n in old.keys() - moved}
    assert new["rope_parameters"]["rope_theta"] == old["rope_theta"]
    again = load_open_attnres(tmp_path / "ours")
    assert again.config == model.config
    assert torch.equal(again(TOKENS), model(TOKENS))
    assert model(TOKENS).dtype == dtype


def test_what_is_read_is_what_a_survey_of_the_running_model_finds(folder):
    model = load_open_attnres(folder)
    rule = Cumulative(sublayers_per_block=4, key_eps=EPS, recency_bias=1.5)
    found = original_config(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE)), rule)
    assert model.config == type(found)(**{**vars(found), "transformers": model.config.transformers})
    readers, tensors = model.residual.readers, load_file(folder / "model.safetensors")
    assert torch.equal(readers["L3_mlp"].recency_bias, tensors["model.layers.3.mlp_res_bias"][None])
    assert torch.equal(readers["L0_attention"].key_gain, tensors["model.layers.0.attn_res_norm.weight"])
    assert torch.equal(
        readers["L4_attention"].pseudo_query, tensors["model.layers.4.attn_res_proj.weight"][0]
    )


def test_traces_tell_what_the_sources_are(folder):
    model, sums = load_open_attnres(folder), {}

    class Watch:
        def begin(self, run):
            pass

        def read(self, read):
            sums[read.site] = (read.weights[..., None] * torch.stack(read.values)).sum(0)
            return read

        def write(self, write):
            return write

    with torch.no_grad():
        logits = model(TOKENS, tap=Watch())
        own = model.transformers
        assert_close(own.lm_head(own.model.norm(sums[OUTPUT])), logits)
        states = own(TOKENS, output_hidden_states=True).hidden_states
    assert_close(sums[model.residual.sites()[6]], states[3])
    trace = record(model, TOKENS)
    assert trace["L2.mlp"].source_names == ("embedding", "through B1", "stream")
    assert trace.semantics["sources"] == "cumulative"
    told = " ".join(trace.cautions)
    for caution in (
        "cumulative",
        "a learned bias favours the newest",
        "the output has no weights of its own",
    ):
        assert caution in told


def test_a_loaded_model_is_kept_in_our_own_format_and_then_in_theirs(folder, tmp_path):
    save_model(load_open_attnres(folder), tmp_path / "ours")
    save_open_attnres(load_model(tmp_path / "ours"), tmp_path / "theirs")
    assert same(load_file(tmp_path / "theirs/model.safetensors"), load_file(folder / "model.safetensors"))


def test_defaults_of_theirs_fill_a_config_that_leaves_them_out_and_legacy_fields_are_ignored(folder):
    config = {name: value for name, value in CONFIG.items() if not name.startswith("attnres_")}
    (folder / "config.json").write_text(
        json.dumps({**config, "attnres_init_bias": 10.0, "attnres_gate_init": 1})
    )
    residual = load_open_attnres(folder).config.residual
    assert residual == Cumulative(sublayers_per_block=2, key_eps=EPS, recency_bias=3.0)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop("model.layers.4.mlp_res_bias"), "model.layers.4.mlp_res_bias"),
        (lambda t: t.pop("model.layers.1.self_attn.q_norm.weight"), "layers.1.self_attn.q_norm.weight"),
        (lambda t: t.update({"model.layers.1.attn_res_alpha": torch.ones(())}), "attn_res_alpha"),
        (lambda t: t.update({"model.layers.5.attn_res_bias": torch.ones(())}), "layers.5.attn_res_bias"),
        (lambda t: t.update({"model.res_proj.weight": torch.ones(1, 32)}), "model.res_proj.weight"),
        (lambda t: t.update({"model.layers.1.attn_res_bias": torch.ones(1)}), "shape []"),
        (lambda t: t.update({"model.layers.1.attn_res_proj.weight": torch.ones(32)}), "[1, 32]"),
        (lambda t: t.update({"model.layers.1.attn_res_norm.weight": torch.ones(32).bfloat16()}), "bfloat16"),
        (
            lambda t: t.update({"model.layers.2.mlp_res_gain": t.pop("model.layers.2.mlp_res_norm.weight")}),
            "did you mean 'model.layers.2.mlp_res_gain'",
        ),
    ],
    ids=["bias", "qk-norm", "alpha", "layer", "output", "flat bias", "flat", "mixed", "renamed"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(folder, edit, named):
    edit_tensors(folder, edit)
    refused(folder, named)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        *(
            ({"attnres_gate_type": gate}, f"attnres_gate_type='{gate}'")
            for gate in ("sigmoid_scalar", "sigmoid_vector", "learnable_alpha")
        ),
        ({"attnres_mode": "delta"}, "attnres_mode='delta'"),
        ({"attnres_num_blocks": 0}, "attnres_num_blocks=0"),
        ({"attnres_recency_bias_init": float("nan")}, "attnres_recency_bias_init=nan"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_act": "swoosh"}, "swoosh"),
        ({"attention_bias": True}, "self_attn.k_proj.bias"),
        ({"tie_word_embeddings": True}, "lm_head.weight"),
        ({"attnres_number_of_blocks": 3}, "did you mean 'attnres_num_blocks'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "modeling_attnres.Model"}}, "never run"),
        ({"model_type": "qwen3"}, "model_type 'qwen3'"),
    ],
    ids=lambda value: "-".join(map(str, *value.items())) if isinstance(value, dict) else None,
)
def test_configs_that_do_not_fit_are_refused_by_name(folder, changes, named):
    edit_config(folder, **changes)
    refused(folder, named)


def test_pickles_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin", "never opened")


def around_qwen(residual, **changes):
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**{**SHAPE, "num_hidden_layers": 9, **changes})
    )
    install(model, original_config(model, residual))
    return ConvertedModel(trained(model))


@pytest.mark.parametrize("sublayers", [1, 2, 4, 6, 10, 18])
def test_blocks_are_told_by_a_number_of_them(tmp_path, sublayers):
    model = around_qwen(Cumulative(sublayers_per_block=sublayers, key_eps=EPS))
    nn.init.ones_(model.residual.readers["L0_mlp"].recency_bias)
    save_open_attnres(model, tmp_path / "model")
    loaded = load_open_attnres(tmp_path / "model")
    assert loaded.config.residual == model.config.residual
    assert same(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("residual", "named"),
    [
        (Cumulative(sublayers_per_block=8, key_eps=EPS), "sublayers_per_block=8 for 9 layers"),
        (Cumulative(sublayers_per_block=3, key_eps=EPS), "sublayers_per_block=3 for 9 layers"),
        (Cumulative(key_eps=1e-3), "0.001"),
        (Cumulative(key_eps=EPS, source_dtype="float32"), "source_dtype"),
        (AttnRes(key_eps=EPS), "AttnRes"),
    ],
    ids=str,
)
def test_what_the_format_cannot_hold_is_not_written(tmp_path, residual, named):
    with pytest.raises(ConfigError, match=named):
        save_open_attnres(around_qwen(residual), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_nothing_is_overwritten(folder):
    with pytest.raises(CheckpointError, match="exists"):
        save_open_attnres(load_open_attnres(folder), folder)
