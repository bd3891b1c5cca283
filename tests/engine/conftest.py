"""What the engine's tests share."""

import pytest


@pytest.fixture(scope="module")
def fewer_programs():
    """At most two prompts look ahead together, one request decodes or four, and alone all have caches of one size."""
    from specprefill_jax import cache as cache_module
    from specprefill_jax.engine import runner as runner_module
    from specprefill_jax.engine import scheduler as scheduler_module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "MIN_CAPACITY", 512)
        patch.setattr(runner_module, "doubling", lambda least, most: (least, most))
        for module in (runner_module, scheduler_module):
            patch.setattr(module, "MAX_LOOK_AHEAD_ROWS", 2)
        yield


@pytest.fixture(params=["a round late", "at once"])
def either(request, bench, monkeypatch):
    """Results are read a round late, and at once, as where models run layer by layer; `bench` is each file's own."""
    if request.param == "at once":
        monkeypatch.setattr(type(bench.runner), "eager", property(lambda runner: True))
        monkeypatch.setattr(bench.runner, "_decode_fn", bench.runner._decode)
        monkeypatch.setattr(bench.runner, "_verify_fn", bench.runner._verify)
    return bench
