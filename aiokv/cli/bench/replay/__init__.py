"""`aiokv bench replay TRACE`: a public trace of requests through the whole runtime, and through its peer.

`command.py` the options · `trace.py` what a trace says · `schedule.py` who is in flight when · `prompts.py` tokens from
hash ids · `player.py` requests on the runtime · `scrapes.py` a reader of its metrics · `peer.py` the other side ·
`runner.py` slices of both in turn · `clock.py` their time · `figures.py` what came of it, and the verdict.
"""

from aiokv.cli.bench.replay.command import register

__all__ = ["register"]
