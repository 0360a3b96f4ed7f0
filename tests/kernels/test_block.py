"""A layer as one call of the library is, to the bit, the layer made of its operations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.batches import random_case
from weft.core.step import ForwardBatch
from weft.kernels import dispatch, reference, torch_ops
from weft.kernels.base import Block, BlockShape, HeadShape
from weft.kernels.batch import lower
from weft.kernels.block_weights import BlockPart, BlockWeight
from weft.kernels.cpu import library, ops, tensors
from weft.kernels.quantize import block_kind, quantize
from weft.kernels.shared_chunks import SharedChunks
from weft.models.base import ModelSpec, RopeSpec
from weft.models.layers.decoder import DecoderLayer, layer_weights
from weft.models.layers.rope import Rope

try:
    LOADED = library.load()
    LEVELS = [ops.CpuKernels(LOADED, level) for level in library.levels(LOADED)]
except library.KernelsUnavailable as reason:
    pytest.skip(f"the library is {reason}", allow_module_level=True)

SPEC = ModelSpec(
    architecture="Test",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=4096,
    sliding_windows=(None,),
    rope=RopeSpec(10000.0),
    rms_eps=1e-5,
    tie_embeddings=True,
    dtype=torch.bfloat16,
)
SPECS = {
    "plain": SPEC,
    "qwen3": replace(SPEC, qk_norm=True),
    "qwen2": replace(SPEC, qkv_bias=True),
    "biases": replace(SPEC, qkv_bias=True, output_bias=True, mlp_bias=True),
    "window": replace(SPEC, sliding_windows=(5,)),
    "int8": replace(SPEC, quantization="int8"),
    "int4": replace(SPEC, quantization="int4"),
    "one head": replace(SPEC, num_kv_heads=4),
}
levels = pytest.mark.parametrize("level", LEVELS, ids=[k.level.name.lower() for k in LEVELS])
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def weights_of(spec: ModelSpec, kernels, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    made = {}
    for target in layer_weights(spec, 0):
        weight = (torch.randn(target.shape, generator=random) * target.shape[-1] ** -0.5).to(spec.dtype)
        if target.quantized and spec.quantization is not None:
            outputs, inputs = weight.shape
            part = BlockPart(block_kind(spec.quantization, inputs), outputs)
            weight = BlockWeight.of(quantize(weight, part.kind).flatten(), [part], inputs)
        made[target.name] = kernels.pack_weight(weight) if target.packed else weight
    return made


class Counted:
    """A block that counts what it did."""

    def __init__(self, block: Block):
        self.block, self.taken = block, 0

    def __call__(self, *args):
        done = self.block(*args)
        self.taken += done is not None
        return done


def both_ways(spec: ModelSpec, level: ops.CpuKernels, rows: list[tuple[int, int]], **options):
    """(in one call, operation by operation), each as the layer's result and its KV; and how often one call did it."""
    kernels = level.gather()
    weights = weights_of(spec, kernels, seed=1)
    heads = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    case = random_case(
        np.random.default_rng(2),
        rows,
        heads=heads.num_heads,
        kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=spec.dtype,
        **options,
    )
    random = torch.Generator().manual_seed(3)
    x = torch.randn((case.batch.num_tokens, spec.hidden_size), generator=random).to(spec.dtype)
    blocks: list[Counted] = []

    def counted(shape, weights):
        block = level.prepare_block(shape, weights)
        if block is None:
            return None
        blocks.append(Counted(block))
        return blocks[-1]

    found = []
    for prepare in (counted, reference.no_block):
        rope = Rope(spec.rope, spec.head_dim, torch.device("cpu"))
        layer = DecoderLayer(spec, 0, rope, kernels._replace(prepare_block=prepare))
        kv = case.kv.clone()
        for batch in (case.batch, lower(case.forward, case.batch.page_size)):
            total = layer.forward(x.clone(), weights, batch, kv)
        found.append((total, kv))
    return *found, sum(block.taken for block in blocks)


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        bits = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
        assert torch.equal(a.view(bits), b.view(bits))


DECODES = [(1, 9), (1, 300), (1, 1), (1, 40)]
MIXED = [(1, 9), (12, 300), (3, 3), (1, 40)]


@levels
@specs
@dtypes
@pytest.mark.parametrize("rows", [DECODES, MIXED, [(1, 5)]], ids=["decodes", "mixed", "one"])
def test_one_call_is_the_operations(level, spec, dtype, rows):
    one, other, taken = both_ways(replace(spec, dtype=dtype), level, rows)
    assert_same(one, other)
    assert taken == 2 * expected_blocks(level, replace(spec, dtype=dtype), sum(q for q, _ in rows))


def expected_blocks(level: ops.CpuKernels, spec: ModelSpec, tokens: int) -> bool:
    """Whether the library has all products of the layer for so many rows."""
    packed = spec.quantization is not None or level.packs(spec.dtype)
    return packed or tokens <= tensors.thin_rows(level.level, spec.dtype)


@levels
@dtypes
def test_one_call_follows_every_rule_of_visibility(level, dtype):
    options = {"causal": False, "visibility": True, "masks": True, "unwritten": True}
    one, other, taken = both_ways(replace(SPEC, dtype=dtype), level, DECODES, **options)
    assert_same(one, other)
    assert taken == 2 * expected_blocks(level, replace(SPEC, dtype=dtype), len(DECODES))


def test_rows_that_share_a_prefix_are_read_once_in_one_call_too():
    """64 rows over one long prefix: the chunks that they share are those of the operations."""
    rows, prefix, page = 64, 2 * tensors.CHUNK, 8
    shared = np.arange(prefix // page)
    own = prefix // page + np.arange(rows)
    forward = ForwardBatch(
        token_ids=np.zeros(rows, np.int32),
        positions=np.full(rows, prefix, np.int32),
        write_slots=(own * page).astype(np.int32),
        q_indptr=np.arange(rows + 1, dtype=np.int32),
        kv_indptr=(np.arange(rows + 1) * (len(shared) + 1)).astype(np.int32),
        kv_page_ids=np.concatenate([[*shared, page_id] for page_id in own]).astype(np.int32),
        kv_lens=np.full(rows, prefix + 1, np.int32),
    )
    level = LEVELS[0]
    kernels = level.gather()
    spec = replace(SPEC, dtype=torch.bfloat16)
    weights = weights_of(spec, kernels, seed=1)
    random = torch.Generator().manual_seed(3)
    kv = torch.randn((len(shared) + rows, 2, 2, page, 16), generator=random).to(spec.dtype)
    x = torch.randn((rows, spec.hidden_size), generator=random).to(spec.dtype)
    found = []
    for prepare in (level.prepare_block, reference.no_block):
        rope = Rope(spec.rope, spec.head_dim, torch.device("cpu"))
        layer = DecoderLayer(spec, 0, rope, kernels._replace(prepare_block=prepare))
        batch, own_kv = lower(forward, page), kv.clone()
        found.append((layer.forward(x.clone(), weights, batch, own_kv), own_kv))
        assert any(
            value is not None for key, value in batch.cache.items() if isinstance(key, tuple) and key[0] is SharedChunks
        )
    assert_same(*found)


def test_a_layer_is_prepared_once_for_its_weights():
    level = LEVELS[0]
    prepared = []

    def prepare(shape, weights):
        prepared.append(weights)
        return level.prepare_block(shape, weights)

    kernels = level.gather()._replace(prepare_block=prepare)
    layer = DecoderLayer(SPEC, 0, Rope(SPEC.rope, SPEC.head_dim, torch.device("cpu")), kernels)
    first, second = weights_of(SPEC, kernels, 1), weights_of(SPEC, kernels, 2)
    case = random_case(np.random.default_rng(2), DECODES, dtype=SPEC.dtype)
    outputs = []
    for weights in (first, first, second, first):
        x = torch.ones((len(DECODES), SPEC.hidden_size), dtype=SPEC.dtype)
        batch = lower(case.forward, case.batch.page_size)
        outputs.append(layer.forward(x, weights, batch, case.kv.clone()))
    assert [id(weights) for weights in prepared] == [id(first), id(second), id(first)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[3])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(
    "unfit",
    [
        {"head_dim": 8, "hidden_size": 32},
        {"dtype": torch.float64},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_what_the_library_cannot_read_is_left_to_the_operations(unfit):
    spec = replace(SPEC, **unfit)
    level = LEVELS[0]
    heads = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    shape = BlockShape(heads, spec.rms_eps, spec.head_dim**-0.5, None)
    assert level.prepare_block(shape, weights_of(spec, level.gather(), 1)) is None


@pytest.mark.parametrize("other", [{"num_kv_heads": 1}, {"head_dim": 32}, {"num_heads": 8}], ids=str)
def test_weights_of_another_shape_are_left_to_the_operations(other):
    level = LEVELS[0]
    weights = weights_of(SPEC, level.gather(), 1)
    told = replace(SPEC, **other)
    heads = HeadShape(told.num_heads, told.num_kv_heads, told.head_dim)
    assert level.prepare_block(BlockShape(heads, SPEC.rms_eps, 0.25, None), weights) is None


@pytest.mark.parametrize("name", ["attention_norm", "mlp_norm", "output", "down", "gate_up"])
def test_a_weight_of_another_size_is_left_to_the_operations(name):
    level = LEVELS[0]
    kernels = level.gather()
    weights = weights_of(SPEC, kernels, 1)
    wider = weights_of(replace(SPEC, hidden_size=128, intermediate_size=160), kernels, 1)
    heads = HeadShape(SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim)
    shape = BlockShape(heads, SPEC.rms_eps, 0.25, None)
    assert level.prepare_block(shape, weights) is not None
    assert level.prepare_block(shape, weights | {name: wider[name]}) is None


def test_rows_of_another_width_are_refused():
    level = LEVELS[0]
    weights = weights_of(SPEC, level.gather(), 1)
    heads = HeadShape(SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim)
    block = level.prepare_block(BlockShape(heads, SPEC.rms_eps, 0.25, None), weights)
    case = random_case(np.random.default_rng(2), DECODES, dtype=SPEC.dtype)
    rope = Rope(SPEC.rope, SPEC.head_dim, torch.device("cpu"))
    x = torch.ones((len(DECODES), 2 * SPEC.hidden_size), dtype=SPEC.dtype)
    assert block(x, rope.rotation, case.batch, case.kv) is None


def test_a_block_is_of_the_backend_that_all_its_operations_are_of():
    def prepare(prefer):
        return dispatch.select("cpu", torch.bfloat16, prefer).prepare_block

    assert prepare({}) == ops.best().prepare_block
    assert prepare({"*": torch_ops.NAME}) is reference.no_block
    for operation in dispatch.IN_A_BLOCK:
        if operation != "gated_linear":  # goes with `linear`
            assert prepare({operation: torch_ops.NAME}) is reference.no_block


def test_a_backend_without_blocks_is_not_said_to_have_one():
    def chosen(dtype):
        return next(c.chosen for c in dispatch.describe("cpu", dtype) if c.operation == "prepare_block")

    assert chosen(torch.bfloat16) == ops.NAME
    assert chosen(torch.float64) == "none"
