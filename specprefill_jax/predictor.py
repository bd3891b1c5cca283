"""What a prompt will take: the cost model with a pair's sizes and a machine's rates."""

from functools import cached_property

import jax

from specprefill_jax import costs
from specprefill_jax.machine import measure
from specprefill_jax.models.loaded import LoadedLlama
from specprefill_jax.sharding.mesh import platform


class Predictor:
    """Predictions for one pair of models."""

    def __init__(self, main: LoadedLlama, speculator: LoadedLlama, machine: costs.Machine | None, chunk: int):
        """Predict for a pair that reads `chunk` tokens a pass, on a machine of given rates or (None) on this one."""
        self._main, self._speculator, self._given, self._chunk = main, speculator, machine, chunk

    def gain(
        self,
        num_tokens: int,
        look_ahead: int,
        kept_tokens: int,
        cached_tokens: int = 0,
        *,
        query_window: int = 0,
        checks: int = 0,
    ) -> float:
        """Predicted speed-up of the first token; of the prompt, so many tokens need not be read by a dense prefill.

        With a query window there is no look-ahead. Only the ratio of the rates matters, so nothing is measured: see
        `costs.default_machine`.
        """
        machine = self._given or costs.default_machine(jax.default_backend())
        whole = self._predict(num_tokens, look_ahead, kept_tokens, machine, query_window, checks)
        if not cached_tokens:
            return whole.gain
        cached = self._predict(cached_tokens, look_ahead, cached_tokens, machine, query_window, checks)
        return max(whole.dense - cached.dense, 1e-9) / whole.total

    def phases(
        self, num_tokens: int, look_ahead: int, kept_tokens: int, *, query_window: int = 0, checks: int = 0
    ) -> costs.Prediction:
        """Predicted seconds of each phase of one prompt that finds nothing in a cache, by `rates`."""
        return self._predict(num_tokens, look_ahead, kept_tokens, self.rates, query_window, checks, self._chunk)

    @cached_property
    def rates(self) -> costs.Machine:
        """The rates that were given, or this machine's own, measured when first asked for: about a second.

        With several devices they are one's times their number, but on CPUs, whose devices share what there is.
        Communication is left out. All processes take process 0's.
        """
        if self._given is not None:
            return self._given
        measured = measure(1, self._main.dtype)
        flops, read, mesh = measured.flops_per_s, measured.bytes_per_s, self._main.mesh
        if jax.process_count() > 1:
            from specprefill_jax.sharding.distributed import broadcast  # here: one process alone has no use for it

            flops, read = broadcast([flops, read])
        count = 1 if mesh is None or platform(mesh) == "cpu" else mesh.size
        return costs.Machine(count * flops, count * read, devices=count)

    def _predict(
        self,
        num_tokens: int,
        look_ahead: int,
        kept_tokens: int,
        machine: costs.Machine,
        query_window: int,
        checks: int,
        chunk: int | None = None,
    ) -> costs.Prediction:
        main, draft = self._main, self._speculator
        return costs.predict(
            main.config,
            draft.config,
            num_tokens,
            kept_tokens,
            look_ahead,
            machine,
            query_window=query_window,
            checks=checks,
            main_fp8_layers=main.native_float8_layers,
            main_bytes=main.dtype.itemsize,
            speculator_bytes=draft.dtype.itemsize,
            chunk=chunk,
        )
