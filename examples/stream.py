"""Streams a completion, shows what an error tells, and cancels a request in the middle."""

import asyncio
import sys
from contextlib import aclosing

from openengine_vllm.client import Client, OpenEngineError, OutputFinished, RequestFailed, TextDelta


async def main(target: str) -> None:
    async with Client(target, timeout=60) as client:
        print("-- a stream")
        async for item in client.iter_text("The capital of France is", max_tokens=24):
            match item:
                case TextDelta(text=text):
                    print(text, end="", flush=True)
                case OutputFinished():
                    print()

        print("-- a rejection")
        try:
            await client.complete("Hello", temperature=-1.0)
        except RequestFailed as failure:
            print(f"accepted, then failed: {failure.message}")
        except OpenEngineError as error:
            print(f"rejected at {error.field}: {error.message}")

        print("-- a cancellation")
        async with aclosing(client.iter_text("Once upon a time", max_tokens=2000)) as items:
            async for item in items:
                if isinstance(item, TextDelta):
                    print(item.text)
                    break  # closing the iterator stops the request in the engine


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
