"""config.json of models as users have them: what serves, and what has to be refused, by name. The values are those of
the releases."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def llama(**changes: Any) -> Json:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float16",
        "transformers_version": "4.31.0", "use_cache": True,
        "initializer_range": 0.02, "pretraining_tp": 1, "tie_word_embeddings": False, "rope_scaling": None, **changes,
    }  # fmt: skip


def llama3(**changes: Any) -> Json:
    base = {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }
    return (
        llama(**base, rope_theta=500000.0)
        | {"max_position_embeddings": 8192, "torch_dtype": "bfloat16", "attention_bias": False}
        | changes
    )


def mistral(**changes: Any) -> Json:
    base = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
    }
    return (
        llama(**base)
        | {"max_position_embeddings": 32768, "sliding_window": 4096, "torch_dtype": "bfloat16", "rope_theta": 10000.0}
        | changes
    )


def qwen2(**changes: Any) -> Json:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
        **changes,
    }  # fmt: skip


def qwen3(**changes: Any) -> Json:
    base = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
    }
    more = {
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
    }
    return qwen2(**base) | more | {"num_key_value_heads": 8, "rope_scaling": None, "sliding_window": None} | changes


LLAMA31_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SERVED: dict[str, Json] = {
    "Llama-2-7b": llama(_name_or_path="meta-llama/Llama-2-7b-hf"),
    "Llama-2-70b": llama(hidden_size=8192, num_attention_heads=64, num_key_value_heads=8, num_hidden_layers=80,
    intermediate_size=28672),
    "CodeLlama-7b": llama(rope_theta=1000000, max_position_embeddings=16384, vocab_size=32016),
    "vicuna-7b-16k": llama(rope_scaling={"factor": 4.0, "type": "linear"}, max_sequence_length=16384,
    tokenizer_class="LlamaTokenizer"),
    "Yarn-Llama-2-7b-64k": llama(
        rope_scaling={"factor": 16.0, "original_max_position_embeddings": 4096, "type": "yarn", "finetuned": True},
        max_position_embeddings=65536,
        auto_map={"AutoConfig": "configuration_llama.LlamaConfig",
        "AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM"},
    ),
    "open_llama_3b, old name": llama(architectures=["LLaMAForCausalLM"], hidden_size=3200, num_attention_heads=32,
    max_sequence_length=2048),
    "no kv heads": {key: value for key, value in llama().items() if key not in ("num_key_value_heads", "rms_norm_eps",
    "max_position_embeddings")},
    "Meta-Llama-3-8B": llama3(),
    "Meta-Llama-3.1-8B-Instruct": llama3(rope_scaling=LLAMA31_ROPE, eos_token_id=[128001, 128008, 128009],
    mlp_bias=False) | {
        "max_position_embeddings": 131072
    },
    "Llama-3.2-1B": llama3(rope_scaling=LLAMA31_ROPE | {"factor": 32.0}, head_dim=64) | {
        "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
    "TinyLlama-1.1B": llama(hidden_size=2048, num_hidden_layers=22, num_key_value_heads=4, intermediate_size=5632,
    torch_dtype="float32"),
    "SmolLM2-135M-Instruct": llama(
        hidden_size=576, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30, intermediate_size=1536,
        vocab_size=49152,
        is_llama_config=True, rope_interleaved=False, rope_theta=100000, tie_word_embeddings=True, pad_token_id=2,
        **{"transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
    ),
    "Yi-6B": llama(num_key_value_heads=4, vocab_size=64000, rope_theta=5000000.0, pad_token_id=0),
    "DeepSeek-R1-Distill-Llama-8B": llama3(rope_scaling=LLAMA31_ROPE),
    "DeepSeek-R1-Distill-Qwen-7B": qwen2(
        hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
        sliding_window=4096, max_window_layers=28,
        use_mrope=False, eos_token_id=151643,
    ),
    "Qwen2-7B": qwen2(hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, sliding_window=131072),
    "Qwen2.5-0.5B-Instruct": qwen2(),
    "Qwen2.5-Coder with yarn": qwen2(rope_scaling=YARN),
    "Qwen2.5, attention_bias said": qwen2(attention_bias=True),
    "Qwen3-0.6B": qwen3(),
    "Qwen3-8B with yarn": qwen3(rope_scaling={"rope_type": "yarn", "factor": 4.0,
    "original_max_position_embeddings": 32768}),
    "Qwen3 of transformers 5": {key: value for key, value in qwen3(
        dtype="bfloat16", rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
        layer_types=["full_attention"] * 28, pad_token_id=None,
    ).items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")},
    "Mistral-7B-v0.1": mistral(),
    "Mistral-7B-v0.3": mistral(sliding_window=None, vocab_size=32768, rope_theta=1000000.0),
    "Mistral-Nemo": mistral(sliding_window=None, hidden_size=5120, num_hidden_layers=40, head_dim=128,
    vocab_size=131072, rope_theta=1000000.0),
    "merged by mergekit": mistral(sliding_window=None, _name_or_path="a/b", head_dim=None),
    "by unsloth": llama3(unsloth_version="2024.9", unsloth_fixed=True, _attn_implementation="flash_attention_2",
    pad_token_id=128255),
    "by axolotl": mistral(sliding_window=None, torch_dtype="float16", use_cache=False,
    axolotl_config={"adapter": "lora"}, model_parallel_size=1),
    "by LLaMA-Factory": qwen2(torch_dtype="auto", _attn_implementation_autoset=True, llamafactory_version="0.9",
    flash_attn="auto"),
    "by torchtune": llama3(torch_dtype="torch.bfloat16", task_specific_params=None, id2label={"0": "LABEL_0"},
    label2id={"LABEL_0": 0}),
    "training settings": qwen2(gradient_checkpointing=True, layerdrop=0.1, deepspeed={"stage": 3}, fsdp=None,
    seq_length=4096, ce_loss="x"),
    "generation settings": llama3(temperature=0.6, top_p=0.9, do_sample=True, max_length=4096, no_repeat_ngram_size=0,
    forced_eos_token_id=None),
    "other libraries' keys": llama3(onnx={"opset": 14}, gptq_checked=False, mlx_version="0.1", speculators_config=None,
    vllm_notes="x"),
    "nulls": llama3(quantization_config=None, sliding_window=None, partial_rotary_factor=None, head_dim=None,
    auto_map=None, layer_types=None),
    "both ropes the same": llama3(
        rope_scaling={"type": "linear", "factor": 2},
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0},
    ),
    "both ropes, defaults written out": qwen3(
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        rope_parameters={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 32.0,
            "beta_slow": 1.0, "rope_theta": 1e6,
        },
    ),
    "a window that Llama's class does not know": llama(sliding_window=4096),
    "no architectures": {key: value for key, value in qwen2().items() if key != "architectures"},
    "whole numbers as floats": llama3() | {"num_hidden_layers": 32.0, "rope_theta": 500000},
    "half": llama(torch_dtype="half"),
    "double": llama(torch_dtype="float64"),
}  # fmt: skip

REFUSED: dict[str, tuple[Json, str]] = {
    "AWQ": (llama(quantization_config={"quant_method": "awq", "bits": 4}), "quantization_config .*awq"),
    "GPTQ": (
        qwen2(quantization_config={"quant_method": "gptq", "bits": 4, "desc_act": False}),
        "quantization_config .*gptq",
    ),
    "fp8": (
        qwen3(quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
        "quantization_config .*fp8",
    ),
    "bitsandbytes": (
        llama3(quantization_config={"load_in_4bit": True, "quant_method": "bitsandbytes"}),
        "bitsandbytes",
    ),
    "compressed-tensors": (
        llama3(quantization_config={"quant_method": "compressed-tensors", "config_groups": {}}),
        "compressed-tensors",
    ),
    "old compressed-tensors": (llama3(compression_config={"format": "float-quantized"}), "compression_config"),
    "MLX": (qwen3(quantization={"group_size": 64, "bits": 4}), "quantization says .*4"),
    "Mixtral": (
        mistral(architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=8),
        "MixtralForCausalLM",
    ),
    "a classifier": (llama(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
    "no head": (qwen3(architectures=["Qwen3Model"]), "Qwen3Model.*no head"),
    "Gemma": (llama(architectures=["Gemma2ForCausalLM"], model_type="gemma2"), "Gemma2ForCausalLM"),
    "Llava": (
        {"architectures": ["LlavaForConditionalGeneration"], "text_config": {}, "vision_config": {}},
        "see or hear",
    ),
    "two architectures": (llama(architectures=["LlamaForCausalLM", "OtherForCausalLM"]), "architectures"),
    "gelu": (llama(hidden_act="gelu"), "hidden_act 'gelu'"),
    "dynamic rope": (llama(rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
    "longrope": (llama(rope_scaling={"type": "longrope", "long_factor": [1.0]}), "longrope"),
    "partial rotary": (llama(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    "partial rotary inside": (
        qwen3(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
        "partial_rotary_factor 0.5",
    ),
    "mrope": (qwen2(use_mrope=True), "use_mrope"),
    "Qwen2.5-7B-Instruct-1M": (
        qwen2(dual_chunk_attention_config={"chunk_size": 262144, "local_size": 8192}),
        "dual_chunk_attention_config",
    ),
    "ropes that differ": (
        llama(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"type": "linear", "factor": 4.0}),
        "differ",
    ),
    "linear attention": (qwen3(layer_types=["linear_attention"] * 28), "linear_attention"),
    "no hidden size": (
        {key: value for key, value in llama().items() if key != "hidden_size"},
        "hidden_size is missing",
    ),
    "a word for a number": (llama(num_hidden_layers="32"), "num_hidden_layers is '32'"),
    "heads that do not divide": (llama(num_key_value_heads=5), "no multiple of num_key_value_heads 5"),
    "two models": (llama(model_type="mistral"), "name two models"),
    "int8 type": (llama(eos_token_id=40000), "eos_token_id 40000"),
    "an encoder": (llama(is_encoder_decoder=True), "is_encoder_decoder"),
}
