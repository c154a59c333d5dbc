"""Several processes read a prompt together and find what one finds."""

import inspect
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention_residuals.errors import ConfigError
from attention_residuals.inference import sharded_prefill
from attention_residuals.inference.sharding import shard_of, shared_chunks
from attention_residuals.models import Decoder, presets


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.slow
def test_processes_together_equal_one_and_each_holds_its_share_of_the_sources(num_ranks, tmp_path):
    worker = Path(__file__).parent / "sharded_worker.py"
    common = {**os.environ, "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([sys.executable, str(worker), str(tmp_path)], env={**common, "RANK": str(rank)})
        for rank in range(num_ranks)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0] * num_ranks
    for rank in range(num_ranks):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["worst"] <= 1e-10
        assert found["refused"] == ["DataError", "ShapeError", "ConfigError"]
        together, alone = found["sizes"]
        assert together * num_ranks == alone


def test_shards_cover_all_tokens_in_order():
    for num_tokens in (4, 5, 23):
        ends = [shard_of(num_tokens, rank, 4) for rank in range(4)]
        assert ends[0][0] == 0
        assert ends[-1][1] == num_tokens
        assert all(one[1] == other[0] for one, other in itertools.pairwise(ends))
        sizes = [end - start for start, end in ends]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


def test_chunks_have_a_token_for_each_process():
    assert shared_chunks(23, 7, 4) == [(0, 7), (7, 14), (14, 23)]
    assert shared_chunks(20, 7, 4) == [(0, 7), (7, 14), (14, 20)]
    assert shared_chunks(4, 2048, 4) == [(0, 4)]
    for num_tokens, chunk in ((3, 2048), (23, 3)):
        with pytest.raises(ConfigError, match="3 tokens at once for 4 processes"):
            shared_chunks(num_tokens, chunk, 4)


@pytest.mark.parametrize("group", [None, -100], ids=["no group", "not a member"])
def test_a_process_without_a_group_is_told(group):
    model = Decoder(presets.scaled(2, vocab_size=40))
    with pytest.raises(ConfigError, match=f"(?s)group={group}.*init_process_group"):
        inspect.unwrap(sharded_prefill)(model, torch.zeros(1, 4, dtype=torch.long), group)
