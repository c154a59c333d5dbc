import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.layers.residual import AttnRes, HyperConnections, StandardResidual
from attention_residuals.models import Decoder, DecoderConfig
from attention_residuals.models.formats import load_fla, save_fla
from attention_residuals.models.formats.fla import FlaConfig, fla_names

CONFIG = DecoderConfig(
    vocab_size=11,
    num_layers=3,
    width=8,
    num_heads=2,
    num_kv_heads=1,
    head_width=4,
    mlp_width=6,
    max_tokens=16,
    norm_eps=1e-5,
    residual=AttnRes(sublayers_per_block=4, key_eps=1e-5),
)


def random_model(config, dtype=torch.float32):
    model = Decoder(config).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


@pytest.fixture
def saved(tmp_path):
    save_fla(random_model(CONFIG), tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "residual",
    [StandardResidual(), *(AttnRes(sublayers_per_block=size, key_eps=1e-5) for size in (1, 2, 4, 6))],
    ids=["standard", "full", "2", "4", "one block"],
)
def test_a_decoder_comes_back_with_its_config_and_the_same_bits(tmp_path, residual, tied, dtype):
    model = random_model(replace(CONFIG, residual=residual, tied=tied), dtype)
    save_fla(model, tmp_path)
    loaded = load_fla(tmp_path)
    assert loaded.config == model.config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
        assert loaded.state_dict()[name].dtype == dtype
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(tokens), model(tokens))
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in model.parameters()]


def test_a_checkpoint_of_theirs_comes_back_with_the_same_bytes_of_weights(saved, tmp_path):
    save_fla(load_fla(saved), tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
    assert (tmp_path / "again/config.json").read_bytes() == (saved / "config.json").read_bytes()


def test_loading_draws_no_random_numbers(saved):
    before = torch.get_rng_state()
    load_fla(saved)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_tensor_of_a_decoder_has_one_name_of_theirs():
    for residual in (StandardResidual(), CONFIG.residual):
        for tied in (True, False):
            config = replace(CONFIG, residual=residual, tied=tied)
            names = fla_names(config)
            assert names.keys() == Decoder(config).state_dict().keys()
            assert len(set(names.values())) == len(names)


def test_their_names_are_where_they_belong(saved):
    model, tensors = load_fla(saved), load_file(saved / "model.safetensors")
    layer = model.layers[2]
    assert torch.equal(tensors["model.layers.2.attn.k_proj.weight"], layer.attention.key.weight)
    assert torch.equal(tensors["model.layers.2.mlp.up_proj.weight"], layer.mlp.up.weight)
    readers = model.residual.readers
    for theirs, ours in [
        ("layers.2.attn_res", "L2_attention"),
        ("layers.0.mlp_res", "L0_mlp"),
        ("res", "output"),
    ]:
        query, gain = tensors[f"model.{theirs}_proj.weight"], tensors[f"model.{theirs}_norm.weight"]
        assert query.shape == (1, 8)
        assert torch.equal(query[0], readers[ours].pseudo_query)
        assert torch.equal(gain, readers[ours].key_gain)


@pytest.mark.parametrize(
    ("hidden_size", "hidden_ratio", "mlp_width"),
    [(2048, 4, 5632), (1024, None, 2816), (96, 4, 256), (98 * 8, 3.5, 2048), (768, 1, 512)],
)
def test_the_width_of_the_mlp_follows_their_ratio(hidden_size, hidden_ratio, mlp_width):
    config = FlaConfig(hidden_size=hidden_size, num_heads=8, hidden_ratio=hidden_ratio)
    assert config.decoder_config().mlp_width == mlp_width


def test_a_given_width_of_the_mlp_wins_over_the_ratio():
    assert FlaConfig(hidden_ratio=8, intermediate_size=10).decoder_config().mlp_width == 10


def test_their_options_become_ours():
    config = FlaConfig(
        hidden_size=64,
        num_heads=4,
        num_hidden_layers=3,
        rope_theta=500,
        max_position_embeddings=7,
        norm_eps=1e-4,
        attnres_block_size=64,
    ).decoder_config()
    assert (config.head_width, config.num_kv_heads, config.rope_base, config.max_tokens) == (16, 4, 500.0, 7)
    assert not config.tied
    assert config.residual == AttnRes(sublayers_per_block=6, key_eps=1e-4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qk_norm": True}, "qk_norm"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"window_size": 128}, "window_size"),
        ({"hidden_act": "powlu"}, "hidden_act"),
        ({"attnres_block_size": 3}, "attnres_block_size=3"),
        ({"attnres_block_size": 0}, "attnres_block_size=0"),
        ({"num_heads": 3}, "num_heads=3"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"hidden_size": "8"}, "hidden_size='8'"),
        ({"hidden_ratio": float("nan")}, "hidden_ratio=nan"),
        ({"norm_eps": float("nan")}, "nan"),
        ({"rope_theta": None}, "rope_theta=None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers"),
        ({"vocab_size": 10**30}, "model.embeddings.weight"),
        ({"intermediate_size": 10**30}, "gate_proj"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling"),
        ({"attn_res_block_size": 4}, "did you mean 'attnres_block_size'"),
        (
            {"auto_map": {"AutoModel": "modeling.Model"}},
            "code from a checkpoint is never run; remove auto_map",
        ),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"model_type": "gla"}, "model_type 'gla'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_our_decoder_cannot_be_is_refused_by_name(saved, changes, named):
    edit_config(saved, **changes)
    with pytest.raises(CheckpointError) as raised:
        load_fla(saved)
    assert named in str(raised.value)
    assert str(saved) in str(raised.value)


def test_what_changes_nothing_in_what_is_computed_is_taken_as_it_comes(saved):
    expected = load_fla(saved).state_dict()
    edit_config(
        saved,
        fuse_norm=False,
        use_l2warp=True,
        bos_token_id=5,
        auto_map=None,
        norm_first=False,
        use_cache=True,
    )
    for name, tensor in load_fla(saved).state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_defaults_of_theirs_fill_a_config_that_leaves_them_out(saved):
    config = json.loads((saved / "config.json").read_text())
    for name in ("qk_norm", "window_size", "rope_theta", "hidden_act"):
        del config[name]
    (saved / "config.json").write_text(json.dumps(config))
    assert load_fla(saved).config == CONFIG


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp_res_proj.weight"), "model.layers.1.mlp_res_proj.weight"),
        (lambda t: t.update({"model.layers.1.attn.q_proj.bias": torch.ones(8)}), "q_proj.bias"),
        (lambda t: t.update({"lm_head.weight": torch.ones(11, 8)}), "lm_head.weight"),
        (lambda t: t.update({"model.res_proj.weight": torch.ones(8, 1)}), "[8, 1]"),
        (lambda t: t.update({"model.res_proj.weight": torch.ones(8)}), "[1, 8]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(8).bfloat16()}), "BF16 and F32"),
        (lambda t: t.update({"model.norm.weight": torch.ones(8).int()}), "I32"),
    ],
    ids=["missing", "bias", "head", "column", "flat", "mixed", "integers"],
)
def test_weights_that_do_not_fit_are_refused_by_name(saved, edit, named):
    edit_tensors(saved, edit)
    with pytest.raises(CheckpointError) as raised:
        load_fla(saved)
    assert named in str(raised.value)


def test_a_renamed_tensor_is_found_by_its_shape_and_name(saved):
    edit_tensors(
        saved,
        lambda t: t.update(
            {"model.layers.2.self_attention_res_proj.weight": t.pop("model.layers.2.attn_res_proj.weight")}
        ),
    )
    with pytest.raises(
        CheckpointError, match=r"did you mean 'model\.layers\.2\.self_attention_res_proj\.weight'"
    ):
        load_fla(saved)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"residual": AttnRes(sublayers_per_block=3, key_eps=1e-5)}, "attnres_block_size=3"),
        ({"residual": AttnRes(sublayers_per_block=2, key_eps=1e-6)}, "key_eps"),
        ({"residual": AttnRes(key_eps=1e-5, source_dtype="bfloat16")}, "source_dtype"),
        ({"residual": HyperConnections()}, "HyperConnections"),
        ({"head_width": 6}, "width 6"),
    ],
    ids=["odd blocks", "eps", "dtype", "rule", "heads"],
)
def test_what_their_model_cannot_be_is_refused_by_name(tmp_path, change, named):
    model = Decoder(replace(CONFIG, **change))
    with pytest.raises(ConfigError, match=named):
        save_fla(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_model_is_not_overwritten(saved):
    before = (saved / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="exists"):
        save_fla(random_model(CONFIG), saved)
    assert (saved / "model.safetensors").read_bytes() == before
