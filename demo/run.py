"""Start a server with the model in the package, run every scene against it, stop it.

Fails if an expectation does not hold. No expectation depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import sys
import time

import httpx
import openai

from demo.scenes import SCENES, Report, Stage
from demo.server import PATIENCE_S, ServerFailed, ServerProcess

MODEL = "weft-tiny"


async def main() -> int:
    """Run all scenes and return the exit code: 0 when every expectation held."""
    report = Report()
    server = ServerProcess()
    print(f"$ {' '.join(server.command)}")
    began = time.monotonic()
    try:
        await server.wait_ready()
        print(f"ready at {server.url} after {time.monotonic() - began:.1f} s")
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as client:
            stage = Stage(server, client, MODEL, report)
            for number, scene in enumerate(SCENES, 1):
                print(f"\n{number}. {scene.__doc__}")
                await scene(stage)
    except (ServerFailed, openai.OpenAIError, httpx.HTTPError, TimeoutError) as error:
        print(f"\n{error}\n\nThe end of the server's log:\n{server.log()}")
        report.expect(f"no scene is interrupted by {type(error).__name__}", False)
    finally:
        await server.close()
    held = report.num_checks - len(report.failures)
    print(f"\n{held} of {report.num_checks} expectations held, in {time.monotonic() - began:.1f} s.")
    for failure in report.failures:
        print(f"  not: {failure}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
