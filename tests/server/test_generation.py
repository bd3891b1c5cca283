"""One HTTP request's events on the event loop, without a server around it."""

import asyncio

from specprefill_jax.engine.request import Delta
from specprefill_jax.server.generation import Generation


class Engine:
    """Keeps what it is given: the events are the test's to send."""

    def submit(self, request, on_event):
        self.on_event = on_event


class Request:
    request_id = "one"


def delta(text: str) -> Delta:
    return Delta(text, (5,), None)


async def turns(count: int = 20) -> None:
    """Let everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_news_of_what_an_earlier_batch_held_ends_no_wait():
    """An event that comes before its news is read is in the batch at once; the news that follows then holds nothing."""

    async def read() -> None:
        engine = Engine()
        generation = Generation(engine, lambda request: lambda event: None)
        generation.submit([Request()])

        async def twice() -> list:
            engine.on_event(delta("a"))
            assert [event.text for _, event in await generation.events(60)] == ["a"]
            return await generation.events(60)  # the news is still on its way: the loop has not had its turn

        waiting = asyncio.create_task(twice())
        await turns()
        assert not waiting.done()
        engine.on_event(delta("b"))
        engine.on_event(delta("c"))
        assert [event.text for _, event in await waiting] == ["b", "c"]

    asyncio.run(read())


def test_without_an_event_the_wait_ends_with_none():
    async def read() -> None:
        engine = Engine()
        generation = Generation(engine, lambda request: lambda event: None)
        generation.submit([Request()])
        assert await generation.events(0) == []
        assert await generation.events(0.001) == []
        engine.on_event(delta("a"))
        assert len(await generation.events(0)) == 1

    asyncio.run(read())
