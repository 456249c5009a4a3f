"""A streamed answer as a user of vLLM writes it: an asynchronous engine, its new tokens as they are drawn."""

import asyncio
import sys

from tandem import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    sampling_params = SamplingParams(max_tokens=10, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA)
    parts = []
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
        for completion in output.outputs:
            parts.append(completion.text)
        if output.finished:
            break
    print(f"{prompt!r} {''.join(parts)!r}")


async def main() -> None:
    engine = AsyncLLM.from_engine_args(EngineArgs(model=sys.argv[1], enforce_eager=True))
    try:
        for number, prompt in enumerate(["the quick brown", "over the lazy"]):
            await stream(engine, prompt, f"stream-{number}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
