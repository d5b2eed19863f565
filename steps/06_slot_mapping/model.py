"""Paged KV cache, batched decode: the pool itself is the transformers cache, addressed by flat slot ids.

Dimension key: L layers, N blocks in the pool, P slots per block, T new tokens, S cached tokens, B batch,
H query heads, K key/value heads, D head_dim, E hidden size, V vocabulary.
"""

import inspect
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
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
        """Make room for num_tokens more tokens of each request; compute the slots that all layers will use."""
        for request_id in request_ids:
            self.reserve(request_id, num_tokens)
        self.request_ids, self.num_tokens = request_ids, num_tokens
        self.max_len = max(self.seq_lens[r] for r in request_ids)
        tables = [self.block_tables[r] for r in request_ids]
        tables = torch.tensor([table + [0] * (max(map(len, tables)) - len(table)) for table in tables])
        padding = self.max_len - torch.tensor([self.seq_lens[r] for r in request_ids])[:, None]
        positions = torch.arange(self.max_len + num_tokens) - padding
        blocks = tables.gather(1, positions.clamp(min=0) // self.block_size)
        slots = blocks * self.block_size + positions % self.block_size
        slots = slots.masked_fill(positions < 0, self.num_blocks * self.block_size)
        self.slots = slots.to(self.k_pools.device)
        self.slot_mapping = self.slots[:, self.max_len :].flatten()

    def update(self, k, v, layer_idx, *args, **kwargs):
        """Store the step's k and v [B, K, T, D]; returns all of the requests', left-padded: each [B, K, S + T, D]."""
        k_pool, v_pool = self.padded_k_pools[layer_idx], self.padded_v_pools[layer_idx]
        new_k, new_v = (new.transpose(1, 2).flatten(0, 1) for new in (k, v))
        write_slots(k_pool, v_pool, new_k, new_v, self.slot_mapping)
        if self.max_len > 0:
            k, v = (dense.transpose(1, 2) for dense in read_slots(k_pool, v_pool, self.slots))
        return k, v

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
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=T > 1, enable_gqa=True)
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
        columns = torch.arange(int(seq_lens.max()) + 1, device=self.device)
        out = self.model(
            torch.tensor(tokens, device=self.device)[:, None],
            attention_mask=(columns >= seq_lens.max() - seq_lens).long(),
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
