"""A server as a program, whose model says a sentence for each line on stdin: python -m support.serve_child"""

from __future__ import annotations

import sys

import moeflux
from moeflux import builtin
from moeflux.serve.app import application
from moeflux.serve.desk import Desk
from moeflux.serve.server import Listen, listening, run
from support.stand_in_scheduler import StandIn


def main() -> int:
    def slowly(prompt: str) -> str:
        sys.stdin.readline()
        return "I was asked, so I answer."

    with moeflux.load(builtin.path(), threads=1) as model:
        scheduler = StandIn(model)
        scheduler.script = slowly
        listen = Listen(port=0)
        app = application(Desk(model, scheduler, "builtin", model.plan.context), listen.rules)
        return run(app, scheduler, "builtin", listen, listening(listen))


if __name__ == "__main__":
    sys.exit(main())
