"""Paged KV cache, batched decode: attention reads keys and values where they lie, through the block table.

Dimension key: L layers, N blocks in the pool, P slots per block, T new tokens, S cached tokens, B batch,
H query heads, K key/value heads, D head_dim, E hidden size, V vocabulary.
"""

import functools
import importlib.util
import inspect
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba.core import event
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, Cache, LlamaConfig


def write_slots(k_pool, v_pool, k, v, slot_mapping):
    """Store k and v [T, K, D], tokens of any requests, in the slots slot_mapping [T] (int64) of one layer's pools.

    k_pool and v_pool: [N, P, K, D]. A token's slot is block * P + its place in the block; each slot at most once.
    """
    k_pool.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    v_pool.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)


def read_slots(k_pool, v_pool, slots):
    """Copy k and v out of the slots [...] (int64) of one layer's pools [N, P, K, D]: each [..., K, D]."""
    k = k_pool.flatten(0, 1).index_select(0, slots.flatten())
    v = v_pool.flatten(0, 1).index_select(0, slots.flatten())
    return k.unflatten(0, slots.shape), v.unflatten(0, slots.shape)


def paged_attention(q, k_pool, v_pool, block_tables, seq_lens, scale):
    """Attention of each request's newest token to its history, read through the block table: [B, H, D].

    q: [B, H, D]. k_pool and v_pool: one layer's pools [N, P, K, D]. block_tables [B, M] (int32): a request's block ids
    in order; what stands behind the seq_lens [B] (int32, at least 1) tokens of a request is never read.
    """
    return find_kernel(chosen_kernel, k_pool)(q, k_pool, v_pool, block_tables, seq_lens, scale)


def reference_attention(q, k_pool, v_pool, block_tables, seq_lens, scale):
    """The meaning of paged_attention in plain torch, one request and one block at a time.

    Online softmax (arXiv 1805.02867): weights are relative to the largest score so far, and what was summed up before
    is scaled down when a larger one comes.
    """
    num_kv_heads, block_size, out = k_pool.shape[2], k_pool.shape[1], torch.empty_like(q)
    for b, seq_len in enumerate(seq_lens.tolist()):
        heads = q[b].float().unflatten(0, (num_kv_heads, -1)) * scale  # [K, H / K, D]
        top = torch.full((*heads.shape[:2], 1), -math.inf, device=q.device)
        total, summed = torch.zeros_like(top), torch.zeros_like(heads)
        for i, start in enumerate(range(0, seq_len, block_size)):
            tokens, block = min(block_size, seq_len - start), block_tables[b, i]
            k, v = (pool[block, :tokens].float().transpose(0, 1) for pool in (k_pool, v_pool))  # [K, tokens, D]
            scores = heads @ k.transpose(1, 2)
            new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
            weights, shrink = (scores - new_top).exp(), (top - new_top).exp()
            total, summed = total * shrink + weights.sum(dim=-1, keepdim=True), summed * shrink + weights @ v
            top = new_top
        out[b] = (summed / total).flatten(0, 1)
    return out


def compiled(signature, parallel=True):
    """Compile the decorated function for these types at once, or take what an earlier process compiled."""

    def compile_now(function):
        # The code kept on disk names the module it is from; "__main__" exists whatever name this file is loaded under.
        function.__module__ = "__main__"
        with event.install_listener("numba:compile", CompileNotice(function.__name__)):
            # fastmath may reorder sums, but not assume that there is no infinity or NaN.
            return numba.njit(
                signature, parallel=parallel, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
            )(function)

    return compile_now


class CompileNotice(event.Listener):
    """Says on stderr why the first start takes seconds."""

    def __init__(self, name):
        self.notice = f"compiling {name}, once for this file"

    def on_start(self, event):
        if self.notice and sys.stderr.isatty():
            print(self.notice, file=sys.stderr, flush=True)
        self.notice = None

    def on_end(self, event):
        pass


TILE = 64  # tokens whose weights are worked out together


@compiled("f4[:, :, ::1](f4[:, :, ::1], f4[:, :, :, ::1], f4[:, :, :, ::1], i4[:, ::1], i4[::1], f4, i8)")
def attend(q, k_pool, v_pool, block_tables, seq_lens, scale, num_threads):
    """paged_attention on arrays. Each of num_threads takes an equal share of all requests' tokens.

    Within a tile it walks along four stretches at once: memory delivers four streams faster than one.
    """
    B, H, D = q.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    group = H // num_kv_heads
    summed, out = np.empty((num_threads, B, H, D), np.float32), np.empty((B, H, D), np.float32)
    top, total = np.empty((num_threads, B, H), np.float32), np.empty((num_threads, B, H), np.float32)
    all_tokens = 0
    for b in range(B):
        all_tokens += seq_lens[b]
    for t in numba.prange(num_threads):
        first, last = all_tokens * t // num_threads, all_tokens * (t + 1) // num_threads
        weights = np.empty((H, TILE), np.float32)
        block, slot = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
        before = 0
        for b in range(B):
            start, stop = max(first - before, 0), min(last - before, seq_lens[b])
            before += seq_lens[b]
            heads, tops, totals, sums = q[b], top[t, b], total[t, b], summed[t, b]
            for h in range(H):
                tops[h], totals[h] = -np.inf, 0
                for d in range(D):
                    sums[h, d] = 0
            for tile in range(start, stop, TILE):
                tokens = min(TILE, stop - tile)
                quarter = (tokens + 3) // 4
                for i in range(4 * quarter):
                    position = tile + min(i, tokens - 1)
                    block[i], slot[i] = block_tables[b, position // block_size], position % block_size
                for i0 in range(quarter):
                    i1, i2, i3 = i0 + quarter, i0 + 2 * quarter, i0 + 3 * quarter
                    for kv in range(num_kv_heads):
                        k0, k1 = k_pool[block[i0], slot[i0], kv], k_pool[block[i1], slot[i1], kv]
                        k2, k3 = k_pool[block[i2], slot[i2], kv], k_pool[block[i3], slot[i3], kv]
                        for h in range(kv * group, (kv + 1) * group):
                            head, w = heads[h], weights[h]
                            s0 = s1 = s2 = s3 = np.float32(0)
                            for d in range(D):
                                s0 += head[d] * k0[d]
                                s1 += head[d] * k1[d]
                                s2 += head[d] * k2[d]
                                s3 += head[d] * k3[d]
                            w[i0], w[i1], w[i2], w[i3] = s0 * scale, s1 * scale, s2 * scale, s3 * scale
                for h in range(H):
                    w, s, highest, tile_total = weights[h], sums[h], tops[h], np.float32(0)
                    for i in range(tokens):
                        highest = max(highest, w[i])
                    for i in range(tokens):
                        w[i] = math.exp(w[i] - highest)
                        tile_total += w[i]
                    for i in range(tokens, 4 * quarter):
                        w[i] = 0
                    shrink = math.exp(tops[h] - highest)
                    tops[h], totals[h] = highest, totals[h] * shrink + tile_total
                    for d in range(D):
                        s[d] *= shrink
                for i0 in range(quarter):
                    i1, i2, i3 = i0 + quarter, i0 + 2 * quarter, i0 + 3 * quarter
                    for kv in range(num_kv_heads):
                        v0, v1 = v_pool[block[i0], slot[i0], kv], v_pool[block[i1], slot[i1], kv]
                        v2, v3 = v_pool[block[i2], slot[i2], kv], v_pool[block[i3], slot[i3], kv]
                        for h in range(kv * group, (kv + 1) * group):
                            w, s = weights[h], sums[h]
                            w0, w1, w2, w3 = w[i0], w[i1], w[i2], w[i3]
                            for d in range(D):
                                s[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
    for b in range(B):
        for h in range(H):
            highest, weight_sum = np.float32(-np.inf), np.float32(0)
            for t in range(num_threads):
                highest = max(highest, top[t, b, h])
            for d in range(D):
                out[b, h, d] = 0
            for t in range(num_threads):
                shrink = np.float32(math.exp(top[t, b, h] - highest))
                weight_sum += shrink * total[t, b, h]
                for d in range(D):
                    out[b, h, d] += shrink * summed[t, b, h, d]
            for d in range(D):
                out[b, h, d] /= weight_sum
    return out


def numba_attention(q, k_pool, v_pool, block_tables, seq_lens, scale):
    """paged_attention on the CPU in float32, on as many threads as torch has."""
    num_threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(num_threads)
    arrays = (tensor.numpy() for tensor in (q.contiguous(), k_pool, v_pool, block_tables, seq_lens))
    return torch.from_numpy(attend(*arrays, scale, num_threads))


@functools.cache
def attention_beside(file):
    """paged_attention out of the file beside this one that is for hardware or packages which few readers have."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, Path(__file__).with_name(file))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.paged_attention


# By name, the best first; what each needs is in obstacle().
ATTENTION_KERNELS = {
    "numba": lambda: numba_attention,
    "flash_attn": lambda: attention_beside("kernels_flash.py"),
    "triton": lambda: attention_beside("kernels_triton.py"),
    "reference": lambda: reference_attention,
}
chosen_kernel = None


def obstacle(name, device, dtype, block_size):
    """Why the kernel cannot read such a pool here, or None. What is not known yet is None and not in the way."""
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if name == "numba" and device not in (None, "cpu"):
        return f"it runs on the CPU, and the pool is on {device}"
    if name == "numba" and dtype not in (None, torch.float32):
        return f"it computes in float32, and the pool is {dtype}"
    if name in ("flash_attn", "triton") and not interpreted:
        if device not in (None, "cuda") or not torch.cuda.is_available():
            return "it needs a CUDA device (--device cuda)"
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed"
    if name == "flash_attn" and dtype not in (None, torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16 (--dtype bfloat16), and the pool is {dtype}"
    if name == "flash_attn" and block_size is not None and block_size % 256 != 0:
        return f"it takes block sizes that are multiples of 256 (--block-size 256), and the pool's is {block_size}"
    return None


@functools.cache
def kernel_for(name, device, dtype, block_size):
    names = ATTENTION_KERNELS if name is None else [name]
    for name in names:
        reason = obstacle(name, device, dtype, block_size)
        if reason is None:
            return ATTENTION_KERNELS[name]()
    raise ValueError(f"attention kernel {name} cannot be used: {reason}")


def find_kernel(name, pool):
    """The kernel of that name, or for None the best one, to read this pool; ValueError says why it cannot."""
    return kernel_for(name, pool.device.type, pool.dtype, pool.shape[1])


def use_attention(name):
    """Compute paged_attention by the kernel of that name from now on, or for None by the best one for the pool.

    Raises ValueError with the reason if it cannot work on this machine.
    """
    global chosen_kernel
    if name is not None and (reason := obstacle(name, None, None, None)):
        raise ValueError(reason)
    chosen_kernel = name


class OutOfBlocks(RuntimeError):
    """The pool cannot hold what is asked for; `outputs` keeps the token ids produced before that."""

    def __init__(self, needed, free):
        super().__init__(f"{needed} more KV cache blocks needed, {free} free: raise num_blocks (--num-blocks)")
        self.needed, self.free, self.outputs = needed, free, []


class PagedKVCache(Cache):
    """Keys and values of many requests in one pool of fixed-size blocks; attention writes and reads it by `update`.

    k_pools and v_pools: [L, N, P, K, D]. block_tables and seq_lens: by request id.
    """

    def __init__(self, config, num_blocks, block_size, dtype, device):
        super().__init__(layers=[])
        # One block more than is handed out, always zero, for padding to read: index -1 would be a real slot, the last.
        shape = (config.num_hidden_layers, num_blocks + 1, block_size, config.num_key_value_heads, head_dim(config))
        self.padded_k_pools = torch.zeros(shape, dtype=dtype, device=device)
        self.padded_v_pools = torch.zeros(shape, dtype=dtype, device=device)
        self.k_pools, self.v_pools = self.padded_k_pools[:, :num_blocks], self.padded_v_pools[:, :num_blocks]
        self.num_blocks, self.block_size, self.max_len = num_blocks, block_size, 0
        find_kernel(chosen_kernel, self.k_pools[0])
        self.free_blocks = list(range(num_blocks))
        self.block_tables, self.seq_lens = {}, {}
        self.peak_blocks = 0

    def reserve(self, request_id, num_tokens):
        """Give the request the blocks for num_tokens more tokens. Raises OutOfBlocks and then changes nothing."""
        table, seq_len = self.block_tables.get(request_id, []), self.seq_lens.get(request_id, 0)
        needed = math.ceil((seq_len + num_tokens) / self.block_size) - len(table)
        if needed > len(self.free_blocks):
            raise OutOfBlocks(needed, len(self.free_blocks))
        self.block_tables[request_id] = table + [self.free_blocks.pop() for _ in range(needed)]
        self.seq_lens[request_id] = seq_len
        self.peak_blocks = max(self.peak_blocks, self.num_blocks - len(self.free_blocks))

    def begin_step(self, request_ids, num_tokens):
        """Make room for num_tokens more tokens of each request; compute the tables and slots for all layers."""
        for request_id in request_ids:
            self.reserve(request_id, num_tokens)
        self.request_ids, self.num_tokens, self.dense_slots = request_ids, num_tokens, None
        self.max_len = max(self.seq_lens[r] for r in request_ids)
        tables = [self.block_tables[r] for r in request_ids]
        tables = torch.tensor([table + [0] * (max(map(len, tables)) - len(table)) for table in tables])
        seq_lens = torch.tensor([self.seq_lens[r] for r in request_ids])
        positions = seq_lens[:, None] + torch.arange(num_tokens)
        slots = tables.gather(1, positions // self.block_size) * self.block_size + positions % self.block_size
        device = self.k_pools.device
        self.slot_mapping = slots.flatten().to(device)
        self.step_tables, self.step_lens = tables.int().to(device), (seq_lens + num_tokens).int().to(device)

    def store(self, k, v, layer_idx):
        """Store the step's k and v [B, K, T, D]."""
        new_k, new_v = (new.transpose(1, 2).flatten(0, 1) for new in (k, v))
        write_slots(self.k_pools[layer_idx], self.v_pools[layer_idx], new_k, new_v, self.slot_mapping)

    def attend(self, q, k, v, layer_idx, scale=None):
        """Store the step's k and v [B, K, T, D]; attention of q [B, H, T, D] to all of the requests' tokens.

        T is 1 behind a history. scale None: 1 / sqrt(D).
        """
        self.store(k, v, layer_idx)
        if self.max_len == 0:
            return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=scale, enable_gqa=True)
        assert q.shape[2] == 1
        pools = self.k_pools[layer_idx], self.v_pools[layer_idx]
        scale = q.shape[3] ** -0.5 if scale is None else scale
        return paged_attention(q[:, :, 0], *pools, self.step_tables, self.step_lens, scale)[:, :, None]

    def update(self, k, v, layer_idx, *args, **kwargs):
        """For models whose attention cannot read blocks: store, and return all tokens, each [B, K, S + T, D]."""
        self.store(k, v, layer_idx)
        if self.max_len > 0:
            if self.dense_slots is None:
                self.dense_slots = self.left_padded_slots()
            padded = self.padded_k_pools[layer_idx], self.padded_v_pools[layer_idx]
            k, v = (dense.transpose(1, 2) for dense in read_slots(*padded, self.dense_slots))
        return k, v

    def left_padded_slots(self):
        """Slots [B, S + T] of all of the requests' tokens."""
        padding = self.max_len + self.num_tokens - self.step_lens[:, None]
        positions = torch.arange(self.max_len + self.num_tokens, device=padding.device) - padding
        blocks = self.step_tables.long().gather(1, positions.clamp(min=0) // self.block_size)
        slots = blocks * self.block_size + positions % self.block_size
        return slots.masked_fill(positions < 0, self.num_blocks * self.block_size)

    def end_step(self):
        """Count the step's tokens as stored."""
        for request_id in self.request_ids:
            self.seq_lens[request_id] += self.num_tokens

    def get_seq_length(self, layer_idx=0):
        return self.max_len

    def get_mask_sizes(self, query_length, layer_idx):
        return self.max_len + query_length, 0

    def free(self, request_id):
        self.free_blocks += self.block_tables.pop(request_id)
        del self.seq_lens[request_id]


def head_dim(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_frequencies(config):
    """Rotation per position of each pair of dimensions, [D / 2]; with Llama 3's stretching of the slow ones.

    Source: RoFormer (arXiv 2104.09864); Llama 3.1 scaling as in transformers' modeling_rope_utils.
    """
    rope = config.rope_parameters
    # The device is named because load_model builds the decoder on "meta", where nothing has a value.
    exponents = torch.arange(0, head_dim(config), 2, device="cpu").float() / head_dim(config)
    freqs = rope["rope_theta"] ** -exponents
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * freqs / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        freqs = keep * freqs + (1 - keep) * freqs / rope["factor"]
    return freqs


def rotate(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, head_dim(config)
        q_size, kv_size = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        bias = getattr(config, "attention_bias", False)
        qkv_bias = bias or config.model_type == "qwen2"
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=bias)
        has_norm = config.model_type == "qwen3"
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if has_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if has_norm else nn.Identity()

    def forward(self, x, cos, sin, mask, past_key_values):
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, -1, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(B, T, -1, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past_key_values is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=T > 1, enable_gqa=True)
        else:
            out = past_key_values.attend(q, k, v, self.layer_idx)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer_idx)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, *args):
        x = x + self.self_attn(self.input_layernorm(x), *args)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Llama and Qwen decoder; called like a transformers causal LM, but its logits are the last position's only."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.register_buffer("rope_freqs", rope_frequencies(config), persistent=False)

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=True):
        """input_ids and position_ids: [B, T]; attention_mask: [B, S + T], 0 for padding; T is 1 behind a history."""
        T = input_ids.shape[1]
        assert T == 1 or attention_mask is None
        if position_ids is None:
            position_ids = torch.arange(T, device=input_ids.device)[None]
        angles = position_ids[:, None, :, None] * torch.cat((self.rope_freqs, self.rope_freqs)).float()
        x = self.model.embed_tokens(input_ids)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask, past_key_values)
        logits = self.lm_head(self.model.norm(x[:, -1:]))
        return SimpleNamespace(logits=logits, past_key_values=past_key_values)


def check_config(config):
    """ValueError when the decoder above would compute something else than this config asks for."""
    if config.model_type not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"unsupported architecture {config.model_type!r}: this decoder knows llama, qwen2 and qwen3")
    if config.hidden_act != "silu":
        raise ValueError(f"unsupported activation {config.hidden_act!r}: this decoder knows silu")
    if (rope_type := config.rope_parameters["rope_type"]) not in ("default", "llama3"):
        raise ValueError(f"unsupported RoPE scaling {rope_type!r}: this decoder knows default and llama3")
    if getattr(config, "use_sliding_window", False):
        raise ValueError("unsupported sliding-window attention: this decoder attends to the whole history")


def build_model(config):
    """A decoder with random weights."""
    check_config(config)
    return Decoder(config).eval().requires_grad_(False)


def load_model(path, device="cpu", dtype=torch.float32):
    """The decoder with the weights of a transformers model folder. ValueError says what does not fit."""
    folder = Path(path)
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no model folder: it needs config.json and *.safetensors")
    weights = {}
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        for file in files:
            weights |= {name: w.to(dtype) for name, w in load_file(file, device=str(device)).items()}
    except Exception as error:  # transformers and safetensors raise many kinds, in many lines
        raise ValueError(f"{folder} is damaged or of an unknown kind: {' '.join(str(error).split())[:200]}") from None
    check_config(config)
    with torch.device("meta"):
        model = Decoder(config)
    weights = {name: w for name, w in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings and "model.embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    shapes, found = ({name: w.shape for name, w in tensors.items()} for tensors in (model.state_dict(), weights))
    wrong = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
    if wrong:
        raise ValueError(f"{folder}: {wrong[0]} is missing, unknown or misshapen ({len(wrong)} such tensors)")
    model.load_state_dict(weights, assign=True)
    return model.to(device).eval().requires_grad_(False)


class ModelRunner:
    """Drives a causal LM with its keys and values in a PagedKVCache."""

    def __init__(self, model, *, num_blocks, block_size=16):
        weight = next(model.parameters())
        self.model, self.device = model, weight.device
        self.cache = PagedKVCache(model.config, num_blocks, block_size, weight.dtype, weight.device)
        # transformers is renaming the argument; the signature says which name this version takes without a warning.
        self.cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def prefill(self, request_id, prompt):
        """Run a new request's whole prompt (token ids); returns its first new token id."""
        self.cache.begin_step([request_id], len(prompt))
        ids = torch.tensor([prompt], device=self.device)
        out = self.model(ids, use_cache=True, **{self.cache_argument: self.cache})
        self.cache.end_step()
        return int(out.logits[0, -1].argmax())

    def decode_batch(self, request_ids, tokens):
        """Run one more token of each request behind its history; returns their next token ids."""
        self.cache.begin_step(request_ids, 1)
        seq_lens = torch.tensor([self.cache.seq_lens[r] for r in request_ids], device=self.device)[:, None]
        mask = None
        if not isinstance(self.model, Decoder):  # whose attention gets the histories left-padded, by update
            columns = torch.arange(int(seq_lens.max()) + 1, device=self.device)
            mask = (columns >= seq_lens.max() - seq_lens).long()
        out = self.model(
            torch.tensor(tokens, device=self.device)[:, None],
            attention_mask=mask,
            position_ids=seq_lens,
            use_cache=True,
            **{self.cache_argument: self.cache},
        )
        self.cache.end_step()
        return out.logits[:, -1].argmax(dim=-1).tolist()


def token_limits(config, prompts, max_new_tokens):
    """max_new_tokens as one number per prompt. ValueError for what cannot be generated."""
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != len(prompts):
        raise ValueError(f"max_new_tokens has {len(limits)} entries for {len(prompts)} prompts")
    for i, (prompt, limit) in enumerate(zip(prompts, limits)):
        if limit < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {limit}")
        if len(prompt) == 0:
            raise ValueError(f"prompt {i} is empty")
        if min(prompt) < 0 or max(prompt) >= config.vocab_size:
            raise ValueError(f"prompt {i} holds a token id outside 0 to {config.vocab_size - 1}")
        if len(prompt) + limit > config.max_position_embeddings:
            positions = config.max_position_embeddings
            raise ValueError(f"prompt {i} is too long: {len(prompt)} + {limit} new tokens, {positions} positions")
    return limits


@torch.inference_mode()
def generate(
    model, prompts, max_new_tokens, *, block_size=16, num_blocks=None, eos_token_id=None, runner=None, on_token=None
):
    """Greedy decoding; returns the new token ids of each prompt (lists of ids).

    max_new_tokens: an int, or one per prompt. num_blocks=None: as many as this call needs. eos_token_id: an int or
    several; the token that ends a request is part of its output. runner: an idle ModelRunner to use (again) instead
    of a new one. on_token(index, token_id) is called as soon as a token is chosen. Raises ValueError for prompts the
    model cannot take, and OutOfBlocks, which keeps what was produced.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    limits = token_limits(model.config, prompts, max_new_tokens)
    stop = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
    if runner is None:
        if num_blocks is None:
            # The last new token is returned, not stored.
            num_blocks = sum(math.ceil((len(p) + n - 1) / block_size) for p, n in zip(prompts, limits))
        runner = ModelRunner(model, num_blocks=num_blocks, block_size=block_size)
    cache, outputs = runner.cache, [[] for _ in prompts]

    def emit(index, token):
        """Record a chosen token; a request that ends with it gives its blocks back at once."""
        outputs[index].append(token)
        if token in stop or len(outputs[index]) == limits[index]:
            cache.free(index)
        if on_token is not None:
            on_token(index, token)

    try:
        for index, prompt in enumerate(prompts):
            emit(index, runner.prefill(index, prompt))
        while running := [index for index in range(len(prompts)) if index in cache.block_tables]:
            tokens = runner.decode_batch(running, [outputs[index][-1] for index in running])
            for index, token in zip(running, tokens):
                emit(index, token)
    except OutOfBlocks as error:
        error.outputs = outputs
        raise
    finally:
        for index in cache.block_tables.keys() & range(len(prompts)):
            cache.free(index)
    return outputs


def self_check():
    """Paged generation must equal generation that keeps no cache and runs the whole sequence for every token."""
    torch.manual_seed(0)
    shape = {"hidden_size": 72, "intermediate_size": 128, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = build_model(LlamaConfig(vocab_size=256, num_hidden_layers=2, **shape))
    prompts = [torch.randint(0, 256, (n,)).tolist() for n in (1, 3, 4, 5, 17)]
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(10):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    assert generate(model, prompts, 10, block_size=4) == expected
    print(f"ok: {len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, equal tokens")


if __name__ == "__main__":
    self_check()
