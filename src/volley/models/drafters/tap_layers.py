"""Choice of the target's layers to tap: named ones, or a number of layers spread over its depth."""

from collections.abc import Iterable

from volley.errors import ConfigError


def parse_taps(taps: int | str | Iterable[int] | None) -> int | tuple[int, ...] | None:
    """Parse taps: ``"5"`` is a count, ``"1,9,17"`` are layer ids."""
    if taps is None or isinstance(taps, int):
        if taps is not None and taps < 1:
            raise ConfigError(f"taps is {taps}; tap at least one layer")
        return taps
    if isinstance(taps, str):
        try:
            numbers = [int(part) for part in taps.split(",")]
        except ValueError:
            raise ConfigError(f"taps is {taps!r}; give a count (5) or layer ids (1,9,17)") from None
        return parse_taps(numbers[0]) if "," not in taps else tuple(numbers)
    return tuple(taps)


def spread_taps(count: int, num_layers: int) -> tuple[int, ...]:
    """Spread ``count`` layers evenly from the second to the third-to-last (DFlash §5): [1, 9, 17, 25, 33] of 36."""
    first = min(1, num_layers - 1)
    last = max(first, num_layers - 3)
    if count > last - first + 1:
        raise ConfigError(
            f"taps is {count}, but only {last - first + 1} layers lie between the second and the third-to-last of "
            f"{num_layers}; tap fewer, or name the layer ids"
        )
    if count == 1:
        return (last,)
    return tuple(round(first + index * (last - first) / (count - 1)) for index in range(count))


def choose_taps(taps: int | tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """Return the layers to tap: the named ones, or so many (default 5) spread over the target's depth."""
    if isinstance(taps, tuple):
        deep = [layer for layer in taps if not -1 <= layer < num_layers]
        if deep:
            raise ConfigError(
                f"taps {list(taps)}: the target has {num_layers} layers, 0 to {num_layers - 1}; "
                f"layer {deep[0]} does not exist, name others"
            )
        return taps
    return spread_taps(taps or min(5, max(1, num_layers - 3)), num_layers)
