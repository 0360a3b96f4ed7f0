"""`Tokenizer`: a model's vocabulary, special tokens and chat template.

Owns encoding (long texts run on a thread, in pieces); its tokens equal those of transformers. Knows neither requests
nor programs. Created by `weft.tokenizers.load`; used by the front from one event loop.

Special tokens in a text are parsed, as in transformers: `<|im_end|>` in a user's message is the token, not ten
characters. Chat templates rely on this. Callers that accept untrusted text must remove them if they do not want this.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import tokenizers

from weft.abi.errors import InvalidRequest, Unsupported
from weft.core.ids import pack_tokens
from weft.threads import Charge, FairThreads
from weft.tokenizers.chat_template import ChatTemplate
from weft.tokenizers.pieces import PIECE_CHARS, cutter_of
from weft.tokenizers.token_bytes import read_vocabulary

T = TypeVar("T")

INLINE_CHARS = 8192
"""Texts up to this length are encoded on the event loop: about a millisecond, less than the latency of a thread."""
_PACK_TOKENS = 16384
"""Ids packed between two yields to the event loop."""
_WITHOUT_TEMPLATE = (
    "send a prompt instead of messages (over HTTP: /v1/completions), or add a chat_template.jinja to the model's "
    "directory"
)


@functools.cache
def _threads() -> FairThreads:
    """Two threads per tenant, so that a second long text does not wait for the first; the third is for other tenants.
    More threads would take cores from the engine."""
    return FairThreads(3, per_tenant=2, name="weft-tokenize")


async def off_loop(work: Callable[[], T], *, tenant: str = "", charge: Charge | None = None) -> T:
    """Run work on long texts on a thread of this package, as `FairThreads.run` does."""
    return await _threads().run(work, tenant=tenant, charge=charge)


class Tokenizer:
    """Text to packed int32 token ids and back. Immutable after construction; safe to use from threads.

    `special_tokens` maps names that templates use (`bos_token`, `eos_token`, …) to their text. `eos_token_ids` may
    have more entries than the one `eos_token` (from generation_config.json).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        sampling_defaults: Mapping[str, float] | None = None,
        name: str = "",
    ):
        backend.no_truncation()
        backend.no_padding()
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        self.sampling_defaults = dict(sampling_defaults or {})
        """The checkpoint's sampling defaults, by parameter."""
        self._backend = backend
        self._cutter = cutter_of(backend)
        self.token_bytes, self.strips_leading_space = read_vocabulary(backend)
        """`token_bytes[id]` are the bytes of a token; for special tokens, of their text."""
        self.vocab_size = len(self.token_bytes)
        """One more than the highest token id. A model's logits may have more rows; those have no text."""
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Tokens that `skip_special` omits."""
        self.bos_token_id = self._named("bos_token")
        self.eos_token_id = self._named("eos_token")
        ids = [self.eos_token_id] if eos_token_ids is None else eos_token_ids
        self.eos_token_ids = [token for token in ids if token is not None]
        self._templates = {key: ChatTemplate(text) for key, text in (chat_templates or {}).items()}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Packed int32 token ids. `add_special_tokens` adds the tokens that the model expects around a text (often a
        beginning-of-sequence token); rendered chat templates contain them and are encoded without.

        Raises `InvalidRequest` for invalid Unicode (a lone surrogate).
        """
        return b"".join(self._encode_pieces(text, add_special_tokens))

    async def encode_async(self, text: str, *, add_special_tokens: bool = True, tenant: str = "") -> bytes:
        """`encode`, on a thread if the text is long; tenants share the threads fairly, by piece."""
        if len(text) <= INLINE_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        pieces = self._encode_pieces(text, add_special_tokens)
        found = []
        while (packed := await off_loop(functools.partial(next, pieces, None), tenant=tenant)) is not None:
            found.append(packed)
        return b"".join(found)

    def _encode_pieces(self, text: str, add_special_tokens: bool) -> Iterator[bytes]:
        """Yield the packed ids of the text in pieces, computed lazily."""
        if len(text) <= PIECE_CHARS or self._cutter is None or self._around is None:
            yield self._encode_whole(text, add_special_tokens)
            return
        before, after = self._around if add_special_tokens else (b"", b"")
        yield before
        for piece in self._cutter.pieces(text):
            yield self._encode_whole(piece, False)
        yield after

    def _encode_whole(self, text: str, add_special_tokens: bool) -> bytes:
        try:
            # Unlike `encode`, `encode_batch_fast` releases the GIL and computes no character offsets.
            encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("the text is not valid Unicode: it has a lone surrogate") from error
        ids = encoding.ids
        packed = array("i")
        for start in range(0, len(ids), _PACK_TOKENS):
            packed.extend(array("i", ids[start : start + _PACK_TOKENS]))
        return packed.tobytes()

    @functools.cached_property
    def _around(self) -> tuple[bytes, bytes] | None:
        """Packed ids that the model expects before and after a text; None where that is not all it expects."""
        bare, full = (self._backend.encode("a", add_special_tokens=special).ids for special in (False, True))
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), None)
        if at is None or not self.special_ids.issuperset([*full[:at], *full[at + len(bare) :]]):
            return None
        return pack_tokens(full[:at]), pack_tokens(full[at + len(bare) :])

    def decode(self, tokens: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD. Ids without a token have no text."""
        text = b"".join(self.bytes_of(token, skip_special=skip_special) for token in tokens)
        if self.strips_leading_space and text.startswith(b" "):
            text = text[1:]
        return text.decode(errors="replace")

    def bytes_of(self, token: int, *, skip_special: bool = False) -> bytes:
        """The bytes of one token; empty for ids without one."""
        if not 0 <= token < self.vocab_size or (skip_special and token in self.special_ids):
            return b""
        return self.token_bytes[token]

    def id_to_token(self, token: int) -> str | None:
        """The token's string in the vocabulary, or None."""
        return self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token's text; None for unknown text."""
        return self._backend.token_to_id(token)

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self._templates)

    def chat_template(self, *, with_tools: bool = False) -> ChatTemplate:
        """The model's template: `tool_use` for requests with tools if there is one, otherwise `default`.

        Raises `Unsupported` for a model without a template.
        """
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if self._templates:
            names = ", ".join(sorted(self._templates))
            raise Unsupported(f"this model has chat templates named {names} but no default; {_WITHOUT_TEMPLATE}")
        raise Unsupported(
            f"this model has no chat template, so chat messages cannot be turned into a prompt; {_WITHOUT_TEMPLATE}"
        )

    def _named(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)
