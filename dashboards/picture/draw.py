"""Draws `dashboards/dashboard.png` from a Prometheus that scrapes an aiokv: on demand, no part of the tests.

    npm --prefix dashboards/picture ci && npm --prefix dashboards/picture run build
    python -m dashboards.picture.draw --prometheus http://127.0.0.1:9090 --minutes 5

Every panel's queries are asked as Grafana would ask them; then Grafana's component library draws the answers in
headless Chromium (Debian: `apt-get install chromium pngquant`). It is not Grafana: variables, provisioning and the
import are not exercised.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, Final, final
from urllib.parse import urlencode
from urllib.request import urlopen

import typer

from dashboards.generate import FILE

HERE: Final = Path(__file__).parent
BUILT: Final = HERE / "dist"
ICONS: Final = HERE / "node_modules/@grafana/ui/dist/public"
PICTURE: Final = FILE.parent / "dashboard.png"
WIDTH: Final = 1408
LINE: Final = 38
GAP: Final = 8
POINTS: Final = 120
COLORS: Final = 32
PATIENCE_MS: Final = 20_000


def main(
    *,
    prometheus: Annotated[str, typer.Option(help="Where a Prometheus answers.")] = "http://127.0.0.1:9090",
    minutes: Annotated[float, typer.Option(help="How much of the past is drawn.")] = 5.0,
    picture: Annotated[Path, typer.Option(help="The file that is written.")] = PICTURE,
) -> None:
    """Ask, draw, write."""
    board = json.loads(FILE.read_text(encoding="utf-8"))
    until = time.time()
    since = until - 60 * minutes
    answers = {
        panel["id"]: [series for target in panel["targets"] for series in _ask(prometheus, target, span=(since, until))]
        for panel in board["panels"]
        if panel["type"] != "row"
    }
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page"
        shutil.copytree(BUILT, page)
        shutil.copytree(ICONS, page / "public/build")
        data = {"board": board, "answers": answers, "from": since * 1000, "to": until * 1000}
        (page / "data.json").write_text(json.dumps(data))
        with _served(page) as url:
            _shoot(url, height=_height(board), picture=picture)
    _run("pngquant", "--nofs", "--strip", "--force", "--ext=.png", str(COLORS), str(picture))


def _ask(prometheus: str, target: dict[str, Any], *, span: tuple[float, float]) -> list[dict[str, Any]]:
    """The series of one query, named as its legend says, over the whole time."""
    since, until = span
    window = {"$__rate_interval": "20s", "$__range": f"{until - since:.0f}s", "$instance": ".*"}
    expr = re.sub(r"\$\w+", lambda found: window[found.group()], target["expr"])
    arguments = {"query": expr, "start": since, "end": until, "step": (until - since) / POINTS}
    with urlopen(f"{prometheus}/api/v1/query_range?{urlencode(arguments)}", timeout=10) as response:
        found = json.load(response)["data"]["result"]
    return [
        {
            "name": _name(target["legendFormat"], labels=one["metric"]),
            "times": [at * 1000 for at, _ in one["values"]],
            "values": [value if math.isfinite(value) else None for value in (float(text) for _, text in one["values"])],
        }
        for one in found
    ]


def _name(legend: str, *, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda label: labels.get(label.group(1), ""), legend)


def _height(board: dict[str, Any]) -> int:
    """Of the page, as `src/main.jsx` lays it out."""
    lines: int = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    return LINE * lines + GAP


@final
class _Files(SimpleHTTPRequestHandler):
    """Says nothing about what it serves: fonts and the like that are asked for in vain are no news."""

    def log_message(self, format: str, *args: object) -> None:
        """Nowhere."""


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The page over HTTP on a free port of this machine: browsers load no modules from files."""
    handler = partial(_Files, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


def _shoot(url: str, *, height: int, picture: Path) -> None:
    size = (f"--window-size={WIDTH},{height}", f"--virtual-time-budget={PATIENCE_MS}")
    _run("chromium", "--headless", "--no-sandbox", "--hide-scrollbars", *size, f"--screenshot={picture}", url)


def _run(name: str, *arguments: str) -> None:
    program = shutil.which(name)
    if program is None:
        raise typer.BadParameter(f"{name} is not installed (Debian: apt-get install {name})")
    subprocess.run([program, *arguments], check=True, timeout=120, capture_output=True)


if __name__ == "__main__":
    typer.run(main)
