"""Models of a hub on loopback, through the real client."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from foreword.errors import CheckpointError
from foreword.weights import hub_download
from foreword.weights.hub import find_local, resolve_path
from tests.support.fake_hub import FakeHub, fake_hub

KB = 1000
SAFETENSORS = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "model-00001-of-00002.safetensors": b"a" * KB,
    "model-00002-of-00002.safetensors": b"b" * KB,
    "model.safetensors.index.json": b"{}",
    "consolidated.safetensors": b"c" * KB,
    "pytorch_model.bin": b"d" * KB,
    "original/consolidated.00.pth": b"e",
    "original/params.json": b"{}",
    "onnx/model.json": b"{}",
    "README.md": b"#",
    "1_Pooling/config.json": b"{}",
    "2_Dense/model.safetensors": b"f",
}
QUANTS = {
    "Model-BF16-00001-of-00002.gguf": b"1" * KB,
    "Model-BF16-00002-of-00002.gguf": b"2" * KB,
    "Model-Q4_K_M.gguf": b"GGUF" * KB,
    "Model-Q4_K_S.gguf": b"4s" * KB,
    "Model-UD-Q4_K_XL.gguf": b"xl" * KB,
    "Model-UD-Q4_K_M.gguf": b"ud" * KB,
    "Model-Q8_0.gguf": b"q8" * KB,
    "mmproj-Model-F16.gguf": b"m",
    "imatrix_unsloth.gguf": b"i",
    "config.json": b"{}",
}
REPOSITORIES = {
    "some/checkpoint": SAFETENSORS,
    "some/quants": QUANTS,
    "some/single": {"only-iq3_xxs.gguf": b"q" * KB, "mmproj-F16.gguf": b"m"},
    "some/folders": {
        **{f"Q2_K/big-Q2_K-0000{n}-of-00002.gguf": b"2" for n in (1, 2)},
        "Q3_K/big-Q3_K-00001-of-00002.gguf": b"3",
    },
    "some/pooling": {"config.json": b"{}", "2_Dense/model.safetensors": b"f"},
    "some/pickle": {"config.json": b"{}", "pytorch_model.bin": b"d"},
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.chdir(tmp_path)
    with fake_hub(REPOSITORIES, tmp_path / "cache", monkeypatch) as hub:
        yield hub


def test_checkpoint_is_fetched_without_copies_of_its_weights(hub: FakeHub) -> None:
    folder = resolve_path("some/checkpoint")
    fetched = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert fetched == {
        *("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        *("1_Pooling/config.json", "2_Dense/model.safetensors"),
    }
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() == b"a" * KB


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("some/quants:Q4_K_M", ["Model-Q4_K_M.gguf"]),
        ("hf.co/some/quants:q4_k_m", ["Model-Q4_K_M.gguf"]),
        ("some/quants:ud-q4_k_m", ["Model-UD-Q4_K_M.gguf"]),
        ("some/quants:Q4_K_XL", ["Model-UD-Q4_K_XL.gguf"]),
        ("some/quants:model-q8_0.GGUF", ["Model-Q8_0.gguf"]),
        ("some/quants/Model-Q8_0.gguf", ["Model-Q8_0.gguf"]),
        ("some/quants:bf16", ["Model-BF16-00001-of-00002.gguf", "Model-BF16-00002-of-00002.gguf"]),
        (
            "some/quants/Model-BF16-00002-of-00002.gguf",
            ["Model-BF16-00001-of-00002.gguf", "Model-BF16-00002-of-00002.gguf"],
        ),
        ("some/quants", ["Model-Q4_K_M.gguf"]),
        ("some/single", ["only-iq3_xxs.gguf"]),
        ("some/folders:q2_k", ["Q2_K/big-Q2_K-00001-of-00002.gguf", "Q2_K/big-Q2_K-00002-of-00002.gguf"]),
        ("some/folders/Q2_K/big-Q2_K.gguf", [f"Q2_K/big-Q2_K-0000{n}-of-00002.gguf" for n in (1, 2)]),
    ],
)
def test_one_gguf_file_is_fetched_alone(name: str, files: list[str], hub: FakeHub) -> None:
    assert find_local(name) is None
    path = resolve_path(name)
    assert path.as_posix().endswith(files[0]) and path.read_bytes()
    assert sorted(hub.fetched) == files
    resolve_path(name)
    assert sorted(hub.fetched) == files, "the second time it is in the cache"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (
            "some/quants:Q4_K_L",
            r"some/quants has no GGUF file called Q4_K_L; it has Q4_K_[SM] \(.* KiB\), Q4_K_[SM] \(.*BF16",
        ),
        ("some/quants:K_M", r"has 2 GGUF files called K_M; it has Q4_K_M \(.*\), UD-Q4_K_M \([0-9.]+ KiB\)$"),
        ("some/quants:F16", "no GGUF file called F16"),  # of the vision encoder alone
        ("some/quants/other.gguf", r"no GGUF file called other\.gguf; it has "),
        ("some/checkpoint:Q4_K_M", "no GGUF file called Q4_K_M; it has none at all"),
        ("some/folders", r"has several GGUF files: append one of Q2_K \(2 B\), Q3_K \(1 B\), such as some/f"),
        ("some/folders:Q3_K", r"Q3_K/big-Q3_K\.gguf has 1 of 2 parts"),
        ("some/pickle", r"has neither safetensors nor GGUF files; it has config\.json .*pytorch_model\.bin"),
        ("no/such", "no/such is neither a path here nor available from the hub"),
        ("no/such:Q4_0", r"hf download no/such FILE --local-dir DIR` and use the file"),
    ],
)
def test_file_that_is_not_there_is_answered_by_those_that_are(name: str, answer: str, hub: FakeHub) -> None:
    with pytest.raises(CheckpointError, match=answer) as caught:
        resolve_path(name)
    assert "\n" not in str(caught.value) and not hub.fetched


def test_interrupted_download_is_continued(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.cut_after = 3 * KB
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", KB)  # the client writes whole chunks

    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk was unplugged")

    with monkeypatch.context() as patch:  # the client itself tries again: its second request fails here
        patch.setattr("time.sleep", fail)
        with pytest.raises(CheckpointError, match=r"unplugged.*continues where this one ended"):
            resolve_path("some/quants:Q4_K_M")
    reports: list[tuple[int, int]] = []
    path = resolve_path("some/quants:Q4_K_M", lambda *report: reports.append(report))
    assert path.read_bytes() == QUANTS["Model-Q4_K_M.gguf"]
    assert [begin for _, _, begin in hub.requests if begin] == [f"bytes={3 * KB}-"]
    assert reports[0] == (3 * KB, 4 * KB) and reports[-1] == (4 * KB, 4 * KB)


def test_cache_serves_without_the_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_path("some/quants:Q4_K_M")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    num_requests = len(hub.requests)
    assert resolve_path("some/quants:Q4_K_M") == path and resolve_path("some/quants") == path
    assert len(hub.requests) == num_requests
    with pytest.raises(CheckpointError, match=r"no GGUF file in the hub's cache called Q8_0; it has Q4_K_M"):
        resolve_path("some/quants:Q8_0")
    with pytest.raises(CheckpointError, match="hf download some/single --local-dir DIR"):
        resolve_path("some/single")


def test_full_disk_is_refused_before_the_download(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(4 * KB - 1))
    with pytest.raises(CheckpointError, match=r"needs 3.9 KiB of disk space, .*cache has 3.9 KiB.*HF_HOME"):
        resolve_path("some/quants:Q4_K_M")
    assert not hub.fetched
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(4 * KB))
    resolve_path("some/quants:Q4_K_M")


def test_bytes_are_reported_while_they_come(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the blobs in the cache, whatever way the client fetches them."""
    monkeypatch.setattr(hub_download, "POLL_S", 0.001)
    reports: list[tuple[int, int]] = []
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "other").write_bytes(b"x" * KB)
    (blobs / "new.incomplete").write_bytes(b"y" * KB)
    with hub_download._report_bytes(blobs, 3 * KB, KB, lambda *report: reports.append(report)):
        with (blobs / "new.incomplete").open("ab") as file:
            file.write(b"y" * KB)
        while (2 * KB, 3 * KB) not in reports:
            pass
    assert reports[0] == (KB, 3 * KB) and reports[-1] == (3 * KB, 3 * KB)


@pytest.mark.parametrize("name", ["some/checkpoint", "some/pooling", "some/quants:Q4_K_M"])
def test_etag_names_no_file_elsewhere(name: str, hub: FakeHub, tmp_path: Path) -> None:
    hub.etag = "../../../../elsewhere"
    with pytest.raises(CheckpointError, match=r"ETag '[./]*elsewhere', which is no digest"):
        resolve_path(name)
    assert not [path for path in tmp_path.rglob("*") if "elsewhere" in path.name]
