"""Logits and greedy tokens of every family and option, against transformers on the same files."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.models.runner import Runner
from weft.kernels import dispatch
from weft.models.loader import load_model
from weft.models.random_checkpoints import write_tiny

transformers = pytest.importorskip("transformers")

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 6}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 20}),
    "llama-no-head-dim": ("llama", {"head_dim": None}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-sharded": ("llama", {"shards": 3}),
    "llama-rope-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama-rope-llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama-rope-yarn": ("llama", {"rope_scaling": YARN}),
    "llama-rope-yarn-options": (
        "llama",
        {"rope_scaling": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}},
    ),
    "llama-rope-yarn-mscale": ("llama", {"rope_scaling": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.5}}),
    "llama-rope-yarn-not-truncated": ("llama", {"rope_scaling": {**YARN, "truncate": False}}),
    "llama-rope-parameters": (
        "llama",
        {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 20000.0}},
    ),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 11}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-rope-yarn": ("qwen2", {"rope_scaling": YARN, "max_position_embeddings": 128}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
PROMPTS = [37, 5, 24]
NEW_TOKENS = 6


def reference(directory, dtype):
    """transformers' model. In float64 its norms, which it computes in float32, are replaced by exact ones."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = lambda x, m=module: F.rms_norm(x, m.weight.shape, m.weight, m.variance_epsilon)
    return model.eval()


def prompts(vocab_size):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in PROMPTS]


@torch.inference_mode()
def logits_of(model, tokens):
    """Logits of a whole sequence at once, without a cache: the plainest possible truth."""
    return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float64", 1e-9)])
def test_prompts_chunks_and_decode(tmp_path, name, dtype, bound):
    family, options = CASES[name]
    write_tiny(tmp_path, family, seed=3, **options)
    theirs = reference(tmp_path, getattr(torch, dtype))
    ours = load_model(str(tmp_path), dtype=dtype)
    runner = Runner(ours.model)
    texts = prompts(ours.spec.vocab_size)

    # Whole prompts, ragged; then the longest one again in chunks, beside the others' decode steps.
    sequences = [runner.open(len(text) + NEW_TOKENS) for text in texts]
    got = [[logits] for logits in runner.run(list(zip(sequences, texts, strict=True)))]
    chunked, chunked_logits = runner.open(len(texts[0])), []
    for i in range(NEW_TOKENS):
        work = [(s, [int(rows[-1][-1].argmax())]) for s, rows in zip(sequences, got, strict=True)]
        piece = texts[0][i * 7 : (i + 1) * 7]
        *decoded, chunk = runner.run([*work, (chunked, piece)])
        for rows, logits in zip(got, decoded, strict=True):
            rows.append(logits)
        chunked_logits.append(chunk)

    for text, rows in zip(texts, got, strict=True):
        tokens = [int(row[-1].argmax()) for row in rows]
        expected = logits_of(theirs, text + tokens[:-1])
        assert expected.std() > 0.1
        assert expected[len(text) - 1 :].argmax(-1).tolist() == tokens
        assert (torch.cat(rows) - expected).abs().max() < bound
    whole = logits_of(theirs, texts[0])
    assert (torch.cat(chunked_logits) - whole).abs().max() < bound


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_stays_as_close_to_float32_as_transformers_does(tmp_path, family):
    write_tiny(tmp_path, family, seed=4, dtype=torch.bfloat16)
    text = prompts(320)[0]
    exact = Runner(load_model(str(tmp_path), dtype="float32").model)
    rounded = Runner(load_model(str(tmp_path), dtype="bfloat16").model)
    theirs = logits_of(reference(tmp_path, torch.bfloat16), text).float()
    (truth,) = exact.run([(exact.open(64), text)])
    (got,) = rounded.run([(rounded.open(64), text)])
    assert (got - truth).square().mean() < 1.5 * (theirs - truth).square().mean()


@pytest.mark.parametrize("variant", ["reference", "torch"])
def test_every_kernel_variant_gives_the_same_model(tmp_path, variant):
    write_tiny(tmp_path, "qwen3", seed=5, use_sliding_window=True, sliding_window=10, max_window_layers=1)
    theirs = reference(tmp_path, torch.float32)
    kernels = dispatch.select("cpu", torch.float32, prefer={"*": variant})
    runner = Runner(load_model(str(tmp_path), kernels=kernels).model)
    text = prompts(320)[0]
    (got,) = runner.run([(runner.open(64), text)])
    assert (got - logits_of(theirs, text)).abs().max() < 1e-4
