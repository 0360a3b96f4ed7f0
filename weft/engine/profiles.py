"""Where cost profiles lie, which one an engine uses, and what of it bounds a step.

Owns the files: one per identity, `<key>.json` in a folder of the cache. What is in them is `core.cost.profile`'s.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from weft.abi.errors import ConfigError
from weft.config import EngineConfig
from weft.core.cost.profile import Identity, Profile, decode_profile, encode_profile

_log = logging.getLogger("weft.engine")


def profile_path(cache: Path, identity: Identity) -> Path:
    """The file of the profile for this identity, whether or not there is one."""
    return cache / "profiles" / f"{identity.key}.json"


def store_profile(cache: Path, profile: Profile) -> Path:
    """Write a profile to its place, as a whole or not at all. Raises `ConfigError` where that cannot be written."""
    path = profile_path(cache, profile.identity)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(encode_profile(profile))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; set WEFT_CACHE to another folder") from error
    return path


def load_profile(path: Path) -> Profile:
    """Read a profile. Raises `ConfigError`, naming the file, for one that is missing, damaged or foreign."""
    try:
        return decode_profile(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{path} is not used: {error}") from error


def find_profile(cache: Path, identity: Identity, model: str) -> Profile | None:
    """The stored profile for exactly this identity, or None. Says in the log which it is, or how to make one.

    A file that cannot be used is told as a warning: an engine runs without.
    """
    path = profile_path(cache, identity)
    if not path.exists():
        _log.info("no cost profile for %s: `weft profile %s` makes one", identity.describe(), model)
        return None
    try:
        profile = load_profile(path)
        if profile.identity != identity:
            raise ConfigError(f"{path} is not used: it is for {profile.identity.describe()}; run `weft profile` again")
    except ConfigError as error:
        _log.warning("%s", error.message)
        return None
    _log.info("cost profile %s: saturation at %d tokens", path, profile.saturation_tokens)
    return profile


def saturation_tokens(config: EngineConfig, profile: Profile | None) -> int | None:
    """How many tokens a step may have before prompts get no more of it, by the profile.

    None, no bound but `max_step_tokens`, where that is configured, where throughput is all that counts (the last tenth
    of it is beyond the saturation point), and without a profile.
    """
    if profile is None or config.max_step_tokens is not None or config.performance_mode == "throughput":
        return None
    return profile.saturation_tokens
