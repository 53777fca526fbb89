"""`make kill`: commands that are killed at every file operation and at random moments, and then go on.

    python tests/kill.py [--times N] [WORD ...]      N kills at random moments each (50), and only these commands

Each command runs in a child process, which kills itself (SIGKILL) just before its k-th operation on files, for every k,
or is killed from outside after a random time. Another child goes on with it: `--resume`, else `--overwrite`. The folder
must then be that of a command that nobody killed, byte by byte, without leftovers; times are left out (`tree`). Then
the disk is full (a small tmpfs) at several sizes, and read-only: an error in one line, and the same folder afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate")
TIMED = ("seconds", "seconds_a_sample", "watch_seconds", "minutes", "environment", "time", "steps_a_second")
"""Keys of records that differ between two runs of the same."""
IN_TEXT = re.compile(r"^.*(?:minutes|seconds|\| 1 \|).*$", re.MULTILINE)
"""Lines of cards and pages that say how long something took."""
HELD = ".lock"
REFUSED = 2  # the exit status of a command that has nothing to go on from yet
FULL_SIZES = 12
PAGE = 4096
ROOM = 64 << 20
COLUMNS = ("command", "file operations", "random moments", "started anew", "disk full", "read-only", "wrong")


@dataclass(frozen=True)
class Run:
    """A command by its words, the name of its output, and whether it goes on with --resume."""

    name: str
    words: list[str]
    out: str = "out"
    resumes: bool = True

    def call(self, folder: Path, *more: str) -> tuple[int, str]:
        """Run it in this process: the exit status, and what it said."""
        os.environ["MMDGS_CACHE"] = str(folder / "cache")
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                command_line()([*self.words, "--out", str(folder / self.out), *more])
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
                status = 1
        return status, said.getvalue()


@cache
def command_line() -> Any:
    """`mmdgs`, built once."""
    import typer

    from mmdgs import cli

    return typer.main.get_command(cli.app)


def runs(made: Path) -> list[Run]:
    """The commands, and in `made` what they read: tiny models, images, MNIST's files with other images."""
    import torch
    from fakes import fake_known, fake_script
    from nets import random_images, tiny_pipeline
    from PIL import Image
    from toy_models import many_level_model

    from mmdgs.lab import digs
    from mmdgs.metrics import inception_file

    digits = random_images(24, (1, 28, 28)).numpy().tobytes()
    for prefix in ("train", "t10k"):
        (made / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, 24, 28, 28) + digits)
        (made / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 24) + bytes(range(8)) * 3)
    for name, seed in (("samples", 1), ("reference", 2)):
        (made / name).mkdir()
        for i, image in enumerate(random_images(12, seed=seed)):
            Image.fromarray(image[0].numpy()).save(made / name / f"{i:02}.png")
    model = str(many_level_model().save_pretrained(made / "model"))
    tiny_pipeline().save_pretrained(made / "pickled")
    weights = made / "pickled" / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save(tiny_pipeline().unet.state_dict(), weights.with_suffix(".bin"))
    weights.unlink()
    inception_file.KNOWN = fake_known()
    digs.QUICK = digs.DigsSettings(chains=3, states=4, sweeps=1, seeds=2)

    cpu = ["--device", "cpu", "--quiet"]
    sample = ["sample", model, "--n", "6", "--batch-size", "2", "--sampler", "ddim", "--steps", "2", *cpu]
    keys = ["steps=3", "checkpoint_every=1", "validate_every=2", "ema=0.9"]
    points = ["network.width=2", "network.depth=1", "limit=1000", "batch_size=1000", *keys]
    mnist = ["network.multipliers=[1]", "limit=16", "batch_size=4", *keys]
    train = ["train", "--sigma", "0.5", "--param", "clean", *cpu]
    images = [model, str(made / "samples"), "--simulate", "--n", "3", "--draws", "2"]
    measures = ["--reference", str(made / "reference"), "--metrics", "fid,kid,diversity"]
    rows = [word for row in (digs.DRAWS, digs.ONE_LEVEL, digs.MOMENTS) for word in ("--only", row)]
    return [
        Run("train, 2-D", [*train, "--data", "mog", "--model", "mlp", *_set(points)]),
        Run("train, MNIST", [*train, "--data", "mnist", "--data-dir", str(made), "--size", "8", "--model", "unet-tiny",
             *_set(mnist)]),
        Run("sample, folder", sample),
        Run("sample, npz", sample, "x.npz"),
        Run("sample, npz of floats", [*sample, "--float"], "x.npz"),
        Run("sample, png", sample, "x.png"),
        Run(
            "evaluate",
            ["evaluate", str(made / "samples"), *measures, "--inception", str(fake_script(made / "fake.pt")), *cpu],
            "e.json",
            resumes=False,
        ),
        Run(
            "restore",
            ["restore", *images, "--operator", "box:4", "--noise", "0.1", "--covariance", "diagonal", "--steps", "2",
             "--batch-size", "2", *cpu],
        ),
        Run("reproduce", ["reproduce", "digs", "--quick", *rows, *cpu]),
        Run("convert", ["convert", str(made / "pickled")], resumes=False),
        Run("export", ["export", model], resumes=False),
    ]  # fmt: skip


def _set(keys: list[str]) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


def writes_to(folder: str, event: str, args: tuple[Any, ...]) -> bool:
    """Whether an audited event creates, renames, removes or changes a file below a folder."""
    if event == "open":
        flags = args[2] if isinstance(args[2], int) else 0
        return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) and str(args[0]).startswith(folder)
    # Names inside a folder that is being removed are relative to it.
    return event in EVENTS and (str(args[0]).startswith(folder) or not str(args[0]).startswith("/"))


class Counter:
    """Counts operations on files below a folder, and kills the process before the k-th."""

    def __init__(self, folder: Path, at: int | None) -> None:
        self.folder, self.at, self.count = str(folder), at, 0
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if writes_to(self.folder, event, args):
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit status (negative: the signal), what it said, its operations and seconds."""

    status: int
    said: str
    operations: int
    seconds: float


def child(run: Run, folder: Path, *more: str, at: int | None = None, after: float | None = None) -> Ended:
    """Run a command in a child, which is killed before an operation or after some seconds if it is told so."""
    note = folder.with_suffix(".note")
    note.unlink(missing_ok=True)
    started, pid = time.monotonic(), os.fork()
    if pid == 0:
        status = 1
        try:
            counter = Counter(folder, at)
            status, said = run.call(folder, *more)
            note.write_text(json.dumps([counter.count, said]))
        finally:
            os._exit(status)
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    _, waited = os.waitpid(pid, 0)
    status = os.waitstatus_to_exitcode(waited)
    whole = status >= 0 and note.exists()  # a child that was killed may have been writing it
    operations, said = json.loads(note.read_text()) if whole else (0, "")
    return Ended(status, said, operations, time.monotonic() - started)


def tree(folder: Path) -> dict[str, Any]:
    """All files of a folder by name, records and pages without times; folders too, so that empty ones are seen."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == HELD or "tensorboard" in name:
            continue
        if path.is_dir():
            found[name] = "folder"
        elif path.suffix in (".json", ".jsonl"):
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            found[name] = [_untimed(json.loads(line)) for line in lines]
        else:
            found[name] = IN_TEXT.sub("", path.read_text()) if path.suffix in (".md", ".html") else path.read_bytes()
    return found


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untimed(one) for key, one in value.items() if key not in TIMED}
    return [_untimed(one) for one in value] if isinstance(value, list) else value


def difference(found: dict[str, Any], whole: dict[str, Any]) -> str | None:
    left, lost = sorted(found.keys() - whole.keys()), sorted(whole.keys() - found.keys())
    changed = [name for name in found if name in whole and found[name] != whole[name]]
    if not (left or lost or changed):
        return None
    return f"left behind {left[:3]}, lost {lost[:3]}, changed {changed[:3]}"


class Trial:
    """All kills of one command in a folder, which has the same name each time: some records hold it."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder, self.anew, self.wrong = run, folder, 0, list[str]()
        self.emptied()
        run.call(folder)  # once in this process, which then has imported all that its children need
        gc.collect()
        gc.freeze()  # so that children do not copy what is there
        found = []
        for _ in range(2):
            self.emptied()
            self.plain = child(run, folder)
            assert self.plain.status == 0, f"{run.name} failed without a kill: {self.plain.said}"
            found.append(tree(folder))
        self.whole = found[0]
        assert difference(*found) is None, f"{run.name} twice is not the same: {difference(*found)}"

    def emptied(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def compare(self, name: str) -> None:
        """Go on, and compare with the whole run."""
        ended = child(self.run, self.folder, "--resume") if self.run.resumes else None
        if ended is None or ended.status == REFUSED:
            self.anew += ended is not None
            ended = child(self.run, self.folder, "--overwrite")
        said = difference(tree(self.folder), self.whole) if ended.status == 0 else f"it ended with {ended}"
        if said:
            self.wrong.append(f"{name}: {said}")

    def kills(self, times: int, rng: random.Random) -> None:
        for at in range(1, self.plain.operations + 1):
            self.emptied()
            child(self.run, self.folder, at=at)
            self.compare(f"operation {at} of {self.plain.operations}")
        for _ in range(times):
            self.emptied()
            after = rng.random() * self.plain.seconds
            child(self.run, self.folder, after=after)
            self.compare(f"after {after:.3f} s of {self.plain.seconds:.3f}")

    def bad_disks(self) -> tuple[int, int] | None:
        """Full and read-only disks: how many of each; None where a file system cannot be mounted here."""
        self.emptied()
        used = sum(-(-path.stat().st_size // PAGE) for path in self._whole_again() if path.is_file())
        self.emptied()
        if not _mounted("-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(self.folder)):
            return None
        try:
            # Parts and temporary files come on top of what is there at the end.
            sizes = sorted({max(1, round(2 * used * share / FULL_SIZES)) for share in range(1, FULL_SIZES + 1)})
            for pages in sizes:
                self.emptied()
                self._remounted(f"size={pages * PAGE}")
                self._must_say(child(self.run, self.folder), f"a disk of {pages} pages", "No space left", may_end=True)
                self._remounted(f"size={ROOM}")
                self.compare(f"after a disk of {pages} pages")
            for name, at in (("before the start", None), ("half way", self.plain.operations // 2)):
                self.emptied()
                if at is not None:
                    child(self.run, self.folder, at=at)
                before = tree(self.folder)
                self._remounted("ro")
                more = () if at is None else ("--resume",) if self.run.resumes else ("--overwrite",)
                self._must_say(child(self.run, self.folder, *more), f"read-only {name}", "Read-only file system")
                if said := difference(tree(self.folder), before):
                    self.wrong.append(f"read-only {name}: {said}")
                self._remounted("rw")
                self.compare(f"after read-only {name}")
            return len(sizes), 2
        finally:
            subprocess.run(["umount", str(self.folder)], check=True)

    def _whole_again(self) -> list[Path]:
        child(self.run, self.folder)
        return [*self.folder.rglob("*")]

    def _remounted(self, how: str) -> None:
        assert _mounted("-o", f"remount,{how}", str(self.folder)), f"remount,{how} failed"

    def _must_say(self, ended: Ended, name: str, reason: str, *, may_end: bool = False) -> None:
        """A command that cannot write ends with status 1 or 2 and one error that has the reason and the folder."""
        fine = "error: " in ended.said and reason in ended.said and self.folder.name in ended.said
        fine = fine and ended.status in (1, 2) and "Traceback" not in ended.said
        if not fine and not (may_end and ended.status == 0):
            self.wrong.append(f"{name}: it ended with {ended.status} and said {ended.said[-300:]!r}")


def _mounted(*words: str) -> bool:
    try:
        return subprocess.run(["mount", *words], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--times", type=int, default=50)
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from tqdm import tqdm

    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own lock is shared by forks: a child killed with it would stop all others
    logging.disable(logging.CRITICAL)
    failed, started = False, time.monotonic()
    memory = Path("/dev/shm")  # where writes do not wait for a disk
    with tempfile.TemporaryDirectory(prefix="kill-", dir=memory if memory.is_dir() else None) as folder:
        made = Path(folder, "made")
        made.mkdir()
        chosen = [one for one in runs(made) if not options.words or any(word in one.name for word in options.words)]
        print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
        for run in chosen:
            trial = Trial(run, Path(folder, run.name.replace(", ", "-").replace(" ", "-")))
            trial.kills(options.times, random.Random(run.name))
            full, read_only = trial.bad_disks() or ("not possible", "not possible")
            failed = failed or bool(trial.wrong)
            cells = (trial.plain.operations, options.times, trial.anew, full, read_only, len(trial.wrong))
            print(f"| {run.name} | {' | '.join(map(str, cells))} |", flush=True)
            for said in trial.wrong[:8]:
                print(f"FAILED {said}", flush=True)
    print(f"{(time.monotonic() - started) / 60:.0f} minutes")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
