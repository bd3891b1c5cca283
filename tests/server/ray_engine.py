"""The scripted engine as Ray's replicas load it; a module of its own, since they do not import tests."""

import os
import time

from server.fake_engine import FakeEngine, make_tokenizer

from specprefill_jax.engine.request import OnEvent, Request

BREAK = "break down, please"


class Pace:
    """A gate that opens every few milliseconds."""

    def wait(self, _: float) -> bool:
        time.sleep(0.004)
        return True


class SlowEngine(FakeEngine):
    """Says which process it is in, token by token; fails for good when a prompt asks for it."""

    def reset(self) -> None:
        super().reset()
        self.answer = f"process {os.getpid()} "
        self.gate = Pace()

    def submit(self, request: Request, on_event: OnEvent) -> None:
        if BREAK in self.tokenizer.decode([int(index) for index in request.prompt]):
            self.state = "failed"
        super().submit(request, on_event)


def load() -> SlowEngine:
    return SlowEngine(make_tokenizer())
