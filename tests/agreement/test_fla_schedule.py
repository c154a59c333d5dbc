"""The published model of flash-linear-attention, its own files on the CPU, against ours.

Its files are loaded by path. What needs a GPU (kernels for the norm, the MLP, the rotation, attention and the
depth read) is stood in for by the same mathematics in PyTorch; the schedule, the config, the parameters' names
and the rotation's tables are FLA's own.
"""

import importlib.metadata
import importlib.util
import sys
import types

import pytest
import torch
from closeness import TOLERANCE, assert_close, distance
from torch import nn
from torch.nn import functional as F

from attention_residuals.layers.norm import RMSNorm
from attention_residuals.layers.residual import AttnRes
from attention_residuals.layers.tap import OUTPUT
from attention_residuals.models import Decoder
from attention_residuals.models.formats.fla import FlaConfig, fla_names, load_fla, save_fla

SCHEDULES = [(3, 1), (4, 2), (4, 4), (5, 4), (5, 6), (3, 8)]
"""Layers and sublayers per block: Full, then blocks of 1, 2, 2 with a tail of 1, 3 with 2, more than all."""


def located(distribution, path):
    try:
        return importlib.metadata.distribution(distribution).locate_file(path)
    except importlib.metadata.PackageNotFoundError:
        return None


pytestmark = pytest.mark.skipif(
    located("flash-linear-attention", "fla") is None or importlib.util.find_spec("transformers") is None,
    reason="needs the files of flash-linear-attention, and Transformers, which they import",
)


def identity_decorator(*args, **kwargs):
    return args[0] if args and callable(args[0]) else identity_decorator


def exact_attnres(query, residuals, rms_weight, output_rms_weight=None, rms_eps=1e-6):
    """FLA's read written anew, since its own reference computes in float32 whatever it is given."""
    values = torch.stack(list(residuals))
    keys = values * (values.square().mean(-1, keepdim=True) + rms_eps).rsqrt() * rms_weight
    mix = ((keys @ query.flatten()).softmax(0)[..., None] * values).sum(0)
    return F.rms_norm(mix, mix.shape[-1:], output_rms_weight, rms_eps)


def causal(query, key, value, causal, window_size):
    assert causal
    assert window_size == (-1, -1)
    heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


def stub(patch, name, **members):
    """Puts a module of that name in place, with nothing in it but the members."""
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(members)
    patch.setitem(sys.modules, name, module)


def real(patch, name, distribution="flash-linear-attention"):
    """Runs one file of theirs, without the packages around it."""
    path = located(distribution, name.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def stub_kernels(patch):
    """Puts PyTorch in place of their kernels, and loads those of their operations that need none."""
    stub(patch, "fla.backends", dispatch=identity_decorator)
    stub(
        patch,
        "fla.utils",
        IS_AMD=False,
        autotune_cache_kwargs={},
        get_multiprocessor_count=None,
        input_guard=identity_decorator,
    )
    stub(patch, "fla.ops.utils", prepare_chunk_indices=None)
    stub(patch, "fla.ops.utils.index", prepare_lens_from_mask=None)
    stub(patch, "fla.layers.utils", pad_input=None, unpad_input=None)
    naive = real(patch, "fla.ops.attnres.naive", "fla-core").naive_attnres
    stub(patch, "fla.ops.attnres", fused_attnres=naive)
    stub(
        patch,
        "fla.modules.activations",
        powglu=None,
        powglu_linear=None,
        swiglu=lambda gate, up: F.silu(gate) * up,
        swiglu_linear=None,
    )
    stub(patch, "fla.modules.l2warp", l2_warp=None)
    stub(patch, "fla.modules.rotary")
    # Only while this one file is read: PyTorch itself looks for Triton later on.
    with pytest.MonkeyPatch.context() as meanwhile:
        stub(meanwhile, "triton", autotune=identity_decorator, jit=identity_decorator, Config=dict)
        stub(meanwhile, "triton.language", constexpr=None)
        sys.modules["triton"].language = sys.modules["triton.language"]
        rotary = real(patch, "fla.modules.rotary.ops", "fla-core")

    def rotary_embedding(x, cos, sin, interleaved, seqlen_offsets, cu_seqlens, chunk_indices):
        assert (seqlen_offsets, cu_seqlens) == (0, None)
        return rotary.rotary_embedding_ref(x, cos[: x.shape[1]], sin[: x.shape[1]], interleaved)

    patch.setattr(rotary, "rotary_embedding", rotary_embedding)
    stub(
        patch,
        "fla.modules",
        FusedCrossEntropyLoss=None,
        FusedLinearCrossEntropyLoss=None,
        GatedMLP=real(patch, "fla.modules.mlp", "fla-core").GatedMLP,
        RMSNorm=None,  # The kernel: fuse_norm=False takes PyTorch's.
        RotaryEmbedding=rotary.RotaryEmbedding,
    )


@pytest.fixture(scope="module")
def fla():
    """FLA's modelling file; afterwards no module of its name is left."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        for name in ("fla", "fla.layers", "fla.models", "fla.models.transformer", "fla.ops"):
            stub(patch, name)
        stub_kernels(patch)
        for name in ("configuration_utils", "cache_utils", "generation_utils"):
            real(patch, f"fla.models.{name}")
        with pytest.MonkeyPatch.context() as meanwhile:
            stub(meanwhile, "flash_attn", flash_attn_func=causal, flash_attn_varlen_func=None)
            real(patch, "fla.layers.attn")
        real(patch, "fla.models.modeling_utils")
        real(patch, "fla.models.transformer.configuration_transformer")
        yield real(patch, "fla.models.transformer.modeling_transformer")
    left = sys.modules.keys() - before
    assert not any(name.partition(".")[0] in ("fla", "flash_attn", "triton") for name in left)


class Stub(nn.Module):
    """Some function of what a site reads; FLA's attention returns two things more."""

    def __init__(self, width, is_attention):
        super().__init__()
        self.weight, self.is_attention = nn.Parameter(torch.randn(width, width) / width**0.5), is_attention

    def forward(self, hidden_states, **others):
        output = (hidden_states @ self.weight).tanh()
        return (output, None, None) if self.is_attention else output


def config_of(fla, num_layers, block_size, **others):
    return fla.TransformerConfig(
        hidden_size=8,
        num_hidden_layers=num_layers,
        num_heads=4,
        vocab_size=30,
        max_position_embeddings=16,
        attnres_block_size=block_size,
        norm_eps=1e-3,
        fuse_norm=False,
        fuse_swiglu=False,
        **others,
    )


def randomise(model):
    """Gives every parameter, pseudo-queries and gains too, some value of its own."""
    for name, parameter in model.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        nn.init.normal_(parameter, centre, 0.3 if "norm" in name else parameter.shape[-1] ** -0.5)
    return model


def theirs_with_stubs(fla, num_layers, block_size):
    model = fla.TransformerModel(config_of(fla, num_layers, block_size))
    for layer in model.layers:
        layer.attn, layer.mlp = Stub(8, True), Stub(8, False)
    return randomise(model)


def run_ours(rule, model, embedding):
    """Runs our rule around the very norms and sublayers of their model."""
    state = rule.open(embedding)
    for site in rule.sites()[:-1]:
        layer = model.layers[site.layer]
        attention = site.kind == "attention"
        inputs, state = rule.read(state, site, layer.attn_norm if attention else layer.mlp_norm)
        output = layer.attn(inputs[0])[0] if attention else layer.mlp(inputs[0])
        state = rule.write(state, site, output)
    return rule.read(state, OUTPUT, model.norm)[0][0]


def their_reader(model, key):
    """Finds the pseudo-query or gain of their model that a parameter of our rule stands for."""
    config = FlaConfig(
        hidden_size=8, num_heads=4, num_hidden_layers=len(model.layers), attnres_block_size=2
    ).decoder_config()
    name = fla_names(config)[f"residual.{key}"].removeprefix("model.")
    return model.get_parameter(name)


@pytest.mark.parametrize(
    ("dtype", "read"), [(torch.float32, None), (torch.float64, exact_attnres)], ids=["their op", "exact"]
)
@pytest.mark.parametrize(("num_layers", "block_size"), SCHEDULES)
def test_the_schedule_and_all_gradients_are_theirs(fla, monkeypatch, num_layers, block_size, dtype, read):
    model = theirs_with_stubs(fla, num_layers, block_size).to(dtype)
    if read is not None:
        monkeypatch.setattr(fla, "fused_attnres", read)
    size = min(block_size, 2 * num_layers)
    rule = AttnRes(sublayers_per_block=size, key_eps=1e-3).build(num_layers=num_layers, width=8).to(dtype)
    readers = dict(rule.named_parameters())
    with torch.no_grad():
        for key, parameter in readers.items():
            parameter.copy_(their_reader(model, key).flatten())
    embedding = torch.randn(2, 3, 8, dtype=dtype, requires_grad=True)
    target = torch.randn(2, 3, 8, dtype=dtype)

    their_readers = {name for name, _ in model.named_parameters() if "res_" in name}
    shared = [p for name, p in model.named_parameters() if name not in their_readers and "embed" not in name]
    given = [embedding, *shared]
    live = [key for key in readers if "L0_attention" not in key]
    theirs = model(inputs_embeds=embedding, use_cache=False).last_hidden_state
    expected = torch.autograd.grad(
        (theirs * target).sum(), [*given, *(their_reader(model, key) for key in live)]
    )
    ours = run_ours(rule, model, embedding)
    actual = torch.autograd.grad((ours * target).sum(), [*given, *(readers[key] for key in live)])

    assert_close(ours, theirs)
    assert len(live) == 4 * num_layers
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other.view(one.shape), 10 * TOLERANCE[dtype])


def test_another_block_size_is_told_apart(fla):
    """The comparison above can fail: neither the neighbouring size nor Full computes the same."""
    model = theirs_with_stubs(fla, 4, 4)
    embedding = torch.randn(2, 3, 8)
    theirs = model(inputs_embeds=embedding, use_cache=False).last_hidden_state
    for size, same in [(4, True), (2, False), (6, False), (1, False)]:
        rule = AttnRes(sublayers_per_block=size, key_eps=1e-3).build(num_layers=4, width=8)
        with torch.no_grad():
            for key, parameter in rule.named_parameters():
                parameter.copy_(their_reader(model, key).flatten())
        assert (distance(run_ours(rule, model, embedding), theirs) < 1e-3) is same


@pytest.mark.parametrize("num_kv_heads", [None, 2])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("num_layers", "block_size"), [(3, None), (3, 1), (3, 4), (2, 8)])
def test_what_they_save_is_loaded_and_gives_their_logits(
    fla, tmp_path, num_layers, block_size, tied, num_kv_heads
):
    config = config_of(
        fla, num_layers, block_size, tie_word_embeddings=tied, num_kv_heads=num_kv_heads, rope_theta=100.0
    )
    model = randomise(fla.TransformerForCausalLM(config)).eval()
    model.save_pretrained(tmp_path)
    loaded = load_fla(tmp_path)
    tokens = torch.randint(30, (2, 9))
    assert_close(loaded(tokens), model(tokens, use_cache=False).logits)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("block_size", [None, 1, 4])
def test_what_we_save_they_load_whole_and_give_our_logits(fla, tmp_path, block_size, tied):
    config = FlaConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=3,
        num_heads=4,
        num_kv_heads=2,
        max_position_embeddings=16,
        intermediate_size=12,
        norm_eps=1e-3,
        tie_word_embeddings=tied,
        attnres_block_size=block_size,
    )
    model = randomise(Decoder(config.decoder_config()))
    save_fla(model, tmp_path)
    loaded, told = fla.TransformerForCausalLM.from_pretrained(
        tmp_path, fuse_norm=False, fuse_swiglu=False, output_loading_info=True
    )
    assert not any(told.values())
    tokens = torch.randint(30, (2, 9))
    assert_close(model(tokens), loaded.eval()(tokens, use_cache=False).logits)


def test_they_refuse_the_block_sizes_that_we_refuse(fla):
    for size in (3, 0, -2):
        with pytest.raises(ValueError, match="attnres_block_size"):
            config_of(fla, 2, size)
        with pytest.raises(ValueError, match="attnres_block_size"):
            FlaConfig(attnres_block_size=size)


def test_our_defaults_are_theirs(fla):
    theirs = fla.TransformerConfig()
    for name, field in FlaConfig.__dataclass_fields__.items():
        assert getattr(theirs, name) == field.default


def test_the_norms_are_ours(fla):
    norm = fla.TransformerModel(config_of(fla, 1, 1)).norm
    ours = RMSNorm(8, norm.eps)
    hidden = torch.randn(3, 8)
    assert_close(ours(hidden), norm(hidden))
