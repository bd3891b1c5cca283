"""The few shapes that programs are compiled for, and which of them serves a number."""

from collections.abc import Sequence

from specprefill_jax.models.paged import PAGE


def piece_lengths(chunk: int) -> list[int]:
    """Multiples of PAGE up to `chunk`, two an octave from 64 on."""
    lengths, step = [PAGE], PAGE
    while lengths[-1] < chunk:
        if lengths[-1] >= 4 * step:
            step *= 2
        lengths.append(min(lengths[-1] + step, chunk))
    return lengths


def prompt_sizes(longest: int) -> list[int]:
    """Multiples of 512 that reach `longest`, two an octave from 1,024 on."""
    return [16 * length for length in piece_lengths(-(-longest // 512) * PAGE)]


def up(sizes: Sequence[int], least: int) -> int:
    """The smallest of ascending `sizes` that holds `least`."""
    return next(size for size in sizes if size >= least)
