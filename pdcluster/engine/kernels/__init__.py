"""CPU kernels by job. This page says which function runs for which CPU and shape.

`loader` compiles them, or reports that numba cannot; then plain torch runs. `engine.ops` calls them. `intrinsics` tells
CPUs apart: *pairs* multiply two bfloat16 at once (AVX512-BF16, `has_pair_product`), *AMX* has whole tiles
(`has_matrix_tiles`), *AVX-512* has nothing faster than floats (`has_broad_product`), *AVX2* has nothing wider
(`has_wide_product`).

Attention of rows that decode
    bfloat16, heads of a multiple of
    32, pages of 8 tokens             `attention_rows.attend_rows`
    float32, or other sizes           `elementwise.attend_decode`

Attention of a prompt's chunk
    bfloat16, heads of a multiple of 32:
        pairs, AMX, AVX-512, AVX2     `attention_chunks.attend_chunk`, on what `pack_context` packed
    otherwise                         torch, on pages that `elementwise.gather_pages` copies

Products by weights
    bfloat16, weights packed in panels:
        pairs                         `gemm_pairs.multiply_panels`
        AVX-512, from 3 rows on       `gemm_f32_avx512.multiply_widened`
        AVX2                          `gemm_f32_avx2.multiply_panels`
    bfloat16, weights as they are:
        AMX, others, up to 32 rows    `gemm_pairs.linear_rows`
    more rows, float32                oneDNN, through torch

A whole step in one call
    bfloat16, one thread, one rank    `fused_step.compute_layers`, made of the functions above

Norms, activation, rope, writing KV   `elementwise`
Weights of eight bits                 `quantized.multiply`
Deterministic mode                    `batch_invariant`

`f32_tiles` and `intrinsics` are building blocks: loops over LLVM vectors that the compiler does not find by itself.
`layer_arrays` names the arrays of a step.
"""
