"""Settings come typed from argument, environment and file, in that order, and nothing misspelt passes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.errors import ConfigError
from aiokv.model.plan import Checksum, StorePolicy
from aiokv.runtime.config_file import (
    Settings,
    SettingSource,
    load_settings,
    load_settings_with_sources,
    parse_bool,
    parse_bytes,
)

GIB = 1024**3


def write(directory: Path, text: str) -> Path:
    file = directory / "aiokv.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_without_any_layer_the_defaults_hold() -> None:
    assert load_settings(file=None, environ={}, arguments={}) == Settings()


def test_argument_beats_environment_beats_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'gpu_blocks = 100\nwatermark = 0.5\nbackend = "host"')
    loaded = load_settings_with_sources(
        file=file, environ={"AIOKV_GPU_BLOCKS": "200", "AIOKV_WATERMARK": "0.25"}, arguments={"gpu_blocks": 300}
    )
    assert loaded.settings == Settings(gpu_blocks=300, watermark=0.25, backend="host")
    assert loaded.sources == {
        "gpu_blocks": SettingSource.ARGUMENT,
        "cpu_blocks": SettingSource.DEFAULT,
        "cpu_bytes": SettingSource.DEFAULT,
        "store_policy": SettingSource.DEFAULT,
        "checksum": SettingSource.DEFAULT,
        "watermark": SettingSource.ENVIRONMENT,
        "backend": SettingSource.FILE,
        "lease_age_limit_s": SettingSource.DEFAULT,
        "hint_quota": SettingSource.DEFAULT,
    }


def test_every_setting_is_read_from_every_layer(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        'gpu_blocks = 64\ncpu_bytes = "8GiB"\nstore_policy = "lazy"\nwatermark = 0.1\n'
        'checksum = "full"\nbackend = "host"\nlease_age_limit_s = 90',
    )
    environ = {
        "AIOKV_GPU_BLOCKS": "64",
        "AIOKV_CPU_BYTES": "8GiB",
        "AIOKV_STORE_POLICY": "lazy",
        "AIOKV_WATERMARK": "0.1",
        "AIOKV_CHECKSUM": "full",
        "AIOKV_BACKEND": "host",
        "AIOKV_LEASE_AGE_LIMIT_S": "90",
    }
    arguments = {
        "gpu_blocks": 64,
        "cpu_bytes": 8 * GIB,
        "store_policy": StorePolicy.LAZY,
        "watermark": 0.1,
        "checksum": Checksum.FULL,
        "backend": "host",
        "lease_age_limit_s": 90,
    }
    expected = Settings(
        gpu_blocks=64,
        cpu_bytes=8 * GIB,
        store_policy=StorePolicy.LAZY,
        watermark=0.1,
        checksum=Checksum.FULL,
        backend="host",
        lease_age_limit_s=90,
    )
    assert load_settings(file=file, environ={}, arguments={}) == expected
    assert load_settings(file=None, environ=environ, arguments={}) == expected
    assert load_settings(file=None, environ={}, arguments=arguments) == expected


def test_an_argument_of_none_was_not_given() -> None:
    settings = load_settings(file=None, environ={"AIOKV_GPU_BLOCKS": "7"}, arguments={"gpu_blocks": None})
    assert settings.gpu_blocks == 7


def test_one_cpu_size_of_a_higher_layer_replaces_the_other_of_a_lower_one(tmp_path: Path) -> None:
    file = write(tmp_path, "cpu_blocks = 100")
    loaded = load_settings_with_sources(file=file, environ={"AIOKV_CPU_BYTES": "1GiB"}, arguments={})
    assert (loaded.settings.cpu_blocks, loaded.settings.cpu_bytes) == (None, GIB)
    assert loaded.sources["cpu_blocks"] is SettingSource.DEFAULT
    assert loaded.sources["cpu_bytes"] is SettingSource.ENVIRONMENT


def test_both_cpu_sizes_in_one_layer_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, 'cpu_blocks = 100\ncpu_bytes = "1GiB"')
    with pytest.raises(ConfigError, match="give one of them"):
        load_settings(file=file, environ={}, arguments={})


@pytest.mark.parametrize(
    ("key", "closest"), [("gpu_block", "gpu_blocks"), ("cpu-bytes", "cpu_bytes"), ("BACKEND", "backend")]
)
def test_an_unknown_key_in_the_file_is_named_with_the_closest_known_one(tmp_path: Path, key: str, closest: str) -> None:
    file = write(tmp_path, f"{key} = 1")
    with pytest.raises(ConfigError, match=rf"unknown setting '{key}' in .*aiokv.toml: did you mean '{closest}'\?$"):
        load_settings(file=file, environ={}, arguments={})


@pytest.mark.parametrize("key", ["port", "foo", "zzz", "gpu", '""'])
def test_an_unknown_key_that_is_like_none_is_named_alone(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting '.*' in .*aiokv.toml$"):
        load_settings(file=write(tmp_path, f"{key} = 1"), environ={}, arguments={})


@pytest.mark.parametrize("name", ["AIOKV_PORT", "AIOKV_", "AIOKV_HOST_NAME"])
def test_an_unknown_variable_is_likened_by_what_follows_the_prefix(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}' in the environment$"):
        load_settings(file=None, environ={name: "9"}, arguments={})


def test_an_unknown_table_in_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown setting 'pool'"):
        load_settings(file=write(tmp_path, "[pool]\ngpu_blocks = 3"), environ={}, arguments={})


def test_an_unknown_variable_is_named_with_the_closest_known_one() -> None:
    with pytest.raises(ConfigError, match="'AIOKV_GPU_BLOKS' in the environment: did you mean 'AIOKV_GPU_BLOCKS'"):
        load_settings(file=None, environ={"AIOKV_GPU_BLOKS": "1"}, arguments={})


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'watermark'"):
        load_settings(file=None, environ={}, arguments={"watermarks": 0.1})


def test_other_variables_and_the_switches_of_the_command_line_are_no_settings() -> None:
    environ = {
        "PATH": "/bin",
        "AIOKV_DEBUG": "1",
        "AIOKV_CACHE_DIR": "/tmp",
        "AIOKV_PEER_PYTHON": "python",
        "aiokv_gpu_blocks": "1",
    }
    assert load_settings(file=None, environ=environ, arguments={}) == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('gpu_blocks = "1024"', "gpu_blocks must be a whole number, not '1024'"),
        ("gpu_blocks = true", "gpu_blocks must be a whole number, not True"),
        ("gpu_blocks = 1.5", "gpu_blocks must be a whole number, not 1.5"),
        ("gpu_blocks = 1", "gpu_blocks must be between 2 and"),
        ("gpu_blocks = 3000000000", "gpu_blocks must be between 2 and"),
        ("cpu_blocks = -1", "cpu_blocks must be between 0 and"),
        ("cpu_bytes = 1.5", "a size is a number of bytes"),
        ("cpu_bytes = -1", "'?-1'? is not a size"),
        ('store_policy = "EAGER"', "store_policy must be one of eager, lazy, selective, not 'EAGER'"),
        ("store_policy = 1", "store_policy must be one of"),
        ('checksum = "crc"', "checksum must be one of off, sampled, full, not 'crc'"),
        ("checksum = true", "checksum must be one of"),
        ("watermark = 1.0", "watermark must be at least 0 and less than 1"),
        ("watermark = nan", "watermark must be at least 0 and less than 1"),
        ('watermark = "0.1"', "watermark must be a number"),
        ("watermark = true", "watermark must be a number"),
        ("lease_age_limit_s = 0", "lease_age_limit_s must be a number of seconds, more than zero"),
        ("lease_age_limit_s = inf", "lease_age_limit_s must be a number of seconds"),
        (f"lease_age_limit_s = 1{'0' * 400}", "lease_age_limit_s must be a number of seconds"),
        ("lease_age_limit_s = nan", "lease_age_limit_s must be a number of seconds"),
        ('lease_age_limit_s = "90"', "lease_age_limit_s must be a number of seconds"),
        ("lease_age_limit_s = true", "lease_age_limit_s must be a number of seconds"),
        ("hint_quota = 1.1", "hint_quota must be at least 0 and at most 1"),
        ('hint_quota = "0.1"', "hint_quota must be a number"),
        ('backend = "gpu"', "backend must be one of auto, cuda, host, not 'gpu'"),
        ("backend = 1", "backend must be one of"),
        ("gpu_blocks = [1]", "gpu_blocks must be a whole number"),
        ("backend = ['host']", "backend must be one of"),
        ("store_policy = {a = 1}", "store_policy must be one of"),
    ],
)
def test_a_wrong_value_in_the_file_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    key = text.partition(" ")[0]
    with pytest.raises(ConfigError, match=f"^{key} in .*aiokv.toml: .*{message}"):
        load_settings(file=file, environ={}, arguments={})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("AIOKV_GPU_BLOCKS", "many"),
        ("AIOKV_GPU_BLOCKS", ""),
        ("AIOKV_GPU_BLOCKS", "9" * 5000),
        ("AIOKV_CPU_BYTES", "8G"),
        ("AIOKV_WATERMARK", "false"),
        ("AIOKV_WATERMARK", "inf"),
        ("AIOKV_BACKEND", ""),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        load_settings(file=None, environ={name: text}, arguments={})


@pytest.mark.parametrize("content", [b"gpu_blocks = ", b"\xff\xfe", b"gpu_blocks = 1\ngpu_blocks = 2", b"= 1"])
def test_a_file_that_is_no_toml_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "aiokv.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"aiokv\.toml is not valid TOML"):
        load_settings(file=file, environ={}, arguments={})


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_an_unreadable_file_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_settings(file=tmp_path / name, environ={}, arguments={})


def test_settings_made_in_code_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        Settings(cpu_blocks=1, cpu_bytes=1)
    with pytest.raises(ConfigError, match="must be a StorePolicy"):
        Settings(store_policy="eager")  # type: ignore[arg-type]  # the wrong type is the point


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().gpu_blocks = 3  # type: ignore[misc]  # the assignment is the point


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * GIB),
        ("8 gib", 8 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("512MB", 512_000_000),
        ("1kB", 1000),
        ("2TiB", 2 * 1024 * GIB),
        ("4096", 4096),
        (" 4096 B ", 4096),
        ("0", 0),
        (4096, 4096),
    ],
)
def test_sizes_are_read(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "8G", "-1", "-8GiB", "1e9", "8GiB x", "0.5", "0.3KiB", "9" * 30, "9000000TiB", "٣", "1_000", True],
)
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


@given(st.integers(0, 2**63 - 1))
def test_any_number_of_bytes_reads_as_itself(size: int) -> None:
    assert parse_bytes(size) == parse_bytes(f"{size}") == parse_bytes(f"{size}B") == size


@given(st.text(max_size=40))
def test_any_text_is_a_size_or_a_clear_error(text: str) -> None:
    try:
        assert 0 <= parse_bytes(text) < 2**63
    except ConfigError as error:
        assert repr(text) in str(error)


@pytest.mark.parametrize(
    ("text", "truth"),
    [("false", False), ("False", False), ("0", False), ("no", False), ("OFF", False), ("true", True), (" 1 ", True)],
)
def test_false_is_false(text: str, truth: bool) -> None:  # noqa: FBT001  # a parameter of the test
    assert parse_bool(text) is truth


@pytest.mark.parametrize("text", ["", "2", "falsch", "none"])
def test_what_is_neither_true_nor_false_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="neither true nor false"):
        parse_bool(text)
