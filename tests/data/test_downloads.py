"""Downloads: once for all processes, whole or not at all, from a server of our own; `prepare=true`."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from bnn_runner.data.downloads import ensure
from bnn_runner.data.sources import Archive, File, Source, look
from bnn_runner.errors import Interrupted, UserError
from bnn_runner.experiment import load_experiment
from bnn_runner.runner import run
from bnn_runner.runtime.console import Console

# A data set from outside the package, with files and checksums of its own: what a user would write.
FAKESET = """
from dataclasses import dataclass
from bnn_runner.tasks import TaskSpec
from bnn_runner.data.downloads import ensure
from bnn_runner.data.image_sets import read_idx
from bnn_runner.data.images import PixelScaling, image_task
from bnn_runner.data.sources import Archive, File, Source
from bnn_runner.data.splits import Sizes

FILES = {files!r}
SOURCE = Source("tiny", "Tiny/raw", tuple(File(n, length) for n, (length, _) in FILES.items()),
                tuple(Archive((f"http://nowhere.invalid/{{n}}.gz",), md5) for n, (_, md5) in FILES.items()))
OTHER = Source("other", "", (File("other.npz"),), by_hand="It has to be drawn by hand.")

@dataclass(frozen=True, kw_only=True)
class Tiny:
    val_fraction: float
    train_size: int | None
    test_size: int | None
    def spec(self):
        return TaskSpec("tiny", "classification", (1, 4, 4), 2, self.val_fraction)
    def sources(self):
        return (SOURCE,)
    def partner_sources(self):
        return {{"other": OTHER}}
    def load(self, data_dir, seed):
        place = ensure(SOURCE, data_dir)
        halves = (read_idx(place, "train"), read_idx(place, "test"))
        def absent():
            raise FileNotFoundError("other.npz is not there")
        sizes = Sizes(self.val_fraction, self.train_size, self.test_size)
        return image_task(self.spec(), halves, sizes, seed, PixelScaling((0.5,), (0.5,)), {{"other": absent}})
"""
CONF = """# Tiny pictures
_target_: fakeset.Tiny
val_fraction: 0.1
train_size: null
test_size: null
recommended: {model: mlp, schedule: adam, prior: isotropic, hyper: fixed, values: {schedule.epochs: 20}}
"""


@dataclass
class Server:
    """Files by path; counts requests; paths in `broken` are answered as given there."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    slow: float = 0.0


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            body, how = state.files.get(self.path), state.broken.get(self.path, "")
            if body is None or how == "forbidden":
                self.send_error(403 if how else 404)
                return
            time.sleep(state.slow)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if how else body)
            self.wfile.flush()
            if how == "stalls":
                time.sleep(60)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        http.block_on_close = False
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        state.url = f"http://127.0.0.1:{http.server_port}"
        monkeypatch.setenv("BNN_DATA_URL", state.url)
        yield state
        http.shutdown()
        thread.join()


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def tiny_files() -> dict[str, bytes]:
    """IDX files of 60 and 20 pictures of 4 x 4 pixels, bright for class 1 and dark for class 0."""
    files = {}
    for part, count in (("train", 60), ("t10k", 20)):
        classes = np.arange(count) % 2
        pixels = np.random.default_rng(0).integers(0, 100, (count, 4, 4)) + 120 * classes[:, None, None]
        header = struct.pack(">4I", 2051, count, 4, 4)
        files[f"{part}-images-idx3-ubyte"] = header + pixels.astype(np.uint8).tobytes()
        files[f"{part}-labels-idx1-ubyte"] = struct.pack(">2I", 2049, count) + classes.astype(np.uint8).tobytes()
    return files


def publish(server: Server, folder: Path) -> tuple[Path, dict[str, bytes]]:
    """The set on the server, and a folder of choices from outside that has it as data=tiny."""
    files = tiny_files()
    packed = {name: gzip.compress(data, mtime=0) for name, data in files.items()}
    server.files = {f"/tiny/{name}.gz": data for name, data in packed.items()}
    facts = {name: (len(files[name]), md5(packed[name])) for name in files}
    (folder / "conf" / "data").mkdir(parents=True)
    (folder / "conf" / "data" / "tiny.yaml").write_text(CONF)
    (folder / "fakeset.py").write_text(FAKESET.format(files=facts))
    return folder / "conf", files


# ---------------------------------------------------------------------- several at once, one dead


@pytest.mark.exhaustive
def test_four_processes_at_once_download_and_train_once(server: Server, tmp_path: Path) -> None:
    """Planted bugs: no lease on the download (each file requested by every process); a file seen half written."""
    conf, files = publish(server, tmp_path)
    server.slow = 0.4
    data = tmp_path / "not" / "there" / "yet"
    words = [f"data_dir={data}", f"output_dir={tmp_path / 'out'}", "data=tiny", "allow=[fakeset]", "figures=false"]
    words += ["metric=[accuracy]", "eval.num_draws=4", "threads=1", "time_limit=null"]
    command = [sys.executable, "-m", "bnn_runner.cli.main", "--config-dir", str(conf), *words]
    methods = ("map", "laplace_diag", "laplace_last_layer", "laplace_kfac")
    running = [
        subprocess.Popen([*command, f"method={m}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for m in methods
    ]
    printed = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(methods), "\n".join(printed)
    assert sorted(server.asked) == sorted(server.files)
    assert {path.name: path.read_bytes() for path in (data / "Tiny" / "raw").iterdir()} == files
    assert [path.name for path in data.iterdir()] == ["Tiny"]  # no lease, nothing unfinished
    cells = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("provenance.json")]
    assert len(cells) == len(methods) and len({key for cell in cells for key in cell["training_keys"]}) == 1
    spared = ["nothing to train" in text or "is training the same network" in text for text in printed]
    assert sum(spared) == len(methods) - 1, "\n".join(printed)
    assert len(list((tmp_path / "out" / "cache" / "networks").glob("*.safetensors"))) == 1


def test_a_dead_owner_is_taken_over(server: Server, tmp_path: Path) -> None:
    """Planted bugs: a lease that outlives its owner; what the dead one left taken for whole, or left for ever."""
    body = b"numbers " * 1000
    server.files, server.broken = {"/text/text.txt": body}, {"/text/text.txt": "stalls"}
    script = (
        "import sys; from pathlib import Path\n"
        "from bnn_runner.data.downloads import ensure\n"
        "from bnn_runner.data.sources import Archive, File, Source\n"
        f"archive = Archive(('http://nowhere.invalid/text.txt',), {md5(body)!r})\n"
        "ensure(Source('text', 'texts', (File('text.txt'),), (archive,)), Path(sys.argv[1]))\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".text-unfinished-*/text.txt")):
        assert owner.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert list(tmp_path.glob(".text.lease"))
    server.broken = {}
    place = ensure(text_source(body), tmp_path)
    assert (place / "text.txt").read_bytes() == body
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


# ------------------------------------------------------------------------------ whole or nothing


def text_source(body: bytes, *more: str) -> Source:
    archive = Archive(("http://nowhere.invalid/text.txt", *more), md5(body))
    return Source("text", "texts", (File("text.txt", len(body), hashlib.sha256(body).hexdigest()),), (archive,))


@pytest.mark.parametrize(
    ("how", "said"), [("forbidden", "403"), ("cut", "MD5 sum"), ("another", "MD5 sum"), ("absent", "404")]
)
def test_a_failed_download_leaves_nothing_and_says_why(server: Server, tmp_path: Path, how: str, said: str) -> None:
    """Planted bugs: a sum that is not compared; a partial file left in place; a message without file and folder."""
    body = b"numbers " * 1000
    served = {"another": b"<html>log in first</html>"}.get(how, body)
    server.files = {} if how == "absent" else {"/text/text.txt": served}
    server.broken = {"/text/text.txt": how} if how in ("forbidden", "cut") else {}
    with pytest.raises(UserError) as caught:
        ensure(text_source(body), tmp_path)
    text = str(caught.value)
    assert said in text and f"{server.url}/text/text.txt" in text and str(tmp_path / "texts") in text
    assert all(word in text for word in ("missing text.txt", "BNN_DATA_URL", "data_dir=", "BNN_DATA_DIR"))
    assert list(tmp_path.iterdir()) == []


def test_the_next_address_is_tried(server: Server, tmp_path: Path, monkeypatch) -> None:
    body = b"numbers"
    server.files = {"/mirror/text.txt": body}
    monkeypatch.delenv("BNN_DATA_URL")
    source = Source(
        "text",
        "texts",
        (File("text.txt"),),
        (Archive((f"{server.url}/gone/text.txt", f"{server.url}/mirror/text.txt"), md5(body)),),
    )
    assert (ensure(source, tmp_path) / "text.txt").read_bytes() == body
    assert server.asked == ["/gone/text.txt", "/mirror/text.txt"]


def test_an_archive_gives_what_is_missing_and_what_is_there_is_kept(server: Server, tmp_path: Path) -> None:
    """Planted bugs: a user's file overwritten; members of an archive put outside the data folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in (("set/a.txt", b"theirs a"), ("set/b.txt", b"theirs b"), ("set/more.txt", b"more")):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    server.files = {"/set/set.tar.gz": buffer.getvalue()}
    archive = Archive(("http://nowhere.invalid/set.tar.gz",), md5(buffer.getvalue()))
    source = Source("set", "set", (File("a.txt"), File("b.txt")), (archive,))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.txt").write_bytes(b"mine")
    place = ensure(source, tmp_path)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == {"a.txt": b"mine", "b.txt": b"theirs b"}
    lacking = Source("lacking", "lacking", (File("c.txt"),), (archive,))
    server.files["/lacking/set.tar.gz"] = buffer.getvalue()
    with pytest.raises(UserError, match=r"c\.txt is not in the downloaded archives"):
        ensure(lacking, tmp_path)


def test_damage_and_absence_are_distinguished_and_nothing_is_deleted(server: Server, tmp_path: Path) -> None:
    """Planted bug: a damaged file downloaded again over what may be the user's only copy."""
    body = b"numbers " * 1000
    server.files = {"/text/text.txt": body}
    path = tmp_path / "texts" / "text.txt"
    path.parent.mkdir()
    for content, said in ((body[:99], "must have 8,000 bytes; got 99"), (b"N" + body[1:], "SHA-256 sum")):
        path.write_bytes(content)
        found = look(text_source(body), tmp_path)
        assert found.missing == () and len(found.damaged) == 1
        with pytest.raises(UserError, match=said):
            ensure(text_source(body), tmp_path)
        assert path.read_bytes() == content and server.asked == []


def test_whole_files_are_only_read(server: Server, tmp_path: Path) -> None:
    """Planted bug: a lease next to existing data, which a read-only folder refuses."""
    body = b"numbers " * 1000
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "text.txt").write_bytes(body)
    before = [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))] + [tmp_path.stat().st_mtime_ns]
    assert ensure(text_source(body), tmp_path) == tmp_path / "texts"
    after = [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))] + [tmp_path.stat().st_mtime_ns]
    assert before == after and server.asked == []


def test_a_stop_ends_a_download_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    """Planted bug: Ctrl-C taken for a server's failure, so that the next address is tried."""
    body = b"numbers " * 1000
    server.files = {"/text/text.txt": body}
    with pytest.raises(Interrupted):
        ensure(text_source(body), tmp_path, stop=lambda: True)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------- prepare=true


def prepared(conf: Path, folder: Path, *words: str) -> str:
    printed = io.StringIO()
    data, out = f"data_dir={folder / 'data'}", f"output_dir={folder / 'out'}"
    experiment = load_experiment([data, out, "data=tiny", "allow=[fakeset]", "prepare=true", *words], conf)
    assert run(experiment, Console(printed)).status == "done"
    return printed.getvalue()


def test_prepare_fetches_and_lists_and_trains_nothing(server: Server, tmp_path: Path, monkeypatch) -> None:
    """Planted bugs: an absent partner that fails the whole; a cell or a network left behind."""
    conf, files = publish(server, tmp_path)
    monkeypatch.delitem(sys.modules, "fakeset", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    printed = prepared(conf, tmp_path)
    assert "ready (54 train, 6 validation, 20 test)" in printed
    for name, data in files.items():
        assert f"{tmp_path / 'data' / 'Tiny' / 'raw' / name}  {len(data):,} bytes" in printed
    assert "other: not available" in printed and "drawn by hand" in printed
    assert not (tmp_path / "out").exists()
    assert len(server.asked) == 4
    prepared(conf, tmp_path, "method=laplace_diag")
    assert len(server.asked) == 4
    server.files.clear()
    for path in (tmp_path / "data" / "Tiny" / "raw").iterdir():
        path.unlink()
    with pytest.raises(UserError, match="tiny is incomplete"):
        prepared(conf, tmp_path)
