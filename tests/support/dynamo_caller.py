"""Calls engines through Dynamo's runtime: what finds the sidecar of dynamo.py, in its own process.

Each line on stdin is a request: a JSON object with ``id``, ``request`` (as Dynamo's frontend
sends it to a worker) and ``items``, after which the request is dropped (null: never). Each line
on stdout is what became of one: ``id`` with ``item``, with ``error``, or with ``end``. The first
line says ``{"instances": N}``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from dynamo._core import Context, DistributedRuntime


def say(**fields: Any) -> None:
    """One line."""
    print(json.dumps(fields), flush=True)


async def run(client: Any, asked: dict[str, Any]) -> None:
    """One request."""
    context = Context(asked["id"])
    left = asked["items"]
    try:
        stream = await client.round_robin(asked["request"], annotated=False, context=context)
        async for item in stream:
            say(id=asked["id"], item=item)
            left = left and left - 1
            if left == 0:
                context.stop_generating()
    except Exception as error:
        say(id=asked["id"], error=f"{type(error).__name__}: {error}")
    else:
        say(id=asked["id"], end=True)


async def main(endpoint: str) -> None:
    """Serve stdin until it ends."""
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp")
    client = await runtime.endpoint(endpoint).client()
    say(instances=len(await client.wait_for_instances()))
    running = set()
    while line := await asyncio.to_thread(sys.stdin.readline):
        task = asyncio.create_task(run(client, json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    runtime.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
