"""Attention through the block table: every kernel against dense attention, on pools that show every mistake."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from shared.attention import can_read_blocks
from shared.engine import TransformersModel
from shared.steps import list_steps
from tests.drive import hostile_runner

pytestmark = pytest.mark.having("paged_attention")

# (block_size, num_heads, num_kv_heads, head_dim, seq_lens)
SHAPES = [
    (1, 9, 3, 16, [1, 7, 70]),
    (4, 9, 3, 64, [1, 3, 4, 5, 17, 131]),
    (16, 9, 3, 64, [15, 16, 17, 64, 65, 129]),
    (16, 4, 4, 80, [33, 1]),
    (16, 8, 1, 128, [200, 63]),
    (3, 6, 2, 24, [10, 3, 2]),
    (256, 2, 1, 256, [255, 256, 257]),
    (16, 14, 2, 64, [300]),
    (2, 3, 3, 7, [5, 6]),
]
SHAPE_IDS = [f"block {shape[0]}, {shape[1]}/{shape[2]} heads of {shape[3]}" for shape in SHAPES]


def case(block_size, num_heads, num_kv_heads, head_dim, seq_lens, dtype=torch.float32, device="cpu", seed=0):
    """Arguments of paged_attention whose pools are NaN wherever no token of these requests is, and the dense answer.

    Blocks are in no order, with unused ones between; tables are padded with the id of a block that is all NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    held = [-(-n // block_size) for n in seq_lens]
    order = (torch.randperm(sum(held) + 3, generator=generator)).tolist()
    nothing = order.pop()
    pools = torch.full((2, sum(held) + 3, block_size, num_kv_heads, head_dim), math.nan)
    tables = torch.full((len(seq_lens), max(held) + 1), nothing, dtype=torch.int32)
    q = torch.randn(len(seq_lens), num_heads, head_dim, generator=generator)
    scale, expected = 0.7 * head_dim**-0.5, []
    for b, seq_len in enumerate(seq_lens):
        blocks = [order.pop() for _ in range(held[b])]
        tables[b, : held[b]] = torch.tensor(blocks)
        # Scores up to tens, and rising: every tile has a larger one than the tile before.
        kv = torch.randn(2, seq_len, num_kv_heads, head_dim, generator=generator)
        kv[0] *= torch.linspace(0.1, 6, seq_len)[:, None, None]
        for i in range(seq_len):
            pools[:, blocks[i // block_size], i % block_size] = kv[:, i]
        k, v = kv.to(dtype).double().transpose(1, 2)
        rows = q[b].to(dtype).double()[:, None]
        expected.append(F.scaled_dot_product_attention(rows, k, v, scale=scale, enable_gqa=True)[:, 0])
    k_pool, v_pool = pools.to(device, dtype)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return (q.to(device, dtype), k_pool, v_pool, tables.to(device), lens, scale), torch.stack(expected)


@pytest.fixture(params=[1, 2])
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.zoo
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("name", ["reference", "numba"])
def test_kernel_against_dense_attention(step, name, shape, threads):
    arguments, expected = case(*shape)
    before = [pool.clone() for pool in arguments[1:3]]
    out = step.find_kernel(name, arguments[1])(*arguments)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-6)
    for pool, then in zip(arguments[1:3], before):
        torch.testing.assert_close(pool, then, rtol=0, atol=0, equal_nan=True)


def test_more_threads_than_tokens(step, threads):
    arguments, expected = case(16, 3, 3, 32, [1])
    out = step.find_kernel("numba", arguments[1])(*arguments)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-6)


def test_query_that_is_a_view(step):
    """The decoder's queries are slices of a larger tensor."""
    arguments, expected = case(4, 9, 3, 16, [9, 30])
    q = torch.stack([arguments[0], torch.zeros_like(arguments[0])], dim=2)[:, :, 0]
    assert not q.is_contiguous()
    for name in ("reference", "numba"):
        out = step.find_kernel(name, arguments[1])(q, *arguments[1:])
        torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reference_in_half_precision(step, dtype):
    """Products and sums are in float32: only the result is rounded."""
    arguments, expected = case(4, 9, 3, 16, [9, 30], dtype=dtype)
    out = step.paged_attention(*arguments)  # numba computes in float32 only, so this is the reference
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_infinite_scores_stay_visible(step):
    """A model that overflows must not be answered with something that looks like a number."""
    arguments, _ = case(4, 3, 3, 16, [9])
    arguments[0][0, 1] = math.nan
    for name in ("reference", "numba"):
        out = step.find_kernel(name, arguments[1])(*arguments)
        assert out[0, 1].isnan().all()
        assert out[0, 0].isfinite().all()


# --- which kernel ---


def pool(device="cpu", dtype=torch.float32, block_size=16):
    return torch.empty(2, block_size, 1, 8, dtype=dtype, device=device)


def test_kernel_that_is_chosen(step):
    assert list(step.ATTENTION_KERNELS) == ["numba", "flash_attn", "triton", "reference"]
    assert step.find_kernel(None, pool()) is step.numba_attention
    assert step.find_kernel(None, pool(dtype=torch.bfloat16)) is step.reference_attention
    assert step.find_kernel(None, pool("meta")) is step.reference_attention


@pytest.mark.parametrize(
    ("name", "where", "words"),
    [
        ("numba", {"dtype": torch.bfloat16}, "float32"),
        ("numba", {"device": "meta"}, "runs on the CPU"),
        ("triton", {}, "CUDA"),
        ("flash_attn", {}, "CUDA"),
    ],
)
def test_kernel_that_cannot_work_is_refused(step, name, where, words):
    with pytest.raises(ValueError, match=f"{name}.*{words}") as error:
        step.find_kernel(name, pool(**where))
    assert "\n" not in str(error.value)


def test_flash_attn_needs_blocks_of_256(step, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert "multiples of 256" in step.obstacle("flash_attn", "cuda", torch.float16, 16)
    assert "float16 and bfloat16" in step.obstacle("flash_attn", "cuda", torch.float32, 256)
    assert step.obstacle("flash_attn", "cuda", torch.bfloat16, 512) is None
    assert step.obstacle("triton", "cuda", torch.float32, 3) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in step.obstacle("triton", "cuda", torch.float32, 3)


def test_use_attention(step, load_tiny):
    model = load_tiny(step)
    expected = step.generate(model, [[1, 2, 3, 4, 5]], 8, block_size=4)
    try:
        step.use_attention("reference")
        assert step.find_kernel(step.chosen_kernel, pool()) is step.reference_attention
        assert step.generate(model, [[1, 2, 3, 4, 5]], 8, block_size=4) == expected
        with pytest.raises(ValueError, match="CUDA"):
            step.use_attention("flash_attn")
        assert step.chosen_kernel == "reference"
        step.use_attention("numba")
        with pytest.raises(ValueError, match="float32"):
            step.ModelRunner(step.build_model(model.config).bfloat16(), num_blocks=2)
    finally:
        step.use_attention(None)


# --- transformers' own models ---


@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen2", "qwen3"])
def test_transformers_attends_through_the_block_table(step, make_tiny, kind, monkeypatch):
    """Prompts of uneven lengths through transformers' model, with tokens equal to its own, and no history copied."""
    _, model = make_tiny(kind)
    prompts = [list(range(2, 2 + n)) for n in (1, 4, 5, 17)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        expected.append(out[0, len(prompt) :].tolist())
    before = model.config._attn_implementation
    wrapped = TransformersModel(model)
    monkeypatch.setattr(step, "read_slots", None)
    runner = hostile_runner(step, wrapped, num_blocks=40, block_size=4)
    outputs = step.generate(wrapped, prompts, 10, runner=runner)
    assert model.config._attn_implementation == before
    assert [out[: len(e)] for out, e in zip(outputs, expected)] == expected


def test_models_that_do_not_attend_to_everything_get_dense_tensors():
    sizes = {
        "vocab_size": 99,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    for model_type, extra, expected in [
        ("mistral", {"sliding_window": 8}, False),
        ("mistral", {"sliding_window": None}, True),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, False),
        ("qwen2", {}, True),
        ("gemma2", {"head_dim": 8}, False),
        ("gpt2", {}, False),
    ]:
        config = AutoConfig.for_model(model_type, **{**sizes, "num_key_value_heads": 2, **extra})
        assert can_read_blocks(SimpleNamespace(config=config)) == expected, model_type


# --- kernels for a GPU, without one ---


def kernels_beside(step, file):
    spec = importlib.util.spec_from_file_location(file, Path(step.__file__).with_name(f"{file}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_flash_arguments(step, monkeypatch):
    """Without a GPU, only the way the arguments are built can be tested: here on a stand-in that reads them."""
    kernels = kernels_beside(step, "kernels_flash")
    arguments, expected = case(256, 6, 2, 64, [1, 300])

    def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal):
        assert q.shape == (2, 1, 6, 64)
        assert cache_seqlens.dtype == block_table.dtype == torch.int32
        assert k_cache.shape[1] % 256 == 0
        args = q[:, 0], k_cache, v_cache, block_table, cache_seqlens, softmax_scale
        return step.reference_attention(*args)[:, None]

    stand_in = type(sys)("flash_attn")
    stand_in.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    torch.testing.assert_close(kernels.paged_attention(*arguments).double(), expected, rtol=2e-5, atol=2e-6)


TRITON_SHAPES = [SHAPES[0], SHAPES[1], SHAPES[5], SHAPES[8]]


def folders_by_text(file):
    """One folder for each text that the steps' copies of this file have."""
    copies = [step.path / file for step in list_steps() if (step.path / file).is_file()]
    return list({copy.read_text(encoding="utf-8"): copy.parent for copy in copies}.values())


@pytest.mark.parametrize("file", ["kernels_triton.py", "kernels_flash.py"])
def test_copies_are_equal(file):
    assert len(folders_by_text(file)) == 1


def test_triton_through_its_interpreter():
    """In a process of its own: the interpreter must be asked for before the kernels are decorated."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "tests.test_kernels", str(folders_by_text("kernels_triton.py")[0])]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["attention"] * len(TRITON_SHAPES) + ["store"] * 2


def check_triton(kernels) -> None:
    for shape in TRITON_SHAPES:
        arguments, expected = case(*shape)
        torch.testing.assert_close(kernels.paged_attention(*arguments).double(), expected, rtol=2e-5, atol=2e-6)
        print("attention")
    for heads, head_dim in ((3, 64), (2, 7)):
        pools = torch.full((2, 5, 4, heads, head_dim), math.nan)
        expected, new = pools.clone(), torch.randn(2, 4, heads, head_dim)
        slots = torch.tensor([7, -1, 0, 18])
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[:, slot // 4, slot % 4] = new[:, token]
        kernels.write_slots(*pools, *new, slots)
        torch.testing.assert_close(pools, expected, rtol=0, atol=0, equal_nan=True)
        print("store")


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    import kernels_triton

    check_triton(kernels_triton)
