"""A router's pause: requests are held while a trainer changes weights, or an operator works on nodes. Plain state.

While it lasts, requests wait as they do while no node takes work, and their time to wait stands still. The bounds on
what is held still refuse.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

from pdcluster.core.errors import BadRequest, NoNodeTakesWork

# What becomes of requests that run: they end with what they have, may end, or are held and go on afterwards.
PauseMode = Literal["abort", "wait", "keep"]
MAX_PAUSE_S = 86_400.0
USUAL_PAUSE_S = 1800.0


class Pause:
    """Owned by the router's event loop. since: when it began; None: there is none."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.mode: PauseMode = "wait"

    @property
    def is_on(self) -> bool:
        return self.since is not None

    def begin(self, mode: PauseMode, now: float) -> None:
        """A pause within a pause changes its mode, and not its beginning."""
        self.mode = mode
        self.since = now if self.since is None else self.since

    def end(self) -> float | None:
        """When the pause that ends began; None where there was none."""
        since, self.since = self.since, None
        return since

    def check(self) -> None:
        """Raises NoNodeTakesWork while it lasts."""
        if self.since is not None:
            raise NoNodeTakesWork("the router is paused by an operator or a trainer; it goes on when they resume it")


def check_pause(max_pause_s: float) -> None:
    """Raises BadRequest for a time that no pause may last."""
    if not 0.0 < max_pause_s <= MAX_PAUSE_S:
        raise BadRequest(f"max_pause_s is {max_pause_s:g}, allowed are more than 0 to {MAX_PAUSE_S:g}", "max_pause_s")


def pause_mode(given: str) -> PauseMode:
    """Raises BadRequest for a mode that mixes weights, and for one that nobody knows."""
    if given in get_args(PauseMode):
        return cast(PauseMode, given)
    if given == "in_place":
        raise BadRequest(
            "mode in_place keeps KV of the old weights under new ones; use keep, which computes it anew", "mode"
        )
    raise BadRequest(f"mode is {given[:100]!r}, allowed are {', '.join(get_args(PauseMode))}", "mode")
