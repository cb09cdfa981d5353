"""The GGUF header parser: what it reads, and that every kind of damage is one clear error."""

from __future__ import annotations

import struct
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.checkpoint.gguf_header import GGUFHeader, read_gguf_header
from edgellm_models.errors import BadInputError, EdgeLLMError, NotFoundError
from tests.support import ggufmut as mut
from tests.support.real_models import real_model


def read(data: bytes) -> GGUFHeader:
    return read_gguf_header(data, len(data), "m.gguf")


def refused(data: bytes, *words: str) -> str:
    """The one line with which ``data`` is refused; it has all ``words``."""
    with pytest.raises(BadInputError) as caught:
        read(data)
    message = str(caught.value)
    assert message.startswith("m.gguf: ") and "\n" not in message
    for word in words:
        assert word in message
    return message


def open_bytes(tmp_path: Path, data: bytes, name: str = "m.gguf"):
    (tmp_path / name).write_bytes(data)
    return open_checkpoint(tmp_path / name)


def test_metadata_and_tensors_are_read_as_written() -> None:
    document = mut.tiny_document()
    for type_id, code in mut.CODES.items():
        document = document.with_entry(f"scalar.{code}", type_id, True if type_id == mut.BOOL else 3)
        document = document.with_entry(f"array.{code}", mut.ARRAY, (type_id, [1, 0, 1]))
    document = document.with_entry("array.empty", mut.ARRAY, (mut.STRING, []))
    nested = [(mut.U32, [1, 2]), (mut.STRING, ["é", ""])]
    document = document.with_entry("array.nested", mut.ARRAY, (mut.ARRAY, nested))
    data, fields = mut.write_with_fields(document)
    header = read(data)
    for entry in document.entries:
        found = header.metadata[entry.key]
        if entry.key == "array.nested":
            assert found == [[1, 2], ["é", ""]]
        elif entry.type_id == mut.ARRAY:
            assert found == list(entry.value[1])
        else:
            assert (
                found == pytest.approx(entry.value, rel=1e-7)
                if isinstance(found, float)
                else found == entry.value
            )
    assert header.metadata["scalar.?"] is True and header.notices == ()
    assert [tensor.name for tensor in header.tensors] == [tensor.name for tensor in document.tensors]
    for tensor, written in zip(header.tensors, document.tensors, strict=True):
        assert tensor.shape == written.ne[::-1]
        assert data[tensor.start : tensor.start + tensor.nbytes] == written.data
    assert fields["version"] == (4, "I")


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(version: int) -> None:
    """C16: a little-endian v2 file still loads."""
    document = mut.tiny_document()
    assert read(mut.overwrite(document, "version", version)).version == version


def test_big_endian_and_other_versions_are_named() -> None:
    """C16, C08: byte order and version are told apart."""
    document = mut.tiny_document()
    refused(mut.write(document, big_endian=True), "big-endian", "version 3")
    refused(mut.overwrite(document, "version", 1), "GGUF version 1", "not supported")
    refused(mut.overwrite(document, "version", 4), "GGUF version 4", "not supported")
    refused(mut.overwrite(document, "version", 0), "version 0")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tensor_count", 1 << 60, ("tensors",)),
        ("tensor_count", 20_000, ("tensors", "20,000")),
        ("kv_count", (1 << 64) - 1, ("metadata keys",)),
        ("kv_count", 19, ("tensor 0",)),
        ("general.name.length", 0, ("empty",)),
        ("general.name.length", 1 << 63, ("length",)),
        ("general.name.type", 13, ("general.name", "type 13")),
        ("general.name.type", mut.ARRAY, ("general.name",)),
        ("general.name.value.length", (1 << 64) - 8, ("general.name", "length")),
        ("general.name.value.length", 1 << 25, ("general.name", "bytes")),
        ("general.tags.count", 1 << 62, ("general.tags", "elements")),
        ("general.tags.count", 3000, ("general.tags",)),
        ("general.tags.element_type", 99, ("general.tags", "99")),
        ("tokenizer.ggml.tokens.count", 33, ("the key of metadata entry 14",)),
        ("tokenizer.ggml.scores.count", 1 << 40, ("tokenizer.ggml.scores", "elements")),
        ("general.alignment.value", 0, ("general.alignment", "power of two")),
        ("general.alignment.value", 3, ("general.alignment", "3")),
        ("token_embd.weight.num_dims", 0, ("token_embd.weight", "0 dimensions")),
        ("token_embd.weight.num_dims", 5, ("token_embd.weight", "5 dimensions")),
        ("token_embd.weight.ne0", 0, ("token_embd.weight", "dimension of 0")),
        ("token_embd.weight.ne1", 0, ("token_embd.weight", "dimension of 0")),
        ("token_embd.weight.ne1", 1 << 62, ("token_embd.weight", "impossible")),
        ("token_embd.weight.ne1", (1 << 64) - 1, ("token_embd.weight", "impossible")),
        ("token_embd.weight.offset", 8, ("token_embd.weight", "alignment")),
        ("token_embd.weight.offset", 1 << 62, ("truncated", "token_embd.weight")),
        ("output_norm.weight.offset", 0, ("overlap", "output_norm.weight")),
        ("output_norm.weight.length", 4000, ("name of tensor 1",)),
    ],
)
def test_damaged_fields_are_refused_by_name(field: str, value: int, words: tuple[str, ...]) -> None:
    """C03, C04, C05: counts, lengths, dimensions, offsets and alignment are checked against the file."""
    refused(mut.overwrite(mut.tiny_document(), field, value), *words)


def test_duplicate_keys_and_tensor_names_are_refused() -> None:
    """C03: a key or a tensor may occur once."""
    document = mut.tiny_document()
    twice = mut.Document((*document.entries, document.entries[0]), document.tensors)
    refused(mut.write(twice), "general.architecture", "twice")
    twice = mut.Document(document.entries, (*document.tensors, document.tensors[0]))
    refused(mut.write(twice), "token_embd.weight", "twice")
    refused(mut.write(document.with_entry("", mut.U32, 1)), "empty")
    refused(mut.write(document.with_tensor(mut.Tensor("", (32,), 0, bytes(128)))), "empty")


def test_arrays_nested_without_end_are_refused() -> None:
    value: tuple[int, list[object]] = (mut.U32, [1])
    for _ in range(200):
        value = (mut.ARRAY, [value])
    refused(mut.write(mut.tiny_document().with_entry("x.deep", mut.ARRAY, value)), "x.deep", "nests")


def test_text_that_is_not_utf8() -> None:
    """A tokenizer's text is never guessed; other text is repaired with a notice; names must be UTF-8."""
    document = mut.tiny_document()
    bad = b"caf\xe9".decode("utf-8", "surrogateescape")
    header = read(mut.write(document.with_entry("general.author", mut.STRING, bad)))
    assert header.metadata["general.author"] == "caf\ufffd"
    assert [notice.kind for notice in header.notices] == ["metadata_not_utf8"]
    tokens = (mut.STRING, ["a", bad])
    refused(mut.write(document.with_entry("tokenizer.ggml.tokens", mut.ARRAY, tokens)), "tokens", "UTF-8")
    refused(mut.write(document.with_entry(bad, mut.U32, 1)), "UTF-8")


@pytest.mark.parametrize("type_id", [mut.U8, mut.I8, mut.U16, mut.I16, mut.I32, mut.U64, mut.I64])
def test_integer_widths_count_by_value(type_id: int) -> None:
    """C04: alignment and block_count of any integer width."""
    document = mut.tiny_document()
    document = document.with_entry("general.alignment", type_id, 64)
    document = document.with_entry("llama.block_count", type_id, 2)
    document = mut.Document(document.entries, document.tensors, alignment=64)
    header = read(mut.write(document))
    assert header.tensors[1].start % 64 == 0 and header.metadata["llama.block_count"] == 2


@pytest.mark.parametrize(
    ("key", "type_id", "value", "found"),
    [
        ("general.alignment", mut.STRING, "32", "the string '32'"),
        ("general.alignment", mut.F32, 32.0, "the number 32.0"),
        ("general.alignment", mut.I32, -32, "-32"),
        ("llama.block_count", mut.STRING, "two", "the string 'two'"),
        ("llama.block_count", mut.BOOL, True, "the boolean true"),
        ("llama.block_count", mut.ARRAY, (mut.U32, [2, 2]), "an array of 2 values"),
        ("llama.block_count", mut.U32, 0, "0"),
        ("general.architecture", mut.U32, 7, "the integer 7"),
    ],
)
def test_impossible_types_name_key_and_found_type(
    tmp_path: Path, key: str, type_id: int, value: object, found: str
) -> None:
    """C04: metadata of an impossible type is never reinterpreted."""
    with pytest.raises(BadInputError) as caught:
        open_bytes(tmp_path, mut.write(mut.tiny_document().with_entry(key, type_id, value)))
    assert key in str(caught.value) and found in str(caught.value)


@pytest.mark.parametrize("type_id", [39 + 60, 200, 4, 5, 31, 33, 36, 0xFFFFFFFF])
def test_unknown_tensor_types_are_named_with_the_supported_ones(type_id: int) -> None:
    """C17: never sized as if it were F32."""
    data = mut.overwrite(mut.tiny_document(), "blk.0.ffn_up.weight.type", type_id)
    message = refused(data, "'blk.0.ffn_up.weight'", f"type id {type_id}", "supported: F32, F16, Q4_0")
    assert ("removed" in message) == (type_id in (4, 5, 31, 33, 36))


@pytest.mark.parametrize("type_id", [28, 9, 15, 41, 24, 26])
def test_known_types_that_are_not_read_are_refused_for_weights(tmp_path: Path, type_id: int) -> None:
    """C17: F64, Q8_1, Q8_K, Q1_0 and integers have a size but no meaning as a weight."""
    document = mut.tiny_document(hidden=256, ffn=256)
    old = next(tensor for tensor in document.tensors if tensor.name == "blk.1.ffn_up.weight")
    changed = document.with_tensor(mut.Tensor(old.name, old.ne, type_id, bytes(8 * 256 * 256)))
    with pytest.raises(
        BadInputError, match=r"'blk\.1\.ffn_up\.weight'.*not read as a weight; supported: F32"
    ):
        open_bytes(tmp_path, mut.write(changed))


def test_rows_that_are_no_whole_number_of_blocks_are_refused() -> None:
    """C17: Q4_K with 64 weights a row."""
    data = mut.overwrite(mut.tiny_document(), "blk.0.ffn_up.weight.type", 12)
    refused(data, "'blk.0.ffn_up.weight'", "64", "Q4_K", "256")


@pytest.mark.parametrize("cut", [1, 1000, 30_000])
def test_truncated_files_state_declared_and_real_size(cut: int) -> None:
    data = mut.write(mut.tiny_document())
    message = refused(data[:-cut], "truncated", f"it has {len(data) - cut:,}")
    assert f"declares {len(data):,} bytes" in message


def test_trailing_bytes_are_a_notice() -> None:
    header = read(mut.write(mut.tiny_document()) + b"x" * 100)
    assert [(notice.kind, "100 bytes" in notice.detail) for notice in header.notices] == [
        ("trailing_bytes", True)
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
        (b"\xef\xbb\xbf \n<HTML>", "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git-LFS pointer"),
        (b"PK\x03\x04" + b"\0" * 26 + b"archive/data.pkl", "PyTorch pickle"),
        (b"PK\x03\x04" + b"\0" * 60, "zip archive"),
        (b"\x80\x02}q\x00.", "pickle"),
        (struct.pack("<Q", 20) + b'{"a":{}}' + b" " * 12, "safetensors"),
        (b"tjgg" + b"\0" * 60, "before GGUF"),
        (b"\x1f\x8b\x08" + b"\0" * 60, "gzip"),
        (b"\0" * 5000, "zeros"),
        (b'{"error": "not found"}', "JSON"),
        (b"hello there", "text file"),
        (b"\x01\xfe\x02\xfd" * 4, "01 fe 02 fd"),
        (b"GGUF", "truncated"),
        (b"GGUF\x03\0\0\0", "truncated"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    """C08: the message says what the file looks like, whatever its name."""
    with pytest.raises(BadInputError) as caught:
        open_bytes(tmp_path, content)
    assert words in str(caught.value) and str(tmp_path) in str(caught.value)


def test_missing_files_folders_and_pipes(tmp_path: Path) -> None:
    """C08: a folder without a model; 66 for what is not there; a pipe is never opened, which would wait for
    ever."""
    with pytest.raises(NotFoundError, match=r"no\.gguf"):
        open_checkpoint(tmp_path / "no.gguf")
    with pytest.raises(NotFoundError):
        open_checkpoint(Path("nul\0name"))
    with pytest.raises(BadInputError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "inside.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadInputError, match=r"inside\.gguf"):
        open_checkpoint(tmp_path)
    if sys.platform != "win32":
        import os

        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(BadInputError, match="not a regular file"):
            open_checkpoint(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (mut.tiny_document().with_entry("general.architecture", mut.STRING, "mamba9"), "'mamba9'"),
        (mut.tiny_document().with_entry("general.architecture", mut.STRING, ""), "''"),
        (mut.tiny_document().without("general.architecture"), "general.architecture is missing"),
        (mut.tiny_document().with_entry("llama.expert_count", mut.U32, 8), "mixture of experts"),
    ],
)
def test_unknown_architectures_list_the_supported_ones(
    tmp_path: Path, document: mut.Document, words: str
) -> None:
    """C15: refused by name, never loaded as something else."""
    with pytest.raises(BadInputError) as caught:
        open_bytes(tmp_path, mut.write(document))
    assert words in str(caught.value)
    for family in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"):
        assert family in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("general.architecture", "clip"), ("general.type", "mmproj")])
def test_vision_files_are_named(tmp_path: Path, key: str, value: str) -> None:
    """C15: a projector file is no language model."""
    with pytest.raises(BadInputError, match="vision"):
        open_bytes(tmp_path, mut.write(mut.tiny_document().with_entry(key, mut.STRING, value)))


@pytest.mark.parametrize("layers", [3, 10**6, 2**31])
def test_block_count_beyond_the_tensors_names_the_first_missing_one(tmp_path: Path, layers: int) -> None:
    """C05: quickly, however large the number is."""
    data = mut.overwrite(mut.tiny_document(), "llama.block_count.value", layers)
    start = time.process_time()
    with pytest.raises(BadInputError, match=r"'blk\.2\.attn_norm\.weight' is missing"):
        open_bytes(tmp_path, data)
    assert time.process_time() - start < 2, "a loop over the number, not over the tensors"


def test_unknown_extra_tensors_are_a_notice(tmp_path: Path) -> None:
    """C05: tensors beyond the model do not stop it; integer tables are skipped without a word."""
    document = mut.tiny_document(layers=3).with_entry("llama.block_count", mut.U32, 3)
    document = document.with_tensor(mut.random_tensor("strange.weight", (64, 2), "F32"))
    document = document.with_tensor(mut.random_tensor("blk.0.attn_rot_embd.weight", (64,), "F64"))
    document = document.with_tensor(mut.random_tensor("some.table", (64,), "I32"))
    opened = open_bytes(tmp_path, mut.write(document))
    assert [notice.kind for notice in opened.notices] == ["unknown_tensors"]
    assert "2 tensors" in opened.notices[0].detail and "strange.weight" in opened.notices[0].detail
    assert opened.has("strange.weight") and not opened.has("nothing")


def write_shards(folder: Path, shards: list[bytes], stem: str = "m") -> list[Path]:
    paths = [folder / mut.shard_name(stem, i + 1, len(shards)) for i in range(len(shards))]
    for path, data in zip(paths, shards, strict=True):
        path.write_bytes(data)
    return paths


@pytest.mark.parametrize("opened_shard", [0, 1, 2])
def test_any_shard_opens_the_whole_model(tmp_path: Path, opened_shard: int) -> None:
    document = mut.tiny_document()
    paths = write_shards(tmp_path, mut.split(document, 3))
    opened = open_checkpoint(paths[opened_shard])
    assert set(opened.tensors()) == {tensor.name for tensor in document.tensors}
    assert opened.metadata["general.name"] == "tiny"
    assert opened.file_bytes == sum(path.stat().st_size for path in paths)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """C10: exit 66 with the name of what is missing."""
    paths = write_shards(tmp_path, mut.split(mut.tiny_document(), 3))
    paths[1].unlink()
    for path in (paths[0], paths[2]):
        with pytest.raises(NotFoundError, match=r"m-00002-of-00003\.gguf"):
            open_checkpoint(path)


def test_glued_shards_are_recognised(tmp_path: Path) -> None:
    """C10: `cat` of split files, also where the first holds metadata only."""
    shards = mut.split(mut.tiny_document(), 3)
    with pytest.raises(BadInputError, match="concatenation of split files"):
        open_bytes(tmp_path, b"".join(shards))
    document = mut.tiny_document()
    only_metadata = mut.write(mut.Document(document.entries, ()))
    with pytest.raises(BadInputError, match="concatenation of split files"):
        open_bytes(tmp_path, only_metadata + shards[1])


def test_shards_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """C10: another model's shard, another count, a doubled or renamed shard."""
    own = mut.split(mut.tiny_document(), 3)
    other = mut.split(mut.tiny_document(layers=3).with_entry("llama.block_count", mut.U32, 3), 3)
    paths = write_shards(tmp_path, own)
    for wrong, words in (
        (other[1], "tensors"),
        (own[0], "number 1 of 3"),
        (mut.split(mut.tiny_document(), 4)[1], "of 4"),
    ):
        paths[1].write_bytes(wrong)
        with pytest.raises(BadInputError, match="do not belong to one model") as caught:
            open_checkpoint(paths[0])
        assert words in str(caught.value)
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(own[2])
    with pytest.raises(BadInputError, match=r"-00003-of-00003\.gguf"):
        open_checkpoint(renamed)


def test_shards_of_another_model_with_equal_counts_are_refused(tmp_path: Path) -> None:
    """C10: same number of tensors, but each shard states its model."""
    document = mut.tiny_document()
    named = [
        mut.write(
            mut.Document(
                (
                    *(document.entries if number == 0 else (mut.Entry("general.name", mut.STRING, "else"),)),
                    mut.Entry("split.no", mut.U16, number),
                    mut.Entry("split.count", mut.U16, 2),
                    mut.Entry("split.tensors.count", mut.I32, len(document.tensors)),
                ),
                document.tensors[number::2],
            )
        )
        for number in range(2)
    ]
    with pytest.raises(BadInputError, match=r"general\.name is 'else' here and 'tiny'"):
        open_checkpoint(write_shards(tmp_path, named)[0])


def test_metadata_arrays_are_bounded_in_memory() -> None:
    """A file cannot make the reader allocate a multiple of what it claims: the claim is checked first."""
    document = mut.tiny_document()
    tracemalloc.start()
    try:
        for field in (
            "tokenizer.ggml.tokens.count",
            "tokenizer.ggml.scores.count",
            "general.name.value.length",
        ):
            refused(mut.overwrite(document, field, 1 << 50))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


_GOOD, _FIELDS = mut.write_with_fields(mut.tiny_document(layers=1, hidden=32, ffn=32, vocab=8))
_HEADER_BYTES = max(offset for offset, _ in _FIELDS.values()) + 8


@settings(max_examples=400, deadline=20_000)
@given(
    flips=st.lists(st.tuples(st.integers(0, _HEADER_BYTES - 1), st.integers(0, 255)), min_size=0, max_size=8),
    cut=st.one_of(st.none(), st.integers(0, len(_GOOD))),
)
def test_random_damage_gives_an_error_or_a_valid_header(
    flips: list[tuple[int, int]], cut: int | None
) -> None:
    """Byte flips and truncations never give anything but a clean error or tensors that lie within the
    file."""
    data = bytearray(_GOOD)
    for position, value in flips:
        data[position] = value
    raw = bytes(data[:cut])
    try:
        header = read(raw)
    except EdgeLLMError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        return
    for tensor in header.tensors:
        assert 0 < tensor.start <= tensor.start + tensor.nbytes <= len(raw)


@settings(max_examples=200, deadline=20_000)
@given(
    name=st.sampled_from(sorted(name for name, (_, code) in _FIELDS.items() if code in ("I", "Q"))),
    value=st.one_of(st.integers(0, 64), st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)),
)
def test_every_header_number_may_hold_anything(name: str, value: int) -> None:
    """The same aimed at the fields that steer sizes: every count, length, dimension, offset and type."""
    offset, code = _FIELDS[name]
    data = bytearray(_GOOD)
    struct.pack_into("<" + code, data, offset, value & ((1 << (8 * struct.calcsize(code))) - 1))
    try:
        header = read(bytes(data))
    except EdgeLLMError:
        return
    assert all(tensor.start + tensor.nbytes <= len(data) for tensor in header.tensors)


@pytest.mark.real_model
def test_a_vocabulary_of_260000_is_read_quickly() -> None:
    """Tokens, scores and types of Gemma 3 well under a second, without torch being needed."""
    path = real_model("gemma3-270m")
    best = 10.0
    for _ in range(3):
        start = time.process_time()
        opened = open_checkpoint(path)
        best = min(best, time.process_time() - start)
    assert len(opened.metadata["tokenizer.ggml.tokens"]) == 262_144
    assert len(opened.metadata["tokenizer.ggml.scores"]) == 262_144
    assert best < 1.0


@settings(max_examples=150, deadline=20_000)
@given(
    key=st.sampled_from([entry.key for entry in mut.tiny_document().entries]),
    value=st.one_of(
        st.tuples(st.just(mut.STRING), st.text(max_size=8)),
        st.tuples(st.just(mut.I64), st.integers(-(1 << 63), (1 << 63) - 1)),
        st.tuples(st.just(mut.F64), st.floats()),
        st.tuples(st.just(mut.BOOL), st.booleans()),
        st.tuples(st.just(mut.ARRAY), st.tuples(st.just(mut.I32), st.lists(st.integers(-5, 5), max_size=3))),
    ),
)
def test_any_value_of_any_key_gives_an_error_or_a_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: tuple[int, object]
) -> None:
    """C04: the whole way from the file to an opened checkpoint."""
    document = mut.tiny_document(layers=1, hidden=32, ffn=32, vocab=8).with_entry(key, *value)
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    path.write_bytes(mut.write(document))
    try:
        opened = open_checkpoint(path)
    except EdgeLLMError as error:
        assert "\n" not in str(error)
        return
    assert opened.architecture == "llama" and opened.has("blk.0.attn_q.weight")


def test_names_from_a_file_cannot_send_terminal_codes(tmp_path: Path) -> None:
    """Tensor names are the file's own: an escape sequence in one does not reach the terminal."""
    document = mut.tiny_document().with_tensor(mut.random_tensor("\x1b[2Jgone", (32,), "F32"))
    (notice,) = open_bytes(tmp_path, mut.write(document)).notices
    assert "\x1b" not in notice.detail and "gone" in notice.detail
    refused(mut.overwrite(document, "\x1b[2Jgone.type", 99), "gone")
