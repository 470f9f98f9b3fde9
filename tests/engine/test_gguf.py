"""The GGUF reader: what a good file holds, and that a bad one ends in one clear error."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.errors import ConfigError
from aiokv_engine.chat import ChatTemplate
from aiokv_engine.gguf import GgufError, read_gguf
from aiokv_engine.llama_gguf import load_llama
from aiokv_engine.tokenizer import GgufTokenizer
from tests.engine.tiny_model import TinyModel, vocabulary

HEADER = 4 + 4 + 8 + 8  # bytes: magic, version, tensor count, metadata count


def test_metadata_is_what_was_written(tiny: TinyModel) -> None:
    file = read_gguf(tiny.path)
    assert file.require("general.architecture", str) == "llama"
    assert file.require("llama.block_count", int) == 2
    assert file.require("llama.attention.layer_norm_rms_epsilon", float) == pytest.approx(1e-5)
    assert file.get("tokenizer.ggml.add_bos_token", default=True) is False
    assert file.strings("tokenizer.ggml.tokens") == tuple(vocabulary())
    assert file.integers("tokenizer.ggml.token_type")[:4] == [3, 3, 3, 1]


def test_tensors_are_what_was_written(tiny: TinyModel) -> None:
    file = read_gguf(tiny.path)
    assert file.tensors.keys() == tiny.weights.keys()
    plain = [name for name in tiny.weights if "attn_q" not in name and "attn_k" not in name]
    for name in plain:
        assert np.array_equal(file.read_tensor(name), tiny.weights[name])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_every_common_tensor_type_is_dequantised_as_its_package_does(kind: str, tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32), number)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("weight", stored, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = read_gguf(tmp_path / "a.gguf").read_tensor("weight")
    assert values.dtype == np.float32
    assert np.array_equal(values, gguf.quants.dequantize(stored, number))


def test_a_missing_file_a_folder_and_an_empty_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    for path, problem in [("none.gguf", "No such file"), (".", "not a file"), ("empty.gguf", "empty")]:
        with pytest.raises(GgufError, match=problem) as caught:
            read_gguf(tmp_path / path)
        assert str(tmp_path / path) in str(caught.value)


@pytest.mark.parametrize(
    ("at", "content", "problem"),
    [
        (0, b"PK\x03\x04", "does not start with the letters GGUF"),
        (4, struct.pack("<I", 1), "its version is 1"),
        (4, struct.pack(">I", 3), "its version is 50331648"),
        (8, struct.pack("<Q", 2**63), "more than the file can hold"),
        (16, struct.pack("<Q", 2**64 - 1), "more than the file can hold"),
        (HEADER, struct.pack("<Q", 2**62), "at most"),
        (HEADER, struct.pack("<Q", 2**15), "not UTF-8"),
    ],
)
def test_a_hostile_header_is_refused(at: int, content: bytes, problem: str, tiny: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=problem):
        read_gguf(_patched(tiny, tmp_path, at=at, content=content))


def test_a_file_cut_anywhere_is_refused(tiny: TinyModel, tmp_path: Path) -> None:
    content = tiny.path.read_bytes()
    data = min(info.offset for info in read_gguf(tiny.path).tensors.values())
    path = tmp_path / "cut.gguf"
    for size in [*range(0, data, 7), data, len(content) // 2, len(content) - 64]:
        path.write_bytes(content[:size])
        with pytest.raises(GgufError):
            read_gguf(path)


def test_tensor_table_lies_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[Callable[[], bytes], str]] = [
        (lambda: _entry(dims=(4, 2**62)), "cut short"),
        (lambda: _entry(dims=(2**63, 2**63, 2**63, 2**63)), "cut short"),
        (lambda: _entry(dims=(0,)), "impossible shape"),
        (lambda: _entry(dims=(33,), kind=8), "impossible shape"),
        (lambda: _entry(dims=(1,) * 5), "5 dimensions"),
        (lambda: _entry(dims=()), "0 dimensions"),
        (lambda: _entry(kind=4_000_000), "unknown type"),
        (lambda: _entry(offset=1), "not aligned"),
        (lambda: _entry(offset=2**63), "cut short"),
        (lambda: _entry() + _entry(name=b"b"), "overlaps"),
        (lambda: _entry() + _entry(offset=32), "occurs twice"),
        (lambda: _entry(name=b"\xff"), "not UTF-8"),
        (lambda: _entry(name=b"x" * 65), "at most 64"),
    ]
    for build, problem in cases:
        entries = build()
        count = 2 if problem in ("overlaps", "occurs twice") else 1
        path = tmp_path / "lie.gguf"
        path.write_bytes(struct.pack("<IIQQ", 0x46554747, 3, count, 0) + entries + bytes(200))
        with pytest.raises(GgufError, match=problem):
            read_gguf(path)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (struct.pack("<I", 99), "unknown value type 99"),
        (struct.pack("<IB", 7, 2), "neither 0 nor 1"),
        (struct.pack("<IIQ", 9, 9, 1), "array of arrays"),
        (struct.pack("<IIQ", 9, 10, 2**61), "more than the file can hold"),
        (struct.pack("<IIQ", 9, 8, 2**40), "more than the file can hold"),
        (struct.pack("<IQ", 8, 2**63), "at most"),
        (struct.pack("<II", 4, 48), "power of two"),
        (struct.pack("<II", 4, 0), "power of two"),
        (struct.pack("<IQ", 8, 2) + b"32", "power of two"),
    ],
)
def test_metadata_lies_are_refused(value: bytes, problem: str, tmp_path: Path) -> None:
    key = b"general.alignment"
    path = tmp_path / "lie.gguf"
    path.write_bytes(struct.pack("<IIQQ", 0x46554747, 3, 0, 1) + struct.pack("<Q", len(key)) + key + value + bytes(64))
    with pytest.raises(GgufError, match=problem):
        read_gguf(path)


def test_a_metadata_key_that_is_missing_or_of_another_type_is_named(tiny: TinyModel) -> None:
    file = read_gguf(tiny.path)
    with pytest.raises(GgufError, match=r"'llama\.nothing' is missing"):
        file.require("llama.nothing", int)
    with pytest.raises(GgufError, match=r"'general\.architecture' must be a int, not a str"):
        file.require("general.architecture", int)
    with pytest.raises(GgufError, match="array of strings"):
        file.strings("llama.block_count")
    with pytest.raises(GgufError, match="array of integers"):
        file.integers("tokenizer.ggml.tokens")


def test_a_weight_that_is_not_finite_is_refused(tiny: TinyModel, tmp_path: Path) -> None:
    at = read_gguf(tiny.path).tensors["output.weight"].offset
    path = _patched(tiny, tmp_path, at=at, content=struct.pack("<f", float("nan")))
    with pytest.raises(GgufError, match=r"'output\.weight' holds values that are not finite"):
        load_llama(read_gguf(path))


@given(data=st.data())
def test_a_damaged_file_loads_or_is_refused(data: st.DataObject, tiny: TinyModel, scratch: Path) -> None:
    content = bytearray(tiny.path.read_bytes())
    metadata = min(info.offset for info in read_gguf(tiny.path).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, metadata - 1), st.integers(0, len(content) - 1)))
        content[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    _load_or_refuse(scratch, content=bytes(content))


@given(content=st.binary(max_size=400), header=st.sampled_from([b"", struct.pack("<IIQQ", 0x46554747, 3, 1, 2)]))
def test_random_bytes_are_refused(content: bytes, header: bytes, scratch: Path) -> None:
    with pytest.raises(GgufError):
        load_llama(read_gguf(_written(scratch, content=header + content)))


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "damaged.gguf"


def _load_or_refuse(path: Path, *, content: bytes) -> None:
    try:
        file = read_gguf(_written(path, content=content))
        ChatTemplate(file)
        tokenizer = GgufTokenizer(file)
        tokenizer.decode(tokenizer.encode("the 12 cats"))
        load_llama(file)
    except ConfigError as error:
        assert str(path) in str(error)


def _written(path: Path, *, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _patched(tiny: TinyModel, folder: Path, *, at: int, content: bytes) -> Path:
    """Returns a copy of the tiny model with `content` written over what was at byte `at`."""
    whole = bytearray(tiny.path.read_bytes())
    whole[at : at + len(content)] = content
    return _written(folder / "patched.gguf", content=bytes(whole))


def _entry(*, name: bytes = b"a", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    """Returns one entry of a tensor table: by default eight float32 at the start of the data section."""
    shape = struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", dim) for dim in dims)
    return struct.pack("<Q", len(name)) + name + shape + struct.pack("<IQ", kind, offset)
