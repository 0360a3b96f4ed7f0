"""Embedding pools and scales."""

import pytest

from tests.programs.help import CALLER, run
from weft.abi.errors import InvalidRequest
from weft.programs.builtin import embedding
from weft.programs.runtime import Runtime
from weft.programs.types import EmbeddingArgs
from weft.testing.fake_engine import FakeEngine


def test_embedding() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        prompt = rt.tokenizer.encode("text")
        whole = await embedding.main(EmbeddingArgs(prompt=prompt, normalize=False), CALLER, rt)
        assert whole.embedding == [float(i + 1) for i in range(8)]
        assert whole.usage.num_prompt_tokens == 4
        unit = await embedding.main(EmbeddingArgs(prompt=prompt, dimensions=2, pooling="last"), CALLER, rt)
        assert unit.embedding == pytest.approx([1 / 5**0.5, 2 / 5**0.5])
        for dimensions in (0, 9):
            with pytest.raises(InvalidRequest, match="dimensions"):
                await embedding.main(EmbeddingArgs(prompt=prompt, dimensions=dimensions), CALLER, rt)
        with pytest.raises(InvalidRequest, match="prompt"):
            await embedding.main(EmbeddingArgs(prompt=b""), CALLER, rt)

    run(test)
