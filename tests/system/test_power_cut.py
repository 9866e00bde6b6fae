"""A power cut on a real file system: what was acknowledged is there to the bit, and jobs end as if undisturbed."""

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.fake_engine import FakeEngine, fake_controller
from tests.support.files import begin, offset_of, patch
from tests.support.raw_http import lines_of
from tests.support.service_process import running_process
from tests.support.sessions import SessionClient
from tests.support.waiting import eventually

EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2  # linux/ext4.h
TEXT = b"The whale went down, and the ship went on towards the south, as she had done all day. " * 140
SECONDS = 120.0


class Disk:
    """An ext4 file system in a file, mounted at a folder."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.image, self.folder = image, folder

    def mount(self) -> None:
        """Attach it; the journal is replayed as after any power cut. A longer commit loses what nobody synced."""
        options = "loop,commit=300"
        subprocess.run(["mount", "-o", options, self.image, self.folder], check=True, capture_output=True)

    def cut(self) -> None:
        """From now on nothing reaches the disk, neither data nor the journal."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def unmount(self) -> None:
        """Detach it; what reached it is a copy, since a mount namespace of another test may still hold the one cut."""
        subprocess.run(["umount", self.folder], check=True, capture_output=True)
        kept = self.image.with_suffix(".kept")
        shutil.copyfile(self.image, kept)
        self.image = kept.rename(self.image)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk for the data of a service."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("mkfs.ext4", "mount", "umount"))):
        pytest.skip("needs root, mount, umount and mkfs.ext4 (apt-get install e2fsprogs mount)")
    disk = Disk(tmp_path / "disk.img", tmp_path / "data")
    disk.folder.mkdir()
    with disk.image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", disk.image], check=True)
    try:
        disk.mount()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs loop mounts of ext4: {error.stderr.decode(errors='replace').strip()}")
    yield disk
    disk.unmount()


def job(url: str, name: str) -> dict[str, object]:
    """How a job stands: its status, and the rows that are safe."""
    told = httpx.get(f"{url}/v1/jobs/{name}", timeout=SECONDS).json()
    return {"status": told["status"], "rows": told["progress"]["rows"], "error": told["error"]}


def test_what_was_acknowledged_outlives_a_power_cut(tmp_path: Path, disk: Disk) -> None:
    """Files, uploads, sessions, states and results are the same; jobs go on to the rows of an undisturbed encoding."""
    engine = FakeEngine(credit=5000, stingy=True, keep=False)
    with fake_controller(engine, f"ipc://{tmp_path}/c") as address:
        with running_process(tmp_path, address, checkpoint_tokens="1024") as (process, url):
            eventually(lambda: httpx.get(f"{url}/readyz", timeout=SECONDS).is_success, "it to be ready", SECONDS)
            client, jobs = SessionClient(url, seconds=SECONDS), f"{url}/v1/jobs?window=64"
            form = {"data": {"purpose": "user_data"}, "files": {"file": ("book", TEXT, "text/plain")}}
            file = httpx.post(f"{url}/v1/files", timeout=SECONDS, **form).json()["id"]
            upload = begin(url, len(TEXT)).removeprefix(url)
            assert patch(url + upload, 0, TEXT[:7000]).status_code == 204
            session, copy = client.make(), client.make()
            client.append(session, TEXT[:3000])
            assert client.put(f"/v1/sessions/{copy}/state", content=client.state(session).content).status_code == 200
            done = httpx.post(jobs, content=TEXT[:900], timeout=SECONDS).json()["id"]
            drawn = {"completion": {"prompt": "say", "max_tokens": 20}}
            told = httpx.post(f"{url}/v1/jobs", json=drawn, timeout=SECONDS).json()["id"]
            for name in (done, told):
                eventually(lambda name=name: job(url, name)["status"] == "succeeded", "a job to end", SECONDS)
            by_body = httpx.post(jobs, content=TEXT, timeout=SECONDS).json()["id"]
            by_file = httpx.post(f"{url}/v1/jobs", json={"file_id": file, "window": 64}, timeout=SECONDS).json()["id"]
            for name in (by_body, by_file):
                eventually(lambda name=name: job(url, name)["rows"] == 78, "the first rows to be safe", SECONDS)
            kept = [f"/v1/files/{file}/content", f"/v1/jobs/{done}/result", f"/v1/jobs/{told}/result"]
            kept += [f"/v1/sessions/{name}/state" for name in (session, copy)]
            waits = httpx.post(jobs, content=TEXT * 15, timeout=SECONDS).json()["id"]
            before = [client.get(path).content for path in kept]
            disk.cut()
            process.kill()
            process.wait()
        disk.unmount()
        disk.mount()
        engine.stingy, read = False, engine.sessions.read
        with running_process(tmp_path, address, checkpoint_tokens="1024") as (_, url):
            client = SessionClient(url, seconds=SECONDS)
            for name in (by_body, by_file, waits):
                eventually(lambda name=name: bool(job(url, name)["error"]) or job(url, name)["status"] == "succeeded",
                           "a job to end", SECONDS)  # fmt: skip
                assert job(url, name)["error"] is None
            assert engine.sessions.read - read == 2 * (len(TEXT) - 4096) + 15 * len(TEXT)
            assert [client.get(path).content for path in kept] == before
            for name, text in ((by_body, TEXT), (by_file, TEXT), (waits, TEXT * 15)):
                rows = lines_of(client.get(f"/v1/jobs/{name}/result").content)
                assert rows == lines_of(client.post("/v1/encodings?window=64", content=text).content)
            assert offset_of(url + upload) == 7000
            last = patch(url + upload, 7000, TEXT[7000:])
            assert client.get(f"/v1/files/{last.headers['upload-file-id']}/content").content == TEXT
