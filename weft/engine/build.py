"""From a configuration to an engine that is ready. The only place that knows both workers and schedulers."""

from __future__ import annotations

import logging
import os
from functools import partial

from weft.abi.errors import ConfigError
from weft.config import EngineConfig, cache_directory
from weft.engine.engine import Engine, Publish
from weft.engine.gather import policy_of
from weft.engine.profiles import find_profile, saturation_tokens
from weft.sched.policies import make_policy
from weft.sched.scheduler import SchedulerConfig
from weft.tokenizers.load import load_tokenizer
from weft.tokenizers.tokenizer import Tokenizer
from weft.worker.build import Progress, load, start_worker, step_tokens
from weft.worker.identity import identify

_log = logging.getLogger("weft.engine")


def require_fit(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise `ConfigError` if a model of `vocab_size` embeddings lacks one of a token."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model only {vocab_size}: they do not belong "
            "together; check that tokenizer.json came with this checkpoint"
        )


def build_engine(
    config: EngineConfig,
    publish: Publish,
    progress: Progress | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    trace: bool = False,
) -> Engine:
    """Load the model, size the page pools, start the worker. `tokenizer`: the model's, if it is loaded already.

    Raises `ModelLoadError` or `ConfigError`, saying what to change.
    """
    loaded = load(config, progress)
    worker = start_worker(config, loaded)
    if tokenizer is None:
        tokenizer = load_tokenizer(config.model, config.revision, config.offline)
    vocab_size = worker.spec.vocab_size
    try:
        require_fit(tokenizer, vocab_size)
    except ConfigError:
        worker.close()
        raise
    # A model may have more rows than its tokenizer has tokens; those have no text.
    token_bytes = list(tokenizer.token_bytes) + [b""] * (vocab_size - tokenizer.vocab_size)
    profile = find_profile(cache_directory(os.environ), identify(config, loaded), config.model)
    scheduler = SchedulerConfig(
        max_context=worker.spec.max_context,
        max_running=config.max_running,
        max_step_tokens=step_tokens(config),
        saturation_tokens=saturation_tokens(config, profile),
        max_waiting=config.max_waiting,
        aging_s=config.aging_s,
        latency_factor=config.latency_factor,
        min_share=config.min_share,
        prefix_cache=config.prefix_cache,
        prefix_wait_steps=config.prefix_wait_steps,
        return_order=config.return_order,
        space_fraction=config.program_pages_fraction,
        alloc_wait_s=config.program_pages_wait_s,
        max_rows=1 if config.batching == "eager" else None,
        vocab_size=vocab_size,
        eos_token_ids=sorted({*loaded.eos_ids, *tokenizer.eos_token_ids}),
        seed=config.seed,
        trace=trace,
    )
    if profile is None:
        _log.info("no cost profile: throughput and batch requests come after others, and are not held back beside them")
    if scheduler.saturation_tokens is not None:
        most = min(scheduler.saturation_tokens, scheduler.max_step_tokens)
        _log.info("a step of %d tokens gets no more of prompts than a page, by the cost profile", most)
    return Engine(
        worker,
        scheduler,
        publish,
        model=config.model,
        token_bytes=token_bytes,
        special_ids=tokenizer.special_ids,
        encode=partial(tokenizer.encode, add_special_tokens=False),
        overlap=config.overlap,
        policy=policy_of(config),
        intercept=make_policy(config.intercept_policy, config.wait_estimator),
        cost_model=None if profile is None else profile.cost_model(),
        max_string_chars=config.json_string_chars or None,
    )
