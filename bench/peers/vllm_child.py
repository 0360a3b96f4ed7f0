"""vLLM on the CPU, spoken to as `bench.peers.child` says. Runs under vLLM's own Python; imports nothing of Weft."""

from __future__ import annotations

from typing import Any

from child_loop import serve  # this file's folder is where Python looks first


def load(checkpoint: str, threads: int, max_sequences: int, context: int) -> tuple[Any, dict[str, Any]]:
    """The engine in this process, without a tokenizer, a prefix cache or statistics; everything else as by default."""
    import vllm

    engine = vllm.LLM(
        model=checkpoint,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=context,
        max_num_seqs=max_sequences,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    return engine, {"version": vllm.__version__}


def generate(engine: Any, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
    """Generate `output_tokens` greedy tokens for each prompt; the end of sequence is ignored."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
    results = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


if __name__ == "__main__":
    serve(load, generate)
