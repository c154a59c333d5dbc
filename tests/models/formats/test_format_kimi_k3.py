"""Kimi K3's layout: its files bit for bit, and what is refused."""

import json

import pytest
import torch
import transformers
from closeness import assert_close
from models.formats.kimi_models import BLOCK, EPS, NUM_LAYERS, SHAPE, random_model
from models.hf.small_models import LATENT, SIZES, TOKENS
from safetensors.torch import load_file, save_file

from attention_residuals import AttnRes, load_model, record, save_model
from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.layers.tap import OUTPUT, Site
from attention_residuals.models import formats
from attention_residuals.models.formats import load_kimi_k3, read_checkpoint, save_kimi_k3
from attention_residuals.models.hf import ConvertedModel, convert
from attention_residuals.models.hf.conversion import original_config
from attention_residuals.models.hf.install import install
from attention_residuals.ops.reference import depth_attention


def moonshot(folder, block=BLOCK, dtype=torch.float32, *, nested):
    """A checkpoint in Moonshot's own terms, with a config that no code of ours has written."""
    save_kimi_k3(random_model(block, dtype), folder)
    path = folder / "model.safetensors"
    text = {
        "model_type": "kimi_linear",
        "attn_res_block_size": block,
        "hidden_size": 32,
        "num_hidden_layers": NUM_LAYERS,
        "rms_norm_eps": EPS,
        "intermediate_size": 48,
        "vocab_size": 64,
        "num_attention_heads": 4,
        **LATENT,
        "model_max_length": 64,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": [3, 7],
            "kda_layers": [1, 2, 4, 5, 6],
            "head_dim": 8,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = {"model_type": "kimi_k3", "text_config": text} if nested else text
    (folder / "config.json").write_text(json.dumps(config))
    if nested:
        save_file({f"language_model.{name}": tensor for name, tensor in load_file(path).items()}, path)
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return moonshot(tmp_path_factory.mktemp("one") / "model", nested=True)


@pytest.fixture
def folder(one, tmp_path):
    """A copy that a test may damage."""
    for path in one.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= changes
    path.write_text(json.dumps(config))


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


def refused(folder, *parts, **options):
    with pytest.raises(CheckpointError) as raised:
        load_kimi_k3(folder, **options)
    for part in (str(folder), *parts):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("block", "dtype", "nested"),
    [
        (BLOCK, torch.float32, True),
        (BLOCK, torch.bfloat16, True),
        (BLOCK, torch.bfloat16, False),
        (2, torch.float32, False),
        (64, torch.float32, True),
        (None, torch.float32, False),
    ],
    ids=str,
)
def test_a_checkpoint_is_written_out_again_bit_for_bit(tmp_path, dtype, block, nested):
    theirs = moonshot(tmp_path / "theirs", block, dtype, nested=nested)
    model = load_kimi_k3(theirs)
    save_kimi_k3(model, tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert same(after, before)
    assert {tensor.dtype for tensor in before.values()} == {dtype}
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours")]
    old, new = (config.get("text_config", config) for config in configs)
    assert configs[0]["model_type"] == configs[1]["model_type"]
    assert {name: new[name] for name in old} == old
    assert old["attn_res_block_size"] == block
    again = load_kimi_k3(tmp_path / "ours")
    assert again.config == model.config
    assert torch.equal(again(TOKENS), model(TOKENS))


def test_what_is_read_is_the_model_that_was_written(one):
    model, expected = load_kimi_k3(one), random_model()
    assert same(model.state_dict(), expected.state_dict())
    assert model.config.residual == AttnRes(sublayers_per_block=2 * BLOCK, key_eps=EPS)
    assert model.config == original_config_of(expected, model)
    assert torch.equal(model(TOKENS), expected(TOKENS))
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in expected.parameters()]


def original_config_of(expected, model):
    """What a survey of the running model finds, which the format only asserts."""
    found = original_config(
        transformers.AutoModelForCausalLM.from_config(transformers.KimiLinearConfig(**SHAPE)),
        expected.config.residual,
    )
    return type(found)(**{**vars(found), "transformers": model.config.transformers})


def test_loading_draws_no_random_numbers(one):
    before = torch.get_rng_state()
    load_kimi_k3(one)
    assert torch.equal(torch.get_rng_state(), before)


def test_names_of_transformers_are_read_too(one, tmp_path):
    """Its save_pretrained calls a dense MLP block_sparse_moe."""
    plain = transformers.AutoModelForCausalLM.from_config(transformers.KimiLinearConfig(**SHAPE))
    plain.save_pretrained(tmp_path)
    depth = {
        name.removeprefix("language_model."): tensor
        for name, tensor in load_file(one / "model.safetensors").items()
        if "_res_" in name
    }
    edit_tensors(tmp_path, lambda tensors: tensors.update(depth))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attn_res_block_size": BLOCK}))
    model = load_kimi_k3(tmp_path)
    own = plain.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.transformers.state_dict().items()
               if name in own)  # fmt: skip


def test_a_loaded_model_is_traced(one):
    model, sums = load_kimi_k3(one), {}

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
        layer = own.model.layers[4]
        states = own(TOKENS, output_hidden_states=True).hidden_states
    assert_close(sums[Site(4, "attention")], states[4])
    assert layer.input_layernorm.variance_epsilon == EPS
    trace = record(model, TOKENS)
    assert len(trace) == 2 * NUM_LAYERS + 1
    assert trace["L6.attention"].source_names == ("embedding", "B1", "B2")
    assert trace.cautions == ()


def test_a_loaded_model_is_kept_in_our_own_format_and_then_in_theirs(one, tmp_path):
    model = load_kimi_k3(one)
    save_model(model, tmp_path / "ours")
    save_kimi_k3(load_model(tmp_path / "ours"), tmp_path / "theirs")
    assert same(load_file(tmp_path / "theirs/model.safetensors"), load_file(one / "model.safetensors"))


def test_routers_may_be_float32_and_stay_so(folder, tmp_path):
    def edit(tensors):
        for name, tensor in tensors.items():
            wide = name.endswith(("A_log", "dt_bias", "moe.gate.weight", "e_score_correction_bias"))
            tensors[name] = tensor if wide else tensor.bfloat16()

    edit_tensors(folder, edit)
    model = load_kimi_k3(folder)
    assert model.config.original["dtype"] == "bfloat16"
    assert model(TOKENS).dtype == torch.bfloat16
    save_kimi_k3(model, tmp_path / "again")
    assert same(load_file(tmp_path / "again/model.safetensors"), load_file(folder / "model.safetensors"))


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop("language_model.model.output_attn_res_proj.weight"), "output_attn_res_proj.weight"),
        (lambda t: t.pop("language_model.model.layers.0.self_attention_res_norm.weight"), "layers.0.self_att"),
        (lambda t: t.pop("language_model.model.layers.3.self_attn.k_conv1d.weight"), "k_conv1d.weight"),
        (lambda t: t.pop("language_model.model.layers.3.block_sparse_moe.experts.3.w3.weight"), "experts.3.w3"),
        (lambda t: t.update({"vision_tower.patch_embed.weight": torch.ones(2)}), "vision_tower.patch_embed"),
        (lambda t: t.update({"language_model.model.layers.7.mlp_res_norm.weight": torch.ones(32)}), "layers.7."),
        (lambda t: t.update({"language_model.model.layers.1.mlp_res_proj.weight": torch.ones(32)}), "[1, 32]"),
        (lambda t: t.update({"language_model.model.layers.1.mlp_res_norm.weight": torch.ones(31)}), "[31]"),
        (lambda t: t.update({"language_model.model.norm.weight": torch.ones(32).bfloat16()}), "bfloat16"),
        (lambda t: t.update({"language_model.model.norm.weight": torch.ones(32).int()}), "I32"),
        (
            lambda t: t.update(
                {"language_model.model.res_norm.weight": t.pop("language_model.model.output_attn_res_norm.weight")}
            ),
            "did you mean 'language_model.model.res_norm.weight'",
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(folder, edit, named):
    edit_tensors(folder, edit)
    refused(folder, named)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_res_block_size": 0}, "attn_res_block_size=0"),
        ({"attn_res_block_size": "3"}, "attn_res_block_size='3'"),
        ({"attn_res_block_size": None}, "that no part of the model claims"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_hidden_layers": 6}, "IndexError"),
        ({"num_experts": 10**9}, "num_experts=1000000000"),
        ({"hidden_size": 33}, "33]"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"moe_intermediate_size": -1}, "negative dimension"),
        ({"vocab_size": 10**30}, "Overflow"),
        ({"hidden_act": "situ"}, "situ"),
        ({"model_max_length": None}, "a config that Transformers can make a model of"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"mla_use_nope": False}, "mla_use_nope=False"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"first_k_dense_replace": 2}, "layers.1.mlp."),
        ({"layer_types": ["linear_attention"] * 7}, "full_attn_layers=[3, 7]"),
        ({"mlp_layer_types": ["dense", "dense", *["sparse"] * 5]}, "first_k_dense_replace=1"),
        (
            {"first_k_dense_replace": 2, "mlp_layer_types": ["dense", *["sparse"] * 6]},
            "first_k_dense_replace=2",
        ),
        ({"linear_attn_config": [1]}, "linear_attn_config=[1]"),
        ({"linear_attn_config": {"windows": 3}}, "'windows': 3"),
        ({"attn_res_blocksize": 3}, "did you mean 'attn_res_block_size'"),
        ({"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map"),
        ({"model_type": "kimi_k2"}, "kimi_k3"),
        ({"quantization_config": {"bits": 4}}, "quantised experts"),
        ({"activation_situ_beta": 4.0}, "the activation SiTU"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_configs_that_do_not_fit_are_refused_by_name(folder, changes, named):
    edit_config(folder, **changes)
    refused(folder, named)


def test_a_plain_kimi_linear_is_left_to_transformers(tmp_path):
    transformers.AutoModelForCausalLM.from_config(transformers.KimiLinearConfig(**SHAPE)).save_pretrained(
        tmp_path
    )
    refused(tmp_path, "without attn_res_block_size", "convert(...)")


def test_code_and_pickles_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling.Model"}}))
    refused(folder, "never run")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin", "never opened")


@pytest.mark.parametrize("text", [{}, None, [], {"model_type": "deepseek_v3"}], ids=str)
def test_another_language_model_inside_is_refused(folder, text):
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "text_config": text}))
    refused(folder, "text_config")


def released():
    """What the headers of the released K3 say, layer by layer: names, dtypes and shapes."""
    width, heads, latent = 7168, 96 * 128, 3584
    both = {
        "input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,),
        "self_attention_res_norm.weight": (width,), "self_attention_res_proj.weight": (1, width),
        "mlp_res_norm.weight": (width,), "mlp_res_proj.weight": (1, width),
        "self_attn.g_proj.weight": (heads, width), "self_attn.o_proj.weight": (width, heads),
    }  # fmt: skip
    linear = {f"self_attn.{kind}_proj.weight": (heads, width) for kind in "qkv"}
    mla = {"self_attn.kv_a_proj_with_mqa.weight": (576, width), "self_attn.q_a_proj.weight": (1536, width)}
    experts = {
        "block_sparse_moe.gate.weight": (896, width),
        "block_sparse_moe.routed_expert_down_proj.weight": (latent, width),
        "block_sparse_moe.routed_expert_norm.weight": (latent,),
        "block_sparse_moe.routed_expert_up_proj.weight": (width, latent),
        "block_sparse_moe.experts.0.w1.weight_packed": (3072, 1792),
    }
    tensors = {"lm_head.weight": (163_840, width), "model.norm.weight": (width,)}
    tensors |= {
        "model.output_attn_res_norm.weight": (width,),
        "model.output_attn_res_proj.weight": (1, width),
    }
    for i in range(93):
        parts = {**both, **(mla if i % 4 == 3 or i == 92 else linear), **(experts if i else {})}
        tensors |= {f"model.layers.{i}.{name}": shape for name, shape in parts.items()}
    return {f"language_model.{name}": shape for name, shape in tensors.items()}


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    """A folder as large as the released K3 on paper, a shard a layer: its data are holes in files, zeros."""
    folder, shards = tmp_path_factory.mktemp("k3"), {}
    for name, shape in released().items():
        layer = name.split(".")[3] if ".layers." in name else "outside"
        shards.setdefault(f"model-{layer}.safetensors", {})[name] = shape
    for file, shapes in shards.items():
        header, end = {}, 0
        for name, shape in shapes.items():
            dtype, size = ("U8", 1) if name.endswith("packed") else ("BF16", 2)
            begin, end = end, end + size * torch.Size(shape).numel()
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as shard:
            shard.write(len(text).to_bytes(8, "little") + text)
            shard.truncate(8 + len(text) + end)
    weight_map = {name: file for file, shapes in shards.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {"AutoModel": "modeling_kimi_k3.Model"},
        "text_config": {
            "model_type": "kimi_linear",
            "num_hidden_layers": 93,
            "hidden_size": 7168,
            "rms_norm_eps": 1e-5,
            "attn_res_block_size": 12,
            "mla_use_output_gate": True,
            "routed_expert_hidden_size": 3584,
            "linear_attn_config": {"use_full_rank_gate": True, "gate_lower_bound": -5.0},
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_of_the_released_k3_exactly_its_374_attention_residuals_are_read(k3):
    rule, others = load_kimi_k3(k3, attn_res_only=True)
    stored = read_checkpoint(k3).tensors
    claimed = stored.keys() - set(others)
    assert len(claimed) == 374 == 4 * 93 + 2
    assert claimed == {name for name in stored if "_res_" in name}
    assert set(others) | claimed == set(stored)
    state = rule.state_dict()
    assert len(state) == 374
    assert {(tuple(tensor.shape), tensor.dtype) for tensor in state.values()} == {((7168,), torch.bfloat16)}
    assert rule.config == AttnRes(sublayers_per_block=24, key_eps=1e-5)
    assert [rule.num_sources(site) for site in rule.sites()][::24] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rule.num_sources(OUTPUT) == 9


def test_the_released_k3_itself_is_refused_by_what_it_has_more(k3):
    refused(
        k3,
        "gated MLA (mla_use_output_gate)",
        "gated MLA, or a gate of full rank (language_model.model.layers.0.self_attn.g_proj.weight)",
        "latent experts (language_model.model.layers.1.block_sparse_moe.routed_expert_down_proj.weight)",
        "quantised experts",
        "attn_res_only=True",
    )


def test_attention_residuals_alone_are_those_of_the_whole_model(one):
    rule, others = load_kimi_k3(one, attn_res_only=True)
    model = load_kimi_k3(one)
    assert same(rule.state_dict(), model.residual.state_dict())
    assert all("_res_" not in name for name in others)
    assert len(others) + len(rule.state_dict()) == len(read_checkpoint(one).tensors)
    values = [torch.randn(2, 3, 32) for _ in range(3)]
    reader = rule.readers["L6_attention"]
    expected = depth_attention(torch.stack(values), reader.pseudo_query, reader.key_gain, eps=EPS).mix
    assert_close(rule.attend(tuple(values), Site(6, "attention"), "in", None, None).mix, expected)


@pytest.mark.parametrize(
    ("changes", "edit", "named"),
    [
        ({"attn_res_block_size": None}, lambda t: None, "attn_res_block_size null"),
        ({"hidden_size": None}, lambda t: None, "hidden_size=None"),
        ({"hidden_size": 31}, lambda t: None, "31]"),
        ({}, lambda t: t.pop("language_model.model.layers.5.mlp_res_proj.weight"), "layers.5.mlp_res_proj"),
    ],
)
def test_attention_residuals_alone_are_refused_if_they_do_not_fit(folder, changes, edit, named):
    edit_config(folder, **changes)
    edit_tensors(folder, edit)
    refused(folder, named, attn_res_only=True)


def test_what_the_layout_cannot_hold_is_not_written(tmp_path):
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    plain = transformers.AutoModelForCausalLM.from_config(transformers.KimiLinearConfig(**SHAPE))
    for model, named in (
        (ConvertedModel(convert(llama, AttnRes(sublayers_per_block=2))), "type 'llama'"),
        (ConvertedModel(convert(plain, AttnRes(sublayers_per_block=2, key_eps=EPS))), "norms with eps"),
        (random_model(rms_norm_eps=1e-4), "key_eps"),
    ):
        with pytest.raises(ConfigError, match=named):
            save_kimi_k3(model, tmp_path / "model")
    odd = transformers.AutoModelForCausalLM.from_config(transformers.KimiLinearConfig(**SHAPE))
    install(odd, original_config(odd, AttnRes(sublayers_per_block=3, key_eps=EPS)))
    with pytest.raises(ConfigError, match="sublayers_per_block=3"):
        save_kimi_k3(ConvertedModel(odd), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_nothing_is_overwritten(one):
    with pytest.raises(CheckpointError, match="exists"):
        save_kimi_k3(load_kimi_k3(one), one)


def test_a_format_that_is_not_there_is_told_as_any_missing_name():
    with pytest.raises(AttributeError, match="load_kimi_k4"):
        _ = formats.load_kimi_k4
