"""llama.cpp on the CPU in float32, through xllamacpp: its server, called directly. The weights are converted once."""

import json
import os
import sys
import time

sys.path.pop(0)  # this folder: the names in it are files of ours, not packages
import xllamacpp as xlc

spec = json.load(sys.stdin)
if (spec["device"], spec["dtype"]) != ("cpu", "float32"):
    sys.exit("llama_cpp: only float32 on cpu")
folder = os.path.join(spec["work"], "llama_cpp")
path = os.path.join(folder, "model-f32.gguf")
prompts = spec["prompts"]


def convert():
    import gguf
    from safetensors import safe_open

    with open(os.path.join(spec["model"], "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    if config["model_type"] != "llama":
        sys.exit(f"llama_cpp: model type {config['model_type']}, not llama")
    layers, vocab = config["num_hidden_layers"], config["vocab_size"]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    head_dim = config.get("head_dim") or config["hidden_size"] // heads["q_proj"]
    writer = gguf.GGUFWriter(path + ".tmp", "llama")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(vocab)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)

    # The vocabulary has numbers for words: answers come as text only, and this reads them back. It also leaves it no
    # stop token to know by its text (it forbids those it ignores) but the last one, which nobody generates.
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"{number}\u0120" for number in range(vocab)])  # U+0120 is the space of this tokenizer
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab)
    writer.add_token_merges(["0 0"])  # it wants some; nothing is encoded
    writer.add_eos_token_id(vocab - 1)
    writer.add_add_bos_token(False)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    with safe_open(os.path.join(spec["model"], "model.safetensors"), framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (no dictionary)
            if (dtype := tensors.get_slice(name).get_dtype()) != "F32":
                sys.exit(f"llama_cpp: {name} is {dtype}, only F32 is read")
            tensor = tensors.get_tensor(name)
            if (count := heads.get(name.split(".")[-2])) is not None:  # rotary pairs: from halves to neighbours
                halves = tensor.reshape(count, 2, head_dim // 2, *tensor.shape[1:])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(path + ".tmp", path)


if not os.path.exists(path):
    os.makedirs(folder, exist_ok=True)
    convert()
params = xlc.CommonParams()
params.model.path = path
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = spec["threads"]
params.n_parallel = len(prompts)
room = max(map(len, prompts)) + spec["new_tokens"] + 8
params.n_ctx = -(-room // 256) * 256 * len(prompts)  # shared out evenly, in multiples of 256
params.cache_type_k = params.cache_type_v = xlc.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xlc.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cache_ram_mib = params.n_ctx_checkpoints = 0  # nothing is kept from one request for the next
params.cache_prompt = params.cache_idle_slots = params.fit_params = False
params.slot_prompt_similarity = 0.0
server = xlc.Server(params)


def generate(new_tokens):
    request = {"prompt": prompts, "n_predict": new_tokens, "temperature": 0.0, "top_k": 1, "samplers": ["top_k"]}
    request |= {"ignore_eos": True, "cache_prompt": False}
    answer = server.handle_completions(request)  # one request, a slot and a sequence for each prompt
    if "choices" not in answer:
        sys.exit(f"llama_cpp: {answer}")
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [[int(word) for word in choice["text"].split()] for choice in choices]


generate(4)
start = time.perf_counter()
ids = generate(spec["new_tokens"])
seconds = time.perf_counter() - start
print(json.dumps({"token_ids": ids, "seconds": seconds, "version": xlc.__version__}))
