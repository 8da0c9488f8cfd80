# mypy: ignore-errors
# Runs in a virtual environment of its own, which has llama_cpp and gguf but not pdcluster.
"""llama.cpp as a rival of `bench.engine`: one process that does one measured thing per line of its input.

    python rival_llama.py CHECKPOINT      after `pip install llama-cpp-python==0.3.36 gguf safetensors`

A bfloat16 GGUF of the checkpoint (Qwen3) is written once beside it. The protocol is that of `bench.rivals.engines`.
"""

import ctypes
import json
import sys
import time
from pathlib import Path

import gguf
import llama_cpp as ll
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MOST_TOKENS = 2200
MOST_ROWS, MOST_LARGE_ROWS = 32, 8
# As in `bench.engine`: of a model that is asked for so many rows at most.
LARGE_WIDTH = 1024


def main():
    directory = Path(sys.argv[1])
    path = directory / "model-bf16.gguf"
    if not path.exists():
        write_gguf(directory, path)
    model, context = load(path)
    answer({"version": ll.__version__})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["kind"] == "prefill":
            answer({"seconds": prefill(context, asked["tokens"])})
        else:
            answer({"seconds": decode(model, context, asked["batch"], asked["context"], asked["steps"])})


def answer(what):
    print("@" + json.dumps(what), flush=True)


def write_gguf(directory, path):
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path) + ".part", "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, shape, raw in tensors(directory / "model.safetensors"):
        target = gguf_name(name)
        if len(shape) == 1:
            writer.add_tensor(target, (raw.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(target, raw.reshape(shape).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    Path(str(path) + ".part").rename(path)


def tensors(path):
    """Name, shape and bfloat16 bits of each tensor; read by hand, as numpy has no bfloat16."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", entry
            begin, end = entry["data_offsets"]
            yield name, entry["shape"], np.array(data[begin:end]).view(np.uint16)


def gguf_name(name):
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def load(path):
    ll.llama_log_set(QUIET, ctypes.c_void_p())
    ll.llama_backend_init()
    model = ll.llama_load_model_from_file(str(path).encode(), ll.llama_model_default_params())
    params = ll.llama_context_default_params()
    rows = MOST_ROWS if ll.llama_model_n_embd(model) < LARGE_WIDTH else MOST_LARGE_ROWS
    params.n_ctx = rows * MOST_TOKENS  # each has an equal part of it
    params.n_batch = params.n_ubatch = 2048
    params.n_seq_max = rows
    params.n_threads = params.n_threads_batch = 1
    context = ll.llama_new_context_with_model(model, params)
    assert context, "llama.cpp made no context"
    return model, context


@ll.llama_log_callback
def QUIET(*_):
    pass


def prefill(context, tokens):
    forget(context)
    begin = time.perf_counter()
    run(context, [(0, position) for position in range(tokens)], last_only=True)
    return time.perf_counter() - begin


def decode(model, context, batch, length, steps):
    """Seconds of one step, without the steps that fill the contexts."""
    forget(context)
    for row in range(batch):
        run(context, [(row, position) for position in range(length)], last_only=True)
    run(context, [(row, length) for row in range(batch)], last_only=False)
    vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    begin = time.perf_counter()
    for step in range(steps):
        run(context, [(row, length + 1 + step) for row in range(batch)], last_only=False)
        for row in range(batch):
            np.ctypeslib.as_array(ll.llama_get_logits_ith(context, row), (vocabulary,)).argmax()
    return (time.perf_counter() - begin) / steps


def forget(context):
    ll.llama_memory_clear(ll.llama_get_memory(context), True)


def run(context, places, *, last_only):
    batch = ll.llama_batch_init(len(places), 0, 1)
    batch.n_tokens = len(places)
    for index, (row, position) in enumerate(places):
        batch.token[index] = 1 + (index * 7919) % 1000
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = row
        batch.logits[index] = not last_only or index == len(places) - 1
    if ll.llama_decode(context, batch) != 0:
        raise RuntimeError("llama_decode failed")
    ll.llama_get_logits_ith(context, len(places) - 1)[0]
    ll.llama_batch_free(batch)


if __name__ == "__main__":
    main()
