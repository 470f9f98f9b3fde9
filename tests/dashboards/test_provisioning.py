"""The compose file and what it mounts agree with each other. They are read, not run: there is no Grafana here."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from dashboards.generate import FILE
from tests.dashboards.queries import FOLDER

COMPOSE: Final = FOLDER / "docker-compose.yml"


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return content


@pytest.fixture
def services() -> dict[str, Any]:
    found: dict[str, Any] = read("docker-compose.yml")["services"]
    return found


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """What of this folder is mounted where."""
    parts = [mount.split(":") for mount in service["volumes"] if mount.startswith("./")]
    return {inside: outside for outside, inside, *_ in parts}


def test_every_mounted_path_exists_and_is_read_only(services: dict[str, Any]) -> None:
    for service in services.values():
        assert all((FOLDER / outside).exists() for outside in mounts(service).values())
        assert all(mount.endswith(":ro") for mount in service["volumes"] if mount.startswith("./"))


def test_images_are_pinned_and_grafana_is_the_one_that_the_file_is_written_for(services: dict[str, Any]) -> None:
    assert all(re.search(r":v?\d+\.\d+\.\d+$", service["image"]) for service in services.values())
    assert services["grafana"]["image"] == "grafana/grafana:11.6.0"


def test_both_listen_on_the_loopback_only(services: dict[str, Any]) -> None:
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert not any("ports" in service for service in services.values())


def test_prometheus_reads_the_configuration_that_is_tested(services: dict[str, Any]) -> None:
    (argument,) = [one for one in services["prometheus"]["command"] if one.startswith("--config.file=")]
    folder, _, name = argument.removeprefix("--config.file=").rpartition("/")
    assert (FOLDER / mounts(services["prometheus"])[folder] / name).read_bytes() == (
        FOLDER / "prometheus/prometheus.yml"
    ).read_bytes()


def test_grafana_finds_the_dashboard_and_the_data_source(services: dict[str, Any]) -> None:
    inside = mounts(services["grafana"])
    (provider,) = read("grafana/dashboards/aiokv.yml")["providers"]
    (source,) = read("grafana/datasources/prometheus.yml")["datasources"]
    assert inside[f"{provider['options']['path']}/{FILE.name}"] == f"./{FILE.name}"
    assert inside["/etc/grafana/provisioning"] == "./grafana"
    assert source["url"] == "http://127.0.0.1:9090"
    assert (source["type"], source["isDefault"]) == ("prometheus", True)


def test_grafana_knows_how_often_prometheus_scrapes() -> None:
    """Otherwise `$__rate_interval` is shorter than what a rate needs, and panels have holes."""
    (source,) = read("grafana/datasources/prometheus.yml")["datasources"]
    assert source["jsonData"]["timeInterval"] == read("prometheus/prometheus.yml")["global"]["scrape_interval"]


def test_compose_accepts_its_file() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    command: list[str | Path] = [docker, "compose", "--file", COMPOSE, "config", "--quiet"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
