"""The operations of programs: one table of their names, numbers, frame layouts, and what carries each of them out.

A program addresses its host in **commands**. It chooses the numbers of its calls, sequences, queues, pages and
embeddings itself, so it never waits for a number; the numbers mean something in this program alone. Packing
(`weft.abi.frames`), dispatch (`weft.programs`) and the checks of the SDK derive from this table.

Token ids are int32, handles uint32, log-probabilities float32, texts UTF-8, everything little-endian. Where a blob is
JSON, its fields are described at the operation. This table is the security boundary of programs: a command that is not
in it is refused before anything reads its contents.

The table has no cost of an operation, because what a command costs its host depends on its bytes: an append carries one
token or four million, a message one byte or a megabyte, and the time grows more than a hundredfold between them. A
weight per operation would misjudge both. The host measures time instead: the commands of a program run in portions that
end by the clock (`weft.programs.quota.loop_share`), and the time of each portion is charged to the run as `cpu_s`. A
portion ends between two commands, so three bounds hold a single command: `MAX_COMMAND_BYTES`, the bounds of each method
on its blobs, and threads for work that takes long for its bytes (tokenizing, rendering, grammars).
"""

from __future__ import annotations

from enum import Enum, IntEnum

MAX_COMMAND_BYTES = 16 << 20
"""Largest frame of one command. The library refuses the call of a larger one, and a module that sends one is ended."""


class Trait(Enum):
    """A group of operations that a model offers programs."""

    CORE = "Core"
    MESSAGING = "Messaging"
    TOKENIZE = "Tokenize"
    SEQUENCE = "Sequence"
    STORE = "Store"
    ALLOCATE = "Allocate"
    FORWARD = "Forward"
    INPUT_TEXT = "InputText"
    OUTPUT_TEXT = "OutputText"
    GRAMMAR = "Grammar"


_ASKED = True
"""The operation answers: its call ends with exactly one RESULT or ERROR, after any number of PARTs."""
_POSTED = False
"""The operation does not answer: its call is heard of again only if it fails, as an ERROR."""


class Op(IntEnum):
    """Operations, by trait: number, trait, method of the host's trait, numbers, blobs, whether it answers, command.

    Numbers are codes of `struct`: I uint32, i int32, B uint8, d float64. The docstring of each names its numbers and,
    after a semicolon, its blobs; `-> ...` are the blobs of the result.
    """

    trait: Trait
    method: str
    """The host's method that carries the operation out, called with (call, *numbers, *blobs)."""
    numbers: str
    """The types of its numbers, in order."""
    num_blobs: int
    answers: bool

    command: str
    """The command of the engine that it becomes (`weft.core.wire.spaces`), where it is one: its numbers and blobs are
    the fields of that command, in their order."""

    def __new__(
        cls, number: int, trait: Trait, method: str, numbers: str, num_blobs: int, answers: bool, command: str = ""
    ) -> Op:
        """A row of the table."""
        op = int.__new__(cls, number)
        op._value_ = number
        op.trait, op.method, op.command = trait, method, command
        op.numbers, op.num_blobs, op.answers = numbers, num_blobs, answers
        return op

    # Core
    LOG = 1, Trait.CORE, "log", "B", 1, _POSTED
    """level (0 debug, 1 info, 2 warning, 3 error); text"""
    SEND = 2, Trait.CORE, "send", "", 1, _POSTED
    """JSON: a message to the client or program that launched the run, and to clients attached to it"""
    RECEIVE = 3, Trait.CORE, "receive", "", 0, _ASKED
    """-> JSON: the next message from them"""
    SLEEP = 4, Trait.CORE, "sleep", "d", 0, _ASKED
    """seconds ->"""
    MODELS = 5, Trait.CORE, "models", "", 0, _ASKED
    """-> JSON [{name, traits, vocab_size, page_size, max_context, eos_token_ids, hidden_size, dtype, device,
    chat_template, tool_call_parser, reasoning}], the program's own model first. `chat_template`: whether it has one;
    `tool_call_parser`: the form in which the model writes calls of tools (a key of `weft.text.tool_calls.PARSERS`) or
    null; `reasoning`: whether it thinks between tags"""
    CANCEL = 6, Trait.CORE, "cancel", "I", 0, _POSTED
    """call: give up waiting for it. It ends with an ERROR of kind `cancelled`, unless it has ended before"""
    HTTP = 7, Trait.CORE, "http", "", 2, _ASKED
    """JSON {method, url, headers, timeout_s, max_bytes}; body -> JSON {status, headers, url}; body"""

    # Messaging
    BROADCAST = 10, Trait.MESSAGING, "broadcast", "", 2, _POSTED
    """topic; JSON"""
    SUBSCRIBE = 11, Trait.MESSAGING, "subscribe", "", 1, _ASKED
    """topic -> PART (topic; JSON) for each message, until it is cancelled"""
    LAUNCH = 12, Trait.MESSAGING, "launch", "I", 1, _ASKED
    """child; JSON {program, source, args, limits} -> JSON {run}: it has started. One of program and source"""
    JOIN = 13, Trait.MESSAGING, "join", "I", 0, _ASKED
    """child -> JSON: what its main returned; an ERROR if it failed"""
    KILL = 14, Trait.MESSAGING, "kill", "I", 0, _POSTED
    """child: cancel it"""

    # Tokenize
    TOKENIZE = 20, Trait.TOKENIZE, "tokenize", "B", 1, _ASKED
    """1: with special tokens around; text -> token ids"""
    DETOKENIZE = 21, Trait.TOKENIZE, "detokenize", "B", 1, _ASKED
    """1: leave special tokens out; token ids -> text"""
    VOCABULARY = 22, Trait.TOKENIZE, "vocabulary", "", 0, _ASKED
    """-> u32 length of each token's bytes; all bytes"""
    RENDER = 23, Trait.TOKENIZE, "render", "B", 2, _ASKED
    """1: add the generation prompt; JSON messages; JSON {tools, documents, chat_template, template_kwargs} -> text"""

    # Sequence
    SEQ_OPEN = 30, Trait.SEQUENCE, "open", "Ii", 0, _POSTED
    """sequence, priority"""
    SEQ_APPEND = 31, Trait.SEQUENCE, "append", "I", 1, _POSTED
    """sequence; token ids"""
    SEQ_GENERATE = 32, Trait.SEQUENCE, "generate", "IB", 1, _ASKED
    """sequence, text (0: none, 1: without special tokens, 2: with them; and 4 more: all in one PART, at the end); JSON
    {sampling, stop, grammar} -> PART (token ids [n]; text; with `sampling.logprobs` = k also log-probabilities [n]; ids
    [n, k]; log-probabilities [n, k]) ...; JSON {reason, stop, usage}.

    `sampling` and `stop` have the fields of `weft.core.sampling`, those left out at their defaults, stop strings as
    texts; `grammar` is {kind, text} or missing; `usage` has the fields of `weft.core.wire.OperationUsage`. All texts
    together are what was generated without what ended it, be that a stop string, a stop token or the end of sequence;
    the tokens are all that were sampled."""
    SEQ_DIST = 33, Trait.SEQUENCE, "dist", "II", 1, _ASKED
    """sequence, k; token ids to append (may be none) -> token ids [k]; log-probabilities [k]: what is likely next"""
    SEQ_SCORE = 34, Trait.SEQUENCE, "score", "II", 1, _ASKED
    """sequence, k; token ids to append -> log-probabilities [n] (NaN for a first token); ids [n, k] (-1: none);
    log-probabilities [n, k]"""
    SEQ_FORK = 35, Trait.SEQUENCE, "fork", "II", 0, _POSTED
    """sequence, child"""
    SEQ_TRUNCATE = 36, Trait.SEQUENCE, "truncate", "II", 0, _POSTED
    """sequence, tokens to keep"""
    SEQ_HOLD = 37, Trait.SEQUENCE, "hold", "Id", 0, _POSTED
    """sequence, seconds"""
    SEQ_RELEASE = 38, Trait.SEQUENCE, "release", "I", 0, _POSTED
    """sequence"""
    SEQ_CANCEL = 39, Trait.SEQUENCE, "cancel", "I", 0, _POSTED
    """sequence"""
    SEQ_PRIORITY = 40, Trait.SEQUENCE, "set_priority", "Ii", 0, _POSTED
    """sequence, priority"""
    SEQ_MASK = 45, Trait.SEQUENCE, "mask", "I", 1, _POSTED
    """sequence; int32 pairs (first token, past the last): hidden from all tokens that follow, instead of those hidden
    before"""

    SEQ_EXPECT = 46, Trait.SEQUENCE, "expect", "Id", 1, _POSTED
    """sequence, seconds until it is over (NaN: not known); kind, one of `tool`, `http`, `sleep` and `message`: what the
    program waits for when the sequence has nothing to do, until its next operation. The host sees the last three"""

    # Store: small values of the program's tenant, by name; they outlive programs and servers
    STORE_PUT = 41, Trait.STORE, "put", "", 2, _ASKED
    """name; value ->"""
    STORE_GET = 42, Trait.STORE, "get", "", 1, _ASKED
    """name -> u8 1 if there is one; value"""
    STORE_DELETE = 43, Trait.STORE, "delete", "", 1, _ASKED
    """name ->"""
    STORE_LIST = 44, Trait.STORE, "names", "", 1, _ASKED
    """prefix -> JSON [name]"""

    # Allocate
    QUEUE_OPEN = 50, Trait.ALLOCATE, "put", "Ii", 0, _POSTED, "OpenQueue"
    """queue, priority"""
    QUEUE_CLOSE = 51, Trait.ALLOCATE, "put", "I", 0, _POSTED, "CloseQueue"
    """queue"""
    QUEUE_PRIORITY = 52, Trait.ALLOCATE, "put", "Ii", 0, _POSTED, "SetQueuePriority"
    """queue, priority"""
    QUEUE_SYNC = 53, Trait.ALLOCATE, "put", "I", 0, _ASKED, "Sync"
    """queue -> (when all before it is done)"""
    PAGES_ALLOC = 54, Trait.ALLOCATE, "take_pages", "III", 0, _ASKED, "AllocPages"
    """queue, first, count: pages first to first + count - 1 ->"""
    PAGES_FREE = 55, Trait.ALLOCATE, "give_pages", "I", 1, _POSTED, "FreePages"
    """queue; pages"""
    EMBEDS_ALLOC = 56, Trait.ALLOCATE, "take_embeds", "III", 0, _ASKED, "AllocEmbeds"
    """queue, first, count ->"""
    EMBEDS_FREE = 57, Trait.ALLOCATE, "put", "I", 1, _POSTED, "FreeEmbeds"
    """queue; embeddings"""
    TOKENS_COPY = 58, Trait.ALLOCATE, "put", "IIIIII", 0, _POSTED, "CopyTokens"
    """queue, source page, offset, destination page, offset, count"""
    PAGES_EXPORT = 59, Trait.ALLOCATE, "put", "I", 2, _ASKED, "ExportPages"
    """queue; pages; name ->"""
    PAGES_IMPORT = 60, Trait.ALLOCATE, "take_named_pages", "II", 1, _ASKED, "ImportPages"
    """queue, first; name -> u32 count: pages first to first + count - 1"""
    PAGES_RELEASE = 61, Trait.ALLOCATE, "put", "I", 1, _ASKED, "ReleaseExport"
    """queue; name: forget an export ->"""

    # Forward, InputText, OutputText
    PAGE_MASK = 62, Trait.FORWARD, "put", "III", 0, _POSTED, "MaskPage"
    """queue, page, bits: token s of the page is hidden where bit s is set"""
    EMBED_TEXT = 63, Trait.INPUT_TEXT, "put", "I", 3, _POSTED, "EmbedText"
    """queue; token ids [n]; positions int32 [n]; embeddings [n]"""
    FORWARD = 64, Trait.FORWARD, "compute", "I", 5, _POSTED, "Forward"
    """queue; pages to read; input embeddings [n]; pages to write (none: KV is not kept); output embeddings (m <= n, of
    the last m inputs); mask: packed bits [n, all tokens seen], each row padded to whole bytes, or nothing. Bit i of a
    row is in byte i // 8 with the value 1 << i % 8; set: the input sees the token. All tokens seen: those of the pages
    to read in their order, then the inputs"""
    FORWARD_SAMPLE = 65, Trait.FORWARD, "compute_sampled", "I", 6, _ASKED, "ForwardSample"
    """queue; pages to read; token ids [n]; positions int32 [n]; pages to write; mask; JSON {sampling, index} -> token
    ids [1]: the one sampled after the last input"""
    NEXT_DIST = 66, Trait.OUTPUT_TEXT, "put", "II", 2, _ASKED, "NextDist"
    """queue, k; embeddings [n]; token ids [n * t] -> ids [n, k]; log-probabilities [n, k]; log-probabilities [n, t] of
    the given tokens"""

    # Grammars, followed by the program itself
    MATCHER_OPEN = 70, Trait.GRAMMAR, "open", "I", 1, _ASKED
    """matcher; JSON grammar {kind, text} ->"""
    MATCHER_PUSH = 71, Trait.GRAMMAR, "push", "I", 1, _ASKED
    """matcher; token ids -> u8 1 if nothing may follow; packed bits [vocabulary]: what may follow, token t in byte
    t // 8 with the value 1 << t % 8"""
    MATCHER_CLOSE = 72, Trait.GRAMMAR, "close_matcher", "I", 0, _POSTED
    """matcher"""
