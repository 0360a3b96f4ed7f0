"""Throughput of HTTP streams relative to the offline path.

    python -m bench.streaming [--streams 64] [--tokens 64] [--runs 3] [--threads N] [--layers N] [--json FILE]

Random weights in the shape of Qwen3-0.6B, bfloat16, one letter a token, so that every token is an event. The same chat
requests, all at once, go in turns through `weft serve` (its own processes; the client is a process too, and reads
every byte) and through `weft.LLM` in this process. Both have the same engine settings. On a machine with few cores
front, client and kernels share them: then the ratio says what the front takes from the kernels, not what it could
write. `front_us` and `client_us` are the processor time of those processes per token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import alone
from weft.cli.bench.measure import Spread
from weft.cli.bench.record import command_line, heading, surroundings, write_record

if TYPE_CHECKING:
    from weft.llm import LLM

LETTERS = list(range(65, 91))
"""Tokens of the checkpoint's tokenizer that are a letter each: it has one per byte."""
PROMPT = "Write me a long story about a weaver and her loom. "
START_S = 120.0


def conversation(number: int) -> list[dict[str, str]]:
    """The messages of one request."""
    return [{"role": "user", "content": f"{number}. {PROMPT}"}]


def options(tokens: int) -> dict[str, Any]:
    """Of every request: an answer of exactly so many letters."""
    return {"max_tokens": tokens, "seed": 1, "ignore_eos": True, "allowed_token_ids": LETTERS}


# The client, a process of its own


async def one_stream(port: int, content: bytes, tokens: int) -> int:
    """Read a stream to its end; its events with text. Raises `RuntimeError` for anything but a whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(content)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\nconnection: close\r\n\r\n" + content)
    parts = []
    while part := await reader.read(1 << 16):
        parts.append(part)
    writer.close()
    data = b"".join(parts)
    events = data.count(b'"content":"') - data.count(b'"content":""')
    if b" 200 " not in data[:20] or b"data: [DONE]" not in data or b'"completion_tokens":%d' % tokens not in data:
        raise RuntimeError(f"a stream did not come whole: {data[-400:]!r}")
    return events


async def run_client(port: int, streams: int, tokens: int, model: str) -> dict[str, float]:
    """Run all streams of a client at once."""
    bodies = []
    for number in range(streams):
        request = {"model": model, "messages": conversation(number), **options(tokens), "stream": True}
        bodies.append(json.dumps(request | {"stream_options": {"include_usage": True}}).encode())
    began = time.perf_counter()
    events = await asyncio.gather(*(one_stream(port, content, tokens) for content in bodies))
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"seconds": seconds, "events": float(sum(events)), "client_s": used.ru_utime + used.ru_stime}


# The server


@contextlib.asynccontextmanager
async def server(model: str, flags: list[str], folder: Path) -> AsyncIterator[tuple[int, int]]:
    """`weft serve`, ready: its port and process."""
    with socket.socket() as probed:
        probed.bind(("127.0.0.1", 0))
        port = probed.getsockname()[1]
    own = {"WEFT_PROGRAMS_DATA_DIR": str(folder / "data"), "WEFT_PROGRAMS_START": "off"}
    environment = {**os.environ, "WEFT_SERVER_LOG_LEVEL": "warning", **own}
    command = [str(Path(sys.executable).with_name("weft")), "serve", model, "--port", str(port), *flags]
    with (folder / "log").open("w+") as log:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
        try:
            deadline_s = time.monotonic() + START_S
            while not await _is_ready(port):
                if process.returncode is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"the server did not start: {(folder / 'log').read_text()[-2000:]}")
                await asyncio.sleep(0.1)
            yield port, process.pid
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                await process.wait()


async def _is_ready(port: int) -> bool:
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /ready HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        found = await reader.read()
        writer.close()
        return b" 200 " in found[:20]
    return False


def processor_s(pid: int) -> float:
    """Processor time of one process, without its children's. Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def over_http(port: int, pid: int, args: argparse.Namespace, model: str) -> dict[str, float]:
    """Measure one round of streams over HTTP."""
    before = processor_s(pid)
    command = ["-m", "bench.streaming", "--client", str(port), "--streams", str(args.streams)]
    command += ["--tokens", str(args.tokens), "--model", model]
    client = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    answer, _ = await client.communicate()
    if client.returncode:
        raise RuntimeError("the client failed: see above")
    found: dict[str, float] = json.loads(answer)
    total = args.streams * args.tokens
    return {
        "tokens_per_s": total / found["seconds"],
        "events_per_token": found["events"] / total,
        "front_us": (processor_s(pid) - before) / total * 1e6,
        "client_us": found["client_s"] / total * 1e6,
    }


# The report


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of both engines."""
    chosen: dict[str, Any] = {"dtype": "bfloat16", "num_pages": args.streams * 16, "max_context": 512}
    return chosen | ({"threads": args.threads} if args.threads else {})


async def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Both ways in turns; the first round of each warms up."""
    import torch  # the client's process does without

    from weft.llm import LLM
    from weft.models.random_checkpoints import QWEN3_0_6B, write_checkpoint

    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as text:
        shape: Mapping[str, Any] = {**QWEN3_0_6B, "num_hidden_layers": args.layers}
        model = str(write_checkpoint(Path(text) / "model", shape, dtype=torch.bfloat16, tokenizer=True))
        chosen = settings(args)
        flags = [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        async with server(model, flags, Path(text)) as (port, pid):
            with LLM(model, performance_mode="interactivity", **chosen) as offline:
                for run in range(args.runs + 1):
                    streamed = await over_http(port, pid, args, model)
                    seconds = await asyncio.to_thread(_offline_s, offline, args)
                    if run:
                        rate = args.streams * args.tokens / seconds
                        row = {**streamed, "offline_tokens_per_s": rate, "ratio": streamed["tokens_per_s"] / rate}
                        for name, value in row.items():
                            found.setdefault(name, []).append(value)
    return found


def _offline_s(offline: LLM, args: argparse.Namespace) -> float:
    """Seconds for the same requests through `weft.LLM`."""
    conversations = [conversation(number) for number in range(args.streams)]
    began = time.perf_counter()
    results = offline.chat(conversations, progress=False, **options(args.tokens))
    seconds = time.perf_counter() - began
    if any(len(result.token_ids) != args.tokens for result in results):
        raise RuntimeError("an answer of the offline path is not whole")
    return seconds


def main() -> None:
    """Measure the streams and print them, or run as the client process."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.streaming", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64, help="at once (64)")
    parser.add_argument("--tokens", type=int, default=64, help="of each (64)")
    parser.add_argument("--runs", type=int, default=3, help="medians are of so many (3)")
    parser.add_argument("--threads", type=int, help="of the kernels (as weft serve would use)")
    parser.add_argument("--layers", type=int, default=28, help="of the model: fewer make it faster (28)")
    parser.add_argument("--json", type=Path, help="write the figures to this file too, with machine and versions")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client is not None:
        print(json.dumps(asyncio.run(run_client(args.client, args.streams, args.tokens, args.model))))
        return
    where = surroundings()
    print(heading(where))
    print(f"{args.streams} chat completions of {args.tokens} tokens at once, {args.layers} layers; {args.runs} runs")
    found = asyncio.run(measure(args))
    for name, values in found.items():
        print(f"  {name:22} {Spread.of(values).text(3)}")
    if args.json is not None:
        write_record(args.json, {**where, "command": command_line("bench.streaming"), "results": found})


if __name__ == "__main__":
    alone.require()
    main()
