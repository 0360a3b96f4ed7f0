"""`weft generate`: generates text for a prompt, or for each line of a file, with an engine in this process."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from weft.abi.errors import ContextTooLong, InvalidRequest, WeftError
from weft.cli.local import local_llm
from weft.cli.options import ENGINE_KEYS, takes_settings
from weft.cli.sampling_flags import MaxTokens, MinP, Seed, Stop, Temperature, TopK, TopP, given
from weft.cli.settings import Settings, with_setting
from weft.config import EMBEDDED_MODEL, hub_file, is_hub_id
from weft.hub import WEIGHT_FILES

if TYPE_CHECKING:
    from weft.llm import LLM, Result

EXAMPLES = """Examples:

  weft generate --chat 'Tell me something interesting.' --temperature 0

  echo 'Extract name, age as JSON. Ada is 36.' | weft generate --chat --temperature 0

  git diff | weft generate --model Qwen/Qwen3-0.6B --chat --system 'Summarise this.'

  weft generate --file prompts.txt --chat --jsonl --max-tokens 32 > results.jsonl
"""


def register(app: typer.Typer) -> None:
    """Add the command `generate` to the application."""
    app.command("generate", epilog=EXAMPLES)(generate)


@takes_settings(*ENGINE_KEYS)
def generate(
    settings: Settings,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]",
            help="A single argument is the model if it is weft-tiny, a directory, a GGUF file or org/name, "
            "otherwise the prompt.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model; the argument is then the prompt.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    as_chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="Send the prompt as a user message, or continue it as raw text. (--raw)"),
    ] = False,
    system: Annotated[str | None, typer.Option("--system", "-s", help="The system prompt, with --chat.")] = None,
    n: Annotated[int, typer.Option("-n", help="Number of answers per prompt.")] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", help="With JSON: log-probabilities of this many tokens at each position."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the result as JSON.")] = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Read a prompt per line and write a line of JSON for each, in order.")
    ] = False,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Stream the text. (on a terminal)")
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
) -> None:
    """Generate text for a prompt, or for each line of a file."""
    named, prompt = split_words(words or [], model)
    if named is not None:
        settings = with_setting(settings, "engine.model", named, "argument MODEL")
    options = given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        logprobs=logprobs,
    )
    options["n"] = n
    ask = Ask(as_chat, system, options)
    if system is not None and not as_chat:
        raise typer.BadParameter("--system needs --chat: a raw prompt has no system message")
    if logprobs is not None and not (as_json or jsonl):
        raise typer.BadParameter("--logprobs needs --json or --jsonl")
    if jsonl and (as_json or stream or prompt is not None):
        raise typer.BadParameter("--jsonl reads prompts from --file or a pipe, and excludes --json and --stream")
    with contextlib.ExitStack() as scope:
        lines = scope.enter_context(_open_lines(file)) if jsonl else None
        text = "" if jsonl else _prompt_text(prompt, file)
        llm = scope.enter_context(local_llm(settings.config.engine))
        if lines is not None:
            if not write_lines(llm, lines, ask):
                raise typer.Exit(1)
            return
        try:
            if stream or (stream is None and sys.stdout.isatty() and n == 1 and not as_json):
                write_stream(llm, text, ask)
            else:
                write_result(llm, text, ask, as_json)
        except ContextTooLong as error:
            what = "the prompt" if prompt is not None else file or "standard input"
            reason = error.message.removeprefix("prompt 0: ")
            raise WeftError(f"{what} is too long for {llm.info.model}: {reason}, or choose another --model") from error


class Ask:
    """How prompts are rendered, and the options of all prompts."""

    def __init__(self, as_chat: bool, system: str | None, options: Mapping[str, Any]):
        self.as_chat = as_chat
        self.options = options
        self._system = [{"role": "system", "content": system}] if system else []

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """Return the prompt as the messages of a chat."""
        return [*self._system, {"role": "user", "content": prompt}]


def split_words(words: list[str], model: str | None) -> tuple[str | None, str | None]:
    """Return (model, prompt) of the arguments, None where missing. Raises `typer.BadParameter` for too many."""
    if len(words) > (2 if model is None else 1):
        raise typer.BadParameter(f"{len(words)} arguments; put the prompt in quotes")
    if model is not None:
        return model, words[0] if words else None
    if len(words) == 2:
        return words[0], words[1]
    if words and (words[0] == EMBEDDED_MODEL or is_hub_id(words[0]) or hub_file(words[0]) or _is_model_path(words[0])):
        return words[0], None
    return None, words[0] if words else None


def write_stream(llm: LLM, prompt: str, ask: Ask) -> None:
    """Write an answer to standard output as its text comes. Raises `InvalidRequest` for `n` above 1."""
    if ask.options["n"] != 1:
        raise InvalidRequest("several answers cannot be streamed; use --no-stream", "n")
    if ask.as_chat:
        texts = (chunk.text for chunk in llm.stream_chat(ask.messages(prompt), **ask.options))
    else:
        texts = (chunk.text for chunk in llm.stream(prompt, **ask.options))
    for text in texts:
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def write_result(llm: LLM, prompt: str, ask: Ask, as_json: bool) -> None:
    """Write all answers to one prompt once they are complete."""
    if ask.as_chat:
        [result] = llm.chat([ask.messages(prompt)], progress=False, **ask.options)
    else:
        [result] = llm.generate([prompt], progress=False, **ask.options)
    if as_json:
        print(json.dumps(described(result), indent=2, ensure_ascii=False))
        return
    for output in result.outputs:
        print(f"[{output.index}] {output.text}" if len(result.outputs) > 1 else output.text)


def write_lines(llm: LLM, lines: Iterable[str], ask: Ask) -> bool:
    """Write a line of JSON per prompt, in order, and return whether all succeeded. A failure does not stop the others.

    `line` is the input's line number, from 1; empty lines are skipped. A result waits for all earlier ones.
    """
    numbers: list[int] = []

    def prompts() -> Iterator[str]:
        for number, line in enumerate(lines, 1):
            text = line.rstrip("\r\n")
            if text.strip():
                numbers.append(number)
                yield text

    if ask.as_chat:
        results = llm.chat_iter(map(ask.messages, prompts()), return_errors=True, **ask.options)
    else:
        results = llm.generate_iter(prompts(), return_errors=True, **ask.options)
    waiting: dict[int, Result] = {}
    num_written, all_well = 0, True
    with _counter() as count:
        for result in results:
            waiting[result.index] = result
            count()
            while (ready := waiting.pop(num_written, None)) is not None:
                print(json.dumps({"line": numbers[num_written], **described(ready)}, ensure_ascii=False), flush=True)
                all_well &= ready.error is None
                num_written += 1
    return all_well


def described(result: Result) -> dict[str, Any]:
    """Return a result as JSON values."""
    if result.error is not None:
        return {"error": {"type": result.error.kind, "message": result.error.message}}
    outputs = []
    for output in result.outputs:
        plain: dict[str, Any] = {
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "stop": output.stop,
        }
        if output.logprobs is not None:
            plain["logprobs"] = [
                {"logprob": one.logprob, "rank": one.rank, "top": dict(zip(one.top_ids, one.top_logprobs, strict=True))}
                for one in output.logprobs
            ]
        outputs.append(plain)
    usage = {
        "prompt_tokens": len(result.prompt_token_ids),
        "cached_tokens": result.num_cached_tokens,
        "continued_tokens": result.num_continued_tokens,
        "host_tokens": result.num_host_tokens,
        "recomputed_tokens": result.num_recomputed_tokens,
        "new_tokens": result.num_new_tokens,
        "first_different_token": result.first_different_token,
        "completion_tokens": result.num_output_tokens,
    }
    return {"outputs": outputs, "usage": usage}


def _is_model_path(word: str) -> bool:
    """Whether a word is a directory or a file of weights (loading refuses all but GGUF, with a reason)."""
    # A prompt may be too long for a path, or contain characters that paths cannot have.
    try:
        path = Path(word).expanduser()
        return path.is_dir() or (path.suffix.lower() in WEIGHT_FILES and path.is_file())
    except (OSError, ValueError, RuntimeError):
        return False


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if prompt is not None:
        if file is not None:
            raise typer.BadParameter("give either a prompt or --file")
        return prompt
    with _open_lines(file) as source:
        text = source.read()
    if not text.strip():
        raise WeftError(f"{file or 'standard input'} is empty; it must contain a prompt")
    return text


@contextlib.contextmanager
def _open_lines(file: Path | None) -> Iterator[TextIO]:
    """Open the file, or standard input. Raises `WeftError` if it cannot be read."""
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, --file, or a pipe")
    try:
        source = sys.stdin if file is None else file.open(encoding="utf-8")
    except OSError as error:
        raise WeftError(f"{file} cannot be read: {error.strerror}") from error
    try:
        yield source
    except UnicodeDecodeError as error:
        raise WeftError(f"{file or 'standard input'} is not UTF-8 text: {error}") from error
    finally:
        if file is not None:
            source.close()


@contextlib.contextmanager
def _counter() -> Iterator[Any]:
    """Count results on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("results"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("results", total=None)
        yield lambda: bar.advance(task)
