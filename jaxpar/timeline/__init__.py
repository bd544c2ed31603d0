"""The step of a plan on a clock: what runs when, and what waits for what."""

from jaxpar.timeline.play import Span, Timeline, play
from jaxpar.timeline.run import Pace, Run, pace, run_of, timeline_of

__all__ = ["Pace", "Run", "Span", "Timeline", "pace", "play", "run_of", "timeline_of"]
